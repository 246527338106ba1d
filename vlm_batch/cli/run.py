"""``vlm-batch run`` and ``vlm-batch demo``: command lines of ``vlm_batch.jobs``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_batch.assets import is_sample, sample_images, sample_model
from vlm_batch.cli.cluster import open_cluster
from vlm_batch.cli.console import beside
from vlm_batch.cli.dry_run import show_dry_run
from vlm_batch.cli.ending import Signals
from vlm_batch.cli.job import (
    AskedJob,
    check_report,
    run_shown,
    say_skipped,
    status_of,
    write_report,
)
from vlm_batch.cli.model import (
    EMBEDDED,
    KNOWS,
    OpenBatcher,
    UsageError,
    load_model,
    place_of,
)
from vlm_batch.cli.options import COLUMNS, said_sampling, text_of
from vlm_batch.cli.watching import JobView
from vlm_batch.inputs.fetch import is_address
from vlm_batch.jobs import journal
from vlm_batch.jobs.cells import Columns
from vlm_batch.jobs.files import common_folder, is_missing
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.rows import JobRow, Shard, Source
from vlm_batch.jobs.sidecars import Sidecars
from vlm_batch.jobs.sinks import DELIMITED, Sink, open_sink, suffix_form
from vlm_batch.jobs.sources import Files, Reading, open_sources
from vlm_batch.runtime.beginning import BEGINNING
from vlm_batch.types import SamplingParams, Video

#: Options of the batcher that decide answers.
DECISIVE = (
    "max_prompt_tokens",
    "max_image_pixels",
    "min_pixels",
    "max_pixels",
    "reproducible",
    "kv_bits",
    "kv_group_size",
    "kv_quant_scheme",
    "quantized_kv_start",
)

#: Further questions of the demo: sample pictures' names, and a question.
DEMO_QUESTIONS = (
    (("receipt",), "What is the total?"),
    (("receipt",), "Read this receipt."),
    (("digits_728",), "read the digits"),
    (("red_circle_above_blue_triangle",), "what is below the circle?"),
    (("black_circle_left_of_blue_square",), "what colour is the square?"),
    (("red_circle", "red_circle_above_blue_triangle"), "are the pictures the same?"),
    (
        ("black_circle_left_of_blue_square", "yellow_triangle_left_of_green_cross"),
        "which picture has a cross?",
    ),
    (
        ("black_circle_left_of_blue_square", "yellow_triangle_left_of_green_cross"),
        "describe both pictures",
    ),
    ((), "count to 12"),
    ((), "repeat: a a a a"),
    ((), "reverse: m l x"),
    ((), "what is 4 + 7?"),
)


def run(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    with _signals(args) as signals:
        return _run(args, open_batcher, signals)


def _check_no_question(paths: Sequence[str]) -> None:
    """Raise UsageError for a question in the place of a path, which is easily typed there."""
    for path in paths:
        is_question = " " in path or path.endswith("?")
        if is_question and is_missing(path):
            raise UsageError(
                f"there is no file {path!r}; a question goes behind --prompt: "
                f"vlm-batch run PICTURES --prompt {shlex.quote(path)}"
            )


def _signals(args: argparse.Namespace) -> Signals:
    """Return how signals end the job: one that keeps its answers outlives its terminal."""
    file = None if args.out == "-" else args.out
    if args.dry_run or (file is None and args.sidecar is None):
        return Signals(None)
    if file is None:
        return Signals(os.devnull)
    shard = (args.shard or "1/1").replace("/", "-of-")
    return Signals(f"{file.replace('{shard}', shard)}.log")


def _run(args: argparse.Namespace, open_batcher: OpenBatcher, signals: Signals) -> int:
    questions = _questions(args)
    # its own check, before anything is read
    Video("", fps=args.fps, max_frames=args.max_frames)
    reading = Reading(
        columns=Columns(**{what: vars(args)[f"{what}_column"] for what in COLUMNS}),
        recursive=args.recursive,
        videos=args.videos,
        audios=args.audios,
        pdfs=args.pdf,
        fps=args.fps,
        max_frames=args.max_frames,
        dpi=args.dpi,
        split=args.split,
        own_prompts=not (args.prompt or args.prompt_file),
    )
    _check_no_question(args.paths)
    sources, found = open_sources(args.paths, reading)
    say_skipped(found)
    is_kept = args.out is not None or args.sidecar is not None
    if (
        args.model is None
        and is_kept
        and open_batcher is load_model
        and not all(map(_is_samples, sources))
    ):
        raise UsageError(
            f"these are more than the sample pictures: name a model with --model PATH|HUB_ID to keep answers about them "
            f"(without one {EMBEDDED} answers; {KNOWS})"
        )
    if args.ray is not None:
        if args.shard == "auto":
            raise UsageError(
                "--ray and --shard auto are two ways to use several machines; give one of them"
            )
        open_batcher = open_cluster
    if args.dry_run:
        from vlm_batch.engine.reuse import Caches  # with MLX, which is needed now

        return show_dry_run(
            Job(sources, questions, Sink(), _shard(args)),
            lambda: open_batcher(args),
            sys.stdout,
            cache_bytes=vars(args).get("cache_bytes", Caches.max_bytes),
        )
    label = _label(sources)
    return _answer(sources, questions, args, open_batcher, signals, label)


def demo(args: argparse.Namespace, open_batcher: OpenBatcher) -> int:
    with _signals(args) as signals:
        return _answer(
            [Demo()],
            Questions(params=_sampling_params(args)),
            args,
            open_batcher,
            signals,
            _demo_label,
        )


class Demo(Source):
    """Questions about one sample picture, two, and none."""

    name = "demo"

    def rows(self) -> Iterator[JobRow]:
        by_name = {picture.stem: picture for picture in sample_images()}
        asked = [((name,), DEFAULT_PROMPT) for name in by_name] + list(DEMO_QUESTIONS)
        for number, (names, prompt) in enumerate(asked):
            yield JobRow(
                id=f"demo-{number}",
                images=tuple(str(by_name[name]) for name in names),
                prompt=prompt,
            )


def _answer(
    sources: list[Source],
    questions: Questions,
    args: argparse.Namespace,
    open_batcher: OpenBatcher,
    signals: Signals,
    label: Callable[[JobRow], str],
) -> int:
    shard = _shard(args)
    target = _target(args, shard)
    check_report(args.report, target)
    file = None if target == "-" else target
    is_kept = file is not None or args.sidecar is not None
    job = AskedJob(
        sources=sources,
        sink=_sink(target, sources, questions, args, shard),
        questions=questions,
        shard=shard,
        settings=_settings(args),
        carried=args.columns or (),
        kept_in=file,
        is_kept=is_kept,
    )
    view = JobView(
        table_to=beside(target),
        quiet=args.quiet,
        verbose=args.verbose,
        says_prompt=bool(args.prompt or args.prompt_file),
        label=label,
        answers_in=file,
        only_here=target is None and args.sidecar is None,
        goes_on=is_kept,
    )
    summary = run_shown(job, args, open_batcher, view, signals)
    write_report(job, args, summary)
    if args.shard == "auto" and not summary.interrupted:
        _wait_for_all()
    return status_of(args, summary, signals)


def _wait_for_all() -> None:
    """Wait for the other processes: mlx.launch ends them when one exits with an error."""
    import mlx.core as mx

    mx.eval(mx.distributed.all_sum(mx.ones(1)))


def _is_samples(source: Source) -> bool:
    return isinstance(source, Files) and all(map(is_sample, source.paths))


def _label(sources: Sequence[Source]) -> Callable[[JobRow], str]:
    """Return a function that names rows without their common folder."""
    where = ""
    if all(isinstance(source, Files) for source in sources):
        where = _folder_of(sources)
    return lambda row: row.id[len(where) :]


def _demo_label(row: JobRow) -> str:
    """Name a row of the demo by its sample pictures."""
    names = [Path(str(image)).stem for image in row.images]
    return " + ".join(names) or "(text only)"


def _folder_of(sources: Sequence[Source]) -> str:
    paths: list[str] = []
    for source in sources:
        if isinstance(source, Files):
            paths += source.paths
    return common_folder(paths)


def _questions(args: argparse.Namespace) -> Questions:
    texts = [*args.prompt, *map(str.strip, map(text_of, args.prompt_file))]
    if not all(map(str.strip, texts)):
        raise UsageError("--prompt is empty; say what is asked about the pictures")
    return Questions(
        tuple(texts) or (DEFAULT_PROMPT,),
        args.system,
        _sampling_params(args),
        args.thinking,
    )


def _shard(args: argparse.Namespace) -> Shard:
    if args.shard != "auto":
        return Shard.parse(args.shard) if args.shard else Shard()
    import mlx.core as mx

    group = mx.distributed.init()
    return Shard(group.rank() + 1, group.size())


def _target(args: argparse.Namespace, shard: Shard) -> str | None:
    """Return the output's name. Raises UsageError."""
    if args.out is None:
        if args.format is not None:
            raise UsageError(
                "--format is the form of the output; name it with --out FILE (- is standard output)"
            )
        return None
    target = str(args.out)
    if target == "-" and 1 in BEGINNING.closed:
        raise UsageError("standard output is closed; name a file with --out FILE")
    if args.shard == "auto" and "{shard}" not in target:
        raise UsageError(
            "--shard auto needs {shard} in the output's name, or its processes would write one file"
        )
    return target.replace("{shard}", f"{shard.number}-of-{shard.count}")


