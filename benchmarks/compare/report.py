"""What a comparison shows: tables for a person, a picture, and the ratios that the targets speak of.

``python -m benchmarks.compare.report FILE...`` prints in Markdown what runs have found (``compare.json``, of one workload
each, say).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.shapes import SHAPES

Runs = list[dict[str, Any]]  # of one engine over one workload, a round each
Found = dict[str, dict[str, Runs]]  # workload -> engine -> its runs

OURS, OURS_DEFAULTS, REPRODUCIBLE = "vlm_batch", "vlm_batch defaults", "reproducible"

#: (heading, figure, factor, digits): what the tables show.
COLUMNS = (
    ("s", "seconds", 1, 2),
    ("req/s", "requests_per_s", 1, 2),
    ("tok/s", "tokens_per_s", 1, 0),
    ("TTFT p50", "ttft_p50", 1, 2),
    ("p95 s", "ttft_p95", 1, 2),
    ("gap p50", "itl_p50", 1000, 1),
    ("p95", "itl_p95", 1000, 1),
    ("max ms", "itl_max", 1000, 0),
    ("peak MB", "peak_mb", 1, 0),
    ("RSS MB", "rss_mb", 1, 0),
    ("step ms", "step_ms", 1, 1),
)

#: (workload, engine, figure, target as a share of that engine's figure)
TARGETS = (
    ("chat-8", "mlx-vlm defaults", "seconds", 0.5),
    ("chat-8", "mlx-vlm capped", "seconds", 0.5),
    ("chat-8", "mlx-vlm best", "seconds", 0.8),
    ("chat-8", "mlx-vlm defaults", "ttft_p95", 0.3),
    ("chat-8", "mlx-vlm capped", "ttft_p95", 0.3),
    ("chat-8", "mlx-vlm best", "ttft_p95", 0.5),
    ("chat-8", "mlx-vlm defaults", "itl_max", 0.1),
    ("chat-8", "mlx-vlm capped", "itl_max", 0.1),
    ("chat-8", "mlx-vlm defaults", "peak_mb", 0.3),
    ("chat-8", "mlx-vlm capped", "peak_mb", 0.3),
    ("chat-8", "mlx-vlm best", "peak_mb", 0.7),
    ("chat-32", "mlx-vlm defaults", "seconds", 0.5),
    ("chat-32", "mlx-vlm best", "seconds", 0.8),
    ("chat-32", "mlx-vlm defaults", "ttft_p95", 0.3),
    ("chat-32", "mlx-vlm best", "ttft_p95", 0.5),
    ("chat-32", "mlx-vlm defaults", "itl_max", 0.1),
    ("chat-32", "mlx-vlm defaults", "peak_mb", 0.3),
    ("chat-32", "mlx-vlm best", "peak_mb", 0.7),
    ("captions", "mlx-vlm batch_generate", "seconds", 1 / 1.5),
    ("documents", "mlx-vlm batch_generate", "seconds", 1 / 1.5),
    ("single", "one after another", "seconds", 1 / 0.97),
)
CHURN_TARGETS = {"cpu": 0.45, "gpu": 0.85}


Targets = Sequence[tuple[str, str, str, float]]

#: The same for the shapes of other families, with our defaults against theirs.
OTHERS_TARGETS: Targets = (
    *((name, "mlx-vlm defaults", "seconds", 0.5) for name in ("chat-8", "chat-32")),
    *((name, "mlx-vlm defaults", "ttft_p95", 0.3) for name in ("chat-8", "chat-32")),
    *(
        (name, "mlx-vlm defaults", "itl_max", 1.0)
        for name in ("chat-8", "chat-32", "captions")
    ),
    ("captions", "mlx-vlm defaults", "seconds", 0.7),
    # where their defaults end in an exception
    *((name, "mlx-vlm best", "seconds", 0.8) for name in ("chat-8", "chat-32")),
    *((name, "mlx-vlm best", "ttft_p95", 0.5) for name in ("chat-8", "chat-32")),
)


def targets(is_gpu: bool, shape: str) -> Targets:
    """The targets of the kind of device, and of shape."""
    if SHAPES[shape].family != "qwen2_5_vl":
        return OTHERS_TARGETS
    churn = CHURN_TARGETS["gpu" if is_gpu else "cpu"]
    return [
        *TARGETS,
        *((name, "mlx-vlm best", "step_ms", churn) for name in ("churn-2", "churn-8")),
    ]


def median(runs: Sequence[Mapping[str, Any]], figure: str) -> float | None:
    """Over the rounds in which the engine answered; None if there is nothing to show."""
    values = [
        run[figure]
        for run in runs
        if run.get(figure) is not None and run[figure] == run[figure]
    ]
    return statistics.median(values) if values else None


def ratios(
    found: Found, workload: str, engine: str, figure: str, *, ours: str = OURS
) -> list[float]:
    """This library's figure over another engine's in each round where both gave right answers."""
    mine = found.get(workload, {}).get(ours, [])
    theirs = found.get(workload, {}).get(engine, [])
    pairs = [
        (a.get(figure), b.get(figure))
        for a, b in zip(mine, theirs, strict=False)
        if _counts(a) and _counts(b)
    ]
    return [a / b for a, b in pairs if a is not None and b]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median of the rounds' ratios, the least and the most."""
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _counts(run: Mapping[str, Any]) -> bool:
    return "error" not in run and run.get("right", True)


