"""The command ``vlm-batch``: one answer for every picture or video, the demo, and the list of families.

Exit status: 0 when every request was answered (or no more than ``--max-errors`` failed), 1 when more failed, 2 when the
command line or the model was wrong, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TextIO, cast

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

from vlm_batch._version import __version__  # noqa: E402
from vlm_batch.assets import (  # noqa: E402
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
    MissingAssets,
    default_checkpoint,
    sample_images,
)
from vlm_batch.cli import verify as verifying  # noqa: E402
from vlm_batch.cli.console import Job, Report, print_families, print_family_details  # noqa: E402
from vlm_batch.errors import InvalidParameters  # noqa: E402
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
        return int(args.command(args, open_batcher or _load_model))
    except (UsageError, InvalidParameters, MissingAssets) as error:
        print(f"vlm-batch: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("vlm-batch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


# ---- commands ----


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch run``: one request per picture or video."""
    params = _sampling_params(args)
    paths = find_pictures(args.paths, recursive=args.recursive, videos=args.videos)
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
    record = _open_record(args.json)
    try:
        with open_batcher(args) as batcher:
            report = load_test.measure(cast("load_test.Batcher", batcher), load)
        load_test.show(report, sys.stderr if record is sys.stdout else sys.stdout)
        if record is not None:
            record.write(json.dumps(report.figures()) + "\n")
    finally:
        if record is not None and record is not sys.stdout:
            record.close()
    return ANSWERED if all(result.ok for result in report.results) else FAILED


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


def _answer(jobs: list[Job], params: SamplingParams, args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Put every job to the batcher, show and write the answers as they come, and say how it went."""
    record = _open_record(args.json)
    report = Report(jobs, table_to=sys.stderr if record is sys.stdout else sys.stdout, quiet=args.quiet)
    requests = (_request(job, params) for job in jobs)  # lazily: the batcher takes them as it has room
    interrupted = False
    try:
        with report, open_batcher(args) as batcher:
            try:
                report.begin()
                for result in batcher.as_completed(requests):
                    if record is not None:
                        _write(record, report.job(result.request_id), result)
                    report.add(result)
            except KeyboardInterrupt:  # leaving the block closes the batcher; what is done is kept
                interrupted = True
    finally:
        if record is not None and record is not sys.stdout:
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
    """The pictures that the arguments name, each once and in order: files and URLs as they are, folders by suffix.

    ``videos`` looks into folders for videos, too. A file that does not exist is kept, to be reported as a request that
    failed. Raises UsageError if nothing is found.
    """
    found: dict[str, None] = {}
    suffixes = PICTURE_SUFFIXES + (VIDEO_SUFFIXES if videos else ())
    for path in paths:
        folder = Path(path)
        if not folder.is_dir():
            found[path] = None
            continue
        inside = sorted(folder.rglob("*") if recursive else folder.iterdir())
        found.update((str(file), None) for file in inside if _is_wanted(file.relative_to(folder), file, suffixes))
    if not found:
        raise UsageError(f"no picture in {', '.join(paths)}; looked for files that end in {' '.join(suffixes)}")
    return list(found)


def common_folder(pictures: Sequence[str]) -> str:
    """The folders that all paths begin with, to be left out where they are shown; "" if there are none."""
    parents = {os.path.dirname(picture) for picture in pictures}
    if "" in parents:
        return ""
    folder = os.path.commonprefix([parent + os.sep for parent in parents])  # noqa: RUF071  (cut to whole folders below)
    return folder[: folder.rfind(os.sep) + 1]


def is_video(path: str) -> bool:
    """Whether a path or URL names a video, by its suffix."""
    return path.partition("?")[0].lower().endswith(VIDEO_SUFFIXES)


def _is_wanted(relative: Path, file: Path, suffixes: Sequence[str]) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and file.suffix.lower() in suffixes and file.is_file()


# ---- collaborators ----


def _load_model(args: argparse.Namespace) -> AbstractContextManager[Batcher]:
    """The real batcher. Imported here: ``--version`` and usage errors should not wait for MLX."""
    model = str(args.model or default_checkpoint())
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise UsageError(
            f"there is no model at {model}; give a folder that holds config.json, or a hub id like org/name"
        )
    from vlm_batch.batcher import VLMBatcher

    try:
        return VLMBatcher(str(Path(model).expanduser()), max_rows=args.batch, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # whatever the loader raises, the user needs one line of it
        raise UsageError(f"cannot load the model {model}: {type(error).__name__}: {error}") from error


def _open_record(target: str | None) -> TextIO | None:
    if target is None:
        return None
    if target == "-":
        return sys.stdout
    try:
        return open(target, "w", encoding="utf-8")  # closed by _answer
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error


def _limits(option: str, pair: Sequence[int]) -> tuple[int, int]:
    least, most = pair
    if not 1 <= least <= most:
        raise UsageError(f"{option} {least} {most}: the least must be at least 1 and no more than the most")
    return least, most


def _write(record: TextIO, job: Job, result: Result) -> None:
    """One JSON line for one result, flushed: what is done is on disk whatever happens next."""
    usage, timings = result.usage, result.timings
    line = {
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
        "usage": dict(vars(usage)),
        "timings": {name: None if seconds != seconds else round(seconds, 6) for name, seconds in vars(timings).items()},
    }
    record.write(json.dumps(line, ensure_ascii=False) + "\n")
    record.flush()


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
    parser.add_argument("--json", metavar="FILE", help="write the figures as a JSON line; - is standard output")
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
    parser.add_argument(
        "--batch", type=_at_least(1), default=8, metavar="N", help="most rows in the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write one JSON line per answer as it comes; - is standard output"
    )
    parser.add_argument(
        "--max-errors",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="exit with 0 if no more than N fail (default: 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="only the table and the totals")


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
