"""The options of ``vlm-batch run``, ``demo`` and ``read``, each declared once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_batch.cli.cluster import add_cluster
from vlm_batch.cli.model import UsageError, add_batcher, add_model, at_least
from vlm_batch.cli.watching import SHOWN_ROWS
from vlm_batch.jobs.questions import DEFAULT_PROMPT
from vlm_batch.jobs.sinks import FORMS
from vlm_batch.jobs.sources import DEFAULT_DPI
from vlm_batch.parameters import Declared, RealNumber, TrueOrFalse, WholeNumber
from vlm_batch.types import FORMS as TEXT_FORMS
from vlm_batch.types import SAMPLING_PARAMETERS

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
        default=[],
        metavar="TEXT",
        help=f"the question, with {{column}} for a row's own; several ask each row each (default: {DEFAULT_PROMPT})",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a question from a file",
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
    add_recursive(reading)
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
        prompt=[],
        prompt_file=[],
        model=None,
        trust_remote_code=False,
        shard=None,
        dry_run=False,
        dpi=None,
        fps=None,
        max_frames=None,
    )


def _add_answering(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--sampling",
        choices=("greedy", "recommended"),
        default="greedy",
        help="what the options below do not say: greedy, or as the model's generation_config.json recommends "
        "(default: %(default)s)",
    )
    add_sampling(sampling)
    form = parser.add_argument_group("the form of answers (one at most)")
    for one in SAMPLING_PARAMETERS:
        if one.name in TEXT_FORMS:
            _add_parameter(form, one)
    add_batcher(parser.add_argument_group("the batch and its memory"))
    _add_writing(parser.add_argument_group("what is written"))
    add_ending(parser, "answer", f"also beyond {SHOWN_ROWS} rows")


def add_sampling(
    group: argparse._ArgumentGroup, defaults: Mapping[str, Any] | None = None
) -> None:
    """Add the flags of ``SamplingParams`` that say how tokens are chosen and where answers end.

    Args:
        group: Where the flags go.
        defaults: Defaults that ``--help`` says in the place of the parameters' own, by name; where these are given, the
            others' are not said.
    """
    for one in SAMPLING_PARAMETERS:
        if one.name in TEXT_FORMS or one.flag is None:
            continue
        if defaults is None:
            _add_parameter(group, one)
        elif one.name in defaults:
            _add_parameter(group, replace(one, default=defaults[one.name]))
        else:
            _add_parameter(
                group, replace(one, flag=replace(one.flag, says_default=False))
            )


def _add_parameter(group: argparse._ArgumentGroup, one: Declared) -> None:
    """Add a parameter's flag, if it has one; a flag that is not given is None."""
    flag = one.flag
    if flag is None:
        return
    said = f"{flag.help} (default: {one.default})" if flag.says_default else flag.help
    add = partial(
        group.add_argument, f"--{one.name.replace('_', '-')}", default=None, help=said
    )
    if isinstance(one.check, TrueOrFalse):
        add(action=argparse.BooleanOptionalAction)
        return
    kind = _NUMBERS.get(type(one.check), str)
    action = "append" if flag.is_repeated else "store"
    add(type=kind, action=action, metavar=flag.metavar)


#: Checks of numbers -> how their flags are parsed.
_NUMBERS: Mapping[type, type] = {WholeNumber: int, RealNumber: float}


def said_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the command line says, files read."""
    said = {}
    for one in SAMPLING_PARAMETERS:
        value = vars(args).get(one.name)
        if one.flag is None or value is None:
            continue
        said[one.name] = text_of(value) if one.flag.metavar == "FILE" else value
    return said


def text_of(file: str) -> str:
    """Return what a file holds. Raises UsageError."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def add_recursive(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recursive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look into folders in folders (default: yes)",
    )


def add_going_on(
    group: argparse._ArgumentGroup, *, resume: str, retry_errors: str
) -> None:
    """Add what becomes of an earlier run's answers."""
    for option, said in (
        ("--resume", resume),
        ("--overwrite", "replace what the output has already"),
        ("--retry-errors", retry_errors),
        ("--force", "with --resume: also with other settings than the first run's"),
    ):
        group.add_argument(option, action="store_true", help=said)


def add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--report",
        metavar="FILE",
        help="a page (HTML, offline) with plots, failures and a sample of answers",
    )


def add_ending(parser: argparse.ArgumentParser, line: str, verbose: str) -> None:
    """Add the exit status, and how much is shown.

    Args:
        parser: The command's.
        line: What a shown line is about.
        verbose: When ``--verbose`` shows more than is usual.
    """
    parser.add_argument(
        "--max-errors",
        type=at_least(0),
        default=0,
        metavar="N",
        help="exit with 0 if no more than N fail (default: 0)",
    )
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument(
        "--quiet",
        action="store_true",
        help="show the totals alone, and the answers only where no file has them",
    )
    lines.add_argument(
        "--verbose", action="store_true", help=f"show a line for each {line}, {verbose}"
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
    add_going_on(
        writing,
        resume="go on where the run that wrote the output ended",
        retry_errors="go on, and ask rows again that failed",
    )
    add_report(writing)
