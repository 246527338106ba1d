"""Muse Spark: gated and normed attention, sliding layers with RoPE and full ones without, experts, capped logits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import muse_spark as upstream

from ._build import (
    Rule,
    Shape,
    asks,
    enliven,
    fan_in,
    ids,
    pixels,
    spread,
    text_request,
    words,
)
from ._oracle import generate_by_recomputing, to_mx
from ._pictures import both, prompt
from ._types import END_OF_TEXT, PLAIN, VOCABULARY, Inputs, TinyFamily, Trace

IMAGE, VIDEO, AUDIO, AUDIO_START, AUDIO_END = range(PLAIN, PLAIN + 5)
SAMPLES = 1920  # of a recording's piece, which is one token
WINDOW, PATCH, MERGE = 8, 4, 2
GRIDS = ((4, 4), (4, 6), (6, 8))
THETA = 100.0


def shares(random: np.random.RandomState, shape: Shape) -> np.ndarray:
    """How much of a branch is mixed in: between zero and one, which is what a gate's sigmoid gives."""
    return 1 / (1 + np.exp(-random.standard_normal(shape)))


def build() -> nn.Module:
    """Four layers of 64, sliding and full in turn, of four experts each; two vision layers of 32, the first in tiles."""
    model = upstream.Model(
        upstream.ModelConfig(
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=AUDIO,
            projector_hidden_size=48,
            eos_token_id=[END_OF_TEXT],
            text_config=upstream.TextConfig(
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_hidden_layers=4,
                vocab_size=VOCABULARY,
                rms_norm_eps=1e-5,
                post_norm_eps=1e-8,
                rope_parameters={"rope_type": "default", "rope_theta": THETA},
                layer_rope_theta=[THETA, 0, THETA, 0],
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=WINDOW,
                final_logit_softcapping=20.0,
                output_multiplier=0.9,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_hidden_size=32,
                moe_intermediate_size=48,
                qk_scale_factor=2.0,
                routed_scaling_factor=1.2,
            ),
            vision_config=upstream.VisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                patch_size=PATCH,
                merge_size=MERGE,
                pos_emb_height=4,
                pos_emb_width=4,
                layer_types=["window_attention", "full_attention"],
            ),
            audio_config=upstream.AudioConfig(
                hidden_sizes=(8, 8, 8, 16), depths=(1, 1, 1, 1), out_hidden_size=64
            ),
        )
    )
    head = "language_model.lm_head.weight"
    rules = [
        Rule(head, fan_in(3.0)),
        Rule(r"_(alpha|beta)$", shares),
        Rule(r"mlp\.gate\.weight$", fan_in(1.3)),
        Rule(r"e_score_correction_bias$", spread(0.2)),
        Rule(r"(layernorm|_norm)\.weight$", spread(0.2, 1.0)),
        Rule(r"position_embedding_table", spread(0.5)),
    ]
    enliven(model, seed=94, rules=rules, quiet=head)
    # as a gate gives them: the squares of both sum to one
    for layer in model.language_model.layers:
        layer.add_attn_alpha, layer.add_ffn_alpha = (
            mx.sqrt(1 - beta * beta)
            for beta in (layer.add_attn_beta, layer.add_ffn_beta)
        )
    mx.eval(model.parameters())
    return model


