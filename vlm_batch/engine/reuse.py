"""Reuse of keys and values between requests: prompt caches and the prefix cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from vlm_batch.caches.layers import kind_of
from vlm_batch.checks import whole_option
from vlm_batch.engine.overlap import Overlap
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.errors import InvalidCache, describe
from vlm_batch.records import PromptKey
from vlm_batch.runtime.memory import release_memory
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.files import Identity
from vlm_batch.store.pictures import PictureStore
from vlm_batch.store.prefix import Match, NoPrefixCache, PrefixCache, match, thin
from vlm_batch.store.prompt import PromptCache
from vlm_batch.store.saved import SavedRow, common_length, save_row, save_snapshot
from vlm_batch.types import Request, SamplingParams

if TYPE_CHECKING:
    from vlm_batch.adapters.base import Adapter

logger = logging.getLogger(__name__)

#: Prefixes of fewer tokens are not kept; prefixes of ALWAYS_SHARED tokens are always reused.
MIN_TOKENS, ALWAYS_SHARED = 8, 64
#: Fewest tokens between two snapshots at chunk ends. Turn boundaries always have one.
SNAPSHOT_STRIDE = 512
#: Of a prompt that continues nothing.
NO_MATCH = Match(SavedRow(np.zeros((0, 3), dtype=np.int64), 0, {}, {}), 0, 0)


def _min_shared_tokens(length: int) -> int:
    """Return the fewest shared tokens for which a prompt continues another."""
    # Fewer save less than a joint prefill of equal lengths.
    return max(MIN_TOKENS, min(ALWAYS_SHARED, length // 8))


@dataclass(frozen=True)
class Caches:
    """Bounds on saved rows and vision features for later requests.

    Args:
        max_bytes: bytes in memory; 0 keeps nothing.
        directory: folder for rows beyond the memory, and for all rows when the batcher closes. Processes and models may
            share it.
        directory_bytes: most bytes of that folder, all processes together.

    Raises:
        ValueError: a bound is out of range.
    """

    max_bytes: int = 2**30
    directory: str | Path | None = None
    directory_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        for name in ("max_bytes", "directory_bytes"):
            number = whole_option(name, vars(self)[name], least=0)
            object.__setattr__(self, name, number)
        if self.directory is None:
            return
        if not isinstance(self.directory, (str, Path)):
            raise ValueError(
                f"directory is a {type(self.directory).__name__}; it must be a path"
            )
        if not (self.max_bytes and self.directory_bytes):
            raise ValueError(
                "directory needs max_bytes and directory_bytes above 0: files are read into memory"
            )

    def prefix_cache(self, budget: ByteBudget, identity: Identity) -> PrefixCache:
        """Return an empty prefix cache, with the directory if any."""
        if self.directory is None:
            return PrefixCache(budget)
        files = RowFiles(Path(self.directory), self.directory_bytes, identity)
        return PrefixCache(budget, files)


@contextlib.contextmanager
def keeping(row: Row) -> Iterator[None]:
    """Log errors of keeping a row's caches; raise them if its user wants the caches."""
    try:
        yield
    except Exception as error:
        if row.terms.returns_cache:
            raise
        logger.warning(
            "the caches of a row that ended are not kept: %s", describe(error)
        )


