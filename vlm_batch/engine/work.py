"""Work of a step: what the scheduler plans, and what a stage gives back where it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from vlm_batch.errors import let_go

if TYPE_CHECKING:
    from vlm_batch.engine.row import Row

T = TypeVar("T")


class Kind(Enum):
    """The stages whose work fills a step."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Work:
    """One call of a model: the rows in it, by id, and the prompt positions [begin, end) that it computes of each of them."""

    kind: Kind
    rows: tuple[str, ...]
    begin: int = 0
    end: int = 0


@dataclass
class Part:
    """A launched part of a work: the logits (R, V) from which its rows' tokens are chosen, where it came to that, and what
    else to wait for. ``is_held``: the choice goes by the rows' last tokens, which have to be read first."""

    rows: Sequence[Row]
    logits: mx.array | None = None
    arrays: list[mx.array] = field(default_factory=list)
    is_held: bool = False

    def without(self, row: Row) -> list[Part]:
        """The part without one of its rows: none, if it was the only one."""
        places = [place for place, one in enumerate(self.rows) if one is not row]
        if len(places) == len(self.rows) or self.logits is None:
            return [self]
        rows = [self.rows[place] for place in places]
        return [replace(self, rows=rows, logits=self.logits[mx.array(places)])] if rows else []


@dataclass(frozen=True)
class Failed:
    """Rows whose work raised. ``is_shared``: it wrote arrays that are not one row's own, so it is nobody's fault yet."""

    rows: Sequence[Row]
    error: BaseException
    is_shared: bool = False


def attempt(
    rows: Sequence[Row], work: Callable[..., T], *arguments: Any, is_shared: bool = False, **how: Any
) -> T | Failed:
    """Do some rows' work; its result, or ``Failed``. The user's Ctrl-C, on the thread that gets it, is no row's fault."""
    try:
        return work(*arguments, **how)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        # the calls that it came through hold what they had made, which others need the room of
        return Failed(rows, let_go(error), is_shared)
