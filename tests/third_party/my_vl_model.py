"""A tiny vision-language model in the form of mlx-vlm's packages, with a checkpoint of random weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.models.base import (
    BaseModelConfig,
    InputEmbeddingsFeatures,
    LanguageModelOutput,
    create_attention_mask,
    install_auto_processor_patch,
    scaled_dot_product_attention,
)
from mlx_vlm.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

# as mlx-vlm's own packages name their processors
install_auto_processor_patch("my_vl", Qwen2VLProcessor)


@dataclass
class TextConfig(BaseModelConfig):
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    vocab_size: int = 512
    max_position_embeddings: int = 512


@dataclass
class VisionConfig(BaseModelConfig):
    patch_size: int = 14
    spatial_merge_size: int = 2
    # of a patch: its colours, twice, as Qwen's processor gives them
    num_values: int = 3 * 2 * 14 * 14


@dataclass
class ModelConfig(BaseModelConfig):
    text_config: TextConfig = field(default_factory=TextConfig)
    vision_config: VisionConfig = field(default_factory=VisionConfig)
    model_type: str = "my_vl"
    image_token_id: int = 482
    eos_token_id: int = 479


class Temper:
    """No module: its array is made when the model is, and is still to be computed when the model is loaded."""

    def __init__(self, width: int) -> None:
        self.scale = 2 * mx.rsqrt(mx.array(float(width)))


class Attention(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads, width = config.num_heads, config.hidden_size
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.rope = nn.RoPE(width // self.heads, base=100.0)
        self.temper = Temper(width // self.heads)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape(batch, length, 3 * self.heads, -1).swapaxes(1, 2)
        queries, keys, values = mx.split(heads, 3, axis=1)
        queries, keys = (
            self.rope(part, offset=cache.offset)
            for part in (queries * self.temper.scale, keys)
        )
        keys, values = cache.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(
            queries, keys, values, cache, scale=1.0, mask=mask
        )
        return self.out(output.swapaxes(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention, self.norm = Attention(config), nn.RMSNorm(width)
        self.wide, self.narrow, self.second_norm = (
            nn.Linear(width, 64),
            nn.Linear(64, width),
            nn.RMSNorm(width),
        )

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.attention(self.norm(x), mask, cache)
        return x + self.narrow(nn.gelu(self.wide(self.second_norm(x))))


class Trunk(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.hidden_size)

    def __call__(
        self, ids: mx.array, inputs_embeds: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        x = self.embed_tokens(ids) if inputs_embeds is None else inputs_embeds
        mask = create_attention_mask(x, cache[0])
        for layer, one in zip(self.layers, cache, strict=True):
            x = layer(x, mask, one)
        return self.norm(x)


class LanguageModel(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.model = Trunk(config)

    def __call__(
        self,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        cache: Any = None,
        **unread: Any,
    ) -> LanguageModelOutput:
        hidden = self.model(inputs, inputs_embeds=inputs_embeds, cache=cache)
        return LanguageModelOutput(logits=self.model.embed_tokens.as_linear(hidden))

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers


class VisionModel(nn.Module):
    """Patches (N, values) -> one feature for every four of them, (N / 4, D)."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        self.merged, self.project = (
            config.spatial_merge_size**2,
            nn.Linear(config.num_values, width),
        )

    def __call__(self, patches: mx.array, grids: mx.array) -> mx.array:
        return (
            mx.tanh(self.project(patches))
            .reshape(-1, self.merged, self.project.weight.shape[0])
            .mean(axis=1)
        )


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionModel(
            config.vision_config, config.text_config.hidden_size
        )
        self.language_model = LanguageModel(config.text_config)

    def get_input_embeddings(
        self,
        ids: mx.array,
        pixels: mx.array | None = None,
        image_grid_thw: mx.array | None = None,
        **unread: Any,
    ) -> InputEmbeddingsFeatures:
        embeds = self.language_model.model.embed_tokens(ids)
        if pixels is not None and image_grid_thw is not None:
            features = 3 * self.vision_tower(pixels, image_grid_thw)
            is_picture = ids[0] == self.config.image_token_id
            of_position = mx.maximum(mx.cumsum(is_picture.astype(mx.int32)) - 1, 0)
            embeds = mx.where(is_picture[:, None], features[of_position], embeds[0])[
                None
            ]
        return InputEmbeddingsFeatures(inputs_embeds=embeds)

    @property
    def layers(self) -> list[Layer]:
        return self.language_model.layers


def save_checkpoint(folder: Path, processor: Path) -> None:
    """A checkpoint of random weights, lively enough for answers to differ; with the tokenizer and processor of another."""
    config = ModelConfig()
    mx.random.seed(7)
    model = Model(config)
    model.update(
        tree_map(
            lambda weight: weight * 2.5 if weight.ndim == 2 else weight,
            model.parameters(),
        )
    )
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    (folder / "config.json").write_text(json.dumps(asdict(config)), encoding="utf-8")
    for file in processor.iterdir():
        if file.name not in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "README.md",
        ):
            shutil.copy(file, folder)