class Reuse:
    """Gives rows earlier rows' states, and keeps theirs.

    Args:
        identity: model and settings that saved rows must match.
        shapes: decide where a row may continue.
        pictures: features that loaders keep.
    """

    def __init__(
        self,
        adapter: Adapter,
        prefix: PrefixCache | None = None,
        identity: Identity | None = None,
        budget: ByteBudget | None = None,
        shapes: Shapes = FreeShapes(),
        pictures: PictureStore | None = None,
    ) -> None:
        self.adapter = adapter
        self.pictures = pictures
        self.prefix = NoPrefixCache() if prefix is None else prefix
        self.shapes = shapes
        # an empty one is false
        self.budget = self.prefix.budget if budget is None else budget
        self.identity = identity or Identity("")
        self._ended: list[SavedRow] = []  # launched, perhaps not computed yet
        # of rows that wait for others
        self._overlaps: WeakKeyDictionary[Row, Overlap] = WeakKeyDictionary()

    def close(self) -> None:
        """Write kept rows to files and free the memory."""
        self.store_ended()
        self.prefix.close()
        self.budget.clear()
        release_memory()

    def check(
        self, request: Request, text_ids: Callable[[], Sequence[int] | None]
    ) -> None:
        """Refuse what is known not to work, on the submitter's thread. Raises InvalidCache.

        Args:
            text_ids: gives the prompt's ids; None if they are known only once media are read.
        """
        cache = request.cache
        if cache is not None or request.return_cache:
            self._check_family(request.params)
        if cache is None or cache.is_continued:
            return  # its claim refuses one that is continued
        self.identity.check(cache.identity)
        saved = cache.peek()
        ids = text_ids()
        if ids is None:
            return
        given = np.array(ids, dtype=np.int64)[:, None]
        common = common_length(saved.keys[:, :1], given)
        is_whole = common == len(ids)
        limit = common - is_whole  # the last position is computed again
        if not saved.resumable(limit):
            self._check_common(saved, common, common)

    def _check_family(self, params: SamplingParams) -> None:
        if params.prompt_logprobs is not None:
            raise InvalidCache(
                "prompt_logprobs: every token is prefilled for them; leave cache and return_cache out"
            )
        if self.adapter.spec.no_prefix_reuse is not None:
            raise InvalidCache(
                f"this model's conversations have no prompt caches: {self.adapter.spec.no_prefix_reuse}"
            )

    # Rows that wait for another's prefix

    def waits_for(self, row: Row, others: Iterable[Row]) -> bool:
        """Return whether a row in prefill will leave ``row``, not encoded yet, a much longer prefix than the cached one."""
        if not self._may_share(row):
            return False
        key = self._key_or_none(row)
        if key is None:
            return False
        overlap = self._overlaps.setdefault(row, Overlap())
        coming = 0
        for other in others:
            coming = max(coming, overlap.shared_with(other, key))
        least = _min_shared_tokens(key.length)
        if coming < least:
            return False
        return coming >= overlap.cached(self.prefix, key) + least

    def new_ones(self, rows: Sequence[Row], others: Iterable[Row]) -> list[Row]:
        """Return the first rows without a shared prefix, one at least. Who ran out of memory alone stays alone."""
        chosen: list[Row] = []
        for row in rows:
            is_new = self._is_new(row)
            if not is_new or self.waits_for(row, [*others, *chosen]):
                break
            chosen.append(row)
        return chosen or [rows[0]]

    def _is_new(self, row: Row) -> bool:
        """Return whether a row may begin beside others, with nothing that is cached."""
        if row.was_alone or row.reuse.continues is not None:
            return False
        if not self._may_share(row):
            return True
        key = self._key_or_none(row)
        return key is None or self._cached(key) is None

    def _may_share(self, row: Row) -> bool:
        """Return whether a row takes prefixes of others: of prompts with log-probabilities no token may be left out."""
        if not self.prefix.keeps or row.reuse.continues is not None:
            return False
        return row.params.prompt_logprobs is None

    def _cached(self, key: PromptKey) -> Match | None:
        """Return the longest cached prefix, if it is long enough."""
        return self.prefix.find(key, _min_shared_tokens(key.length))

    # A row that begins

    def begin(self, row: Row, fresh: Sequence[Any]) -> int:
        """Give a row fresh or restored caches. Returns their positions. Raises InvalidCache if the user's does not fit."""
        row.prompt.cache = list(fresh)
        key = self._key_to_share(row)
        self._overlaps.pop(row, None)
        if key is None:
            return 0
        found = self._match(row, key)
        if not _can_be_cut(fresh):
            row.reuse.stops = _stops(key, found)
        if found.length:
            self._restore(row, key, found)
        return found.length

    def _key_to_share(self, row: Row) -> PromptKey | None:
        """Return the key of a prompt that takes or leaves states, else None. Raises InvalidCache."""
        if row.reuse.continues is not None or row.terms.returns_cache:
            self._check_family(row.params)
        elif not self._may_share(row):
            return None
        return self._key(row)

    def _match(self, row: Row, key: PromptKey) -> Match:
        """Return the match with the user's cache, else with the cached prefixes. Raises InvalidCache."""
        given = row.reuse.continues
        if given is None:
            return self._cached(key) or NO_MATCH
        self.identity.check(given.identity)
        saved = given.peek()
        found = match(saved, key)
        if not found.length:
            common = common_length(saved.keys[:, :1], key.positions[:, :1])
            self._check_common(saved, common, found.common)
        return found

    def _restore(self, row: Row, key: PromptKey, found: Match) -> None:
        """Give a row the state of a match."""
        saved, length = found.row, found.length
        last = max(_ends_of_pictures(key), default=0)
        num_pictures = len(key.pictures) if last <= length else 0
        row.prompt.cache = saved.restore(length, num_pictures)
        row.reuse.cached = length
        for at, snapshot in saved.snapshots.items():
            if at <= length:
                row.reuse.snapshots[at] = snapshot
        if length == key.length:
            row.prompt.logits = saved.logits_at(length)

    def take_continued(self, row: Row) -> None:
        """Take the user's cache from which a row was restored, so that no other continues it."""
        if row.reuse.continues is not None:
            row.reuse.continues.take()
            row.reuse.continues = None

    # A prompt's state

    def keep(self, row: Row, logits: mx.array | None) -> list[mx.array]:
        """Save a prompt's last state, or a snapshot of layers that cannot be trimmed. Returns arrays to evaluate.

        The state is ``pending`` until the first token is finite. ``logits`` (1, V): the last chunk's, else None.
        """
        own, cache = row.reuse, row.prompt.cache
        if own.key is None:
            return []
        if logits is None:
            return _add_snapshot(row, None) if _needs_snapshot(row) else []
        length = row.facts.length
        if own.key.length != length:
            # a token took several positions, for which there are no keys
            own.key = None
            if not row.terms.returns_cache:
                return []
            raise InvalidCache(
                "the family's prompts have more positions than ids: they have no prompt caches"
            )
        arrays = _save_constant(row)
        if own.cached == length:
            return arrays
        arrays += _add_snapshot(row, logits)
        if not self._keeps(length):
            return arrays
        own.pending = self._saved(row, cache, ())
        return own.pending.arrays()

    def _keeps(self, length: int) -> bool:
        """Return whether a row of so many positions is kept for later ones."""
        return self.prefix.keeps and length >= MIN_TOKENS

    # A row that ends

    def wants_caches(self, row: Row) -> bool:
        """Return whether a prefilled row's caches are kept at its end."""
        if row.reuse.key is None or row.answer.path is not None:
            return False
        are_kept = self.prefix.keeps and self.shapes.goes_on_anywhere
        return row.terms.returns_cache or are_kept

    def end(self, row: Row) -> PromptCache | None:
        """Save a departed row's caches. Returns its prompt cache if its user wants it."""
        left, row.prompt.cache = row.prompt.cache, []
        if not left:
            return None
        is_returned = row.terms.returns_cache
        with keeping(row):
            fed = row.answer.said[: row.answer.num_fed]
            saved = self._saved(row, left, fed)
            # a user's is for another thread
            evaluate = mx.eval if is_returned else mx.async_eval
            evaluate(saved.arrays())
            if self._keeps(saved.length):
                self._ended.append(saved)
            if is_returned:
                return PromptCache(saved, self.identity)
        return None

    def store_ended(self) -> None:
        """Store states of rows that left a step ago; count kept features."""
        ended, self._ended = self._ended, []
        for saved in ended:
            self.store(saved)
        if self.pictures is not None:
            self.pictures.update_budget()

    def store(self, saved: SavedRow) -> None:
        """Store a saved row. Errors are ignored."""
        with contextlib.suppress(Exception):
            mx.eval(saved.arrays())
            self.prefix.store(saved)

    def _saved(self, row: Row, caches: Sequence[Any], said: Sequence[int]) -> SavedRow:
        own, key = row.reuse, row.reuse.key
        assert key is not None
        answer = np.zeros((len(said), 3), dtype=np.int64)
        answer[:, 0] = said
        answer[:, 1:] = key.answer
        keys = np.concatenate([key.positions, answer])
        num_pictures = len(key.pictures)
        return save_row(caches, keys, own.snapshots, num_pictures, own.constant)

    def _key(self, row: Row) -> PromptKey | None:
        """Return a prompt's key, made once; None if the family has none."""
        own, inputs = row.reuse, row.prompt.inputs
        if own.key is not None or not inputs:
            return own.key
        if self.adapter.spec.no_prefix_reuse is not None:
            return None
        key = self.adapter.prompt_key(inputs)
        if row.terms.cache_salt is not None:
            key = key.mixed(_salt(row.terms.cache_salt))
        own.key = self.shapes.key(key)
        return own.key

    def _key_or_none(self, row: Row) -> PromptKey | None:
        """Return a prompt's key; None if it cannot be made, which is raised again when it is encoded."""
        try:
            return self._key(row)
        except Exception:
            return None

    def _check_common(self, saved: SavedRow, common: int, until: int) -> None:
        """Check whether a prompt that cannot go on from its user's cache may be computed whole.

        Args:
            common: tokens that it shares with the cache.
            until: positions that it shares with it, pictures included.

        Raises:
            InvalidCache: it may not.
        """
        if common > 0 and not self.shapes.goes_on_anywhere:
            return
        raise InvalidCache(
            f"the prompt does not continue the cache: they differ from position {until} on, and the cache of {saved.length} "
            "tokens cannot be cut back to that"
        )


