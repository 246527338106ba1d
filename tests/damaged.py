"""Pictures, videos and saved caches damaged at random, by seeds: each is read or refused, within its time and memory.

    python -m tests.damaged --pictures 10000 --videos 1000 --caches 3000

They are read in a process of its own, so that a crash of a decoder would be seen, and go on with the next one.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

from vlm_batch.errors import InvalidCache, InvalidImage, InvalidVideo
from vlm_batch.inputs import heif
from vlm_batch.inputs.images import load_image
from vlm_batch.inputs.videos import Sampling, load_video
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Video

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "AVIF", "HEIF")
MODES = {
    "PNG": ("RGB", "L", "P", "RGBA", "I;16", "1"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "TIFF": ("RGB", "L", "RGBA", "I;16", "F", "CMYK"),
    "BMP": ("RGB", "L", "P", "1"),
    "ICO": ("RGBA",),
    "AVIF": ("RGB", "RGBA"),
    "HEIF": ("RGB", "RGBA"),
}
LOSSLESS = ("PNG", "TIFF", "BMP")
SIZES = ((40, 30), (97, 61), (1, 1), (128, 128))
#: Seconds of a thread's own time that one may take, and seconds without news after which a reader counts as hung.
SECONDS, SILENCE = 5.0, 60.0
MAX_PIXELS = 2_000_000
#: Bytes beyond what the reader took before: a picture of the most pixels in every form that it goes through, and decoders' own.
MEMORY = 400_000_000
TRUTHS = (
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\x00\x00\xff\xff",
)


@cache
def whole_picture(form: str, mode: str, size: tuple[int, int]) -> bytes:
    """A picture's file."""
    width, height = size
    random_values = np.random.RandomState(width)
    plain = Image.fromarray(
        random_values.randint(0, 256, size=(height, width, 3), dtype=np.uint8)
    )
    if mode == "I;16":
        plain = Image.fromarray(
            random_values.randint(0, 65536, size=(height, width)).astype(np.uint16)
        )
    elif mode == "F":
        plain = Image.fromarray(random_values.rand(height, width).astype(np.float32))
    else:
        plain = plain.convert(mode)
    file = io.BytesIO()
    plain.save(file, form, **({"sizes": [size]} if form == "ICO" else {}))
    return file.getvalue()


@cache
def whole_video() -> bytes:
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        writer = cv2.VideoWriter(
            str(path),
            cv2.CAP_FFMPEG,
            cv2.VideoWriter_fourcc(*"mp4v"),  # type: ignore[attr-defined]
            10.0,
            (96, 64),
        )
        for index in range(20):
            writer.write(np.full((64, 96, 3), index * 10, np.uint8))
        writer.release()
        return path.read_bytes()


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The same with up to eight changes, many of them near its beginning."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        end = max(1, len(changed) if draw.random() < 0.5 else min(len(changed), 96))
        at, length = draw.randrange(end), draw.choice((1, 1, 2, 4, 16, 200))
        kind = draw.randrange(7)
        if kind == 0:
            changed[at : at + 1] = bytes(
                [(changed[at : at + 1] or b"\0")[0] ^ (1 << draw.randrange(8))]
            )
        elif kind == 1:
            changed[at : at + length] = draw.randbytes(length)
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at:at] = draw.randbytes(length)
        elif kind == 5:
            changed[at : at + 4] = draw.choice(TRUTHS)
        elif draw.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def read_picture(seed: int) -> str:
    """What came of a damaged picture: its size's kind, or the error's."""
    draw = random.Random(seed)
    form = FORMATS[seed % len(FORMATS)]
    if form == "AVIF" and not features.check("avif"):
        return "AVIF: not built in"
    heif.add_reader()
    if form == "HEIF" and not heif.INSTALLED:
        return "HEIF: not built in"
    mode, size = draw.choice(MODES[form]), draw.choice(SIZES)
    data = whole_picture(form, mode, size)
    is_whole = draw.random() < 0.03
    try:
        picture = load_image(
            data if is_whole else damaged(data, draw), max_pixels=MAX_PIXELS
        )
    except InvalidImage as error:
        return _refused(form, str(error), is_whole)
    assert picture.mode == "RGB" and 0 < picture.width * picture.height <= MAX_PIXELS
    assert np.asarray(picture).shape == (picture.height, picture.width, 3)
    if is_whole:
        assert picture.size == size
        if form in LOSSLESS and mode in ("RGB", "L"):
            assert (
                np.asarray(picture)
                == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            ).all()
    return f"{form}: whole" if is_whole else f"{form}: decoded"


def read_video(seed: int) -> str:
    """What came of a damaged video."""
    draw = random.Random(seed)
    is_whole = draw.random() < 0.03
    data = whole_video() if is_whole else damaged(whole_video(), draw)
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(data)
        file.flush()
        try:
            clip = load_video(Video(file.name), Sampling(), max_pixels=50_000_000)
        except InvalidVideo as error:
            said = str(error)
        else:
            assert (
                clip.frames.ndim == 4
                and clip.frames.shape[3] == 3
                and clip.frames.size <= 150_000_000
            )
            return "MP4: whole" if is_whole else "MP4: decoded"
    return _refused("MP4", said, is_whole)