def request(seed: int, grids: list[tuple[int, int]]) -> Inputs:
    """Pictures of (high, wide) patches, a placeholder for each 2 x 2 of them, words after each picture."""
    parts = [words(seed, 3)]
    for index, (high, wide) in enumerate(grids):
        parts += [
            [IMAGE] * (high * wide // MERGE**2),
            words(seed + 101 * (index + 1), 4 + index),
        ]
    pictures = [
        pixels(seed + 31 * i, 3, high * PATCH, wide * PATCH)
        for i, (high, wide) in enumerate(grids)
    ]
    return {"input_ids": ids(*parts), "pixel_values": pictures}


# One picture of 4, 6 or 12 placeholders. Two pictures of one size: they come as a list.
image, two_images = asks(request, GRIDS, (GRIDS[1], GRIDS[1]))


def heard(seed: int, counts: Sequence[int]) -> Inputs:
    """Recordings of so many pieces between their markers, half of the last one missing, and words after each."""
    random = np.random.RandomState(seed + 104729)
    lengths = np.array(counts) * SAMPLES - SAMPLES // 2
    mask = (np.arange(max(counts) * SAMPLES) < lengths[:, None]).astype(np.int32)
    values = random.standard_normal(mask.shape) + random.standard_normal(
        (len(counts), 1)
    )
    marked = [[AUDIO_START, *[AUDIO] * count, AUDIO_END] for count in counts]
    return {
        "input_ids": prompt(seed, marked),
        "input_values": (values * mask).astype(np.float32),
        "input_values_mask": mask,
    }


def audio(seed: int, size: int) -> Inputs:
    """One recording of 4, 6 or 11 pieces, the last more than the window."""
    return heard(seed, [(4, 6, 11)[size]])


def two_audios(seed: int) -> Inputs:
    """Two recordings, of which the first is the shorter one."""
    return heard(seed, [4, 7])


def picture_and_audio(seed: int) -> Inputs:
    """A picture, and then a recording."""
    return both(image(seed, 1), audio(seed + 1, 1))


def greedy(model: nn.Module, inputs: Inputs, num_tokens: int) -> Trace:
    """The whole sequence at each step, by the definition of transformers (modeling_muse_spark.py)."""
    language = model.language_model
    prompt = model.get_input_embeddings(**to_mx(inputs)).inputs_embeds

    def logits(generated: list[int]) -> mx.array:
        tail = language.model.embed(mx.array([generated], dtype=mx.int32))
        stream = mx.concatenate([prompt, tail], axis=1)[0]  # (L, D)
        for layer in language.layers:
            branch = _attend(
                layer.self_attn,
                layer.input_layernorm(stream),
                WINDOW if layer.use_sliding else None,
            )
            stream = layer.add_attn_alpha * stream + layer.add_attn_beta * _norm(
                branch, layer.post_norm_eps
            )
            branch = (
                _mix(layer.mlp, layer.pre_feedforward_layernorm(stream))
                * layer.post_feedforward_layernorm.weight
            )
            stream = layer.add_ffn_alpha * stream + layer.add_ffn_beta * _norm(
                branch, layer.post_norm_eps
            )
        out = (
            language.lm_head(language.model.norm(stream[-1]))
            * language.config.output_multiplier
        )
        return 20.0 * mx.tanh(out / 20.0)

    return generate_by_recomputing(logits, num_tokens)


def _norm(x: mx.array, eps: float = 1e-5) -> mx.array:
    return x / mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)


def _attend(module: nn.Module, x: mx.array, window: int | None) -> mx.array:
    """Attention over all of (L, D), with its gate."""
    length = len(x)
    heads = module.n_heads
    kv_heads = module.n_kv_heads
    width = module.head_dim
    # (heads of all kinds, L, D_head)
    split = module.qkvg_proj(x).reshape(length, -1, width).swapaxes(0, 1)
    queries, keys, values, gates = mx.split(
        split, [heads, heads + kv_heads, heads + 2 * kv_heads], axis=0
    )
    queries, keys = _norm(queries) * module.query_scale, _norm(keys)
    if module.use_rope:
        queries, keys = _rotated(queries), _rotated(keys)
    keys, values = (
        mx.repeat(part, heads // kv_heads, axis=0) for part in (keys, values)
    )
    back = mx.arange(length)[:, None] - mx.arange(length)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    scores = mx.where(seen, queries @ keys.swapaxes(1, 2) * width**-0.5, -mx.inf)
    output = _norm(mx.softmax(scores, axis=-1) @ values) * mx.sigmoid(gates)
    return module.o_proj(output.swapaxes(0, 1).reshape(length, -1))


def _rotated(x: mx.array) -> mx.array:
    """Neighbouring values of (H, L, D) turned by their position."""
    frequencies = THETA ** (-mx.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = mx.arange(x.shape[1])[:, None] * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [
        even * mx.cos(angles) - odd * mx.sin(angles),
        odd * mx.cos(angles) + even * mx.sin(angles),
    ]
    return mx.stack(turned, axis=-1).reshape(x.shape)


def _mix(module: nn.Module, x: mx.array) -> mx.array:
    """The two best experts of each token (L, D), every expert asked."""
    scores = mx.sigmoid(x @ module.gate.weight.T * module.router_multiplier)
    biased = np.array(scores + module.gate.e_score_correction_bias)
    chosen = mx.array(biased >= np.sort(biased, axis=-1)[:, -module.top_k, None])
    weights = mx.where(chosen, scores, 0)
    weights = weights / weights.sum(axis=-1, keepdims=True) * module.route_scale
    narrow = module.pre_expert_norm(module.pre_expert_proj(x))
    experts = module.experts
    ups, gates = (
        mx.einsum("ld,eid->eli", narrow, part.weight)
        for part in (experts.up_proj, experts.gate_proj)
    )
    outputs = mx.einsum("eli,edi->eld", nn.silu(gates) * ups, experts.down_proj.weight)
    outputs = _norm(
        outputs * experts.post_expert_norm.weight, experts.post_expert_norm.eps
    )
    return module.post_expert_proj((outputs * weights.T[..., None]).sum(axis=0))


FAMILY = TinyFamily(
    name="muse_spark",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    audio=audio,
    two_audios=two_audios,
    picture_and_audio=picture_and_audio,
    window=WINDOW,
    greedy=greedy,
    oracle_note="the whole sequence by transformers' definition, which agrees (tests/references): mlx-vlm's own text model "
    "runs on Metal only.",
)
