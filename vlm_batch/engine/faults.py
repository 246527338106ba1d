"""Exceptions, sorted by whose fault they are."""

from __future__ import annotations

import threading
import traceback

import mlx.core as mx

from vlm_batch.arrays import num_bytes
from vlm_batch.engine.row import Row
from vlm_batch.errors import OutOfMemory, describe


def is_users_own(error: BaseException) -> bool:
    """Whether it is the user's Ctrl-C, on the thread that gets it, and no row's fault."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def let_go(error: BaseException) -> None:
    """Have an exception hold nothing of the calls that it came through but where they were: it lives as long as its result."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        traceback.clear_frames(here.__traceback__)
        here = here.__cause__ or here.__context__


def raised_in(error: BaseException) -> BaseException:
    """An exception without the frame that caught it, which cannot be cleared while it runs."""
    found = error.__traceback__
    return error if found is None else error.with_traceback(found.tb_next)


def too_large(row: Row, error: BaseException) -> OutOfMemory:
    """The end of a row that found no memory though nobody was beside it, with the numbers."""
    said = f"the request does not fit into memory, even alone: {prompt_size(row)} and up to {row.params.max_tokens} of answer"
    return OutOfMemory(f"{said}; MLX holds {mx.get_active_memory() / 1e6:,.0f} MB beside it ({describe(error)})")


def prompt_size(row: Row) -> str:
    """A row's prompt in numbers, as far as they are known."""
    if row.facts.length:
        return f"a prompt of {row.facts.length} tokens ({row.facts.image_tokens} of pictures)"
    return f"a prompt of {num_bytes(row.given) / 1e6:,.1f} MB"
