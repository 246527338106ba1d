"""Errors that the library raises or puts into results.

::

    VLMBatchError
    ├── InvalidRequest (ValueError)
    │   ├── InvalidParameters
    │   ├── InvalidPrompt
    │   ├── InvalidImage
    │   ├── InvalidVideo
    │   ├── InvalidAudio
    │   ├── PromptTooLong
    │   └── InvalidCache
    ├── OutOfMemory (MemoryError)
    │   └── DoesNotFit          also a PromptTooLong
    ├── UnsupportedModel (ValueError)
    ├── BatcherClosed (RuntimeError)
    └── RequestFailed (RuntimeError)

``submit`` raises what can be known at once. Later errors are in ``Result.error``.
"""

from __future__ import annotations

import re
import traceback

#: Messages of the RuntimeErrors that MLX's allocators raise on CPUs, Metal and CUDA.
_NO_MEMORY = re.compile(
    r"\[(?:metal::)?malloc|unable to allocate|out of memory|insufficient memory|maximum allowed buffer|OutOfMemory|"
    # the last of cuBLAS and cuDNN
    r"memory allocation (?:of .* )?failed|_ALLOC_FAILED",
    re.IGNORECASE,
)


class VLMBatchError(Exception):
    """Base class of this library's errors."""


class InvalidRequest(VLMBatchError, ValueError):
    """The request cannot be answered. Its message says what is wrong and what would be right.

    Args:
        advice: end of the message, about this library's arguments; other front ends omit it.
    """

    def __init__(self, reason: str = "", *, advice: str = "") -> None:
        super().__init__(reason + advice)
        self.reason = reason
        self.advice = advice


class InvalidParameters(InvalidRequest):
    """A parameter of sampling, a video, a recording or a FetchPolicy is out of range."""


class InvalidPrompt(InvalidRequest):
    """The prompt is empty, cannot be rendered, or does not match its media."""


class InvalidImage(InvalidRequest):
    """A picture is missing, unreadable, too large, or unsupported."""


class InvalidVideo(InvalidRequest):
    """A video is missing, unreadable, empty, too large, or unsupported."""


class InvalidAudio(InvalidRequest):
    """A recording is missing, unreadable, empty, too long, or unsupported."""


class PromptTooLong(InvalidRequest):
    """The prompt exceeds the model's context or the batcher's limit."""


class InvalidCache(InvalidRequest):
    """The prompt cache is damaged, used already, or of another model or settings."""


class OutOfMemory(VLMBatchError, MemoryError):
    """The request needs more memory than there is, even alone."""


class DoesNotFit(PromptTooLong, OutOfMemory):
    """The prompt's keys and values never fit into ``max_bytes``."""


class UnsupportedModel(VLMBatchError, ValueError):
    """The model type is unknown, or refused for a reason."""


class BatcherClosed(VLMBatchError, RuntimeError):
    """The batcher is closed."""


class RequestFailed(VLMBatchError, RuntimeError):
    """A request ended with an error (``Result.raise_for_error``)."""


class RaisedAt(Exception):
    """The traceback of a result's exception, as text."""

    def __str__(self) -> str:
        return f"\n{super().__str__()}"


#: Most characters of a value in a message, of a result's ``error``, and of a traceback.
SHOWN_CHARACTERS, DESCRIBED_CHARACTERS, TRACEBACK_CHARACTERS = 100, 2000, 20_000


def let_go(error: BaseException) -> BaseException:
    """Replace an exception's traceback and context by text; return it.

    In a long-lived result, its frames would keep the engine's arrays alive.
    """
    if error.__traceback__ is None and error.__context__ is None:
        return error
    try:
        text = "".join(
            traceback.format_exception(type(error), error, error.__traceback__)
        )
    except BaseException:  # an error's own text may raise anything
        text = ""
    values = {
        "__traceback__": None,
        "__context__": None,
        "__cause__": RaisedAt(printable(text[-TRACEBACK_CHARACTERS:])),
    }
    for name, value in values.items():
        # works for classes that forbid it, too
        BaseException.__setattr__(error, name, value)
    if isinstance(error, AttributeError):
        error.obj = None  # the object without the attribute
    return error


def describe(error: BaseException) -> str:
    """Return an error as one line. Never raises."""
    try:
        text = printable(" ".join(str(error).split()))
    except BaseException:  # an error's own text may raise anything
        text = ""
    if len(text) > DESCRIBED_CHARACTERS:
        text = f"{text[:DESCRIBED_CHARACTERS]}... ({len(text):,} characters)"
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


def shown(value: object) -> str:
    """Return a value as one short line. Never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of thousands of digits, an object with a defect
        return f"a value of type {type(value).__name__} that cannot be shown"
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[: SHOWN_CHARACTERS // 2]}... ({len(text):,} characters)"
    return text


def printable(text: str) -> str:
    """Escape surrogates, as in file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )
