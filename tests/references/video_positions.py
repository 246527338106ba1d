"""Record where transformers 4.49, with which Qwen2.5-VL came out, places prompts with videos: ``get_rope_index`` itself.

    pip install "transformers==4.49.0" torch    # into an environment of its own
    python tests/references/video_positions.py

Later releases differ: 4.57 rounds a video's seconds down before it multiplies them (mended in transformers #48669), and 5
begins the text after a video at its largest row or column, though its last time step may lie beyond that, while it still
counts the answer's positions from the largest of all. vLLM and mlx-vlm follow the first release.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLForConditionalGeneration,
)

START, END, IMAGE, VIDEO = 128, 129, 130, 131
MODELS = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}
#: What stands in the prompt, in order, and the seconds between each video's time steps.
CASES = (
    ([(VIDEO, (7, 4, 4))], [1.7]),
    (
        [
            (IMAGE, (1, 4, 6)),
            (VIDEO, (3, 4, 4)),
            (IMAGE, (1, 4, 4)),
            (VIDEO, (12, 4, 6)),
        ],
        [0.5, 0.35],
    ),
    ([(VIDEO, (16, 2, 2))], [2 / 1.9]),
)


def config() -> Any:
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    markers = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
    }
    return SimpleNamespace(config=SimpleNamespace(vision_config=vision, **markers))


def place(family: str, parts: list[Any], seconds: list[float]) -> dict[str, Any]:
    ids = [5, 6]
    for marker, (time, high, wide) in parts:
        ids += [START] + [marker] * (time * high * wide // 4) + [END, 9, 9]
    images, videos = (
        [grid for marker, grid in parts if marker == wanted]
        for wanted in (IMAGE, VIDEO)
    )
    grids = torch.tensor(images) if images else None
    extra = (
        {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" else {}
    )
    positions, delta = MODELS[family].get_rope_index(
        config(), torch.tensor([ids]), grids, torch.tensor(videos), **extra
    )
    return {
        "family": family,
        "ids": ids,
        "image_grid_thw": images,
        "video_grid_thw": videos,
        "second_per_grid_ts": seconds,
        "positions": positions[:, 0].tolist(),
        "delta": int(delta),
    }


if __name__ == "__main__":
    assert transformers.__version__ == "4.49.0", transformers.__version__
    cases = [place(family, *case) for case in CASES for family in MODELS]
    Path(__file__).with_suffix(".json").write_text(
        json.dumps(cases, separators=(",", ":")) + "\n"
    )
