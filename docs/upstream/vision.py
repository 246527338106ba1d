"""Pictures become other features: positions, windows, pooling, packing."""

import math

import mlx.core as mx
import numpy as np
from tiny import attempt, case, config_of, filled, noise, prompt, report, tiny


@case("glm4v", at="models/glm4v/vision.py:126 models/kernels.py:428")
def glm4v_positions():
    """Learned positions are interpolated bilinearly with zeros outside.

    Right (transformers: bicubic, border): a constant table stays constant.
    """
    from mlx_vlm.models.glm4v.vision import Glm4vVisionEmbeddings

    embeddings = Glm4vVisionEmbeddings(config_of("glm4v").vision_config)
    embeddings.position_embedding.weight = mx.ones_like(
        embeddings.position_embedding.weight
    )
    rows, columns = (
        mx.array(axis.reshape(-1))
        for axis in np.meshgrid(range(8), range(8), indexing="ij")
    )
    found = embeddings(
        mx.zeros((64, embeddings.embed_dim)), [64], mx.array([[1, 8, 8]]), rows, columns
    )
    return found[:, 0], mx.ones(64)


@case("glm4v_moe", at="models/glm4v_moe/vision.py:126")
def glm4v_moe_positions():
    """As glm4v."""
    from mlx_vlm.models.glm4v_moe.vision import Glm4vVisionEmbeddings

    embeddings = Glm4vVisionEmbeddings(config_of("glm4v_moe").vision_config)
    embeddings.position_embedding.weight = mx.ones_like(
        embeddings.position_embedding.weight
    )
    rows, columns = (
        mx.array(axis.reshape(-1))
        for axis in np.meshgrid(range(8), range(8), indexing="ij")
    )
    found = embeddings(
        mx.zeros((64, embeddings.embed_dim)), [64], mx.array([[1, 8, 8]]), rows, columns
    )
    return found[:, 0], mx.ones(64)


@case("qwen2_5_vl", at="models/qwen2_5_vl/vision.py:335")
def qwen2_5_vl_windows():
    """Repeated window ends are looked for by comparing array scalars, by identity.

    Windows of length zero stay (on CUDA they end the process).
    """
    tower = tiny("qwen2_5_vl").vision_tower
    seen, attend = [], tower.blocks[0]

    def recording(hidden, cu_seqlens, rotary_pos_emb):
        seen.append(cu_seqlens)
        return attend(
            hidden, cu_seqlens=mx.array([0, len(hidden)]), rotary_pos_emb=rotary_pos_emb
        )

    tower.blocks = [recording] * len(tower.blocks)
    tower(noise(1, 256, 96), mx.array([[1, 16, 16]]))
    lengths = np.diff(np.array(min(seen, key=lambda ends: -len(ends))))
    return int((lengths == 0).sum()), 0


@case(
    "deepseekocr",
    "unlimited_ocr",
    at="models/base.py:570 models/deepseekocr/vision.py:132",
)
def deepseekocr_clip_positions():
    """For crops of 640 pixels CLIP's positions (16 x 16) are resized along the wrong axes, and scrambled. Right
    (deepencoder.py, ``get_abs_pos``, bicubic): a table whose n-th feature is n everywhere stays that.
    """
    from mlx_vlm.models.deepseekocr.config import VisionConfig
    from mlx_vlm.models.deepseekocr.vision import VisionEmbeddings

    embeddings = VisionEmbeddings(VisionConfig(model_type="vision", hidden_size=64))
    table = mx.broadcast_to(mx.arange(64, dtype=mx.float32), (1, 1 + 16 * 16, 64))
    return embeddings._get_abs_pos(table, 1 + 10 * 10)[0, 1:], mx.broadcast_to(
        table[0, :1], (100, 64)
    )


@case(
    "deepseekocr", "deepseekocr_2", "unlimited_ocr", at="models/deepseekocr/sam.py:431"
)
def deepseekocr_sam_positions():
    """For crops of 640 pixels 79 of SAM's 127 relative positions are read from the first on in steps of 127 / 79. Right
    (torch, mode linear): half a step later, so that no distance stays no distance.
    """
    from mlx_vlm.models.deepseekocr.sam import get_rel_pos

    distances = mx.broadcast_to(mx.arange(-63, 64, dtype=mx.float32)[:, None], (127, 4))
    return get_rel_pos(40, 40, distances)[7, 7], mx.zeros(4)


