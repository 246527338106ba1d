"""Encoding a picture hardly waits for the device: each wait stops the decode steps that a GPU has in flight."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.mistral3.mistral3 import Mistral3PatchMerger
from mlx_vlm.models.pixtral.vision import PixtralVisionModel
from mlx_vlm.models.qwen3_vl.vision import VisionModel, VisionRotaryEmbedding

from tests.harness import shared_adapter
from tests.zoo import FAMILIES, family, to_mx
from vlm_batch.adapters.deepstack import layout_of
from vlm_batch.adapters.grids import MRoPEAdapter
from vlm_batch.adapters.hooks import is_hook, running
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.adapters.placing import NAMES, Merge, know_positions, place
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.mistral3 import Mistral3
from vlm_batch.records import Call

#: Most waits for a picture.
FEW = 6
#: Families of which CHANGELOG.md says that a picture waits no more.
NONE = ("internvl", "lfm2_vl", "llava", "mistral3", "pixtral", "qwen3_5")
#: Families in which mlx-vlm's code waits more often, with the waits of today.
MORE = {
    "cohere_compass": 20,
    "ernie4_5_moe_vl": 8,
    "idefics3": 10,
    "minicpmo": 22,
    "minicpmv4_6": 10,
    "molmo_point": 9,
    "smolvlm": 10,
    "zaya1_vl": 10,
}


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count the reads of arrays that are yet to be computed, by where they stand."""
    found: Counter[str] = Counter()

    def is_pending(value: Any) -> bool:
        if not isinstance(value, mx.array):
            return False
        dot = io.StringIO()
        mx.export_to_dot(dot, value)
        return "shape=rectangle" in dot.getvalue()

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def count(value: Any, *args: Any, **kwargs: Any) -> Any:
            if is_pending(value):
                frame = sys._getframe(1)
                found[f"{frame.f_globals.get('__name__')}:{frame.f_lineno}"] += 1
            return read(value, *args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__"):
            patch.setattr(mx.array, name, counting(getattr(mx.array, name)))
        for name in ("array", "asarray", "where", "nonzero", "argwhere", "flatnonzero"):
            patch.setattr(np, name, counting(getattr(np, name)))
        yield found


def picture_of(name: str) -> dict[str, Any]:
    inputs = to_mx(family(name).image(3, 1))
    mx.eval([value for value in inputs.values() if isinstance(value, mx.array)])
    return inputs


@pytest.mark.parametrize(
    "name", [name for name in sorted(FAMILIES) if not family(name).text_only]
)
def test_a_picture_waits_seldom(name: str) -> None:
    adapter = shared_adapter(name)
    # and its own tables: kimi_k25's tower keeps one
    mx.eval(adapter.encode(picture_of(name)).inputs_embeds)
    inputs = picture_of(name)
    with waits() as found:
        adapter.encode(inputs)
    assert sum(found.values()) <= (0 if name in NONE else MORE.get(name, FEW)), found


def test_waits_are_counted() -> None:
    with waits() as found:
        (mx.arange(3) + 1).tolist()
        np.array(mx.arange(3) * 2)
        mx.array([1]).item()  # known
    assert sum(found.values()) == 2


def placers() -> dict[str, FunctionType]:
    """mlx-vlm's functions, by file."""
    found = {}
    for name in sorted(FAMILIES):
        for file in {
            type(child).__module__
            for _, child in shared_adapter(name).model.named_modules()
        }:
            for own in NAMES:
                bound = vars(import_module(file)).get(own)
                if isinstance(bound, FunctionType):
                    found[file] = bound
    return found


def test_features_are_placed_as_mlx_vlm_places_them() -> None:
    """All files that have such a function are hooked, and every function gives the same arrays."""
    found = placers()
    assert len(found) > 10 and all(map(is_hook, found.values()))
    embeds, features = mx.random.normal((1, 9, 4)), mx.random.normal((1, 5, 4))
    at = mx.array([[0, 1, 1, 0, 0, 1, 1, 1, 0]]) == 1
    mask = mx.broadcast_to(at[..., None], embeds.shape)
    for file, bound in found.items():
        theirs = bound(embeds + 0, mask, features)  # outside adapters
        with running(Call()):
            ours = bound(embeds + 0, mask, features)
        assert mx.array_equal(ours, theirs), file
        assert mx.array_equal(ours[0, 5:8], features[0, 2:]), file


@pytest.mark.parametrize("count", [3, 6])
def test_features_that_do_not_fit_are_refused(count: int) -> None:
    mask = mx.broadcast_to((mx.arange(9) < 5)[None, :, None], (1, 9, 4))
    with pytest.raises(
        ValueError, match=f"{count} rows of features do not fit 5 placeholder tokens"
    ):
        place(mx.zeros((1, 9, 4)), mask, mx.ones((count, 4)))


MERGING = [name for name in sorted(FAMILIES) if shared_adapter(name).merge is not None]
#: The features' axes before (N, D) in mlx-vlm's code, where there are any.
AXES = {"aya_vision": 2, "aya_vision_cohere2": 2, "got": 1, "llava": 1}


@pytest.mark.parametrize(
    "types",
    [(mx.float32, mx.float32), (mx.bfloat16, mx.float32), (mx.float32, mx.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", MERGING)
def test_a_merge_is_mlx_vlms(name: str, types: tuple[mx.Dtype, mx.Dtype]) -> None:
    """Of embeddings and features of one type and of two, the answer has mlx-vlm's numbers and type."""
    adapter = shared_adapter(name)
    assert adapter.merge is not None
    ours = getattr(adapter.model, adapter.merge.name)
    theirs = getattr(type(adapter.model), adapter.merge.name)
    mark = max(adapter.image_token_ids - adapter._audio_token_ids)
    tokens = np.where(np.array([0, 1, 1, 0, 0, 1, 1, 1, 0]) == 1, mark, 1)
    axes = AXES.get(name, 0)
    features = mx.random.normal((*[1] * axes, 5, 8)).astype(types[1])
    values = {
        "inputs_embeds": mx.random.normal((1, 9, 8)).astype(types[0]),
        "input_ids": mx.array(tokens[None]),
        "image_features": features,
        "features": features,
        "self": adapter.model,
        "kind": "image",
        "name": "image",
    }
    given = {
        argument: values.get(argument, mark)
        for argument in signature(theirs).parameters
    }
    with running(Call()), waits() as found:
        answer = ours(
            **{
                argument: value
                for argument, value in given.items()
                if argument != "self"
            }
        )
    assert not found
    with running(Call()):
        right = theirs(**given)
    if adapter.merge.gives_mask:
        (answer, mask), (right, their_mask) = answer, right
        assert mx.array_equal(mask, their_mask)
    assert answer.dtype == right.dtype
    assert mx.array_equal(answer, right)
    with pytest.raises(ValueError, match="do not fit 5 placeholder tokens"):
        ours(
            **{
                argument: value[..., :3, :] if value is features else value
                for argument, value in given.items()
            }
        )


def merged(
    merge: Merge, ids: Sequence[int], marks: Sequence[int], **said: Any
) -> list[int]:
    """The places that get features, by a model's merge that takes one id."""

    def theirs(
        image_features: mx.array,
        inputs_embeds: mx.array,
        input_ids: mx.array,
        token_id: Any = None,
    ) -> Any: ...

    def strict(
        inputs_embeds: mx.array, input_ids: mx.array, token_id: Any, features: mx.array
    ) -> Any: ...

    model: Any = SimpleNamespace(merge=strict if "features" in said else theirs)
    know_positions(model, merge, marks)
    count = sum(token != 1 for token in ids)
    given = {"inputs_embeds": mx.zeros((1, len(ids), 2)), "input_ids": mx.array([ids])}
    name = "features" if "features" in said else "image_features"
    found = model.merge(
        **{**given, name: mx.ones((count, 2)), "token_id": said["token_id"]}
    )
    return [int(number) for number in found[0, :, 0].tolist()]


def test_a_merge_takes_the_id_that_it_is_given_or_all() -> None:
    one, every = Merge("merge"), Merge("merge", takes_all=True)
    assert merged(one, [1, 7, 1], [9], token_id=7) == [0, 1, 0]
    assert merged(one, [1, 9, 1], [9], token_id=None) == [0, 1, 0]
    assert merged(every, [1, 7, 9], [9], token_id=7) == [0, 1, 1]
    assert merged(every, [1, 9, 1], [9], token_id=7) == [0, 1, 0]
    assert merged(every, [1, 9, 1], [9], token_id=mx.array([])) == [0, 1, 0]
    with pytest.raises(ValueError, match="do not fit 0 placeholder tokens"):
        merged(one, [1, 9, 1], [9], token_id=7)
    # of sound, beside a picture's
    with pytest.raises(ValueError, match="names no placeholder"):
        merged(one, [1, 9, 1], [9], token_id=None, features=True)


MROPE = [
    name
    for name in sorted(FAMILIES)
    if isinstance(adapter := shared_adapter(name), MRoPEAdapter)
    and "image_grid_thw" in adapter.input_keys
]


@pytest.mark.parametrize("name", MROPE)
@pytest.mark.parametrize("size", [0, 2])
def test_positions_of_pictures_are_mlx_vlms(name: str, size: int) -> None:
    adapter = shared_adapter(name)
    assert isinstance(adapter, MRoPEAdapter)
    inputs = to_mx(family(name).image(3, size))
    ids, grids = inputs["input_ids"], inputs["image_grid_thw"]
    found = adapter.positions(ids, {"image_grid_thw": grids}, {})
    wanted, delta = (
        adapter._rope_index(ids, grids, None)
        if name != "ernie4_5_moe_vl"
        else adapter._rope_index(ids, grids)
    )
    if wanted.shape[-1] == 3:  # ERNIE's
        wanted = wanted.transpose(2, 0, 1)
    assert found.prompt is not None
    assert mx.array_equal(found.prompt, wanted) and found.delta == int(delta.item())


class Positions(nn.Module):
    """What Qwen3-VL's tower makes positions of."""

    def __init__(self, side: int, merge: int) -> None:
        super().__init__()
        self.pos_embed = nn.Embedding(side * side, 8)
        self.rotary_pos_emb = VisionRotaryEmbedding(16)
        self.num_grid_per_side, self.spatial_merge_size = side, merge
        self.config = SimpleNamespace(spatial_merge_size=merge)


@pytest.mark.parametrize(
    "grids",
    [[[1, 4, 6]], [[1, 30, 44], [3, 8, 6]], [[1, 2, 100]], [[2, 2, 2], [1, 48, 48]]],
)
def test_the_tower_of_qwen3_vl_has_mlx_vlms_positions(grids: list[list[int]]) -> None:
    model, given = Positions(48, 2), mx.array(grids)
    layout = layout_of(
        tuple((frames, high, wide) for frames, high, wide in grids), 48, 2
    )
    learned = model.pos_embed(layout.corners) * layout.shares[..., None]
    wanted = VisionModel.fast_pos_embed_interpolate(model, given)
    assert mx.array_equal(learned[0] + learned[1] + learned[2] + learned[3], wanted)
    angles = model.rotary_pos_emb(layout.longest)[layout.positions].reshape(
        len(layout.positions), -1
    )
    assert mx.array_equal(angles, VisionModel.rot_pos_emb(model, given))


def test_mistral3_merges_as_mlx_vlm_does() -> None:
    """Sides that no whole number of squares fill, too."""
    adapter = shared_adapter("mistral3")
    ours = adapter.model.multi_modal_projector.patch_merger
    theirs = clone_modules(ours, {type(ours): Mistral3PatchMerger})
    side = ours.patch_size
    sizes = mx.array([[4 * side, 6 * side], [3 * side, 5 * side], [2 * side, 2 * side]])
    states = mx.random.normal(
        (
            4 * 6 + 3 * 5 + 2 * 2,
            theirs.merging_layer.weight.shape[1] // ours.spatial_merge_size**2,
        )
    )
    assert type(ours) is not Mistral3PatchMerger and isinstance(adapter, Mistral3)
    assert mx.allclose(ours(states, sizes), theirs(states, sizes), atol=1e-6)


def test_pixtrals_tower_is_mlx_vlms_for_pictures_of_several_sizes() -> None:
    ours = shared_adapter("pixtral").model.vision_tower.vision_model
    model = family("pixtral").build()
    theirs: Any = model.vision_tower.vision_model
    assert type(theirs) is PixtralVisionModel is not type(ours)
    side = ours.patch_size
    pictures = mx.random.normal((3, 4 * side, 5 * side, 3))
    sizes = mx.array([[4, 2], [3, 5], [3, 5]]) * side
    for one, other in zip(
        ours(pictures, True, sizes)[1], theirs(pictures, True, sizes)[1], strict=True
    ):
        assert mx.allclose(one, other, atol=1e-4)
    apart = [
        ours(pictures[at : at + 1], False, sizes[at : at + 1])[0] for at in range(3)
    ]
    assert mx.allclose(
        ours([pictures[:1], pictures[1:]], False, sizes)[0],
        mx.concatenate(apart, axis=1),
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_pictures_without_sizes_of_their_own_fail_alone(name: str) -> None:
    """A request with a size too few and one with a size too many are none together: the one between gets its own picture."""
    adapter, tiny = shared_adapter(name), family(name)
    assert tiny.two_images is not None
    few = to_mx(tiny.image(5, 1))
    good = picture_of(name)
    many = to_mx(tiny.two_images(9))
    few["pixel_values"] = mx.concatenate([few["pixel_values"], few["pixel_values"]])
    many["pixel_values"] = many["pixel_values"][:1]
    wanted = adapter.encode(good).inputs_embeds
    found = adapter.encode_together([few, good, many], Call())
    assert mx.allclose(adapter.encode(found[1]).inputs_embeds, wanted, atol=1e-4)
    for inputs in (found[0], found[2]):
        with pytest.raises(InvalidPrompt, match=r"pictures have \d image_sizes"):
            adapter.encode(inputs)


def test_a_picture_of_molmo2_pools_its_own_patches() -> None:
    inputs = picture_of("molmo2")
    inputs["image_token_pooling"] = (
        inputs["image_token_pooling"]
        + int(inputs["image_token_pooling"].max().item())
        + 1
    )
    with pytest.raises(
        InvalidPrompt, match="names a patch that its picture does not have"
    ):
        shared_adapter("molmo2").encode(inputs)


def test_a_video_without_its_seconds_is_refused() -> None:
    tiny = family("qwen2_5_vl")
    assert tiny.video is not None
    inputs = to_mx(tiny.video(5, 0)) | {"second_per_grid_ts": mx.zeros((0,))}
    with pytest.raises(InvalidPrompt, match="1 videos have 0 time steps"):
        shared_adapter("qwen2_5_vl").encode(inputs)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MROPE
        if name
        not in (
            "ernie4_5_moe_vl",
            "glm_ocr",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_omni_moe",
        )
    ],
)
def test_positions_without_marks_are_mlx_vlms(name: str) -> None:
    """mlx-vlm counts pictures by the marks before them, which GLM-OCR has not."""
    adapter = shared_adapter(name)
    mark = adapter.config.vision_start_token_id
    assert isinstance(adapter, MRoPEAdapter)
    inputs = picture_of(name)
    ids = mx.where(inputs["input_ids"] == mark, 5, inputs["input_ids"])
    grids = inputs["image_grid_thw"]
    found = adapter.positions(ids, {"image_grid_thw": grids}, {})
    wanted, _ = adapter._rope_index(ids, grids, None)
    assert found.prompt is not None and mx.array_equal(found.prompt, wanted)
