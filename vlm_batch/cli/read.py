"""``vlm-batch read``: documents to texts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_batch.assets import sample_model
from vlm_batch.cli.console import plain_text
from vlm_batch.cli.ending import Signals
from vlm_batch.cli.job import (
    AskedJob,
    check_report,
    run_shown,
    say_skipped,
    status_of,
    write_report,
)
from vlm_batch.cli.model import (
    OpenBatcher,
    UsageError,
    add_batcher,
    add_model,
    at_least,
)
from vlm_batch.cli.options import (
    add_ending,
    add_going_on,
    add_recursive,
    add_report,
    add_sampling,
    said_sampling,
    text_of,
)
from vlm_batch.cli.watching import JobView
from vlm_batch.inputs.images import DEFAULT_MAX_PIXELS
from vlm_batch.jobs.boxes import BOX_FORMS, BoxForm
from vlm_batch.jobs.documents import DOCUMENT_FORMS, Documents, PageText
from vlm_batch.jobs.pages import ChosenPages, EnlargedPages, Enlarging, PageRange
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.publishers import (
    PLAIN_PROMPTS,
    SAMPLE,
    TASKS,
    UNKNOWN,
    Publisher,
    publisher_of,
)
from vlm_batch.jobs.questions import Item, Questions
from vlm_batch.jobs.rows import InvalidJob, JobRow, Shard, Source, count_of
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import DEFAULT_DPI, Files, Pdf, Reading, open_sources
from vlm_batch.types import Result, SamplingParams

#: Tokens of a page, where nobody says how many: a dense one has 2,000.
MAX_TOKENS = 4096
EVERYDAY = (
    (
        "paths",
        "--model",
        "--out",
        "--task",
        "--pages",
        "--format",
        "--resume",
        "--overwrite",
        "--retry-errors",
        "--report",
    ),
    (
        "vlm-batch read letters/ --model MODEL --out texts",
        "vlm-batch read book.pdf --model MODEL --out texts --pages 1-20,35",
        "vlm-batch read scans/ --model MODEL --out texts --resume",
    ),
)


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    with Signals(os.path.join(args.out, "read.log")) as signals:
        return _read(args, open_batcher, signals)


def _read(args: argparse.Namespace, open_batcher: OpenBatcher, signals: Signals) -> int:
    model = str(args.model or sample_model())
    publisher = (
        SAMPLE if args.model is None else publisher_of(model, _model_type(model))
    )
    questions = _questions(args, publisher)
    enlarging = _enlarging(args, publisher)
    sources = _sources(args, publisher, enlarging)
    check_report(args.report, None)
    folder = Path(args.out).expanduser()
    documents = Documents(
        folder,
        lambda: Job(sources, questions, Sink()),
        form=args.format,
        has_marks=args.marks,
        facts={
            "model": Path(model).name,
            "task": _task(args, publisher),
            "prompt": questions.prompts[0],
        },
        boxes=_boxes(args, publisher) if args.boxes else None,
    )
    print(f"vlm-batch: {_how_it_asks(args, publisher)}", file=sys.stderr)
    job = AskedJob(
        sources=sources,
        sink=documents,
        questions=questions,
        shard=Shard(),
        settings={
            "model": model,
            "dpi": args.dpi,
            "longest": _longest(args, publisher),
            "pages": str(args.pages),
            "enlarged": None if enlarging is None else str(enlarging),
        },
        kept_in=documents.name,
        is_kept=True,
    )
    view = JobView(
        table_to=sys.stdout,
        quiet=args.quiet,
        verbose=args.verbose,
        answers_in=str(folder),
        goes_on=True,
    )
    summary = run_shown(job, args, open_batcher, view, signals)
    _say_what_was_written(documents, folder)
    write_report(job, args, summary)
    return status_of(args, summary, signals)


def _model_type(model: str) -> str | None:
    """Return a local model's type; of a model on the hub the name must do."""
    try:
        config = json.loads(
            (Path(model).expanduser() / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, Mapping) else None


def _task(args: argparse.Namespace, publisher: Publisher) -> str:
    """Return what pages are asked for: by default the publisher's first task."""
    if args.task is None and args.boxes:
        return _boxes(args, publisher).tasks[0]
    prompts = publisher.prompts
    if args.task is None:
        return next(iter(prompts))
    if args.task not in prompts:
        raise UsageError(
            f"--task {args.task}: nobody says how to ask {Path(args.model or sample_model()).name} for that; it knows "
            f"{', '.join(prompts)}, and --prompt asks anything"
        )
    return str(args.task)


def _boxes(args: argparse.Namespace, publisher: Publisher) -> BoxForm:
    """Return how the model writes boxes. Raises UsageError if it writes none, or none for what is asked."""
    boxes = publisher.boxes
    model = Path(args.model or sample_model()).name
    if boxes is None:
        raise UsageError(
            f"--boxes: nobody says how {model} writes boxes; models are known whose names hold {', '.join(BOX_FORMS)}"
        )
    if args.task is not None and args.task not in boxes.tasks:
        raise UsageError(
            f"--boxes: {model} writes none for --task {args.task}, but for {', '.join(boxes.tasks)}"
        )
    return boxes


def _prompt(args: argparse.Namespace, publisher: Publisher) -> str:
    if args.prompt is not None and args.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file say the same; give one")
    if args.prompt_file is not None:
        return text_of(args.prompt_file).strip()
    if args.prompt is not None:
        return str(args.prompt)
    return publisher.prompts[_task(args, publisher)]


def _questions(args: argparse.Namespace, publisher: Publisher) -> Questions:
    prompt = _prompt(args, publisher)
    params = _params(said_sampling(args), publisher)
    # Braces of a publisher's prompt are no columns. A page that is asked alone has a chat of its own (``_PagesAlone``).
    text = prompt.replace("{", "{{").replace("}", "}}")
    return Questions(
        (text or "(the page alone)",), args.system, params, again=_Again(publisher)
    )


def _params(said: Mapping[str, Any], publisher: Publisher) -> SamplingParams:
    """Return the publisher's sampling, but for what the command line says."""
    published = dict(publisher.params)
    if said.get("no_repeat_ngram_size") == 0:  # what belongs to it goes with it
        published.pop("window_size", None)
        published.pop("whitelist_token_ids", None)
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **published, **said})


