"""Molmo-Point: Molmo 2 that points at pictures by tokens beyond the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, patching, two_tables
from vlm_batch.arrays import stack_logits
from vlm_batch.caches.layers import CacheKind
from vlm_batch.caches.rows import RowsCache
from vlm_batch.caches.states import LayerState
from vlm_batch.errors import InvalidPrompt
from vlm_batch.records import Call, DecodeStep, Encoded, Picture
from vlm_batch.registry import ModelSpec, register

#: Logit of tokens that the model does not choose from (modeling_molmo_point.py, ``small_val``).
SMALL = -100000.0


@dataclass(frozen=True)
class Tokens:
    """Ids of patches, "no more points", parts, and places in them."""

    first: int
    num_patches: int
    num_parts: int
    num_places: int
    has_end: bool  # there is a token for "no more points"

    @property
    def parts(self) -> int:
        return self.first + self.num_patches + self.has_end

    @property
    def places(self) -> int:
        return self.parts + self.num_parts

    @property
    def end(self) -> int:
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
    sorted_patches: bool
    sorted_parts: bool
    no_repeats: bool


@dataclass(frozen=True)
class Pictures:
    """Possible points: P patches of S parts."""

    tokens: Tokens
    patches: mx.array  # (P, D) as added to the prompt's embeddings
    parts: mx.array  # (P, S, D_vit)
    part_keys: mx.array  # (P, S, E)
    is_part: mx.array  # (P, S) bool
    at: mx.array  # (P,) each patch's position in the prompt
    positions: mx.array  # (P,) for RoPE, counting patches that can be chosen
    can_choose: mx.array  # (P,) bool
    end: int  # of the pictures' span in the prompt

    def arrays(self) -> list[mx.array]:
        return [value for value in vars(self).values() if isinstance(value, mx.array)]


@dataclass(frozen=True)
class PointerState(LayerState):
    pictures: Pictures | None
    keys: mx.array | None
    is_whole = True

    def arrays(self) -> list[mx.array]:
        return [
            *super().arrays(),
            *([] if self.pictures is None else self.pictures.arrays()),
        ]

    def reaches(self, length: int) -> bool:
        return True

    def restore(self, length: int) -> Pointer:
        if self.pictures is None or length < self.pictures.end:
            return Pointer()
        return Pointer(self.pictures, self.keys)


@dataclass
class Pointer(CacheKind):
    """Points of one row, kept as another layer's cache."""

    pictures: Pictures | None = None
    # (P, E) of the patches, from the prompt's hidden states
    keys: mx.array | None = None
    # last tokens, of a point that may be incomplete
    recent: list[int] = field(default_factory=list)
    last: int | None = None  # the answer's last token
    patch: int | None = None  # id of the last complete point's patch
    part: int | None = None
    pointed: int = -1  # number of the last patch, complete or not
    has_ended: bool = False
    offset: int = 0
    is_whole = True

    @property
    def state(self) -> list[mx.array]:
        held = [] if self.keys is None else [self.keys]
        return held + ([] if self.pictures is None else self.pictures.arrays())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def saved(self, length: int) -> PointerState:
        return PointerState(self.pictures, self.keys)

    def take(self, token: int) -> None:
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
        """Return [start, end) of ids that may not follow (modeling_molmo_point.py, MolmoPointLogitProcessor)."""
        assert self.pictures is not None and self.last is not None
        tokens = self.pictures.tokens
        if self.has_ended:
            return [(tokens.first, tokens.end)]
        if tokens.first <= self.last < tokens.parts:
            spans = [(0, tokens.parts), (tokens.places, tokens.end)]
            if order.sorted_parts and self.patch == self.last and self.part is not None:
                # The published code stops if no part is left; here the last one may repeat.
                spans.append(
                    (tokens.parts, min(self.part + order.no_repeats, tokens.places - 1))
                )
            return spans
        if tokens.num_places and tokens.is_part(self.last):
            return [(0, tokens.places)]
        spans = [(tokens.parts, tokens.end)]
        if self.patch is not None and order.sorted_patches:
            spans.append((tokens.first, self.patch))
        is_full = (
            order.no_repeats and order.sorted_parts and self.part == tokens.places - 1
        )
        if self.patch is not None and is_full:
            spans.append((self.patch, self.patch + 1))
        return spans


class PooledLayers(RememberingBatchTower):
    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        count = self._config.vision_config.num_hidden_layers
        kept = {layer % count for layer in self._config.adapter_config.vit_layers}
        return [
            states if index in kept else None
            for index, states in enumerate(self.tower(*args, **kwargs))
        ]


