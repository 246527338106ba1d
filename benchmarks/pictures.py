"""Where the time of many large pictures goes: python -m benchmarks.pictures [--shape 3b | --turns 10]

JPEG files of 1 to 2 megapixels are answered through ``VLMBatcher``, those of a camera (one size) and those of a folder (all
sizes), and the time of the engine's thread is split by what it called. A second table takes single pictures apart, stage by
stage, and waits for the device after each: how long the call took, and how long until the device was done, for a size that the
process has not seen yet and again for the same size. Weights are random. The last line is JSON.

With ``--turns`` a chat is prepared, which sends its old pictures (2 megapixels, as data URIs) with every turn and one new one:
the last turn against its new picture alone, in processor time of the thread that prepares, and then without a cache.
"""

from __future__ import annotations

from vlm_batch.runtime import blas, launches

launches.prefer_single_launches()  # before anything imports mlx.core
blas.preload_openblas()

import argparse  # noqa: E402
import base64  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from functools import partial  # noqa: E402
from io import BytesIO  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.compare.shapes import SHAPES, build  # noqa: E402
from benchmarks.processors import set_processor  # noqa: E402
from vlm_batch import Caches, Request, SamplingParams, VLMBatcher  # noqa: E402
from vlm_batch.adapters import modules  # noqa: E402
from vlm_batch.arrays import evaluated, on_host  # noqa: E402
from vlm_batch.assets import default_checkpoint  # noqa: E402
from vlm_batch.inputs.images import load_image  # noqa: E402
from vlm_batch.loading import EngineOptions, load_model, make_engine  # noqa: E402
from vlm_batch.records import Call  # noqa: E402
from vlm_batch.store.digest import digest  # noqa: E402

PROMPT = "describe the picture"
#: Width over height of a folder's pictures, in turns.
RATIOS = (4 / 3, 3 / 4, 16 / 9, 9 / 16, 3 / 2, 2 / 3, 1.0, 1.414, 0.707)


