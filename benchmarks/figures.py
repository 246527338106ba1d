"""The tables and pictures of docs/benchmarks.md and docs/benchmarks-families.md from committed figures.

``python -m benchmarks.figures`` writes them anew. A figure is typed once, into benchmarks/figures.json; whether it misses
what was wanted is computed. Those of benchmarks/families-KIND.json are written by ``python -m benchmarks.families --json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import families

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
DATA = Path(__file__).with_suffix(".json")
KINDS = ("cpu", "cuda")
FAMILIES_PAGE = ROOT / "docs/benchmarks-families.md"

# pixels: of the picture, before the bars, of a bar, between two
WIDTH, LEFT, BAR, GAP = 520, 156, 16, 5
COLOURS = {
    "vlm_batch": "#3949ab",
    "mlx-vlm's defaults": "#8d99ae",
    "mlx-vlm's best": "#adb5c4",
    "`batch_generate`": "#c5cad6",
    "one after another": "#dde0e7",
}

Figures = Mapping[str, Any]


def read() -> Figures:
    """Read the committed figures, by kind of device."""
    figures: Figures = json.loads(DATA.read_text(encoding="utf-8"))
    return figures


def render(page: str, figures: Figures) -> str:
    """Put the tables of every device into the page, each between the two comments that name it."""
    for kind in KINDS:
        for name, make in (("loads", loads_table), ("ratios", ratios_table)):
            begin, end = f"<!-- {kind} {name} -->\n", f"<!-- end {kind} {name} -->\n"
            head, rest = page.split(begin)
            _, tail = rest.split(end)
            page = f"{head}{begin}{make(figures[kind])}{end}{tail}"
    return page


def read_families(kind: str) -> Figures | None:
    """Read the figures of all families on a device; None where none are committed."""
    file = Path(__file__).with_name(f"families-{kind}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def render_families(page: str) -> str:
    """Put the tables of all families into their page."""
    begin, end = "<!-- families -->\n", "<!-- end families -->\n"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    parts, runs = [], []
    for kind, title in zip(KINDS, ("On a CPU", "On an NVIDIA GPU"), strict=True):
        if found := read_families(kind):
            runs.append(found["families"])
            clock = found["clock"]
            machine, *versions = [
                value if key == "machine" else f"{key} {value}"
                for key, value in found["facts"].items()
                if key != "device"
            ]
            command = f"python -m benchmarks.families --clock {clock} --json benchmarks/families-{kind}.json"
            seconds = "processor seconds" if clock == "cpu" else "seconds"
            said = f"{machine}; {', '.join(versions)}; {seconds}. `{command}`"
            parts.append(
                f"\n## {title}\n\n{said}\n\n{families.table(found, clock)}\n\n"
            )
    errors = "\n".join(families.ended(*runs))
    parts.append(f"\n## What ended a family's run\n\n{errors}\n\n")
    return f"{head}{begin}{''.join(parts)}{end}{tail}"


def loads_table(found: Figures) -> str:
    """Make the table of seconds: a line for each load, a column for each engine."""
    engines = [
        name
        for name in COLOURS
        if any(name in seconds for seconds in found["loads"].values())
    ]
    lines = [f"| seconds | {' | '.join(engines)} |", "|---" * (1 + len(engines)) + "|"]
    for load, seconds in found["loads"].items():
        cells = (f"{seconds[name]:.2f}" if name in seconds else "" for name in engines)
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios_table(found: Figures) -> str:
    """Make the table of ratios, each beside what was wanted of it."""
    lines = ["| what | over | ratio | wanted |", "|---|---|---|---|"]
    for one in found["ratios"]:
        ratio = (
            f"{one['ratio']:.3f}".rstrip("0")
            if one["ratio"] < 0.1
            else f"{one['ratio']:.2f}"
        )
        more = (
            [f"{low:.2f}-{high:.2f}" for low, high in [one["range"]]]
            if "range" in one
            else []
        )
        more += [one["of"]] if "of" in one else []
        shown = f"{ratio} ({'; '.join(more)})" if more else ratio
        lines.append(f"| {one['what']} | {one['over']} | {shown} | {_wanted(one)} |")
    return "\n".join(lines) + "\n"


def _wanted(one: Figures) -> str:
    if "at_least" in one:
        return f"at least {one['at_least']}" + (
            ", **missed**" if is_missed(one) else ""
        )
    return (
        f"{one['wanted']:g}" + (", **missed**" if is_missed(one) else "")
        if "wanted" in one
        else ""
    )


def is_missed(one: Figures) -> bool:
    """Whether a ratio is on the wrong side of what was wanted of it."""
    return bool(
        one["ratio"] < one.get("at_least", 0)
        or one["ratio"] > one.get("wanted", float("inf"))
    )


def picture(found: Figures) -> str:
    """Draw the seconds of every load as bars, each load on a scale of its own."""
    parts, y = [], 10
    for load, seconds in found["loads"].items():
        parts.append(
            f'<text x="12" y="{y + 13}" font-weight="600">{escape(load)}</text>'
        )
        y += 22
        longest = max(seconds.values())
        for engine, colour in COLOURS.items():
            if engine not in seconds:
                continue
            length = round((WIDTH - LEFT - 70) * seconds[engine] / longest)
            name = escape(engine.strip("`"))
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{name}</text>'
            )
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="2" fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{LEFT + length + 6}" y="{y + 12}">{seconds[engine]:.2f} s</text>'
            )
            y += BAR + GAP
        y += 10
    frame = f'<rect width="{WIDTH}" height="{y}" rx="6" fill="#ffffff"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        'font-family="sans-serif" font-size="14" fill="#222222">'
    )
    return "\n".join([head, frame, *parts, "</svg>"]) + "\n"


def image(kind: str) -> Path:
    """Name the file of a device's picture."""
    return ROOT / f"docs/images/benchmarks-{kind}.svg"


def main() -> None:
    """Write the tables into the page and the pictures beside it."""
    figures = read()
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")
    FAMILIES_PAGE.write_text(
        render_families(FAMILIES_PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
    for kind in KINDS:
        image(kind).write_text(picture(figures[kind]), encoding="utf-8")


if __name__ == "__main__":
    main()
