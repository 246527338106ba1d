"""Settings of config.json: those that are applied answer as transformers does, alone and in company; others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models import rope_utils
from mlx_vlm.models.cache import RotatingKVCache, make_prompt_cache

from tests.checkpoints import NO_OLDER, layout, names, older, write_checkpoint
from tests.exact_cases import GRID, JOINED, Arrival, Way, engine_of
from tests.exact_cases import play as play_exactly
from tests.harness import TOLERANCE, Answer, Ask, inputs_of, run
from tests.settings import (
    ALL_SLIDE,
    APPLIED,
    KEYS,
    NOT_SWEPT,
    NUM_TOKENS,
    REFUSED,
    SETTINGS,
    Case,
    factors,
    merged,
    nested,
    write_case,
)
from tests.zoo import apart
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.longrope import ROW_ROPES
from vlm_batch.adapters.modules import clone_modules
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.shapes import FixedShapes
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading import adapt
from vlm_batch.loading.checkpoints import read_model
from vlm_batch.proofs.proving import prove
from vlm_batch.proofs.shared import SharedCallProofs


@cache
def adapted(name: str) -> Adapter:
    """The adapter of a case's folder, as it is loaded on a CPU."""
    with TemporaryDirectory() as folder:
        model = read_model(write_case(Path(folder), APPLIED[name]), in_float32=True)
        mx.eval(model.parameters())
    model.set_dtype(mx.float32)
    return adapt(model)


def check(name: str, answers: list[Answer]) -> None:
    """Every answer has transformers' tokens and log-probabilities."""
    with np.load(SETTINGS / f"{name}.npz") as recorded:
        for answer in answers:
            key, result = answer.ask.key, answer.result
            assert result is not None and result.error is None, (key, result)
            assert (
                list(result.token_ids)
                == recorded[f"{key}/tokens"][: answer.ask.tokens].tolist()
            ), key
            distance = apart(
                np.stack(answer.logprobs),
                recorded[f"{key}/logprobs"][: answer.ask.tokens],
            )
            assert distance < TOLERANCE, key


def play(name: str, asks: list[Ask], **how: Any) -> None:
    check(
        name,
        run(
            adapted(name), lambda key: inputs_of(APPLIED[name].family, key), asks, **how
        ),
    )


def all_at_once(name: str, **how: Any) -> list[Ask]:
    return [Ask(key, tokens=NUM_TOKENS, **how) for key in APPLIED[name].keys]


@pytest.mark.parametrize("name", APPLIED)
def test_a_setting_that_is_applied_answers_as_transformers(name: str) -> None:
    for ask in all_at_once(name):
        play(name, [ask])


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
@pytest.mark.parametrize("name", APPLIED)
def test_a_setting_that_is_applied_is_each_rows_own(
    name: str, placement: Placement
) -> None:
    """Together, one after the other, and in chunks that end anywhere."""
    asks = all_at_once(name)
    play(name, asks, placement=placement)
    play(
        name,
        asks[::-1],
        placement=placement,
        config={"max_rows": 4, "prefill_budget": 5, "idle_budget": 5},
    )
    play(
        name,
        [Ask(ask.key, at=2 * at, tokens=NUM_TOKENS) for at, ask in enumerate(asks)],
        placement=placement,
    )


@pytest.mark.parametrize("joins", [False, True], ids=["one by one", "joined"])
@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
def test_reproducible_answers_with_long_factors(
    placement: Placement, joins: bool
) -> None:
    """The bits of each answer alone, in company and from kept beginnings; prompts filled up to few lengths, too."""
    adapter, family = adapted("longrope"), APPLIED["longrope"].family
    proof = prove(adapter, None, placement)
    exact = FixedShapes(
        proof.best(placement),
        placement,
        GRID,
        products=proof.products,
        widths=proof.widths,
    )
    if joins:
        exact = replace(
            exact,
            **JOINED,
            joint=SharedCallProofs(adapter.with_products(dict(exact.products)), None),
        )
    arrivals = [
        Arrival(key, at, NUM_TOKENS) for at, key in enumerate(APPLIED["longrope"].keys)
    ]
    right = [
        play_exactly(family, engine_of(adapter, exact, Way()), [replace(one, at=0)])[0]
        for one in arrivals
    ]
    with np.load(SETTINGS / "longrope.npz") as recorded:
        for arrival, answer in zip(arrivals, right, strict=True):
            assert list(answer.tokens) == recorded[f"{arrival.key}/tokens"].tolist(), (
                arrival.key
            )
    engine = engine_of(adapter, exact, Way(keeps=True))
    for _ in range(2):
        for answer, alone in zip(
            play_exactly(family, engine, arrivals), right, strict=True
        ):
            assert (answer.tokens, answer.bits) == (alone.tokens, alone.bits)


