"""Record where transformers places Qwen3-Omni's prompts with videos: the thinker's ``get_rope_index`` itself.

    python -m tests.references.omni_positions

Its ``generate`` counts an answer's positions on from the prompt's last one (5.23), and not from the largest, as the offset says
that this function gives, with which the model came out. The two differ where text behind a video begins before the video's last
columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.references.record import RECIPES, load
from tests.zoo import Inputs, family
from tests.zoo.qwen3_omni_moe import placed


def place(model: Any, inputs: Inputs) -> dict[str, Any]:
    arrays = {name: torch.tensor(value) for name, value in inputs.items()}
    mask = arrays.get("feature_attention_mask")
    positions, delta = model.get_rope_index(
        arrays["input_ids"].long(),
        arrays.get("image_grid_thw"),
        arrays["video_grid_thw"],
        torch.ones_like(arrays["input_ids"]),
        use_audio_in_video=mask is not None,
        audio_seqlens=None if mask is None else mask.sum(1),
        second_per_grids=arrays["video_second_per_grid"],
    )
    return {"positions": positions[:, 0].tolist(), "delta": int(delta)}


if __name__ == "__main__":
    thinker = load(family("qwen3_omni_moe").build(), RECIPES["qwen3_omni_moe"])
    found = [place(thinker, inputs) for inputs in placed()]
    Path(__file__).with_suffix(".json").write_text(
        json.dumps(
            {"transformers": transformers.__version__, "cases": found},
            separators=(",", ":"),
        )
        + "\n"
    )
