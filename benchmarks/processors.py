"""Processors for the shapes: the embedded checkpoint's tokenizer, and pictures as each family takes them.

A family other than the checkpoint's gets a folder of its own, with the settings of its published processor and the tokenizer's
marks under its names. mlx-vlm's loader reads it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.shapes import Shape
from vlm_batch.assets import default_checkpoint

START, END, PLACE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
#: The checkpoint's ids that its family's configuration names.
QWEN_IDS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
#: What every folder's template writes, around the mark of a picture.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As SigLIP's and CLIP's published processors scale.
SCALING = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_resize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@dataclass(frozen=True)
class FolderOfFamily:
    """A family's processor.

    Attributes:
        mark: what a prompt has for a picture.
        pictures: the class that makes pictures arrays.
        settings: of the processor itself.
        tokens: names that the tokenizer gives to marks.
    """

    processor: str
    pictures: str
    mark: str
    tokens: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)


FOLDERS: Mapping[str, FolderOfFamily] = {
    "gemma3": FolderOfFamily(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        START,
        {"boi_token": START, "image_token": PLACE, "eoi_token": END},
    ),
    "llava": FolderOfFamily(
        "LlavaProcessor",
        "CLIPImageProcessor",
        PLACE,
        {"image_token": PLACE},
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
}


def set_processor(shape: Shape, model: Any, processor: Any, max_pixels: int) -> Any:
    """Return the processor for a model of this shape, and tell the model the tokenizer's ids.

    Args:
        processor: of the embedded checkpoint.
        max_pixels: of a picture, where its size decides how many tokens it has.
    """
    if shape.family in FOLDERS:
        return _of_folder(shape, model)
    given = json.loads((default_checkpoint() / "config.json").read_text())
    for name in QWEN_IDS:
        setattr(model.config, name, given[name])
    part = processor.image_processor
    part.min_pixels, part.max_pixels = 56 * 56, max_pixels
    return processor


def _of_folder(shape: Shape, model: Any) -> Any:
    from mlx_vlm.utils import load_processor

    with tempfile.TemporaryDirectory() as folder:
        _write_folder(Path(folder), shape)
        processor = load_processor(Path(folder), add_detokenizer=True, eos_token_ids=[])
    place = processor.tokenizer.convert_tokens_to_ids(PLACE)
    model.config.image_token_index = place
    return processor


def _write_folder(folder: Path, shape: Shape) -> None:
    own = FOLDERS[shape.family]
    side = int(shape.vision["image_size"])
    source = default_checkpoint()
    shutil.copy(source / "tokenizer.json", folder)
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE.replace("MARK", own.mark),
        "extra_special_tokens": dict(own.tokens),
    }
    del tokenizer["additional_special_tokens"]
    pictures = {
        **SCALING,
        "image_processor_type": own.pictures,
        "size": {"height": side, "width": side},
        "crop_size": {"height": side, "width": side},
    }
    settings = dict(own.settings)
    if shape.family == "gemma3":
        settings["image_seq_length"] = shape.picture_tokens
    whole = {
        "processor_class": own.processor,
        "image_processor": pictures,
        **settings,
    }
    files = {
        "tokenizer_config.json": tokenizer,
        "processor_config.json": whole,
        "preprocessor_config.json": pictures,
        "config.json": {"model_type": shape.family},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
