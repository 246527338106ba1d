"""Record how transformers lays a family's weights out on disk, one file per family; checkpoints.py writes them so.

    python tests/references/layouts.py            # all families
    python tests/references/layouts.py mllama     # these

Needs torch and transformers, as record.py does. The zoo's weights are numbered from end to end and given to transformers'
model in their place, which ``save_pretrained`` then writes: what lies in a tensor of the file says where each of its numbers
comes from, however it was renamed, joined, split, turned or moved on the way. Recorded are those places and config.json.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.references.record import RECIPES, load
from tests.zoo import FAMILIES
from tests.zoo._build import weights_of

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "layouts"
FIRST = 4
"""Numbers are negative and even, from -FIRST on: one less is odd, and a constant of transformers' is none of them."""

SMALL = 256
"""Numbers in a tensor that is kept by its values."""

#: What transformers' class of a recipe is not: the family's own. Its language model alone, or another model with its parts.
ONLY_WORDS = "transformers has its language model alone, whose folders are of another type"
LIKE_IT = "transformers has no such type; the recipe's class is another one with the same parts"
NO_LAYOUT = {
    **dict.fromkeys(
        """deepseek_vl_v2 dots_ocr fastvlm llmjpvl locateanything mage_vl mimo_v2 minicpmo phi3_v youtu_vl""".split(),
        ONLY_WORDS,
    ),
    **dict.fromkeys("internvl_chat kimi_vl llava_bunny mistral_large3 phi4_siglip".split(), LIKE_IT),
    "deepseek_v4_text": "transformers' names for it are not the published ones, and mlx-vlm knows those alone: refused",
    "deepseekocr": "transformers saves it as another type (unlimited_ocr) without its projector's settings: refused",
    "deepseekocr_2": "transformers saves it as deepseek_ocr2, which mlx-vlm does not know: refused",
    "ernie4_5_moe_vl": "transformers saves it as ernie4_5_vl_moe, which mlx-vlm does not know: refused",
    "gemma3n": "its tower is left out of the reference, and so of the folder",
    "got": "transformers saves it as got_ocr2, which mlx-vlm does not know: refused",
    "multi_modality": "transformers saves it as deepseek_vl, which mlx-vlm does not know: refused",
    "paddleocr_vl": "mlx-vlm's projector has its width of 1,024 written in (paddleocr_vl/vision.py:334): no tiny one fits",
    "qwen3_omni_moe": "the reference is of the half that writes text, whose folders are of another type: refused",
    "unlimited_ocr": "transformers saves it without its projector's settings: refused",
}


def numbered(zoo: nn.Module) -> None:
    """Every number of the zoo's weights becomes its place among all of them, as FIRST has it."""
    place, found = 0, []
    for path, value in sorted(weights_of(zoo).items()):
        numbers = np.arange(place, place + value.size).reshape(value.shape)
        found.append((path, mx.array(-(2 * numbers + FIRST).astype(np.float32))))
        place += value.size
    assert 2 * place + FIRST < 2**24, "float32 does not count so far"
    zoo.load_weights(found, strict=False)


def described(tensor: np.ndarray, real: np.ndarray) -> dict[str, Any]:
    """Where a tensor's numbers come from, as tests/checkpoints.py reads it.

    A small one that was computed on its way is kept as it is for the zoo's own weights.
    """
    kind: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    if tensor.dtype.kind != "f" or tensor.max(initial=-np.inf) > -FIRST:
        values = np.unique(tensor)
        return kind | {"values": tensor.item(0) if len(values) == 1 else tensor.ravel().tolist()}
    numbers = -tensor.astype(np.float64)
    odd = numbers.flat[0] % 2
    places = (numbers - odd - FIRST) / 2
    if not (places % 1 == 0).all():
        if real.size > SMALL:
            raise LookupError("numbers were computed with on their way")
        return kind | {"values": real.ravel().tolist()}
    return kind | {"less_one": bool(odd), "pieces": list(pieces(places.astype(np.int64), [0] * tensor.ndim))}


def pieces(places: np.ndarray, corner: list[int]) -> Iterator[list[list[int]]]:
    """Parts of an array in which places grow evenly along each axis: [corner, shape, [place, *strides]]."""
    first = int(places.flat[0])
    strides = [int(np.take(places, 1, axis).flat[0]) - first if size > 1 else 0 for axis, size in enumerate(places.shape)]
    even = first + sum(
        np.arange(size).reshape([-1 if other == axis else 1 for other in range(places.ndim)]) * stride
        for axis, (size, stride) in enumerate(zip(places.shape, strides, strict=True))
    )
    if (places == even).all():
        yield [list(corner), list(places.shape), [first, *strides]]
        return
    axis, cuts = where_to_cut(places)
    for begin, end in zip([0, *cuts], [*cuts, places.shape[axis]], strict=True):
        moved = list(corner)
        moved[axis] += begin
        yield from pieces(np.take(places, range(begin, end), axis), moved)


def where_to_cut(places: np.ndarray) -> tuple[int, list[int]]:
    """The axis along which places stop growing evenly first, and where; every step of the longest where none shows."""
    for axis in range(places.ndim):
        line = np.moveaxis(places, axis, 0).reshape(places.shape[axis], -1)[:, 0]
        steps = np.diff(line)
        cuts = [i + 1 for i in range(1, len(steps)) if steps[i] != steps[i - 1]][:1]
        if cuts:
            return axis, cuts
    longest = int(np.argmax(places.shape))
    return longest, list(range(1, places.shape[longest]))


def saved(zoo: nn.Module, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the configurations that transformers writes for a model."""
    with tempfile.TemporaryDirectory() as folder:
        load(zoo, RECIPES[name]).save_pretrained(folder)
        files = {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*config.json"))}
        return load_file(f"{folder}/model.safetensors"), files


def record(name: str) -> None:
    """Write tests/references/layouts/<family>.json.gz."""
    zoo = FAMILIES[name].build()
    real, _ = saved(zoo, name)
    numbered(zoo)
    found, files = saved(zoo, name)
    tensors = {key: described(value, real[key]) for key, value in sorted(found.items())}
    text = json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{name:22} {len(tensors)} tensors, {sum(len(one.get('pieces', ())) for one in tensors.values())} pieces")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for family_name in sys.argv[1:] or sorted(RECIPES.keys() - NO_LAYOUT.keys()):
        try:
            record(family_name)
        except LookupError as error:
            print(f"{family_name:22} {error}")
