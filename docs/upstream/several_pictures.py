"""Of several pictures only the first is seen, or they get wrong places, or they see each other.

Right: every picture's features go to its own placeholders, and a picture's patches attend to that picture only (transformers'
classes of these families; for multi_modality and fastvlm, the publishers' own code).
"""

from types import SimpleNamespace

import mlx.core as mx
from tiny import attempt, case, first_logprobs, noise, pictures, prompt, report, tiny


def second_picture(name, request_of):
    """Whether another second picture changes the answer."""
    one, other = (
        attempt(lambda seed=seed: first_logprobs(tiny(name), request_of(seed)))
        for seed in (1, 2)
    )
    if isinstance(one, str):
        return one, "another second picture changes the answer"
    same = abs(one - other).max() < 1e-6
    return (
        f"another second picture {'does not change' if same else 'changes'} the answer",
        "another second picture changes the answer",
    )


def apart(tower, patches, grids):
    """Features of pictures encoded together, and of each encoded alone."""
    sizes = [high * wide for _, high, wide in grids]
    parts = mx.split(patches, [sum(sizes[:i]) for i in range(1, len(sizes))])
    alone = [
        tower(part, mx.array([grid])) for part, grid in zip(parts, grids, strict=True)
    ]
    return tower(patches, mx.array(grids)), mx.concatenate(alone, axis=-2)


@case("granite4_vision", at="models/granite4_vision/granite4_vision.py:164")
def granite4_vision():
    """``pixel_values[0]``: the first picture's tiles are encoded, and no others."""
    sizes, ids = mx.array([[16, 32], [16, 32]]), [128] * 14
    first = noise(3, 1, 3, 3, 16, 16)
    return second_picture(
        "granite4_vision",
        lambda seed: {
            "input_ids": prompt(4, ids, ids),
            "pixel_values": mx.concatenate([first, noise(seed, 1, 3, 3, 16, 16)]),
            "image_sizes": sizes,
        },
    )


@case("llava_next", at="models/llava_next/llava_next.py:67")
def llava_next():
    """``pixel_values[0]``: the first picture's tiles are encoded, and no others."""
    first = noise(3, 1, 3, 3, 16, 16)
    return second_picture(
        "llava_next",
        lambda seed: {
            "input_ids": prompt(4, [128] * 4),
            "pixel_values": mx.concatenate([first, noise(seed, 1, 3, 3, 16, 16)]),
            "image_sizes": mx.array([[16, 32], [16, 32]]),
        },
    )


@case("paligemma", at="models/paligemma/vision.py:49 models/paligemma/paligemma.py:119")
def paligemma():
    """The vision encoder returns its first row, and the features go to the start of the prompt."""
    first = noise(3, 1, 3, 12, 12)
    ids = prompt(4, [128] * 9, [128] * 9)
    return second_picture(
        "paligemma",
        lambda seed: {
            "input_ids": ids,
            "attention_mask": mx.ones(ids.shape),
            "pixel_values": mx.concatenate([first, noise(seed, 1, 3, 12, 12)]),
        },
    )


@case("llava_bunny", at="models/llava_bunny/llava_bunny.py:137")
def llava_bunny():
    """Features go to the first placeholder only: the ``argmax`` of the ids that are placeholders."""
    first = noise(3, 1, 7, 64)
    return second_picture(
        "llava_bunny",
        lambda seed: {
            "input_ids": prompt(4, [128], [128]),
            "pixel_values": mx.zeros((2, 3, 4, 4)),
            "cached_image_features": mx.concatenate([first, noise(seed, 1, 7, 64)]),
        },
    )


@case("multi_modality", at="models/multi_modality/multi_modality.py:265")
def multi_modality():
    """Two pictures: the text between them is dropped. Right: 9 words and the features of two pictures."""
    model = tiny("multi_modality")
    tokens = model.config.num_image_tokens
    both = noise(5, 2, 3, 16, 16)
    found = attempt(
        lambda: model.get_input_embeddings(
            prompt(4, [128], [128]), both
        ).inputs_embeds.shape[1]
    )
    return found, 9 + 2 * tokens


@case("fastvlm", at="models/fastvlm/fastvlm.py:128")
def fastvlm():
    """Text between two pictures is cut one id too late: word 5 comes before the second picture's features. Ids stand for
    features.
    """
    from mlx_vlm.models.fastvlm.fastvlm import Model

    embed = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=lambda ids: ids[:, None].astype(mx.float32))
    )
    like = SimpleNamespace(
        config=SimpleNamespace(image_token_index=128, tokenizer_model_max_length=99),
        language_model=embed,
    )
    features = mx.array([[[1001.0]], [[1002.0]]])
    ids = mx.array([[1, 2, 128, 3, 4, 128, 5, 6]])
    found = attempt(
        lambda: (
            Model.prepare_inputs_for_multimodal(like, features, ids, None)
            .flatten()
            .tolist()
        )
    )
    return found, [1, 2, 1001, 3, 4, 1002, 5, 6]


@case("glm4v", at="models/glm4v/vision.py:214")
def glm4v():
    """Attention is split into three parts at most: from the third picture on they see each other."""
    tower = tiny("glm4v").vision_tower
    return apart(tower, noise(6, 64, 96), [[1, 4, 4]] * 4)


@case("ernie4_5_moe_vl", at="models/ernie4_5_moe_vl/vision.py:146")
def ernie4_5_moe_vl():
    """As glm4v."""
    tower = tiny("ernie4_5_moe_vl").vision_tower
    return apart(tower, noise(6, 64, 48), [[1, 4, 4]] * 4)


@case("hunyuan_vl", at="models/hunyuan_vl/vision.py:65")
def hunyuan_vl():
    """All pictures of a request are one sequence to the tower: two of them see each other."""
    tower = tiny("hunyuan_vl").vision_tower
    return apart(
        lambda patches, grid: tower(patches, grid.tolist()),
        noise(6, 32, 48),
        [[1, 4, 4]] * 2,
    )


def video_beside_a_picture(name):
    """Whether another video changes the embeddings of a prompt with a picture and a video."""
    frames = [131] * 4
    request = {**pictures(7, (4, 4)), "video_grid_thw": mx.array([[1, 4, 4]])}
    ids = mx.concatenate(
        [request.pop("input_ids"), prompt(8, [128, *frames, 129])], axis=1
    )
    one, other = (
        attempt(
            lambda seed=seed: tiny(name).get_input_embeddings(
                ids, pixel_values_videos=noise(seed, 16, 96), **request
            )
        )
        for seed in (9, 10)
    )
    if isinstance(one, str):
        return one, "another video changes the embeddings"
    same = bool(mx.array_equal(one.inputs_embeds, other.inputs_embeds))
    return (
        f"another video {'does not change' if same else 'changes'} the embeddings",
        "another video changes the embeddings",
    )


@case("qwen2_vl", at="models/qwen2_vl/qwen2_vl.py:27")
def qwen2_vl_video_beside_a_picture():
    """A prompt's videos are looked at only if it has no pictures."""
    return video_beside_a_picture("qwen2_vl")


@case("qwen2_5_vl", at="models/qwen2_5_vl/qwen2_5_vl.py:27")
def qwen2_5_vl_video_beside_a_picture():
    """As qwen2_vl."""
    return video_beside_a_picture("qwen2_5_vl")


if __name__ == "__main__":
    report()
