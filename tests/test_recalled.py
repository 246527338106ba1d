"""Pictures that come again are decoded and processed once, and answers are those that they have without any cache."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image

from tests.harness import shared_adapter
from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.adapters.pictures import PatchesOfRows, with_quick_patches
from vlm_batch.arrays import Joined, arrays_of, num_bytes
from vlm_batch.assets import CHECKOUT, default_checkpoint
from vlm_batch.errors import RequestFailed
from vlm_batch.inputs import fetch as fetch_module
from vlm_batch.inputs import prepare
from vlm_batch.inputs.audio import Sound
from vlm_batch.inputs.images import load_image
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.processors import ProcessorCopier, settings_of
from vlm_batch.inputs.recalled import (
    RecalledPicture,
    recalled_picture,
    with_picture_cache,
)
from vlm_batch.loading import load_model
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.digest import digest, hash_ahead, joined, split_noted
from vlm_batch.store.pictures import PictureStore

CHECKPOINTS = Path(CHECKOUT) / "checkpoints"
PARAMS = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
DESCRIBE = "describe the image"


def picture(number: int, width: int = 112, height: int = 84) -> bytes:
    file = BytesIO()
    values = np.random.default_rng(number).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


class Work:
    """How often pictures were decoded, and how often processors were called to make arrays of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = self.processed = 0
        theirs, patches = prepare.load_image, PatchesOfRows._patches

        def load(*args: Any, **options: Any) -> Any:
            self.decoded += 1
            return theirs(*args, **options)

        def counted(part: PatchesOfRows, picture: np.ndarray) -> np.ndarray:
            self.processed += 1
            return patches(part, picture)

        monkeypatch.setattr(prepare, "load_image", load)
        monkeypatch.setattr(PatchesOfRows, "_patches", counted)

    def take(self) -> tuple[int, int]:
        """(decoded, processed) since the last time."""
        found = self.decoded, self.processed
        self.decoded = self.processed = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_5"])
def pair(request: Any) -> Iterator[tuple[VLMBatcher, VLMBatcher]]:
    """A batcher with caches, and one of the same model without."""
    folder = CHECKPOINTS / request.param
    with VLMBatcher(folder) as batcher, VLMBatcher(folder, caches=None) as plain:
        yield batcher, plain


def ask(batcher: VLMBatcher, images: Any, **said: Any) -> Any:
    return (
        batcher.submit(images, DESCRIBE, params=PARAMS, **said)
        .result(timeout=120)
        .raise_for_error()
    )


def same(one: Any, other: Any) -> None:
    assert (
        one.token_ids == other.token_ids
        and one.model_image_sizes == other.model_image_sizes
    )
    assert one.image_sizes == other.image_sizes
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 1e-4


def test_each_turn_of_a_chat_works_for_its_new_picture_alone(
    pair: tuple[VLMBatcher, VLMBatcher], work: Work
) -> None:
    batcher, plain = pair
    pictures = [picture(number, 84 + 28 * (number % 3)) for number in range(4)]
    for count in (1, 2, 3, 4):
        right = ask(plain, pictures[:count])
        assert work.take() == (count, count)
        same(ask(batcher, pictures[:count]), right)
        assert work.take() == (1, 1)
    same(ask(batcher, pictures[::-1]), ask(plain, pictures[::-1]))
    assert work.take() == (4, 4), "of the plain one"


def test_arrays_and_pillows_pictures_too(
    pair: tuple[VLMBatcher, VLMBatcher], work: Work
) -> None:
    array = np.random.default_rng(50).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    for _ in range(2):
        for source in (array, Image.fromarray(array)):
            same(ask(pair[0], source), ask(pair[1], source))
    assert work.take()[1] == 4 + 1, "four of the plain one, and one"


