"""Whole folders, with their tokenizers and processors, asked by their path: what such folders were refused or misread for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as InTurn
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import write_checkpoint
from tests.zoo import END_OF_TEXT, VOCABULARY, Trace, family, pixtral
from vlm_batch import (
    InvalidPrompt,
    Request,
    Result,
    SamplingParams,
    UnsupportedModel,
    VLMBatcher,
)
from vlm_batch.arrays import as_numpy
from vlm_batch.inputs.processors import with_pillow
from vlm_batch.jobs.publishers import PUBLISHERS
from vlm_batch.loading import adapt, load_model
from vlm_batch.loading.checkpoints import older_processor_files, read_model
from vlm_batch.models._aya_vision import best_grid as cohere_grid
from vlm_batch.models._layouts import corrected
from vlm_batch.models._llama4_pictures import TileProcessor
from vlm_batch.models._llama4_pictures import best_grid as llama_grid
from vlm_batch.models.aya_vision import AyaVision

STEPS = 6
ANSWER = SamplingParams(max_tokens=STEPS, ignore_eos=True)
CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def write_tokenizer(
    folder: Path, markers: Mapping[str, int], picture: str = "", **named: str
) -> None:
    """A tokenizer of words w0, w1, ... whose numbers are their ids; ``markers`` are further words, ``named`` its attributes."""
    words = {f"w{n}": n for n in range(VOCABULARY) if n not in markers.values()} | dict(
        markers
    )
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    cut = [
        Split(marker, "isolated") for marker in sorted(markers, key=len, reverse=True)
    ]
    tokenizer.pre_tokenizer = InTurn([WhitespaceSplit(), *cut])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        pad_token=f"w{END_OF_TEXT - 1}",
        bos_token=f"w{END_OF_TEXT - 2}",
        eos_token=f"w{END_OF_TEXT}",
        extra_special_tokens=named,
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        CHAT.replace("PICTURE", picture), encoding="utf-8"
    )


def write_processor(
    folder: Path, kind: str, pictures: Mapping[str, Any], **settings: Any
) -> None:
    """processor_config.json as transformers 5 writes it: the pictures' part within it."""
    scaling = {
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_resize": True,
        "resample": 3,
    }
    part = {
        **scaling,
        "do_convert_rgb": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **pictures,
    }
    whole = {"processor_class": kind, "image_processor": part, **settings}
    (folder / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")


def picture(wide: int = 40, high: int = 40, seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.RandomState(seed).randint(0, 256, (high, wide, 3), dtype=np.uint8)
    )


def ask(
    folder: Path, images: Sequence[Image.Image], prompt: str, **more: Any
) -> Result:
    with VLMBatcher(folder) as batcher:
        return batcher.submit(list(images), prompt, params=ANSWER, **more).result(
            timeout=60
        )


def alone(name: str, folder: Path, ids: Sequence[int], **arrays: np.ndarray) -> Trace:
    """The oracle's answer of the folder's model."""
    model = read_model(folder, in_float32=True)
    inputs = {"input_ids": np.array([ids], dtype=np.int32), **arrays}
    return family(name).greedy(model, inputs, STEPS)


def squares(images: Sequence[Image.Image], side: int) -> np.ndarray:
    """Pictures (N, 3, side, side) that have that size already, normalised as the written processors do."""
    assert all(image.size == (side, side) for image in images)
    return np.stack(
        [
            (np.asarray(image, np.float32) / 255 - 0.5).transpose(2, 0, 1) / 0.5
            for image in images
        ]
    )


# Processors
# ---------------------------------------------------------------------------------------------------------------------


def write_llava(folder: Path) -> Path:
    write_checkpoint(folder, "llava")
    write_tokenizer(folder, {"<image>": 128}, "<image>", image_token="<image>")
    sizes = {
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
        "do_center_crop": True,
    }
    write_processor(
        folder,
        "LlavaProcessor",
        {"image_processor_type": "CLIPImageProcessor", **sizes},
        patch_size=4,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token="<image>",
    )
    return folder


def test_llava_takes_a_picture(tmp_path: Path) -> None:
    """mlx-vlm hands `padding` to a picture's processor, which refuses what it does not know."""
    folder, image = write_llava(tmp_path / "llava"), picture(16, 16)
    result = ask(folder, [image], "<image> w5 w6", template=None)
    assert result.ok, result.error
    expected = alone(
        "llava", folder, [*[128] * 16, 5, 6], pixel_values=squares([image], 16)
    )
    assert list(result.token_ids) == expected.tokens


def test_pixtral_saved_as_llava(tmp_path: Path) -> None:
    folder, image = tmp_path / "pixtral", picture(16, 8)
    write_checkpoint(folder, "pixtral")
    marks = {"[IMG]": 128, "[IMG_BREAK]": 129, "[IMG_END]": 130}
    write_tokenizer(
        folder,
        marks,
        "[IMG]",
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    write_processor(
        folder,
        "PixtralProcessor",
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 4, "width": 4},
            "size": {"longest_edge": 32},
        },
        patch_size=4,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    result = ask(folder, [image], "w5 w6")
    assert result.ok, result.error
    assert result.usage.image_tokens == 8
    assert load_model(folder)[0].config.model_type == "pixtral"


def test_granite_vision_saved_as_llava_next(tmp_path: Path) -> None:
    folder = tmp_path / "granite"
    write_checkpoint(folder, "granite_vision")
    write_tokenizer(folder, {"<image>": 128}, "<image>", image_token="<image>")
    grids = [[16, 32], [32, 16], [32, 48], [64, 16]]
    write_processor(
        folder,
        "LlavaNextProcessor",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": grids,
        },
        patch_size=4,
        vision_feature_select_strategy="full",
        image_token="<image>",
    )
    result = ask(folder, [picture(32, 16), picture(20, 60, seed=1)], "w5 w6")
    assert result.ok, result.error
    model = load_model(folder)[0]
    assert model.config.model_type == "granite_vision"
    assert [list(grid) for grid in model.config.image_grid_pinpoints] == grids


