"""The hooks of a family: its facts, and the steps that it may do in its own way.

Each hook has a default, which is right for a plain family: pictures become embeddings in place of their placeholders, and
the decoder counts its positions. A family overrides the few that are wrong for it. This file is all that its author reads of
the adapter; ``base.Adapter``, from which families inherit, has the calls that the engine makes, and they run these hooks.

Arrays belong to one request, with a first axis of 1, unless a docstring says otherwise. L counts a prompt's positions, D a
position's numbers, V the vocabulary. ``extra`` is a processor's output without ``input_ids``: names of ``input_keys`` alone.
A forward finds what it must know besides in ``hooks.current()`` (``records.Call``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from vlm_batch.adapters import operations
from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.by_numpy import hook_exponentials
from vlm_batch.adapters.hooks import check_attention, files_of, install_hooks
from vlm_batch.adapters.known import know
from vlm_batch.adapters.media import (
    check_pictures,
    check_sound,
    has_media,
)
from vlm_batch.adapters.modules import RememberingTower, part_of
from vlm_batch.adapters.placing import Merge, hook_placing
from vlm_batch.adapters.prompts import are_any, cut, ids_named, pad_front, taken_apart
from vlm_batch.adapters.tables import hook_tables
from vlm_batch.arrays import join_rows
from vlm_batch.caches.recurrent import masked
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import DecodeStep, Encoded, Graphs, Picture, PositionState
from vlm_batch.registry import ModelSpec


class FamilyHooks:
    """Facts of a family, and steps that it may do in its own way.

    Attributes:
        config: The model's configuration.
        model: A copy of the model's modules that shares its weights; whatever is done to it, the caller's stays as it was.
        language: Its language model.
        token_table: The token embedding, or None if ``embeddings`` names no module.
    """

    # Facts
    # -------------------------------------------------------------------------------------------------------------

    #: Facts that users ask for; ``@register`` sets it.
    spec: ClassVar[ModelSpec]
    #: Processor outputs that ``get_input_embeddings`` takes; unknown ones are refused.
    input_keys: ClassVar[frozenset[str]] = frozenset(
        {"pixel_values", "cached_image_features"}
    )
    #: Processor outputs and features that nothing reads.
    ignored: ClassVar[frozenset[str]] = frozenset()
    #: How the published processor samples a video's frames; a checkpoint's own settings override it.
    video_sampling: ClassVar[Sampling] = Sampling()
    #: The wrapper of vision towers: it stores features and joins calls of several requests.
    tower_class: type[RememberingTower] = RememberingTower
    #: mlx-vlm's method that puts features to placeholders, where ours takes its place.
    merge: ClassVar[Merge | None] = None
    #: Features that prefill takes -> the axis along which a chunk is cut, or None to pass them whole.
    prefill_axes: ClassVar[Mapping[str, int | None]] = {}
    #: Whether ``chunk_features`` are a row's own arrays (1, ...), so that prompts may share an array.
    _features_have_rows: ClassVar[bool] = False
    #: Whether recurrent layers mask positions behind a row's end, so that shorter prompts may be filled up.
    _masks_states: ClassVar[bool] = False
    #: The path of the token embedding in the language model.
    embeddings: ClassVar[str] = "model.embed_tokens"
    #: The path of the module whose output is cut to the positions that need logits, so that the LM head runs once a prompt;
    #: None where the family returns the last position by itself.
    last_hidden: ClassVar[str | None] = "model"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.config: Any = self.model.config
        self.language: Any = self.model.language_model
        self.token_table: Any = part_of(self.language, self.embeddings)

    # mlx-vlm's code
    # -------------------------------------------------------------------------------------------------------------

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        """Return mlx-vlm's module classes -> our replacements."""
        return {}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """Return the processor, corrected where mlx-vlm's differs from the published."""
        return processor

    def hook_functions(self) -> None:
        """Hook mlx-vlm's functions in the model's files.

        Raises:
            UnsupportedModel: Attention calls none of them.
        """
        family, files = self.spec.family, files_of(self.language)
        install_hooks(files, HOOKS, family=family)
        operations.hook_rule(files, family)
        hook_placing(files_of(self.model), family)
        hook_tables(family)
        hooked = HOOKS["scaled_dot_product_attention"]
        check_attention(self.language, hooked, family=family)
        hook_exponentials(self.model, files_of(self.model))

    # What comes in
    # -------------------------------------------------------------------------------------------------------------

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        """Placeholder ids of all media; empty if the processor gives positions instead."""
        names = (
            "image_token_id",
            "image_token_index",
            "video_token_id",
            "video_token_index",
        )
        return ids_named(self.config, names) | self._audio_token_ids

    @cached_property
    def _audio_token_ids(self) -> frozenset[int]:
        if not self.spec.audio:
            return frozenset()
        names = ("audio_token_id", "audio_token_index", "sound_context_token_id")
        return ids_named(self.config, names)

    @property
    def _without_embeddings(self) -> frozenset[int]:
        """Ids that beside media need no embedding."""
        return self.image_token_ids

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        """Repeat placeholders, one per feature, where the processor leaves fewer: (1, L)."""
        return ids

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        """Count the pictures' placeholders by shapes alone; None where these do not tell."""
        return None

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Check that ids (1, L), numpy or MLX, have the media's placeholders.

        Raises:
            InvalidPrompt: They have more or fewer.
        """
        if self.spec.audio:
            check_sound(ids, extra, self._audio_token_ids)
        marks = self.image_token_ids - self._audio_token_ids
        check_pictures(ids, extra, marks, self.count_placeholders)

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Return the prompt's pictures in order, with their spans and inputs: the same inputs are the same picture.

        They are separate if placeholder runs have one length and each input an entry per run, else one ``Picture``.
        """
        return taken_apart(ids, extra, self.image_token_ids - self._audio_token_ids)

    def recordings(
        self, ids: mx.array, sound: Mapping[str, Any]
    ) -> tuple[Picture, ...]:
        """Return the prompt's recordings, as ``pictures`` does."""
        return taken_apart(ids, sound, self._audio_token_ids)

    def picture_positions(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        """Return the mask (L,) of media features; all True if unknown."""
        tokens, marks = np.array(ids)[0], self.image_token_ids
        if marks or not has_media(extra):
            return are_any(tokens, marks)
        return np.ones(len(tokens), dtype=np.bool_)

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return each processed picture's (width, height) in pixels, if known."""
        return ()

    # Encode: from inputs to embeddings
    # -------------------------------------------------------------------------------------------------------------

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``inputs_embeds`` (1, L, D) and what else the decoder takes; the default asks the model.

        Others than those of ``prefill_axes``, ``ignored``, ``position_ids``, ``rope_deltas`` and ``decode`` are refused.
        ``decode`` has a row's own state of decode steps (``DecodeStep.extras``).
        """
        extra = {name: know(value) for name, value in extra.items()}
        found = self.model.get_input_embeddings(
            know(ids), extra.pop("pixel_values", None), **extra
        )
        return {
            name: value for name, value in found.to_dict().items() if value is not None
        }

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        """Return ``features`` where all media lie in the first ``cached`` positions: zeros for these, then text."""
        start = min(cached, ids.shape[1] - 1)  # models cannot embed an empty prompt
        found = self.features(ids[:, start:], {})
        axes = {"inputs_embeds": 1, **self.prefill_axes}
        return {
            name: pad_front(value, axes[name], start)
            for name, value in found.items()
            if name in axes
        }

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Return the row's positions; the default counts tokens."""
        return PositionState()

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return spans [start, end) that no chunk may cut, since their positions attend to each other both ways."""
        return ()

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------------------

    @property
    def is_causal(self) -> bool:
        """Whether a position sees nothing behind its own atomic span. Prompts may then share an array, and be padded."""
        return True

    @property
    def graphs(self) -> Graphs:
        """Conditions under which decode steps become graphs; a family sets an attribute (``records.Graphs``)."""
        return Graphs.UNFUSED

    def row_caches(self) -> list[Any]:
        """Make an empty single-row cache, one entry per layer, of the model's own kinds."""
        fresh: list[Any] = make_prompt_cache(self.language)
        return masked(fresh) if self._masks_states else fresh

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run the language model.

        Args:
            ids: (B, L).
            embeds: (B, L, D), or None for those of ``ids``.
            cache: A cache per layer, of one row or of a batch.
            extra: Features and positions.

        Returns:
            Logits (B, V) of the last position.
        """
        found = self.language(ids, inputs_embeds=embeds, cache=cache, **extra)
        return found.logits[:, -1]

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        """Run positions [start, end) of prompts, one or of one length, through ``forward``: logits (R, V)."""
        ids = mx.concatenate([row.input_ids[:, start:end] for row in rows])
        embeds = mx.concatenate([row.inputs_embeds[:, start:end] for row in rows])
        own = rows if rows[0].has_rows else rows[:1]
        extra = join_rows([self.chunk_features(row, start, end) for row in own])
        prompts = [row.position.prompt for row in rows]
        positions = [one[..., start:end] for one in prompts if one is not None]
        if positions:
            extra["position_ids"] = mx.concatenate(positions, axis=-2)
        return self.forward(ids, embeds, cache, extra)

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """Return a row's features of a chunk, as ``forward`` takes them; the default cuts along ``prefill_axes``."""
        return {
            name: cut(value, self.prefill_axes[name], start, end)
            for name, value in encoded.prefill.items()
        }

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        """Act on a row between its last chunk and its join."""

    def run_step(self, step: DecodeStep) -> mx.array:
        """Run one token (B, 1) of every place through ``forward``: logits (B, V)."""
        return self.forward(step.tokens, None, step.caches, {})
