"""Patches of processors that any family may have: what mlx-vlm hands to the part for pictures, and copies of tokenizers."""

from __future__ import annotations

import copy
from typing import Any

from transformers.image_processing_utils import BaseImageProcessor

#: Options for the tokenizer that mlx-vlm's processors hand to the pictures' part, too.
OF_THE_TOKENIZER = frozenset({"padding", "padding_side", "add_special_tokens"})


def without_text_options(processor: Any) -> Any:
    """The processor, or a copy whose pictures' part leaves out the tokenizer's options instead of refusing them.

    mlx-vlm calls a processor with ``padding=True`` (utils.py:1766), and several of its processors pass all options on
    (llava/processing_llava.py:90); transformers 5 raises TypeError for one that a picture's part does not know.
    """
    part = getattr(processor, "image_processor", None)
    if not isinstance(part, BaseImageProcessor):
        return processor
    theirs = type(part)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name not in OF_THE_TOKENIZER}
        return theirs.__call__(self, *args, **known)

    processor, part = copy.copy(processor), copy.copy(part)
    part.__class__ = type(theirs.__name__, (theirs,), {"__call__": call, "__module__": theirs.__module__})
    processor.image_processor = part
    return processor


def copy_for_thread(part: Any) -> Any:
    """A processor or tokenizer for another thread, without the detokeniser that mlx-vlm hangs on a bare tokenizer.

    That keeps its text in a property, which asks for a tokenizer before a copy has one (AttributeError).
    """
    owners = (part, getattr(part, "tokenizer", None))
    hanging = [vars(owner).get("detokenizer") for owner in owners if owner is not None]
    return copy.deepcopy(part, {id(one): None for one in hanging if one is not None})
