"""Failures with a medium, made into the error of its request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlm_batch.errors import InvalidRequest, describe
from vlm_batch.inputs.fetch import OperationCancelled, Unreadable


def exceeds(value: float, most: float | None) -> bool:
    """Whether a value is above a bound; None bounds nothing."""
    return most is not None and value > most


@contextmanager
def refused_as(
    kind: type[InvalidRequest],
    what: str,
    say: Callable[[BaseException], str] = describe,
) -> Iterator[None]:
    """Raise what foreign code raises in the block as ``kind``: what went wrong, and why.

    A request's own errors, its cancellation, and Ctrl-C in the main thread pass. SystemExit does not.
    """
    try:
        yield
    except (InvalidRequest, OperationCancelled):
        raise
    except BaseException as error:
        _pass_on_ctrl_c(error)
        raise kind(f"{what}: {say(error)}") from error


@contextmanager
def unread_as(kind: type[InvalidRequest]) -> Iterator[None]:
    """Raise a source's ``Unreadable`` as ``kind``."""
    try:
        yield
    except Unreadable as error:
        raise kind(error.reason, advice=error.advice) from error


def _pass_on_ctrl_c(error: BaseException) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(error, KeyboardInterrupt):
        raise error