@pytest.mark.parametrize(
    "mark", [128, VOCABULARY], ids=["within", "behind the vocabulary, as published"]
)
def test_florence2_as_transformers_lays_it_out(mark: int, tmp_path: Path) -> None:
    folder, image = tmp_path / "florence2", picture(64, 64)
    write_checkpoint(folder, "florence2", config={"image_token_id": mark})
    write_tokenizer(
        folder,
        {"<image>": mark, "<loc_0>": 130},
        image_token="<image>",
        place="<loc_0>",
    )
    write_processor(
        folder,
        "Florence2Processor",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": 64, "width": 64},
            "do_center_crop": False,
        }
        | {"image_seq_length": 5},
    )
    result = ask(folder, [image], "w5 w6")
    assert result.ok, result.error
    assert result.usage.image_tokens == 5
    ids = [*[mark] * 5, END_OF_TEXT - 2, 5, 6, END_OF_TEXT]
    assert (
        list(result.token_ids)
        == alone("florence2", folder, ids, pixel_values=squares([image], 64)).tokens
    )
    # a task, which transformers' processor writes out where it is the whole prompt
    (publisher,) = (one for one in PUBLISHERS if "florence2" in one.models)
    for task in publisher.prompts.values():
        asked = ask(folder, [image], task)
        assert asked.ok, asked.error


def test_command_a_vision_needs_no_torch(tmp_path: Path) -> None:
    folder, image = tmp_path / "command", picture(16, 16)
    write_checkpoint(folder, "aya_vision_cohere2")
    named = {
        "image_token": "<IMG>",
        "boi_token": "<BOI>",
        "eoi_token": "<EOI>",
        "img_line_break_token": "<BREAK>",
    }
    marks = {"<IMG>": 128, "<BOI>": 129, "<EOI>": 130, "<BREAK>": 131}
    write_tokenizer(folder, marks, "<IMG>", **named)
    write_processor(
        folder,
        "Cohere2VisionProcessor",
        {
            "image_processor_type": "Cohere2VisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "patch_size": 2,
            "crop_to_patches": True,
            "max_patches": 4,
        },
    )
    result = ask(folder, [image], "<IMG> w5 w6", template=None)
    assert result.ok, result.error
    expected = alone(
        "aya_vision_cohere2",
        folder,
        [129, *[128] * 4, 131, 130, 5, 6],
        pixel_values=squares([image], 16),
    )
    assert list(result.token_ids) == expected.tokens
    many = ask(folder, [picture(40, 24)], "w5 w6")
    assert many.ok, many.error
    assert many.usage.image_tokens > 4


