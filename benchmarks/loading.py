"""Pictures a second from JPEG files, and how busy they keep an engine: python -m benchmarks.loading [--engine]

The first table leaves the engine out: files are read, decoded and processed by the library's own loaders, and what comes out is
let go of. The processor is the embedded checkpoint's with the published bounds of the Qwen family, so that a picture is
seen at its own size. The second says where one picture's time goes. With ``--engine`` a job over a folder is answered, and the
engine's busy seconds are put beside the job's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.arrays import evaluated
from vlm_batch.assets import default_checkpoint
from vlm_batch.inputs.images import load_image
from vlm_batch.inputs.loaders import Loaders, Loading
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import PixelBounds
from vlm_batch.loading import EngineOptions, load_model, make_engine
from vlm_batch.store.digest import digest

#: Between how many pixels Qwen2-VL's published processor has a picture scaled.
PUBLISHED = PixelBounds(56 * 56, 16384 * 28 * 28)
PROMPT = "describe the picture"
#: Questions with the loaders at a time, for each of their threads.
AHEAD = 4


def photo(megapixels: float, seed: int) -> bytes:
    """A JPEG of 4:3 with smooth areas and some grain, about as large as a camera's."""
    high = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    wide = round(high * 4 / 3)
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(
        random.integers(0, 256, (high // 24, wide // 24, 3), dtype=np.uint8)
    )
    smooth = np.asarray(
        coarse.resize((wide, high), Image.Resampling.BICUBIC), dtype=np.int16
    )
    grain = random.integers(-6, 7, smooth.shape, dtype=np.int16)
    file = BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=90
    )
    return file.getvalue()


def write_photos(folder: Path, megapixels: float, count: int) -> list[Path]:
    """Files of one size; a few different ones, many times."""
    different = [photo(megapixels, seed) for seed in range(min(count, 4))]
    paths = [folder / f"{megapixels:g}-{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(different[number % len(different)])
    return paths


def pictures_a_second(
    preparer: Preparer, paths: Sequence[Path], threads: int
) -> tuple[float, float]:
    """(pictures a second, CPU milliseconds a picture) read, decoded and processed by so many threads.

    Nobody waits for them but this. The second figure holds on a machine that other work shares, too.
    """
    loaders = Loaders(preparer.prepare, num_threads=threads)
    under_way = deque[Loading]()
    questions = [preparer.check(Request(prompt=PROMPT, images=path)) for path in paths]
    try:
        for question in questions[: 2 * threads]:  # copies of the processor, and memory
            loaders.start(question).result()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for question in questions:
            if len(under_way) == AHEAD * threads:
                under_way.popleft().result()
            under_way.append(loaders.start(question))
        while under_way:
            under_way.popleft().result()
        seconds = time.perf_counter() - begin
        cpu_seconds = time.process_time() - begin_cpu
        return len(questions) / seconds, 1e3 * cpu_seconds / len(questions)
    finally:
        loaders.close()


def milliseconds(call: Callable[[], Any], times: int = 7) -> float:
    """Of one call, the median."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


def stages(preparer: Preparer, path: Path) -> dict[str, float]:
    """Milliseconds of one picture's way, in order."""
    processing, data = preparer.processing, path.read_bytes()
    question = preparer.check(Request(prompt=PROMPT, images=path))
    image = load_image(data)
    assert question.prompt is not None
    inputs = processing.inputs(question.prompt, [image])
    part = processing.processor.image_processor
    tokens = processing.tokenizer.decode(np.array(inputs["input_ids"])[0].tolist())
    return {
        "read": milliseconds(path.read_bytes),
        "decode": milliseconds(partial(load_image, data)),
        "resize, normalise, patches": milliseconds(partial(part, [image])),
        "tokens": milliseconds(partial(processing.tokenizer, [tokens])),
        "the whole processor": milliseconds(
            lambda: evaluated(processing.inputs(question.prompt or "", [image])),
        ),
        "digest (engine's thread)": milliseconds(
            partial(digest, inputs["pixel_values"])
        ),
    }


def answer_folder(
    batcher: VLMBatcher, paths: Sequence[Path], tokens: int
) -> dict[str, float]:
    """Answer about every file, ``tokens`` each; rates, and the share of the time in which the engine had work."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = (Request(prompt=PROMPT, images=path, params=params) for path in paths)
    results, begin, before = [], time.perf_counter(), batcher.stats()
    for result in batcher.as_completed(requests):
        results.append(result.raise_for_error())
    seconds, after = time.perf_counter() - begin, batcher.stats()
    return {
        "pictures": len(results),
        "pictures_a_second": len(results) / seconds,
        "tokens_a_second": sum(len(result.token_ids) for result in results) / seconds,
        "engine_busy": (after.busy_seconds - before.busy_seconds) / seconds,
        **{
            name: statistics.mean(getattr(one.timings, name) for one in results)
            for name in ("read", "process", "total")
        },
    }


def make_preparer(bounds: PixelBounds | None) -> Preparer:
    """The embedded checkpoint's, with a processor that scales to ``bounds``."""
    model, processor = load_model(default_checkpoint())
    if bounds is not None:
        processor.image_processor.min_pixels = bounds.least
        processor.image_processor.max_pixels = bounds.most
    return make_engine(model, processor, EngineOptions()).preparer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megapixels", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--pictures",
        type=int,
        default=40,
        help="of each size and number of threads (default: 40)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="the best of so many is shown (default: 3)",
    )
    parser.add_argument("--engine", action="store_true", help="also answer a folder")
    parser.add_argument(
        "--answered",
        type=int,
        default=160,
        help="pictures of that folder (default: 160)",
    )
    parser.add_argument(
        "--model", default=None, help="for --engine (default: the embedded checkpoint)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=48,
        help="of each answer, for --engine (default: 48)",
    )
    args = parser.parse_args()
    console = Console(width=110)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            size: write_photos(Path(folder), size, args.pictures)
            for size in args.megapixels
        }
        preparer = make_preparer(PUBLISHED)
        rates = Table(
            "loaders",
            *(f"{size:g} MP" for size in sizes),
            title="pictures a second (CPU time of one), without an engine",
        )
        found["pictures_a_second"] = {size: {} for size in sizes}
        for threads in args.threads:
            cells = []
            for size, paths in sizes.items():
                rounds = [
                    pictures_a_second(preparer, paths, threads)
                    for _ in range(args.rounds)
                ]
                rate = max(rate for rate, _ in rounds)
                cpu = min(cpu for _, cpu in rounds)
                found["pictures_a_second"][size][threads] = {
                    "rate": rate,
                    "cpu_milliseconds": cpu,
                }
                cells.append(f"{rate:.1f} ({cpu:.0f} ms)")
            rates.add_row(str(threads), *cells)
        console.print(rates)
        found["milliseconds"] = {
            size: stages(preparer, paths[0]) for size, paths in sizes.items()
        }
        table = Table(
            "", *(f"{size:g} MP" for size in sizes), title="milliseconds a picture"
        )
        for name in next(iter(found["milliseconds"].values())):
            table.add_row(
                name,
                *(f"{parts[name]:.1f}" for parts in found["milliseconds"].values()),
            )
        console.print(table)
        if args.engine:
            with VLMBatcher(args.model or default_checkpoint()) as batcher:
                found["engine"] = {
                    size: answer_folder(
                        batcher,
                        write_photos(Path(folder), size, args.answered),
                        args.tokens,
                    )
                    for size in sizes
                }
            for size, facts in found["engine"].items():
                console.print(
                    f"{size:g} MP:",
                    ", ".join(f"{name} {value:.3g}" for name, value in facts.items()),
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
