"""The options of ``vlm-batch run`` and ``vlm-batch demo``."""

from __future__ import annotations

import argparse

from vlm_batch.cli.cluster import add_cluster
from vlm_batch.cli.model import add_batcher, add_model, at_least
from vlm_batch.cli.watching import SHOWN_ROWS
from vlm_batch.jobs.questions import DEFAULT_PROMPT
from vlm_batch.jobs.sinks import FORMS
from vlm_batch.jobs.sources import DEFAULT_DPI
from vlm_batch.types import SamplingParams

#: Columns that options can name.
COLUMNS = ("image", "video", "audio", "id", "prompt")
#: Everyday options and examples of ``run``.
EVERYDAY = (
    (
        *(
            "paths",
            "--model",
            "--prompt",
            "--out",
            "--resume",
            "--overwrite",
            "--retry-errors",
            "--columns",
        ),
        *(
            "--json-schema",
            "--sidecar",
            "--max-tokens",
            "--max-pixels",
            "--dry-run",
            "--verbose",
        ),
    ),
    (
        'vlm-batch run photos/ --model MODEL --prompt "Describe the picture." --out answers.jsonl',
        'vlm-batch run photos/ --model MODEL --prompt "Describe the picture." --out answers.jsonl --resume',
        'vlm-batch run receipts.csv --model MODEL --prompt "What was paid?" --json-schema receipt.json --out paid.csv',
    ),
)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a picture, video, recording, PDF, folder, pattern or URL; a table (.jsonl, .csv, .tsv, .parquet), an archive "
        "(.tar) or a folder of the datasets library; - reads JSON lines or paths from standard input",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"the question, with {{column}} for a row's own; several ask each row each (default: {DEFAULT_PROMPT})",
    )
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="a question from a file"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system prompt, with {column} likewise"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="have a model that can think do so, or not (default: as its chat template has it)",
    )
    add_model(parser, "needed to keep answers; else the embedded sample")
    reading = parser.add_argument_group("what is read")
    reading.add_argument(
        "--recursive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look into folders in folders (default: yes)",
    )
    reading.add_argument(
        "--videos", action="store_true", help="look for videos in folders, too"
    )
    reading.add_argument(
        "--audios", action="store_true", help="look for recordings in folders, too"
    )
    reading.add_argument(
        "--pdf", action="store_true", help="look for PDF files in folders, too"
    )
    for option, kind, default, metavar, said in (
        ("--dpi", at_least(1), DEFAULT_DPI, "N", "of PDF pages (default: %(default)s)"),
        (
            "--fps",
            float,
            None,
            "R",
            "frames a second of a video (default: the family's habit)",
        ),
        (
            "--max-frames",
            at_least(1),
            None,
            "N",
            "most frames of a video (default: likewise)",
        ),
    ):
        reading.add_argument(
            option, type=kind, default=default, metavar=metavar, help=said
        )
    for what in COLUMNS:
        reading.add_argument(
            f"--{what}-column",
            metavar="NAME",
            help=f"the column of a table that holds the {what}; '' for none",
        )
    reading.add_argument(
        "--split",
        metavar="NAME",
        help="of a folder of the datasets library (default: all)",
    )
    reading.add_argument(
        "--shard",
        metavar="I/N",
        help="only part I of N (from 1), by the rows' ids; auto: under mlx.launch, a part for each process",
    )
    reading.add_argument(
        "--dry-run",
        action="store_true",
        help="show the first prompts, sizes and an estimate, and stop",
    )
    add_cluster(parser.add_argument_group("several machines"))
    _add_answering(parser)


def add_demo(parser: argparse.ArgumentParser) -> None:
    _add_answering(parser)
    parser.set_defaults(
        prompt=None,
        prompt_file=None,
        model=None,
        trust_remote_code=False,
        shard=None,
        dry_run=False,
        dpi=None,
        fps=None,
        max_frames=None,
    )


