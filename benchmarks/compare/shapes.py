"""Models of several families at real shapes, with random, lively, seeded weights, and the size of the work given to each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, cast

import numpy as np

#: Ids at the end of every vocabulary that mark pictures.
VISION_START, VISION_END, IMAGE, VIDEO = -4, -3, -2, -1
MERGE = 2  # patches that become one token, per side, where a grid decides


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
    image_patches: tuple[int, ...]  # sides of pictures in patches; even numbers


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
    #: The module of mlx-vlm's, and the ids that its configuration is told.
    family: str = "qwen2_5_vl"
    markers: Mapping[str, int] = field(
        default_factory=lambda: {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
    )
    #: Positions of a picture in a family whose pictures have all one size; None where they follow from a grid of patches.
    picture_tokens: int | None = None
    #: Bits of the language model's weights.
    bits: int | None = None
    #: Parameters that are not as lively as others: a pattern of their paths -> (deviation, middle); ``None`` as deviation is
    #: one by the root of their width.
    quiet: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    #: Whether mlx-vlm's merge of pictures asks for the processor's mask.
    has_mask: bool = False
    #: Why answers one after another by mlx-vlm are not what is right here, so that times alone are taken.
    unchecked: str = ""

    @property
    def vocabulary(self) -> int:
        return int(self.text["vocab_size"])

    @property
    def patch_length(self) -> int:
        """Values of one patch as the processor lays them out: 2 frames x 3 colours x patch x patch."""
        return 2 * 3 * int(self.vision["patch_size"]) ** 2

    def count_tokens(self, size: tuple[int, int]) -> int:
        """Positions of a picture of so many patches (high, wide), without the marks around it."""
        return self.picture_tokens or size[0] * size[1] // MERGE**2

    def picture(
        self, random: np.random.RandomState, size: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """What a processor makes of a picture."""
        high, wide = size
        is_whole = self.picture_tokens is not None
        side = int(self.vision.get("image_size", 0))
        shape = (1, 3, side, side) if is_whole else (high * wide, self.patch_length)
        pixels = random.standard_normal(shape)
        found = {
            "pixel_values": (pixels + 0.5 * random.standard_normal()).astype(np.float32)
        }
        return (
            found
            if is_whole
            else found | {"image_grid_thw": np.array([[1, high, wide]], dtype=np.int32)}
        )


def _text(
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
) -> dict[str, Any]:
    half = hidden // heads // 2
    # the published models' shares
    section = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
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


def _vision(
    depth: int, hidden: int, inner: int, heads: int, out: int, full: list[int]
) -> dict[str, Any]:
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


def _one_size(scale: Scale, patches: int) -> Scale:
    """The same work for a family whose pictures have all one size."""
    return replace(scale, image_patches=(patches, patches))


def gemma3_shape(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    dtype: str,
    tie: float | None,
    scale: Scale,
) -> Shape:
    """Sliding and full layers, and a SigLIP tower whose patches are pooled."""
    side = vision["image_size"] // vision["patch_size"]
    return Shape(
        name,
        {"model_type": "gemma3_text", **text},
        {"model_type": "siglip_vision_model", **vision},
        dtype,
        tie,
        _one_size(scale, side),
        family="gemma3",
        markers={"image_token_index": IMAGE},
        picture_tokens=text["mm_tokens_per_image"],
        # norms multiply by one plus their weight
        quiet={
            r"language_model\..*norm\.weight$|mm_soft_emb_norm": (0.2, 0.0),
            "embed_tokens": (None, 0.0),
        },
        has_mask=True,
        unchecked="mlx-vlm's own loop does not hand the mask of pictures to the language model",
    )


def qwen3_5_shape(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    dtype: str,
    tie: float | None,
    scale: Scale,
) -> Shape:
    """Layers of a gated delta net, and each fourth of attention."""
    rope = {"type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    turned = text["head_dim"] // 8  # pairs of columns that turn, in three sections
    section = [turned - 2 * (turned // 3), turned // 3, turned // 3]
    common = {
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
    }
    patches = {
        "patch_size": 16,
        "spatial_patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return Shape(
        name,
        {
            "model_type": "qwen3_5_text",
            **common,
            **text,
            "rope_parameters": {**rope, "mrope_section": section},
        },
        {
            **patches,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": [],
            **vision,
        },
        dtype,
        tie,
        scale,
        family="qwen3_5",
        quiet={
            r"\.A_log$": (0.5, -0.5),
            r"\.dt_bias$": (0.5, -2.0),
            r"linear_attn\.norm\.weight": (0.2, 1.0),
        },
    )


def experts_shape(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    dtype: str,
    tie: float | None,
    scale: Scale,
) -> Shape:
    """A mixture of experts in every layer, as Qwen3-VL's has it, behind its tower with one deeper level of features."""
    half = text["head_dim"] // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    return Shape(
        name,
        {
            "model_type": "qwen3_vl_moe_text",
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "default", "mrope_section": section},
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **text,
        },
        {
            "patch_size": 16,
            "spatial_patch_size": 16,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": [1],
            **vision,
        },
        dtype,
        tie,
        scale,
        family="qwen3_vl_moe",
    )


