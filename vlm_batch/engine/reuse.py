"""Reuse of keys and values between requests: prompt caches and the prefix cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vlm_batch.caches.layers import kind_of
from vlm_batch.checks import whole_option
from vlm_batch.engine.row import Row
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.errors import InvalidCache, describe
from vlm_batch.records import PromptKey
from vlm_batch.runtime.memory import release_memory
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.files import Identity
from vlm_batch.store.pictures import PictureStore
from vlm_batch.store.prefix import Match, PrefixCache, match, thin
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
            object.__setattr__(
                self, name, whole_option(name, vars(self)[name], least=0)
            )
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
        return PrefixCache(
            budget, RowFiles(Path(self.directory), self.directory_bytes, identity)
        )


@contextlib.contextmanager
def keeping(row: Row) -> Iterator[None]:
    """Log errors of keeping a row's caches; raise them if its user wants the caches."""
    try:
        yield
    except Exception as error:
        if row.reuse.is_returned:
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
        self.prefix = prefix
        self.shapes = shapes
        if budget is None:  # an empty one counts as False
            budget = ByteBudget(0) if prefix is None else prefix.budget
        self.budget = budget
        self.identity = identity or Identity("")
        self._ended: list[SavedRow] = []  # launched, perhaps not computed yet

    def close(self) -> None:
        """Write kept rows to files and free the memory."""
        self.store_ended()
        if self.prefix is not None:
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
        if cache is None and not request.return_cache:
            return
        self._check_family(request.params)
        # a cache that was continued is refused by its claim
        if cache is None or cache.is_continued:
            return
        self.identity.check(cache.identity)
        saved, ids = cache.peek(), text_ids()
        if ids is None:
            return
        common = common_length(
            saved.keys[:, :1], np.array(ids, dtype=np.int64)[:, None]
        )
        limit = common - (common == len(ids))  # the last position is computed again
        if not saved.resumable(limit) and not self._can_begin_anew(common):
            raise _misfit(saved, common)

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
        """Return whether a row in prefill will leave a much longer prefix than the cached one."""
        if self.prefix is None or row.prompt.encoded is not None:
            return False
        if not self._may_share(row):
            return False
        key = self._key_or_none(row)
        if key is None:
            return False
        overlap, least = row.reuse.overlap, _min_shared_tokens(key.length)
        coming = max((overlap.shared_with(other, key) for other in others), default=0)
        if coming < least:
            return False
        return coming >= overlap.cached(self.prefix, key) + least

    def new_ones(self, rows: Sequence[Row], others: Iterable[Row]) -> list[Row]:
        """Return the first rows without a shared prefix, one at least. Who ran out of memory alone stays alone."""
        if rows[0].was_alone:
            return [rows[0]]
        chosen: list[Row] = []
        for row in rows:
            if row.was_alone:
                break
            if not self._is_new(row) or self.waits_for(row, [*others, *chosen]):
                break
            chosen.append(row)
        return chosen or [rows[0]]

    def _is_new(self, row: Row) -> bool:
        """Return whether a row begins with nothing that is cached."""
        if row.reuse.continues is not None:
            return False
        if self.prefix is None or not self._may_share(row):
            return True
        try:
            key = self._key(row)
        except Exception:  # raised again when it is encoded
            return False
        return key is None or self._cached(key) is None

    def _may_share(self, row: Row) -> bool:
        """Return whether a row takes prefixes of others: of prompts with log-probabilities no token may be left out."""
        return row.reuse.continues is None and row.params.prompt_logprobs is None

    def _cached(self, key: PromptKey) -> Match | None:
        """Return the longest cached prefix, if it is long enough."""
        if self.prefix is None:
            return None
        return self.prefix.find(key, _min_shared_tokens(key.length))

    # A row that begins

    def begin(self, row: Row, fresh: Sequence[Any]) -> int:
        """Give a row fresh or restored caches. Returns their positions. Raises InvalidCache if the user's does not fit."""
        row.prompt.cache = list(fresh)
        own = row.reuse
        is_asked = own.continues is not None or own.is_returned
        if is_asked:
            self._check_family(row.params)
        if row.params.prompt_logprobs is not None:  # no token may be left out
            return 0
        if self.prefix is None and not is_asked:
            return 0
        key = self._key(row)
        own.overlap.clear()
        if key is None:
            return 0
        found = self._match(row, key)
        if not _can_be_cut(fresh):
            common = 0 if found is None else found.common
            ends = {end for _, end in key.pictures}
            own.stops = tuple(sorted({common} | ends))
        if found is None or not found.length:
            return 0
        self._restore(row, key, found)
        return found.length

    def _match(self, row: Row, key: PromptKey) -> Match | None:
        """Return the match with the user's cache, else with the cached prefixes. Raises InvalidCache."""
        if row.reuse.continues is not None:
            return self._continued(row.reuse.continues, key)
        return self._cached(key)

    def _restore(self, row: Row, key: PromptKey, found: Match) -> None:
        """Give a row the state of a match."""
        own, saved, length = row.reuse, found.row, found.length
        last = max((end for _, end in key.pictures), default=0)
        num_pictures = len(key.pictures) if last <= length else 0
        row.prompt.cache = saved.restore(length, num_pictures)
        for at, snapshot in saved.snapshots.items():
            if at <= length:
                own.snapshots[at] = snapshot
        row.prompt.logits = saved.logits_at(length) if length == key.length else None
        own.cached = length

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
        own, prompt, length = row.reuse, row.prompt, row.facts.length
        if own.key is None or prompt.cache is None:
            return []
        if logits is None:
            return _add_snapshot(row, None) if _needs_snapshot(row) else []
        # a token took several positions, for which there are no keys
        if own.key.length != length:
            own.key = None
            if own.is_returned:
                raise InvalidCache(
                    "the family's prompts have more positions than ids: they have no prompt caches"
                )
            return []
        arrays = _save_constant(row)
        if own.cached == length:
            return arrays
        arrays += _add_snapshot(row, logits)
        if self.prefix is None or length < MIN_TOKENS:
            return arrays
        own.pending = self._saved(row, prompt.cache, ())
        return own.pending.arrays()

    # A row that ends

    def wants_caches(self, row: Row) -> bool:
        """Return whether a prefilled row's caches are kept at its end."""
        if row.reuse.key is None or row.answer.option is not None:
            return False
        is_kept = self.prefix is not None and self.shapes.goes_on_anywhere
        return row.reuse.is_returned or is_kept

    def end(self, row: Row) -> PromptCache | None:
        """Save a departed row's caches. Returns its prompt cache if its user wants it."""
        own = row.reuse
        left, row.prompt.cache = row.prompt.cache, None
        if left is None:
            return None
        with keeping(row):
            saved = self._saved(row, left, row.answer.said[: row.answer.num_fed])
            # a user's is for another thread
            evaluate = mx.eval if own.is_returned else mx.async_eval
            evaluate(saved.arrays())
            if self.prefix is not None and saved.length >= MIN_TOKENS:
                self._ended.append(saved)
            if own.is_returned:
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
            if self.prefix is not None:
                self.prefix.store(saved)

    def _saved(self, row: Row, caches: Sequence[Any], said: Sequence[int]) -> SavedRow:
        own = row.reuse
        assert own.key is not None
        answer = np.zeros((len(said), 3), dtype=np.int64)
        answer[:, 0], answer[:, 1:] = said, own.key.answer
        keys = np.concatenate([own.key.positions, answer])
        num_pictures = len(own.key.pictures)
        return save_row(caches, keys, own.snapshots, num_pictures, own.constant)

    def _key(self, row: Row) -> PromptKey | None:
        """Return a prompt's key, made once; None if the family has none."""
        own, inputs = row.reuse, row.prompt.inputs
        has_keys = self.adapter.spec.no_prefix_reuse is None
        if own.key is None and has_keys and inputs is not None:
            key = self.adapter.prompt_key(inputs)
            if row.cache_salt is not None:
                key = key.mixed(_salt(row.cache_salt))
            own.key = self.shapes.key(key)
        return own.key

    def _key_or_none(self, row: Row) -> PromptKey | None:
        """Return a prompt's key; None if it cannot be made, which is raised again when it is encoded."""
        try:
            return self._key(row)
        except Exception:
            return None

    def _continued(self, cache: PromptCache, key: PromptKey) -> Match:
        """Return the match with the user's cache. Raises InvalidCache."""
        self.identity.check(cache.identity)
        saved = cache.peek()
        found = match(saved, key)
        if found.length:
            return found
        common = common_length(saved.keys[:, :1], key.positions[:, :1])
        if not self._can_begin_anew(common):
            raise _misfit(saved, found.common)
        return found

    def _can_begin_anew(self, common: int) -> bool:
        """Return whether a prompt that shares ``common`` tokens with its user's cache may be computed whole."""
        return not self.shapes.goes_on_anywhere and common > 0