@register(
    ModelSpec(
        family="molmo_point",
        model_types=("molmo_point",),
        special_tokens=(
            (
                "<POINT_0>",
                "points are <POINT_...>; the model card decodes with skip_special_tokens=False before "
                "extract_image_points",
            ),
        ),
        notes=(
            "a row has its own points and the places that it can point at; mlx-vlm keeps those of the last picture on the "
            "model, for a text that follows, too (molmo_point.py:624)",
            "all tokens of all pictures see each other, as in the published model (modeling_molmo_point.py, "
            "token_type_ids_mask_function); mlx-vlm drops token_type_ids, and its pictures are causal (molmo_point.py:394)",
            "an answer to a picture does not begin with one of the three tokens that stand for points in general, as in the "
            "published model; mlx-vlm leaves them among the first token's choices (molmo_point.py:711)",
            "the keys of patches are made of the chunk that holds the pictures, wherever others end; mlx-vlm takes the "
            "first chunk's (molmo_point.py:653)",
            "where a patch comes again and none of its parts is left, the last part comes again; mlx-vlm takes any word, and "
            "the published code stops (molmo_point.py:303)",
            "answers are text with the ids of points; coordinates are not worked out",
            "while a row has a picture, each step waits for the tokens of the step before",
        ),
    )
)
class MolmoPoint(Adapter):
    """Patches share the general patch token's logit."""

    last_hidden = None
    tower_class = PooledLayers
    input_keys = frozenset(
        {
            "pixel_values",
            "image_token_pooling",
            "image_grids",
            "image_num_crops",
            "token_type_ids",
        }
    )
    prefill_axes: ClassVar[Mapping[str, int | None]] = {
        "pictures": None,
        "is_picture": None,
    }
    patches = patching(("molmo_point.language.Molmo2Embedding", two_tables))

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config, inference = self.config, ("always", "inference")
        self.order = Order(
            sorted_patches=config.mask_patches in inference,
            sorted_parts=config.mask_subpatches in inference,
            no_repeats=config.mask_repeats in ("all", "inference"),
        )

    # Encode
    # -------------------------------------------------------------------------------------------------------------

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset(
            {self.config.image_patch_id, self.config.image_non_indexable_patch_id}
        )

    def _read(self, inputs: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        """Refuse earlier answers' points."""
        ids, extra = super()._read(inputs)
        beyond = [
            token
            for token in np.array(ids)[0].tolist()
            if not 0 <= token < self.num_words
        ]
        if beyond:
            raise InvalidPrompt(
                f"token id {beyond[0]} is beyond the model's {self.num_words}: does the tokenizer belong to this model? A "
                "point of an earlier answer cannot be given back"
            )
        return ids, extra

    @property
    def num_words(self) -> int:
        return int(
            self.config.text_config.vocab_size
            + self.config.text_config.additional_vocab_size
        )

    def _encoded(self, inputs: Mapping[str, Any], call: Call, cached: int) -> Encoded:
        words = (
            self.tokens(inputs).end
            if inputs.get("image_token_pooling") is not None
            else self.num_words
        )
        return replace(super()._encoded(inputs, call, cached), vocabulary=words)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Run mlx-vlm's steps; move its state to ``Pictures``."""
        if "pixel_values" not in extra:
            return {"inputs_embeds": self.words(ids)}
        self._check(ids, extra)
        # float32, for float16 would overflow
        embeds = self.model.get_input_embeddings(ids, **extra).inputs_embeds
        if (dtype := self.model.lm.model.wte.embedding.dtype) != mx.float16:
            embeds = embeds.astype(dtype)
        found = self._taken()
        tokens = self.tokens(extra)
        at = found["image_indices"]
        can_choose = found["is_indexable_flat"]  # (L,) of the prompt
        pictures = Pictures(
            tokens=tokens,
            patches=found["image_features"].reshape(tokens.num_patches, -1),
            parts=found["vit_features"][0],
            part_keys=found["subpatch_k"][0],
            is_part=found["vit_features_mask"][0],
            at=at,
            positions=(mx.cumsum(can_choose) - 1)[at],
            can_choose=can_choose[at] > 0,
            end=self.atomic_spans(ids, extra)[0][1],
        )
        return {
            "inputs_embeds": embeds,
            "pictures": pictures,
            "is_picture": np.array(extra["token_type_ids"][0]) > 0,
        }

    def _taken(self) -> dict[str, Any]:
        """Remove and return mlx-vlm's state."""
        model = self.model
        found: dict[str, Any] = model._image_cache
        model._image_cache = model._token_bounds = model._last_predicted_patch_id = None
        model._generated_ids_list = []
        return found

    def _check(self, ids: mx.array, extra: Mapping[str, Any]) -> None:
        if missing := self.input_keys - extra.keys():
            raise InvalidPrompt(
                f"a picture of molmo_point comes with {sorted(missing)}, which its processor returns"
            )
        has_patch: np.ndarray = np.array(extra["image_token_pooling"]).max(axis=1) >= 0
        if not has_patch.all():
            raise InvalidPrompt(
                "a token of the picture pools no patch: image_token_pooling has a row below zero"
            )
        if (given := int(self.picture_positions(ids, extra).sum())) != len(has_patch):
            raise InvalidPrompt(
                f"the pictures need {len(has_patch)} placeholder tokens; the prompt has {given}"
            )
        ends = int((np.array(ids)[0] == self.config.image_end_token_id).sum())
        if ends != 2 * len(extra["image_grids"]):
            raise InvalidPrompt(
                f"{len(extra['image_grids'])} pictures have two views each; the prompt has the ends of {ends}"
            )

    def tokens(self, extra: Mapping[str, Any]) -> Tokens:
        num_patches, num_parts = extra["image_token_pooling"].shape
        places = 9 if self.config.patch_location else 0
        return Tokens(
            self.num_words,
            num_patches,
            num_parts,
            places,
            bool(self.config.no_more_points_class),
        )

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        spans = self.atomic_spans(ids, extra)
        inputs = {
            name: value for name, value in extra.items() if name != "token_type_ids"
        }
        return tuple(Picture(start, end, inputs) for start, end in spans)

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return one span over all pictures."""
        if "pixel_values" not in extra or "token_type_ids" not in extra:
            return ()
        marked = np.flatnonzero(np.array(extra["token_type_ids"][0]))
        return ((int(marked[0]), int(marked[-1]) + 1),) if len(marked) else ()

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------

    def row_caches(self) -> list[Any]:
        return [*super().row_caches(), Pointer()]

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        (encoded,) = rows
        *layers, pointer = cache
        mask, pictures = None, encoded.prefill.get("pictures")
        has_pictures = any(start <= first < end for first, _ in encoded.atomic)
        if has_pictures:
            picture = mx.array(encoded.prefill["is_picture"][:end])
            lines, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
            mask = ((columns <= lines) | (picture[start:][:, None] & picture[None, :]))[
                None, None
            ]
        states, hidden = self.trunk(encoded.inputs_embeds[:, start:end], layers, mask)
        if has_pictures and pictures is not None:
            pointer.pictures = pictures
            pointer.keys = self.patch_keys(
                self.normed(hidden)[0, pictures.at - start], pictures
            )
        logits = self.model.lm.lm_head(states[:, -1])  # (1, V)
        if pointer.pictures is None:
            return logits
        extra = pointer.pictures.tokens.end - pointer.pictures.tokens.first
        return mx.pad(
            self.words_only(logits), [(0, 0), (0, extra)], constant_values=SMALL
        )

    def run_step(self, step: DecodeStep) -> mx.array:
        *layers, pointers = step.caches
        assert isinstance(pointers, RowsCache)
        places: list[Pointer | None] = [
            None if row is None or row.pictures is None else row
            for row in pointers.places
        ]
        if not any(places):
            states, _ = self.trunk(self.words(step.tokens), layers, None)
            return self.model.lm.lm_head(states[:, -1])
        tokens: list[int] = step.tokens[:, 0].tolist()  # type: ignore[assignment]
        states, hidden = self.trunk(self.embed(tokens, places), layers, None)
        logits = self.model.lm.lm_head(states[:, -1])  # (B, V)
        hidden = hidden[:, -1]
        asked = PointQueries.of(self.model.point_predictor, self.normed(hidden), hidden)
        rows = []
        for place, (row, token) in enumerate(zip(places, tokens, strict=True)):
            words = logits[place : place + 1]
            rows.append(
                words
                if row is None
                else self.with_points(words, asked.of_row(place), row, token)
            )
        return stack_logits(rows)

    def words(self, ids: mx.array) -> mx.array:
        """Embed words, in float32 if the model is float16, as pictures are."""
        embeds: mx.array = self.model.lm.model.wte(ids)
        return embeds.astype(mx.float32) if embeds.dtype == mx.float16 else embeds

    def trunk(
        self, embeds: mx.array, layers: Sequence[Any], mask: Any
    ) -> tuple[mx.array, mx.array]:
        """(B, L, D) -> states, normed and not."""
        states, hidden = self.model.lm.model(
            inputs_embeds=embeds, mask=mask, cache=layers, return_pre_ln=True
        )
        return states, hidden

    def normed(self, hidden: mx.array) -> mx.array:
        norm = self.model.point_predictor.x_norm
        return hidden / math.sqrt(hidden.shape[-1]) if norm is None else norm(hidden)

    def patch_keys(self, states: mx.array, pictures: Pictures) -> mx.array:
        """Normed states (P, D) -> keys (P, E), "no more points" last."""
        predictor = self.model.point_predictor
        keys = predictor.patch_k(states)
        if predictor.patch_rotary is not None:
            keys = predictor.patch_rotary(keys, pictures.positions)
        return (
            predictor.add_no_point_class_embed(keys[None])[0]
            if pictures.tokens.has_end
            else keys
        )

    def embed(
        self, tokens: Sequence[int], places: Sequence[Pointer | None]
    ) -> mx.array:
        """Embed words, patches and parts: (B, 1, D)."""
        config = self.config
        ids = [
            token
            if row is None or row.pictures is None
            else general(token, row.pictures.tokens, config)
            for token, row in zip(tokens, places, strict=True)
        ]
        embeds = self.words(mx.array(ids)[:, None])
        rows = []
        for place, (token, row) in enumerate(zip(tokens, places, strict=True)):
            embed = embeds[place, 0]
            if row is not None and row.pictures is not None:
                pictures, kinds = row.pictures, row.pictures.tokens
                if kinds.is_patch(token):
                    embed = embed + pictures.patches[token - kinds.first].astype(
                        embed.dtype
                    )
                elif kinds.is_part(token) and row.pointed >= 0:
                    part = pictures.parts[row.pointed, token - kinds.parts]
                    # CUDA has no quantised product for a vector.
                    embed = self.model.build_vit_embedding(part[None])[0]
            rows.append(embed.astype(embeds.dtype))
        return mx.stack(rows)[:, None]

    def words_only(self, logits: mx.array) -> mx.array:
        """Mask general point tokens in logits (1, V)."""
        config, ids = self.config, mx.arange(logits.shape[-1])
        general = (
            (ids == config.patch_token_id)
            | (ids == config.subpatch_token_id)
            | (ids == config.location_token_id)
        )
        return mx.where(general, SMALL, logits)

    def with_points(
        self, logits: mx.array, asked: PointQueries, row: Pointer, token: int
    ) -> mx.array:
        """Extend logits (1, V) of a row to points: (1, W)."""
        pictures, kinds = row.pictures, row.pictures.tokens if row.pictures else None
        assert pictures is not None and kinds is not None and row.keys is not None
        norm = self.config.norm_logits
        query = asked.patch
        rotary = self.model.point_predictor.patch_rotary
        if rotary is not None and row.pointed >= 0:
            query = rotary(
                query[None], pictures.positions[row.pointed : row.pointed + 1]
            )[0]
        scores = row.keys @ query  # (P,), and one for "no more points"
        can_choose = pictures.can_choose
        if kinds.has_end:
            can_choose = mx.concatenate([can_choose, mx.array([True])])
        best = mx.argmax(mx.where(can_choose, scores, -mx.inf))
        patch = logits[0, self.config.patch_token_id]
        patches = mx.where(mx.arange(kinds.parts - kinds.first) == best, patch, SMALL)
        parts = mx.full((kinds.num_parts,), SMALL)
        if kinds.is_patch(token):
            number = token - kinds.first
            scores = pictures.part_keys[number] @ asked.part
            scores = scores / math.sqrt(row.keys.shape[-1]) if norm else scores
            parts = mx.where(pictures.is_part[number], scores, SMALL)
            row.pointed = number
        places = mx.full((kinds.num_places,), SMALL)
        if kinds.is_part(token) and asked.place is not None:
            places = asked.place
        row.take(token)
        both = [
            self.words_only(logits)[0],
            *(part.astype(logits.dtype) for part in (patches, parts, places)),
        ]
        whole, ids = mx.concatenate(both), mx.arange(kinds.end)
        for start, end in row.forbidden(self.order):
            whole = mx.where((ids >= start) & (ids < end), -mx.inf, whole)
        return whole[None]


@dataclass(frozen=True)
class PointQueries:
    """Queries of patches and parts (..., E), logits of places (..., 9)."""

    patch: mx.array
    part: mx.array
    place: mx.array | None

    @classmethod
    def of(cls, predictor: Any, normed: mx.array, hidden: mx.array) -> PointQueries:
        places = predictor.subpatch_loc_k
        logits = None if places is None else places(hidden)
        return cls(predictor.patch_q(normed), predictor.subpatch_q(normed), logits)

    def of_row(self, place: int) -> PointQueries:
        return PointQueries(
            self.patch[place],
            self.part[place],
            None if self.place is None else self.place[place],
        )


def general(token: int, tokens: Tokens, config: Any) -> int:
    if tokens.first <= token < tokens.parts:
        return int(config.patch_token_id)
    if tokens.is_part(token):
        return int(config.subpatch_token_id)
    return int(config.location_token_id) if tokens.is_place(token) else token
