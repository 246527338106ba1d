"""Folders that cannot be loaded: downloads that have not ended, other kinds of folders, other methods of quantisation.

Each layout is one that people have: the message says what is missing, or what to take instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers.utils.quantization_config import QuantizationMethod

from tests.cut import empty_model
from tests.published_configurations import (
    BY_CLASS,
    BY_DEFAULTS,
    LOADED,
    NOT_TRIED,
    built_by_class,
    built_by_defaults,
    weightless,
)
from vlm_batch import UnsupportedModel, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.loading import adapt, load_model
from vlm_batch.loading.folders import folder_facts
from vlm_batch.loading.quantised import UNREAD_METHODS, quantisation_fault
from vlm_batch.loading.unread import unread_settings
from vlm_batch.models import families, not_known
from vlm_batch.models._layouts import ARCHITECTURES, corrected

CHECKPOINT = default_checkpoint()
PUBLISHED = os.environ.get("VLM_BATCH_PUBLISHED", "")
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4997750648\n"
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights_of(file: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    return loaded


def in_shards(folder: Path) -> None:
    """Write the weights as two files with an index."""
    weights = weights_of(folder / "model.safetensors")
    names = sorted(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(SHARDS, halves, strict=True):
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in half})
    index = {
        name: file for file, half in zip(SHARDS, halves, strict=True) for name in half
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    (folder / "model.safetensors").unlink()


def cut(folder: Path, name: str, share: float = 0.5) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def as_lora(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
    )
    mx.save_safetensors(
        str(folder / "adapter_model.safetensors"), {"lora_A.weight": mx.zeros((2, 2))}
    )


def as_hub_cache(folder: Path) -> None:
    inner = folder / "snapshots" / "0f1e2d"
    inner.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(inner / path.name)


def only(folder: Path, name: str, text: str = "{}") -> None:
    for path in folder.iterdir():
        path.unlink()
    if name:
        (folder / name).write_text(text)


def lacks_a_shard(folder: Path) -> None:
    in_shards(folder)
    without(folder, SHARDS[1])


def lacks_tensors(folder: Path) -> None:
    in_shards(folder)
    weights = weights_of(folder / SHARDS[1])
    weights.pop(max(weights))
    mx.save_safetensors(
        str(folder / SHARDS[1]),
        {name: mx.array(np.array(one)) for name, one in weights.items()},
    )


def shard_is_pointer(folder: Path) -> None:
    in_shards(folder)
    (folder / SHARDS[1]).write_text(POINTER)


def dangling(folder: Path) -> None:
    without(folder, "model.safetensors")
    (folder / "model.safetensors").symlink_to("/nowhere/blobs/4d7a21")


#: What was done to a whole folder, and what is said of it.
BROKEN: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "weights are a pointer": (
        lambda folder: (folder / "model.safetensors").write_text(POINTER),
        r"model.safetensors is a pointer of Git LFS to a file of 4,997,750,648 bytes .*git lfs pull",
    ),
    "the tokenizer is a pointer": (
        lambda folder: (folder / "tokenizer.json").write_text(POINTER),
        r"tokenizer.json is a pointer of Git LFS",
    ),
    "config.json is a pointer": (
        lambda folder: (folder / "config.json").write_text(POINTER),
        r"config.json is a pointer of Git LFS",
    ),
    "a shard is a pointer": (
        shard_is_pointer,
        rf"{SHARDS[1]} is a pointer of Git LFS",
    ),
    "weights are cut off": (
        lambda folder: cut(folder, "model.safetensors"),
        r"model.safetensors is cut off: [\d,]+ of its bytes are missing",
    ),
    "weights' head is cut off": (
        lambda folder: cut(folder, "model.safetensors", 0.0001),
        r"model.safetensors is no whole safetensors file \(\d+ bytes\)",
    ),
    "weights are empty": (
        lambda folder: cut(folder, "model.safetensors", 0),
        r"no whole safetensors file \(0 bytes\)",
    ),
    "weights are a page": (
        lambda folder: (folder / "model.safetensors").write_text(
            "<!DOCTYPE html><html>not found</html>"
        ),
        r"model.safetensors is no whole safetensors file",
    ),
    "weights are a link to nothing": (
        dangling,
        r"model.safetensors cannot be read: No such file",
    ),
    "a shard is missing": (
        lacks_a_shard,
        rf"{SHARDS[1]} is missing, so \d+ of \d+ tensors that model.safetensors.index.json names are in no file; the first "
        r"is \S+\. Download it again$",
    ),
    "a tensor is missing": (
        lacks_tensors,
        r"not whole: 1 of \d+ tensors that model.safetensors.index.json names",
    ),
    "no weights": (
        lambda folder: without(folder, "model.safetensors"),
        r"it has no weights: there is no \*.safetensors",
    ),
    "PyTorch's weights": (
        lambda folder: (folder / "model.safetensors").rename(
            folder / "pytorch_model.bin"
        ),
        r"those that are there are PyTorch's \(.bin\)",
    ),
    "the tokenizer is cut off": (
        lambda folder: cut(folder, "tokenizer.json"),
        r"tokenizer.json is not whole",
    ),
    "config.json is cut off": (
        lambda folder: cut(folder, "config.json"),
        r"config.json is not whole: Expecting",
    ),
    "config.json is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        r"config.json says nothing",
    ),
    "the processor's file is cut off": (
        lambda folder: cut(folder, "preprocessor_config.json"),
        r"preprocessor_config.json is not whole: Expecting",
    ),
    "no tokenizer": (
        lambda folder: without(folder, "tokenizer.json", "tokenizer_config.json"),
        r"it has no tokenizer: there is no tokenizer.json, tokenizer.model, vocab.json with merges.txt",
    ),
    "no tokenizer nor processor": (
        lambda folder: without(
            folder,
            "tokenizer.json",
            "tokenizer_config.json",
            "preprocessor_config.json",
        ),
        r"it has no tokenizer: there is no tokenizer.json",
    ),
    "half a tokenizer": (
        lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json"),
        r"there is vocab.json, and neither merges.txt nor tokenizer.json",
    ),
    "a LoRA": (
        as_lora,
        r"a LoRA adapter for org/base and no model: .*merge_and_unload",
    ),
    "a hub's cache": (as_hub_cache, r"it is a hub's cache, .*give .*snapshots/0f1e2d"),
    "GGUF": (
        lambda folder: only(folder, "model-Q4_K_M.gguf"),
        r"GGUF files, which are llama.cpp's",
    ),
    "a pipeline of diffusers": (
        lambda folder: only(folder, "model_index.json"),
        r"diffusers, which makes pictures",
    ),
    "Mistral's own files": (
        lambda folder: only(folder, "params.json"),
        r"params.json\) and no config.json",
    ),
    "an empty folder": (
        lambda folder: only(folder, ""),
        r"there is no config.json; it is empty",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_folder_lacks_is_said_in_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = BROKEN[name]
    change(folder)
    with pytest.raises(UnsupportedModel, match=said) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert "convert" not in str(caught.value)  # mlx-vlm's recipe for something else
    facts = folder_facts(folder)
    assert facts.faults or facts.missing_tensors
    assert (
        cli.main(
            [
                "run",
                str(CHECKPOINT / "README.md"),
                "--model",
                str(folder),
                "--prompt",
                "x",
            ]
        )
        == cli.USAGE
    )
    assert "Traceback" not in capsys.readouterr().err


def test_a_whole_folder_has_no_faults(folder: Path) -> None:
    in_shards(folder)
    facts = folder_facts(folder)
    assert (facts.faults, facts.missing_files, facts.missing_tensors) == ((), (), ())
    load_model(folder)


def test_an_index_of_another_layout_is_passed_over(folder: Path) -> None:
    """Conversions leave the index of the folder that they read; mlx-vlm reads the files that are there."""
    index = {"weight_map": {"model.embed_tokens.weight": SHARDS[0]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_facts(folder).missing_tensors == ()
    load_model(folder)


def test_a_file_is_no_folder() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"it is a file\. Give the folder that it is in"
    ):
        VLMBatcher(CHECKPOINT / "model.safetensors")


def test_a_folder_without_settings_of_pictures_warns(folder: Path) -> None:
    without(folder, "preprocessor_config.json")
    with pytest.warns(
        UserWarning, match="neither preprocessor_config.json nor processor_config.json"
    ):
        load_model(folder)


def test_the_server_says_it_without_a_traceback(folder: Path) -> None:
    as_lora(folder)
    command = [
        sys.executable,
        "-m",
        "vlm_batch",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if "cannot load" in line:
                break
        server.terminate()
        said += server.stdout.readlines()
    text = "".join(said)
    assert "it is a LoRA adapter for org/base" in text
    assert "Traceback" not in text


# Methods of quantisation
# ---------------------------------------------------------------------------------------------------------------------

COMPRESSED = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}


def compressed(kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**COMPRESSED, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
    }


#: ``quantization_config`` as published, and how the method is called.
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "nf4": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
        },
        r"bitsandbytes \(NF4\)",
    ),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        r"bitsandbytes \(8 bits\)",
    ),
    "an older one": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        r"bitsandbytes \(FP4\)",
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
        },
        "AWQ",
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
        },
        "GPTQ",
    ),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        r"ModelOpt \(FP8\), of which mlx-vlm reads",
    ),
    "w8a8": (
        compressed("int-quantized", num_bits=8),
        r"compressed-tensors \(int-quantized\), of which mlx-vlm reads",
    ),
    "zero points": (compressed(symmetric=False), "with zero points"),
    "three bits": (compressed(num_bits=3), "in 3 bits"),
    "channels": (compressed(strategy="channel", group_size=None), "in groups of None"),
}


def with_quantisation(
    folder: Path, settings: Mapping[str, Any], place: str | None = None
) -> None:
    """Write a quantised folder: its matrices are bytes, as those methods pack them."""
    config = json.loads((folder / "config.json").read_text())
    part = config if place is None else config.setdefault(place, {})
    part["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights_of(folder / "model.safetensors")
    packed = {
        name: mx.zeros(value.shape, dtype=mx.uint8)
        if value.ndim == 2 and "proj" in name
        else mx.array(np.array(value))
        for name, value in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), packed)


@pytest.mark.parametrize("name", REFUSED)
def test_another_method_is_refused_by_its_name(name: str, folder: Path) -> None:
    settings, said = REFUSED[name]
    with_quantisation(folder, settings)
    with pytest.raises(
        UnsupportedModel,
        match=rf"quantised by .*{said}.*Take the folder that it was made of, in bfloat16",
    ):
        load_model(folder)


def test_every_method_of_transformers_is_refused_or_read() -> None:
    """A method that is new in transformers has to be looked at here."""
    read = {"compressed-tensors", "fp8", "mxfp4", "mxfp8", "nvfp4"}
    listed = {one.value for one in QuantizationMethod}
    assert listed <= UNREAD_METHODS.keys() | read


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "fp8", "weight_block_size": None}, {"quant_method": "mxfp4"}],
)
def test_a_form_that_fails_is_refused_by_its_name(
    settings: dict[str, Any], folder: Path
) -> None:
    """mlx-vlm reads some folders of these methods, and not this one's tensors."""
    with_quantisation(folder, settings)
    name = str(settings["quant_method"]).upper()
    with pytest.raises(
        UnsupportedModel,
        match=rf"quantised by {name}, .*Take the folder that it was made of",
    ):
        load_model(folder)


