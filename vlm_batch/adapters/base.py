"""The ``Adapter``, which alone knows a model family: the calls that the engine makes.

What a family may say and do in its own way is in ``family.FamilyHooks``; its author need not read this file. The engine asks
some of the hooks, too: ``is_causal``, ``graphs`` and ``finish_prefill``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vlm_batch.adapters import operations, recurrent
from vlm_batch.adapters.experts import EXPERTS
from vlm_batch.adapters.family import FamilyHooks
from vlm_batch.adapters.few_rows import suit_few_rows
from vlm_batch.adapters.hooks import running
from vlm_batch.adapters.joint import (
    PrecomputedInputs,
    TowerOutputs,
    outputs_together,
)
from vlm_batch.adapters.longrope import ROW_ROPES, longest_short, marked_long
from vlm_batch.adapters.media import (
    AUDIO_INPUTS,
    PICTURE_INPUTS,
    has_media,
    has_sound,
    sound_apart,
)
from vlm_batch.adapters.modules import clone_modules, cut_answer, evaluate_arrays
from vlm_batch.adapters.placing import know_positions
from vlm_batch.adapters.products import hold_products, turned, watched
from vlm_batch.adapters.prompts import (
    are_any,
    check_tokens,
    dtype_of,
    num_words,
    padded,
    sight_of,
)
from vlm_batch.adapters.rotary import STEP_ROPES
from vlm_batch.adapters.towers import (
    audio_towers,
    can_hear,
    remember_features,
    vision_towers,
)
from vlm_batch.arrays import Joined
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.caches.recurrent import mask_behind
from vlm_batch.errors import InvalidPrompt, InvalidRequest
from vlm_batch.records import Call, DecodeStep, Encoded, Picture, PromptKey
from vlm_batch.store.digest import as_words, digest, joined, sourced

#: Processor outputs that no decoder reads: a row has no padding, token types repeat the ids, and few families count seconds.
IGNORED_INPUTS = frozenset(
    {
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "image_sizes",
        "second_per_grid_ts",
    }
)
#: Attributes in which mlx-vlm's language models keep the last request's positions.
POSITIONS = frozenset({"_position_ids", "_rope_deltas"})
#: Features that every family knows without naming them in ``prefill_axes``.
KNOWN_FEATURES = frozenset({"inputs_embeds", "position_ids", "rope_deltas", "decode"})
#: Numbers of a patch where the configuration does not tell its side.
USUAL_PATCH = 3 * 14**2


class Adapter(FamilyHooks):
    """Encode, prefill and decode the rows of one model family.

    It works on a copy of the model that shares weights, and keeps no request's state.
    """

    def __init__(self, model: nn.Module) -> None:
        evaluate_arrays(model)
        ours = {**operations.layers(), **ROW_ROPES, **STEP_ROPES, **EXPERTS}
        super().__init__(clone_modules(model, {**ours, **self.patches()}))
        if self.spec.audio and not can_hear(self.model):
            silent = replace(
                self.spec,
                audio=False,
                no_audio="this checkpoint has no part that hears",
            )
            vars(self)["spec"] = silent
        self._num_words = num_words(self.token_table)
        text = getattr(self.config, "text_config", None) or self.config
        limit = getattr(text, "max_position_embeddings", None)
        #: The context length in positions, if configured.
        self.max_context: int | None = int(limit) if limit else None
        self._longest_short = longest_short(self.language)
        self.hook_functions()
        if self.merge is not None:
            know_positions(self.model, self.merge, self.image_token_ids)
        if self.last_hidden is not None:
            cut_answer(attrgetter(self.last_hidden)(self.language))
        suit_few_rows(self.language)
        remember_features(self, None)

    def with_products(self, numbers: Mapping[str, Sequence[int]]) -> Adapter:
        """Return a copy that holds the named products to fixed row counts; without any, this adapter."""
        if not numbers:
            return self
        twin = copy.copy(self)
        vars(twin).update(clone_modules(vars(self)))
        hold_products(twin.language, numbers)
        return twin

    def watched(self) -> AbstractContextManager[list[mx.array]]:
        """Collect the rows that the language model's products get meanwhile."""
        return watched(self.language)

    # Inputs
    # -------------------------------------------------------------------------------------------------------------

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Check inputs (numpy) without MLX, on the submitter's thread.

        Raises:
            InvalidPrompt: They cannot fit.
        """
        extra = self._known_inputs(inputs)
        if type(self).expand_ids is FamilyHooks.expand_ids:
            self.check_placeholders(inputs["input_ids"], extra)

    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey:
        """Return the prompt's key per position: ids, picture digests and bidirectional spans."""
        ids, extra = self._read(inputs)
        with self._fitting(ids, extra):
            pictures, atomic = self._media(ids, extra), self.atomic_spans(ids, extra)
        rows = np.zeros((ids.shape[1], 3), dtype=np.int64)
        rows[:, 0] = np.array(ids)[0]
        for picture in pictures:
            rows[picture.start : picture.end, 1:] = as_words(digest(picture.inputs))
        for start, end in atomic:  # the first position attends to the last
            rows[start:end, 1:] = as_words(digest(rows[start:end]))
        spans = tuple((picture.start, picture.end) for picture in pictures)
        key = PromptKey(rows, spans=(*spans, *atomic), pictures=spans)
        if any(picture.seen is not None for picture in pictures):
            key = key.mixed(sight_of(pictures, rows))
        return self._marked(key, extra)

    def _marked(self, key: PromptKey, extra: Mapping[str, Any]) -> PromptKey:
        is_long = self._longest_short is not None and key.length > self._longest_short
        return marked_long(key) if is_long else key

    def _media(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        sound, others = sound_apart(extra)
        if not sound:
            return self.pictures(ids, extra)
        is_sound = are_any(np.array(ids), self._audio_token_ids)
        silent = mx.where(mx.array(is_sound), 0, ids)
        found = (*self.pictures(silent, others), *self.recordings(ids, sound))
        media = sorted(found, key=lambda one: one.start)
        if all(one.end <= other.start for one, other in pairwise(media)):
            return tuple(media)
        return (Picture(media[0].start, max(one.end for one in media), extra),)

    def _read(self, inputs: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        """Return ids (1, L) with all placeholders, and the inputs that the family knows; raise InvalidPrompt if they misfit."""
        extra = self._known_inputs(inputs)
        ids = self.expand_ids(inputs["input_ids"], extra)
        # without a picture, a placeholder id is looked up like any other
        exempt = self._without_embeddings if extra else frozenset()
        check_tokens(ids, self._num_words, exempt)
        self.check_placeholders(ids, extra)
        return ids, extra

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of ``input_keys``; raise InvalidPrompt for others than ignored ones."""
        given = {name for name, value in inputs.items() if value is not None}
        unknown = (
            given - self.input_keys - self.ignored - IGNORED_INPUTS - {"input_ids"}
        )
        if unknown:
            raise InvalidPrompt(
                f"{self.spec.family} does not know the inputs {sorted(unknown)}; it takes {sorted(self.input_keys)}"
            )
        known = given & self.input_keys
        return {name: _whole(inputs[name]) for name in inputs if name in known}

    @contextmanager
    def _fitting(self, ids: mx.array, extra: Mapping[str, Any]) -> Iterator[None]:
        """Raise a ValueError of the model's code as InvalidPrompt, where media may be the cause."""
        try:
            yield
        except InvalidRequest:
            raise
        except ValueError as error:
            if not has_media(extra):
                raise
            given = int(self.picture_positions(ids, extra).sum())
            noun = "media" if has_sound(extra) else "pictures"
            raise InvalidPrompt(
                f"the {noun} do not fit the prompt, which has {given} placeholder tokens for them: {error}"
            ) from error

    # Encode
    # -------------------------------------------------------------------------------------------------------------

    def encode(
        self, inputs: Mapping[str, Any], call: Call = Call(), cached: int = 0
    ) -> Encoded:
        """Turn one request's processor output into a row.

        Args:
            inputs: ``input_ids`` (1, L) and others.
            cached: Positions already in the row's caches; pictures are skipped if all lie there.

        Raises:
            InvalidPrompt: An input is unknown, or media misfit the prompt.
        """
        if isinstance(inputs, PrecomputedInputs):
            if inputs.outputs.result is not None and not cached:
                return inputs.outputs.result
            inputs.outputs.index = 0
            call = replace(call, tower_outputs=inputs.outputs)
        with running(call):
            try:
                return self._encoded(inputs, call, cached)
            finally:
                # the next request must not see these positions, even if this one raised
                self._forget_positions()

    def _forget_positions(self) -> None:
        for name in POSITIONS:
            if hasattr(self.language, name):
                setattr(self.language, name, None)

    def _encoded(self, inputs: Mapping[str, Any], call: Call, cached: int) -> Encoded:
        ids, extra = self._read(inputs)
        with self._fitting(ids, extra):
            features = self._features_behind(ids, extra, cached)
        embeds = features["inputs_embeds"]
        if call.is_fixed and embeds.dtype == mx.float32:
            # a batch with rows of two dtypes computes in the wider one
            dtype = dtype_of(self.token_table)
            embeds = embeds if dtype is None else embeds.astype(dtype)
        return Encoded(
            input_ids=ids,
            inputs_embeds=embeds,
            position=self.positions(ids, extra, features),
            prefill=self._for_prefill(features),
            decode=features.get("decode", {}),
            atomic=self.atomic_spans(ids, extra),
            is_picture=self.picture_positions(ids, extra),
            model_image_sizes=self.model_image_sizes(extra),
            cached=cached,
            has_rows=self._features_have_rows,
        )

    def _features_behind(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        if cached > 0:
            media = self._media(ids, extra)
            if all(one.end <= cached for one in media):
                return self.features_after(ids, extra, cached)
        return self.features(ids, sourced(extra))

    def _for_prefill(self, features: Mapping[str, Any]) -> dict[str, Any]:
        known = self.prefill_axes.keys() | self.ignored | KNOWN_FEATURES
        unknown = features.keys() - known
        if unknown:
            raise TypeError(
                f"{self.spec.family} does not know the features {sorted(unknown)}"
            )
        return {name: features[name] for name in self.prefill_axes if name in features}

    def encode_together(
        self, requests: Sequence[Mapping[str, Any]], call: Call = Call()
    ) -> list[Mapping[str, Any]]:
        """Join several requests' tower calls, up to ``call.most_patches`` patches.

        Returns:
            The inputs for ``encode``, with any tower outputs attached. Those that still need a tower are the same objects.
        """

        def encode(inputs: Mapping[str, Any], outputs: TowerOutputs) -> Encoded:
            return Adapter.encode(self, inputs, replace(call, tower_outputs=outputs))

        outputs = outputs_together(
            requests, encode, self._shared_media(call), call, self._values_of_patch
        )
        prepared: list[Mapping[str, Any]] = []
        for at, inputs in enumerate(requests):
            known = outputs.get(at) or TowerOutputs()
            if known.is_any or not has_media(inputs):
                inputs = PrecomputedInputs(inputs, known)
            prepared.append(inputs)
        return prepared

    def _shared_media(self, call: Call) -> tuple[str, ...]:
        """Return the prefixes of inputs whose towers take several requests' media in one call."""
        if self.spec.max_rows == 1:
            return ()
        found: tuple[str, ...] = ()
        if _shares_calls(vision_towers(self.model), call):
            found += PICTURE_INPUTS
        if _shares_calls(audio_towers(self.model), call):
            found += AUDIO_INPUTS
        return found

    @property
    def _values_of_patch(self) -> int:
        side = getattr(getattr(self.config, "vision_config", None), "patch_size", None)
        return 3 * side**2 if isinstance(side, int) else USUAL_PATCH

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------------------

    def make_cache(self, kv: KVQuantisation | None = None) -> list[Any]:
        """Make an empty single-row cache, one entry per layer; ``kv`` quantises it."""
        fresh = self.row_caches()
        return fresh if kv is None else kv.caches(fresh)

    @property
    def scores_chunks(self) -> bool:
        """Whether a chunk's positions can all have logits."""
        return self.last_hidden is not None

    @cached_property
    def can_draft(self) -> bool:
        """Whether a decode forward may have several positions of a row."""
        return recurrent.can_draft(self)

    def prefill(
        self,
        rows: Sequence[Encoded],
        cache: list[Any],
        begin: int,
        end: int,
        call: Call = Call(),
    ) -> mx.array:
        """Prefill positions [begin, end) of one row into its cache, or R whole prompts, padded to ``end``, into a fresh one.

        Returns:
            Logits (R, V) of each row's last position before ``call.ends``; (end - begin, V) for one scored row.
        """
        lengths = tuple(row.length for row in rows)
        with running(replace(call, begin=begin, lengths=lengths)):
            filled = [
                row if row.length >= end else padded(row, end, self.prefill_axes)
                for row in rows
            ]
            if call.ends is not None:
                mask_behind(cache, [stop - begin for stop in call.ends])
            return self.run_chunk(filled, cache, begin, end)

    def decode(self, step: DecodeStep, call: Call = Call()) -> mx.array:
        """Decode one token per place: logits (B, V)."""
        with (
            running(replace(call, positions=step.positions)),
            turned(self.language) if step.is_traced else nullcontext(),
        ):
            return self.run_step(step)


def _whole(value: Any) -> Any:
    return joined(value) if isinstance(value, Joined) else value


def _shares_calls(towers: Sequence[tuple[nn.Module, str]], call: Call) -> bool:
    """Whether one of the towers, (owner, attribute) each, takes several requests' media in one call."""
    return any(owner[name].shares_calls(call) for owner, name in towers)


def trunk_logits(
    language: Any,
    ids: mx.array,
    embeds: mx.array | None,
    cache: Sequence[Any],
    extra: Mapping[str, Any],
) -> mx.array:
    """Run a language model's trunk and head, past its ``__call__``: logits (B, V)."""
    # (B, 1, D)
    hidden = language.model(ids, inputs_embeds=embeds, cache=cache, **extra)
    return head_of(language)(hidden)[:, -1]


def head_of(language: Any) -> Any:
    """Return what maps hidden states (..., D) to logits (..., V)."""
    is_tied = getattr(language, "args", language.config).tie_word_embeddings
    return language.model.embed_tokens.as_linear if is_tied else language.lm_head
