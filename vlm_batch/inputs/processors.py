"""Patches of processors that serve any family, and copies for threads."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType
from typing import Any

import mlx.core as mx
import numpy as np
import transformers
from mlx_vlm.utils import StoppingCriteria
from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from vlm_batch.arrays import arrays_of

#: Steps of a tokenizer beside its vocabulary.
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
#: Attributes in which transformers keeps what it made a tokenizer of, and which nothing changes afterwards.
_MADE_OF = ("_vocab", "_merges", "init_kwargs")
#: Tokenizer options that mlx-vlm's processors pass to the image processor, too.
OF_THE_TOKENIZER = frozenset({"padding", "padding_side", "add_special_tokens"})


def with_pillow(processor: Any) -> Any:
    """Return the processor with Pillow, not torchvision: pixels differ by up to one of 255 levels."""
    part: Any = getattr(processor, "image_processor", None)
    if getattr(part, "backend", None) == "torchvision":
        kind = getattr(transformers, f"{type(part).__name__}Pil", None)
        if kind is None:  # transformers has it for torchvision alone
            return processor
        other = kind.from_dict(part.to_dict())
    elif getattr(part, "use_transformers_backend", False):
        # mlx-vlm's, which asks transformers where there is torch
        other = copy.copy(part)
        other.use_transformers_backend = False
    else:
        return processor
    processor = copy.copy(processor)
    processor.image_processor = other
    return processor


def without_text_options(processor: Any) -> Any:
    """Return the processor, or a copy whose image processor ignores tokenizer options.

    mlx-vlm passes ``padding=True`` on (utils.py:1766; llava/processing_llava.py:90), and transformers 5 raises
    TypeError for it.
    """
    part: Any = getattr(processor, "image_processor", None)
    if not isinstance(part, BaseImageProcessor):
        return processor
    theirs = type(part)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        known = {
            name: value
            for name, value in options.items()
            if name not in OF_THE_TOKENIZER
        }
        return theirs.__call__(self, *args, **known)

    processor, part = copy.copy(processor), copy.copy(part)
    part.__class__ = type(
        theirs.__name__, (theirs,), {"__call__": call, "__module__": theirs.__module__}
    )
    processor.image_processor = part
    return processor


#: Whether this thread's prompt has its special tokens already.
_prompt = threading.local()


@contextmanager
def no_special_tokens(holds: bool) -> Iterator[None]:
    """Have tokenizers of ``with_switched_tokens`` add nothing within the block, if ``holds``."""
    before, _prompt.is_whole = getattr(_prompt, "is_whole", False), holds
    try:
        yield
    finally:
        _prompt.is_whole = before


class SwitchedTokens:
    """Base class of tokenizers whose special tokens ``no_special_tokens`` switches off.

    Most processors cannot be told: they call the tokenizer with its default, which adds a beginning to the template's own.
    """

    def _encode_plus(
        self, *args: Any, add_special_tokens: bool = True, **options: Any
    ) -> Any:
        adds = add_special_tokens and not getattr(_prompt, "is_whole", False)
        return super()._encode_plus(*args, add_special_tokens=adds, **options)  # type: ignore[misc]


def with_switched_tokens(processor: Any) -> Any:
    """Return a copy whose tokenizer ``no_special_tokens`` reaches."""
    tokenizer = getattr(processor, "tokenizer", processor)
    is_one = isinstance(tokenizer, PreTrainedTokenizerBase)
    if not is_one or isinstance(tokenizer, SwitchedTokens):
        return processor
    kind: Any = type(tokenizer)
    switched = copy.copy(tokenizer)
    switched.__class__ = type(
        kind.__name__, (SwitchedTokens, kind), {"__module__": kind.__module__}
    )
    if tokenizer is processor:
        return switched
    processor = copy.copy(processor)
    processor.tokenizer = switched
    return processor


def without_special_tokens(processor: Any) -> Any:
    """Return a copy for a family whose class in transformers adds none of itself (its ``text_kwargs``)."""
    processor = copy.copy(processor)
    processor.adds_special_tokens = False
    return processor


def with_stops(processor: Any, detokenizer: Any, config: Any) -> Any:
    """Add the detokenizer and stop ids that mlx-vlm's loops expect."""
    tokenizer = getattr(processor, "tokenizer", processor)
    processor.detokenizer = detokenizer(tokenizer)
    further = getattr(processor, "additional_eos_token_ids", ())
    stops = StoppingCriteria(
        getattr(config, "eos_token_id", None),
        tokenizer,
        additional_eos_token_ids=further,
    )
    tokenizer.stopping_criteria = stops
    return processor