def show(
    console: Console, titles: Mapping[str, str], found: Found, targets: Targets
) -> None:
    """A table for each workload, then the ratios."""
    for workload, engines in found.items():
        columns = [
            column
            for column in COLUMNS
            if column[1] != "step_ms" or workload.startswith("churn")
        ]
        table = Table(title=titles[workload], title_justify="left")
        table.add_column("engine")
        for heading, *_ in columns:
            table.add_column(heading, justify="right")
        table.add_column("tokens")
        for engine, runs in engines.items():
            if not runs:
                continue
            failed = next((run["error"] for run in runs if "error" in run), None)
            if failed is not None:
                table.add_row(
                    engine, *[""] * len(columns), f"[red]failed: {failed[:60]}[/red]"
                )
                continue
            cells = [
                _cell(median(runs, figure), factor, digits)
                for _, figure, factor, digits in columns
            ]
            verdict = runs[0].get("answers", "the answers")
            wrong = next(
                (run["answers"] for run in runs if not run.get("right", True)), None
            )
            if wrong is not None:
                verdict = f"[red]{wrong}[/red]"
            table.add_row(engine, *cells, verdict)
        console.print(table)
    table = Table(
        title="vlm_batch over the other: median of the rounds' ratios",
        title_justify="left",
    )
    for heading in (
        "workload",
        "against",
        "figure",
        "ratio",
        "least to most",
        "target",
        "",
    ):
        table.add_column(heading)
    for workload, engine, figure, target in targets:
        ours = OURS if found.get(workload, {}).get(OURS) else OURS_DEFAULTS
        values = ratios(found, workload, engine, figure, ours=ours)
        if values:
            value = spread(values)
            met = (
                "[green]met[/green]"
                if value["ratio"] <= target
                else "[yellow]missed[/yellow]"
            )
            between = (
                f"{value['least']:.2f} to {value['most']:.2f}"
                if len(values) > 1
                else ""
            )
            table.add_row(
                workload,
                engine,
                figure,
                f"{value['ratio']:.2f}",
                between,
                f"{target:.2f}",
                met,
            )
    console.print(table)


