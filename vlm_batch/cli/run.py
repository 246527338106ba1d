"""``vlm-batch run`` and ``vlm-batch demo``: faces of ``vlm_batch.jobs``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_batch.assets import is_sample, sample_images
from vlm_batch.cli.cluster import open_cluster
from vlm_batch.cli.model import EMBEDDED, OpenBatcher, UsageError, load_model
from vlm_batch.cli.watching import JobView, show_dry_run
from vlm_batch.jobs import journal
from vlm_batch.jobs.cells import Columns
from vlm_batch.jobs.files import common_folder, is_url
from vlm_batch.jobs.lines import CannotWrite, replace_file
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.rows import Row, Shard, Source, spelled
from vlm_batch.jobs.runner import ANSWER_FIELDS, Job
from vlm_batch.jobs.runner import run as run_job
from vlm_batch.jobs.sidecars import Sidecars
from vlm_batch.jobs.sinks import AnswerFile, Sink, open_sink
from vlm_batch.jobs.sources import Files, Reading, open_sources
from vlm_batch.jobs.summary import Summary
from vlm_batch.jobs.workers import NoWorkers
from vlm_batch.types import SamplingParams, Video

ANSWERED, FAILED, INTERRUPTED = 0, 1, 130

#: Further questions of the demo: names of sample pictures, and the question about them.
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


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch run``: every row of the sources that the arguments name."""
    questions = _questions(args)
    Video("", fps=args.fps, max_frames=args.max_frames)  # its own check, before anything is read
    reading = Reading(
        columns=Columns(image=args.image_column, video=args.video_column, id=args.id_column, prompt=args.prompt_column),
        recursive=args.recursive,
        videos=args.videos,
        pdfs=args.pdf,
        fps=args.fps,
        max_frames=args.max_frames,
        dpi=args.dpi,
        split=args.split,
        own_prompts=not (args.prompt or args.prompt_file),
    )
    sources, found = open_sources(args.paths, reading)
    if said := found.said():
        print(f"vlm-batch: {said}", file=sys.stderr)
    if args.model is None and open_batcher is load_model and not all(map(_is_samples, sources)):
        raise UsageError(
            f"these are more than the sample pictures: name a model with --model PATH|HUB_ID "
            f"(without one {EMBEDDED} answers, which knows coloured shapes only)"
        )
    if args.ray is not None:
        if args.shard == "auto":
            raise UsageError("--ray and --shard auto are two ways to use several machines; give one of them")
        open_batcher = open_cluster
    if args.dry_run:
        from vlm_batch.engine.reuse import Caches  # with MLX, which is needed now

        return show_dry_run(
            Job(sources, questions, Sink(), _shard(args)),
            lambda: open_batcher(args),
            sys.stdout,
            rows=args.batch,
            cache_bytes=vars(args).get("cache_bytes", Caches.max_bytes),
        )
    return _answer(sources, questions, args, open_batcher)