def _how_it_asks(args: argparse.Namespace, publisher: Publisher) -> str:
    if args.prompt is not None or args.prompt_file is not None:
        return "pages are asked what --prompt says"
    task = _task(args, publisher)
    if publisher is UNKNOWN:
        return f"the publisher of this model is not known: pages are asked for {task} in plain words; --prompt asks otherwise"
    if publisher.prompts[task] == PLAIN_PROMPTS.get(task):
        return f"the publisher of this model names no words: pages are asked for {task} in plain ones; --prompt asks otherwise"
    return (
        f"pages are asked for {task} as the model's publisher does ({publisher.source})"
    )


def _longest(args: argparse.Namespace, publisher: Publisher) -> int | None:
    """Return the publisher's size of a rendered page, where --dpi says nothing."""
    return publisher.longest if args.dpi is None else None


def _enlarging(args: argparse.Namespace, publisher: Publisher) -> Enlarging | None:
    """Return how the publisher enlarges small pages for its own question; ``--min-pixels`` and ``--max-pixels`` overrule."""
    if args.prompt is not None or args.prompt_file is not None:
        return None
    found = publisher.enlarging.get(_task(args, publisher))
    if found is None or vars(args).keys().isdisjoint(("min_pixels", "max_pixels")):
        return found
    return replace(found, bounds=None)


def _sources(
    args: argparse.Namespace, publisher: Publisher, enlarging: Enlarging | None
) -> list[Source]:
    if "-" in args.paths:
        raise UsageError("read takes documents by their names; - is no name")
    dpi = DEFAULT_DPI if args.dpi is None else args.dpi
    opened, found = open_sources(
        args.paths, Reading(recursive=args.recursive, pdfs=True, dpi=dpi)
    )
    say_skipped(found)
    sources = [
        one for source in opened for one in _paged(source, _longest(args, publisher))
    ]
    if args.pages is not None:
        sources = [ChosenPages(one, args.pages) for one in sources]
    if enlarging is not None:
        most = vars(args).get("max_image_pixels", DEFAULT_MAX_PIXELS)
        sources = [EnlargedPages(one, enlarging, most) for one in sources]
    if _prompt(args, publisher) == "":
        sources = [_PagesAlone(source) for source in sources]
    return sources