def paligemma_shape(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    dtype: str,
    tie: float | None,
    scale: Scale,
) -> Shape:
    """A prompt that attends both ways, and a SigLIP tower of which every patch is a position."""
    side = vision["image_size"] // vision["patch_size"]
    return Shape(
        name,
        {
            "model_type": "gemma",
            "num_image_tokens": side**2,
            "use_bidirectional_attention": True,
            **text,
        },
        {
            "model_type": "siglip_vision_model",
            "projection_dim": text["hidden_size"],
            **vision,
        },
        dtype,
        tie,
        _one_size(scale, side),
        family="paligemma",
        markers={"image_token_index": IMAGE},
        picture_tokens=side**2,
        # norms multiply by one plus their weight
        quiet={r"language_model\..*norm\.weight$": (0.2, 0.0)},
    )


def llava_shape(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    dtype: str,
    tie: float | None,
    scale: Scale,
) -> Shape:
    """A decoder of Llama's kind in 4 bits, and a CLIP tower."""
    side = vision["image_size"] // vision["patch_size"]
    return Shape(
        name,
        {"model_type": "llama", **text},
        {"model_type": "clip_vision_model", **vision},
        dtype,
        tie,
        _one_size(scale, side),
        family="llava",
        markers={"image_token_index": IMAGE},
        picture_tokens=side**2,
        bits=4,
        quiet={"class_embedding": (0.5, 0.0)},
    )


def sizes(
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def tower_sizes(
    hidden: int, layers: int, inner: int, heads: int, patch: int, side: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": side,
    }


def linear_heads(heads: int, width: int, head_dim: int) -> dict[str, int]:
    """Heads of gated delta nets, and the width of attention's."""
    names = (
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("linear_key_head_dim", "linear_value_head_dim"),
    )
    return (
        dict.fromkeys(names[0], heads)
        | dict.fromkeys(names[1], width)
        | {"head_dim": head_dim}
    )


def grid_tower_sizes(
    depth: int, hidden: int, inner: int, heads: int, side: int
) -> dict[str, int]:
    sizes = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
    }
    return {**sizes, "num_position_embeddings": side**2}