def markdown(found: Found, targets: Targets) -> str:
    """The figures as tables in Markdown: medians over the rounds, with the least and the most where there are several."""
    lines = [
        "| workload | engine | total s | TTFT p50 / p95 s | gap p50 / max ms | step ms | peak MB | answers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload, engines in found.items():
        for engine, runs in engines.items():
            good = [run for run in runs if _counts(run)]
            if not runs:
                continue
            said = next(
                (
                    run.get("error") or run["answers"]
                    for run in runs
                    if not _counts(run)
                ),
                None,
            )
            cells = (
                _spread_cell(good, "seconds", 1, 2),
                _pair(good, ("ttft_p50", "ttft_p95"), 1, 2),
                _pair(good, ("itl_p50", "itl_max"), 1000, 0),
                _spread_cell(good, "step_ms", 1, 1),
                _spread_cell(good, "peak_mb", 1, 0),
                said or next((run.get("answers", "") for run in good), ""),
            )
            lines.append(f"| {workload} | {engine} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| workload | figure | over | ratio | least to most | target |",
        "|---|---|---|---|---|---|",
    ]
    for workload, engine, figure, target in targets:
        for ours in (OURS, OURS_DEFAULTS):
            values = ratios(found, workload, engine, figure, ours=ours)
            if not values:
                continue
            value = spread(values)
            met = "met" if value["ratio"] <= target else "missed"
            who = engine if ours == OURS else f"{engine}, with our defaults"
            between = (
                f"{value['least']:.2f} to {value['most']:.2f}, {len(values)} rounds"
            )
            lines.append(
                f"| {workload} | {figure} | {who} | {value['ratio']:.2f} | {between} | {target:.2f}: {met} |"
            )
    for workload in found:
        for ours in (REPRODUCIBLE, OURS_DEFAULTS):
            values = ratios(found, workload, OURS, "seconds", ours=ours)
            if values:
                value = spread(values)
                between = (
                    f"{value['least']:.2f} to {value['most']:.2f}, {len(values)} rounds"
                )
                lines.append(
                    f"| {workload} | seconds | {ours} over {OURS} | {value['ratio']:.2f} | {between} | |"
                )
    return "\n".join(lines) + "\n"


def _spread_cell(runs: Runs, figure: str, factor: float, digits: int) -> str:
    """The median of the rounds, and in brackets the least and the most."""
    values = [
        factor * run[figure]
        for run in runs
        if run.get(figure) is not None and run[figure] == run[figure]
    ]
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return (
        middle
        if len(values) == 1
        else f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"
    )


def _pair(runs: Runs, figures: tuple[str, str], factor: float, digits: int) -> str:
    values = [median(runs, figure) for figure in figures]
    return (
        " / ".join(_cell(value, factor, digits) for value in values)
        if None not in values
        else ""
    )


def merged(results: Sequence[Mapping[str, Any]]) -> tuple[Found, Targets]:
    """The rounds of several runs' JSON, one after another, and what was wanted of them. Raises ValueError if they differ."""
    kinds = {
        (one["shape"], one["device"], one["clock"], one["launches"]) for one in results
    }
    if len(kinds) != 1:
        raise ValueError(f"the runs are of several kinds: {sorted(kinds)}")
    found: Found = {}
    for one in results:
        for workload, entry in one["workloads"].items():
            for engine, runs in entry["engines"].items():
                found.setdefault(workload, {}).setdefault(engine, []).extend(runs)
    return found, targets("gpu" in results[0]["device"], results[0]["shape"])


def show_probes(console: Console, probes: Mapping[str, Mapping[str, Any]]) -> None:
    """The engines' own share of a step, and the bytes that joins and leaves copy."""
    table = Table(
        title="engine's own work at 8 rows; KV copied by a join and a leave",
        title_justify="left",
    )
    headings = (
        "engine",
        "own ms",
        "step ms",
        "share",
        "join MB",
        "leave MB",
        "a row's MB",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for engine, found in probes.items():
        cells = [
            _cell(found.get(name), 1, digits)
            for name, digits in (("own_ms", 2), ("step_ms", 2))
        ]
        share = found.get("own_share")
        cells.append("" if share is None else f"{100 * share:.1f} %")
        cells += [
            _cell(found.get(name), 1, 2) for name in ("join_mb", "leave_mb", "row_mb")
        ]
        table.add_row(engine, *cells)
    console.print(table)


def _cell(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def draw(path: Path, titles: Mapping[str, str], found: Found) -> bool:
    """Bars of the main figures, a row for each workload; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = (
        ("seconds", 1, "total, s"),
        ("ttft_p95", 1, "TTFT p95, s"),
        ("itl_max", 1000, "longest gap, ms"),
        ("peak_mb", 1, "peak memory beyond weights, MB"),
    )
    workloads = [name for name, engines in found.items() if engines]
    figure, axes = pyplot.subplots(
        len(workloads),
        len(shown),
        figsize=(4 * len(shown), 2.2 * len(workloads)),
        squeeze=False,
    )
    for row, workload in enumerate(workloads):
        engines = {
            name: runs
            for name, runs in found[workload].items()
            if runs and all(_counts(run) for run in runs)
        }
        for column, (name, factor, title) in enumerate(shown):
            axis = axes[row][column]
            values = [factor * (median(runs, name) or 0.0) for runs in engines.values()]
            colours = [
                "tab:blue" if engine in (OURS, OURS_DEFAULTS) else "lightgrey"
                for engine in engines
            ]
            bars = axis.barh(list(engines), values, color=colours)
            axis.bar_label(
                bars,
                [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values],
                fontsize=7,
                padding=2,
            )
            axis.invert_yaxis()
            axis.margins(x=0.18)
            axis.tick_params(labelsize=7)
            axis.set_title(title if row == 0 else "", fontsize=8)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
            if column:
                axis.set_yticklabels([])
            else:
                axis.set_ylabel(workload, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


if __name__ == "__main__":
    print(
        markdown(
            *merged(
                [
                    json.loads(Path(name).read_text(encoding="utf-8"))
                    for name in sys.argv[1:]
                ]
            )
        ),
        end="",
    )