def _sink(
    target: str | None,
    sources: Sequence[Source],
    questions: Questions,
    args: argparse.Namespace,
    shard: Shard,
) -> Sink:
    if args.spreadsheet_safe and not _is_delimited(args, target):
        raise UsageError(
            "--spreadsheet-safe is for CSV and TSV files; other forms are for programs, and keep texts as they are"
        )
    sink = None if target is None else _file_sink(target, args)
    if args.sidecar is None:
        return Sink() if sink is None else sink

    def pictures() -> Iterator[tuple[str, str]]:
        for item in Job(sources, questions, Sink(), shard).items(scan=True):
            if item.row.error is None:
                yield item.id, _picture_file(item.row)

    return Sidecars(args.sidecar, _folder_of(sources), pictures, sink)


def _is_delimited(args: argparse.Namespace, target: str | None) -> bool:
    return target is not None and (args.format or suffix_form(target)) in DELIMITED


def _file_sink(target: str, args: argparse.Namespace) -> Sink:
    columns = None
    if args.columns:
        columns = tuple(dict.fromkeys(("id", *args.columns, "error")))
    return open_sink(
        target,
        columns,
        form=args.format,
        model=Path(args.model or sample_model()).name,
        spreadsheet_safe=args.spreadsheet_safe is not False,
    )