def demo(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """``vlm-batch demo``: the sample pictures and a few questions, answered by the embedded checkpoint."""
    return _answer([Demo()], Questions(params=_sampling_params(args)), args, open_batcher)


class Demo(Source):
    """Questions about one sample picture, about two, and about none."""

    name = "demo"

    def rows(self) -> Iterator[Row]:
        by_name = {picture.stem: picture for picture in sample_images()}
        asked = [((name,), DEFAULT_PROMPT) for name in by_name] + list(DEMO_QUESTIONS)
        for number, (names, prompt) in enumerate(asked):
            yield Row(id=f"demo-{number}", images=tuple(str(by_name[name]) for name in names), prompt=prompt)


def _answer(sources: list[Source], questions: Questions, args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    """Run the job, show it, and say how it went."""
    shard = _shard(args)
    target = _target(args, shard)
    if args.report is not None:
        if not args.report.lower().endswith((".html", ".htm")):
            raise UsageError(f"--report {args.report}: the report is a page; give it a name that ends in .html")
        journal.check_writable(Path(args.report))
    sink = _sink(target, sources, questions, args, shard)
    is_kept = target not in (None, "-") or args.sidecar is not None
    view = JobView(
        table_to=sys.stderr if target == "-" else sys.stdout,
        quiet=args.quiet,
        says_prompt=bool(args.prompt or args.prompt_file),
        label=_labels(sources),
        answers_in=None if target in (None, "-") else target,
        goes_on=is_kept,
    )
    try:
        with view, _ended_by_signals():
            summary = run_job(
                sources,
                sink,
                lambda: open_batcher(args),
                questions=questions,
                shard=shard,
                settings=_settings(args),
                carried=tuple(name for name in args.columns or () if name not in ANSWER_FIELDS),
                resume=args.resume,
                overwrite=args.overwrite,
                force=args.force,
                retry_errors=args.retry_errors,
                keeps_samples=args.report is not None,
                watch=view,
            )
    except (CannotWrite, NoWorkers) as error:
        raise type(error)(f"{error}; --resume goes on from there" if is_kept else str(error)) from error
    view.show(summary)
    if args.report is not None and summary.ended_rows:
        _write_report(args, summary, questions)
    elif args.report is not None:  # an earlier run's page stays
        print(f"vlm-batch: {args.report} is not written: a report is about the rows of its own run", file=sys.stderr)
    if summary.interrupted:
        return INTERRUPTED
    if args.shard == "auto":
        _wait_for_all()
    return ANSWERED if summary.num_failed <= args.max_errors else FAILED


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM end a job as an interrupt does, with its output made; other threads cannot set that, and do not."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for_all() -> None:
    """Wait for the other processes of mlx.launch, which ends them when one leaves with a status that is not 0."""
    import mlx.core as mx

    mx.eval(mx.distributed.all_sum(mx.ones(1)))


def _write_report(args: argparse.Namespace, summary: Summary, questions: Questions) -> None:
    from vlm_batch.jobs import report

    page = report.render(summary, model=str(args.model or EMBEDDED), prompts=questions.prompts)
    replace_file(Path(args.report), spelled(page).encode())


def _is_samples(source: Source) -> bool:
    return isinstance(source, Files) and all(map(is_sample, source.paths))


def _labels(sources: Sequence[Source]) -> Callable[[Row], str]:
    """Names of rows where they are shown: without the folder that all of them lie in."""
    where = _folder_of(sources) if all(isinstance(source, Files) for source in sources) else ""
    samples = {str(path): path.stem for path in sample_images()} if any(isinstance(s, Demo) for s in sources) else {}

    def label(row: Row) -> str:
        if samples:
            return " + ".join(samples[str(image)] for image in row.images) or "(text only)"
        return row.id[len(where) :]

    return label


def _folder_of(sources: Sequence[Source]) -> str:
    """The folder that all files lie in."""
    return common_folder([path for source in sources if isinstance(source, Files) for path in source.paths])


def _questions(args: argparse.Namespace) -> Questions:
    texts = list(args.prompt or ())
    texts += [_text_of(file).strip() for file in args.prompt_file or ()]
    if not all(text.strip() for text in texts):
        raise UsageError("--prompt is empty; say what is asked about the pictures")
    return Questions(tuple(texts) or (DEFAULT_PROMPT,), args.system, _sampling_params(args), args.thinking)


def _shard(args: argparse.Namespace) -> Shard:
    """This process's part; ``auto`` is its rank among those that mlx.launch started."""
    if args.shard != "auto":
        return Shard.parse(args.shard) if args.shard else Shard()
    import mlx.core as mx

    group = mx.distributed.init()
    return Shard(group.rank() + 1, group.size())


def _target(args: argparse.Namespace, shard: Shard) -> str | None:
    """The output; ``{shard}`` in its name is the shard's number."""
    if args.out is not None and args.json is not None:
        raise UsageError("--out and --json exclude each other")
    target: str | None = args.out if args.out is not None else args.json
    if args.shard == "auto" and target is not None and "{shard}" not in target:
        raise UsageError("--shard auto needs {shard} in the output's name, or its processes would write one file")
    return None if target is None else target.replace("{shard}", f"{shard.number}-of-{shard.count}")


def _sink(
    target: str | None, sources: Sequence[Source], questions: Questions, args: argparse.Namespace, shard: Shard
) -> Sink:
    columns = tuple(dict.fromkeys(("id", *args.columns, "error"))) if args.columns else None
    if target is None:
        sink: Sink | None = None
    elif args.json is not None and target != "-":
        sink = AnswerFile(Path(target).expanduser(), columns)
    else:
        sink = open_sink(target, columns)
    if args.sidecar is None:
        return Sink() if sink is None else sink

    def pictures() -> Iterator[tuple[str, str]]:
        for item in Job(sources, questions, Sink(), shard).items(scan=True):
            files = [*item.row.images, *(video.source for video in item.row.videos)]
            is_file = len(files) == 1 and item.row.load is None and isinstance(files[0], str) and not is_url(files[0])
            if item.row.error is None:
                yield item.id, str(files[0]) if is_file else ""

    return Sidecars(args.sidecar, _folder_of(sources), pictures, sink)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that decide answers and output beside prompts and sampling."""
    model, files = args.model, {}
    if model is not None and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
        files = journal.model_files(Path(model))
    names = (
        *("max_prompt_tokens", "max_image_pixels", "min_pixels", "max_pixels", "reproducible"),
        *("kv_bits", "kv_group_size", "kv_quant_scheme", "quantized_kv_start"),
    )
    said = {name: value for name, value in vars(args).items() if name in names}
    said = {"model": model, journal.MODEL_FILES: files, **said}
    return {**said, **{name: vars(args)[name] for name in ("columns", "dpi", "fps", "max_frames")}}


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
        *("thinking_budget", "regex", "choice"),
    )
    return SamplingParams(
        **{name: vars(args)[name] for name in names},
        stop=args.stop or (),
        json_schema=None if args.json_schema is None else _text_of(args.json_schema),
    )


def _text_of(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
