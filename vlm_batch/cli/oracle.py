"""Prompts as transformers makes them, in a script of its own: mlx-vlm, once imported, replaces transformers' classes.

Reads JSON from standard input, a list of ``{"folder": ..., "cases": [...]}``, and writes a list of answers to standard output.
A case is ``{"name", "messages", "text", "images", "tools", "continue_final_message"}``: ``messages`` or ``text`` with the
pictures' sizes (width, height) in ``images``. Its answer is ``{"text", "ids", "arrays", "pixels"}`` or ``{"error"}``:
``arrays`` holds the shapes of all outputs and the values of small ones, ``pixels`` the path of a file with the pictures'
values.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import transformers
from PIL import Image

#: Arrays up to this size are compared by their values.
SMALL = 256


def main() -> None:
    asked = json.load(sys.stdin)
    given, sys.stdout = sys.stdout, sys.stderr  # some processors print
    answers = [
        answer(Path(one["folder"]), one["cases"], Path(one["pixels"])) for one in asked
    ]
    json.dump(answers, given)


def answer(folder: Path, cases: list[dict[str, Any]], pixels: Path) -> dict[str, Any]:
    """Return a folder's answers."""
    try:
        processor = read(folder)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        }
    found = [
        case_answer(processor, case, pixels / f"{at}.npy")
        for at, case in enumerate(cases)
    ]
    tokenizer = tokenizer_of(processor)
    return {
        "processor": type(processor).__name__,
        "tokenizer": type(tokenizer).__name__,
        "cases": found,
    }


def read(folder: Path) -> Any:
    """Return transformers' own processor of a folder, or its tokenizer if it has no processor for the model's type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # As AutoProcessor: what the folder says goes before the model's type. Pixtral is saved as llava.
    name = processor_class(folder) or PROCESSOR_MAPPING_NAMES.get(
        str(config.get("model_type"))
    )
    if name is None:
        return read_tokenizer(folder)
    without_torch()
    return class_named(name).from_pretrained(folder)


def class_named(name: str) -> Any:
    """Return a processor's class, also one that transformers hides where there is no torch, which ids do not need."""
    kind = getattr(transformers, name)
    if "_backends" not in vars(kind):
        return kind
    models = Path(transformers.__file__).parent / "models"
    for path in models.glob("*/processing_*.py"):
        if f"class {name}(" in path.read_text(encoding="utf-8"):
            try:
                return getattr(
                    import_module(
                        f"transformers.models.{path.parent.name}.{path.stem}"
                    ),
                    name,
                )
            except ImportError:
                return TextAlone
    return kind


