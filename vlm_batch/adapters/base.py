"""The ``Adapter``, which alone knows a model family."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from vlm_batch.adapters import operations
from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.by_numpy import hook_exponentials
from vlm_batch.adapters.experts import EXPERTS
from vlm_batch.adapters.few_rows import suit_few_rows
from vlm_batch.adapters.hooks import check_attention, files_of, install_hooks, running
from vlm_batch.adapters.joint import (
    PrecomputedInputs,
    TowerCall,
    TowerOutputs,
    advance,
    make_calls,
)
from vlm_batch.adapters.known import know
from vlm_batch.adapters.longrope import ROW_ROPES, longest_short, marked_long
from vlm_batch.adapters.modules import (
    RememberingTower,
    clone_modules,
    cut_answer,
    evaluate_arrays,
    part_of,
)
from vlm_batch.adapters.placing import Merge, hook_placing, know_places
from vlm_batch.adapters.products import hold_products, turned, watched
from vlm_batch.adapters.prompts import (
    are_any,
    check_tokens,
    cut,
    dtype_of,
    ids_named,
    num_words,
    pad_front,
    padded,
    sight_of,
    taken_apart,
)
from vlm_batch.adapters.rotary import STEP_ROPES
from vlm_batch.adapters.tables import hook_tables
from vlm_batch.adapters.towers import (
    audio_towers,
    can_hear,
    remember_features,
    vision_towers,
)
from vlm_batch.arrays import Joined, join_rows
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.caches.recurrent import mask_behind, masked
from vlm_batch.errors import InvalidPrompt, InvalidRequest
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import (
    Call,
    DecodeStep,
    Encoded,
    Graphs,
    Picture,
    PositionState,
    PromptKey,
)
from vlm_batch.registry import ModelSpec
from vlm_batch.store.digest import as_words, digest, joined, sourced

#: Prefixes of the processor outputs that hold pictures, videos or their features.
PICTURE_INPUTS = (
    "pixel_values",
    "patch_pixel_values",
    "cached_image_features",
    "image_embeds",
    "encoder_outputs",
)

#: Prefixes of the processor outputs that hold recordings or their features.
AUDIO_INPUTS = (
    "input_features",
    "input_audio",
    "input_values",
    "audio_",
    "feature_attention_mask",
    "sound_",
)

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


class Adapter:
    """Encode, prefill and decode the rows of one model family.

    It works on a copy of the model that shares weights, and keeps no request's state.
    """

    spec: ClassVar[ModelSpec]
    #: Processor outputs that ``get_input_embeddings`` takes; unknown ones are refused.
    input_keys: ClassVar[frozenset[str]] = frozenset(
        {"pixel_values", "cached_image_features"}
    )
    #: Features that prefill takes -> the axis along which a chunk is cut, or None to pass them whole.
    prefill_axes: ClassVar[Mapping[str, int | None]] = {}
    #: Whether ``chunk_features`` are a row's own arrays (1, ...), so that prompts may share an array.
    _features_have_rows: ClassVar[bool] = False
    #: Whether recurrent layers mask positions behind a row's end, so that shorter prompts may be filled up.
    _masks_states: ClassVar[bool] = False
    #: Processor outputs and features that nothing reads.
    ignored: ClassVar[frozenset[str]] = frozenset()
    #: Whether decode steps may be compiled.
    graphs: Graphs = Graphs.UNFUSED
    #: Whether a position sees nothing behind its own atomic span; prompts may then be padded on the right.
    is_causal: bool = True
    #: How the published processor samples a video's frames; a checkpoint's own settings override it.
    video_sampling: ClassVar[Sampling] = Sampling()
    #: The wrapper of vision towers: it stores features and joins calls of several requests.
    tower_class: type[RememberingTower] = RememberingTower
    #: The path of the token embedding in the language model.
    embeddings: ClassVar[str] = "model.embed_tokens"
    #: The path of the module whose output is cut to the positions that need logits, so that the LM head runs once a prompt;
    #: None where the family returns the last position by itself.
    last_hidden: ClassVar[str | None] = "model"

    #: mlx-vlm's method that puts features to placeholders, where ours takes its place.
    merge: ClassVar[Merge | None] = None

    def __init__(self, model: nn.Module) -> None:
        evaluate_arrays(model)
        self.config: Any = model.config
        self.model: Any = clone_modules(
            model,
            {
                **operations.layers(),
                **ROW_ROPES,
                **STEP_ROPES,
                **EXPERTS,
                **self.patches(),
            },
        )
        if self.spec.audio and not can_hear(self.model):
            silent = replace(
                self.spec,
                audio=False,
                no_audio="this checkpoint has no part that hears",
            )
            vars(self)["spec"] = silent
        self.language: Any = self.model.language_model
        #: The token embedding, or None if ``embeddings`` names no module.
        self.token_table: Any = part_of(self.language, self.embeddings)
        self._num_words = num_words(self.token_table)
        text = getattr(self.config, "text_config", None) or self.config
        limit = getattr(text, "max_position_embeddings", None)
        #: The context length in positions, if configured.
        self.max_context: int | None = int(limit) if limit else None
        self._longest_short = longest_short(self.language)
        self.hook_functions()
        if self.merge is not None:
            know_places(self.model, self.merge, self.image_token_ids)
        if self.last_hidden is not None:
            cut_answer(attrgetter(self.last_hidden)(self.language))
        suit_few_rows(self.language)
        remember_features(self, None)

    def hook_functions(self) -> None:
        """Hook mlx-vlm's functions; raise UnsupportedModel if attention calls none."""
        install_hooks(files_of(self.language), HOOKS, family=self.spec.family)
        operations.hook_rule(files_of(self.language), self.spec.family)
        hook_placing(files_of(self.model), self.spec.family)
        hook_tables(self.spec.family)
        hooked = HOOKS["scaled_dot_product_attention"]
        check_attention(self.language, hooked, family=self.spec.family)
        hook_exponentials(self.model, files_of(self.model))

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

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        """Return mlx-vlm's module classes -> our replacements."""
        return {}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """Return the processor, corrected where mlx-vlm's differs from the published."""
        return processor

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
            inputs.outputs.place = 0
            call = replace(call, tower_outputs=inputs.outputs)
        with running(call):
            try:
                return self._encoded(inputs, call, cached)
            finally:
                # the next request must not see these positions, even if this one raised
                for name in POSITIONS:
                    if hasattr(self.language, name):
                        setattr(self.language, name, None)

    def _encoded(self, inputs: Mapping[str, Any], call: Call, cached: int) -> Encoded:
        ids, extra = self._read(inputs)
        with self._fitting(ids, extra):
            is_text_left = cached > 0 and all(
                picture.end <= cached for picture in self._media(ids, extra)
            )
            features = (
                self.features_after(ids, extra, cached)
                if is_text_left
                else self.features(ids, sourced(extra))
            )
        embeds = features["inputs_embeds"]
        dtype = (
            dtype_of(self.token_table)
            if call.is_fixed and embeds.dtype == mx.float32
            else None
        )
        return Encoded(
            input_ids=ids,
            # a batch with rows of two dtypes computes in the wider one
            inputs_embeds=embeds if dtype is None else embeds.astype(dtype),
            position=self.positions(ids, extra, features),
            prefill=self._for_prefill(features),
            decode=features.get("decode", {}),
            atomic=self.atomic_spans(ids, extra),
            is_picture=self.picture_places(ids, extra),
            model_image_sizes=self.model_image_sizes(extra),
            cached=cached,
            has_rows=self._features_have_rows,
        )

    def encode_together(
        self, requests: Sequence[Mapping[str, Any]], call: Call = Call()
    ) -> list[Mapping[str, Any]]:
        """Join several requests' tower calls, up to ``call.most_patches`` patches.

        Returns:
            The inputs for ``encode``, with any tower outputs attached. Those that still need a tower are the same objects.
        """
        kinds = (
            (vision_towers(self.model), has_pictures),
            (audio_towers(self.model), has_sound),
        )
        shared = [
            has_any
            for towers, has_any in kinds
            if self.spec.max_rows != 1
            and any(self._shares(owner[name], call) for owner, name in towers)
        ]
        outputs = {
            at: TowerOutputs()
            for at, inputs in enumerate(requests)
            if any(has_any(inputs) for has_any in shared)
        }

        def encode(at: int, outputs: TowerOutputs) -> Encoded:
            return Adapter.encode(
                self, requests[at], replace(call, tower_outputs=outputs)
            )

        calls: dict[int, TowerCall] = {}
        room = call.most_patches
        for at, theirs in outputs.items():
            asked = advance(theirs, partial(encode, at))
            if asked is not None:
                room -= asked.tower.count_patches(asked, self._values_of_patch)
                if room < 0 and calls:
                    break
                calls[at] = asked
        while len(calls) > 1:
            with running(call):
                found = make_calls(calls, by_shapes=call.is_fixed)
            for at, output in found.items():
                outputs[at].found.append(output)
            again = {at: advance(outputs[at], partial(encode, at)) for at in found}
            calls = {at: asked for at, asked in again.items() if asked is not None}
        prepared: list[Mapping[str, Any]] = []
        for at, inputs in enumerate(requests):
            theirs = outputs.get(at) or TowerOutputs()
            is_text = not any(has_any(inputs) for _, has_any in kinds)
            prepared.append(
                PrecomputedInputs(inputs, theirs)
                if theirs.is_any or is_text
                else inputs
            )
        return prepared

    @staticmethod
    def _shares(tower: RememberingTower, call: Call) -> bool:
        if call.is_fixed and (
            call.pictures is None
            or type(tower).run_by_shape is RememberingTower.run_by_shape
        ):
            return False
        return tower.why_apart is None

    @property
    def _values_of_patch(self) -> int:
        side = getattr(getattr(self.config, "vision_config", None), "patch_size", None)
        return 3 * side**2 if isinstance(side, int) else 3 * 14**2

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Refuse inputs (numpy) that cannot fit, without MLX, on the submitter's thread."""
        extra = self._known_inputs(inputs)
        if type(self).expand_ids is Adapter.expand_ids:
            self.check_placeholders(inputs["input_ids"], extra)

    def check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Raise InvalidPrompt unless ids (1, L), numpy or MLX, have the media's placeholders."""
        if self.spec.audio:
            self._check_sound(ids, extra)
        marks = list(self.image_token_ids - self._audio_token_ids)
        is_any = has_pictures(extra)
        given = int(are_any(np.array(ids)[0], marks).sum())
        if given and not is_any:
            raise InvalidPrompt(
                f"the prompt has {given} placeholder tokens for pictures, and there is no picture"
            )
        needed = self.count_placeholders(extra) if is_any else None
        if not marks:  # the processor names the pictures' positions
            if needed:
                raise InvalidPrompt(
                    f"the pictures need {needed} placeholder tokens; the prompt has 0: config.json names no image_token_id"
                )
            return
        if is_any and needed is None and not given:
            raise InvalidPrompt(
                "the pictures need placeholder tokens; the prompt has 0"
            )
        if needed is not None and given != needed:
            raise InvalidPrompt(
                f"the pictures need {needed} placeholder tokens; the prompt has {given}"
            )

    def _check_sound(self, ids: Any, extra: Mapping[str, Any]) -> None:
        is_any = has_sound(extra)
        if not is_any and not self._audio_token_ids:
            return
        given = int(are_any(np.array(ids)[0], self._audio_token_ids).sum())
        sound = (
            value for name, value in extra.items() if name.startswith(AUDIO_INPUTS)
        )
        parts = (
            part
            for value in sound
            for part in (value if isinstance(value, list) else [value])
        )
        if any(0 in np.shape(part) for part in parts):
            raise InvalidPrompt(
                "a recording is so short that the model's processor makes nothing of it"
            )
        if given and not is_any:
            raise InvalidPrompt(
                f"the prompt has {given} placeholder tokens for recordings, and there is no recording"
            )
        if is_any and not given and self._audio_token_ids:
            raise InvalidPrompt(
                "the recordings need placeholder tokens; the prompt has 0"
            )

    def count_placeholders(self, extra: Mapping[str, Any]) -> int | None:
        """Count the pictures' placeholders by shapes alone, where possible."""
        return None

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        """Repeat placeholders, one per feature, where the processor leaves fewer."""
        return ids

    def features_after(
        self, ids: mx.array, extra: Mapping[str, Any], cached: int
    ) -> dict[str, Any]:
        """Return a prompt's features: zeros for the first ``cached`` positions, then text."""
        start = min(cached, ids.shape[1] - 1)  # models cannot embed an empty prompt
        found = self.features(ids[:, start:], {})
        axes = {"inputs_embeds": 1, **self.prefill_axes}
        return {
            name: pad_front(value, axes[name], start)
            for name, value in found.items()
            if name in axes
        }

    # Recognise
    # ----------------------------------------------------------------------------------------------------------

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

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """Return the prompt's pictures in order.

        They are separate if placeholder runs have one length and each input an entry per run, else one ``Picture``.
        """
        return taken_apart(ids, extra, self.image_token_ids - self._audio_token_ids)

    def _media(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        sound = {
            name: value
            for name, value in extra.items()
            if name.startswith(AUDIO_INPUTS)
        }
        if not sound:
            return self.pictures(ids, extra)
        rest = {name: value for name, value in extra.items() if name not in sound}
        silent = mx.where(
            mx.array(are_any(np.array(ids), self._audio_token_ids)), 0, ids
        )
        found = (*self.pictures(silent, rest), *self.recordings(ids, sound))
        media = sorted(found, key=lambda one: one.start)
        if all(one.end <= other.start for one, other in pairwise(media)):
            return tuple(media)
        return (Picture(media[0].start, max(one.end for one in media), extra),)

    def recordings(
        self, ids: mx.array, sound: Mapping[str, Any]
    ) -> tuple[Picture, ...]:
        return taken_apart(ids, sound, self._audio_token_ids)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model's ``get_input_embeddings``."""
        extra = {name: know(value) for name, value in extra.items()}
        found = self.model.get_input_embeddings(
            know(ids), extra.pop("pixel_values", None), **extra
        )
        return {
            name: value for name, value in found.to_dict().items() if value is not None
        }

    def _for_prefill(self, features: Mapping[str, Any]) -> dict[str, Any]:
        unknown = (
            features.keys() - self.prefill_axes.keys() - self.ignored - KNOWN_FEATURES
        )
        if unknown:
            raise TypeError(
                f"{self.spec.family} does not know the features {sorted(unknown)}"
            )
        return {name: features[name] for name in self.prefill_axes if name in features}

    def positions(
        self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]
    ) -> PositionState:
        """Return the row's positions; the default counts tokens."""
        return PositionState()

    def atomic_spans(
        self, ids: mx.array, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return spans [start, end) that no chunk may cut."""
        return ()

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

    @property
    def _without_embeddings(self) -> frozenset[int]:
        """Ids that beside media need no embedding."""
        return self.image_token_ids

    @cached_property
    def _audio_token_ids(self) -> frozenset[int]:
        names = ("audio_token_id", "audio_token_index", "sound_context_token_id")
        return ids_named(self.config, names) if self.spec.audio else frozenset()

    def picture_places(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        """Return the mask (L,) of media features; all True if unknown."""
        tokens, marks = np.array(ids)[0], list(self.image_token_ids)
        return (
            are_any(tokens, marks)
            if marks or not (has_pictures(extra) or has_sound(extra))
            else np.ones(len(tokens), dtype=np.bool_)
        )

    def model_image_sizes(
        self, extra: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Return each processed picture's (width, height) in pixels, if known."""
        return ()

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------

    def make_cache(self, kv: KVQuantisation | None = None) -> list[Any]:
        """Make an empty single-row cache, one entry per layer; ``kv`` quantises it."""
        fresh = self.row_caches()
        return fresh if kv is None else kv.caches(fresh)

    def row_caches(self) -> list[Any]:
        """Make an empty single-row cache of the model's own kinds."""
        fresh: list[Any] = make_prompt_cache(self.language)
        return masked(fresh) if self._masks_states else fresh

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
        with running(
            replace(call, begin=begin, lengths=tuple(row.length for row in rows))
        ):
            filled = [
                row if row.length >= end else padded(row, end, self.prefill_axes)
                for row in rows
            ]
            if call.ends is not None:
                mask_behind(cache, [stop - begin for stop in call.ends])
            return self.run_chunk(filled, cache, begin, end)

    def run_chunk(
        self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int
    ) -> mx.array:
        ids = mx.concatenate([row.input_ids[:, start:end] for row in rows], axis=0)
        embeds = mx.concatenate(
            [row.inputs_embeds[:, start:end] for row in rows], axis=0
        )
        own = rows if rows[0].has_rows else rows[:1]
        extra = join_rows([self.chunk_features(row, start, end) for row in own])
        prompts: list[Any] = [row.position.prompt for row in rows]
        if prompts[0] is not None:
            extra["position_ids"] = mx.concatenate(
                [prompt[..., start:end] for prompt in prompts], axis=-2
            )
        return self.forward(ids, embeds, cache, extra)

    @property
    def scores_chunks(self) -> bool:
        """Whether a chunk's positions can all have logits."""
        return self.last_hidden is not None

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        """Act on a row between its last chunk and its join."""

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {
            name: cut(value, self.prefill_axes[name], start, end)
            for name, value in encoded.prefill.items()
        }

    def decode(self, step: DecodeStep, call: Call = Call()) -> mx.array:
        """Decode one token per place: logits (B, V)."""
        with (
            running(replace(call, positions=step.positions)),
            turned(self.language) if step.is_traced else nullcontext(),
        ):
            return self.run_step(step)

    def run_step(self, step: DecodeStep) -> mx.array:
        return self.forward(step.tokens, None, step.caches, {})

    def forward(
        self,
        ids: mx.array,
        embeds: mx.array | None,
        cache: Sequence[Any],
        extra: Mapping[str, Any],
    ) -> mx.array:
        """Run the language model on (B, L) ids or (B, L, D) embeddings: last logits (B, V)."""
        return self.language(ids, inputs_embeds=embeds, cache=cache, **extra).logits[
            :, -1
        ]

    # Facts
    # --------------------------------------------------------------------------------------------------------------

    def _read(self, inputs: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        extra = self._known_inputs(inputs)
        ids = self.expand_ids(inputs["input_ids"], extra)
        # without a picture, a placeholder id is looked up like any other
        check_tokens(
            ids, self._num_words, self._without_embeddings if extra else frozenset()
        )
        self.check_placeholders(ids, extra)
        return ids, extra

    @contextmanager
    def _fitting(self, ids: mx.array, extra: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except InvalidRequest:
            raise
        except ValueError as error:
            if not has_pictures(extra) and not has_sound(extra):
                raise
            given = int(self.picture_places(ids, extra).sum())
            noun = "media" if has_sound(extra) else "pictures"
            raise InvalidPrompt(
                f"the {noun} do not fit the prompt, which has {given} placeholder tokens for them: {error}"
            ) from error

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {
            name: value
            for name, value in inputs.items()
            if value is not None and name != "input_ids"
        }
        unknown = set(given) - self.input_keys - self.ignored - IGNORED_INPUTS
        if unknown:
            raise InvalidPrompt(
                f"{self.spec.family} does not know the inputs {sorted(unknown)}; it takes {sorted(self.input_keys)}"
            )
        return {
            name: joined(value) if isinstance(value, Joined) else value
            for name, value in given.items()
            if name in self.input_keys
        }


class GraphedSteps(Adapter):
    """Families whose decode steps may be compiled."""

    #: Whether compiled steps were verified on CUDA; if not, they are compiled on request only.
    are_compared = False

    @property
    def graphs(self) -> Graphs:  # type: ignore[override]
        """Compile by default where launches cost, unless a quantised layer has a bias.

        A graph fuses that bias with the broadcast before it.
        """
        modules = [module for _, module in self.language.named_modules()]
        has_bias = any(
            isinstance(module, nn.QuantizedLinear) and "bias" in module
            for module in modules
        )
        is_chosen = self.are_compared and operations.counts_launches() and not has_bias
        return Graphs.BY_DEFAULT if is_chosen else Graphs.IF_ASKED


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
    is_tied = getattr(language, "args", language.config).tie_word_embeddings
    return language.model.embed_tokens.as_linear if is_tied else language.lm_head


def has_pictures(extra: Mapping[str, Any]) -> bool:
    """Whether the inputs hold pictures, videos or features."""
    return any(name.startswith(PICTURE_INPUTS) for name in extra)


def has_sound(extra: Mapping[str, Any]) -> bool:
    return any(name.startswith(AUDIO_INPUTS) for name in extra)