@pytest.mark.parametrize(
    ("size", "llama", "cohere"),
    [
        ((336, 336), (1, 1), (1, 1)),
        ((300, 500), (1, 2), (1, 1)),
        ((900, 300), (3, 1), (1, 2)),
        ((800, 1000), (3, 3), (2, 2)),
        ((400, 2000), (2, 6), (4, 1)),
        ((700, 20), (3, 1), (1, 2)),
        ((3000, 3000), (4, 4), (3, 3)),
        ((480, 640), (2, 2), (2, 1)),
    ],
)
def test_grids_are_transformers(
    size: tuple[int, int], llama: tuple[int, int], cohere: tuple[int, int]
) -> None:
    """(high, wide) -> Llama 4's (rows, columns) and Cohere's (columns, rows), as transformers 5.23 answers with torchvision."""
    assert llama_grid(size, 336, 16) == llama
    assert cohere_grid(size, 512, 12) == cohere


def test_settings_of_pictures_are_found_where_transformers_5_puts_them(
    tmp_path: Path,
) -> None:
    folder = write_llava(tmp_path / "llava")
    (folder / "video_preprocessor_config.json").write_text("{}", encoding="utf-8")
    with older_processor_files(folder, "llava") as path:
        read = json.loads(
            (path / "preprocessor_config.json").read_text(encoding="utf-8")
        )
        assert read["crop_size"] == {"height": 16, "width": 16}
        assert (path / "tokenizer.json").exists()
        assert not (path / "model.safetensors").exists()
    assert not path.exists()
    (folder / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    with older_processor_files(folder, "llava") as path:
        assert path == folder


@dataclass(frozen=True)
class Saved:
    """A processor as transformers 5 writes it: ids of its markers, the text of a picture, its class and that of its part for
    pictures, and the settings of both."""

    markers: Mapping[str, int]
    picture: str
    whole: str
    part: str
    pictures: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    # attributes of the tokenizer
    named: Mapping[str, str] = field(default_factory=dict)
    has_template: bool = (
        # whether its chat template is asked: mlx-vlm writes chats of some types in words of its own
        True
    )


QWEN_MARKS = {
    "<|vision_start|>": 128,
    "<|vision_end|>": 129,
    "<|image_pad|>": 130,
    "<|video_pad|>": 131,
}
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
GLM_MARKS = {
    "<|begin_of_image|>": 128,
    "<|end_of_image|>": 129,
    "<|image|>": 130,
    "<|video|>": 131,
}
GLM_PICTURE = "<|begin_of_image|><|image|><|end_of_image|>"
AYA_MARKS = {
    "<|IMG_PATCH|>": 128,
    "<|START_OF_IMG|>": 129,
    "<|END_OF_IMG|>": 130,
    "<|BREAK|>": 131,
}
GRIDS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
}
GRIDS |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
SMALL = {
    "size": {"longest_edge": 16},
    "max_image_size": {"longest_edge": 16},
    "do_image_splitting": False,
    "do_pad": True,
}
SMOL_MARKS = {
    "<image>": 128,
    "<fake_token_around_image>": 129,
    "<global-img>": 130,
    "<end_of_utterance>": 131,
}
INTERN_MARKS = {"<IMG_CONTEXT>": 128, "<img>": 129, "</img>": 130}
LFM = {
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "do_image_splitting": False,
    "max_num_patches": 64,
    "tile_size": 16,
}
#: By the zoo's names of the families.
PROCESSORS = {
    "aya_vision": Saved(
        AYA_MARKS,
        "<image>",
        "AyaVisionProcessor",
        "GotOcr2ImageProcessor",
        {
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        {
            "patch_size": 4,
            "img_size": 16,
            "downsample_factor": 2,
            "image_token": "<image>",
            "tile_token": "TILE",
        }
        | {
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
        }
        | {
            "img_patch_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|BREAK|>",
            "tile_global_token": "TILE_GLOBAL",
        },
        {"image_token": "<|IMG_PATCH|>"},
    ),
    "qwen2_vl": Saved(
        QWEN_MARKS, QWEN_PICTURE, "Qwen2VLProcessor", "Qwen2VLImageProcessor", GRIDS
    ),
    "qwen2_5_vl": Saved(
        QWEN_MARKS, QWEN_PICTURE, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", GRIDS
    ),
    "qwen3_vl": Saved(
        QWEN_MARKS, QWEN_PICTURE, "Qwen3VLProcessor", "Qwen2VLImageProcessor", GRIDS
    ),
    "glm4v": Saved(
        GLM_MARKS, GLM_PICTURE, "Glm4vProcessor", "Glm4vImageProcessor", GRIDS
    ),
    "glm4v_moe": Saved(
        GLM_MARKS, GLM_PICTURE, "Glm4vProcessor", "Glm4vImageProcessor", GRIDS
    ),
    "glm_ocr": Saved(
        GLM_MARKS, GLM_PICTURE, "Glm46VProcessor", "Glm46VImageProcessor", GRIDS
    ),
    "lfm2_vl": Saved(
        {"<image>": 130, "<|image_start|>": 128, "<|image_end|>": 129},
        "<image>",
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessor",
        {**LFM, "min_image_tokens": 4, "max_image_tokens": 16},
    ),
    "smolvlm": Saved(
        SMOL_MARKS,
        "<image>",
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        SMALL,
        {"image_seq_len": 4},
    ),
    "idefics3": Saved(
        SMOL_MARKS,
        "<image>",
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        SMALL,
        {"image_seq_len": 4},
    ),
    "kimi_k25": Saved(
        {"<|media_pad|>": 128, "<|media_start|>": 129, "<|media_end|>": 130},
        "<|media_pad|>",
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        {"patch_size": 4, "merge_kernel_size": 2, "in_patch_limit": 64},
    ),
    "internvl": Saved(
        INTERN_MARKS,
        "<IMG_CONTEXT>",
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 16, "width": 16}},
        {"image_seq_length": 4},
    ),
    "internvl_chat": Saved(
        INTERN_MARKS,
        "<IMG_CONTEXT>",
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 16, "width": 16}},
        {"image_seq_length": 4},
    ),
    "multi_modality": Saved(
        {"<image_placeholder>": 128},
        "<image_placeholder>",
        "DeepseekVLProcessor",
        "DeepseekVLImageProcessor",
        {"size": {"height": 16, "width": 16}, "min_size": 14},
        {"num_image_tokens": 16},
        {"image_token": "<image_placeholder>"},
        has_template=False,
    ),
    "mistral3": Saved(
        {"[IMG]": 128, "[IMG_BREAK]": 129, "[IMG_END]": 130},
        "[IMG]",
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"patch_size": 4, "size": {"longest_edge": 32}},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
}


