"""Work of a step, its parts and failures, and what a row may give to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import mlx.core as mx

from vlm_batch.errors import describe, let_go
from vlm_batch.records import Encoded

if TYPE_CHECKING:
    from vlm_batch.engine.row import Row

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A chunk to prefill: positions [begin, end) of rows' prompts."""

    rows: tuple[str, ...]
    begin: int
    end: int


@dataclass
class Part:
    """Launched work of some rows."""

    rows: Sequence[Row]
    # (R, V) for their next tokens, if the work gives any
    logits: Any = None
    arrays: list[mx.array] = field(default_factory=list)  # further arrays to wait for
    is_held: bool = False  # the choice depends on tokens that must be read first
    # K drafted tokens of the only row, whose logits are (1 + K, V)
    ahead: tuple[int, ...] = ()


#: A row's part, and what it launches.
Made: TypeAlias = "tuple[Part, Sequence[Any]]"


@dataclass(frozen=True)
class Failed:
    """Rows whose work raised. ``is_shared``: it wrote shared arrays; the culprit is unknown."""

    rows: Sequence[Row]
    error: BaseException
    is_shared: bool = False


def attempt(
    rows: Sequence[Row],
    work: Callable[..., T],
    *arguments: Any,
    is_shared: bool = False,
) -> T | Failed:
    """Run rows' work. Returns its result or ``Failed``. Ctrl-C on the main thread is raised."""
    try:
        return work(*arguments)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise
        # frees the arrays that the frames of its traceback hold
        return Failed(rows, let_go(error), is_shared)


def attempt_each(
    rows: Sequence[Row], work: Callable[..., Sequence[T]], *arguments: Any
) -> Sequence[T | Failed]:
    """Run rows' shared work, which makes several things. If it raises, its failure is the only one."""
    made = attempt(rows, work, *arguments, is_shared=True)
    return [made] if isinstance(made, Failed) else made


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def note_again(num_rows: int, error: BaseException) -> None:
    """Log that shared work raised and is done again, each row's alone.

    Nobody gets the error if all rows succeed then, as after a fault of the engine's own.
    """
    logger.warning(
        "a step failed; %d requests are computed again: %s",
        num_rows,
        describe(error),
        exc_info=error,
    )


def launch(made: Iterable[Made | Failed]) -> list[Part | Failed]:
    """Launch parts' arrays in one call, since each call costs on a GPU; if that raises, each part's alone."""
    found = list(made)
    arrays: list[Sequence[Any]] = []
    for one in found:
        if not isinstance(one, Failed):
            arrays.append(one[1])
    failed = attempt([], mx.async_eval, arrays)
    is_done = failed is None
    return [_launched(one, is_done=is_done) for one in found]


def _launched(made: Made | Failed, *, is_done: bool) -> Part | Failed:
    if isinstance(made, Failed):
        return made
    part, arrays = made
    if is_done:
        return part
    return attempt(part.rows, mx.async_eval, arrays) or part


# What a row's own code gives, before it is joined with other rows' arrays ----------------------------------------------


def checked_logits(found: Any, shape: tuple[int, ...]) -> mx.array:
    """Return a logits processor's result, at most float32 wide. Raises ValueError for another shape, or no real numbers."""
    if not isinstance(found, mx.array) or found.shape != shape:
        said = found.shape if isinstance(found, mx.array) else type(found).__name__
        raise ValueError(
            f"a logits processor must return logits of shape {shape}, not {said}"
        )
    if not mx.issubdtype(found.dtype, mx.floating):
        raise ValueError(
            f"a logits processor must return logits of a floating type, not {found.dtype}"
        )
    return found.astype(mx.float32) if found.dtype == mx.float64 else found


def check_encoded(encoded: Encoded) -> None:
    """Raise ValueError unless a prompt's embeddings are real numbers (1, L, D)."""
    embeds = encoded.inputs_embeds
    is_row = embeds.shape[:-2] == (1,)
    is_real = mx.issubdtype(embeds.dtype, mx.floating)
    if not is_row or not is_real or not encoded.length:
        raise ValueError(
            f"the prompt's embeddings have the shape {embeds.shape} and the type {embeds.dtype}; they must be real numbers "
            "(1, L, D)"
        )
