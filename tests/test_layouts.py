"""Folders that transformers 5 saved load by their path, and answer as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm
import numpy as np
import pytest
from mlx_vlm.utils import save_weights

from tests.checkpoints import (
    LAYOUTS,
    MULTIPLIERS,
    NO_LAYOUT,
    NO_OLDER,
    names,
    write_checkpoint,
)
from tests.zoo import FAMILIES, Trace, apart, family, recorded_requests, requests_of
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading import adapt, load_model
from vlm_batch.loading.checkpoints import TypedNorm, read_model
from vlm_batch.models._layouts import RULES, UNREADABLE

REFERENCES = Path(__file__).parent / "references"
STEPS = 8
TOLERANCE = 1e-4
"""That of tests/test_zoo.py: float32 on both sides."""
FROM_ONE = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "minicpmv4_6",
    "minicpmv4_7",
    "step3p7",
    "muse_spark",
)
"""Families whose files hold norms as the distance from one."""


def loaded(folder: Path) -> nn.Module:
    """As vlm_batch.loading.load_model loads it on a CPU, without a processor."""
    model = read_model(folder, in_float32=True)
    model.set_dtype(mx.float32)
    return model


def answers(name: str, model: nn.Module, *, few: bool = False) -> dict[str, Trace]:
    """To the requests of the zoo that are recorded; or to a text and a picture."""
    tiny = family(name)
    asked = {
        key: inputs
        for key, inputs in recorded_requests(tiny).items()
        if not few or key in ("text", "image_1")
    }
    return {key: tiny.greedy(model, inputs, STEPS) for key, inputs in asked.items()}


def test_every_reference_has_a_layout_or_a_reason() -> None:
    recorded = {path.stem for path in REFERENCES.glob("*.npz")} - {
        "molmo_point"
    }  # of published code, not transformers'
    assert set(names()) | NO_LAYOUT.keys() == recorded
    assert not set(names()) & NO_LAYOUT.keys()
    assert recorded <= FAMILIES.keys()


def test_every_rule_says_who_reads_what_it_makes() -> None:
    models = Path(mlx_vlm.__file__).parent / "models"
    for rule in RULES:
        source = rule.read_by or f"{rule.types.split()[0]}/config.py"
        assert (
            rule.types in UNREADABLE
            or (models / source).is_file()
            or source.endswith(" of transformers")
        ), rule


@pytest.mark.parametrize("name", names())
def test_a_saved_folder_answers_as_transformers(name: str, tmp_path: Path) -> None:
    model = loaded(write_checkpoint(tmp_path / name, name))
    assert adapt(model).spec.family == family(name).registered
    with np.load(REFERENCES / f"{name}.npz") as recorded:
        for request, trace in answers(name, model).items():
            assert trace.tokens == recorded[f"{request}/tokens"].tolist(), request
            assert apart(trace.logprobs, recorded[f"{request}/logprobs"]) < TOLERANCE, (
                request
            )


@pytest.mark.parametrize("name", sorted({*names()} - NO_OLDER))
def test_an_older_folder_answers_as_transformers(name: str, tmp_path: Path) -> None:
    """Rules go by what a folder holds: which version wrote it is not asked."""
    model = loaded(write_checkpoint(tmp_path / name, name, is_older=True))
    with np.load(REFERENCES / f"{name}.npz") as recorded:
        for request, trace in answers(name, model, few=True).items():
            assert trace.tokens == recorded[f"{request}/tokens"].tolist(), request
            assert apart(trace.logprobs, recorded[f"{request}/logprobs"]) < TOLERANCE, (
                request
            )


@pytest.mark.parametrize(
    "name", ["aya_vision", "llava", "mistral3", "pixtral", "qwen3_vl"]
)
@pytest.mark.parametrize("is_older", [False, True], ids=["newer", "older"])
def test_a_null_for_the_width_of_heads_is_as_none(
    name: str, is_older: bool, tmp_path: Path
) -> None:
    """transformers computes it from ``hidden_size`` then."""
    folder = write_checkpoint(tmp_path / name, name, is_older=is_older)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    width = text["hidden_size"] // text["num_attention_heads"]
    assert text.get("head_dim") in (None, width)
    path.write_text(json.dumps(config | {"text_config": text | {"head_dim": width}}))
    said = answers(name, loaded(folder), few=True)
    path.write_text(json.dumps(config | {"text_config": text | {"head_dim": None}}))
    again = answers(name, loaded(folder), few=True)
    assert {key: trace.tokens for key, trace in said.items()} == {
        key: trace.tokens for key, trace in again.items()
    }


@pytest.mark.parametrize("name", [*FROM_ONE, "falcon_h1", "gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"]
)
def test_a_half_precision_folder_answers_as_one_of_its_values(
    name: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """Nothing is computed in the file's type: a folder of the same numbers in float32 answers the same."""
    config = MULTIPLIERS if name == "falcon_h1" else {}
    half = loaded(write_checkpoint(tmp_path / "half", name, dtype=dtype, config=config))
    full = loaded(
        write_checkpoint(tmp_path / "full", name, rounded=dtype, config=config)
    )
    expected = answers(name, full, few=True)
    for request, trace in answers(name, half, few=True).items():
        assert trace.tokens == expected[request].tokens, request
        assert apart(trace.logprobs, expected[request].logprobs) < 1e-5, request


