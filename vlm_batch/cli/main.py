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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

from vlm_batch._version import __version__  # noqa: E402
from vlm_batch.assets import (  # noqa: E402
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
    MissingAssets,
    default_checkpoint,
    is_sample,
    sample_images,
)
from vlm_batch.cli.console import Job, Report, print_families, print_family_details  # noqa: E402
from vlm_batch.errors import InvalidParameters  # noqa: E402
from vlm_batch.jobs.files import common_folder, find_files, is_video  # noqa: E402
from vlm_batch.jobs.lines import CannotWrite, LineFile, encoded  # noqa: E402
from vlm_batch.types import Request, Result, SamplingParams, Video  # noqa: E402

ANSWERED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

#: What the demo asks beside a description of each sample picture: names of sample pictures, and the question.
DEMO_QUESTIONS = (
    (("digits_728",), "read the digits"),
    (("red_circle_above_blue_triangle",), "what is below the circle?"),
    (("black_circle_left_of_blue_square",), "what colour is the square?"),
    (("red_circle", "red_circle_above_blue_triangle"), "are the pictures the same?"),
    (("black_circle_left_of_blue_square", "yellow_triangle_left_of_green_cross"), "which picture has a cross?"),
    (("black_circle_left_of_blue_square", "yellow_triangle_left_of_green_cross"), "describe both pictures"),
    ((), "count to 12"),
    ((), "repeat: a a a a"),
    ((), "reverse: m l x"),
    ((), "what is 4 + 7?"),
)


class Batcher(Protocol):
    """What the command line needs of a batcher."""

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]: ...


OpenBatcher = Callable[[argparse.Namespace], AbstractContextManager[Batcher]]


class UsageError(Exception):
    """The command line asks for something that cannot be done; the message goes to the user as it is."""


