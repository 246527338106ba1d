"""Recordings in families whose published processors or encoders mlx-vlm does not follow: what the adapters mend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.inkling.audio_feature_extractor import InklingAudioFeatureExtractor
from mlx_vlm.models.inkling.processing_inkling import extract_dmel_bins

from tests.harness import shared_adapter
from tests.hearing import inkling, mimo_v2, nemotron
from tests.zoo import family, to_mx
from tests.zoo.nemotron_h_nano_omni import AUDIO, HOP, heard
from vlm_batch import Audio, VLMBatcher
from vlm_batch.inputs.audio import Sound
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.processors import ProcessorCopier
from vlm_batch.models._inkling import with_floored_magnitudes

TONE = 0.4 * np.sin(2 * np.pi * 440 * np.arange(8_000) / 16_000)


def levels(part: Any, samples: np.ndarray) -> np.ndarray:
    """The levels (frames, bands) of one recording."""
    return np.array(
        extract_dmel_bins(part([samples.astype(np.float32)])["input_features"])
    )[0]


def test_inkling_has_transformers_levels() -> None:
    """Sums over the bands as InklingFeatureExtractor of transformers 5.23 and its processor give them."""
    part = InklingAudioFeatureExtractor()
    assert (
        levels(with_floored_magnitudes(part), np.zeros(3_000)).sum(1).tolist()
        == [160] * 4
    )
    assert levels(with_floored_magnitudes(part), TONE).sum(1).tolist() == [
        718,
        *[189] * 9,
    ]
    assert levels(part, np.zeros(3_000)).sum(1).tolist() == [0] * 4, (
        "mlx-vlm has mended it: with_floored_magnitudes() can go"
    )
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, 70_001)
    assert np.array_equal(
        levels(part, noise), levels(with_floored_magnitudes(part), noise)
    )  # nothing of it is that quiet
    part.max_frames_per_chunk = 7
    assert np.array_equal(
        levels(with_floored_magnitudes(part), noise),
        levels(with_floored_magnitudes(InklingAudioFeatureExtractor()), noise),
    )


def test_nemotrons_last_feature_is_that_alone_beside_a_longer_recording() -> None:
    """Of samples that fill eight frames without a rest: transformers' depends on what is beside."""
    adapter = shared_adapter("nemotron_h_nano_omni")

    def features(counts: list[int]) -> np.ndarray:
        inputs = heard(3, counts)
        embeds = np.array(adapter.encode(to_mx(inputs)).inputs_embeds)[0]
        return embeds[inputs["input_ids"][0] == AUDIO]

    alone, beside = features([80 * HOP]), features([80 * HOP, 200 * HOP])
    assert len(alone) == 11
    assert np.abs(alone - beside[:11]).max() < 1e-4


def test_ten_minutes() -> None:
    samples = np.zeros(600 * 16_000, np.float32)
    adapter = shared_adapter("inkling")
    made = Processing(adapter.processor(inkling("inkling")), adapter.config)
    inputs = made.inputs(made.render("what?", 0, 0, 1), [], [], [Sound(samples, 600.0)])
    assert (
        int((np.array(inputs["input_ids"]) == adapter.config.audio_token_id).sum())
        == 12_000
    )
    with VLMBatcher(
        family("nemotron_h_nano_omni").build(), nemotron("nemotron_h_nano_omni")
    ) as batcher:
        result = batcher.submit(
            prompt="what?", audios=Audio(samples, rate=16_000)
        ).result(timeout=60)
    assert result.error is not None
    assert (
        "nemotron_h_nano_omni hears 399.99 s of a recording: cut it into several"
        in result.error
    )


def test_copies_of_mimos_processor_share_a_codec_at_its_own_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter("mimo_v2")
    upstream = mimo_v2("mimo_v2")
    processor = adapter.processor(upstream)
    assert adapter.processor(processor) is processor
    assert (
        ProcessorCopier(processor).copy().audio_tokenizer is processor.audio_tokenizer
    )
    assert upstream._audio_tokenizer is None, "the caller's own processor was changed"
    made = Processing(processor, adapter.config)
    assert made.audio_rate == 24_000
    rendered = made.render("what?", 0, 0, 1)
    samples = np.random.default_rng(1).uniform(-0.3, 0.3, 12_000).astype(np.float32)
    codes = made.inputs(rendered, [], [], [Sound(samples, 0.5)])["audio_codes"]
    codec = upstream.audio_tokenizer  # loaded when it was asked for
    wanted = codec.encode(samples, sample_rate=24_000, num_quantizers=20)
    assert mx.array_equal(codes, wanted.T)
    assert codes.shape == (13, 20)


def test_a_checkpoint_without_mimos_codec_says_so() -> None:
    processor = mimo_v2("mimo_v2")
    processor.audio_tokenizer_path = processor.audio_tokenizer_path / "nowhere"
    with VLMBatcher(family("mimo_v2").build(), processor) as batcher:
        result = batcher.submit(prompt="what?", audios=Audio(TONE, rate=16_000)).result(
            timeout=60
        )
        assert result.error is not None
        assert (
            "the checkpoint has no folder audio_tokenizer, with the codec of its recordings"
            in result.error
        )
        assert (
            batcher.submit(prompt="what?", params={"max_tokens": 2})
            .result(timeout=60)
            .ok
        )
