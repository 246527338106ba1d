"""Drafting models: assistants and multi-token heads, as mlx-vlm loads them.

To add one, subclass ``Heads``, and name its model type in ``KINDS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
from mlx_vlm.models.cache import RotatingKVCache

from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.few_rows import suit_few_rows
from vlm_batch.adapters.hooks import files_of, hook, install_hooks, running
from vlm_batch.adapters.longrope import ROW_ROPES
from vlm_batch.adapters.modules import clone_modules, evaluate_arrays
from vlm_batch.adapters.operations import layers
from vlm_batch.adapters.prompts import dtype_of, num_words
from vlm_batch.adapters.rotary import STEP_ROPES, hook_rotary
from vlm_batch.arrays import joined
from vlm_batch.caches.rows import DraftedRows, RowsCache, RowStates
from vlm_batch.records import Call, DraftState, Hidden

#: Positions of a row that are read one by one, beside other rows'.
FEW = 8


class Heads(ABC):
    """A model that drafts for all rows of an adapter together.

    Args:
        model: mlx-vlm's drafter. It is copied; weights are shared.
    """

    #: Families whose models it drafts for.
    families: ClassVar[frozenset[str]]
    #: Number of a row's last hidden states that it reads.
    context = 1
    #: Bytes of a position in its own caches.
    bytes_per_token = 0

    def __init__(self, model: Any, adapter: Adapter) -> None:
        if (dtype := dtype_of(adapter.token_table)) is not None:
            model.set_dtype(dtype)
        family = adapter.spec.family
        self.model: Any = clone_modules(
            model, {**layers(), **ROW_ROPES, **STEP_ROPES, **adapter.patches()}
        )
        self.model.bind(adapter.language)
        install_hooks(files_of(self.model), HOOKS, family=family, is_strict=False)
        hook_rotary(self.model, family=family)
        evaluate_arrays(self.model)
        suit_few_rows(self.model)

    @abstractmethod
    def propose(
        self, rows: Sequence[DraftState | None], layers: Sequence[Any], count: int
    ) -> mx.array:
        """See ``DraftModel``."""

    @staticmethod
    def last_states(rows: Sequence[DraftState | None]) -> mx.array:
        """Return each place's last hidden state (B, 1, D); empty places get place 0's."""
        some = next(filter(None, rows))
        filled = [row or some for row in rows]
        last = [last_of(row.hidden[-1]) for row in filled]
        return gathered(last)[:, None]


class Assistant(Heads):
    """Gemma 4's assistant, which only has the keys and values of the model's last layers.

    mlx-vlm masks one array of keys; here the masks are the batch's layers'.
    """

    families = frozenset({"gemma4", "gemma4_unified"})

    def __init__(self, model: Any, adapter: Adapter) -> None:
        super().__init__(model, adapter)
        from mlx_vlm.speculative.drafters.gemma4_assistant import (
            gemma4_assistant as upstream,
        )

        masks = hook(
            upstream.make_drafter_masks, lambda seen, *args, **kwargs: seen.masks
        )
        install_hooks(
            [upstream.__name__],
            {"make_drafter_masks": masks},
            family=adapter.spec.family,
            is_strict=False,
        )
        config = adapter.language.config
        own = config.layer_types[: len(adapter.make_cache())]
        # the last of each kind
        self._layers = {kind: index for index, kind in enumerate(own)}
        missing = {
            layer.layer_type for layer in self.model.model.layers
        } - self._layers.keys()
        if missing:
            raise ValueError(f"the model has no layers of the kinds {sorted(missing)}")

    def propose(
        self, rows: Sequence[DraftState | None], layers: Sequence[Any], count: int
    ) -> mx.array:
        at = mx.array(
            [0 if row is None else row.hidden[-1].end - 1 for row in rows],
            dtype=mx.int32,
        )
        tokens = mx.array(
            [0 if row is None else row.tokens[-1] for row in rows], dtype=mx.int32
        )
        seen = Seen({kind: layers[index] for kind, index in self._layers.items()})
        self.model.set_shared_kv(seen, kv_offset=0, position=at)
        try:
            with running(Call(positions=at)):
                found = self.model.draft_block(
                    tokens,
                    self.last_states(rows),
                    None,
                    count + 1,
                    _likeliest,
                    mx.int32,
                    greedy=True,
                )
            mx.eval(found)
        finally:
            # who holds keys makes the next step copy them
            self.model.set_shared_kv({}, kv_offset=0)
        return found


class NextTokens(Heads):
    """Multi-token heads of Qwen3.5 and Qwen3-Next: layers over hidden states and next tokens, with their own KV cache."""

    families = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})
    context = 64

    def __init__(self, model: Any, adapter: Adapter) -> None:
        super().__init__(model, adapter)
        attention = self.model.layers[0].self_attn
        width = 2 * attention.num_key_value_heads * attention.head_dim
        dtype = dtype_of(adapter.token_table) or mx.float32
        self.bytes_per_token = width * dtype.size * len(self.model.layers)

    def propose(
        self, rows: Sequence[DraftState | None], layers: Sequence[Any], count: int
    ) -> mx.array:
        live: list[DraftState] = []
        caches: list[Any] = []
        # each place's in ``live``; empty places get the first row's
        at = [0] * len(rows)
        for place, row in enumerate(rows):
            if row is None:
                continue
            at[place] = len(live)
            live.append(row)
            self._begin(row)
            caches += row.caches
        num_layers = len(live[0].caches)
        own = [rows_cache(caches[layer::num_layers]) for layer in range(num_layers)]
        told = self._draft(*self._read(live, own), own, count)
        mx.eval(told, [(cache.keys, cache.values) for cache in caches])
        # what was drafted is computed again from the model's own states, if it is accepted
        for cache in caches:
            cache.trim(count - 1)
        return told[mx.array(at)]

    def _begin(self, row: DraftState) -> None:
        """Prepare a row that has not been drafted for, or not lately."""
        if not row.caches:
            row.caches = self.model.make_cache()
        if len(row.tokens) > FEW:
            self._catch_up(row)

    def _read(
        self, rows: Sequence[DraftState], own: Sequence[RowsCache]
    ) -> tuple[mx.array, mx.array]:
        """Read unread tokens. Returns hidden states (R, 1, D) and positions (R, 1) of the last ones."""
        tokens: list[int] = []
        positions: list[int] = []
        hidden: list[Hidden] = []
        counts: list[int] = []
        for row in rows:
            tokens += row.tokens
            positions += positions_of(row)
            hidden += row.hidden
            counts.append(len(row.tokens))
        at = mx.array(positions)[:, None]
        found = self._forward(
            mx.array(tokens, dtype=mx.int32)[:, None],
            gathered(hidden)[:, None],
            [DraftedRows(layer, counts) for layer in own],
            at,
        )
        ends = mx.array([end - 1 for end in accumulate(counts)])
        return found[ends], at[ends]

    def _draft(
        self, hidden: mx.array, at: mx.array, own: Sequence[Any], count: int
    ) -> mx.array:
        """Return tokens (R, count) that follow hidden states (R, 1, D) at positions (R, 1)."""
        found = [self._told(hidden)]
        for ahead in range(1, count):
            hidden = self._forward(found[-1], hidden, own, at + ahead)
            found.append(self._told(hidden))
        return mx.concatenate(found, axis=1)

    def _catch_up(self, row: DraftState) -> None:
        """Read all but the last unread position in one call."""
        last = row.hidden[-1]
        at = mx.array([positions_of(row)])
        tokens = mx.array([row.tokens], dtype=mx.int32)
        hidden = gathered(row.hidden)[None]
        self._forward(tokens[:, :-1], hidden[:, :-1], row.caches, at[:, :-1])
        row.hidden.clear()
        row.hidden.append(last_of(last))
        row.tokens = row.tokens[-1:]

    def _forward(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], at: mx.array
    ) -> mx.array:
        """Run the heads over tokens, hidden states (R, L, D) and positions (R, L)."""
        with running(Call(positions=at[:, 0] if at.shape[1] == 1 else None)):
            positions = mx.broadcast_to(at[None], (3, *at.shape))
            found: mx.array = self.model._forward_hidden(
                self.model._input_embed(tokens), hidden, list(caches), positions
            )
        return found

    def _told(self, hidden: mx.array) -> mx.array:
        return _likeliest(self.model._lm_head_fn(hidden))  # (R, 1)


#: Kinds of drafting models, by mlx-vlm's model type.
KINDS: Mapping[str, type[Heads]] = {
    "gemma4_assistant": Assistant,
    "gemma4_unified_assistant": Assistant,
    "qwen3_5_mtp": NextTokens,
}


def load_heads(path: str, adapter: Adapter) -> Heads:
    """Load a drafting model from a folder or hub id through mlx-vlm's loader.

    Raises:
        ValueError: There is none, or it does not fit the adapter's model.
    """
    from mlx_vlm.speculative.drafters import (
        load_drafter,
        validate_drafter_compatibility,
    )

    try:
        model: Any
        model, kind = load_drafter(path)
        found = str(model.config.model_type)
        if found not in KINDS:
            raise ValueError(
                f"it is a {found}; those that are run are {', '.join(KINDS)}"
            )
        cls, family = KINDS[found], adapter.spec.family
        if family not in cls.families:
            raise ValueError(
                f"a {found} drafts for {', '.join(sorted(cls.families))}, not for {family}"
            )
        validate_drafter_compatibility(adapter.model, model, kind)
        theirs = model.config.text_config.vocab_size
        ours = num_words(adapter.token_table)
        if theirs != ours:
            raise ValueError(f"its vocabulary has {theirs} tokens, the model's {ours}")
        return cls(model, adapter)
    except Exception as error:  # whatever a folder that is none, or a wrong one, raises
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"draft is {path!r}; it must be auto, off, or the folder or hub id of a model that drafts for this one: {said}"
        ) from error


def rows_cache(caches: Sequence[Any]) -> RowsCache:
    """Join the rows' own caches of a layer."""
    found = RowsCache()
    found.resize(len(caches))
    for place, cache in enumerate(caches):
        found.put(place, cache)
    return found


