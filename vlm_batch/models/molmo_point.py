"""Molmo-Point: Molmo 2 whose answers point at a picture, by tokens of the picture's own beyond the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.modules import RememberingBatchTower, two_tables
from vlm_batch.arrays import stack_logits
from vlm_batch.caches.rows import RowsCache
from vlm_batch.errors import InvalidPrompt
from vlm_batch.models._molmo_point import Order, Pictures, Pointer, Questions, Tokens, general
from vlm_batch.records import Call, DecodeStep, Encoded, Picture
from vlm_batch.registry import ModelSpec, register

#: The logit of a token that the model does not choose from at a step (modeling_molmo_point.py, ``small_val``).
SMALL = -100000.0


class PooledLayers(RememberingBatchTower):
    """Keeps the layers whose patches are pooled."""

    def fresh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        count = self._config.vision_config.num_hidden_layers
        kept = {layer % count for layer in self._config.adapter_config.vit_layers}
        return [states if index in kept else None for index, states in enumerate(self.tower(*args, **kwargs))]


@register(
    ModelSpec(
        family="molmo_point",
        model_types=("molmo_point",),
        notes=(
            "what a row can point at, and has pointed at, belongs to the row, and so does the width of its logits; mlx-vlm "
            "keeps the last picture's on the model, for a text that follows, too (molmo_point.py:624)",
            "all tokens of all pictures see each other, as in the published model (modeling_molmo_point.py, "
            "token_type_ids_mask_function); mlx-vlm drops token_type_ids, and its pictures are causal (molmo_point.py:394)",
            "an answer to a picture does not begin with one of the three tokens that stand for points in general, as in the "
            "published model; mlx-vlm leaves them among the first token's choices (molmo_point.py:711)",
            "the keys of patches are made of the chunk that holds the pictures, wherever others end; mlx-vlm takes the "
            "first chunk's (molmo_point.py:653)",
            "where a patch comes again and none of its parts is left, the last part comes again; mlx-vlm takes any word, and "
            "the published code stops (molmo_point.py:303)",
            "answers are text with the ids of points; coordinates are not worked out. Every step waits for the tokens of "
            "the step before, which decide what is fed back, while a row has a picture",
        ),
    )
)
class MolmoPoint(Adapter):
    """A patch's logit is that of the token for patches in general, at the patch that the hidden state points at."""

    last_hidden = None
    tower_class = PooledLayers
    input_keys = frozenset({"pixel_values", "image_token_pooling", "image_grids", "image_num_crops", "token_type_ids"})
    prefill_axes: ClassVar[Mapping[str, int | None]] = {"pictures": None, "is_picture": None}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config, inference = self.config, ("always", "inference")
        self.order = Order(
            sorted_patches=config.mask_patches in inference,
            sorted_parts=config.mask_subpatches in inference,
            no_repeats=config.mask_repeats in ("all", "inference"),
        )

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        from mlx_vlm.models.molmo_point.language import Molmo2Embedding

        return {Molmo2Embedding: two_tables(Molmo2Embedding)}

    # Encode
    # -------------------------------------------------------------------------------------------------------------

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        return frozenset({self.config.image_patch_id, self.config.image_non_indexable_patch_id})

    def _read(self, inputs: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        """Points of earlier answers have no embedding of their own: what they stood for is not in the prompt."""
        ids, extra = super()._read(inputs)
        beyond = [token for token in np.array(ids)[0].tolist() if not 0 <= token < self.num_words]
        if beyond:
            raise InvalidPrompt(
                f"token id {beyond[0]} is beyond the model's {self.num_words}: does the tokenizer belong to this model? A "
                "point of an earlier answer cannot be given back"
            )
        return ids, extra

    @property
    def num_words(self) -> int:
        """The number of tokens without points."""
        return int(self.config.text_config.vocab_size + self.config.text_config.additional_vocab_size)

    def _encoded(self, inputs: Mapping[str, Any], call: Call, cached: int) -> Encoded:
        words = self.tokens(inputs).end if inputs.get("image_token_pooling") is not None else self.num_words
        return replace(super()._encoded(inputs, call, cached), vocabulary=words)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Upstream's steps; the attributes that it leaves on the model go into ``Pictures``."""
        if "pixel_values" not in extra:
            return {"inputs_embeds": self.words(ids)}
        self._check(ids, extra)
        embeds = self.model.get_input_embeddings(ids, **extra).inputs_embeds  # float32, for float16 would overflow
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
        return {"inputs_embeds": embeds, "pictures": pictures, "is_picture": np.array(extra["token_type_ids"][0]) > 0}

    def _taken(self) -> dict[str, Any]:
        """What upstream keeps on the model of its last picture, which is left without."""
        model = self.model
        found: dict[str, Any] = model._image_cache
        model._image_cache = model._token_bounds = model._last_predicted_patch_id = None
        model._generated_ids_list = []
        return found

    def _check(self, ids: mx.array, extra: Mapping[str, Any]) -> None:
        """Refuse inputs that upstream would misread."""
        if missing := self.input_keys - extra.keys():
            raise InvalidPrompt(f"a picture of molmo_point comes with {sorted(missing)}, which its processor returns")
        has_patch: np.ndarray = np.array(extra["image_token_pooling"]).max(axis=1) >= 0
        if not has_patch.all():
            raise InvalidPrompt("a token of the picture pools no patch: image_token_pooling has a row below zero")
        if (given := int(self.picture_places(ids, extra).sum())) != len(has_patch):
            raise InvalidPrompt(f"the pictures need {len(has_patch)} placeholder tokens; the prompt has {given}")
        ends = int((np.array(ids)[0] == self.config.image_end_token_id).sum())
        if ends != 2 * len(extra["image_grids"]):
            raise InvalidPrompt(
                f"{len(extra['image_grids'])} pictures have two views each; the prompt has the ends of {ends}"
            )

    def tokens(self, extra: Mapping[str, Any]) -> Tokens:
        """The ids of a prompt's markers for pictures."""
        num_patches, num_parts = extra["image_token_pooling"].shape
        places = 9 if self.config.patch_location else 0
        return Tokens(self.num_words, num_patches, num_parts, places, bool(self.config.no_more_points_class))

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """All of them are one, as they see each other; the kinds of the prompt's tokens are none of them."""
        spans = self.atomic_spans(ids, extra)
        inputs = {name: value for name, value in extra.items() if name != "token_type_ids"}
        return tuple(Picture(start, end, inputs) for start, end in spans)

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """From the first picture's first token to the last picture's last, whatever text lies between them."""
        if "pixel_values" not in extra or "token_type_ids" not in extra:
            return ()
        marked = np.flatnonzero(np.array(extra["token_type_ids"][0]))
        return ((int(marked[0]), int(marked[-1]) + 1),) if len(marked) else ()

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------

    def row_caches(self) -> list[Any]:
        return [*super().row_caches(), Pointer()]

    def run_chunk(self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int) -> mx.array:
        (encoded,) = rows
        *layers, pointer = cache
        mask, pictures = None, encoded.prefill.get("pictures")
        has_pictures = any(start <= first < end for first, _ in encoded.atomic)
        if has_pictures:
            picture = mx.array(encoded.prefill["is_picture"][:end])
            lines, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
            mask = ((columns <= lines) | (picture[start:][:, None] & picture[None, :]))[None, None]
        states, hidden = self.trunk(encoded.inputs_embeds[:, start:end], layers, mask)
        if has_pictures and pictures is not None:
            pointer.pictures = pictures
            pointer.keys = self.patch_keys(self.normed(hidden)[0, pictures.at - start], pictures)
        logits = self.model.lm.lm_head(states[:, -1])  # (1, V)
        if pointer.pictures is None:
            return logits
        extra = pointer.pictures.tokens.end - pointer.pictures.tokens.first
        return mx.pad(self.words_only(logits), [(0, 0), (0, extra)], constant_values=SMALL)

    def run_step(self, step: DecodeStep) -> mx.array:
        """Rows with pictures embed and choose points of their own; the trunk runs once for all."""
        *layers, pointers = step.caches
        assert isinstance(pointers, RowsCache)
        places: list[Pointer | None] = [None if row is None or row.pictures is None else row for row in pointers.places]
        if not any(places):
            states, _ = self.trunk(self.words(step.tokens), layers, None)
            return self.model.lm.lm_head(states[:, -1])
        tokens: list[int] = step.tokens[:, 0].tolist()  # type: ignore[assignment]
        states, hidden = self.trunk(self.embed(tokens, places), layers, None)
        logits = self.model.lm.lm_head(states[:, -1])  # (B, V)
        hidden = hidden[:, -1]
        asked = Questions.of(self.model.point_predictor, self.normed(hidden), hidden)
        rows = []
        for place, (row, token) in enumerate(zip(places, tokens, strict=True)):
            words = logits[place : place + 1]
            rows.append(words if row is None else self.with_points(words, asked.of_row(place), row, token))
        return stack_logits(rows)

    def words(self, ids: mx.array) -> mx.array:
        """The embeddings of words: float32 in float16 models, as pictures' are, so that no row's type is its neighbour's."""
        embeds: mx.array = self.model.lm.model.wte(ids)
        return embeds.astype(mx.float32) if embeds.dtype == mx.float16 else embeds

    def trunk(self, embeds: mx.array, layers: Sequence[Any], mask: Any) -> tuple[mx.array, mx.array]:
        """(B, L, D) embeddings -> the same after all layers, normed for the head and as they are."""
        states, hidden = self.model.lm.model(inputs_embeds=embeds, mask=mask, cache=layers, return_pre_ln=True)
        return states, hidden

    def normed(self, hidden: mx.array) -> mx.array:
        """(..., D) as the point predictor reads it."""
        norm = self.model.point_predictor.x_norm
        return hidden / math.sqrt(hidden.shape[-1]) if norm is None else norm(hidden)

    def patch_keys(self, states: mx.array, pictures: Pictures) -> mx.array:
        """(P, E) of the normed states (P, D) at the patches' tokens; one more for "no more points"."""
        predictor = self.model.point_predictor
        keys = predictor.patch_k(states)
        if predictor.patch_rotary is not None:
            keys = predictor.patch_rotary(keys, pictures.positions)
        return predictor.add_no_point_class_embed(keys[None])[0] if pictures.tokens.has_end else keys

    def embed(self, tokens: Sequence[int], places: Sequence[Pointer | None]) -> mx.array:
        """(B, 1, D): words as they are, a patch with its feature, a part of a patch as that part's feature."""
        config = self.config
        ids = [
            token if row is None or row.pictures is None else general(token, row.pictures.tokens, config)
            for token, row in zip(tokens, places, strict=True)
        ]
        embeds = self.words(mx.array(ids)[:, None])
        rows = []
        for place, (token, row) in enumerate(zip(tokens, places, strict=True)):
            embed = embeds[place, 0]
            if row is not None and row.pictures is not None:
                pictures, kinds = row.pictures, row.pictures.tokens
                if kinds.is_patch(token):
                    embed = embed + pictures.patches[token - kinds.first].astype(embed.dtype)
                elif kinds.is_part(token) and row.pointed >= 0:
                    part = pictures.parts[row.pointed, token - kinds.parts]
                    embed = self.model.build_vit_embedding(part[None])[
                        0
                    ]  # CUDA has no product of few bits for a vector
            rows.append(embed.astype(embeds.dtype))
        return mx.stack(rows)[:, None]

    def words_only(self, logits: mx.array) -> mx.array:
        """(1, V) without the three tokens that stand for points in general."""
        config, ids = self.config, mx.arange(logits.shape[-1])
        general = (ids == config.patch_token_id) | (ids == config.subpatch_token_id) | (ids == config.location_token_id)
        return mx.where(general, SMALL, logits)

    def with_points(self, logits: mx.array, asked: Questions, row: Pointer, token: int) -> mx.array:
        """Logits (1, V) of words -> (1, W) of words, patches, parts and places, of one row after ``token``."""
        pictures, kinds = row.pictures, row.pictures.tokens if row.pictures else None
        assert pictures is not None and kinds is not None and row.keys is not None
        norm = self.config.norm_logits
        query = asked.patch
        rotary = self.model.point_predictor.patch_rotary
        if rotary is not None and row.pointed >= 0:
            query = rotary(query[None], pictures.positions[row.pointed : row.pointed + 1])[0]
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
        both = [self.words_only(logits)[0], *(part.astype(logits.dtype) for part in (patches, parts, places))]
        whole, ids = mx.concatenate(both), mx.arange(kinds.end)
        for start, end in row.forbidden(self.order):
            whole = mx.where((ids >= start) & (ids < end), -mx.inf, whole)
        return whole[None]