@cache
def whole_cache() -> bytes:
    """The file of a conversation's keys and values."""
    from tests.histories import adapter_of, inputs_of
    from vlm_batch.arrays import as_mlx
    from vlm_batch.engine.generator import BatchGenerator
    from vlm_batch.types import SamplingParams

    generator = BatchGenerator(adapter_of("qwen3_5"))
    inputs = as_mlx(inputs_of("qwen3_5", "text:5:26"))
    generator.insert("a", inputs, SamplingParams(max_tokens=3), return_cache=True)
    results = []
    while generator.has_work:
        results += [
            event.result for event in generator.step() if event.result is not None
        ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.safetensors"
        assert results[0].cache is not None
        results[0].cache.save(path)
        return path.read_bytes()


def read_cache(seed: int) -> str:
    """What came of a damaged prompt cache: only a whole one may be read."""
    draw = random.Random(seed)
    is_whole = draw.random() < 0.03
    data = whole_cache() if is_whole else damaged(whole_cache(), draw)
    is_whole = data == whole_cache()
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            PromptCache.load(file.name)
        except InvalidCache as error:
            return _refused("cache", str(error), is_whole)
    assert is_whole, "a damaged cache is read"
    return "cache: whole"


#: By the names of the command's options.
READERS = {"pictures": read_picture, "videos": read_video, "caches": read_cache}


def _refused(form: str, said: str, is_whole: bool) -> str:
    assert not is_whole, f"what is whole is refused: {said}"
    assert 10 < len(said) < 600 and "\n" not in said, f"no clear error: {said!r}"
    return f"{form}: refused"


def work(kind: str, first: int, count: int) -> None:
    """Read some, and say of each what came of it, as a line of JSON."""
    warnings.simplefilter("ignore")
    logging.disable()
    read = READERS[kind]
    for seed in range(first, first + count):
        print(json.dumps({"begins": seed}), flush=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.thread_time()
        try:
            found = read(seed)
        except Exception as error:
            found = f"WRONG: {type(error).__name__}: {error}"
        seconds = time.thread_time() - begin
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if seconds > SECONDS:
            found = f"WRONG: it took {seconds:.1f} s ({found})"
        if grown > MEMORY:
            found = f"WRONG: it took {grown / 1e6:.0f} MB ({found})"
        print(
            json.dumps(
                {"seed": seed, "found": found, "seconds": seconds, "grown": grown}
            ),
            flush=True,
        )


def run(kind: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Read damaged pictures or videos in a process that is begun again where it ends before its time."""
    while count > 0:
        command = [
            sys.executable,
            "-m",
            "tests.damaged",
            "--work",
            kind,
            str(first),
            str(count),
        ]
        where = str(Path(__file__).parent.parent)
        path = os.pathsep.join([where, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OPENCV_FFMPEG_LOGLEVEL": "-8", "PYTHONPATH": path}
        reader = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=where,
        )
        assert reader.stdout is not None
        current = first
        while True:
            silent = threading.Timer(SILENCE, reader.kill)
            silent.start()
            line = reader.stdout.readline()
            silent.cancel()
            if not line:
                break
            told = json.loads(line)
            if "begins" in told:
                current = told["begins"]
                continue
            yield told
            first, count = told["seed"] + 1, count - 1
        status = reader.wait()
        reader.stdout.close()
        if count > 0:
            yield {
                "seed": current,
                "found": f"WRONG: its reader ended with status {status}",
                "seconds": 0.0,
                "grown": 0,
            }
            count -= current + 1 - first
            first = current + 1


def summary(
    kind: str, first: int, count: int
) -> tuple[Counter[str], list[str], float, float]:
    """How often each thing came of them; what is wrong; the most seconds and bytes that one took."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    slowest, largest = 0.0, 0.0
    for told in run(kind, first, count):
        if told["found"].startswith("WRONG"):
            wrong.append(f"{kind} {told['seed']}: {told['found']}")
        else:
            found[told["found"]] += 1
        slowest, largest = max(slowest, told["seconds"]), max(largest, told["grown"])
    return found, wrong, slowest, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--videos", type=int, default=1_000)
    parser.add_argument("--caches", type=int, default=3_000, help="saved prompt caches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", nargs=3, metavar=("KIND", "FIRST", "COUNT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.work:
        work(options.work[0], int(options.work[1]), int(options.work[2]))
        return
    for kind in READERS:
        count = vars(options)[kind]
        found, wrong, slowest, largest = summary(kind, options.seed, count)
        print(
            f"{count:,} {kind}: at most {slowest:.2f} s and {largest / 1e6:.0f} MB for one; {len(wrong)} wrong"
        )
        for name, number in sorted(found.items()):
            print(f"  {name}: {number:,}")
        print(*wrong, sep="\n")


if __name__ == "__main__":
    main()