def positions_of(row: DraftState) -> list[int]:
    """Return the positions of a row's unread hidden states."""
    found: list[int] = []
    for one in row.hidden:
        found += range(one.begin, one.end)
    return found


def last_of(hidden: Hidden) -> Hidden:
    """Return the last of some hidden states."""
    before = hidden.count - 1
    return Hidden(hidden.states, hidden.first + before, hidden.begin + before)


def gathered(hidden: Sequence[Hidden]) -> mx.array:
    """Return hidden states (N, D) as one array."""
    arrays: list[mx.array] = []
    begins: dict[int, int] = {}  # by array
    size = 0
    indices: list[int] = []
    for one in hidden:
        if id(one.states) not in begins:
            begins[id(one.states)] = size
            size += len(one.states)
            arrays.append(one.states)
        first = begins[id(one.states)] + one.first
        indices += range(first, first + one.count)
    return joined(arrays)[mx.array(indices)]


def _likeliest(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1).astype(mx.int32)


class Seen(dict[str, tuple[Any, Any]]):
    """Keys and values of layers by kind, with the masks of a query at each place's last position."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__({kind: layer.state for kind, layer in layers.items()})
        self.masks: dict[str, mx.array | None] = dict.fromkeys(layers)
        for kind, layer in layers.items():
            if not isinstance(layer, RowsCache):
                self.masks[kind] = layer.seen(mx.maximum(layer.offset - 1, 0), 0, None)
                continue
            window = _window_of(layer)
            if window is not None:  # after a draft a row holds more than its window
                keys, values = self[kind]
                self[kind] = (_last(keys, window), _last(values, window))


def _window_of(layer: RowsCache) -> int | None:
    for cache in layer.places:
        if isinstance(cache, RotatingKVCache):
            return int(cache.max_size)
    return None


def _last(states: RowStates, window: int) -> RowStates:
    """Return the last positions of rows' keys or values."""
    rows = [
        row[:, :, -window:] if isinstance(row, mx.array) else row for row in states.rows
    ]
    return RowStates(tuple(rows), states.counts)
