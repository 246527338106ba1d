"""What the command line shows: progress while it works, a line per answer, a table and totals at the end.

Progress and lines go to standard error; the table goes where it is told. Colours, the bar and its animation are for
terminals only: into a file or a pipe go the same facts as plain text.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from vlm_batch.cli.facts import NOT_RECORDED, PREFIX_REUSE, QUANTISED_KV, FamilyFacts
from vlm_batch.progress import Bar
from vlm_batch.types import Result, Video

UNKNOWN = "?"
STATUS_STYLES = {"stop": "green", "length": "yellow", "cancelled": "yellow", "error": "red"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One question on the command line: what is asked, and how it is called in the output."""

    request_id: str
    label: str
    images: tuple[str, ...]
    prompt: str
    videos: tuple[Video, ...] = ()


class Report:
    """Follows a list of jobs to its end. A context manager around the work; ``show`` prints the table afterwards."""

    def __init__(self, jobs: Sequence[Job], *, table_to: TextIO, quiet: bool = False) -> None:
        self._jobs = {job.request_id: job for job in jobs}
        self._results: dict[str, Result] = {}
        self._quiet = quiet
        self._out = open_console(table_to)
        self._err = open_console(sys.stderr)
        self._began = self._ended = time.perf_counter()
        self._bar = Bar(self._err, len(jobs), "loading the model", stays=False)

    def __enter__(self) -> Report:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    @property
    def num_failed(self) -> int:
        return self._bar.num_failed

    @property
    def seconds(self) -> float:
        """From the first request to the last answer; loading the model is not in it."""
        return self._ended - self._began

    def job(self, request_id: str) -> Job:
        return self._jobs[request_id]

    def begin(self) -> None:
        """The model is loaded and the first request is about to be taken."""
        self._began = self._ended = time.perf_counter()
        self._bar.say("answering")

    def add(self, result: Result) -> None:
        """One more request has ended."""
        self._results[result.request_id] = result
        self._ended = time.perf_counter()
        self._bar.advance(result)
        if not self._quiet:
            line = Text.assemble((plain_text(self.job(result.request_id).label), "bold"), ": ", _answer(result))
            line = Text(" ").join(line.split()) if "\n" in line.plain else line
            self._err.print(
                line, no_wrap=self._err.is_terminal, overflow="ellipsis", soft_wrap=not self._err.is_terminal
            )

    def show(self, *, interrupted: bool = False) -> None:
        """Print the table, in the order of the jobs, and the line of totals."""
        self._out.print(self._table())
        self._out.print(self._totals(interrupted), soft_wrap=True)

    def _table(self) -> Table:
        asked_alike = len({job.prompt for job in self._jobs.values()}) == 1
        table = Table(
            Column("picture", overflow="fold", max_width=60),
            Column("size", no_wrap=True),
            *([] if asked_alike else [Column("question", overflow="fold")]),
            Column("answer", overflow="fold", ratio=1 if self._out.is_terminal else None),
            Column("tokens", justify="right", no_wrap=True),
            Column("seconds", justify="right", no_wrap=True),
            Column("status", no_wrap=True),
            box=box.SIMPLE_HEAD,
        )
        for job in self._jobs.values():
            result = self._results.get(job.request_id)
            if result is None:
                continue
            sizes = " + ".join(
                [f"{width}x{height}" for width, height in result.image_sizes]
                + [f"{frames} of {width}x{height}" for frames, width, height in result.video_sizes]
            )
            table.add_row(
                Text(plain_text(job.label)),
                sizes or "-",
                *([] if asked_alike else [Text(plain_text(job.prompt))]),
                _answer(result),
                str(result.usage.completion_tokens),
                "-" if result.error is not None else f"{result.timings.total - result.timings.queue:.2f}",
                Text(result.finish_reason, style=STATUS_STYLES[result.finish_reason]),
            )
        return table

    def _totals(self, interrupted: bool) -> Text:
        num_done, failed = len(self._results), self.num_failed
        totals = Text(f"{num_done} of {len(self._jobs)} requests done" if interrupted else _count(num_done, "request"))
        totals.append(", ")
        totals.append(_count(failed, "error"), style="red" if failed else "green")
        rate = self._bar.num_tokens / max(self.seconds, 1e-9)
        totals.append(f", {_count(self._bar.num_tokens, 'token')} in {self.seconds:.2f} s, {rate:.1f} tokens/s")
        if interrupted:
            totals.append(" (interrupted)", style="yellow")
        return totals


