"""Checks of what a request gives as it is: one way to ask, tokens, processed inputs, text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

import numpy as np

from vlm_batch.arrays import as_numpy
from vlm_batch.checks import demand
from vlm_batch.errors import (
    InvalidCache,
    InvalidImage,
    InvalidPrompt,
    InvalidRequest,
    shown,
)
from vlm_batch.inputs.fetch import Unreadable, local_path
from vlm_batch.inputs.images import names_picture, picture_suffixes
from vlm_batch.inputs.refusals import refused_as
from vlm_batch.inputs.template import refuse
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import FetchPolicy, ImageInput, Request

#: Ways to say what is asked, of which a request has one.
_WAYS = ("prompt", "messages", "token_ids", "inputs")
#: Fields of a request, the type of each, what is right, and the error of another type.
_TYPES: tuple[tuple[str, type, str, type[InvalidRequest]], ...] = (
    (
        "prompt",
        str,
        "text (str), and comes after the pictures: submit(images, prompt)",
        InvalidPrompt,
    ),
    ("inputs", Mapping, "a mapping of names to arrays", InvalidPrompt),
    (
        "cache",
        PromptCache,
        "a PromptCache: Result.cache, or PromptCache.load(path)",
        InvalidCache,
    ),
)


def check_types(request: Request, policy: FetchPolicy) -> None:
    """Refuse a request that asks in no way or in several, or with values of other types."""
    given = [name for name in _WAYS if getattr(request, name) is not None]
    if not given:
        raise _one_is_needed(f"none{_hint_of_text(request)}")
    if len(given) > 1:
        raise _one_is_needed(", ".join(given))
    for name, kind, right, error in _TYPES:
        value = getattr(request, name)
        is_right = isinstance(value, (kind, NoneType))
        demand(is_right, error, name, value, right)
    if request.prompt is not None:
        _check_places(request.prompt, request.images, request.videos, policy)


def _one_is_needed(given: str) -> InvalidPrompt:
    ways = "prompt, messages, token_ids and inputs"
    return InvalidPrompt(f"exactly one of {ways} is needed; given: {given}")


def _hint_of_text(request: Request) -> str:
    """Say what is wrong where one text was given, which went to the pictures."""
    image = _only_text(request.images)
    if image is None:
        return ""
    return f" (images is {shown(image)}; text alone is prompt=...)"


def _only_text(images: Sequence[ImageInput]) -> str | None:
    """Return the name of the one picture; None if there are others, or it has none."""
    if len(images) != 1:
        return None
    if isinstance(images[0], str):
        return images[0]
    return None


def check_template(request: Request) -> None:
    """Refuse a chat template's arguments where the prompt needs none, and messages without a template."""
    if request.template is None:
        if request.messages is not None:
            raise InvalidPrompt("template is None; messages need the chat template")
        return
    if request.inputs is not None or request.token_ids is not None:
        refuse(
            request.template,
            "the prompt is final already; a chat template's arguments go with prompt or messages",
        )


def check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"the text holds {text[error.start]!r} at character {error.start:,}, half of a surrogate pair: it is no "
            "Unicode text (what read it may have guessed another encoding)"
        ) from error


def _check_places(
    prompt: str,
    images: Sequence[ImageInput],
    videos: Sequence[Any],
    policy: FetchPolicy,
) -> None:
    """Refuse a picture in the prompt's place."""
    is_alone = not images and not videos
    if is_alone and _is_file_name(prompt):
        raise InvalidPrompt(
            f"prompt is {shown(prompt)}, the name of a picture: that is images=, and prompt= asks about it"
        )
    image = _only_text(images)
    if image is None or names_picture(image) or not names_picture(prompt):
        return
    # nobody is told what is where nothing may be read
    with suppress(Unreadable):
        if not local_path(image, policy).exists():
            raise InvalidImage(
                f"images is {shown(image)}, which is no file, and prompt is {shown(prompt)}: have they changed places? "
                "It is submit(images, prompt)"
            )


def _is_file_name(prompt: str) -> bool:
    """Whether a prompt is one word that ends as a picture's file does, with or without a query."""
    name = prompt.lower().partition("?")[0]
    return name.endswith(tuple(picture_suffixes())) and len(name.split()) == 1


def checked_ids(given: Any, image_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Check a list or array of token ids, (L,) or (1, L)."""
    ids = tuple(map(int, _row_of(given).tolist()))
    for token in ids:
        is_one = 0 <= token < 2**31
        if not is_one and token not in image_token_ids:
            raise InvalidPrompt(
                f"token_ids holds {token}; token ids are integers of at least 0"
            )
    return ids


def _row_of(given: Any) -> np.ndarray:
    """Return integers as an array (L,), of at least one. Raises InvalidPrompt."""
    right = "a list or array (L,) of integers"
    with refused_as(InvalidPrompt, f"token_ids is {shown(given)}; it must be {right}"):
        array = np.asarray(given)
    if array.size == 0:
        raise InvalidPrompt("token_ids is empty")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    are_whole = array.dtype.kind in "iu" and not _holds_truths(given)
    is_right = are_whole and array.ndim == 1
    demand(is_right, InvalidPrompt, "token_ids", given, right)
    return array


def _holds_truths(given: Any) -> bool:
    """Whether a list has True or False, which numpy would take for numbers."""
    return isinstance(given, Sequence) and bool in set(map(type, given))


def checked_inputs(inputs: Mapping[str, Any], has_media: bool) -> dict[str, Any]:
    """Check a processor's output, and copy it: the caller's buffers stay the caller's."""
    if has_media:
        raise InvalidPrompt(
            "inputs= are processed already: their pictures belong into pixel_values, not into images"
        )
    with refused_as(InvalidPrompt, "inputs= cannot be copied"):
        arrays = copy.deepcopy(as_numpy(inputs))
    if "input_ids" not in arrays:
        raise InvalidPrompt("inputs= needs input_ids of shape (1, L)")
    for name, value in arrays.items():
        _check_is_numbers(name, value)
    _check_input_ids(arrays["input_ids"])
    return arrays


def _check_is_numbers(name: str, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        raise InvalidPrompt(
            f"inputs= has {name} of {value.dtype}; arrays of real numbers are needed"
        )


def _check_input_ids(ids: Any) -> None:
    _check_ids_are(isinstance(ids, np.ndarray), "as an array (1, L)", ids)
    is_row = ids.shape == (1, max(1, ids.size))
    _check_ids_are(is_row, "of shape (1, L), one request a submit", ids.shape)
    _check_ids_are(ids.dtype.kind in "iu", "of integers", ids.dtype)
    if (ids.astype(np.int32) != ids).any():  # MLX would cut them, too
        raise InvalidPrompt("inputs= has input_ids beyond 32 bits")


def _check_ids_are(is_right: bool, right: str, given: Any) -> None:
    if not is_right:
        raise InvalidPrompt(f"inputs= needs input_ids {right}; given: {shown(given)}")
