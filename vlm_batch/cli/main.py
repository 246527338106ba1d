"""The command ``vlm-batch``: one answer for every picture or video, the demo, and the list of families.

Exit status: 0 when every request was answered (or no more than ``--max-errors`` failed), 1 when more failed, 2 when the
command line or the model was wrong, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

from vlm_batch._version import __version__  # noqa: E402
from vlm_batch.assets import MissingAssets  # noqa: E402
from vlm_batch.cli import run as answering  # noqa: E402
from vlm_batch.cli import verify as verifying  # noqa: E402
from vlm_batch.cli.console import print_families, print_family_details  # noqa: E402
from vlm_batch.cli.load import add_flags as add_load_flags  # noqa: E402
from vlm_batch.cli.model import OpenBatcher, UsageError, add_model, add_speed, at_least, load_model  # noqa: E402
from vlm_batch.cli.options import add_demo, add_run  # noqa: E402
from vlm_batch.cli.serve import add_flags as add_serve_flags  # noqa: E402
from vlm_batch.cli.tune import add_flags as add_tune_flags  # noqa: E402
from vlm_batch.errors import InvalidParameters  # noqa: E402
from vlm_batch.jobs.journal import check_writable  # noqa: E402
from vlm_batch.jobs.lines import CannotWrite, LineFile, encoded  # noqa: E402
from vlm_batch.jobs.rows import InvalidJob  # noqa: E402
from vlm_batch.jobs.workers import NoWorkers  # noqa: E402

ANSWERED, FAILED, USAGE, INTERRUPTED = answering.ANSWERED, answering.FAILED, 2, answering.INTERRUPTED


def main(argv: Sequence[str] | None = None, *, open_batcher: OpenBatcher | None = None) -> int:
    """Run one command and return its exit status. ``open_batcher`` replaces the loading of a model."""
    args = parser().parse_args(argv)
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
    try:
        status = int(args.command(args, open_batcher or load_model))
        sys.stdout.flush()  # a full disk shows itself here, and not at the interpreter's end
        return status
    except (UsageError, InvalidJob, InvalidParameters, MissingAssets) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return USAGE
    except (CannotWrite, NoWorkers) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("vlm-batch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; nothing is left to say, not even at exit
        _drop_output()
        return FAILED
    except OSError as error:  # the disk behind standard output is full
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _drop_output()
        print(f"vlm-batch: cannot write: {error.strerror}", file=sys.stderr)
        return FAILED


def _drop_output() -> None:
    """Send what standard output still holds nowhere, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- commands ----