def _picture_file(row: JobRow) -> str:
    """Return the one file that a row is about; "" for another row."""
    if row.load is not None or len(row.sources) != 1:
        return ""
    (file,) = row.sources
    return file if isinstance(file, str) and not is_address(file) else ""


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return settings that decide answers, besides prompts and sampling."""
    model, files = args.model, {}
    if model is not None and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
        files = journal.model_files(Path(model))
    given = vars(args)
    said = {"model": model, journal.MODEL_FILES: files}
    said |= {name: given[name] for name in DECISIVE if name in given}
    said |= {name: given[name] for name in ("columns", "dpi", "fps", "max_frames")}
    if args.format == "openai-batch":
        said["format"] = args.format
    if _is_delimited(args, args.out):
        said[journal.SAFE] = args.spreadsheet_safe is not False
    return said


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    recommended = _recommended(args) if args.sampling == "recommended" else {}
    return SamplingParams(**{**recommended, **said_sampling(args)})


def _recommended(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the sampling that the model's folder recommends, and say it."""
    from vlm_batch.loading import find_checkpoint  # with MLX, which is needed now
    from vlm_batch.loading.recommended import read_recommended

    model = str(args.model or sample_model())
    try:
        found = read_recommended(find_checkpoint(place_of(model)))
    except FileNotFoundError as error:
        raise UsageError(f"cannot load the model {model}: {error}") from error
    print(f"vlm-batch: sampling as {model} recommends: {found}", file=sys.stderr)
    return found.params
