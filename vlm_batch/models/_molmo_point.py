"""The points of a Molmo-Point row: the ids that stand for them, those that it can choose, and those that it has chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.states import LayerState


@dataclass(frozen=True)
class Tokens:
    """The ids of markers: a picture's patches, "no more points", the parts of a patch, and the places in a part."""

    first: int
    num_patches: int
    num_parts: int
    num_places: int
    has_end: bool  # whether there is a token for "no more points"

    @property
    def parts(self) -> int:
        """The first part's id; the patches, and the token for no more of them, come before it."""
        return self.first + self.num_patches + self.has_end

    @property
    def places(self) -> int:
        return self.parts + self.num_parts

    @property
    def end(self) -> int:
        """One beyond the last place's id: how many tokens the row chooses from."""
        return self.places + self.num_places

    def is_patch(self, token: int) -> bool:
        return self.first <= token < self.first + self.num_patches

    def is_part(self, token: int) -> bool:
        return self.parts <= token < self.places

    def is_place(self, token: int) -> bool:
        return self.places <= token < self.end

    def is_no_more(self, token: int) -> bool:
        return self.has_end and token == self.first + self.num_patches


@dataclass(frozen=True)
class Order:
    """In which order points come: patches sorted, parts within a patch sorted, and whether a point may come again."""

    sorted_patches: bool
    sorted_parts: bool
    no_repeats: bool


@dataclass(frozen=True)
class Pictures:
    """The possible points of a row: P patches, of S parts each, of all its pictures."""

    tokens: Tokens
    patches: mx.array  # (P, D) as they were added to the prompt's embeddings
    parts: mx.array  # (P, S, D_vit)
    part_keys: mx.array  # (P, S, E)
    is_part: mx.array  # (P, S) bool
    at: mx.array  # (P,) where in the prompt each patch's token stands
    positions: mx.array  # (P,) for RoPE: the patches that can be chosen are counted
    can_choose: mx.array  # (P,) bool
    end: int  # of the prompt's part that holds them

    def arrays(self) -> list[mx.array]:
        return [value for value in vars(self).values() if isinstance(value, mx.array)]


@dataclass(frozen=True)
class PointerState(LayerState):
    """The possible points of a row that has seen its pictures. No other prompt can begin with what it has pointed at."""

    pictures: Pictures | None
    keys: mx.array | None
    is_whole = True

    def arrays(self) -> list[mx.array]:
        return [*super().arrays(), *([] if self.pictures is None else self.pictures.arrays())]

    def reaches(self, length: int) -> bool:
        return True

    def restore(self, length: int) -> Pointer:
        if self.pictures is None or length < self.pictures.end:
            return Pointer()
        return Pointer(self.pictures, self.keys)


@dataclass
class Pointer(CacheKind):
    """The possible and the chosen points of one row. They lie beside the row's KV, as a layer's cache does."""

    pictures: Pictures | None = None
    keys: mx.array | None = None  # (P, E) of the patches, from the prompt's hidden states
    recent: list[int] = field(default_factory=list)  # the last tokens, which no point is complete without
    last: int | None = None  # the answer's last token
    patch: int | None = None  # the id of the last patch of a complete point
    part: int | None = None
    pointed: int = -1  # the number of the last patch, complete or not
    has_ended: bool = False
    offset: int = 0
    is_whole = True

    @property
    def state(self) -> list[mx.array]:
        """Every array that is held, to be evaluated."""
        held = [] if self.keys is None else [self.keys]
        return held + ([] if self.pictures is None else self.pictures.arrays())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def saved(self, length: int) -> PointerState:
        return PointerState(self.pictures, self.keys)

    def take(self, token: int) -> None:
        """Take note of the answer's next token."""
        assert self.pictures is not None
        tokens = self.pictures.tokens
        self.recent.append(token)
        if len(self.recent) > (2 if tokens.num_places else 1):
            done = self.recent.pop(0)
            self.patch = done if tokens.first <= done < tokens.parts else self.patch
            self.part = done if tokens.is_part(done) else self.part
        self.has_ended |= tokens.is_no_more(token)
        self.last = token

    def forbidden(self, order: Order) -> list[tuple[int, int]]:
        """The spans [start, end) of ids that may not come next (modeling_molmo_point.py, MolmoPointLogitProcessor)."""
        assert self.pictures is not None and self.last is not None
        tokens = self.pictures.tokens
        if self.has_ended:
            return [(tokens.first, tokens.end)]
        if tokens.first <= self.last < tokens.parts:
            spans = [(0, tokens.parts), (tokens.places, tokens.end)]
            if order.sorted_parts and self.patch == self.last and self.part is not None:
                # The published code stops where no part is left; here the last one may come again.
                spans.append((tokens.parts, min(self.part + order.no_repeats, tokens.places - 1)))
            return spans
        if tokens.num_places and tokens.is_part(self.last):
            return [(0, tokens.places)]
        spans = [(tokens.parts, tokens.end)]
        if self.patch is not None and order.sorted_patches:
            spans.append((tokens.first, self.patch))
        is_full = order.no_repeats and order.sorted_parts and self.part == tokens.places - 1
        if self.patch is not None and is_full:
            spans.append((self.patch, self.patch + 1))
        return spans


@dataclass(frozen=True)
class Questions:
    """Queries of hidden states to the pictures' keys: of patches (..., E), of parts (..., E), and logits of places (..., 9)."""

    patch: mx.array
    part: mx.array
    place: mx.array | None

    @classmethod
    def of(cls, predictor: Any, normed: mx.array, hidden: mx.array) -> Questions:
        """(B, D) states -> (B, ...)"""
        places = predictor.subpatch_loc_k
        logits = None if places is None else places(hidden)
        return cls(predictor.patch_q(normed), predictor.subpatch_q(normed), logits)

    def of_row(self, place: int) -> Questions:
        return Questions(self.patch[place], self.part[place], None if self.place is None else self.place[place])


def general(token: int, tokens: Tokens, config: Any) -> int:
    """The id whose embedding a token begins with."""
    if tokens.first <= token < tokens.parts:
        return int(config.patch_token_id)
    if tokens.is_part(token):
        return int(config.subpatch_token_id)
    return int(config.location_token_id) if tokens.is_place(token) else token
