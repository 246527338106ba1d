"""Recipes for families of which transformers has the language model alone: texts are recorded, pictures are not.

Recordings are where transformers has the parts that hear, too.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
import torch
import transformers
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.references.newer import Weights, join_latent, rope, same
from tests.references.towers import joined_experts
from tests.zoo import PLAIN, Inputs

NAMES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
]
NAMES += ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings"]
LATENT = [
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
]


def plain(zoo: nn.Module) -> dict[str, Any]:
    """What every decoder's configuration has."""
    ours = zoo.config.text_config
    turned = {
        "rope_parameters": rope(ours.rope_theta),
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    return {**same(ours, *NAMES), **turned}


def qwen2(zoo: nn.Module) -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**plain(zoo)))


def qwen3(zoo: nn.Module) -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**plain(zoo), head_dim=zoo.config.text_config.head_dim)
    )


def deepseek_v2(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    names = [
        *LATENT,
        "moe_intermediate_size",
        "n_shared_experts",
        "n_routed_experts",
        "num_experts_per_tok",
    ]
    names += [
        "n_group",
        "topk_group",
        "topk_method",
        "routed_scaling_factor",
        "first_k_dense_replace",
    ]
    return transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(**plain(zoo), **same(ours, *names))
    )


def youtu(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config.text_config
    return transformers.YoutuForCausalLM(
        transformers.YoutuConfig(
            **plain(zoo),
            **same(ours, *LATENT, "rope_interleave", "attention_bias", "mlp_bias"),
        )
    )


def youtu_weights(weights: Weights) -> Weights:
    weights = dict(weights)
    join_latent(weights)
    return weights


def mimo_v2(zoo: nn.Module) -> torch.nn.Module:
    """The text model of MiMo-V2-Flash; its window counts the token itself, as mlx-vlm's does."""
    ours = zoo.config.text_config
    names = [
        "head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
    ]
    names += [
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "attention_value_scale",
    ]
    part = {"partial_rotary_factor": ours.partial_rotary_factor}
    turned = {
        "full_attention": {**rope(ours.rope_theta), **part},
        "sliding_attention": {**rope(ours.swa_rope_theta), **part},
    }
    own = set(NAMES) - {"rms_norm_eps"}
    config = transformers.MiMoV2FlashConfig(
        **same(ours, *own, *names),
        rms_norm_eps=ours.layernorm_epsilon,
        rope_parameters=turned,
        sliding_window=ours.sliding_window_size,
        layer_types=[
            ("full_attention", "sliding_attention")[kind]
            for kind in ours.hybrid_layer_pattern
        ],
        mlp_layer_types=[("dense", "sparse")[kind] for kind in ours.moe_layer_freq],
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return transformers.MiMoV2FlashForCausalLM(config)


def phi3(zoo: nn.Module) -> torch.nn.Module:
    ours = zoo.config
    scaling = {
        "rope_type": "longrope",
        "rope_theta": ours.rope_theta,
        "partial_rotary_factor": 1.0,
    }
    scaling |= {
        name: ours.rope_scaling[name] for name in ("short_factor", "long_factor")
    }
    scaling |= {
        "original_max_position_embeddings": ours.original_max_position_embeddings
    }
    config = transformers.Phi3Config(
        **same(ours, *NAMES),
        rope_parameters=scaling,
        original_max_position_embeddings=ours.original_max_position_embeddings,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return transformers.Phi3ForCausalLM(config)


class HearingQwen3(transformers.Qwen3ForCausalLM):
    """Qwen3 with the layers of transformers' Whisper encoder, put together as MiniCPM-o 4.5's published code does it
    (modeling_minicpmo.py, get_audio_embedding and get_omni_embedding) for one piece of a recording at a time."""

    def __init__(self, config: Any, zoo: Any) -> None:
        super().__init__(config)
        heard = same(
            zoo.audio_config,
            "d_model",
            "encoder_layers",
            "encoder_attention_heads",
            "encoder_ffn_dim",
        )
        whisper = transformers.WhisperConfig(
            **heard, num_mel_bins=zoo.audio_config.num_mel_bins
        )
        self.zoo, self.apm = zoo, WhisperEncoder(whisper)
        self.linear1 = torch.nn.Linear(whisper.d_model, config.hidden_size)
        self.linear2 = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.pool = torch.nn.AvgPool1d(zoo.audio_pool_step)

    def encoded(self, piece: torch.Tensor) -> torch.Tensor:
        """(features, D) of a spectrogram (1, bands, frames)."""
        apm, size = self.apm, (piece.shape[-1] - 1) // 2 + 1
        hidden = torch.nn.functional.gelu(
            apm.conv2(torch.nn.functional.gelu(apm.conv1(piece)))
        ).permute(0, 2, 1)
        hidden = hidden + apm.embed_positions.weight[:size]
        chunk = int(self.zoo.audio_chunk_length * 50)
        mask = torch.full((1, 1, size, size), float("-inf"))
        for row in range(size):  # subsequent_chunk_mask, of all chunks to the left
            mask[..., row, : min((row // chunk + 1) * chunk, size)] = 0
        for layer in apm.layers:
            hidden = layer(hidden, mask)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        states = self.linear2(torch.relu(self.linear1(apm.layer_norm(hidden))))
        return self.pool(states.transpose(1, 2)).transpose(1, 2)[0]

    def generate(self, input_ids: torch.Tensor, **given: Any) -> Any:
        features, lengths, bounds = (
            given.pop(f"audio_{name}", None)
            for name in ("features", "feature_lens", "bounds")
        )
        if features is not None:
            pieces = zip(features, lengths, strict=True)
            rows = torch.cat(
                [self.encoded(piece[None, :, :length]) for piece, length in pieces]
            )
            embeds = self.model.embed_tokens(input_ids)
            embeds[
                0, torch.cat([torch.arange(first, end) for first, end in bounds])
            ] = rows
            given["inputs_embeds"] = embeds
        return super().generate(input_ids, **given)


def minicpmo(zoo: nn.Module) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        **plain(zoo), head_dim=zoo.config.text_config.head_dim
    )
    return HearingQwen3(config, zoo.config)


def in_pieces(inputs: Inputs) -> dict[str, Any]:
    """The lengths of recordings' pieces and their places, of the one request."""
    return {
        name: inputs[name][0]
        for name in ("audio_feature_lens", "audio_bounds")
        if name in inputs
    }


class AdaptedPhi4(transformers.Phi4MultimodalForCausalLM):
    """Phi-4-multimodal with the weights of the request's adapter merged in (modeling_phi4mm.py, forward: which one it is), and
    with each recording encoded by itself: beside a longer one it would hear padding."""

    def __init__(self, config: Any, zoo: nn.Module) -> None:
        super().__init__(config)
        self.zoo = zoo
        encoder = self.model.embed_tokens_extend.audio_embed.encoder
        theirs = encoder.forward

        def each(spectrograms: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            frames = (
                spectrograms.shape[1:2] * len(spectrograms)
                if mask is None
                else mask.sum(dim=1).tolist()
            )
            states = [
                theirs(one[None, :count], None)[0]
                for one, count in zip(spectrograms, frames, strict=True)
            ]
            return torch.nn.utils.rnn.pad_sequence(states, batch_first=True)

        encoder.forward = each

    def generate(self, input_ids: torch.Tensor, **given: Any) -> Any:
        for path, base in self.zoo._base_weights.items():
            weight = np.array(base)
            if "audio_input_features" in given:
                down, up = (
                    np.array(half[path])
                    for half in (self.zoo._speech_lora_a, self.zoo._speech_lora_b)
                )
                weight = weight + self.zoo._speech_lora_scale * (up @ down)
            self.get_parameter(
                path.removeprefix("language_model.")
            ).data = torch.tensor(weight)
        return super().generate(input_ids, **given)


def phi4mm(zoo: nn.Module) -> torch.nn.Module:
    ours, heard = zoo.config, zoo.config._audio_config
    names = [
        "num_blocks",
        "time_reduction",
        "kernel_size",
        "input_size",
        "ext_pw_out_channel",
        "depthwise_multiplier",
    ]
    turned = {
        "rope_type": "longrope",
        "rope_theta": ours.rope_theta,
        "partial_rotary_factor": ours.partial_rotary_factor,
    }
    turned |= {
        name: ours.rope_scaling[name] for name in ("short_factor", "long_factor")
    }
    turned |= {
        "original_max_position_embeddings": ours.original_max_position_embeddings
    }
    config = transformers.Phi4MultimodalConfig(
        **same(ours, *NAMES),
        rope_parameters=turned,
        original_max_position_embeddings=ours.original_max_position_embeddings,
        tie_word_embeddings=False,
        pad_token_id=0,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        audio_config={
            **same(heard, *names),
            "hidden_size": heard.attention_dim,
            "intermediate_size": heard.linear_units,
            "num_attention_heads": heard.attention_heads,
            "depthwise_separable_out_channel": heard.depthwise_seperable_out_channel,
            "nemo_conv_channels": heard.conv_channels,
            "bias_max_distance": heard.t5_bias_max_distance,
            "audio_token_id": PLAIN,
        },
    )
    return AdaptedPhi4(config, zoo)


def phi4mm_weights(weights: Weights) -> Weights:
    """Convolutions over one place are products in mlx-vlm."""
    shapes = {"b1": (1, 1, -1), "b2": (1, 1, -1)}
    found = {
        path: value.reshape(shapes.get(path.rpartition(".")[2], value.shape))
        for path, value in weights.items()
    }
    return {
        path: value[:, None] if "ext_pw_conv_1d.weight" in path else value
        for path, value in found.items()
    }


def heard_phi4(inputs: Inputs) -> dict[str, Any]:
    """transformers' name of the spectrograms; it looks up placeholders, too, so that theirs is one of the tiny table."""
    if "input_audio_embeds" not in inputs:
        return {}
    marked = np.where(
        inputs["input_ids"] == inputs["input_ids"].max(), PLAIN, inputs["input_ids"]
    )
    spectrograms = torch.tensor(inputs["input_audio_embeds"])
    return {
        "input_ids": torch.tensor(marked).long(),
        "input_audio_embeds": None,
        "audio_input_features": spectrograms,
    }


AUDIO = "model.embed_tokens_extend.audio_embed."
TRUNK = (
    (r"^language_model\.model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
ELSE = {"rename": TRUNK, "unused": r"^(?!language_model\.)"}
PHI4 = (
    *TRUNK,
    (r"^audio_encoder\.", f"{AUDIO}encoder."),
    (r"\.embed\.conv_0\.", ".embed.conv.0."),
    *(
        (rf"\.dw_pw_layers\.{at}\.{part}\.", f".conv.{3 * at + 2 + (part == 'pw')}.")
        for at in (0, 1)
        for part in ("dw", "pw")
    ),
    (r"\.linear_([qkv])\.", r".\1_proj."),
    (r"\.linear_out\.", ".o_proj."),
    (r"\.net_0\.linear\.", ".gate_up_proj."),
    (r"\.net_2\.", ".down_proj."),
    *(
        (rf"^audio_projection\.{ours}\.proj_{at}\.", f"{AUDIO}{way}_proj_for_{theirs}.")
        for ours, theirs in (("speech", "speech"), ("vision", "vision_speech"))
        for at, way in ((0, "up"), (2, "down"))
    ),
)

#: What each family's ``Recipe`` is made of.
TEXTS: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {"build": deepseek_v2, "convert": joined_experts, **ELSE},
    "dots_ocr": {"build": qwen2, **ELSE},
    "fastvlm": {"build": qwen2, **ELSE},
    "llmjpvl": {"build": qwen3, **ELSE},
    "locateanything": {"build": qwen2, **ELSE},
    "mage_vl": {"build": qwen3, **ELSE},
    "phi4mm": {
        "build": phi4mm,
        "rename": PHI4,
        "inputs": heard_phi4,
        "unused": r"^(vision_tower|mm_projector)",
        "regroup": phi4mm_weights,
        "absent": "image_embed",
    },
    "minicpmo": {
        "build": minicpmo,
        "rename": (
            *TRUNK,
            (r"^audio_tower\.", "apm."),
            (r"^audio_projection_layer\.", ""),
        ),
        "inputs": in_pieces,
        "unused": r"^(?!language_model\.|audio_)",
    },
    "mimo_v2": {
        "build": mimo_v2,
        "convert": joined_experts,
        **ELSE,
        "rename": (*TRUNK, (r"attention_sink_bias$", "sinks")),
    },
    "phi3_v": {"build": phi3, "rename": (), "unused": r"vision_embed_tokens"},
    "youtu_vl": {"build": youtu, "regroup": youtu_weights, **ELSE},
}
