"""The command ``vlm-batch``.

Exit status: 0 if at most ``--max-errors`` requests failed, 1 if more failed, 2 for a wrong command line or model, 130
after an interrupt (SIGINT), 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vlm_batch.runtime import beginning, blas

blas.preload_openblas()  # before anything imports mlx.core

from vlm_batch.runtime.imports import without_gc  # noqa: E402

with without_gc():
    from vlm_batch._version import __version__
    from vlm_batch.assets import MissingAssets
    from vlm_batch.cli import bench, job, options, read, report, serve, verify
    from vlm_batch.cli import run as answering
    from vlm_batch.cli.ending import Terminated
    from vlm_batch.cli.help import Parser
    from vlm_batch.cli.model import OpenBatcher, UsageError, load_model
    from vlm_batch.cli.options import add_demo, add_run
    from vlm_batch.errors import InvalidParameters
    from vlm_batch.jobs.lines import CannotWrite
    from vlm_batch.jobs.rows import InvalidJob
    from vlm_batch.jobs.workers import NoWorkers

if TYPE_CHECKING:
    from vlm_batch.cli import facts

ANSWERED = job.ANSWERED
FAILED = job.FAILED
USAGE = 2
INTERRUPTED = 130
TERMINATED = 143
#: Commands that attend to a terminal that hangs up.
OUTLIVING = (answering.run, answering.demo, read.run)


def main(
    argv: Sequence[str] | None = None, *, open_batcher: OpenBatcher | None = None
) -> int:
    """Run one command, and return its exit status."""
    beginning.open_closed_streams()
    beginning.hand_over()
    try:
        words = sys.argv[1:] if argv is None else argv
        args, unknown = parser().parse_known_args(words)
        if unknown:
            args.parser.refuse(unknown)
        args.words = words
        if args.command not in OUTLIVING:
            beginning.end_with_terminal()
        blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
        status = int(args.command(args, open_batcher or load_model))
        # a full disk shows itself here, and not at the interpreter's end
        sys.stdout.flush()
        return status
    except (UsageError, InvalidJob, InvalidParameters, MissingAssets) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return USAGE
    except (CannotWrite, NoWorkers) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return FAILED
    except Terminated:
        print("vlm-batch: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("vlm-batch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has gone; nothing is left to say, not even at exit
        _drop_output()
        return FAILED
    except OSError as error:  # the disk behind standard output is full
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _drop_output()
        print(f"vlm-batch: cannot write: {error.strerror}", file=sys.stderr)
        return FAILED


def _drop_output() -> None:
    """Discard unwritten output, so that the flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- commands ----


def list_families(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    from vlm_batch.cli import facts

    known = facts.all_facts()
    asked = _asked_families(args.names, known)
    chosen = tuple(one for one in known if not asked or one.spec.family in asked)
    if args.json:
        listed: dict[str, object] = {"families": [one.as_json() for one in chosen]}
        if not args.names:
            listed["refused"] = dict(facts.REFUSED)
            listed["one_at_a_time"] = dict(facts.ONE_AT_A_TIME)
        print(json.dumps(listed, indent=2))
    elif args.names:
        facts.print_family_details(chosen, sys.stdout)
    else:
        facts.print_families(chosen, sys.stdout)
    return ANSWERED


def _asked_families(
    names: Sequence[str], known: Sequence[facts.FamilyFacts]
) -> set[str]:
    """Return the families of names, which may be of model types. Raises UsageError."""
    from vlm_batch.cli import facts
    from vlm_batch.models import not_known

    family_of = {}
    for one in known:
        for name in (*one.spec.model_types, one.spec.family):
            family_of[name] = one.spec.family
    for name in names:
        if name not in family_of:
            why = facts.REFUSED.get(name) or facts.ONE_AT_A_TIME.get(name)
            raise UsageError(f"{name}: {why}" if why else not_known(name))
    return {family_of[name] for name in names}


def add_families(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a family or a model type: all that is known of it",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


# ---- the command line ----

#: Each command: its name, function, options, and short and full help.
COMMANDS = (
    (
        "run",
        answering.run,
        add_run,
        "ask about every picture, video, recording, page or row of a table",
        "Ask about every picture, video, recording, page or row of a table; go on where an earlier run ended.",
    ),
    (
        "read",
        read.run,
        read.add_read,
        "turn documents into texts, one a document",
        "Read PDF files, scans and pictures page by page, and write one text a document; go on where an earlier run ended.",
    ),
    (
        "report",
        report.run,
        report.add_report,
        "make a page about the answers of run",
        "Make a page about an output of run, whatever runs wrote it: figures, failures, a sample of pictures with answers.",
    ),
    (
        "demo",
        answering.demo,
        add_demo,
        "ask the embedded sample about the sample pictures",
        "Ask the embedded sample about the sample pictures: one, two and none to a question.",
    ),
    (
        "bench",
        bench.run,
        bench.add_flags,
        "put a load on a model or a server, and show where its time goes",
        "Requests that arrive by chance, some with a picture, with prompts and answers of all lengths: how fast this machine, "
        "or a server, answers them, and where the time goes.",
    ),
    (
        "serve",
        serve.run,
        serve.add_flags,
        "answer over HTTP, as OpenAI's servers do",
        "Answer over HTTP, as OpenAI's servers do: chats with pictures, videos and recordings, and texts. A page is at /.",
    ),
    (
        "verify",
        verify.run,
        verify.add_flags,
        "show that a model gives one answer here, alone and in company",
        "Ask a model the same requests alone by mlx-vlm, alone here and in company here, in the precision that it is served "
        "in, and compare them bit for bit.",
    ),
    (
        "families",
        list_families,
        add_families,
        "list the model families",
        "List the model families that are batched, and what of each is verified; or show all about some.",
    ),
)


#: Everyday options and examples of commands that have many options.
EVERYDAY: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": options.EVERYDAY,
    "read": read.EVERYDAY,
    "serve": serve.EVERYDAY,
}


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="vlm-batch",
        description="Ask a vision-language model about many pictures at once.",
    )
    top.add_argument("--version", action="version", version=f"vlm-batch {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, command, add_options, said, said_in_full in COMMANDS:
        one = commands.add_parser(name, help=said, description=said_in_full)
        add_options(one)
        if name in EVERYDAY:
            one.set_everyday(*EVERYDAY[name])
        one.set_defaults(command=command, parser=one)
    return top
