"""What a family cannot take is refused when its row is encoded, and says what was wrong."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.harness import inputs_of, shared_adapter
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models.processing import as_mlx


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_a_picture_for_a_text_model(name: str) -> None:
    with pytest.raises(InvalidPrompt, match=rf"{name} does not know the inputs \['pixel_values'\]"):
        shared_adapter(name).encode({"input_ids": mx.array([[1, 2, 3]]), "pixel_values": mx.zeros((1, 3, 4, 4))})


@pytest.mark.parametrize(
    "name", ["dots_ocr", "ernie4_5_moe_vl", "glm_ocr", "hunyuan_vl", "mage_vl", "paddleocr_vl", "qwen3_5", "zaya1_vl"]
)
def test_a_prompt_without_room_for_its_picture(name: str) -> None:
    """Upstream's merges drop what they have no place for."""
    inputs = as_mlx(inputs_of(name, "image:1:1"))
    for token in shared_adapter(name).image_token_ids():
        inputs["input_ids"] = mx.where(inputs["input_ids"] == token, 1, inputs["input_ids"])
    with pytest.raises(InvalidPrompt, match="placeholder tokens; the prompt has 0"):
        shared_adapter(name).encode(inputs)


@pytest.mark.parametrize("name", ["mage_vl", "minicpmv4_6", "nemotron_h_nano_omni", "qwen3_omni_moe"])
def test_a_video_where_videos_are_not_verified(name: str) -> None:
    with pytest.raises(InvalidPrompt, match="pixel_values_videos"):
        shared_adapter(name).encode({"input_ids": mx.array([[1, 2]]), "pixel_values_videos": mx.zeros((1, 4))})