def print_families(
    known: Sequence[FamilyFacts],
    refused: Mapping[str, Sequence[str]],
    one_at_a_time: Mapping[str, Sequence[str]],
    out: TextIO,
) -> None:
    """The families as a table, then the model types that are refused or run one row at a time, by reason."""
    console = open_console(out)
    columns: dict[str, Callable[[FamilyFacts], str]] = {
        "family": lambda one: "\n  ".join(dict.fromkeys((one.spec.family, *one.spec.model_types))),
        "pictures": lambda one: one.pictures,
        "video": lambda one: "yes" if one.spec.video else "no",
        "prefill": lambda one: "chunks" if one.spec.chunked_prefill else "whole",
        "reuse": lambda one: _yes_or_no(one.cell(PREFIX_REUSE)),
        "8 bits": lambda one: _yes_or_no(one.cell(QUANTISED_KV)),
        "verified": lambda one: f"{len(one.verified)}/{len(one.verified) + len(_open(one))}",
        "off by": lambda one: "-" if one.largest is None else f"{one.largest:.0e}",
    }
    shown = {name: show for name, show in columns.items() if any(show(one) != UNKNOWN for one in known)}
    table = Table(*(Column(name, no_wrap=True) for name in shown), box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for one in known:
        table.add_row(*(Text(show(one)) for show in shown.values()))
    console.print(table)
    console.print(
        f"\n{len(known)} families, below some the other model types that load as theirs. Verified: scenarios in which every "
        "request of a batch gets the answer that it gets alone; "
        "off by: the largest difference of a log-probability in them. vlm-batch families NAME shows all about one."
    )
    for title, reasons in (("Refused:", refused), ("One row at a time:", one_at_a_time)):
        console.print(f"\n{title}")
        for why, model_types in reasons.items():
            console.print(Padding(f"{why}: {', '.join(model_types)}", (0, 0, 0, 2)))


def _yes_or_no(cell: float | str) -> str:
    """Of a cell: verified, not (and the details say why), or not recorded."""
    return "yes" if isinstance(cell, float) else UNKNOWN if cell == NOT_RECORDED else "no"


def _open(one: FamilyFacts) -> list[str]:
    """The scenarios of a family that apply to it and are not verified: known gaps, and what is not recorded."""
    return [name for name, why in one.unverified.items() if why == NOT_RECORDED or why.startswith("known gap")]


def print_family_details(known: Sequence[FamilyFacts], out: TextIO) -> None:
    """All about some families."""
    console = open_console(out)
    for one in known:
        spec = one.spec
        facts = {
            "model types": ", ".join(spec.model_types),
            "pictures": f"{one.pictures} in a request",
            "video": "yes" if spec.video else f"no: {spec.no_video}",
            "prefill": "in chunks" if spec.chunked_prefill else "whole prompts",
            "verified": ", ".join(f"{name.replace('_', ' ')} {off:.0e}" for name, off in one.verified.items()),
            "not verified": "\n".join(f"{name.replace('_', ' ')}: {why}" for name, why in one.explained.items()),
            "notes": "\n".join(spec.notes),
            "mlx-vlm's batch": one.upstream,
        }
        table = Table(Column(no_wrap=True), Column(overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            if value:
                table.add_row(name, Text(value))
        console.print(Text(spec.family, style="bold"))
        console.print(Padding(table, (0, 0, 1, 2)))


def plain_text(text: str) -> str:
    """Text that every terminal can show and none obeys: control characters other than line ends and tabs, and bytes of
    names that are no UTF-8, are written out."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _WRITTEN_OUT else _escaped(c) for c in text)


_WRITTEN_OUT = ("Cc", "Cs")


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a name that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _answer(result: Result) -> Text:
    if result.error is not None:
        return Text(plain_text(result.error), style="red")
    return Text(plain_text(result.text)) if result.text else Text("(empty)", style="dim")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def open_console(file: TextIO) -> Console:
    """A console that wraps at a terminal's width, and hardly at all into files."""
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(160, int(os.environ.get("COLUMNS", "0") or 0)))
