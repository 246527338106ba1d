"""Records what transformers answers with the cut published folders, on the inputs that are made here.

Needs torch and the folders (VLM_BATCH_PUBLISHED): ``python -m tests.references.published``.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from transformers import AutoModelForImageTextToText

from tests import cut
from tests.published import ANSWERS, ASKED, MOST, WITHOUT_TOKENIZER, root
from tests.references.record import RECIPES, load
from vlm_batch.cli.prompts import Case, Folder
from vlm_batch.loading import checkpoints, load_model

#: Its class is read with another layout; the weights are put there.
FLORENCE = "florence-2-base"
#: Folders that transformers has the class of. DeepSeek-OCR-2's and Unlimited-OCR's is their publishers' own code, which does
#: not lie with them: nothing here can answer for these two.
NAMES = (
    "cosmos-reason2",
    FLORENCE,
    "granite-docling-258m",
    "medgemma-27b-it",
    "olmocr-7b",
    "qwen3.5-9b-mlx-8bit",
)

#: Norms that transformers multiplies by 1 + weight. The gated one of linear attention and the tower's are as they are.
NORMS_FROM_ONE = r"^model\.language_model\.(norm|.*(_layernorm|[qk]_norm))\.weight$"


def answered(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A greedy answer and its tokens' log-probabilities; the whole sequence runs for each token."""
    tokens, logprobs = [], []
    for _ in range(MOST):
        with torch.no_grad():
            last = torch.log_softmax(model(**inputs, use_cache=False).logits[0, -1], -1)
        tokens.append(int(last.argmax()))
        logprobs.append(round(float(last.max()), 6))
        for name in inputs.keys() & {
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "mm_token_type_ids",
        }:
            more = tokens[-1] if name == "input_ids" else int(name == "attention_mask")
            inputs[name] = torch.cat(
                [inputs[name], torch.tensor([[more]], dtype=inputs[name].dtype)], 1
            )
    return {"tokens": tokens, "logprobs": logprobs}


def given(
    folder: Folder, model: torch.nn.Module, case: Case
) -> dict[str, torch.Tensor]:
    """Our inputs of a case, in torch."""
    made = folder.make(case)
    assert made.error is None, made.error
    ids = torch.tensor([made.ids])
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
        if name in made.arrays:
            found[name] = torch.from_numpy(np.array(made.arrays[name]))
    is_picture = (ids == model.config.image_token_id).long()
    if model.config.model_type == "gemma3":
        found["token_type_ids"] = is_picture
    if model.config.model_type in ("qwen2_vl", "qwen3_vl", "qwen3_5"):
        found["mm_token_type_ids"] = is_picture
    return found


def answered_after_encoding(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """As ``answered``, of an encoder and a decoder."""
    words = torch.tensor([[model.config.text_config.decoder_start_token_id]])
    tokens, logprobs = [], []
    for _ in range(MOST):
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=words, use_cache=False).logits
        last = torch.log_softmax(logits[0, -1], -1)
        tokens.append(int(last.argmax()))
        logprobs.append(round(float(last.max()), 6))
        words = torch.cat([words, torch.tensor([[tokens[-1]]])], 1)
    return {"tokens": tokens, "logprobs": logprobs}


def florence_answers(path: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Answers of transformers' class of Florence-2, which cannot read the published folder, with its weights."""
    ours = load_model(path, dtype="float32")[0]
    mark = ours.config.image_token_id
    # transformers looks marks up: any word that no prompt has
    ours.config.image_token_id = mark - 1
    model = load(ours, RECIPES["florence2"])
    folder, found = Folder(path), []
    for case in cases:
        made = folder.make(case)
        assert made.error is None, made.error
        ids = torch.tensor([made.ids])
        given = {"input_ids": ids.masked_fill(ids == mark, mark - 1)}
        if case.images:
            pixels = np.array(made.arrays["pixel_values"])
            is_last = pixels.shape[-1] == 3
            pixels = np.moveaxis(pixels, -1, 1) if is_last else pixels
            given["pixel_values"] = torch.from_numpy(pixels.copy())
        found.append(answered_after_encoding(model, given))
    return found


def plain(folder: Path, model: nn.Module) -> Path:
    """Write a folder that mlx-vlm converted as transformers saves it: its names and axes.

    On a CPU its weights were widened to float32 when it was loaded.
    """
    found = folder.parent / f"{folder.name}-plain"
    shutil.copytree(folder, found, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    (found / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parameters: Any = tree_flatten(model.parameters())
    tensors = {}
    for path, value in parameters:
        name = path
        for pattern, theirs in cut.QWEN_NAMES:
            name = re.sub(pattern, theirs, name)
        if re.search(NORMS_FROM_ONE, name):
            value = value - 1
        if name.endswith("weight") and value.ndim > 2:
            value = mx.moveaxis(value, -1, 1)
        tensors[name] = mx.contiguous(value.astype(mx.float32))
    mx.save_safetensors(
        str(found / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return found


def main() -> None:
    directory, found = root(), {}
    assert directory is not None
    for name in NAMES:
        with TemporaryDirectory() as scratch:
            path = cut.write(Path(scratch) / name, directory / name, cut.CUTS[name])
            if name in WITHOUT_TOKENIZER:
                cut.write_tokenizer(path, cut.special_tokens(directory / name))
            cases = [
                Case(prompt, [{"role": "user", "content": prompt}], images=sizes)
                for prompt, sizes in ASKED
            ]
            if name == FLORENCE:
                found[name] = florence_answers(path, cases)
                print(name, found[name])
                continue
            whole = path
            if cut.CUTS[name].is_converted:
                with mock.patch.object(checkpoints, "MOST_WIDENED", 2**40):
                    whole = plain(path, load_model(path, dtype="float32")[0])
            model = AutoModelForImageTextToText.from_pretrained(
                whole, dtype=torch.float32, attn_implementation="eager"
            )
            folder = Folder(path)
            found[name] = [
                answered(model.eval(), given(folder, model, case)) for case in cases
            ]
            print(name, found[name])
    lines = [
        f"  {json.dumps(name)}: {json.dumps(answers)}"
        for name, answers in found.items()
    ]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
