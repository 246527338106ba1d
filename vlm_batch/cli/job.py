"""Parts that ``run``, ``demo`` and ``read`` share: they run a job as the command line says, show it, and end with a status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_batch.cli.ending import Signals
from vlm_batch.cli.model import EMBEDDED, OpenBatcher, UsageError
from vlm_batch.cli.watching import JobView
from vlm_batch.jobs import journal
from vlm_batch.jobs.files import Found, is_same_file
from vlm_batch.jobs.lines import CannotWrite, replace_file
from vlm_batch.jobs.questions import Questions
from vlm_batch.jobs.rows import Shard, Source, spelled
from vlm_batch.jobs.runner import run as run_job
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.summary import Summary
from vlm_batch.jobs.workers import NoWorkers

ANSWERED, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class AskedJob:
    """A job as the command line asks for it.

    Attributes:
        settings: Besides prompts and sampling, what decides answers.
        carried: Columns of the rows that the output has.
        kept_in: The file that the answers go to, by which a report of all runs is made.
        is_kept: Whether ``--resume`` can go on from what was written.
    """

    sources: Sequence[Source]
    sink: Sink
    questions: Questions
    shard: Shard
    settings: Mapping[str, Any]
    carried: tuple[str, ...] = ()
    kept_in: str | None
    is_kept: bool


def say_skipped(found: Found) -> None:
    if said := found.said():
        print(f"vlm-batch: {said}", file=sys.stderr)


def check_report(report: str | None, target: str | None) -> None:
    """Raise UsageError or InvalidJob if ``--report`` names no page, the answers' file, or what cannot be written."""
    if report is None:
        return
    if not report.lower().endswith((".html", ".htm")):
        raise UsageError(
            f"--report {report}: the report is a page; give it a name that ends in .html"
        )
    if target is not None and is_same_file(report, target):
        raise UsageError(
            f"--report {report}: --out names the same file; give the page another name"
        )
    journal.check_writable(Path(report))


def run_shown(
    job: AskedJob,
    args: argparse.Namespace,
    open_batcher: OpenBatcher,
    view: JobView,
    signals: Signals,
) -> Summary:
    """Run a job while ``view`` shows it. Raises CannotWrite or NoWorkers, which say how to go on."""
    signals.view = view
    try:
        with view:
            summary = run_job(
                job.sources,
                job.sink,
                lambda: open_batcher(args),
                questions=job.questions,
                shard=job.shard,
                settings=job.settings,
                carried=job.carried,
                resume=args.resume,
                overwrite=args.overwrite,
                force=args.force,
                retry_errors=args.retry_errors,
                keeps_samples=args.report is not None,
                watch=view,
            )
    except (CannotWrite, NoWorkers) as error:
        if not job.is_kept:
            raise
        raise type(error)(f"{error}; --resume goes on from there") from error
    view.show(summary)
    return summary


def write_report(job: AskedJob, args: argparse.Namespace, summary: Summary) -> None:
    """Write ``--report``'s page about the rows of this run, or say why not."""
    if args.report is None:
        return
    if summary.ended_rows:
        from vlm_batch.jobs import report

        page = report.render(
            summary, model=str(args.model or EMBEDDED), prompts=job.questions.prompts
        )
        replace_file(Path(args.report), spelled(page).encode())
        return
    # an earlier run's page stays
    said = f"{args.report} is not written: a report is about the rows of its own run"
    if job.kept_in is not None:
        said += f"; vlm-batch report {job.kept_in} makes one about all runs"
    print(f"vlm-batch: {said}", file=sys.stderr)


def status_of(args: argparse.Namespace, summary: Summary, signals: Signals) -> int:
    """Return the exit status of a job that has ended."""
    if summary.interrupted:
        return signals.status
    return ANSWERED if summary.num_failed <= args.max_errors else FAILED