def test_a_known_data_uri_is_not_read_again(
    pair: tuple[VLMBatcher, VLMBatcher], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base64 is read where its pixels are needed, and each time until it was decoded once."""
    batcher, plain = pair
    store, number = batcher._preparer._pictures, 200
    assert store is not None
    uri = "data:image/png;base64," + base64.b64encode(picture(number)).decode()
    right = ask(plain, uri)
    assert work.take() == (1, 1)
    same(ask(batcher, uri), right)
    assert work.take() == (1, 1)
    read: list[Any] = []
    theirs = fetch_module._of_data_uri

    def counted(*args: Any) -> bytes:
        read.append(args)
        return theirs(*args)

    monkeypatch.setattr(fetch_module, "_of_data_uri", counted)
    same(ask(batcher, uri), right)
    same(ask(batcher, picture(number)), right)
    assert work.take() == (0, 0) and not read
    parts = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": DESCRIBE},
    ]
    chats = [
        one.submit(messages=[{"role": "user", "content": parts}], params=PARAMS)
        for one in (batcher, plain)
    ]
    same(*(chat.result(timeout=120).raise_for_error() for chat in chats))
    assert work.take() == (1, 1) and len(read) == 1, "of the plain one"
    read.clear()
    for key in [key for key in store._kept if not key.startswith((b"uri ", b"file "))]:
        del store._kept[key]  # the patches: they are made of the URI again
    same(ask(batcher, uri), right)
    assert work.take() == (1, 1) and len(read) == 1
    broken = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    for _ in range(2):
        with pytest.raises(RequestFailed, match="InvalidImage: the data URI"):
            ask(batcher, broken)


def test_what_was_kept_is_gone(work: Work) -> None:
    """Patches that nobody keeps features of are made again of what is kept."""
    with VLMBatcher(default_checkpoint()) as batcher:
        first = ask(batcher, picture(60))
        batcher._loop.generator.reuse.prefix.clear()  # type: ignore[attr-defined]
        tower = batcher._loop.generator.adapter.model.vision_tower  # type: ignore[attr-defined]
        tower._store._features.clear()
        again = ask(batcher, picture(60))
    assert work.take() == (1, 1)
    assert [one.logprob for one in again.logprobs] == [
        one.logprob for one in first.logprobs
    ]


def test_a_changed_file_is_another_picture(tmp_path: Path, work: Work) -> None:
    """Also one of the same length, with the times of before."""
    path = tmp_path / "a.bmp"
    arrays = [np.full((56, 56, 3), value, dtype=np.uint8) for value in (0, 255)]
    with (
        VLMBatcher(default_checkpoint()) as batcher,
        VLMBatcher(default_checkpoint(), caches=None) as plain,
    ):
        Image.fromarray(arrays[0]).save(path)
        before = path.stat()
        ask(batcher, path)
        ask(batcher, path)
        assert work.take() == (1, 1)
        Image.fromarray(arrays[1]).save(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        found = ask(batcher, path)
        assert work.take() == (1, 1)
        same(found, ask(plain, path))


def test_other_settings_are_other_pictures(work: Work) -> None:
    with (
        VLMBatcher(default_checkpoint()) as batcher,
        VLMBatcher(default_checkpoint(), caches=None) as plain,
    ):
        for said in ({}, {"max_pixels": 3136}, {}, {"max_pixels": 3136}):
            same(ask(batcher, picture(70), **said), ask(plain, picture(70), **said))
        assert work.take()[1] == 4 + 2
        for one in (batcher, plain):
            one.processing.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
        same(ask(batcher, picture(70)), ask(plain, picture(70)))
        assert work.take()[1] == 1 + 1


def test_a_bad_picture_is_bad_each_time(work: Work) -> None:
    with VLMBatcher(default_checkpoint()) as batcher:
        cut = picture(80)[:-400]
        said = [
            batcher.submit(cut, DESCRIBE).result(timeout=60).error for _ in range(2)
        ]
    assert said[0] == said[1] and "cannot be decoded" in str(said[0])


# Families whose processors are called as wholes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aya_vision", "mllama"])
def test_a_call_is_made_once_and_stands_for_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for fewer pictures, not for another order: tiles are padded to the most that a picture of the call has."""
    with (
        VLMBatcher(CHECKPOINTS / name) as batcher,
        VLMBatcher(CHECKPOINTS / name, caches=None) as plain,
    ):
        kind = next(
            one
            for one in type(batcher.processing.processor.image_processor).__mro__
            if "_preprocess" in vars(one)
        )
        theirs: Any = vars(kind)["_preprocess"]
        calls: list[int] = []

        def counted(*args: Any, **said: Any) -> Any:
            calls.append(1)
            return theirs(*args, **said)

        monkeypatch.setattr(kind, "_preprocess", counted)
        small, wide = picture(1, 40, 40), picture(2, 160, 40)
        several = name != "mllama"  # whose template takes one
        asked = [[small], [wide], *([[small, wide], [wide, small]] if several else [])]
        for is_new in (True, False):
            for images in asked:
                calls.clear()
                right = ask(plain, images)
                same(ask(batcher, images), right)
                assert len(calls) == 1 + is_new


# The parts
# ---------------------------------------------------------------------------------------------------------------------


def store(nbytes: int = 2**28) -> PictureStore:
    return PictureStore(ByteBudget(nbytes))


def known(data: bytes, kept: PictureStore) -> RecalledPicture:
    return recalled_picture(data, load_image, kept)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patch_size": 14, "temporal_patch_size": 1},
        {"do_rescale": False},
        {"do_normalize": False, "merge_size": 1},
    ],
    ids=str,
)
def test_patches_are_made_again_bit_for_bit(settings: dict[str, Any]) -> None:
    kept, part = store(), with_quick_patches(Qwen3VLImageProcessor(**settings))
    sources = [picture(1, 200, 150), picture(2, 64, 64)]
    right = part([load_image(source) for source in sources])
    part.pictures = kept
    for _ in range(2):
        images = [known(source, kept) for source in sources]
        found = part(images)
        whole = joined(found["pixel_values"].joined)
        assert np.array(whole).tobytes() == right["pixel_values"].tobytes()
        assert np.array_equal(found["image_grid_thw"], right["image_grid_thw"])
    assert all(image.content for image in images)


@pytest.mark.parametrize("name", ["qwen3_omni_moe", "inkling", "qwen2_vl"])
def test_a_processor_without_a_part_gets_none(name: str) -> None:
    """One that somebody made for texts: the adapter has nothing to change in it."""

    class Bare:
        pass

    assert not vars(shared_adapter(name).processor(Bare()))


