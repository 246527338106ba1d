"""Records what transformers answers with the cut published folders, on the inputs that are made here.

Needs torch and the folders (VLM_BATCH_PUBLISHED): ``python -m tests.references.published``.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from tests import cut
from tests.published import ANSWERS, ASKED, MOST, root
from vlm_batch.cli.prompts import Case, Folder

#: Folders that transformers has the class of.
NAMES = ("cosmos-reason2", "granite-docling-258m", "medgemma-27b-it", "olmocr-7b")


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
    if model.config.model_type in ("qwen2_vl", "qwen3_vl"):
        found["mm_token_type_ids"] = is_picture
    return found


def main() -> None:
    directory, found = root(), {}
    assert directory is not None
    for name in NAMES:
        with TemporaryDirectory() as scratch:
            path = cut.write(Path(scratch) / name, directory / name, cut.CUTS[name])
            model = AutoModelForImageTextToText.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
            folder = Folder(path)
            cases = [
                Case(prompt, [{"role": "user", "content": prompt}], images=sizes)
                for prompt, sizes in ASKED
            ]
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