# kimi_k25's, which Pillow 14 will not have
@pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated")
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_saved_folder_takes_pictures(name: str, tmp_path: Path) -> None:
    """Through its own processor, two sizes together; the oracle has the same inputs on a model of its own."""
    saved, folder = PROCESSORS[name], write_checkpoint(tmp_path / name, name)
    write_tokenizer(folder, saved.markers, saved.picture, **saved.named)
    write_processor(
        folder,
        saved.whole,
        {"image_processor_type": saved.part, **saved.pictures},
        **saved.settings,
    )
    images = [picture(16, 16), picture(40, 24, seed=1)]
    with VLMBatcher(folder) as batcher:
        asked: dict[str, Any] = (
            {"prompt": "w5 w6"}
            if saved.has_template
            else {"prompt": f"{saved.picture} w5 w6", "template": None}
        )
        requests = [Request(images=image, params=ANSWER, **asked) for image in images]
        results = [
            handle.result(timeout=60)
            for handle in map(batcher.submit_request, requests)
        ]
        questions = map(batcher._preparer.check, requests)
        inputs = [
            as_numpy(batcher._preparer.prepare(question).inputs)
            for question in questions
        ]
    model = read_model(folder, in_float32=True)
    for result, given in zip(results, inputs, strict=True):
        assert result.ok, result.error
        assert result.usage.image_tokens > 0
        assert list(result.token_ids) == family(name).greedy(model, given, STEPS).tokens


