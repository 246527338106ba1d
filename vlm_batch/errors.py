"""Every error that the library raises or puts into a result.

::

    VLMBatchError
    ├── InvalidRequest (ValueError)     what was asked cannot be done; raised at submit where it can be known there
    │   ├── InvalidParameters           a sampling parameter out of range
    │   ├── InvalidPrompt               empty, not renderable, or not matching its pictures
    │   ├── InvalidImage                missing, unreadable, not a picture, too large, or for a family that takes none or one
    │   ├── InvalidVideo                missing, unreadable, damaged, empty, too large, or for a family that takes none
    │   ├── PromptTooLong               longer than the model's context or the batcher's limit
    │   └── InvalidCache                a prompt cache of another model or other settings, continued already, or damaged
    ├── OutOfMemory (MemoryError)       a request that does not fit even alone
    │   └── DoesNotFit                  by the batcher's ``max_bytes``; a PromptTooLong, too
    ├── UnsupportedModel (ValueError)   a model type that is not known, or is refused with a reason
    ├── BatcherClosed (RuntimeError)    submitted to a closed batcher
    └── RequestFailed (RuntimeError)    a request that ended with an error, raised by ``Result.raise_for_error``
"""

from __future__ import annotations

import re
import traceback

#: What MLX's allocators say on CPUs, Metal and CUDA: they raise RuntimeErrors.
_NO_MEMORY = re.compile(
    r"\[(?:metal::)?malloc|unable to allocate|out of memory|insufficient memory|maximum allowed buffer|OutOfMemory|"
    r"memory allocation (?:of .* )?failed|_ALLOC_FAILED",  # the last of cuBLAS and cuDNN
    re.IGNORECASE,
)


class VLMBatchError(Exception):
    """The root of every error of this library."""


class InvalidRequest(VLMBatchError, ValueError):
    """The request cannot be answered; the message says what is wrong with it and what would be right.

    The end of the message, ``advice``, speaks of this library's own arguments; ``reason`` is what comes before, for those who
    reach it otherwise.
    """

    def __init__(self, reason: str = "", *, advice: str = "") -> None:
        super().__init__(reason + advice)
        self.reason = reason
        self.advice = advice


class InvalidParameters(InvalidRequest):
    """A sampling parameter is out of range."""


class InvalidPrompt(InvalidRequest):
    """The prompt is empty, cannot be rendered, or does not match its pictures."""


class InvalidImage(InvalidRequest):
    """A picture is missing, unreadable, no picture at all, or larger than the limit."""


class InvalidVideo(InvalidRequest):
    """A video is missing, unreadable, damaged, empty, larger than the limit, or for a model that takes none."""


class PromptTooLong(InvalidRequest):
    """The prompt is longer than the model's context or the batcher's own limit."""


class InvalidCache(InvalidRequest):
    """A prompt cache cannot be continued here: another model's, made with other settings, used already, or damaged."""


class OutOfMemory(VLMBatchError, MemoryError):
    """A request needs more memory than there is for it alone; the message has the numbers."""


class DoesNotFit(PromptTooLong, OutOfMemory):
    """A prompt is so long that its keys and values never fit into ``max_bytes``; the message has the numbers."""


class UnsupportedModel(VLMBatchError, ValueError):
    """The model type is not known here, or is refused with its reason."""


class BatcherClosed(VLMBatchError, RuntimeError):
    """The batcher was closed before the request could be taken."""


class RequestFailed(VLMBatchError, RuntimeError):
    """A request ended with an error; the message is the result's ``error``."""


class RaisedAt(Exception):
    """The traceback of a result's exception, as text: the exception's ``__cause__``."""

    def __str__(self) -> str:
        return f"\n{super().__str__()}"


#: Characters at most of a value that a message shows, of a result's ``error``, and of its exception's traceback.
SHOWN_CHARACTERS, DESCRIBED_CHARACTERS, TRACEBACK_CHARACTERS = 100, 2000, 20_000


def let_go(error: BaseException) -> BaseException:
    """Replace the traceback of an exception, and the exceptions that led to it, by their text; returns the exception.

    A result's exception lives as long as the result. Its frames would hold their callers' frames, with all that is in them:
    the arrays of a step, the engine and its model.
    """
    if error.__traceback__ is None and error.__context__ is None:
        return error
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # it ends its request, and no other
        text = ""
    values = {
        "__traceback__": None,
        "__context__": None,
        "__cause__": RaisedAt(printable(text[-TRACEBACK_CHARACTERS:])),
    }
    for name, value in values.items():
        BaseException.__setattr__(error, name, value)  # also where the error's own class allows no change
    if isinstance(error, AttributeError):
        error.obj = None  # the object without the attribute
    return error


def describe(error: BaseException) -> str:
    """An error as one line for a result: its type and its text. Raises nothing, even if the error's own text raises."""
    try:
        text = printable(" ".join(str(error).split()))
    except BaseException:  # it ends its request, and no other
        text = ""
    if len(text) > DESCRIBED_CHARACTERS:
        text = f"{text[:DESCRIBED_CHARACTERS]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: object) -> str:
    """A value for an error message, of one line and bounded length. Raises nothing, whatever its ``repr`` raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of thousands of digits, an object with a defect
        return f"a value of type {type(value).__name__} that cannot be shown"
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[: SHOWN_CHARACTERS // 2]}... ({len(text):,} characters)"
    return text


def printable(text: str) -> str:
    """Text that can be written to every file and terminal: surrogates are escaped, as in names of files that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory, for which the row that met it need not be to blame."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))
