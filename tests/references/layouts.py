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
import re
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

from tests.checkpoints import LAYOUTS as FOLDER
from tests.checkpoints import MULTIPLIERS, NO_LAYOUT, flat_weights, tensor_of
from tests.references.record import RECIPES, answer, load
from tests.zoo import FAMILIES, requests_of
from tests.zoo._build import weights_of

HERE = Path(__file__).resolve().parent
FIRST = 4
"""Numbers are negative and even, from -FIRST on: one less is odd, and a constant of transformers' is none of them."""

SMALL = 256
"""Numbers in a tensor that is kept by its values."""


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
        return kind | {
            "values": tensor.item(0) if len(values) == 1 else tensor.ravel().tolist()
        }
    numbers = -tensor.astype(np.float64)
    odd = numbers.flat[0] % 2
    places = (numbers - odd - FIRST) / 2
    if not (places % 1 == 0).all():
        if real.size > SMALL:
            raise LookupError("numbers were computed with on their way")
        return kind | {"values": real.ravel().tolist()}
    return kind | {
        "less_one": bool(odd),
        "pieces": list(pieces(places.astype(np.int64), [0] * tensor.ndim)),
    }


def pieces(places: np.ndarray, corner: list[int]) -> Iterator[list[list[int]]]:
    """Parts of an array in which places grow evenly along each axis: [corner, shape, [place, *strides]]."""
    first = int(places.flat[0])
    strides = [
        int(np.take(places, 1, axis).flat[0]) - first if size > 1 else 0
        for axis, size in enumerate(places.shape)
    ]
    even = first + sum(
        np.arange(size).reshape(
            [-1 if other == axis else 1 for other in range(places.ndim)]
        )
        * stride
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
        files = {
            path.name: json.loads(path.read_text())
            for path in sorted(Path(folder).glob("*config.json"))
        }
        return load_file(f"{folder}/model.safetensors"), files


def record(name: str) -> None:
    """Write tests/references/layouts/<family>.json.gz."""
    zoo = FAMILIES[name].build()
    real, _ = saved(zoo, name)
    flat = flat_weights(zoo)
    numbered(zoo)
    found, files = saved(zoo, name)
    tensors = {key: described(value, real[key]) for key, value in sorted(found.items())}
    for key, facts in tensors.items():
        # nothing of the zoo's: transformers draws it
        is_random = re.search(RECIPES[name].absent, key)
        if not is_random and not np.allclose(
            tensor_of(facts, flat), real[key], atol=1e-6
        ):
            raise LookupError(f"{key} was computed with on its way")
    text = json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(
        f"{name:22} {len(tensors)} tensors, {sum(len(one.get('pieces', ())) for one in tensors.values())} pieces"
    )


def record_multipliers() -> None:
    """Write tests/references/falcon_h1_multipliers.npz: answers with multipliers, of which the family's reference has none."""
    tiny, recipe = FAMILIES["falcon_h1"], RECIPES["falcon_h1"]
    model = load(tiny.build(), recipe)
    config = type(model.config)(**{**model.config.to_dict(), **MULTIPLIERS})
    multiplied = type(model)(config).eval().float()
    multiplied.set_attn_implementation("eager")
    multiplied.load_state_dict(
        {
            name: value
            for name, value in model.state_dict().items()
            if "mup" not in name
        },
        strict=False,
    )
    multiplied.tie_weights()
    stored: dict[str, Any] = {}
    for name, inputs in requests_of(tiny).items():
        stored[f"{name}/tokens"], stored[f"{name}/logprobs"] = answer(
            multiplied, recipe, inputs
        )
    np.savez_compressed(HERE / "layouts" / "falcon_h1_multipliers.npz", **stored)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for family_name in sorted((set(sys.argv[1:]) or RECIPES.keys()) - NO_LAYOUT.keys()):
        try:
            record(family_name)
        except LookupError as error:
            print(f"{family_name:22} {error}")
    record_multipliers()
