"""DeepSeek-VL and Janus: a SigLIP tower, an MLP, Llama text; one size of picture."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import multi_modality as upstream
from mlx_vlm.models.multi_modality.config import ProjectorConfig

from ._build import Rule, enliven, fan_in, pixels, spread, text_request
from ._oracle import generate_from_embeddings, put_pictures, to_mx
from ._pictures import prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

SIDE, PATCH = 16, 4
TOKENS = (SIDE // PATCH) ** 2
IMAGE = PLAIN


def build() -> nn.Module:
    """Four layers of 64, two vision layers of 32."""
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="multi_modality",
            image_token_index=IMAGE,
            num_image_tokens=TOKENS,
            eos_token_id=[END_OF_TEXT],
            projector_config=ProjectorConfig(
                cls="MlpProjector",
                model_type="aligner",
                params={"projector_type": "mlp_gelu", "depth": 2},
            ),
            text_config=upstream.TextConfig(
                model_type="llama",
                hidden_size=64,
                num_hidden_layers=4,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                rope_theta=100.0,
            ),
            vision_config=upstream.VisionConfig(
                model_type="vision",
                cls="CLIPVisionTower",
                params={},
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=SIDE,
                patch_size=PATCH,
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [Rule(head, fan_in(3.0)), Rule(r"(pos_embed|latent)$", spread(0.5))]
    enliven(model, seed=26, rules=rules, quiet=head)
    return model


def _request(
    seed: int, num_images: int, num_words: int, num_placeholders: int = TOKENS
) -> Inputs:
    return {
        "input_ids": prompt(seed, [[IMAGE] * num_placeholders] * num_images, num_words),
        "pixel_values": pixels(seed, num_images, 3, SIDE, SIDE),
    }


def image(seed: int, size: int) -> Inputs:
    """One picture and 4, 7 or 10 words after it."""
    return _request(seed, 1, 4 + 3 * size)


def two_images(seed: int) -> Inputs:
    """Two pictures, each with a single placeholder, as mlx-vlm's own image processor leaves them."""
    return _request(seed, 2, 4, num_placeholders=1)


def _tower(model: nn.Module, picture: mx.array) -> mx.array:
    """(3, S, S) -> (tokens, D): SigLIP as published, with the exact GELU and an epsilon of 1e-6."""
    tower = model.vision_model.vision_tower

    def normed(norm: nn.LayerNorm, x: mx.array) -> mx.array:
        centred = x - x.mean(axis=-1, keepdims=True)
        return (
            centred
            * mx.rsqrt(mx.square(centred).mean(axis=-1, keepdims=True) + 1e-6)
            * norm.weight
            + norm.bias
        )

    hidden = tower.patch_embed(picture[None].transpose(0, 2, 3, 1)) + tower.pos_embed
    for block in tower.blocks:
        hidden = hidden + block.attn(normed(block.norm1, hidden))
        wide = block.mlp.fc1(normed(block.norm2, hidden))
        hidden = hidden + block.mlp.fc2(wide * (1 + mx.erf(wide / 2**0.5)) / 2)
    return normed(tower.norm, hidden)[0]


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, pictures put in here one by one."""
    arrays = to_mx(inputs)
    tokens = arrays["input_ids"]
    if "pixel_values" not in arrays:
        return generate_from_embeddings(
            model, model.language_model.model.embed_tokens(tokens), num_tokens
        )
    pictures = arrays["pixel_values"]
    if (tokens == IMAGE).sum().item() == len(pictures):
        ids = [
            token
            for one in tokens[0].tolist()
            for token in [one] * (TOKENS if one == IMAGE else 1)
        ]
        tokens = mx.array([ids])
    features = [model.aligner(_tower(model, picture)[None])[0] for picture in pictures]
    embeds = model.language_model.model.embed_tokens(tokens)
    return generate_from_embeddings(
        model, put_pictures(embeds, tokens, IMAGE, mx.concatenate(features)), num_tokens
    )


FAMILY = TinyFamily(
    name="multi_modality",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    oracle_note="The whole sequence at each step over mlx-vlm's own language model, SigLIP's layers with the published "
    "activation and epsilon, pictures put into their placeholders here: mlx-vlm loses the text between two pictures. "
    "transformers agrees (DeepseekVL).",
)
