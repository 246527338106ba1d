"""What a process keeps of arrays serves every thread: an unevaluated one belongs to the thread that made it."""

from __future__ import annotations

import functools
import gc
import io
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models import interpolate
from PIL import Image

from tests.harness import inputs_of, shared_adapter
from tests.hearing import inkling, mimo_v2, nemotron
from tests.zoo import FAMILIES, family
from vlm_batch.adapters import tables
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.rotary import plain_frequencies, rotate_step
from vlm_batch.arrays import arrays_of, as_mlx, lengths_array
from vlm_batch.inputs.processing import Processing
from vlm_batch.records import Call

KEEPS = type(functools.lru_cache(lambda: None))
PACKAGES = ("mlx_vlm", "mlx_audio", "vlm_batch", "tests")
MEDIA = {"image": "image:3:1", "video": "video:3:1", "audio": "audio:3:1"}
PICTURE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (37, 23, 3), dtype=np.uint8)
)


def results(function: Any) -> list[mx.array]:
    """Arrays that an ``lru_cache`` keeps."""
    kept = [one for one in gc.get_referents(function) if not callable(one)]
    return arrays_of(
        [list(one.values()) if isinstance(one, dict) else one for one in kept]
    )


def caches() -> Iterator[Any]:
    """Functions with ``lru_cache`` that keep arrays, of modules, classes and hooks."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        values = list(vars(module).values())
        for value in list(values):
            if isinstance(value, type):
                values += [
                    getattr(part, "__func__", part)
                    for part in list(vars(value).values())
                ]
            elif isinstance(value, FunctionType):
                values += [cell.cell_contents for cell in value.__closure__ or ()]
        yield from {
            id(one): one for one in values if type(one) is KEEPS and results(one)
        }.values()


def is_pending(array: mx.array) -> bool:
    dot = io.StringIO()
    mx.export_to_dot(dot, array)
    return "shape=rectangle" in dot.getvalue()


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """No table of an earlier test; and a stream of the main thread, without which MLX lends the first thread's."""
    mx.eval(mx.ones(1) + 1)
    forget()


def forget() -> None:
    for function in caches():
        function.cache_clear()