def _paged(source: Source, longest: int | None) -> Iterator[Source]:
    """Yield a source's documents. Raises InvalidJob for tables and archives."""
    if isinstance(source, Pdf):
        yield replace(source, longest=longest)
        return
    if not isinstance(source, Files):
        raise InvalidJob(
            f"{source.name} holds rows, not pages: vlm-batch run asks about them"
        )
    for path in source.paths:
        yield replace(source, paths=(path,))


class _PagesAlone(Source):
    """A source's pages, asked without a text beside them, as some publishers do."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def numbered(self) -> bool:
        return self._inner.numbered

    def rows(self) -> Iterator[JobRow]:
        alone = ({"role": "user", "content": [{"type": "image"}]},)
        return (
            row if row.error is not None else replace(row, messages=alone)
            for row in self._inner.rows()
        )


class _Again:
    """Asks pages once more that ended by their length in a loop."""

    def __init__(self, publisher: Publisher) -> None:
        self._params = publisher.again

    def __call__(self, item: Item, result: Result) -> Item | None:
        page = PageText(None, result.text, result.error, result.finish_reason)
        if not page.repeats:
            return None
        return replace(item, params=replace(item.params, **self._params))


def _say_what_was_written(documents: Documents, folder: Path) -> None:
    print(f"{count_of(documents.num_written, 'document')} written to {folder}")
    for lacking in documents.lacking:
        # a name may hold control characters
        print(plain_text(lacking.said().replace("\n", " ")))
    if documents.num_incomplete:
        whole = count_of(documents.num_incomplete, "document")
        print(f"{whole} still to be read: --resume goes on")


def add_read(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a PDF, a TIFF with pages, a picture, a folder of them, a pattern or URL",
    )
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FOLDER",
        help="where the texts go, one a document; pages.jsonl there has each page's answer",
    )
    add_model(parser)
    _add_asking(parser.add_argument_group("what is asked"))
    _add_reading(parser.add_argument_group("what is read"))
    add_sampling(
        parser.add_argument_group("sampling (defaults: the publisher's)"),
        {"max_tokens": MAX_TOKENS},
    )
    add_batcher(parser.add_argument_group("the batch and its memory"))
    _add_writing(parser.add_argument_group("what is written"))
    add_ending(parser, "page", "however many there are")


def _add_asking(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--task",
        choices=TASKS,
        help="what is wanted of a page (default: what the model's publisher asks first)",
    )
    group.add_argument(
        "--prompt", metavar="TEXT", help="a question in the place of the publisher's"
    )
    group.add_argument("--prompt-file", metavar="FILE", help="likewise, from a file")
    group.add_argument("--system", metavar="TEXT", help="the system prompt")


def _add_reading(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pages",
        type=_pages,
        metavar="RANGES",
        help="only these of each document, as 1-20,35",
    )
    group.add_argument(
        "--dpi",
        type=at_least(1),
        metavar="N",
        help=f"of PDF pages (default: the publisher's size, or {DEFAULT_DPI})",
    )
    add_recursive(group)


def _add_writing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--format",
        choices=DOCUMENT_FORMS,
        default="md",
        help="Markdown, plain text, or JSON with each page (default: md)",
    )
    group.add_argument(
        "--boxes",
        action="store_true",
        help="beside each text, a file .boxes.json of the regions that the model gives, in pixels of the rendered page",
    )
    group.add_argument(
        "--marks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="mark where each page begins (default: yes)",
    )
    add_going_on(
        group,
        resume="go on where an earlier run ended, page by page",
        retry_errors="go on, and ask pages again that failed",
    )
    add_report(group)


def _pages(text: str) -> PageRange:
    try:
        return PageRange.parse(text)
    except InvalidJob as error:
        raise argparse.ArgumentTypeError(str(error)) from None
