"""``vlm-batch report``: a page about all runs of an output."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_batch.cli.model import OpenBatcher, UsageError
from vlm_batch.jobs import journal
from vlm_batch.jobs.files import is_same_file
from vlm_batch.jobs.lines import read_answers, replace_file
from vlm_batch.jobs.rows import spelled
from vlm_batch.jobs.sinks import SUFFIXES, Sink, open_sink


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    from vlm_batch.jobs import report

    output = Path(args.answers).expanduser()
    page = Path(args.out).expanduser() if args.out else output.with_suffix(".html")
    if page.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"--out {args.out}: the report is a page; give it a name that ends in .html"
        )
    if is_same_file(str(page), str(output)):
        raise UsageError(
            f"{page} has the answers; give the page another name with --out"
        )
    settings = journal.read_header(output) or {}
    sink = _opened(output, spreadsheet_safe=settings.get(journal.SAFE) is not False)
    summary = report.summary_of(sink.records, settings.get("dpi"))
    if not summary.ended_rows:
        raise UsageError(f"{output} has no answers yet")
    journal.check_writable(page)
    model = str(settings.get("model") or "a model that the output does not name")
    text = report.render(
        summary, model=model, prompts=settings.get("prompts") or (), is_whole=True
    )
    replace_file(page, spelled(text).encode())
    print(f"{page}: {summary.answered} answered, {summary.failed} failed")
    return 0


def _opened(output: Path, *, spreadsheet_safe: bool) -> Sink:
    """Open the output in the form of its lines."""
    # what has another suffix was written with --format
    form = SUFFIXES.get(output.suffix.lower(), "jsonl")
    if form == "jsonl" and "custom_id" in next(iter(read_answers(output)), {}):
        form = "openai-batch"
    sink = open_sink(str(output), form=form, spreadsheet_safe=spreadsheet_safe)
    if not sink.has_answers():
        raise UsageError(
            f"there are no answers in {output}; name the file that vlm-batch run --out wrote"
        )
    return sink


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "answers",
        metavar="ANSWERS",
        help="the file that run --out wrote, finished or not",
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="the page (default: beside it, with .html for its suffix)",
    )