def test_a_decoder_names_its_method_itself(folder: Path) -> None:
    with_quantisation(folder, {"quant_method": "gptq"}, "text_config")
    with pytest.raises(UnsupportedModel, match="quantised by GPTQ"):
        load_model(folder)


@pytest.mark.parametrize(
    "settings", [compressed(), compressed(num_bits=8), compressed("float-quantized")]
)
def test_forms_that_mlx_vlm_reads_are_let_through(settings: dict[str, Any]) -> None:
    assert quantisation_fault({"quantization_config": settings}, {}) is None


def test_mlxs_own_bits_come_first(folder: Path) -> None:
    """Conversions of mlx-vlm write both tables, and keep the method's name at times."""
    config = {
        "quantization": {"group_size": 64, "bits": 8},
        "quantization_config": {"quant_method": "awq"},
    }
    assert quantisation_fault(config, {}) is None


def test_weights_that_were_made_plain_again_are_loaded(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder)


# Types
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_goes_before_another_familys_type(architecture: str) -> None:
    found = corrected({"model_type": "deepseek_vl_v2", "architectures": [architecture]})
    assert found["model_type"] == ARCHITECTURES[architecture]
    own = {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekVLV2ForCausalLM"]}
    assert corrected(own)["model_type"] == "deepseek_vl_v2"


def test_one_spelling_of_a_type_is_near() -> None:
    assert "the nearest are phi4mm, phi4_siglip." in not_known("phi4")


def test_layers_numbers_may_have_leading_zeros() -> None:
    """transformers writes them so for ten layers and more."""
    kinds = ["sliding_attention"] * 9 + ["full_attention"] * 2
    text = {
        "layer_types": kinds,
        "per_layer_config": {"09": {"head_dim": 512}, "10": {"head_dim": 512}},
    }
    found = corrected({"model_type": "gemma4", "text_config": text})
    assert found["text_config"]["global_head_dim"] == 512


def test_every_family_has_a_configuration_or_a_reason() -> None:
    found = [*LOADED, *BY_CLASS, *BY_DEFAULTS, *NOT_TRIED]
    assert sorted(found) == sorted(spec.family for spec in families())


@pytest.mark.parametrize("family", sorted(BY_CLASS))
def test_transformers_configurations_are_built(family: str) -> None:
    """At their full size."""
    adapt(built_by_class(family), family)


@pytest.mark.parametrize("family", sorted(BY_DEFAULTS))
def test_mlx_vlm_configurations_are_built(family: str) -> None:
    """At their full size."""
    adapt(built_by_defaults(family), family)


@pytest.mark.skipif(
    not PUBLISHED, reason="VLM_BATCH_PUBLISHED names no folder with published files"
)
def test_published_configurations_are_built() -> None:
    """At their full size."""
    paths = sorted(Path(PUBLISHED).glob("*/config.json"))
    assert paths
    for path in paths:
        config = json.loads(path.read_text(encoding="utf-8"))
        adapt(weightless(empty_model(config)))
        for setting in unread_settings(path.parent):
            assert not setting.read_by_transformers, (path, setting)


# Settings
# ---------------------------------------------------------------------------------------------------------------------


def test_settings_that_nobody_reads_are_listed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"a_new_setting": 3}
    config["vision_config"] |= {"another": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    found = {one.path: one for one in unread_settings(folder)}
    assert found["a_new_setting"].value == 3
    assert found["vision_config.another"].value == [1, 2]
    assert not found["a_new_setting"].read_by_transformers
    assert (
        not {
            "rms_norm_eps",
            "num_hidden_layers",
            "vision_config.depth",
            "image_token_id",
        }
        & found.keys()
    )
