"""Patches of processors that any family may have: what mlx-vlm hands to the part for pictures, and copies for threads."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import mlx.core as mx
import numpy as np
import transformers
from mlx_vlm.utils import StoppingCriteria
from transformers import PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from vlm_batch.arrays import arrays_of

#: Options for the tokenizer that mlx-vlm's processors hand to the pictures' part, too.
OF_THE_TOKENIZER = frozenset({"padding", "padding_side", "add_special_tokens"})


def with_pillow(processor: Any) -> Any:
    """The processor, or a copy whose part for pictures computes with Pillow and numpy and not with torchvision.

    transformers takes torchvision where it is installed. Its pixels are up to one of 255 levels away from Pillow's, and tokens
    then differ. mlx-vlm's own processors have Pillow, and so has whoever has no torch.
    """
    part = getattr(processor, "image_processor", None)
    if getattr(part, "backend", None) == "torchvision":
        kind = getattr(transformers, f"{type(part).__name__}Pil", None)
        if kind is None:  # transformers has it for torchvision alone
            return processor
        other = kind.from_dict(part.to_dict())
    elif getattr(part, "use_transformers_backend", False):  # mlx-vlm's, which asks transformers where there is torch
        other = copy.copy(part)
        other.use_transformers_backend = False
    else:
        return processor
    processor = copy.copy(processor)
    processor.image_processor = other
    return processor


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


def with_stops(processor: Any, detokenizer: Any, config: Any) -> Any:
    """The processor with what mlx-vlm's loops look for on it: a detokeniser of this class, and the ids that end an answer."""
    tokenizer = getattr(processor, "tokenizer", processor)
    processor.detokenizer = detokenizer(tokenizer)
    further = getattr(processor, "additional_eos_token_ids", ())
    stops = StoppingCriteria(getattr(config, "eos_token_id", None), tokenizer, additional_eos_token_ids=further)
    tokenizer.stopping_criteria = stops
    return processor


def evaluate_held(processor: Any) -> None:
    """Evaluate the mlx arrays that a processor and its parts hold: MLX lets no thread but theirs do that.

    Called on the thread that made the processor, before copies of it go to loaders.
    """
    held = getattr(processor, "__dict__", {})
    mx.eval(arrays_of([held, *(getattr(part, "__dict__", {}) for part in held.values())]))


def copy_for_thread(part: Any) -> Any:
    """A processor or tokenizer for another thread, without the detokeniser that mlx-vlm hangs on a bare tokenizer.

    That keeps its text in a property, which asks for a tokenizer before a copy has one (AttributeError).
    """
    owners = (part, getattr(part, "tokenizer", None))
    hanging = [vars(owner).get("detokenizer") for owner in owners if owner is not None]
    return copy.deepcopy(part, {id(one): None for one in hanging if one is not None})


def settings_of(processor: Any) -> str:
    """The plain values that a processor and its parts but the tokenizer hold, in one text, which changes when one does."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return ""
    held = [
        vars(processor),
        *(getattr(part, "__dict__", {}) for name, part in vars(processor).items() if name != "tokenizer"),
    ]
    return repr([{name: value for name, value in values.items() if _is_plain(value)} for values in held])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    if isinstance(value, np.ndarray):
        return value.size <= 64  # means and deviations
    return value is None or isinstance(value, (bool, int, float, str, Enum))


#: A tokenizer's calls that let go of Python's lock, or that change the settings of the library under it.
_TOKENIZES = (
    "__call__",
    "encode",
    "_encode_plus",
    "_batch_encode_plus",
    "tokenize",
    "decode",
    "batch_decode",
    "_decode",
)


class Mould:
    """Makes copies of a processor for several threads: the parts for pictures are each copy's own.

    All copies share the tokenizer, one call at a time: a copy of it takes tens of megabytes, and up to a second in which no
    other Python code runs.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._lock = threading.RLock()

    def copy(self) -> Any:
        """A processor for one thread. Raises whatever a class raises that cannot be copied."""
        theirs = type(self._tokenizer)
        calls = {name: self._one_at_a_time(getattr(theirs, name)) for name in _TOKENIZES if hasattr(theirs, name)}
        guarded: Any = object.__new__(type(theirs.__name__, (theirs,), {**calls, "__module__": theirs.__module__}))
        vars(guarded).update(vars(self._tokenizer))
        return copy.deepcopy(self._processor, {id(self._tokenizer): guarded})

    def _one_at_a_time(self, method: Callable[..., Any]) -> Callable[..., Any]:
        lock = self._lock

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                return method(*args, **options)

        return call