def _ends_of_pictures(key: PromptKey) -> list[int]:
    return [end for _, end in key.pictures]


def _stops(key: PromptKey, found: Match) -> tuple[int, ...]:
    """Return where chunks end, so that layers that cannot be cut back have snapshots there."""
    return tuple(sorted({found.common, *_ends_of_pictures(key)}))


def _salt(text: str) -> np.ndarray:
    """Return 128 bits (2,) that set a prompt's key apart from those with another salt."""
    return np.frombuffer(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16],
        dtype=np.int64,
    )


def _can_be_cut(caches: Sequence[Any]) -> bool:
    """Return whether all layers can go back to an earlier position."""
    return all(kind_of(cache).is_whole for cache in caches)


def _needs_snapshot(row: Row) -> bool:
    """Return whether a snapshot is due after a chunk: layers that cannot be cut back are there, and the last is far."""
    own, at = row.reuse, row.prompt.prefilled
    before = [0, *sorted(own.snapshots)]
    last = before[bisect_right(before, at) - 1]
    is_near = at - last < SNAPSHOT_STRIDE
    if is_near and at not in own.stops:
        return False
    return not _can_be_cut(row.prompt.cache)


def _save_constant(row: Row) -> list[mx.array]:
    """Save the layers that no further token changes. Returns arrays to evaluate."""
    arrays: list[mx.array] = []
    for at, cache in enumerate(row.prompt.cache):
        kind = kind_of(cache)
        if kind.is_constant:
            state = row.reuse.constant[at] = kind.saved(0)
            arrays += state.arrays()
    return arrays


def _add_snapshot(row: Row, logits: mx.array | None) -> list[mx.array]:
    """Save a prompt's present state. Returns arrays to evaluate."""
    own, prompt = row.reuse, row.prompt
    snapshot = save_snapshot(prompt.cache, prompt.prefilled, logits)
    own.snapshots = thin({**own.snapshots, prompt.prefilled: snapshot})
    return snapshot.arrays()
