"""What rows take over from earlier rows, and what they leave for later ones: prompt caches and the prefix cache.

The generator calls it as a row goes along; without a prefix cache it does nothing for a row that neither continues a
cache nor gives one back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from vlm_batch.caches.layers import is_whole_kind
from vlm_batch.engine.batch import Row, Traces
from vlm_batch.errors import InvalidCache
from vlm_batch.runtime.memory import give_back
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.files import Identity
from vlm_batch.store.prefix import Match, PrefixCache, match, thin
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import SavedRow, common_length, save_constant, save_row, save_snapshot
from vlm_batch.types import PromptKey, Status

#: Beginnings of fewer tokens are not kept or looked for at all; those of this many always are.
MIN_TOKENS, ALWAYS_WORTH = 8, 64
#: At least so many tokens lie between two snapshots of a row that chunk ends leave (turn boundaries always do).
SNAPSHOT_STRIDE = 512


#: Bytes that are kept for later requests: saved rows and vision features together.
DEFAULT_CACHE_BYTES = 2**30
#: Bytes of files that saved rows may take, where a directory is given for them.
DEFAULT_DIRECTORY_BYTES = 8 * 2**30


def worth(length: int) -> int:
    """How many first positions a prompt must have in common with an earlier one to go on from there.

    The few of a chat template save less than prompts of one length do that are prefilled as one array.
    """
    return max(MIN_TOKENS, min(ALWAYS_WORTH, length // 8))


class Recogniser(Protocol):
    """What is asked of an adapter here."""

    @property
    def no_prefix_reuse(self) -> str | None: ...
    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey: ...


@dataclass(frozen=True)
class CacheSettings:
    """Bounds on what is kept for later requests: bytes in memory, and bytes of files in a directory."""

    max_bytes: int = DEFAULT_CACHE_BYTES
    directory: Path | None = None
    directory_bytes: int = DEFAULT_DIRECTORY_BYTES

    def prefix_cache(self, budget: ByteBudget, identity: Identity) -> PrefixCache:
        """An empty one, with the rows of this model and these settings that the directory holds as its second tier."""
        if self.directory is None:
            return PrefixCache(budget)
        return PrefixCache(budget, RowFiles(self.directory, self.directory_bytes, identity))


class Reuse:
    """``identity`` is of the model and the settings that rows are made with here; ``budget`` of all that is kept."""

    def __init__(
        self,
        adapter: Recogniser,
        prefix: PrefixCache | None = None,
        identity: Identity | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self.adapter = adapter
        self.prefix = prefix
        self.budget = budget or (prefix.budget if prefix is not None else ByteBudget(0))
        self.identity = identity or Identity("")
        self._ended: list[SavedRow] = []  # launched, and not waited for yet

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for later requests, vision features included."""
        return self.budget.nbytes

    def close(self) -> None:
        """Write what is to outlive the process, and give back the memory of all that was kept, vision features included."""
        self.settle_ended()
        if self.prefix is not None:
            self.prefix.close()
        self.budget.clear()
        give_back()

    def waits_for(self, row: Row, others: Iterable[Row]) -> bool:
        """Whether one of the rows in prefill will soon leave much more of this one's prompt than there is now."""
        if self.prefix is None or row.encoded is not None:
            return False
        if row.traces is not None and row.traces.continues is not None:
            return False
        try:
            traces = self._traces(row)
        except Exception:  # what is wrong with it is said when it is encoded
            return False
        if traces.key is None:
            return False
        coming = max((self._shared(traces, other) for other in others), default=0)
        if coming < worth(traces.key.length):
            return False
        if traces.known[0] != self.prefix.version:
            found = self.prefix.find(traces.key)
            traces.known = (self.prefix.version, 0 if found is None else found.length)
        return coming >= traces.known[1] + worth(traces.key.length)

    def is_new(self, row: Row) -> bool:
        """Whether a row starts from nothing, so that all of its pictures have to be encoded."""
        if row.traces is not None and row.traces.continues is not None:
            return False
        if self.prefix is None:
            return True
        try:
            key = self._traces(row).key
        except Exception:  # what is wrong with it is said when it is encoded
            return False
        return key is None or self._found(key) is None

    def _shared(self, traces: Traces, other: Row) -> int:
        """How many first positions a prompt has in common with another row's, and could go on from."""
        if other not in traces.shared:
            theirs = None if other.traces is None else other.traces.key
            if traces.key is None or theirs is None:
                return 0
            common = common_length(traces.key.positions, theirs.positions)
            traces.shared[other] = traces.key.before_span(min(common, traces.key.length - 1))
        return traces.shared[other]

    def begin(self, row: Row, fresh: Sequence[Any]) -> int:
        """Give a row its caches: fresh ones, or those of its beginning. Returns how many positions are in them.

        Raises InvalidCache if the cache that it is to continue does not fit its prompt.
        """
        row.cache = list(fresh)
        if row.traces is not None:
            row.traces.shared.clear()
        wanted = row.traces is not None and (row.traces.continues is not None or row.traces.is_returned)
        if self.prefix is None and not wanted:
            return 0
        traces = self._traces(row)
        if traces.key is None:
            if wanted:
                raise InvalidCache(f"this model's conversations have no prompt caches: {self.adapter.no_prefix_reuse}")
            return 0
        found = self._continued(traces) if traces.continues is not None else self._found(traces.key)
        if any(not is_whole_kind(cache) for cache in fresh):
            common = 0 if found is None else found.common
            traces.stops = tuple(sorted({common, *(end for _, end in traces.key.pictures)}))
        if found is None or not found.length:
            return 0
        saved, length = found.row, found.length
        pictures = traces.key.pictures
        num_pictures = sum(end <= length for _, end in pictures)
        row.cache = saved.restore(length, num_pictures if num_pictures == len(pictures) else 0)
        traces.snapshots = {at: snapshot for at, snapshot in saved.snapshots.items() if at <= length}
        traces.logits = saved.logits_at(length) if length == traces.key.length else None
        traces.cached = length
        return length

    def commit(self, row: Row) -> None:
        """The row is encoded: the cache that it continues is spent from now on."""
        if row.traces is not None and row.traces.continues is not None:
            row.traces.continues.take()
            row.traces.continues = None

    def chunk_done(self, row: Row) -> list[mx.array]:
        """Leave a snapshot at a chunk's end, for layers that cannot be cut back to it later. Returns what to evaluate."""
        traces = row.traces
        if traces is None or traces.key is None or row.cache is None or all(map(is_whole_kind, row.cache)):
            return []
        last = max((at for at in traces.snapshots if at <= row.prefilled), default=0)
        if row.prefilled not in traces.stops and row.prefilled - last < SNAPSHOT_STRIDE:
            return []
        return self._snapshot(row, traces, None)

    def prompt_done(self, row: Row, logits: mx.array) -> list[mx.array]:
        """The whole prompt is in the row's caches, and nothing was dropped from them yet: leave them as they are.

        Returns what is to be evaluated; then ``settle`` makes it known.
        """
        traces = row.traces
        if traces is None or traces.key is None or row.cache is None:
            return []
        if traces.key.length != row.prompt_length:  # ids that grew into several positions: these have no keys
            traces.key = None
            if traces.is_returned:
                raise InvalidCache("the family's prompts have more positions than ids: they have no prompt caches")
            return []
        traces.constant = save_constant(row.cache)
        constant = [array for state in traces.constant.values() for array in state.arrays()]
        if traces.cached == row.prompt_length:
            return constant
        arrays = self._snapshot(row, traces, logits) + constant
        if self.prefix is None or row.prompt_length < MIN_TOKENS:
            return arrays
        traces.pending = self._saved(row, traces, row.cache, 0)
        return traces.pending.arrays()

    def settle(self, row: Row) -> None:
        """What a row's last chunk left is evaluated: later rows may have it."""
        if row.traces is not None and row.traces.pending is not None:
            if self.prefix is not None and row.status is not Status.FINISHED:
                self.prefix.store(row.traces.pending)
            row.traces.pending = None

    def _snapshot(self, row: Row, traces: Traces, logits: mx.array | None) -> list[mx.array]:
        assert row.cache is not None
        snapshot = save_snapshot(row.cache, row.prefilled, logits)
        traces.snapshots = thin({**traces.snapshots, row.prefilled: snapshot})
        return snapshot.arrays()

    def wants(self, row: Row) -> bool:
        """Whether a row that leaves is to bring its caches with it."""
        traces = row.traces
        return traces is not None and traces.key is not None and (traces.is_returned or self.prefix is not None)

    def end(self, row: Row) -> PromptCache | None:
        """A row has ended, with its caches; its prompt cache, if it was asked for."""
        traces = row.traces
        if not self.wants(row) or traces is None or row.cache is None:
            return None
        saved = self._saved(row, traces, row.cache, row.num_sampled - 1)
        row.cache = None
        if traces.is_returned:  # another thread may read it
            mx.eval(saved.arrays())
        else:
            mx.async_eval(saved.arrays())
        if self.prefix is not None and saved.length >= MIN_TOKENS:
            self._ended.append(saved)
        return PromptCache(saved, self.identity) if traces.is_returned else None

    def settle_ended(self) -> None:
        """Make known what rows left that ended a step ago: the device has copied it by now, with nothing to wait for."""
        ended, self._ended = self._ended, []
        for saved in ended:
            with contextlib.suppress(RuntimeError):  # no memory for it: then it is not kept
                mx.eval(saved.arrays())
                if self.prefix is not None:
                    self.prefix.store(saved)

    def _saved(self, row: Row, traces: Traces, caches: Sequence[Any], num_answered: int) -> SavedRow:
        assert traces.key is not None
        answer = np.zeros((num_answered, 3), dtype=np.int64)
        answer[:, 0], answer[:, 1:] = row.token_ids[:num_answered], traces.key.answer
        keys = np.concatenate([traces.key.positions, answer])
        return save_row(caches, keys, traces.snapshots, len(traces.key.pictures), traces.constant)

    def _traces(self, row: Row) -> Traces:
        if row.traces is None:
            row.traces = Traces()
        if row.traces.key is None and self.adapter.no_prefix_reuse is None and row.inputs is not None:
            row.traces.key = self.adapter.prompt_key(row.inputs)
        return row.traces

    def _found(self, key: PromptKey) -> Match | None:
        found = self.prefix.find(key) if self.prefix is not None else None
        return None if found is None or found.common < worth(key.length) else found

    def _continued(self, traces: Traces) -> Match:
        """Where the prompt can go on from its user's cache."""
        assert traces.continues is not None and traces.key is not None
        self.identity.check(traces.continues.identity)
        saved = traces.continues.peek()
        if saved.length > traces.key.length:
            raise InvalidCache(
                f"the cache is longer than the prompt: it holds {saved.length} tokens, the prompt has {traces.key.length}"
            )
        found = match(saved, traces.key)
        if not found.length:
            raise InvalidCache(
                f"the prompt does not continue the cache: they differ from position {found.common} on, and the cache "
                f"of {saved.length} tokens cannot be cut back to that"
            )
        return found