def _add_answering(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--sampling",
        choices=("greedy", "recommended"),
        default="greedy",
        help="what the options below do not say: greedy, or as the model's generation_config.json recommends "
        "(default: %(default)s)",
    )
    for option, kind, metavar, said in (
        ("--max-tokens", int, "N", f"longest answer (default: {defaults.max_tokens})"),
        ("--temperature", float, "T", f"0 is greedy (default: {defaults.temperature})"),
        ("--top-p", float, "P", f"1 is off (default: {defaults.top_p})"),
        ("--top-k", int, "K", f"0 is off (default: {defaults.top_k})"),
        ("--min-p", float, "P", f"0 is off (default: {defaults.min_p})"),
        ("--repetition-penalty", float, "P", "of words that come again; 1 is off"),
        (
            "--no-repeat-ngram-size",
            int,
            "N",
            "no N tokens of an answer twice; 0 is off",
        ),
        (
            "--window-size",
            int,
            "N",
            "number of last tokens in which they are looked for (default: all)",
        ),
        ("--seed", int, "N", "makes sampled answers reproducible, whatever the batch"),
    ):
        sampling.add_argument(option, type=kind, metavar=metavar, help=said)
    sampling.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text that ends an answer; several may be given",
    )
    sampling.add_argument(
        "--skip-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="leave special tokens such as <|box_start|> out of answers, or show them (default: as the model needs)",
    )
    sampling.add_argument(
        "--thinking-budget",
        type=at_least(0),
        metavar="N",
        help="most tokens of thinking",
    )
    form = parser.add_argument_group("the form of answers (one at most)")
    form.add_argument(
        "--json-schema",
        metavar="FILE",
        help="answers are JSON that follows this schema; --columns may name the fields of its object",
    )
    form.add_argument(
        "--regex", metavar="PATTERN", help="answers match a regular expression"
    )
    form.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="answers are one of these texts",
    )
    add_batcher(parser.add_argument_group("the batch and its memory"))
    _add_writing(parser.add_argument_group("what is written"))
    parser.add_argument(
        "--max-errors",
        type=at_least(0),
        default=0,
        metavar="N",
        help="exit with 0 if no more than N fail (default: 0)",
    )
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument(
        "--quiet", action="store_true", help="show no line for each answer"
    )
    lines.add_argument(
        "--verbose",
        action="store_true",
        help=f"show a line for each answer, also beyond {SHOWN_ROWS} rows",
    )


def _add_writing(writing: argparse._ArgumentGroup) -> None:
    writing.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="the answers as they come, by the suffix: .jsonl, .ndjson or none for JSON lines, .csv, .tsv, .parquet; - is "
        "standard output; {shard} is the shard's number",
    )
    writing.add_argument(
        "--format",
        choices=tuple(FORMS),
        help="the output's form, whatever its suffix; openai-batch: the lines of a batch of OpenAI's",
    )
    writing.add_argument(
        "--sidecar",
        metavar="SUFFIX",
        help="a text file beside each picture, such as .txt",
    )
    writing.add_argument(
        "--columns",
        type=lambda text: tuple(
            name.strip() for name in text.split(",") if name.strip()
        ),
        metavar="A,B",
        help="fields of the answers and columns of the rows, in this order (id and error are always there)",
    )
    writing.add_argument(
        "--spreadsheet-safe",
        action=argparse.BooleanOptionalAction,
        help="a ' before cells of .csv and .tsv that a spreadsheet would run as formulas (default: yes)",
    )
    for option, said in (
        ("--resume", "go on where the run that wrote the output ended"),
        ("--overwrite", "replace what the output has already"),
        ("--retry-errors", "go on, and ask rows again that failed"),
        ("--force", "with --resume: also with other settings than the first run's"),
    ):
        writing.add_argument(option, action="store_true", help=said)
    writing.add_argument(
        "--report",
        metavar="FILE",
        help="a page (HTML, offline) with plots, failures and a sample of answers",
    )