def bench(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch bench``: a chat load, and where its time goes."""
    if args.url is not None:
        return _bench_url(args)
    if args.tune:
        return _tune(args)
    from vlm_batch.cli import bench as load_test

    load = load_test.Load(
        requests=args.requests or load_test.Load.requests,
        rate=args.rate,
        picture_share=load_test.Load.picture_share if args.pictures is None else args.pictures,
        prompt_words=_limits("--prompt-words", args.prompt_words),
        answer_tokens=_limits("--answer-tokens", args.answer_tokens),
        seed=args.seed,
    )
    check_figures(args.json)
    with open_batcher(args) as batcher:
        report = load_test.measure(cast("load_test.Batcher", batcher), load)
    load_test.show(report, sys.stderr if args.json == "-" else sys.stdout)
    add_figures(args.json, report.figures())
    return ANSWERED if all(result.ok for result in report.results) else FAILED


def _tune(args: argparse.Namespace) -> int:
    """``vlm-batch bench --tune``: the settings of the device, measured for a model."""
    from vlm_batch.cli import tune

    check_figures(args.json)
    try:
        add_figures(args.json, tune.run(args))
    except tune.CannotTune as error:
        raise UsageError(str(error)) from error
    return ANSWERED


def _bench_url(args: argparse.Namespace) -> int:
    """``vlm-batch bench --url``: a load for a server."""
    from vlm_batch.cli import load as load_test

    try:
        target = load_test.target_of(args)
        load = load_test.load_of(args, requests=args.requests, rate=args.rate, pictures=args.pictures)
    except ValueError as error:
        raise UsageError(str(error)) from error
    check_figures(args.json)
    report = load_test.measure(target, load)
    load_test.show(report, sys.stderr if args.json == "-" else sys.stdout)
    if args.plot is not None:
        load_test.plot(report, Path(args.plot))
    add_figures(args.json, report.figures())
    return ANSWERED if report.figures()["failed"] == 0 else FAILED


def serve(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch serve``: the HTTP server."""
    from vlm_batch.cli import serve as serving

    try:
        return ANSWERED if serving.run(args) else USAGE
    except (serving.MissingExtra, ValueError) as error:
        raise UsageError(str(error)) from error


def verify(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch verify``: one answer in whatever company, shown on this machine."""
    try:
        return verifying.run(args)
    except verifying.CannotVerify as error:
        raise UsageError(str(error)) from error


def list_families(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch families``: what is batched and verified, or all about some families."""
    from vlm_batch.cli import facts

    known = facts.all_facts()
    by_name = {name: one for one in known for name in (*one.spec.model_types, one.spec.family)}
    for name in args.names:
        if name not in by_name:
            why = facts.REFUSED.get(name) or facts.ONE_AT_A_TIME.get(name) or "no family or model type has this name"
            raise UsageError(f"{name}: {why}; vlm-batch families lists them all")
    asked = {by_name[name].spec.family for name in args.names}
    chosen = tuple(one for one in known if not asked or one.spec.family in asked)
    if args.json:
        listed: dict[str, object] = {"families": [one.as_json() for one in chosen]}
        if not args.names:
            listed |= {"refused": dict(facts.REFUSED), "one_at_a_time": dict(facts.ONE_AT_A_TIME)}
        print(json.dumps(listed, indent=2))
    elif args.names:
        print_family_details(chosen, sys.stdout)
    else:
        print_families(chosen, facts.refused(), facts.one_at_a_time(), sys.stdout)
    return ANSWERED


def check_figures(target: str | None) -> None:
    """Raise InvalidJob for a file of figures that cannot be written."""
    if target not in (None, "-"):
        check_writable(Path(str(target)))


def add_figures(target: str | None, figures: Mapping[str, Any]) -> None:
    """Add figures to a file as a JSON line, or print them (``-``); None is nowhere."""
    if target == "-":
        print(encoded(figures).decode(), end="")
    elif target is not None:
        record = LineFile(target)
        record.append(figures)
        record.close()


def _limits(option: str, pair: Sequence[int]) -> tuple[int, int]:
    least, most = pair
    if not 1 <= least <= most:
        raise UsageError(f"{option} {least} {most}: the least must be at least 1 and no more than the most")
    return least, most


# ---- the command line ----


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(
        prog="vlm-batch", description="Ask a vision-language model about many pictures at once."
    )
    top.add_argument("--version", action="version", version=f"vlm-batch {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    asking = commands.add_parser(
        "run",
        help="ask about every picture, video, page or row of a table",
        description="Ask about every picture, video, page or row of a table; go on where an earlier run ended.",
    )
    add_run(asking)
    asking.set_defaults(command=answering.run)

    showing = commands.add_parser(
        "demo",
        help="ask the embedded model about the sample pictures",
        description="Ask the embedded model about the sample pictures: one, two and none to a question.",
    )
    add_demo(showing)
    showing.set_defaults(command=answering.demo)

    _add_bench(
        commands.add_parser(
            "bench",
            help="put a chat load on a model and show where its time goes",
            description="Requests that arrive by chance, some with a picture, with prompts and answers of all lengths: "
            "how fast this machine answers them, and where the time goes.",
        )
    )

    server = commands.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI's servers do",
        description="Answer over HTTP, as OpenAI's servers do: chats with pictures and videos, and texts. A page is at /.",
    )
    add_serve_flags(server)
    server.set_defaults(command=serve)
    verifying.add_verify(
        commands.add_parser(
            "verify",
            help="show that a model gives one answer here, alone and in company",
            description="Ask a model the same requests alone by mlx-vlm, alone here and in company here, in the precision that "
            "it is served in, and compare them bit for bit.",
        ),
        verify,
    )

    listing = commands.add_parser(
        "families",
        help="list the model families",
        description="List the model families that are batched, and what of each is verified; or show all about some.",
    )
    listing.add_argument("names", nargs="*", metavar="NAME", help="a family or a model type: all that is known of it")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(command=list_families)
    return top


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--requests", type=at_least(1), default=None, metavar="N", help="default: 32; of a server, the preset's"
    )
    parser.add_argument(
        "--batch",
        type=at_least(1),
        metavar="N",
        help="most rows in the batch (default: as many as pay, by measured steps)",
    )
    add_speed(parser)
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="arrivals a second; 0 is all at once (default: twice what one request at a time could serve)",
    )
    parser.add_argument(
        "--pictures", type=float, metavar="SHARE", help="share with a picture (default: 0.5; of a server, the preset's)"
    )
    parser.add_argument(
        "--prompt-words", type=int, nargs=2, default=(24, 900), metavar=("MIN", "MAX"), help="default: 24 900"
    )
    parser.add_argument(
        "--answer-tokens", type=int, nargs=2, default=(8, 128), metavar=("MIN", "MAX"), help="default: 8 128"
    )
    parser.add_argument("--seed", type=int, default=4, help="of the requests and arrivals (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="add the figures to a file as a JSON line; - is standard output")
    add_load_flags(parser)
    add_tune_flags(parser)
    parser.set_defaults(command=bench)
