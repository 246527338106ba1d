"""Muse Spark: sliding layers with RoPE, experts, a float32 residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.hooks import Hook, files_of, hook, install_hooks
from vlm_batch.adapters.modules import RememberingTower, patches_in, unshared
from vlm_batch.registry import ModelSpec, register


@register(
    ModelSpec(
        family="muse_spark",
        model_types=("muse_spark", "muse_spark_open"),
        audio=True,
        no_video="not verified: its answers have not been compared with transformers",
        notes=(
            "runs where there is no Metal: mlx-vlm has the norms, gates and routing of this family as Metal kernels only "
            "(mlx_vlm/kernels)",
            "activations have the type of the weights; mlx-vlm rounds them to bfloat16 whatever the weights are "
            "(muse_spark/language.py:291 and :429), which is the same for a published checkpoint on a GPU",
        ),
        not_on_cuda=tuple(
            (
                name,
                "making its tiny model ended with an invalid launch on an H100, so that no scenario of it was verified there",
            )
            for name in ("muse_spark", "muse_spark_open")
        ),
    )
)
class MuseSpark(Adapter):
    tower_class = unshared(RememberingTower, "its tower takes one picture a call")
    input_keys = Adapter.input_keys | {"input_values", "input_values_mask"}
    ignored = frozenset({"audio_lengths"})  # the mask has them, too
    patches = patches_in("vlm_batch.models._muse_spark")

    def hook_functions(self) -> None:
        if not mx.metal.is_available():
            hooks = without_metal()
            install_hooks(
                files_of(self.language), hooks, family=self.spec.family, required=hooks
            )
        super().hook_functions()


def without_metal() -> dict[str, Hook]:
    from mlx_vlm import kernels

    functions: tuple[Callable[..., Any], ...] = (
        qk_norm,
        qk_norm_rope,
        norm_add_norm,
        expert_routing,
        post_expert_norm_combine,
        rms_norm_sigmoid_gate,
    )
    return {
        function.__name__: hook(vars(kernels)[function.__name__], function)
        for function in functions
    }


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    """Norm a projection's queries (B, L, H, D) and keys (B, L, H_kv, D)."""
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(
        *qkvg.shape[:-1], -1, head_dim
    )
    queries, keys = mx.split(mx.fast.rms_norm(heads, None, eps), [n_heads], axis=-2)
    return [queries * query_scale, keys]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **norm: Any
) -> list[mx.array]:
    """Apply ``qk_norm``, and rotate from ``offset`` (int or (B,)) on."""
    return [
        mx.fast.rope(
            heads.swapaxes(1, 2),
            heads.shape[-1],
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        ).swapaxes(1, 2)
        for heads in qk_norm(qkvg, **norm)
    ]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any | None,
) -> tuple[mx.array, mx.array | None]:
    """Add a branch's normed output to the stream (B, L, D)."""
    scaled = (
        branch if post_weight is None else post_weight.astype(branch.dtype) * branch
    )
    mixed = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps).astype(
        mx.float32
    )
    if next_norm is None:
        return mixed, None
    normed = mx.fast.rms_norm(mixed, next_norm.weight.astype(mx.float32), next_norm.eps)
    return mixed, normed.astype(branch.dtype)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """Return experts and weights (B, L, K)."""
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [
        chosen,
        weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale,
    ]


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """Sum experts' normed outputs (B, L, K, D): (B, L, D)."""
    scaled = experts.astype(mx.float32) * norm_weight.astype(mx.float32)
    return (
        (mx.fast.rms_norm(scaled, None, eps) * weights[..., None])
        .sum(axis=-2)
        .astype(experts.dtype)
    )


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Norm attention's output (B, H, L, D), and gate it by (B, L, H * D)."""
    normed = (
        mx.fast.rms_norm(x.astype(mx.float32), None, eps).swapaxes(1, 2).flatten(-2)
    )
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)