def _salt(text: str) -> np.ndarray:
    """Return 128 bits (2,) that set a prompt's key apart from those with another salt."""
    return np.frombuffer(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16],
        dtype=np.int64,
    )


def _misfit(saved: SavedRow, common: int) -> InvalidCache:
    return InvalidCache(
        f"the prompt does not continue the cache: they differ from position {common} on, and the cache of {saved.length} "
        "tokens cannot be cut back to that"
    )


def _can_be_cut(caches: Sequence[Any]) -> bool:
    """Return whether all layers can go back to an earlier position."""
    return all(kind_of(cache).is_whole for cache in caches)


def _needs_snapshot(row: Row) -> bool:
    """Return whether a snapshot is due after a chunk: layers that cannot be cut back are there, and the last is far."""
    own, prompt = row.reuse, row.prompt
    before = [at for at in own.snapshots if at <= prompt.prefilled]
    is_far = prompt.prefilled - max(before, default=0) >= SNAPSHOT_STRIDE
    if not is_far and prompt.prefilled not in own.stops:
        return False
    return not _can_be_cut(prompt.cache or ())


def _save_constant(row: Row) -> list[mx.array]:
    """Save the layers that no further token changes. Returns arrays to evaluate."""
    arrays: list[mx.array] = []
    for at, cache in enumerate(row.prompt.cache or ()):
        kind = kind_of(cache)
        if kind.is_constant:
            state = row.reuse.constant[at] = kind.saved(0)
            arrays += state.arrays()
    return arrays


def _add_snapshot(row: Row, logits: mx.array | None) -> list[mx.array]:
    """Save a prompt's present state. Returns arrays to evaluate."""
    own, prompt = row.reuse, row.prompt
    assert prompt.cache is not None
    snapshot = save_snapshot(prompt.cache, prompt.prefilled, logits)
    own.snapshots = thin({**own.snapshots, prompt.prefilled: snapshot})
    return snapshot.arrays()