@case(
    "deepseekocr",
    "unlimited_ocr",
    at="models/deepseekocr/vision.py:56 models/deepseekocr/config.py:60",
)
def deepseekocr_clip_activation():
    """CLIP's layers have the exact GELU, and an epsilon of 1e-6.

    Right (deepencoder.py, `quick_gelu`): the sigmoid's, and 1e-5.
    """
    from mlx_vlm.models.deepseekocr.config import VisionConfig
    from mlx_vlm.models.deepseekocr.vision import EncoderLayer

    layer = EncoderLayer(VisionConfig(model_type="vision"))
    x = mx.array([-2.0, -1.0, 1.0, 2.0])
    return [*layer.mlp.activation_fn(x).tolist(), layer.layer_norm1.eps], [
        *(x * mx.sigmoid(1.702 * x)).tolist(),
        1e-5,
    ]


@case(
    "multi_modality",
    at="models/multi_modality/vision.py:166 models/multi_modality/config.py:53",
)
def multi_modality_activation():
    """SigLIP's layers have the tanh form of GELU, and an epsilon of 1e-5.

    Right (deepseek_vl/models/siglip_vit.py): the exact one, and 1e-6.
    """
    from mlx_vlm.models.multi_modality.config import VisionConfig
    from mlx_vlm.models.multi_modality.vision import EncoderLayer

    layer = EncoderLayer(
        VisionConfig(model_type="vision", cls="CLIPVisionTower", params={})
    )
    x = mx.array([-2.0, -1.0, 1.0, 2.0])
    right = x * (1 + mx.erf(x / math.sqrt(2))) / 2
    return [*layer.mlp.activation_fn(x).tolist(), layer.norm1.eps], [
        *right.tolist(),
        1e-6,
    ]


@case("hunyuan_vl", at="models/hunyuan_vl/vision.py:163")
def hunyuan_vl_positions():
    """A table of 4 positions for a side of 6 patches: the first comes from beyond the table's end.

    Right (vLLM and the published code, `F.interpolate`): no position is before the first.
    """
    from mlx_vlm.models.hunyuan_vl.vision import PatchEmbed

    embed = PatchEmbed(config_of("hunyuan_vl").vision_config)
    table = mx.broadcast_to(
        mx.arange(4, dtype=mx.float32)[None, :, None, None], (1, 4, 4, 1)
    )
    return embed._interpolate_pos_embed(table, 6, 4)[0, 0, 0], mx.zeros(1)


@case("phi4_siglip", at="models/phi4_siglip/vision.py:87")
def phi4_siglip_positions():
    """SigLIP 2's 3 x 3 positions are resized to 2 x 2 bicubically. Right (transformers, Siglip2VisionEmbeddings): bilinearly
    with antialiasing, so that a corner has 9/16 of its own.
    """
    from mlx_vlm.models.phi4_siglip.vision import VisionEmbeddings

    corner = mx.zeros((3, 3, 1)).at[0, 0].add(1)
    found = VisionEmbeddings.resize_positional_embeddings(corner, mx.array([[2, 2]]), 4)
    return found[0, :, 0], mx.array([9 / 16, 0, 0, 0])


@case("phi4_siglip", at="models/phi4_siglip/vision.py:133")
def phi4_siglip_padding():
    """A picture of 4 patches in an array of 9 attends to the padding. Right: as without padding."""
    from mlx_vlm.models.phi4_siglip.config import VisionConfig
    from mlx_vlm.models.phi4_siglip.vision import VisionModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tower = filled(VisionModel(VisionConfig(**sizes, patch_size=4, num_patches=4)))
    patches, shape = noise(5, 1, 4, 48), mx.array([[2, 2]])
    padded = tower(
        mx.pad(patches, [(0, 0), (0, 5), (0, 0)]),
        spatial_shapes=shape,
        output_hidden_states=True,
    )
    return padded[2][0, :4], tower(
        patches, spatial_shapes=shape, output_hidden_states=True
    )[2][0]


@case("idefics2", at="models/idefics2/vision.py:135")
def idefics2_positions():
    """A picture of 4 x 4 patches gets other positions of a table of 4 x 4. Right (transformers): each patch its own, in
    order.
    """
    from mlx_vlm.models.idefics2.vision import VisionEmbeddings

    embeddings = VisionEmbeddings(config_of("idefics2").vision_config)
    side = embeddings.num_patches
    embeddings.patch_embedding.weight = mx.zeros_like(embeddings.patch_embedding.weight)
    embeddings.position_embedding.weight = mx.broadcast_to(
        mx.arange(side**2, dtype=mx.float32)[:, None], (side**2, embeddings.embed_dim)
    )
    if "bias" in embeddings.patch_embedding:
        embeddings.patch_embedding.bias = mx.zeros_like(embeddings.patch_embedding.bias)
    pixels = mx.zeros(
        (1, side * embeddings.patch_size, side * embeddings.patch_size, 3)
    )
    found = attempt(
        lambda: embeddings(pixels, mask=mx.ones((1, side, side), dtype=mx.bool_))[
            0, :, 0
        ].tolist()
    )
    return found, list(range(side**2))