def evaluate_held(processor: Any) -> None:
    """Evaluate a processor's mlx arrays on their thread, as MLX requires."""
    held = _without_vocabulary(processor)
    mx.eval(arrays_of([held, *map(_without_vocabulary, held.values())]))


def _without_vocabulary(part: Any) -> dict[str, Any]:
    """Return an object's attributes without a tokenizer's hundreds of thousands of words, among which is no array."""
    return {
        name: value
        for name, value in getattr(part, "__dict__", {}).items()
        if name not in _MADE_OF
    }


def silence_lengths(tokenizer: Any) -> None:
    """Keep a tokenizer and its copies from warning of indexing errors: a prompt's length is checked by the context.

    Tokenizers compare with ``model_max_length``, which many checkpoints have from a smaller model.
    """
    said = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(said, dict):
        said["sequence-length-is-longer-than-the-specified-maximum"] = True


def copy_for_thread(part: Any) -> Any:
    """Copy a processor or tokenizer without mlx-vlm's detokenizer, which cannot be copied (AttributeError).

    The copy has the original's vocabulary, which nothing changes: a copy of it is written as JSON and parsed again.
    """
    memo = _memo_of(part)
    memo |= _memo_of(getattr(part, "tokenizer", None))
    return copy.deepcopy(part, memo)


def _memo_of(owner: Any) -> dict[int, Any]:
    """Return what takes the place of an object's parts in a copy of it, by their ids."""
    memo: dict[int, Any] = {}
    held = getattr(owner, "__dict__", {})
    detokenizer = held.get("detokenizer")
    if detokenizer is not None:
        memo[id(detokenizer)] = None
    backend = held.get("_tokenizer")
    if isinstance(backend, Tokenizer):
        twin = _with_same_vocabulary(backend)
        if twin is not None:
            memo[id(backend)] = twin
    for name in _MADE_OF:
        made_of = held.get(name)
        if isinstance(made_of, (dict, list)):
            memo[id(made_of)] = made_of
    return memo


def _with_same_vocabulary(backend: Tokenizer) -> Tokenizer | None:
    """Return a tokenizer of its own settings over the same vocabulary; None if it would not be equal."""
    twin = Tokenizer(backend.model)
    for name in _TOKENIZER_PARTS:
        step = getattr(backend, name)
        if step is not None:
            setattr(twin, name, step)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[at] for at in sorted(added)])
    if backend.truncation is not None:
        twin.enable_truncation(**backend.truncation)
    if backend.padding is not None:
        twin.enable_padding(**backend.padding)
    twin.encode_special_tokens = backend.encode_special_tokens
    # Tokens that were added with gaps between their ids would get others.
    has_same_ids = twin.get_added_tokens_decoder().keys() == added.keys()
    has_same_size = twin.get_vocab_size() == backend.get_vocab_size()
    if has_same_ids and has_same_size:
        return twin
    return None


#: Levels of nested objects whose settings count.
_DEPTH = 3


def settings_of(processor: Any) -> str:
    """Return all plain settings but the tokenizer's, as comparable text."""
    return repr(_settings(processor, _DEPTH))


def _settings(owner: Any, depth: int) -> dict[str, Any]:
    """Return an object's plain settings and, ``depth`` levels down, those of its parts."""
    if isinstance(owner, (PreTrainedTokenizerBase, type)):
        return {}
    held = dict(getattr(owner, "__dict__", {}))
    held.pop("tokenizer", None)
    held.pop("detokenizer", None)
    plain: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for name, value in held.items():
        if _is_plain(value):
            plain[name] = value
            continue
        settings = _settings(value, depth - 1) if depth else {}
        if settings:
            parts[name] = settings
    return plain | parts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, Enum, NoneType)):
        return True
    if isinstance(value, np.ndarray):
        return value.size <= 64  # means and deviations
    if is_dataclass(value) and not isinstance(value, type):  # transformers' sizes
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, set)):
        return False
    return all(map(_is_plain, value))


#: Tokenizer methods that release the GIL, or change the underlying library's settings.
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


#: Tokenizer options that allow a shortened text.
_PLAIN_OPTIONS = frozenset(
    {
        "padding",
        "padding_side",
        "add_special_tokens",
        "return_tensors",
        "return_token_type_ids",
    }
)
#: Placeholders from which a text is shortened.
_MANY = 64