def main(argv: Sequence[str] | None = None, *, open_batcher: OpenBatcher | None = None) -> int:
    """Run one command and return its exit status. ``open_batcher`` replaces the loading of a model."""
    args = parser().parse_args(argv)
    blas.limit_threads(max(1, (os.cpu_count() or 1) // 2))
    try:
        status = int(args.command(args, open_batcher or _load_model))
        sys.stdout.flush()  # a full disk shows itself here, and not at the interpreter's end
        return status
    except (UsageError, InvalidParameters, MissingAssets) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return USAGE
    except CannotWrite as error:
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


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch run``: one request per picture or video."""
    params = _sampling_params(args)
    if not args.prompt.strip():
        raise UsageError("--prompt is empty; say what is asked about the pictures")
    paths = find_pictures(args.paths, recursive=args.recursive, videos=args.videos)
    if args.model is None and open_batcher is _load_model and not all(map(is_sample, paths)):
        raise UsageError(
            "these are more than the sample pictures: name a model with --model PATH|HUB_ID "
            "(without one a test piece of 0.9 million parameters answers, which knows coloured shapes only)"
        )
    where = common_folder(paths)
    jobs = [
        Job(
            request_id=path,
            label=path[len(where) :],
            images=() if is_video(path) else (path,),
            videos=(Video(path, fps=args.fps, max_frames=args.max_frames),) if is_video(path) else (),
            prompt=args.prompt,
        )
        for path in paths
    ]
    return _answer(jobs, params, args, open_batcher)


def demo(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch demo``: the sample pictures and a few questions, answered by the embedded checkpoint."""
    return _answer(demo_jobs(sample_images()), _sampling_params(args), args, open_batcher)


def bench(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch bench``: a chat load, and where its time goes."""
    from vlm_batch.cli import bench as load_test

    load = load_test.Load(
        requests=args.requests,
        rate=args.rate,
        picture_share=args.pictures,
        prompt_words=_limits("--prompt-words", args.prompt_words),
        answer_tokens=_limits("--answer-tokens", args.answer_tokens),
        seed=args.seed,
    )
    check_record(args.json, overwrite=True)
    with open_batcher(args) as batcher:
        report = load_test.measure(cast("load_test.Batcher", batcher), load)
    load_test.show(report, sys.stderr if args.json == "-" else sys.stdout)
    record = None if args.json is None else StandardOutput() if args.json == "-" else LineFile(args.json)
    if record is not None:
        record.append(report.figures())
        record.close()
    return ANSWERED if all(result.ok for result in report.results) else FAILED


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


def _answer(jobs: list[Job], params: SamplingParams, args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Put every job to the batcher, show and write the answers as they come, and say how it went."""
    check_record(args.json, overwrite=args.overwrite)
    report = Report(jobs, table_to=sys.stderr if args.json == "-" else sys.stdout, quiet=args.quiet)
    requests = (_request(job, params) for job in jobs)  # lazily: the batcher takes them as it has room
    interrupted = False
    record: Record | None = None
    try:
        with report, open_batcher(args) as batcher:
            record = _open_record(args.json)  # the model is there: what is replaced now is replaced by answers
            try:
                report.begin()
                for result in batcher.as_completed(requests):
                    if record is not None:
                        record.append(_line(report.job(result.request_id), result))
                    report.add(result)
            except KeyboardInterrupt:  # leaving the block closes the batcher; what is done is kept
                interrupted = True
    finally:
        if record is not None:
            record.close()
    report.show(interrupted=interrupted)
    if interrupted:
        return INTERRUPTED
    return ANSWERED if report.num_failed <= args.max_errors else FAILED


def _request(job: Job, params: SamplingParams) -> Request:
    return Request(prompt=job.prompt, images=job.images, videos=job.videos, params=params, request_id=job.request_id)


def demo_jobs(pictures: Sequence[Path]) -> list[Job]:
    """Questions about one picture, about two, and about none."""
    by_name = {picture.stem: picture for picture in pictures}
    asked = [((name,), "describe the picture") for name in by_name] + list(DEMO_QUESTIONS)
    return [
        Job(
            request_id=f"demo-{number}",
            label=" + ".join(names) or "(text only)",
            images=tuple(str(by_name[name]) for name in names),
            prompt=prompt,
        )
        for number, (names, prompt) in enumerate(asked)
    ]


def find_pictures(paths: Sequence[str], *, recursive: bool = True, videos: bool = False) -> list[str]:
    """The pictures that the arguments name, each once and in order; what folders hold besides is said on standard error.

    ``videos`` looks into folders for videos, too. A file that does not exist is kept, to be reported as a request that
    failed. Raises UsageError if nothing is found.
    """
    suffixes = PICTURE_SUFFIXES + (VIDEO_SUFFIXES if videos else ())
    found = find_files(paths, suffixes=suffixes, recursive=recursive)
    if said := found.said():
        print(f"vlm-batch: {said}", file=sys.stderr)
    if not found.paths:
        raise UsageError(f"no picture in {', '.join(paths)}; looked for files that end in {' '.join(suffixes)}")
    return found.paths


# ---- collaborators ----


def _load_model(args: argparse.Namespace) -> AbstractContextManager[Batcher]:
    """The real batcher. Imported here: ``--version`` and usage errors should not wait for MLX."""
    model = str(args.model or default_checkpoint())
    if args.model is None:
        print(
            "vlm-batch: no --model: the embedded test piece (0.9 million parameters) answers; it knows coloured shapes only",
            file=sys.stderr,
        )
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise UsageError(
            f"there is no model at {model}; give a folder that holds config.json, or a hub id like org/name"
        )
    from vlm_batch.batcher import VLMBatcher

    options = {name: value for name in _BATCHER_OPTIONS if (value := vars(args).get(name, _UNSAID)) is not _UNSAID}
    try:
        return VLMBatcher(str(Path(model).expanduser()), max_rows=args.batch, **options)
    except Exception as error:  # whatever the loader raises, the user needs one line of it
        raise UsageError(f"cannot load the model {model}: {type(error).__name__}: {error}") from error


#: Options that go to the batcher by their own names, where they are said.
_BATCHER_OPTIONS = (
    "trust_remote_code",
    "look_ahead",
    "max_prompt_tokens",
    "max_image_pixels",
    "max_video_pixels",
    "cache_bytes",
    "cache_dir",
    "cache_dir_bytes",
    "kv_bits",
    "kv_group_size",
    "kv_quant_scheme",
    "quantized_kv_start",
)
_UNSAID = object()


class Record(Protocol):
    """Where the answers' lines go."""

    def append(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class StandardOutput:
    """The answers' lines on standard output, each flushed."""

    def append(self, record: Mapping[str, Any]) -> None:
        sys.stdout.write(encoded(record).decode())
        sys.stdout.flush()

    def close(self) -> None:
        pass


def check_record(target: str | None, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, or that has lines already, before anything is loaded."""
    if target in (None, "-"):
        return
    path = Path(str(target))
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = (
            "it is a folder" if path.is_dir() else "there is no such folder" if not folder.is_dir() else "no permission"
        )
        raise UsageError(f"cannot write {target}: {why}")
    if not overwrite and path.is_file() and path.stat().st_size:
        raise UsageError(f"{target} has lines already; --overwrite replaces them")


def _open_record(target: str | None) -> Record | None:
    """Open the output, emptied. Call it when everything else is ready."""
    if target is None:
        return None
    if target == "-":
        return StandardOutput()
    if Path(target).is_file():
        os.truncate(target, 0)
    return LineFile(target)


def _limits(option: str, pair: Sequence[int]) -> tuple[int, int]:
    least, most = pair
    if not 1 <= least <= most:
        raise UsageError(f"{option} {least} {most}: the least must be at least 1 and no more than the most")
    return least, most


def _line(job: Job, result: Result) -> dict[str, Any]:
    """One answer as a JSON object."""
    timings = {
        name: None if seconds != seconds else round(seconds, 6) for name, seconds in vars(result.timings).items()
    }
    return {
        "request_id": result.request_id,
        "images": job.images,
        "videos": [video.source for video in job.videos],
        "prompt": job.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "image_sizes": result.image_sizes,
        "model_image_sizes": result.model_image_sizes,
        "video_sizes": result.video_sizes,
        "usage": dict(vars(result.usage)),
        "timings": timings,
    }


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
    )


# ---- the command line ----


def parser() -> argparse.ArgumentParser:
    """The command line, on its own for those who want to look at it."""
    top = argparse.ArgumentParser(
        prog="vlm-batch", description="Ask a vision-language model about many pictures at once."
    )
    top.add_argument("--version", action="version", version=f"vlm-batch {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    asking = commands.add_parser(
        "run",
        help="ask one question about every picture or video",
        description="Ask one question about every picture or video.",
    )
    asking.add_argument("paths", nargs="+", metavar="PATH", help="a picture, a video, a folder of pictures, or a URL")
    asking.add_argument("--prompt", default="describe the picture", help="the question (default: %(default)s)")
    asking.add_argument(
        "--model", default=None, metavar="PATH|HUB_ID", help="the model (default: the embedded tiny checkpoint)"
    )
    asking.add_argument(
        "--recursive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look into folders in folders (default: yes)",
    )
    asking.add_argument("--videos", action="store_true", help="look for videos in folders, too")
    asking.add_argument(
        "--fps", type=float, default=None, metavar="R", help="frames a second of a video (default: the family's habit)"
    )
    asking.add_argument(
        "--max-frames", type=_at_least(1), default=None, metavar="N", help="most frames of a video (default: likewise)"
    )
    asking.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the model")
    _add_answering(asking)
    asking.set_defaults(command=run)

    showing = commands.add_parser(
        "demo",
        help="ask the embedded model about the sample pictures",
        description="Ask the embedded model about the sample pictures: one, two and none to a question.",
    )
    _add_answering(showing)
    showing.set_defaults(command=demo, model=None, trust_remote_code=False)

    _add_bench(
        commands.add_parser(
            "bench",
            help="put a chat load on a model and show where its time goes",
            description="Requests that arrive by chance, some with a picture, with prompts and answers of all lengths: "
            "how fast this machine answers them, and where the time goes.",
        )
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
    parser.add_argument(
        "--model", default=None, metavar="PATH|HUB_ID", help="the model (default: the embedded tiny checkpoint)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the model")
    parser.add_argument("--requests", type=_at_least(1), default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--batch", type=_at_least(1), default=8, metavar="N", help="most rows in the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="arrivals a second; 0 is all at once (default: twice what one request at a time could serve)",
    )
    parser.add_argument(
        "--pictures", type=float, default=0.5, metavar="SHARE", help="share with a picture (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-words", type=int, nargs=2, default=(24, 900), metavar=("MIN", "MAX"), help="default: 24 900"
    )
    parser.add_argument(
        "--answer-tokens", type=int, nargs=2, default=(8, 128), metavar=("MIN", "MAX"), help="default: 8 128"
    )
    parser.add_argument("--seed", type=int, default=4, help="of the requests and arrivals (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="add the figures to a file as a JSON line; - is standard output")
    parser.set_defaults(command=bench)


def _add_answering(parser: argparse.ArgumentParser) -> None:
    """The options of every command that asks a model."""
    defaults = SamplingParams()
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help="longest answer (default: %(default)s)"
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=defaults.temperature,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    sampling.add_argument(
        "--top-p", type=float, default=defaults.top_p, metavar="P", help="1 is off (default: %(default)s)"
    )
    sampling.add_argument(
        "--top-k", type=int, default=defaults.top_k, metavar="K", help="0 is off (default: %(default)s)"
    )
    sampling.add_argument(
        "--min-p", type=float, default=defaults.min_p, metavar="P", help="0 is off (default: %(default)s)"
    )
    sampling.add_argument(
        "--seed", type=int, default=defaults.seed, help="makes sampled answers reproducible, whatever the batch"
    )
    _add_batcher(parser.add_argument_group("the batch and its memory"))
    parser.add_argument(
        "--json", metavar="FILE", help="write one JSON line per answer as it comes; - is standard output"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what the output has already")
    parser.add_argument(
        "--max-errors",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="exit with 0 if no more than N fail (default: 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="only the table and the totals")


def _add_batcher(group: argparse._ArgumentGroup) -> None:
    """Options that the batcher takes. What is not said is the library's own default."""
    group.add_argument(
        "--batch",
        "--max-rows",
        type=_at_least(1),
        default=8,
        metavar="N",
        help="most rows in the batch (default: %(default)s)",
    )
    say = partial(group.add_argument, default=argparse.SUPPRESS)
    say("--look-ahead", type=_at_least(1), metavar="N", help="requests that are read ahead of the batch (default: 16)")
    say(
        "--max-prompt-tokens",
        type=_at_least(1),
        metavar="N",
        help="longest prompt, pictures included (default: the model's)",
    )
    say("--max-image-pixels", type=_amount, metavar="N", help="largest picture, as 40M; none lifts it (default: 89.5M)")
    say(
        "--max-video-pixels", type=_amount, metavar="N", help="likewise, all frames of a video together (default: 500M)"
    )
    say(
        "--cache-bytes",
        type=_bytes,
        metavar="N",
        help="memory kept for later rows, as 2G; 0 keeps nothing (default: 1.07G)",
    )
    say("--cache-dir", metavar="FOLDER", help="where what memory cannot keep goes (default: nowhere)")
    say("--cache-dir-bytes", type=_bytes, metavar="N", help="most bytes of that folder")
    say("--kv-bits", type=float, metavar="BITS", help="keys and values in so many bits (default: exact)")
    say("--kv-group-size", type=_at_least(1), metavar="N", help="values that share a scale (default: 64)")
    say("--kv-quant-scheme", choices=("uniform", "turboquant"), help="default: uniform")
    say("--quantized-kv-start", type=_at_least(0), metavar="N", help="tokens that stay exact (default: 0)")


def _amount(text: str) -> int | None:
    """A count such as 40M; None for "none"."""
    return None if text.lower() == "none" else _bytes(text)


def _bytes(text: str) -> int:
    """A number with a decimal K, M, G or T."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    number = text.lower().removesuffix("b")
    factor = factors.get(number[-1:], 1)
    try:
        value = float(number[:-1] if number[-1:] in factors else number) * factor
        if not 0 <= value < 2**62:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 500M or 2G") from None
    return int(value)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number