def photo(number: int, *, is_camera: bool) -> bytes:
    """A JPEG with smooth areas and some grain: 2 megapixels of 4:3, or of 1 to 2 megapixels and any shape."""
    random = np.random.default_rng(number)
    ratio, size = (
        (4 / 3, 2.0)
        if is_camera
        else (RATIOS[number % len(RATIOS)], 1 + (number * 37 % 101) / 100)
    )
    high = round((size * 1e6 / ratio) ** 0.5)
    wide = round(high * ratio)
    coarse = Image.fromarray(
        random.integers(0, 256, (high // 24, wide // 24, 3), dtype=np.uint8)
    )
    smooth = np.asarray(
        coarse.resize((wide, high), Image.Resampling.BICUBIC), dtype=np.int16
    )
    grain = random.integers(-6, 7, (1, wide, 3), dtype=np.int16)
    file = BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=90
    )
    return file.getvalue()


def write_photos(
    folder: Path, first: int, count: int, *, is_camera: bool
) -> list[Path]:
    """Files of pictures that are all different."""
    paths = [folder / f"{first + number:05}.jpg" for number in range(count)]
    with ThreadPoolExecutor() as threads:
        made = threads.map(
            partial(photo, is_camera=is_camera), range(first, first + count)
        )
        for path, data in zip(paths, made, strict=True):
            path.write_bytes(data)
    return paths


def model_and_processor(shape: str, max_pixels: int) -> tuple[Any, Any]:
    """A model of a shape with random weights, and the embedded checkpoint's processor with a bound on pixels."""
    _, processor = load_model(default_checkpoint())
    model = build(SHAPES[shape])
    processor = set_processor(SHAPES[shape], model, processor, max_pixels)
    return model, processor


@dataclass
class Spent:
    """Seconds and calls by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = (
                self.seconds.get(name, 0.0) + time.perf_counter() - begin
            )
            self.calls[name] = self.calls.get(name, 0) + 1

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Time an object's method from now on."""
        call = getattr(owner, attribute)

        def timed(*args: Any, **keywords: Any) -> Any:
            with self.at(name):
                return call(*args, **keywords)

        setattr(owner, attribute, timed)


def watched(batcher: VLMBatcher) -> Spent:
    """The time of a batcher's engine thread by part; parts within others are counted in both."""
    spent, generator = Spent(), batcher._loop.generator
    adapter = generator.adapter
    spent.watch(generator, "step", "step")
    spent.watch(generator, "take_in", "take in")
    spent.watch(generator, "_encode", "encode")
    spent.watch(generator, "_prefill", "prefill")
    spent.watch(generator.runner, "decode", "decode, launch")
    # a CPU computes a step's forward while its tokens' choice is launched
    spent.watch(generator, "_choose", "choose, launch")
    spent.watch(generator.telling, "read", "wait for the last step")
    for name in ("prompt_key", "encode_together", "encode"):
        spent.watch(adapter, name, f"  adapter.{name}")
    spent.watch(modules, "digest", "    digest of a tower's call")
    return spent


def answer(
    batcher: VLMBatcher, spent: Spent, paths: Sequence[Path], tokens: int
) -> dict[str, Any]:
    """Answer about every file; wall time, stages of a request (means), and the engine's thread by part."""
    spent.seconds.clear()
    spent.calls.clear()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = (Request(prompt=PROMPT, images=path, params=params) for path in paths)
    begin, first, results = time.perf_counter(), 0.0, []
    for result in batcher.as_completed(requests):
        first = first or time.perf_counter() - begin
        results.append(result.raise_for_error())
    return {
        "seconds": time.perf_counter() - begin,
        "first answer": first,
        "prompt tokens": statistics.mean(
            result.usage.prompt_tokens for result in results
        ),
        "sizes": len({result.model_image_sizes for result in results}),
        **{
            name: statistics.mean(getattr(result.timings, name) for result in results)
            for name in (
                "read",
                "process",
                "queue",
                "encode",
                "prefill",
                "decode",
                "ttft",
            )
        },
        "thread": {
            name: (round(spent.seconds[name], 3), spent.calls[name])
            for name in spent.seconds
        },
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """(an answer, milliseconds until the call came back with its work launched, milliseconds until the device was done)."""
    mx.synchronize()
    begin = time.perf_counter()
    found = call()
    arrays = [
        leaf
        for leaf in (found if isinstance(found, (list, tuple)) else [found])
        if isinstance(leaf, mx.array)
    ]
    mx.async_eval(*arrays)
    launched = time.perf_counter()
    mx.eval(*arrays)
    mx.synchronize()
    return found, 1e3 * (launched - begin), 1e3 * (time.perf_counter() - begin)


def stages(engine: Any, path: Path) -> dict[str, tuple[float, float]]:
    """(milliseconds until launched, milliseconds until done) of one picture's stages, in order, each waited for."""
    preparer, generator = engine.preparer, engine.loop.generator
    adapter, data = generator.adapter, path.read_bytes()
    found: dict[str, tuple[float, float]] = {}

    def stage(name: str, call: Callable[[], Any]) -> Any:
        made, launched, done = timed(call)
        found[name] = launched, done
        return made

    image = stage("decode the file", partial(load_image, data))
    stage(
        "resize, normalise, patches",
        lambda: preparer.processing.processor.image_processor([image]),
    )
    question = preparer.check(Request(prompt=PROMPT, images=data))
    given = stage(
        "the whole of a loader's work", lambda: preparer.prepare(question).inputs
    )
    stage("a copy on the host", lambda: on_host(given))
    stage("arrays again", lambda: evaluated(on_host(given)))
    stage("digest of the picture", lambda: digest(given["pixel_values"]))
    tower = adapter.model.vision_tower
    tower = getattr(tower, "tower", tower)
    half = given["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
    stage("pixels in the tower's type", lambda: half[...] + 0)
    grid = given["image_grid_thw"]
    stage("tower", lambda: tower(half, grid))
    stage("tower, again", lambda: tower(half, grid))
    if Call().most_patches >= 2 * half.shape[0]:
        pair = mx.concatenate([half, half]), mx.concatenate([grid, grid])
        stage("tower, two pictures", lambda: tower(*pair))
        stage("tower, two pictures, again", lambda: tower(*pair))
    encoded = adapter.encode(given)
    stage("encode, with the tower", lambda: adapter.encode(given).inputs_embeds)
    caches = [adapter.make_cache() for _ in range(2)]
    stage("prefill", lambda: adapter.prefill([encoded], caches[0], 0, encoded.length))
    stage(
        "prefill, again",
        lambda: adapter.prefill([encoded], caches[1], 0, encoded.length),
    )
    return found


def turns(count: int, rounds: int) -> dict[str, Any]:
    """Milliseconds (medians) of a chat's last turn and of its new picture alone: JSON and base64 read, pictures and prompt
    processed, and the prompt's key made, with a cache and without."""
    model, processor = model_and_processor("small", 16384 * 28 * 28)
    model.config.text_config.max_position_embeddings = 10**6
    found: dict[str, Any] = {}
    for name, nbytes in (("kept", 2**30), ("nothing kept", 0)):
        engine = make_engine(model, processor, EngineOptions(caches=Caches(nbytes)))
        adapter, reuse = engine.loop.generator.adapter, engine.loop.generator.reuse

        def turn(
            pictures: Sequence[bytes],
            engine: Any = engine,
            adapter: Any = adapter,
            reuse: Any = reuse,
        ) -> float:
            uris = [
                "data:image/jpeg;base64," + base64.b64encode(picture).decode()
                for picture in pictures
            ]
            parts: list[Any] = [
                {"type": "image_url", "image_url": {"url": uri}} for uri in uris
            ]
            body = json.dumps(
                [
                    {
                        "role": "user",
                        "content": [*parts, {"type": "text", "text": PROMPT}],
                    }
                ]
            )
            begin = time.thread_time()
            question = engine.preparer.check(Request(messages=json.loads(body)))
            adapter.prompt_key(engine.preparer.prepare(question).inputs)
            seconds = time.thread_time() - begin
            reuse.store_ended()
            return 1e3 * seconds

        last, alone = [], []
        turn([photo(0, is_camera=True)])
        for number in range(rounds):
            pictures = [
                photo(1 + (2 * count) * number + index, is_camera=True)
                for index in range(count + 1)
            ]
            alone.append(turn(pictures[count:]))
            turn(pictures[: count - 1])
            last.append(turn(pictures[:count]))
        ratios = [one / other for one, other in zip(last, alone, strict=True)]
        found[name] = {
            "last turn": statistics.median(last),
            "alone": statistics.median(alone),
            "ratio": statistics.median(ratios),
        }
    return found


def say(name: str, facts: dict[str, Any]) -> None:
    """A run as lines of text."""
    figures = ", ".join(
        f"{key} {value:.3g}" for key, value in facts.items() if key != "thread"
    )
    print(f"{name}: {figures}")
    for part, (seconds, calls) in facts["thread"].items():
        print(
            f"    {part:28} {seconds:7.3f} s in {calls:5} calls, {1e3 * seconds / calls:8.2f} ms each"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument(
        "--max-pixels",
        type=int,
        default=1235 * 28 * 28,
        help="of a picture as the model sees it",
    )
    parser.add_argument(
        "--apart",
        type=int,
        default=4,
        help="pictures that are taken apart (default: 4)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="of each kind of pictures; the first meets new shapes",
    )
    parser.add_argument(
        "--turns", type=int, default=None, help="of a chat, in the place of all else"
    )
    args = parser.parse_args()
    if args.turns is not None:
        print(json.dumps(turns(args.turns, args.rounds)))
        return
    found: dict[str, Any] = {"runs": [], "stages": {}}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, processor = model_and_processor(args.shape, args.max_pixels)
        print(f"model: {time.perf_counter() - begin:.1f} s", flush=True)
        engine = make_engine(model, processor, EngineOptions())
        warm, *apart = write_photos(folder, 100_000, 1 + args.apart, is_camera=False)
        stages(engine, warm)
        taken = [stages(engine, path) for path in apart]
        found["stages"] = {
            stage: [
                round(statistics.mean(each), 2)
                for each in zip(*(one[stage] for one in taken), strict=True)
            ]
            for stage in taken[0]
        }
        for stage, (launched, done) in found["stages"].items():
            print(
                f"    {stage:30} launched {launched:8.2f} ms, done {done:8.2f} ms",
                flush=True,
            )
        with VLMBatcher(model, processor, max_rows=args.rows) as batcher:
            spent, first = watched(batcher), 0
            for is_camera in (True, False):
                for number in range(args.rounds):
                    paths = write_photos(
                        folder, first, args.pictures, is_camera=is_camera
                    )
                    # sizes as in the round before
                    first += args.pictures if is_camera else len(RATIOS) * 101
                    facts = answer(batcher, spent, paths, args.tokens)
                    said = f"{'one size' if is_camera else 'all sizes'}, round {number + 1}"
                    say(said, facts)
                    print(
                        f"    peak {mx.get_peak_memory() / 1e9:.1f} GB at {time.perf_counter() - begin:.0f} s",
                        flush=True,
                    )
                    found["runs"].append({"name": said, **facts})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