def _tokens_apart(tokenizer: Any) -> dict[str, int]:
    """Return the added tokens that are found whatever stands around them, and their ids."""
    if not getattr(tokenizer, "is_fast", False):
        return {}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): at for at, token in added.items() if _stands_apart(token)}


def _stands_apart(token: Any) -> bool:
    depends = (token.lstrip, token.rstrip, token.single_word, token.normalized)
    return not any(depends)


class PlaceholderRuns:
    """Tokenizes one placeholder per run, then repeats it.

    Tokenizing thousands dominates chats with known pictures.
    """

    def __init__(self, processor: Any) -> None:
        tokenizer = getattr(processor, "tokenizer", processor)
        apart = _tokens_apart(tokenizer)
        named = itertools.product(
            (processor, tokenizer), ("image_token", "video_token")
        )
        words = [getattr(owner, name, None) for owner, name in named]
        self._ids = {word: at for word, at in apart.items() if word in words}
        runs = [f"(?:{re.escape(word)})+" for word in self._ids]
        self._pattern = re.compile("|".join(runs) or "(?!)")
        self._longest = max(map(len, self._ids), default=1)

    def call(
        self, method: Callable[..., Any], text: Any, options: dict[str, Any]
    ) -> BatchEncoding | None:
        """Call the method with a shortened text; None if inapplicable."""
        only = text[0] if isinstance(text, list) and len(text) == 1 else text
        if not isinstance(only, str) or not self._may_shorten(options):
            return None
        runs = list(map(re.Match.group, self._pattern.finditer(only)))
        num_characters = sum(map(len, runs))
        if num_characters < _MANY * self._longest:
            return None
        short = self._pattern.sub(self._shortened, only)
        found = method([short], **{**options, "return_tensors": None})
        repeats = self._repeats(found["input_ids"][0], runs)
        if repeats is None:
            return None
        kind = options.get("return_tensors")
        is_bare = isinstance(text, str) and kind is None
        data: dict[str, Any] = {}
        for name, values in found.items():
            repeated = np.repeat(np.array(values), repeats, axis=1).tolist()
            data[name] = repeated[0] if is_bare else repeated
        return BatchEncoding(data, tensor_type=kind)

    def _repeats(self, token_ids: Sequence[int], runs: list[str]) -> np.ndarray | None:
        """Return how often each token of a shortened text stands in the whole one (N,); None if they do not match."""
        ids = np.array(token_ids)
        places = np.flatnonzero(np.isin(ids, list(self._ids.values())))
        if len(places) != len(runs):
            return None
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = [len(run) // len(self._word_of(run)) for run in runs]
        return repeats

    def _shortened(self, run: re.Match[str]) -> str:
        return self._word_of(run.group())

    @staticmethod
    def _may_shorten(options: dict[str, Any]) -> bool:
        is_plain = options.keys() <= _PLAIN_OPTIONS
        return is_plain and options.get("padding") in (None, False, True)

    def _word_of(self, run: str) -> str:
        """Return the placeholder that a run repeats."""
        return next(filter(run.startswith, self._ids))


class ProcessorCopier:
    """Copies a processor for threads.

    All share one tokenizer, which serves one call at a time: a copy of it takes tens of megabytes and up to a second.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._runs = PlaceholderRuns(processor)
        self._lock = threading.RLock()

    def copy(self) -> Any:
        """Return a processor for one thread."""
        theirs = type(self._tokenizer)
        calls: dict[str, Any] = {"__module__": theirs.__module__}
        for name in _TOKENIZES:
            method = getattr(theirs, name, None)
            if method is not None:
                calls[name] = self._one_at_a_time(method)
        if "__call__" in calls:
            calls["__call__"] = self._by_runs(calls["__call__"])
        guarded: Any = object.__new__(type(theirs.__name__, (theirs,), calls))
        vars(guarded).update(vars(self._tokenizer))
        memo: dict[int, Any] = {id(self._tokenizer): guarded}
        detokenizer = vars(self._processor).get("detokenizer")
        if detokenizer is not None:
            # two lists of the vocabulary's length, which no thread uses
            memo[id(detokenizer)] = detokenizer
        return copy.deepcopy(self._processor, memo)

    def _by_runs(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(tokenizer: Any, text: Any = None, *args: Any, **options: Any) -> Any:
            bound = functools.partial(method, tokenizer)
            found = None if args else self._runs.call(bound, text, options)
            if found is None:
                return bound(text, *args, **options)
            return found

        return call

    def _one_at_a_time(self, method: Callable[..., Any]) -> Callable[..., Any]:
        lock = self._lock

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                return method(*args, **options)

        return call
