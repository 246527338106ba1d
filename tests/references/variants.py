"""Record folders of transformers' with settings that the zoo does not have, and what it answers to the zoo's requests.

    python tests/references/variants.py                 # all of tests/variants.py
    python tests/references/variants.py llava_layers    # these

Needs torch and transformers, as record.py does. A file holds config.json and the shapes of the tensors as transformers saves
them, and its tokens and log-probabilities for a text and a picture.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.references.record import RECIPES, answer
from tests.variants import FOLDER, VARIANTS, merged, tensors_of
from tests.zoo import FAMILIES, recorded_requests

REQUESTS = ("text", "image_1")


def record(name: str) -> None:
    """Write tests/references/variants/<name>.npz."""
    base, changes = VARIANTS[name]
    tiny, recipe = FAMILIES[base], RECIPES[base]
    plain = recipe.build(tiny.build())
    torch.manual_seed(0)
    config = type(plain.config)(**merged(plain.config.to_dict(), changes))
    with tempfile.TemporaryDirectory() as folder:
        type(plain)(config).float().save_pretrained(folder)
        files = {
            path.name: json.loads(path.read_text())
            for path in sorted(Path(folder).glob("*config.json"))
        }
        lying = load_file(f"{folder}/model.safetensors")
        facts: dict[str, Any] = {
            "files": files,
            "tensors": {key: list(value.shape) for key, value in sorted(lying.items())},
            "less_one": recipe.less_one != "^$"
            or ("gemma" in base and not base.startswith("gemma4")),
        }
        save_file(
            tensors_of(facts), f"{folder}/model.safetensors", metadata={"format": "pt"}
        )
        model = (
            type(plain)
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
    stored: dict[str, Any] = {"folder": np.array(json.dumps(facts))}
    for request, inputs in recorded_requests(tiny).items():
        if request in REQUESTS:
            stored[f"{request}/tokens"], stored[f"{request}/logprobs"] = answer(
                model, recipe, inputs
            )
            print(f"{name:24} {request:8} {stored[f'{request}/tokens'].tolist()}")
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{name}.npz", **stored)


if __name__ == "__main__":
    for variant in sys.argv[1:] or VARIANTS:
        record(variant)