def test_falcon_h1_has_its_multipliers(tmp_path: Path) -> None:
    model = loaded(
        write_checkpoint(tmp_path / "model", "falcon_h1", config=MULTIPLIERS)
    )
    tiny = family("falcon_h1")
    with np.load(LAYOUTS / "falcon_h1_multipliers.npz") as recorded:
        for request, inputs in requests_of(tiny).items():
            trace = tiny.greedy(model, inputs, STEPS)
            assert trace.tokens == recorded[f"{request}/tokens"].tolist(), request
            assert apart(trace.logprobs, recorded[f"{request}/logprobs"]) < TOLERANCE, (
                request
            )


def test_falcon_h1s_biases_have_the_multipliers_of_what_they_are_added_to(
    tmp_path: Path,
) -> None:
    """Biases of ones, in every projection: a multiplier of an output multiplies them, one of an input does not."""
    kinds = dict.fromkeys(
        ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True
    )
    folder = write_checkpoint(
        tmp_path / "model", "falcon_h1", config={**MULTIPLIERS, **kinds}
    )
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    named = {
        key: value for key, value in tensors.items() if key.endswith("_proj.weight")
    }
    tensors |= {
        key.replace(".weight", ".bias"): mx.ones(value.shape[0])
        for key, value in named.items()
    }
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    layer = loaded(folder).language_model.model.layers[0]
    found: dict[str, tuple[Any, Any]] = {
        "q": (layer.self_attn.q_proj, [1.0]),
        "k": (layer.self_attn.k_proj, [0.4]),
        "v": (layer.self_attn.v_proj, [1.0]),
        "o": (layer.self_attn.o_proj, [0.8]),
        "gate": (layer.feed_forward.gate_proj, [1.5]),
        "up": (layer.feed_forward.up_proj, [1.0]),
        "down": (layer.feed_forward.down_proj, [0.6]),
        "in": (
            layer.mamba.in_proj,
            np.repeat([0.9, 1.1, 0.8, 1.2, 1.3], [32, 32, 8, 8, 4]),
        ),
        "out": (layer.mamba.out_proj, [0.7]),
    }
    for name, (module, right) in found.items():
        np.testing.assert_allclose(
            module.bias,
            np.broadcast_to(right, module.bias.shape),
            rtol=1e-6,
            err_msg=name,
        )


