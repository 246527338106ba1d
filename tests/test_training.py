"""Training's forward pass, batched and written out by hand, is the model that is saved: same prompts, same logits."""

from __future__ import annotations

import importlib
import pkgutil
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm import load
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import prepare_inputs
from tokenizers import Tokenizer

import fixtures.training
from fixtures.training import common, scenes
from vlm_batch.adapters.base import Adapter
from vlm_batch.loading import adapt

CHECKPOINTS = Path(__file__).parent.parent / "fixtures" / "checkpoints"
NOT_FAMILIES = {
    "common",
    "evaluate",
    "heads",
    "hearing",
    "patches",
    "reader",
    "scenes",
    "tokenizer",
    "train",
}
FAMILIES = sorted(
    {module.name for module in pkgutil.iter_modules(fixtures.training.__path__)}
    - NOT_FAMILIES
)
# The one without a picture first: mlx-vlm's models keep a picture's positions for the next call.
KINDS = ("repeat", "describe", "digits", "one of two", "describe", "same", "is there")
# mlx-vlm's own call runs mllama's cross-attention on texts, too (mllama/language.py:336); the published model skips it.
WRONG_ON_TEXTS = {"mllama"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"fixtures.training.{request.param}")


def records_of(family: Any) -> list[scenes.Record]:
    """Some with one picture, some with two or none; sizes differ."""
    records = [
        scenes.training(f"test {index}", kind) for index, kind in enumerate(KINDS)
    ]
    return [record for record in records if record.kind in family.KINDS]


def start(family: Any) -> tuple[Tokenizer, dict[str, Any], Any]:
    """Tokenizer, configuration and a model as training starts with."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "qwen2_vl" / "tokenizer.json"))
    config = family.configuration(tokenizer)
    mx.random.seed(0)
    model = family.build(config)
    common.warm_start(
        model, family.warm(mx.load(str(CHECKPOINTS / "qwen2_vl" / "model.safetensors")))
    )
    return tokenizer, config, model


class Always(random.Random):
    """0.4: pictures stand before the question; 0.6: after it. Never a system prompt."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def test_training_sees_what_the_checkpoint_computes(
    family: Any, tmp_path: Path
) -> None:
    """mlx-vlm loads what was saved, writes prompts of the tokens training has, and has the same logits after them."""
    tokenizer, config, model = start(family)
    collate, records = family.Collator(tokenizer), records_of(family)
    family.save(model, config, tokenizer, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 2e6
    saved, processor = load(str(tmp_path))
    saved.set_dtype(mx.float32)
    read: dict[str, Any] = dict(tree_flatten(saved.parameters()))  # type: ignore[arg-type]
    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for name, value in flat:
        np.testing.assert_allclose(
            np.array(read[name]), np.array(value), atol=1e-3, rtol=1e-3, err_msg=name
        )
    model.load_weights(list(read.items()))  # float16 has rounded them
    inputs = [inputs_of(saved, processor, record) for record in records]
    orders = [collate(records, Always(value)) for value in (0.4, 0.6)]
    prompts = [
        [batch_prompt(arrays, row).tolist() for row in range(len(records))]
        for arrays in orders
    ]
    written = [one["input_ids"][0].tolist() for one in inputs]
    assert written in prompts
    arrays = orders[prompts.index(written)]
    trained = np.array(
        family.logits(model, {name: mx.array(value) for name, value in arrays.items()})
    )
    adapter = adapt(saved)
    for row, one in enumerate(inputs):
        found = trained[row, len(written[row]) - 1]
        np.testing.assert_allclose(found, prefilled(adapter, one), atol=1e-3, rtol=0)
        if records[row].images or config["model_type"] not in WRONG_ON_TEXTS:
            alone = saved(**one, cache=make_prompt_cache(saved.language_model))
            np.testing.assert_allclose(
                found, np.array(alone.logits)[0, -1], atol=1e-3, rtol=0
            )


def prefilled(adapter: Adapter, inputs: dict[str, Any]) -> np.ndarray:
    """(V,): this library's logits after the prompt."""
    encoded = adapter.encode(
        {name: value for name, value in inputs.items() if value is not None}
    )
    return np.array(
        adapter.prefill(
            [encoded], adapter.make_cache(), 0, inputs["input_ids"].shape[1]
        )
    )[0]


def inputs_of(model: Any, processor: Any, record: scenes.Record) -> dict[str, Any]:
    prompt = apply_chat_template(
        processor, model.config, record.question, num_images=len(record.images)
    )
    inputs = prepare_inputs(processor, images=record.images or None, prompts=prompt)
    # No padding, so no mask: some models take the processor's for one of attention.
    extra = {name: value for name, value in inputs.items() if name != "attention_mask"}
    return {"pixel_values": None, "mask": None, **extra}


def batch_prompt(arrays: dict[str, np.ndarray], row: int) -> np.ndarray:
    first_answer = int(np.argmax(arrays["labels"][row] != common.NO_LABEL)) + 1
    return arrays["tokens"][row, :first_answer]


def test_every_array_of_the_model_is_trained(family: Any) -> None:
    """The loss has a gradient in every parameter that is saved: none is frozen, bypassed, or behind a closed gate."""
    tokenizer, _, model = start(family)
    arrays = family.Collator(tokenizer)(records_of(family), random.Random(0))
    batch = {name: mx.array(value) for name, value in arrays.items()}
    _, gradients = mx.value_and_grad(
        lambda weights: loss_with(family, model, weights, batch)
    )(model.trainable_parameters())
    flat: list[tuple[str, Any]] = tree_flatten(gradients)  # type: ignore[assignment]
    idle = [name for name, value in flat if not mx.any(value).item()]
    assert idle == []


def loss_with(family: Any, model: Any, weights: Any, batch: common.Batch) -> mx.array:
    model.update(weights)
    return common.loss(family.logits, model, batch)