@pytest.mark.parametrize("name", PROCESSORS)
def test_pictures_are_computed_with_pillow(name: str, tmp_path: Path) -> None:
    """Whether torch and torchvision are installed or not: transformers takes them where they are."""
    saved, folder = PROCESSORS[name], write_checkpoint(tmp_path / name, name)
    write_tokenizer(folder, saved.markers, saved.picture, **saved.named)
    write_processor(
        folder,
        saved.whole,
        {"image_processor_type": saved.part, **saved.pictures},
        **saved.settings,
    )
    with VLMBatcher(folder) as batcher:
        part = batcher._preparer.processing.processor.image_processor
    assert getattr(part, "backend", None) != "torchvision"
    assert not getattr(part, "use_transformers_backend", False)


class Torchvision:
    """Stands in for a part of transformers' that has torchvision, under that part's name."""

    backend = "torchvision"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.to_dict = lambda: dict(settings)


class Whole:
    """A processor with a part for pictures."""

    def __init__(self, part: Any) -> None:
        self.image_processor = part


def test_a_part_with_torchvision_becomes_the_one_with_pillow() -> None:
    """Also of a processor that the caller has loaded."""
    sizes = {
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": 4,
        "merge_size": 2,
    }
    image = picture(37, 29)
    for name in (
        "Glm4vImageProcessor",
        "GotOcr2ImageProcessor",
        "DeepseekVLImageProcessor",
    ):
        settings = (
            sizes if name.startswith("Glm") else {"size": {"height": 16, "width": 16}}
        )
        given = Whole(type(name, (Torchvision,), {})(settings))
        part = with_pillow(given).image_processor
        assert type(part).__name__ == f"{name}Pil"
        expected = getattr(transformers, f"{name}Pil")(**settings)([image])[
            "pixel_values"
        ]
        np.testing.assert_array_equal(
            np.asarray(part([image])["pixel_values"]), np.asarray(expected)
        )
        assert type(given.image_processor).__name__ == name
    cohere = type("Cohere2VisionImageProcessor", (Torchvision,), {})(
        {"size": {"height": 16, "width": 16}}
    )
    part = AyaVision.processor(with_pillow(Whole(cohere))).image_processor
    assert part.backend != "torchvision"
    assert part.size["height"] == 16


def test_a_processor_that_cannot_be_read_says_what_is_wrong_with_it(
    tmp_path: Path,
) -> None:
    """mlx-vlm passes over its own processor's failure and reports that of transformers', which has no torch."""
    folder = write_checkpoint(tmp_path / "ernie", "ernie4_5_moe_vl")
    write_tokenizer(folder, {"<|IMAGE_PLACEHOLDER|>": 130}, "<|IMAGE_PLACEHOLDER|>")
    write_processor(
        folder,
        "Ernie4_5_VLMoeProcessor",
        {"image_processor_type": "Ernie4_5_VLMoeImageProcessor"},
    )
    with pytest.raises(
        UnsupportedModel, match=r"its processor cannot be read: .*model_file"
    ) as found:
        load_model(folder)
    assert "torch" not in str(found.value).lower()


# Tokenizers and prompts
# ---------------------------------------------------------------------------------------------------------------------


def test_a_bare_tokenizer_of_whole_words(tmp_path: Path) -> None:
    """mlx-vlm hangs a detokeniser on it that cannot be copied."""
    folder = tmp_path / "falcon_h1"
    write_checkpoint(folder, "falcon_h1")
    write_tokenizer(folder, {})
    result = ask(folder, [], "w5 w6 w7")
    assert result.ok, result.error
    assert list(result.token_ids) == alone("falcon_h1", folder, [5, 6, 7]).tokens
    assert result.text == " ".join(f"w{token}" for token in result.token_ids)