def elsewhere(work: Callable[[], Any]) -> Any:
    """Return what a thread of its own makes; raise what it raises."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="elsewhere")
    thread.start()
    thread.join(timeout=60)
    if raised:
        raise raised[0]
    return found[0]


def given(name: str, key: str) -> dict[str, Any]:
    inputs = as_mlx(inputs_of(name, key))
    mx.eval(arrays_of(inputs))
    return inputs


@functools.lru_cache(maxsize=4)
def kept(size: int) -> tuple[mx.array, int]:
    return mx.arange(size) * 2, size


@functools.cache
def always_kept(size: int) -> mx.array:
    return mx.arange(size) * 2


@pytest.mark.parametrize("function", [kept, always_kept])
def test_tables_are_found(function: Any) -> None:
    assert function not in list(caches())
    function(3)
    assert function in list(caches()) and is_pending(results(function)[0])
    mx.eval(function(3))
    assert not is_pending(results(function)[0])


@pytest.mark.parametrize(
    "name", [name for name in sorted(FAMILIES) if not family(name).text_only]
)
def test_no_family_keeps_what_other_threads_cannot_evaluate(name: str) -> None:
    adapter, tiny = shared_adapter(name), family(name)
    for kind, key in MEDIA.items():
        if getattr(tiny, kind) is not None:
            encoded = adapter.encode(given(name, key))
            pending = [
                function.__name__
                for function in caches()
                if any(map(is_pending, results(function)))
            ]
            mx.eval(encoded.inputs_embeds)  # tables of the adapter's own model, too
            assert pending == []


@pytest.mark.parametrize("name", ["lfm2_vl", "phi4_siglip"])
def test_two_engines_meet_a_size_at_the_same_moment(name: str) -> None:
    inputs = given(name, MEDIA["image"])
    adapters: list[Adapter] = [
        type(shared_adapter(name))(family(name).build()) for _ in range(2)
    ]
    first = elsewhere(lambda: adapters[0].encode(inputs))  # and not evaluated yet
    assert is_pending(first.inputs_embeds)
    assert np.isfinite(
        elsewhere(lambda: np.array(adapters[1].encode(inputs).inputs_embeds))
    ).all()


def test_two_engines_decode_at_the_same_lengths() -> None:
    x = mx.random.normal((2, 1, 1, 8))
    mx.eval(x)

    def rotated() -> mx.array:
        return rotate_step(
            x,
            plain_frequencies(8, 10_000.0),
            lengths_array((3, 5)),
            is_traditional=False,
        )

    first = elsewhere(rotated)
    assert is_pending(first)
    wanted = mx.fast.rope(
        x, 8, traditional=False, base=10_000.0, scale=1.0, offset=mx.array([3, 5])
    )
    assert (
        np.abs(elsewhere(lambda: np.array(rotated())) - np.array(wanted)).max() < 1e-5
    )


def test_nemotrons_pictures_of_one_size_are_resized_by_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter("nemotron_h_nano_omni")
    wanted = nemotron("nemotron_h_nano_omni").image_processor(images=[PICTURE])[
        "pixel_values"
    ]
    forget()
    made = [
        adapter.processor(nemotron("nemotron_h_nano_omni")).image_processor
        for _ in range(2)
    ]

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(interpolate, "separable_interpolate", fail)
        with pytest.raises(MemoryError):
            elsewhere(lambda: made[0](images=[PICTURE]))
    found = elsewhere(lambda: made[1](images=[PICTURE])["pixel_values"])
    assert np.array_equal(found, wanted)


def test_inkling_is_loaded_twice_at_the_same_moment() -> None:
    adapter = shared_adapter("inkling")
    first = elsewhere(lambda: inkling("inkling"))
    second = elsewhere(
        lambda: (
            Processing(adapter.processor(inkling("inkling")), adapter.config).processor
        )
    )
    # mlx-audio's table, still
    with pytest.raises(RuntimeError, match="There is no Stream"):
        elsewhere(lambda: mx.eval(first.feature_extractor.mel_filters))
    forget()
    assert mx.array_equal(
        second.feature_extractor.mel_filters,
        inkling("inkling").feature_extractor.mel_filters,
    )


def test_a_recording_of_mimos_that_fails_leaves_the_next_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlx_audio.codec.models.mimo_audio_tokenizer import MiMoAudioTokenizer

    codec = shared_adapter("mimo_v2").processor(mimo_v2("mimo_v2")).audio_tokenizer
    samples = np.random.default_rng(1).uniform(-0.3, 0.3, 12_000).astype(np.float32)

    def encode() -> mx.array:
        return codec.encode(samples, sample_rate=24_000, num_quantizers=20)  # type: ignore[no-any-return]

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(MiMoAudioTokenizer, "encode_mels", fail)
        with pytest.raises(MemoryError):
            elsewhere(encode)
    assert mx.array_equal(elsewhere(encode), encode())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("_bilinear_weights_1d", (7, 3, False, True)),
        ("_bilinear_weights_1d", (3, 7)),
        ("_bicubic_weights_1d", (7, 9, 9 / 7)),
        ("_bicubic_aa_weights_1d", (9, 4)),
        ("nearest_indices", (5, 8)),
    ],
)
def test_tables_are_mlx_vlms_and_made_once(name: str, sizes: tuple[Any, ...]) -> None:
    bound = vars(interpolate)[name]
    assert bound is tables.HOOKS[name].either
    with running(Call()):
        ours = arrays_of([bound(*sizes)])
        assert all(
            one is other
            for one, other in zip(ours, arrays_of([bound(*sizes)]), strict=True)
        )
    assert not any(map(is_pending, ours))
    for one, theirs in zip(ours, arrays_of([bound(*sizes)]), strict=True):
        assert one is not theirs and mx.array_equal(one, theirs)
