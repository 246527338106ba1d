"""``vlm-batch bench``: load on a model or a server, and where its time goes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich import box
from rich.table import Column, Table

from vlm_batch.cli import tune
from vlm_batch.cli.console import beside, open_console
from vlm_batch.cli.load import PRESETS, BenchedServer, Load, Local, Report, measure
from vlm_batch.cli.model import (
    OpenBatcher,
    add_model,
    add_speed,
    at_least,
    checked,
)
from vlm_batch.jobs.journal import check_writable
from vlm_batch.jobs.lines import LineFile, encoded

if TYPE_CHECKING:
    from vlm_batch.batcher import VLMBatcher

API_KEY = "OPENAI_API_KEY"

# Shown -------------------------------------------------------------------------------------------------------------

SHOWN = {
    "ttft": "to the first token",
    "gap": "between two pieces",
    "whole": "to the end",
}


def show(report: Report, out: TextIO) -> None:
    found, load = report.figures(), report.load
    console = open_console(out)
    arrivals = f"{load.rate:.3g} arrivals a second" if load.rate else "all at once"
    how = arrivals if load.concurrency is None else f"{load.concurrency} at a time"
    failed = f", {found['failed']} failed" if found["failed"] else ""
    console.print(
        f"{found['requests']} requests to {found['asked']}, {found['pictures']} with a picture, {how}{failed}"
    )
    console.print(
        f"{found['seconds']:.2f} s, {found['requests_per_s']:.2f} requests/s, {found['tokens_per_s']:.1f} tokens/s; "
        f"{found['prompt_tokens']:.0f} tokens of prompt and {found['answer_tokens']:.0f} of answer each"
    )
    if found["checked"]:
        console.print(
            f"{found['equal_to_alone']} of {found['checked']} answers equal to the same request alone"
        )
    columns = ("p50", "p95", "p99", "max")
    table = Table(
        "",
        *(Column(f"{name} s", justify="right") for name in columns),
        box=box.SIMPLE_HEAD,
    )
    rows = [(label, found[name]) for name, label in SHOWN.items()]
    rows += [
        (f"{stage}, {100 * one['share']:.0f} %", one)
        for stage, one in found.get("stages", {}).items()
    ]
    for label, one in rows:
        table.add_row(label, *(f"{one[column]:.3f}" for column in columns))
    console.print(table)
    for error in sorted(
        {answer.error for answer in report.answers if answer.error is not None}
    )[:5]:
        console.print(f"failed: {error}", style="red", markup=False)


def plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2))
    for axis, (name, values) in zip(axes, report.times().items(), strict=True):
        ordered = sorted(values)
        axis.plot(
            ordered, [(index + 1) / len(ordered) for index in range(len(ordered))]
        )
        axis.set(title=SHOWN[name], xlabel="seconds", ylim=(0, 1.02))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of them within")
    rate = report.figures()["requests_per_s"]
    figure.suptitle(
        f"{report.asked}: {len(report.done)} answers, {rate:.2f} requests/s"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# The command line --------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Run ``vlm-batch bench``; return 0 if every request was answered."""
    if args.json not in (None, "-"):
        check_writable(Path(args.json))
    if args.tune:
        add_figures(args.json, tune.run(args))
        return 0
    with checked():
        load, server = load_of(args), None if args.url is None else server_of(args)
    if server is not None:
        report = measure(server, load)
    else:
        with open_batcher(args) as batcher:
            report = measure(
                Local(cast("VLMBatcher", batcher), args.model or "the embedded model"),
                load,
            )
    show(report, beside(args.json))
    if args.plot is not None:
        plot(report, Path(args.plot))
    add_figures(args.json, report.figures())
    return 0 if len(report.done) == len(report.answers) else 1


def add_figures(target: str | None, figures: Mapping[str, Any]) -> None:
    """Append a JSON line to a file, or, for ``-``, print it."""
    if target == "-":
        print(encoded(figures).decode(), end="")
    elif target is not None:
        record = LineFile(target)
        record.append(figures)
        record.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    number = at_least(1)
    parser.add_argument(
        "--batch",
        type=number,
        metavar="N",
        help="most rows in the batch (default: as many as pay, by measured steps)",
    )
    add_speed(parser)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="default: chat; of a server, 384"
    )
    say = parser.add_argument
    say(
        "--requests",
        type=number,
        metavar="N",
        help="how many (default: the preset's, as all that follows)",
    )
    say(
        "--concurrency",
        type=int,
        metavar="N",
        help="requests that are always under way",
    )
    say(
        "--rate",
        type=float,
        metavar="R",
        help="arrivals a second instead; 0 is all at once (chat: twice what one request at a time could serve)",
    )
    say(
        "--pictures",
        type=float,
        metavar="SHARE",
        help="share of the requests that have one",
    )
    say("--sizes", nargs="+", metavar="WxH", help="the pictures' sizes")
    say(
        "--prompt-words",
        type=number,
        nargs="+",
        metavar="N",
        help="words of a prompt: all so many, or least and most",
    )
    say(
        "--answer-tokens",
        type=number,
        nargs="+",
        metavar="N",
        help="tokens of an answer, likewise",
    )
    say(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of full length",
    )
    say(
        "--check",
        type=int,
        metavar="N",
        help="requests whose answers are compared with those alone",
    )
    say("--seed", type=int, help="of the requests and arrivals")
    say(
        "--json",
        metavar="FILE",
        help="add the figures to a file as a JSON line; - is standard output",
    )
    say("--plot", metavar="FILE", help="a picture of the distributions")
    group = parser.add_argument_group("a server")
    group.add_argument(
        "--url",
        help="a server that speaks OpenAI's chat completions, to be measured instead of a model",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="default: %(default)s",
    )
    tune.add_flags(parser)


def load_of(args: argparse.Namespace) -> Load:
    """Return the preset, overridden by the command line."""
    preset = PRESETS[args.preset or ("chat" if args.url is None else "384")]
    if args.rate is not None:
        preset = replace(preset, concurrency=None)
    said = {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "rate": args.rate,
        "sizes": None
        if args.sizes is None
        else tuple(_size(text) for text in args.sizes),
        "picture_share": args.pictures,
        "prompt_words": _limits("--prompt-words", args.prompt_words),
        "answer_tokens": _limits("--answer-tokens", args.answer_tokens),
        "ignore_eos": args.ignore_eos,
        "check": args.check,
        "seed": args.seed,
    }
    return replace(
        preset, **{name: value for name, value in said.items() if value is not None}
    )


def server_of(args: argparse.Namespace) -> BenchedServer:
    if not args.model:
        raise ValueError("--url needs --model NAME: what the server calls its model")
    server = BenchedServer(args.url, args.model, os.environ.get(API_KEY), args.timeout)
    server.connect()[0].close()
    return server


def _limits(option: str, said: Sequence[int] | None) -> tuple[int, int] | None:
    if said is None:
        return None
    if len(said) > 2:
        raise ValueError(f"{option} takes one number, or the least and the most")
    return said[0], said[-1]


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (
        width.isdecimal()
        and height.isdecimal()
        and 1 <= int(width) <= 20_000
        and 1 <= int(height) <= 20_000
    ):
        raise ValueError(f"{text} is no size; 384x384 is one")
    return int(width), int(height)
