"""Output of the command line, to terminals and files, and its pages about families.

Colours are for terminals only: into a file or a pipe go the same facts as plain text.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from vlm_batch.cli.facts import NOT_RECORDED, PREFIX_REUSE, QUANTISED_KV, FamilyFacts

UNKNOWN = "?"


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
    """A cell in a word: verified, not verified (the details say why), or not recorded."""
    return "yes" if isinstance(cell, float) else UNKNOWN if cell == NOT_RECORDED else "no"


def _open(one: FamilyFacts) -> list[str]:
    """The scenarios of a family that apply to it and are not verified: known gaps, and what is not recorded."""
    return [name for name, why in one.unverified.items() if why == NOT_RECORDED or why.startswith("known gap")]


def print_family_details(known: Sequence[FamilyFacts], out: TextIO) -> None:
    """Print all facts about some families."""
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
            "refused on CUDA": "\n".join(f"{name}: {why}" for name, why in spec.not_on_cuda),
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


def open_console(file: TextIO) -> Console:
    """A console that wraps at a terminal's width, and hardly at all into files."""
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(160, int(os.environ.get("COLUMNS", "0") or 0)))