def test_a_prompt_goes_on_from_another_only_if_it_has_its_factors() -> None:
    adapter = adapted("longrope")
    long, short = (
        np.array(inputs_of("llava_onevision", "text:5:40")["input_ids"])[:, :end]
        for end in (40, 20)
    )
    keys = [adapter.prompt_key(as_mlx({"input_ids": ids})) for ids in (long, short)]
    assert (keys[0].positions[:20] != keys[1].positions).any(axis=1).all()
    assert tuple(keys[0].answer) != tuple(keys[1].answer)


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_passed_over_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    case, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=said):
        read_model(write_case(tmp_path, case), in_float32=True)


@pytest.mark.parametrize(
    "name",
    [
        "yarn_idefics2",
        "yarn_glm_ocr",
        "yarn_qwen2_5_vl",
        "linear_aya_vision",
        "linear_paligemma",
        "llama3_smolvlm",
    ],
)
def test_older_folders_have_scaled_positions_too(name: str, tmp_path: Path) -> None:
    """Where they lie in ``rope_scaling``, as transformers 4 wrote them."""
    case = APPLIED[name]
    said = older(merged(layout(case.family)["files"]["config.json"], case.change))
    assert "rope_parameters" not in said["text_config"]
    model = read_model(
        write_checkpoint(tmp_path, case.family, config=said), in_float32=True
    )
    answers = run(
        adapt(model), lambda key: inputs_of(case.family, key), all_at_once(name)
    )
    check(name, answers)


@cache
def recorded_changes() -> dict[
    str, list[tuple[tuple[str, ...], Any, float, np.ndarray]]
]:
    """What transformers answers to each change of each family's settings: path, value, how far it moves, log-probabilities."""
    found: dict[str, list[tuple[tuple[str, ...], Any, float, np.ndarray]]] = {}
    with np.load(SETTINGS / "swept.npz") as recorded:
        for key, right in recorded.items():
            name, path, value, moved = json.loads(key)
            found.setdefault(name, []).append((tuple(path), value, moved, right))
    return found


#: (family, setting) -> what mlx-vlm's own class says of an activation that it does not have.
MLX_VLMS_OWN = {
    ("muse_spark", "audio_config.hidden_act"): "Unsupported audio activation: {value}",
    (
        "paligemma",
        "text_config.hidden_act",
    ): "Unsupported activation '{value}' for PaliGemma",
    (
        "paligemma2",
        "text_config.hidden_activation",
    ): "Unsupported activation '{value}' for PaliGemma",
    (
        "qwen3_omni_moe",
        "audio_config.activation_function",
    ): "Unsupported activation: {value}",
}
#: mlx-vlm's class of Florence-2 has its activations and its embeddings' scale, which is all that is changed, written out.
ALL_REFUSED = {"florence2"}