def test_numbers_of_a_stand_in_reach_nobody() -> None:
    """A processor that reckons with pixels gets real ones, and the recordings beside them again."""
    model, processor = load_model(default_checkpoint())
    heard: list[Any] = []

    part = with_quick_patches(processor.image_processor)
    processor.image_processor = part
    kind = type(processor)

    class Halves(kind):  # type: ignore[misc,valid-type]
        def __call__(self, *args: Any, audio: Any = None, **said: Any) -> Any:
            heard.append(audio)
            found = super().__call__(*args, **said)
            if "pixel_values" in found:
                found["pixel_values"] = found["pixel_values"] / 2
            return found

    processor.__class__ = Halves
    kept = store()
    plain = Processing(processor, model.config)
    ours = Processing(with_picture_cache(processor, kept), model.config)
    prompt = plain.render(DESCRIBE, 1)
    right = plain.inputs(prompt, [load_image(picture(3))])["pixel_values"]
    for _ in range(2):
        found = ours.inputs(prompt, [known(picture(3), kept)])["pixel_values"]
        assert isinstance(found, mx.array) and mx.array_equal(found, right)
    heard.clear()
    ours.inputs(
        prompt,
        [known(picture(3), kept)],
        sounds=[Sound(np.zeros(8, np.float32), 8 / 16_000)],
    )
    assert len(heard) == 2 and None not in heard


def test_a_known_picture_is_not_decoded_until_it_is_read() -> None:
    kept = store()
    known(picture(4), kept)
    image = recalled_picture(picture(4), lambda source: pytest.fail("decoded"), kept)
    assert (image.size, image.mode, image.convert("RGB")) == (
        (112, 84),
        "RGB",
        image,
    ) and image.content is not None
    image = known(picture(4), kept)
    assert np.array_equal(
        np.asarray(image.resize((50, 40))),
        np.asarray(load_image(picture(4)).resize((50, 40))),
    )
    assert image.content is None, "it may have been changed"
    assert np.array_equal(
        np.asarray(known(picture(4), kept)), np.asarray(load_image(picture(4)))
    )


def test_joined_arrays_are_known_by_their_parts() -> None:
    parts = [mx.random.normal((rows, 300)) for rows in (400, 200, 90)]
    mx.eval(parts)
    right = [digest(mx.array(np.array(part))) for part in parts]
    hash_ahead(parts)
    whole = joined(Joined(parts))
    assert [digest(part) for part in split_noted(whole, [400, 600], 0)] == right
    assert digest(whole) == digest(mx.concatenate(parts))
    assert [len(part) for part in split_noted(whole, [100], 0)] == [100, 590], (
        "elsewhere"
    )
    assert arrays_of(Joined(parts)) == parts and num_bytes(Joined(parts)) == 690 * 1200


def test_the_store_is_within_the_budget_and_is_copied_with_nobody() -> None:
    import copy

    kept = store(100_000)
    assert copy.deepcopy(kept) is kept
    for number in range(8):
        kept.put(bytes([number]), {"pixels": np.zeros(5000, np.float32)})
        kept.update_budget()
    assert kept._budget.nbytes <= 100_000 and len(kept) == len(kept._budget) == 4
    assert kept.get(bytes([0])) is None and kept.get(bytes([7])) is not None
    kept.put(b"too large", np.zeros(50_000, np.float64))
    kept._budget.clear()
    kept.update_budget()
    assert (len(kept), kept._budget.nbytes) == (0, 0)


def test_settings_notice_sizes() -> None:
    _, processor = load_model(CHECKPOINTS / "aya_vision")
    before = settings_of(processor)
    processor.image_processor.size.height = 56
    assert (
        settings_of(processor)
        != before
        == settings_of(load_model(CHECKPOINTS / "aya_vision")[1])
    )


# Prompts of many placeholders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_runs_of_placeholders_are_tokenized_as_they_are_one_by_one(name: str) -> None:
    _, processor = load_model(CHECKPOINTS / name)
    tokenizer = getattr(processor, "tokenizer", processor)
    quick = getattr(ProcessorCopier(processor).copy(), "tokenizer", None)
    words = [getattr(owner, "image_token", None) for owner in (processor, tokenizer)]
    word = next((one for one in words if isinstance(one, str)), "<image>")
    texts = [
        "a b",
        word * 3,
        f"describe {word * 200} the image{word * 90}",
        f"{word * 70} x {word}{word * 400}\n",
        word,
    ]
    for text in texts:
        for said in (
            {},
            {"add_special_tokens": False},
            {"padding": True, "return_tensors": "np"},
        ):
            for given in (text, [text]):
                if quick is None or (
                    said.get("return_tensors") and isinstance(given, str)
                ):
                    continue
                right, found = tokenizer(given, **said), quick(given, **said)
                assert {**right}.keys() == {**found}.keys()
                for key, value in right.items():
                    assert np.array_equal(value, found[key]) and type(value) is type(
                        found[key]
                    ), key