class TextAlone(transformers.ProcessorMixin):
    """The part for text that all of transformers' processors share, for one that cannot be imported."""

    def __init__(self, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(
            tokenizer,
            **{name: options[name] for name in ("chat_template",) if name in options},
        )


def processor_class(folder: Path) -> str | None:
    """Return the class that a folder names, if transformers has it."""
    for file in (
        "processor_config.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
    ):
        if (path := folder / file).exists():
            named = json.loads(path.read_text(encoding="utf-8")).get("processor_class")
            if isinstance(named, str) and named in dir(transformers):
                return named
    return None


def without_torch() -> None:
    """Have processors do without the parts for videos and pictures that transformers has for torch alone."""
    if transformers.utils.is_torchvision_available():
        return
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    kept = transformers.ProcessorMixin.check_argument_for_proper_class
    read = AutoImageProcessor.from_pretrained

    class Missing(transformers.utils.PushToHubMixin):  # type: ignore[misc] # what is written out by to_dict
        temporal_patch_size = merge_size = 2
        num_frames = fps = 1  # of videos, which are not compared

        def to_dict(self) -> dict[str, Any]:
            return {}

        def fetch_images(self, *_: Any) -> Any:
            raise ImportError("its pictures need torchvision, which is not installed")

    def check(self: Any, name: str, part: Any) -> Any:
        return None if isinstance(part, Missing) else kept(self, name, part)

    def pictures(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except (ImportError, ValueError) as error:
            if "torch" not in str(error).lower():
                raise
            return Missing()

    for owner, name, ours in (
        (AutoVideoProcessor, "from_pretrained", lambda *_, **__: Missing()),
        (AutoImageProcessor, "from_pretrained", pictures),
        (transformers.ProcessorMixin, "check_argument_for_proper_class", check),
    ):
        setattr(owner, name, ours)


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder whose model's type transformers may not know.

    ``AutoTokenizer`` knows which folders name a class that their tokenizer.json is not of: DeepSeek's say Llama, and are
    of bytes.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception:
        pass
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    named = str(said.get("tokenizer_class"))
    return getattr(
        transformers, named if named in dir(transformers) else "PreTrainedTokenizerFast"
    ).from_pretrained(folder)


def case_answer(processor: Any, case: dict[str, Any], pixels: Path) -> dict[str, Any]:
    try:
        return processed(processor, case, pixels)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        }


def processed(processor: Any, case: dict[str, Any], pixels: Path) -> dict[str, Any]:
    """Return a case's answer, by ``apply_chat_template(tokenize=True)`` where there is a template."""
    sizes = enumerate(case["images"])
    images = [picture(width, height, seed) for seed, (width, height) in sizes]
    text, found = written(processor, case, images)
    ids = flat(found["input_ids"])
    arrays = {
        name: facts(value)
        for name, value in found.items()
        if name != "input_ids" and value is not None
    }
    if images and "pixel_values" in found:
        np.save(pixels, np.asarray(found["pixel_values"], dtype=np.float32))
    return {
        "text": text,
        "ids": ids,
        "arrays": arrays,
        "pixels": str(pixels) if pixels.exists() else None,
    }


def written(
    processor: Any, case: dict[str, Any], images: list[Image.Image]
) -> tuple[str, Any]:
    """Return a case's text, and what is made of it."""
    if case.get("text") is not None:
        return case["text"], called(processor, case["text"], images)
    asked = ("tools", "continue_final_message")
    options = {name: case[name] for name in asked if case.get(name)}
    options["add_generation_prompt"] = "continue_final_message" not in options
    # a processor without a template of its own is handed what its tokenizer's template wrote
    owner = processor
    if processor.chat_template is None:
        owner = tokenizer_of(processor)
    text = owner.apply_chat_template(case["messages"], tokenize=False, **options)
    if "[{'type':" in text:
        raise ValueError(
            "its template takes text alone, and writes parts out as Python writes a list"
        )
    if owner is not processor:
        return text, called(processor, text, images)
    is_tokenizer = processor is tokenizer_of(processor)
    if images and not is_tokenizer:
        return text, called(processor, text, images)
    whole = owner.apply_chat_template(
        case["messages"], tokenize=True, return_dict=True, **options
    )
    if is_tokenizer:
        return text, whole
    found = called(processor, text, images)
    assert np.array_equal(flat(whole["input_ids"]), flat(found["input_ids"]))
    return text, found


def called(processor: Any, text: str, images: list[Image.Image]) -> Any:
    """Process a text as ``ProcessorMixin.apply_chat_template`` does (processing_utils.py:2402)."""
    begin = tokenizer_of(processor).bos_token
    options = {"add_special_tokens": False} if begin and text.startswith(begin) else {}
    media = {"images": images} if images else {}
    if images and isinstance(processor, TextAlone):
        raise ImportError("its pictures need torch, which is not installed")
    return processor(text=[text], return_tensors="np", **media, **options)


def tokenizer_of(processor: Any) -> Any:
    return (
        processor.tokenizer
        if isinstance(processor, transformers.ProcessorMixin)
        else processor
    )


def flat(ids: Any) -> list[int]:
    return [int(token) for token in np.asarray(ids).reshape(-1)]


def facts(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    small = array.dtype.kind in "biu" and array.size <= SMALL
    return {
        "shape": list(array.shape),
        "values": array.reshape(-1).tolist() if small else None,
    }


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return a picture of smooth colours, drawn from its number."""
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    planes = [across + 0 * down, down + 0 * across, (across + down) / 2 + 37 * seed]
    return Image.fromarray((np.stack(planes, axis=-1) % 256).astype(np.uint8))


if __name__ == "__main__":
    main()