@pytest.mark.parametrize("name", sorted({*names()} - NOT_SWEPT.keys()))
def test_every_setting_is_as_transformers_has_it_or_refused(
    name: str, tmp_path: Path
) -> None:
    """Each activation, epsilon, yes or no, and base of a rotation: another value moves the answer as there, or is refused."""
    folder, wrong, compared = write_case(tmp_path, Case(name, {})), [], 0
    written = json.loads((folder / "config.json").read_text())
    for path, value, moved, right in recorded_changes()[name]:
        (folder / "config.json").write_text(
            json.dumps(merged(written, nested(path, value)))
        )
        if said := MLX_VLMS_OWN.get((name, ".".join(path))):
            with pytest.raises(ValueError, match=f"^{said.format(value=value)}"):
                read_model(folder, in_float32=True)
            continue
        try:
            adapter = adapt(read_model(folder, in_float32=True))
        except UnsupportedModel:
            continue
        compared += 1
        for answer in run(
            adapter,
            lambda key: inputs_of(name, key),
            [Ask(key, tokens=1) for key in KEYS],
        ):
            assert answer.result is not None and answer.result.error is None, (
                path,
                value,
            )
            distance = apart(answer.logprobs[0], right[KEYS.index(answer.ask.key)])
            # values that no checkpoint has round more
            if distance > TOLERANCE + 0.01 * moved:
                wrong.append((".".join(path), value, answer.ask.key, moved, distance))
    assert not wrong
    assert (compared == 0) == (name in ALL_REFUSED)


def test_scaled_positions_of_a_class_that_spells_its_rotation_out_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        UnsupportedModel,
        match="has yarn positions, which mlx-vlm's class of it does not know",
    ):
        read_model(
            write_case(tmp_path, Case("ernie4_5_moe_vl", APPLIED["yarn_glm4v"].change)),
            in_float32=True,
        )


@pytest.mark.parametrize("name", sorted(names()))
def test_settings_of_no_effect_are_not_refused(name: str, tmp_path: Path) -> None:
    """Words' ids, what training reads, and what is the default anyway."""
    common: dict[str, Any] = {
        "use_cache": False,
        "initializer_range": 0.5,
        "attention_dropout": 0.1,
    }
    common |= {
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
        "architectures": ["Other"],
        "nobody_knows_this": 7,
    }
    common |= {
        "dtype": "bfloat16",
        "_name_or_path": "a/b",
        "transformers_version": "4.57.1",
        "return_dict": True,
    }
    common |= {
        "output_attentions": False,
        "output_hidden_states": False,
        "id2label": {"0": "a"},
        "label2id": {"a": 0},
    }
    common |= {
        "is_encoder_decoder": False,
        "chunk_size_feed_forward": 0,
        "problem_type": None,
        "_attn_implementation": "sdpa",
    }
    config = layout(name)["files"]["config.json"]
    parts = {
        part: common for part in ("text_config", "vision_config") if part in config
    }
    read_model(write_case(tmp_path, Case(name, {**common, **parts})), in_float32=True)


def test_where_some_layers_slide_the_window_bounds_prompt_and_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = read_model(
        write_case(tmp_path, Case("paligemma2", ALL_SLIDE)), in_float32=True
    )
    assert "sliding_window of 9 tokens" in caplog.text
    assert adapt(model).max_context == 9


@pytest.mark.parametrize(
    "name", ["qwen3_vl_moe", "qwen3_omni_moe", "mistral3_mistral4"]
)
def test_a_window_that_no_model_of_transformers_reads_is_none(
    name: str, tmp_path: Path
) -> None:
    model = read_model(write_case(tmp_path, Case(name, ALL_SLIDE)), in_float32=True)
    adapter = adapt(model)
    assert adapter.max_context != 9
    assert not any(
        isinstance(cache, RotatingKVCache)
        for cache in make_prompt_cache(adapter.language)
    )


LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 2.0,
    "original_max_position_embeddings": 24,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 24,
}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": factors(1.0, 4),
    "long_factor": factors(2.0, 4),
}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LINEAR,
        LLAMA3,
        YARN,
        LONG | {"original_max_position_embeddings": 24},
        {"rope_type": "proportional"},
    ],
    ids=lambda scaling: (scaling or {}).get("rope_type", "default"),
)
def test_every_rotation_of_mlx_vlms_is_each_rows_own_in_an_adapter(
    scaling: dict[str, Any] | None,
) -> None:
    rope = rope_utils.initialize_rope(8, 100.0, False, scaling, 512)
    ours = clone_modules(rope, ROW_ROPES)
    x = mx.array(
        np.random.RandomState(6).standard_normal((3, 2, 1, 8)).astype(np.float32)
    )
    together = ours(x, offset=mx.array([2, 23, 60]))
    for row, offset in enumerate((2, 23, 60)):
        np.testing.assert_allclose(
            together[row : row + 1], rope(x[row : row + 1], offset=offset), atol=1e-5
        )