@case("idefics2", at="models/idefics2/vision.py:196")
def idefics2_padding():
    """A picture beside a larger one is padded to its size, and its patches attend to the padding. Right: as without
    padding.
    """
    tower = tiny("idefics2").vision_model
    patch, side = tower.config.patch_size, tower.embeddings.num_patches
    small = noise(2, 1, side * patch, side * patch, 3)
    small[:, :, patch:] = 0
    mask = mx.zeros((1, side, side), dtype=mx.bool_)
    mask[:, :, :1] = True
    padded = tower(small, mask)[0].reshape(side, side, -1)[:, :1].reshape(side, -1)
    return padded, tower(small[:, :, :patch], mask[:, :, :1])[0].reshape(side, -1)


@case("moondream2", "moondream3", at="models/moondream3/vision.py:135")
def moondream_pooling():
    """Crops of 3 x 4 features are pooled to 3 x 3 over rounded windows. Right (torch's adaptive average, which Moondream
    calls): over overlapping ones.
    """
    tower = tiny("moondream3").vision
    side = tower.config.crop_size // tower.config.patch_size
    margin = tower.config.overlap_margin
    crops = [noise(seed, side**2, 5) for seed in (3, 4)]
    left, right = (np.array(crop).reshape(side, side, 5) for crop in crops)
    grid = np.concatenate([left[:, : side - margin], right[:, margin:]], axis=1)
    wide = grid.shape[1]
    ends = [
        (math.floor(i * wide / side), math.ceil((i + 1) * wide / side))
        for i in range(side)
    ]
    expected = np.stack(
        [grid[:, start:end].mean(axis=1) for start, end in ends], axis=1
    )
    return tower._reconstruct_local_features(crops, (1, 2)).reshape(
        expected.shape
    ), expected


def packed(name):
    """The number of positions that a prompt with a picture of two tiles takes, and the prompt's own."""
    ids = prompt(4, [128] * (16 + 4 * (8 + 1)))
    tiles = noise(5, 1, 3, 3, 16, 16)
    found = attempt(
        lambda: (
            tiny(name)
            .get_input_embeddings(ids, tiles, image_sizes=mx.array([[16, 32]]))
            .inputs_embeds
        )
    )
    return (found if isinstance(found, str) else found.shape[1]), ids.shape[1]


@case(
    "llava_next",
    at="models/llava_next/llava_next.py:87 models/llava_next/llava_next.py:117",
)
def llava_next_packing():
    """Each placeholder gets a tile, and a tile of newlines follows. Right (transformers, pack_image_features): a feature
    for each placeholder, here 16 and 4 rows of 8 and a newline.
    """
    return packed("llava_next")


@case("granite_vision", at="models/granite_vision/granite_vision.py:104")
def granite_vision_packing():
    """As llava_next."""
    return packed("granite_vision")


@case("gemma4", at="models/gemma4/gemma4.py:21")
def gemma4_scatter():
    """Where there are more placeholders than features, the first feature comes again. Right (transformers): an error."""
    from mlx_vlm.models.gemma4.gemma4 import masked_scatter

    found = attempt(
        lambda: masked_scatter(
            mx.zeros((3, 1)), mx.ones((3, 1), dtype=mx.bool_), mx.array([[7.0], [8.0]])
        )
    )
    return (found if isinstance(found, str) else found.flatten().tolist()), "an error"


@case("gemma4", at="models/gemma4/language.py:514")
def gemma4_two_way_in_full_layers():
    """Where pictures attend both ways, they do so in full layers, too. Right (transformers): in sliding layers only."""
    trunk = tiny("gemma4_experts").language_model.model
    types = mx.array([[0, 0, 1, 1, 1, 0]])
    masks = trunk._make_masks(mx.zeros((1, 6, 64)), [None] * len(trunk.layers), types)
    full = next(
        mask
        for layer, mask in zip(trunk.layers, masks, strict=True)
        if layer.layer_type == "full_attention"
    )
    return full.reshape(6, 6).astype(mx.int32), mx.tril(mx.ones((6, 6))).astype(
        mx.int32
    )


@case("moondream2", "moondream3", at="models/moondream3/image_crops.py:13")
def moondream_crops():
    """A picture of 640 x 480 is cut into one crop. Right (moondream/torch/image_crops.py, `select_tiling`): 2 x 4."""
    from mlx_vlm.models.moondream3.image_crops import select_crop_grid

    return select_crop_grid(640, 480, 378, 12, 4), (2, 4)


if __name__ == "__main__":
    report()