def test_gemma3_takes_a_rendered_prompt_with_a_picture(tmp_path: Path) -> None:
    folder, image = tmp_path / "gemma3", picture(24, 24)
    write_checkpoint(folder, "gemma3")
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    write_tokenizer(
        folder,
        {"<image_soft_token>": 128, "<start_of_image>": 129, "<end_of_image>": 130},
        "<start_of_image>",
        **named,
    )
    write_processor(
        folder,
        "Gemma3Processor",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 24, "width": 24},
        },
        image_seq_length=9,
    )
    result = ask(folder, [image], "<start_of_image> w5 w6", template=None)
    assert result.ok, result.error
    assert result.usage.image_tokens == 9
    ids = [129, *[128] * 9, 130, 5, 6]
    mask = np.ones((1, len(ids)), dtype=np.int32)
    expected = alone(
        "gemma3", folder, ids, pixel_values=squares([image], 24), attention_mask=mask
    )
    assert list(result.token_ids) == expected.tokens
    again = ask(folder, [image], "w5 w6")
    assert again.ok, again.error
    with (
        VLMBatcher(folder) as batcher,
        pytest.raises(InvalidPrompt, match="0 picture placeholders for 1"),
    ):
        batcher.submit([image], "<image_soft_token> w5", template=None)


def write_llama4(folder: Path) -> Path:
    write_checkpoint(folder, "llama4")
    marks = {
        "<|patch|>": 128,
        "<|image|>": 129,
        "<|image_start|>": 130,
        "<|image_end|>": 131,
    }
    marks |= {"<|tile_x_separator|>": 132, "<|tile_y_separator|>": 133}
    write_tokenizer(folder, marks, "<|image|>")
    pictures = {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 16, "width": 16},
        "max_patches": 4,
    }
    write_processor(
        folder, "Llama4Processor", pictures, patch_size=4, pixel_shuffle_ratio=0.5
    )
    return folder


@pytest.mark.parametrize("size", [(16, 16), (40, 12), (50, 50)])
def test_llama4_takes_pictures_of_several_tiles(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """The whole picture stands behind its tiles; mlx-vlm's processor makes placeholders for it, and no tile."""
    folder = write_llama4(tmp_path / "llama4")
    result = ask(folder, [picture(*size)], "w5 w6")
    assert result.ok, result.error
    rows, columns = llama_grid((size[1], size[0]), 16, 4)
    tiles = rows * columns + (rows * columns > 1)
    assert result.usage.image_tokens == 4 * tiles
    with VLMBatcher(folder) as batcher:
        part = batcher._preparer.processing.processor.image_processor
    assert isinstance(part, TileProcessor)
    seen = part.preprocess([picture(*size)])["pixel_values"]
    assert seen.shape == (tiles, 3, 16, 16)
    if tiles == 1:
        np.testing.assert_allclose(seen, squares([picture(*size)], 16), atol=1e-6)


def test_llama4_keeps_a_picture_in_shape() -> None:
    """It fills its corner of the canvas at its own size; the rest is black, and the picture comes last as a whole."""
    white = Image.new("RGB", (40, 12), "white")
    tiles = TileProcessor(size=16, max_patches=4).preprocess([white])["pixel_values"]
    assert tiles.shape == (4, 3, 16, 16)
    assert (tiles[:2, :, :12] == 1).all()
    assert (tiles[2, :, :12, :8] == 1).all()
    assert (tiles[2, :, :, 8:] == -1).all()
    assert (tiles[:3, :, 12:] == -1).all()
    assert (tiles[3] == 1).all()


# Requests that do not fit
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, 1])
def test_llama4_refuses_placeholders_that_are_not_the_pictures(change: int) -> None:
    tiny = family("llama4")
    adapter, request = adapt(tiny.build()), tiny.image(4, 0)
    ids = request["input_ids"][0].tolist()
    marker = adapter.config.image_token_index
    place = ids.index(marker)
    ids = ids[:place] + [marker] * (change == 1) + ids[place + (change == -1) :]
    with pytest.raises(InvalidPrompt, match="placeholder tokens; the prompt has"):
        adapter.encode({**as_arrays(request), "input_ids": mx.array([ids])})