def test_no_other_kind_of_rotation_is_known() -> None:
    """A class that a new mlx-vlm adds is to be looked at: does its answer for a row depend on other rows?"""
    kinds = {
        name
        for name, kind in vars(rope_utils).items()
        if isinstance(kind, type) and "RoPE" in name
    }
    assert kinds == {
        "EagerRoPE",
        "SuScaledRoPE",
        "Llama3RoPE",
        "YarnRoPE",
        "ProportionalRoPE",
        "MRoPERotaryEmbedding",
    }


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in sorted(names())
        if "text_config" in layout(name)["files"]["config.json"]
    ],
)
@pytest.mark.parametrize("is_older", [False, True], ids=["newer", "older"])
def test_settings_of_the_text_that_are_written_twice_are_one(
    tmp_path: Path, name: str, is_older: bool
) -> None:
    """transformers 4.52 to 4.56 wrote them at the root and in text_config, of which mlx-vlm's classes read one."""
    if is_older and name in NO_OLDER:
        return
    written = layout(name)["files"]["config.json"]
    config = older(written) if is_older else written
    text = {
        key: value
        for key, value in config["text_config"].items()
        if key != "model_type"
    }
    read_model(
        write_checkpoint(tmp_path, name, config={**text, **config}), in_float32=True
    )


def test_a_factor_of_yarn_that_is_left_out_follows_as_in_transformers(
    tmp_path: Path,
) -> None:
    """From the longest context and the original one: 64 and 16, which is the factor of 4 that was recorded."""
    case = APPLIED["yarn_qwen2_5_vl"]
    config = merged(layout(case.family)["files"]["config.json"], case.change)
    config["text_config"]["rope_parameters"]["factor"] = None
    model = read_model(
        write_checkpoint(tmp_path, case.family, config=config), in_float32=True
    )
    check(
        "yarn_qwen2_5_vl",
        run(
            adapt(model),
            lambda key: inputs_of(case.family, key),
            all_at_once("yarn_qwen2_5_vl"),
        ),
    )


@pytest.mark.parametrize("name", ["linear_qwen3_5", "llama3_llava"])
def test_scaled_positions_without_their_factor_are_refused(
    name: str, tmp_path: Path
) -> None:
    case = APPLIED[name]
    config = merged(layout(case.family)["files"]["config.json"], case.change)
    config["text_config"]["rope_parameters"]["factor"] = None
    with pytest.raises(UnsupportedModel, match="positions, and have no factor"):
        read_model(
            write_checkpoint(tmp_path, case.family, config=config), in_float32=True
        )


@pytest.mark.parametrize(
    "name", ["aya_vision", "aya_vision_cohere2", "paligemma", "paligemma2"]
)
def test_a_head_of_its_own_that_nothing_reads_is_refused(
    name: str, tmp_path: Path
) -> None:
    config = layout(name)["files"]["config.json"]
    parts = {
        "tie_word_embeddings": False,
        "text_config": config["text_config"] | {"tie_word_embeddings": False},
    }
    folder = write_checkpoint(tmp_path, name, config=parts)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    head = next(
        value for key, value in tensors.items() if key.endswith("embed_tokens.weight")
    )
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        tensors | {"lm_head.weight": head},
        metadata={"format": "pt"},
    )
    with pytest.raises(
        UnsupportedModel,
        match=r"tie_word_embeddings: false.* by the table of words alone",
    ):
        read_model(folder, in_float32=True)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_hunyuan_vl_without_sections_is_refused_by_name(
    place: str, tmp_path: Path
) -> None:
    config = layout("hunyuan_vl")["files"]["config.json"]
    text = {
        key: value
        for key, value in config["text_config"].items()
        if key != "rope_parameters"
    }
    with pytest.raises(UnsupportedModel, match="hunyuan_vl says no mrope_section"):
        read_model(
            write_checkpoint(
                tmp_path, "hunyuan_vl", config={"text_config": {**text, place: None}}
            ),
            in_float32=True,
        )
