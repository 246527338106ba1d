"""DeepSeek-V4 and V4.1 where the matrix does not reach: DeepSeek's definitions, checkpoints on disk, rounded activations."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.deepseek_v41 import fakequant
from mlx_vlm.models.deepseek_v41.engram import OffloadedEngramEmbedding
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.harness import TOLERANCE, Ask, difference, inputs_of, run, shared_adapter
from tests.zoo import VOCABULARY, family, generate_alone
from tests.zoo.deepseek_v4 import VISION, made, settings
from tests.zoo.deepseek_v41 import token_map
from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.adapters.fingerprint import fingerprint
from vlm_batch.caches import PoolCache
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading import load_model
from vlm_batch.models import adapter_for
from vlm_batch.models.deepseek_v41 import DeepseekV41

BAR = "\N{FULLWIDTH VERTICAL LINE}"
NAMES = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "deepseek_image"]
MARKS = [*(f"<{BAR}{name}{BAR}>" for name in NAMES), "</think>"]
PICTURE, END = MARKS[4], MARKS[1]


# DeepSeek's definitions -----------------------------------------------------------------------------------------------


def sees(ids: np.ndarray, window: int, most: int) -> np.ndarray:
    """(L, L) which tokens each sees (inference/model.py of DeepSeek-V4-Flash-Vision-Exp, get_image_visible and
    get_window_topk_idxs_visible): the window, and within a picture to its start and its end."""
    seen = np.zeros((len(ids), len(ids)), dtype=bool)
    start = None
    for at, token in enumerate(ids.tolist()):
        start = at if token == VOCABULARY else start
        first, last = at - window + 1, at
        if start is not None:
            end = at + int(np.argmax(ids[at:] == VOCABULARY + 4))
            first = min(first, at - min(at - start, most - 1))
            last = at + min(end - at, most)
        seen[at, max(first, 0) : last + 1] = True
        start = None if token == VOCABULARY + 4 else start
    return seen


@pytest.mark.parametrize("keys", ["image:3:2", "two:7", "image:1:0"])
def test_a_pictures_tokens_see_each_other(keys: str) -> None:
    """Whole prompts, and the second of two chunks, whose rows have the first one's last keys before their own."""
    adapter = shared_adapter("deepseek_v4")
    inputs = inputs_of("deepseek_v4", keys)
    ids = inputs["input_ids"]
    window = adapter.config.sliding_window
    trunk = adapter.language.model
    cache = adapter.make_cache()
    right = sees(ids[0], window, adapter.config.vision_max_n_token)
    np.testing.assert_array_equal(np.array(trunk.mask(mx.array(ids), cache[0])), right)
    cut = adapter.atomic_spans(mx.array(ids), {})[-1][0]  # before the last picture
    filler = mx.zeros((1, 1, cut, 1))
    cache[0].update_and_fetch(filler, filler)
    kept = min(cut, window - 1)
    np.testing.assert_array_equal(
        np.array(trunk.mask(mx.array(ids[:, cut:]), cache[0])),
        right[cut:, cut - kept :],
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pictures_tokens_have_experts_of_their_own(layer: int) -> None:
    """Layers that route text by score and by token (the same file's Gate): a picture's tokens go by score and ``bias_vl``."""
    gate: Any = shared_adapter("deepseek_v4").language.layers[layer].ffn.gate
    ids = np.array([[3, VOCABULARY, VOCABULARY + 2, VOCABULARY + 4, 17]])
    x = mx.array(
        np.random.RandomState(2).standard_normal((1, 5, 64)).astype(np.float32)
    )
    experts, weights = (np.array(part)[0] for part in gate(x, mx.array(ids)))
    scores = np.sqrt(np.log1p(np.exp(np.array(x @ gate.weight.T)[0])))
    for at, token in enumerate(ids[0]):
        bias = gate.bias_vl if token >= VOCABULARY else gate.e_score_correction_bias
        right = np.argsort(scores[at] + np.array(bias))[-2:]
        if layer == 0 and token < VOCABULARY:
            right = np.array(gate.tid2eid[int(token)])
        assert set(experts[at].tolist()) == set(right.tolist())
        chosen = scores[at][experts[at]]
        np.testing.assert_allclose(weights[at], 1.5 * chosen / chosen.sum(), rtol=1e-5)


@pytest.mark.parametrize("chunks", [[25], [1] * 25, [8, 8, 9], [3, 1, 7, 14]])
@pytest.mark.parametrize(("ratio", "overlaps"), [(4, True), (8, False)])
def test_windows_are_those_of_the_whole(
    ratio: int, overlaps: bool, chunks: list[int]
) -> None:
    """However tokens come in, their windows come out once, each with the one before where they overlap."""
    cache = PoolCache(ratio, overlaps=overlaps)
    tokens = mx.arange(25, dtype=mx.float32)[None, :, None]
    seen: list[list[int]] = []
    for start, end in itertools.pairwise(np.cumsum([0, *chunks]).tolist()):
        windows, gates = cache.fill(tokens[:, start:end], -tokens[:, start:end])
        np.testing.assert_array_equal(np.array(gates), -np.array(windows))
        rows = np.array(windows[0, :, :, 0]).astype(int).tolist()
        if overlaps and rows and seen:
            assert rows.pop(0) == seen[-1]
        seen += rows
    assert seen == [
        list(range(at, at + ratio)) for at in range(0, 25 // ratio * ratio, ratio)
    ]


# Checkpoints on disk --------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, model: Any) -> Path:
    """A tiny model as a folder: weights and configuration as mlx-vlm converts them, words that are numbers."""
    folder.mkdir()
    words = {str(token): token for token in range(VOCABULARY - len(MARKS))}
    vocabulary = words | {mark: len(words) + index for index, mark in enumerate(MARKS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token="0"
    )
    fast.add_special_tokens({"additional_special_tokens": MARKS})
    fast.save_pretrained(folder)
    config = {
        name: value for name, value in asdict(model.config).items() if value is not None
    }
    config |= {"eos_token_id": vocabulary[END], "image_token_id": vocabulary[PICTURE]}
    (folder / "config.json").write_text(json.dumps(config))
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def picture(seed: int, high: int, wide: int) -> Image.Image:
    return Image.fromarray(
        np.random.RandomState(seed).randint(0, 255, (high, wide, 3), dtype=np.uint8)
    )


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = made(settings((0, 4, 4, 4), **VISION, vision_min_pixels=256), seed=12)
    return write_checkpoint(tmp_path_factory.mktemp("v4") / "model", model)


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = family("deepseek_v41").build()
    model.language_model.engram_hash = None
    model.config.vision_min_pixels, model.config.vision_max_image_tokens = 256, 64
    folder = write_checkpoint(tmp_path_factory.mktemp("v41") / "model", model)
    (folder / "engram_token_map.json").write_text(json.dumps(token_map()))
    return folder


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_a_checkpoint_answers_together_as_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    """From the folder through mlx-vlm's processor: pictures of several sizes, two pictures, text, in a batch and alone."""
    folder = request.getfixturevalue(name)
    requests: list[dict[str, Any]] = [
        {"images": [picture(1, 20, 24)], "prompt": "12 7 40"},
        {"prompt": "3 1 4 1 5 9 2 6 5 3 5"},
        {"images": [picture(2, 16, 40), picture(3, 24, 16)], "prompt": "99 98"},
        {"images": [picture(1, 20, 24)], "prompt": "77 76 75 74"},
    ]
    params = SamplingParams(max_tokens=12)
    with VLMBatcher(folder) as batcher:
        alone = [batcher.submit(**one, params=params).result() for one in requests]
    with VLMBatcher(folder, caches=None) as batcher:
        handles = [batcher.submit(**one, params=params) for one in requests]
        together = [handle.result() for handle in handles]
    assert [result.error for result in [*alone, *together]] == [None] * 8
    assert [result.token_ids for result in together] == [
        result.token_ids for result in alone
    ]
    assert len({result.token_ids for result in alone}) == len(requests)
    assert alone[2].usage.image_tokens > alone[0].usage.image_tokens > 0


def test_tables_stay_in_their_files(v41: Path) -> None:
    """Rows of the n-grams' tables are read where they lie; the tables themselves are in no tree that is evaluated."""
    model, _ = load_model(v41)
    adapter = DeepseekV41(model)
    tables = [
        layer.engram.embed
        for layer in adapter.language.layers
        if layer.engram is not None
    ]
    assert [type(table) for table in tables] == [OffloadedEngramEmbedding] * 2
    for tree in (adapter.model, model):
        paths: Any = tree_flatten(tree.parameters())
        assert not any(".engram.embed." in path for path, _ in paths)
    weights: Any = mx.load(str(v41 / "model.safetensors"))
    right = weights["language_model.layers.1.engram.embed.weight"]
    np.testing.assert_array_equal(
        np.array(tables[0](mx.array([[5, 600]]))), np.array(right[mx.array([[5, 600]])])
    )


def test_another_table_is_another_model(v41: Path, tmp_path: Path) -> None:
    """What is kept of one model's rows is not another's, though their tables are all that differs."""
    before = fingerprint(DeepseekV41(load_model(v41)[0]))
    shutil.copytree(v41, tmp_path / "model")
    weights: Any = mx.load(str(v41 / "model.safetensors"))
    weights["language_model.layers.1.engram.embed.weight"] = (
        weights["language_model.layers.1.engram.embed.weight"] + 1
    )
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), weights)
    assert fingerprint(DeepseekV41(load_model(tmp_path / "model")[0])) != before


def test_tables_without_their_map_are_refused(v41: Path, tmp_path: Path) -> None:
    model = family("deepseek_v41").build()
    model.language_model.engram_hash = None
    with pytest.raises(UnsupportedModel, match=r"engram_token_map\.json"):
        DeepseekV41(model)
    shutil.copytree(v41, tmp_path / "model")
    (tmp_path / "model" / "engram_token_map.json").write_text(
        json.dumps([0] * VOCABULARY)
    )
    with (
        pytest.raises(UnsupportedModel, match=r"\(1, 40\)"),
        VLMBatcher(tmp_path / "model"),
    ):
        pass


# Rounded activations --------------------------------------------------------------------------------------------------


def test_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its rounding, a row alone is mlx-vlm's; in a batch, a code may turn: few rows of many, and none by much at once."""
    monkeypatch.setattr(fakequant, "DISABLE", False)
    keys = [f"text:{seed}:{9 + seed}" for seed in range(8)] + [
        "image:1:0",
        "image:2:1",
        "image:3:2",
        "two:7",
    ]
    right = {
        key: generate_alone(
            family("deepseek_v41").build(), inputs_of("deepseek_v41", key), 8
        )
        for key in keys
    }
    adapter = adapter_for("deepseek_v41")(family("deepseek_v41").build())
    one = {"max_rows": 1, "encode_ahead": 0}
    for config, most in ((one, 1), ({"max_rows": 4}, 3)):
        turned = 0
        for answer in run(
            adapter,
            lambda key: inputs_of("deepseek_v41", key),
            [Ask(key) for key in keys],
            config=config,
        ):
            assert answer.result is not None
            assert answer.result.error is None
            first = np.abs(answer.logprobs[0] - right[answer.ask.key].logprobs[0]).max()
            assert first < 0.5
            turned += difference(answer, right[answer.ask.key]) > TOLERANCE
        assert turned <= most
