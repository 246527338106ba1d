"""The tiny model that hears beeps: its training is the model that is saved, and what is kept hears."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from fixtures.training import common, hearing
from vlm_batch import Audio, SamplingParams, VLMBatcher

KEPT = Path(__file__).parent.parent / "fixtures" / "hearing"


@pytest.mark.parametrize("samples", [16_000, 16_001, 30_561, 3 * 16_000])
def test_spectrograms_are_the_processors(samples: int) -> None:
    noise = np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
    noise[samples // 2 :] *= 0.001
    made = hearing.extractor()(
        noise, sampling_rate=16_000, padding="max_length", return_tensors="np"
    )
    ours = hearing.spectrogram(noise)
    np.testing.assert_allclose(
        ours, made["input_features"][0, :, : ours.shape[1]], atol=1e-4, rtol=0
    )
    assert ours.shape[1] == -(-samples // 160)


def test_training_hears_what_the_checkpoint_hears(tmp_path: Path) -> None:
    """Two steps; then the first answer's tokens have, by this library, the log-probabilities of training's own forward."""
    losses = hearing.train(tmp_path, steps=2, size=8)
    assert (
        np.isfinite(losses).all()
        and (tmp_path / "model.safetensors").stat().st_size < 1.2e6
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model = hearing.build(hearing.configuration(tokenizer))
    weights = model.sanitize(mx.load(str(tmp_path / "model.safetensors")))
    model.load_weights(
        [(name, value.astype(mx.float32)) for name, value in weights.items()]
    )
    asked = [one for kind in hearing.held_out(2).values() for one in kind]
    random.Random(0).shuffle(asked)
    batch = hearing.Collator(tokenizer)(asked)
    chances = np.array(hearing.logits(model, batch).astype(mx.float32))
    chances -= np.log(
        np.exp(chances - chances.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ) + chances.max(-1, keepdims=True)
    with VLMBatcher(str(tmp_path)) as batcher:
        handles = [
            batcher.submit(
                prompt=hearing.QUESTIONS[one.kind],
                audios=[Audio(part.samples, rate=16_000) for part in one.recordings],
                params=SamplingParams(max_tokens=1, logprobs=1),
            )
            for one in asked
        ]
        for row, handle in enumerate(handles):
            (first,) = handle.result().logprobs or ()
            place = int(np.argmax(np.array(batch["labels"][row]) != common.NO_LABEL))
            assert abs(first.logprob - chances[row, place, first.token_id]) < 2e-3


def test_every_array_that_hears_or_answers_is_trained() -> None:
    tokenizer = hearing.words()
    model = hearing.build(hearing.configuration(tokenizer))
    hearing.trained_part(model)
    batch = hearing.Collator(tokenizer)(hearing.batch_of(0, 8))

    def loss_with(weights: dict[str, mx.array]) -> mx.array:
        model.update(weights)
        return hearing.loss(model, batch)

    gradients: Any = common.tree_flatten(
        mx.grad(loss_with)(model.trainable_parameters())
    )
    assert len(gradients) > 40
    assert [name for name, value in gradients if not mx.any(value).item()] == []


def test_the_kept_checkpoint_hears() -> None:
    """Recordings it was not trained on; most answers are right, as its README says."""
    shares = hearing.measure(KEPT, 12)
    assert sum(shares.values()) / len(shares) >= 0.85, shares