def as_arrays(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mx.array(value) for name, value in request.items()}


@pytest.mark.parametrize("name", ["llava_next", "granite_vision", "granite4_vision"])
def test_tiles_that_do_not_fit_are_refused(name: str) -> None:
    """By the request's own error, which names the numbers; they end in a ValueError of a reshape otherwise."""
    tiny = family(name)
    adapter, request = adapt(tiny.build()), as_arrays(tiny.image(4, 2))
    with pytest.raises(InvalidPrompt, match=r"pixels takes \d+ tiles"):
        adapter.encode({**request, "pixel_values": request["pixel_values"][:, :1]})
    with pytest.raises(
        InvalidPrompt, match="holds 2 pictures, and image_sizes the sizes of 1"
    ):
        adapter.encode(
            {**request, "pixel_values": mx.concatenate([request["pixel_values"]] * 2)}
        )


@pytest.mark.parametrize(("name", "unit"), [("pixtral", 1), ("mistral3", 2)])
def test_pictures_larger_than_the_rotations_are_refused(name: str, unit: int) -> None:
    """mlx-vlm reads behind its table of 8 x 8 rotations."""
    adapter = adapt(family(name).build())
    largest, larger = (
        as_arrays(pixtral.request(0, [(rows, 8 // unit)], 4 * unit))
        for rows in (8 // unit, 8 // unit + 1)
    )
    assert np.isfinite(np.array(adapter.encode(largest).inputs_embeds)).all()
    with pytest.raises(InvalidPrompt, match="8 patches is larger than 8 x 8"):
        mx.eval(adapter.encode(larger).inputs_embeds)


def test_a_dropped_group_of_experts_is_out_of_the_choice() -> None:
    """An expert that is kept, with a score of less than zero, goes before those that are not."""
    from mlx_vlm.models.deepseek_vl_v2.config import TextConfig
    from mlx_vlm.models.deepseek_vl_v2.language import MoEGate

    from vlm_batch.models.deepseek_vl_v2 import DeepseekVL2

    config = TextConfig(
        hidden_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
    )
    config.scoring_func = "sigmoid"
    gate = DeepseekVL2.patches()[MoEGate](config)
    gate.weight = mx.zeros((4, 4))
    # with a half each: 2.5 and -2.5, 0.5 and 0.5
    gate.e_score_correction_bias = mx.array([2.0, -3.0, 0.0, 0.0])
    experts, _ = gate(mx.ones((1, 1, 4)))
    assert set(experts.flatten().tolist()) == {2, 3}
    gate.e_score_correction_bias = mx.array([3.0, -1.0, 0.0, 0.0])
    experts, _ = gate(mx.ones((1, 1, 4)))
    assert set(experts.flatten().tolist()) == {0, 1}


# Configurations
# ---------------------------------------------------------------------------------------------------------------------


def test_older_configurations_stay_as_they_are() -> None:
    older = {
        "model_type": "qwen3_vl",
        "transformers_version": "4.57.0",
        "text_config": {"rope_theta": 5e6},
    }
    assert corrected(older) == older


def test_scaled_positions_are_handed_on() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    }
    text = corrected(
        {"model_type": "mllama", "text_config": {"rope_parameters": rope}}
    )["text_config"]
    assert text["rope_theta"] == 5e5
    assert text["rope_scaling"] == {"type": "llama3", **rope}


def test_scaled_positions_that_mlx_vlm_cannot_be_told_are_refused(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "ernie4_5_moe_vl", "ernie4_5_moe_vl")
    write_tokenizer(folder, {})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        UnsupportedModel, match="this ernie4_5_moe_vl model has yarn positions"
    ):
        load_model(folder)


def test_layers_at_no_regular_distance_are_refused() -> None:
    layers = [
        "linear_attention",
        "full_attention",
        "full_attention",
        "linear_attention",
    ]
    with pytest.raises(UnsupportedModel, match="at no regular distance"):
        corrected(
            {
                "model_type": "qwen3_5",
                "transformers_version": "5.23.0",
                "text_config": {"layer_types": layers},
            }
        )