@pytest.mark.parametrize("name", ["qwen3_5", "minicpmv4_6"])
def test_norms_stay_float32_where_the_model_does_not(name: str, tmp_path: Path) -> None:
    """As on a GPU. A norm then answers in the model's type, so that nothing after it is computed in a wider one."""
    folder = write_checkpoint(tmp_path / name, name, dtype=mx.bfloat16)
    model, full = read_model(folder, in_float32=False), loaded(folder)
    norms = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, TypedNorm)
    }
    assert norms
    wide = dict(full.named_modules())
    for path, norm in norms.items():
        assert (norm.weight == wide[path].weight).all(), path
        assert norm(mx.ones((1, norm.weight.size), mx.bfloat16)).dtype == mx.bfloat16
    assert "TypedNorm" not in {
        type(module).__name__ for _, module in full.named_modules()
    }
    ids = mx.array(family(name).text(2, 14)["input_ids"])
    assert model.language_model(ids).logits.dtype == mx.bfloat16


@pytest.mark.parametrize(
    "model_type", [*UNREADABLE, "deepseek_v4", "internvl", "internvl_tall"]
)
def test_what_cannot_be_put_is_refused_by_name_and_with_the_reason(
    model_type: str, tmp_path: Path
) -> None:
    """Before any weight is read."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "transformers_version": "5.23.0",
    }
    if model_type == "deepseek_v4":
        config |= {
            "layer_types": ["heavily_compressed_attention"],
            "compress_rates": {},
        }
    if model_type.startswith("internvl"):
        kind = "llama" if model_type == "internvl" else "qwen2"
        config |= {
            "model_type": "internvl",
            "text_config": {"model_type": kind},
            "vision_config": {"use_qk_norm": kind == "qwen2"},
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = rf"{config['model_type']}.*(can be loaded)"
    with pytest.raises(UnsupportedModel, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "layers",
    [["dense"] * 4, ["sparse", "dense", "sparse", "dense"]],
    ids=["none", "gaps"],
)
def test_experts_that_are_in_no_row_of_layers_are_refused(
    layers: list[str], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", "ernie4_5_moe_vl")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mlp_layer_types"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="no experts in a row of layers"):
        load_model(folder)


def test_what_no_answer_reads_may_be_there_or_not(tmp_path: Path) -> None:
    """SigLIP's pooling head by transformers' names, and a tower's type of numbers."""
    folder = write_checkpoint(tmp_path / "granite", "granite_vision")
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    head = "vision_tower.head."
    shapes = {
        "probe": (1, 1, 32),
        "attention.in_proj_weight": (96, 32),
        "attention.in_proj_bias": (96,),
    }
    shapes |= {
        "attention.out_proj.weight": (32, 32),
        "attention.out_proj.bias": (32,),
        "mlp.fc1.weight": (64, 32),
    }
    shapes |= {"mlp.fc1.bias": (64,), "mlp.fc2.weight": (32, 64), "mlp.fc2.bias": (32,)}
    shapes |= {"layernorm.weight": (32,), "layernorm.bias": (32,)}
    whole = tensors | {head + name: mx.ones(shape) for name, shape in shapes.items()}
    mx.save_safetensors(
        str(folder / "model.safetensors"), whole, metadata={"format": "pt"}
    )
    model = loaded(folder)
    assert (model.vision_tower.vision_model.head.attention.in_proj.weight == 1).all()
    folder = write_checkpoint(tmp_path / "glm_ocr", "glm_ocr")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded(folder)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl"])
def test_a_folder_that_mlx_vlm_converted_back_from_few_bits(
    name: str, tmp_path: Path
) -> None:
    """Its config.json still says how layers were quantised, some of them by their names; no tensor is."""
    folder = write_checkpoint(tmp_path / "whole", name)
    model = loaded(folder)
    few = {"group_size": 32, "bits": 4}
    gates = {
        path: {**few, "bits": 8}
        for path, _ in model.named_modules()
        if path.endswith("layers.1.mlp.gate")
    }
    named = gates or {"language_model.model.layers.1.mlp.up_proj": few}
    expected = answers(name, model, few=True)
    save_weights(tmp_path / "back", model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "back" / "config.json").write_text(
        json.dumps({**config, "quantization": {**few, **named}})
    )
    for request, trace in answers(name, loaded(tmp_path / "back"), few=True).items():
        assert trace.tokens == expected[request].tokens