#: tiny: for tests. small: 47 M parameters for a CPU, 8 KV heads. wide: six layers of 2,048 for a CPU. 3b: the published
#: sizes of Qwen2.5-VL-3B-Instruct. Of other families one for a GPU and one for a CPU each: Gemma 3 4B's sizes; a Qwen3.5
#: of two billion; Llama 3.2 1B's sizes behind CLIP's large tower, as LLaVA has them, in 4 bits.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "tiny",
            _text(64, 2, 96, 4, 2, 256, False),
            _vision(2, 32, 64, 2, 64, [1]),
            "float32",
            1e-3,
            TINY_SCALE,
        ),
        Shape(
            "small",
            _text(512, 6, 2048, 8, 8, 16384, False),
            _vision(4, 256, 768, 4, 512, [3]),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        Shape(
            "wide",
            _text(2048, 6, 6144, 16, 2, 32768, False),
            _vision(4, 256, 768, 4, 2048, [3]),
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
        gemma3_shape(
            "gemma3-4b",
            sizes(
                2560,
                34,
                10240,
                8,
                4,
                262208,
                head_dim=256,
                sliding_window=1024,
                mm_tokens_per_image=256,
            ),
            tower_sizes(1152, 27, 4304, 16, 14, 896),
            "bfloat16",
            None,
            GPU_SCALE,
        ),
        gemma3_shape(
            "gemma3-small",
            sizes(
                512,
                6,
                2048,
                8,
                4,
                16384,
                head_dim=64,
                sliding_window=256,
                mm_tokens_per_image=64,
            ),
            tower_sizes(256, 4, 768, 4, 14, 224),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        qwen3_5_shape(
            "qwen3.5-2b",
            sizes(2048, 24, 6144, 8, 2, 248320, **linear_heads(16, 128, 256)),
            grid_tower_sizes(24, 1024, 4096, 16, 48),
            "bfloat16",
            None,
            GPU_SCALE,
        ),
        qwen3_5_shape(
            "qwen3.5-small",
            sizes(512, 8, 1536, 8, 2, 16384, **linear_heads(8, 64, 64)),
            grid_tower_sizes(4, 256, 768, 4, 48),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        paligemma_shape(
            "paligemma-small",
            sizes(512, 6, 2048, 8, 1, 16384, head_dim=64),
            tower_sizes(256, 4, 768, 4, 14, 224),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        experts_shape(
            "experts-small",
            sizes(
                *(512, 6, 2048, 8, 4, 16384),
                head_dim=64,
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=512,
            ),
            grid_tower_sizes(4, 256, 768, 4, 48),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
        llava_shape(
            "llava-1b",
            sizes(2048, 16, 8192, 32, 8, 128256, rope_theta=500000.0),
            tower_sizes(1024, 24, 4096, 16, 14, 336),
            "bfloat16",
            None,
            GPU_SCALE,
        ),
        llava_shape(
            "llava-small",
            sizes(256, 4, 768, 8, 4, 4096),
            tower_sizes(256, 2, 768, 4, 14, 112),
            "float32",
            1e-3,
            CPU_SCALE,
        ),
    )
}
#: What shapes of other families are asked: prompts that are recalled are Qwen's.
OTHERS_WORKLOADS = ("chat-8", "chat-32", "captions", "documents")


def build(shape: Shape, seed: int = 25) -> Any:
    """The model, evaluated. Every process that builds it on the same device gets the same weights."""
    import mlx.core as mx
    import mlx.nn as nn

    from vlm_batch.models import adapter_for

    upstream = import_module(f"mlx_vlm.models.{shape.family}")
    size = shape.vocabulary
    model = upstream.Model(
        upstream.ModelConfig(
            model_type=shape.family,
            vocab_size=size,
            eos_token_id=[],
            # some change what they are given
            text_config=upstream.TextConfig(**deepcopy(shape.text)),
            vision_config=upstream.VisionConfig(**deepcopy(shape.vision)),
            **{name: size + mark for name, mark in shape.markers.items()},
        )
    )
    if mx.default_device().type == mx.DeviceType.gpu and shape.family == "qwen2_5_vl":
        # For every engine: on CUDA mlx-vlm's own vision tower ends the process (SIGFPE) at windows of no patches.
        tower = model.vision_tower
        tower.__class__ = adapter_for("qwen2_5_vl").patches()[type(tower)]
    enliven(model, getattr(mx, shape.dtype), seed, shape.quiet)
    if shape.bits is not None:
        nn.quantize(model.language_model, group_size=64, bits=shape.bits)
        mx.eval(model.parameters())
        mx.clear_cache()
    model.eval()
    return model


def enliven(
    model: Any,
    dtype: Any,
    seed: int,
    quiet: Mapping[str, tuple[float | None, float]] | None = None,
) -> None:
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
        said = next(
            (how for pattern, how in (quiet or {}).items() if re.search(pattern, path)),
            None,
        )
        if said is not None:
            deviation, middle = said
            noise = middle + noise * (
                value.shape[-1] ** -0.5 if deviation is None else deviation
            )
        elif path.endswith("bias"):
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
    """All parameters, the vision tower's included; of packed ones, those that they stand for."""
    packed = {
        path: module.bits
        for path, module in model.named_modules()
        if "scales" in module
    }
    found = 0
    for path, value in parameters(model):
        owner, _, name = path.rpartition(".")
        bits = packed.get(owner)
        found += (
            0
            if bits and name in ("scales", "biases")
            else value.size * (32 // bits if bits and name == "weight" else 1)
        )
    return found


def parameters(module: Any) -> list[tuple[str, Any]]:
    """(dotted path, array) of all parameters of a module."""
    from mlx.utils import tree_flatten

    return cast("list[tuple[str, Any]]", tree_flatten(module.parameters()))
