"""qwen2_5_vl models at real shapes with random, lively, seeded weights, and the size of the work that each is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

#: Ids at the end of every vocabulary that mark pictures.
VISION_START, VISION_END, IMAGE, VIDEO = -4, -3, -2, -1


@dataclass(frozen=True)
class Scale:
    """How much of each workload a shape is given, so that a round takes tens of seconds on the device it is for."""

    captions: int
    caption_tokens: int
    documents: int
    document_prompts: tuple[int, int]  # shortest and longest, pictures included
    document_tokens: int
    chat_requests: int
    chat_prompts: tuple[int, int]
    chat_tokens: tuple[int, int]
    chat_rate: float  # arrivals a second for 8 rows, more than any engine keeps up with
    churn_context: int
    churn_steps: int
    image_patches: tuple[int, ...]  # sides of pictures in patches of 14 pixels; even numbers


CPU_SCALE = Scale(
    captions=16,
    caption_tokens=32,
    documents=16,
    document_prompts=(200, 400),
    document_tokens=40,
    chat_requests=24,
    chat_prompts=(32, 1200),
    chat_tokens=(8, 128),
    chat_rate=8.0,
    churn_context=2000,
    churn_steps=48,
    image_patches=(8, 10, 12, 14, 16, 18),
)
GPU_SCALE = Scale(
    captions=48,
    caption_tokens=48,
    documents=24,
    document_prompts=(600, 1600),
    document_tokens=128,
    chat_requests=64,
    chat_prompts=(32, 1200),
    chat_tokens=(8, 128),
    chat_rate=25.0,
    churn_context=2000,
    churn_steps=128,
    image_patches=(16, 20, 24, 28, 32, 36),
)
TINY_SCALE = Scale(
    captions=4,
    caption_tokens=4,
    documents=4,
    document_prompts=(24, 48),
    document_tokens=4,
    chat_requests=6,
    chat_prompts=(8, 48),
    chat_tokens=(2, 8),
    chat_rate=200.0,
    churn_context=40,
    churn_steps=12,
    image_patches=(4, 6),
)


@dataclass(frozen=True)
class Shape:
    """A model's sizes. ``dtype`` is a name of ``mlx.core``.

    ``near_tie`` is the gap of log-probabilities below which two tokens are as likely; None where it follows, step by
    step, from how far the model's precision is from float32.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    dtype: str
    near_tie: float | None
    scale: Scale

    @property
    def vocabulary(self) -> int:
        return int(self.text["vocab_size"])

    @property
    def patch_length(self) -> int:
        """Values of one patch as the processor lays them out: 2 frames x 3 colours x patch x patch."""
        return 2 * 3 * int(self.vision["patch_size"]) ** 2


def _text(
    hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    half = hidden // heads // 2
    section = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]  # the published models' shares
    return {
        "model_type": "qwen2_5_vl",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "rope_scaling": {"type": "mrope", "mrope_section": section},
        "tie_word_embeddings": tied,
    }


def _vision(depth: int, hidden: int, inner: int, heads: int, out: int, full: list[int]) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "out_hidden_size": out,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": full,
    }


#: tiny: for tests. small: 47 M parameters for a CPU, 8 KV heads. 3b: the published sizes of Qwen2.5-VL-3B-Instruct.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", _text(64, 2, 96, 4, 2, 256, False), _vision(2, 32, 64, 2, 64, [1]), "float32", 1e-3, TINY_SCALE),
        Shape(
            "small",
            _text(512, 6, 2048, 8, 8, 16384, False),
            _vision(4, 256, 768, 4, 512, [3]),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        Shape(
            "3b",
            _text(2048, 36, 11008, 16, 2, 151936, True),
            _vision(32, 1280, 3420, 16, 2048, [7, 15, 23, 31]),
            "bfloat16",
            None,
            GPU_SCALE,
        ),
    )
}


def build(shape: Shape, seed: int = 25) -> Any:
    """The model, evaluated. Every process that builds it on the same device gets the same weights."""
    import mlx.core as mx
    from mlx_vlm.models import qwen2_5_vl as upstream

    from vlm_batch.models import adapter_for

    size = shape.vocabulary
    model = upstream.Model(
        upstream.ModelConfig(
            model_type="qwen2_5_vl",
            vocab_size=size,
            eos_token_id=[],
            image_token_id=size + IMAGE,
            video_token_id=size + VIDEO,
            vision_start_token_id=size + VISION_START,
            vision_end_token_id=size + VISION_END,
            text_config=upstream.TextConfig(**shape.text),
            vision_config=upstream.VisionConfig(**shape.vision),
        )
    )
    if mx.default_device().type == mx.DeviceType.gpu:
        # For every engine: on CUDA mlx-vlm's own vision tower ends the process (SIGFPE) at windows of no patches.
        tower = model.vision_tower
        tower.__class__ = adapter_for("qwen2_5_vl").patches()[type(tower)]
    enliven(model, getattr(mx, shape.dtype), seed)
    model.eval()
    return model


def enliven(model: Any, dtype: Any, seed: int) -> None:
    """Fill every parameter so that logits are far from flat (a standard deviation near 3) and every branch counts.

    Matrices keep the scale of their input; a tied embedding is scaled down so that the head, which it is too, is not
    peaked beyond what a trained model is. One parameter at a time: the 3B shape never exists in float32.
    """
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    mx.random.seed(seed)
    tied = not any(path.endswith("lm_head.weight") for path, _ in parameters(model))
    for path, value in parameters(model):
        noise = mx.random.normal(value.shape)
        if path.endswith("bias"):
            noise = 0.2 * noise
        elif value.ndim == 1:
            noise = 1 + 0.2 * noise
        elif "embed_tokens" in path:
            noise = noise * (3.0 / value.shape[-1] ** 0.5 if tied else 1.0)
        elif "lm_head" in path:
            noise = noise * (3.0 / value.shape[-1] ** 0.5)
        else:
            noise = noise * (1.3 / (value.size / value.shape[0]) ** 0.5)
        filled = noise.astype(dtype)
        mx.eval(filled)
        model.update(tree_unflatten([(path, filled)]))
    mx.clear_cache()


def count_parameters(model: Any) -> int:
    """All parameters, the vision tower's included."""
    return sum(value.size for _, value in parameters(model))


def parameters(module: Any) -> list[tuple[str, Any]]:
    """(dotted path, array) of all parameters of a module."""
    from mlx.utils import tree_flatten

    return cast("list[tuple[str, Any]]", tree_flatten(module.parameters()))
