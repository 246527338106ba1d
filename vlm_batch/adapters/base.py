"""The adapter: the only place that knows a model family, with what mlx-vlm's models have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from vlm_batch.adapters.attention import HOOKS
from vlm_batch.adapters.hooks import check_attention, files_of, put_hooks, running
from vlm_batch.adapters.joint import Answers, Looked, TowerCall, advance, make_calls
from vlm_batch.adapters.longrope import ROW_ROPES, longest_short, marked_long
from vlm_batch.adapters.modules import RememberingTower, clone_modules, cut_answer, evaluate_arrays, part_of
from vlm_batch.adapters.products import hold_products
from vlm_batch.adapters.prompts import (
    check_tokens,
    cut,
    dtype_of,
    num_entries,
    num_words,
    pad_front,
    padded,
    sight_of,
    spans_of,
)
from vlm_batch.adapters.towers import remember_features, vision_towers
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.errors import InvalidPrompt, InvalidRequest
from vlm_batch.inputs.videos import Sampling
from vlm_batch.records import Call, DecodeStep, Encoded, Graphs, Picture, PositionState, PromptKey
from vlm_batch.registry import ModelSpec
from vlm_batch.store.digest import as_words, digest, sourced

#: Beginnings of the names under which processors give pictures and videos, or their features.
PICTURE_INPUTS = ("pixel_values", "patch_pixel_values", "cached_image_features", "image_embeds", "encoder_outputs")

#: What processors put beside the inputs and no decoder reads: one row has no padding, token types repeat the ids, and
#: most families do not count a video's seconds.
IGNORED_INPUTS = frozenset(
    {"attention_mask", "token_type_ids", "mm_token_type_ids", "image_sizes", "second_per_grid_ts"}
)
#: Attributes in which mlx-vlm's language models keep the positions of their last request.
POSITIONS = frozenset({"_position_ids", "_rope_deltas"})
#: Features that ``prefill_axes`` does not name: embeddings, what ``positions`` reads, and what each decode step needs.
KNOWN_FEATURES = frozenset({"inputs_embeds", "position_ids", "rope_deltas", "decode"})


class Adapter:
    """Makes one family's model encode, prefill and decode rows whose state is their own.

    It works on a structural copy of the model (the same weights): the caller's model object is left as it was, and
    nothing of a request stays on it. A family overrides only what is special to it.
    """

    spec: ClassVar[ModelSpec]
    #: Processor outputs that ``get_input_embeddings`` needs; others than these and the ignored ones are refused.
    input_keys: ClassVar[frozenset[str]] = frozenset({"pixel_values", "cached_image_features"})
    #: The features of ``get_input_embeddings`` that prefill takes -> the axis along which a chunk is cut, or None for whole.
    prefill_axes: ClassVar[Mapping[str, int | None]] = {}
    #: Further outputs of the family's processor, and further features, that nothing reads: absorbed on purpose.
    ignored: ClassVar[frozenset[str]] = frozenset()
    #: Whether decode steps may be compiled.
    graphs: Graphs = Graphs.NEVER
    #: Whether a position of a prompt sees nothing behind it but its own atomic span: padding may stand there, and prompts in
    #: one array be padded to one length, where the caches allow it.
    is_causal: bool = True
    #: The frames of a video file that the family's published processor takes; a checkpoint's own settings go first.
    video_sampling: ClassVar[Sampling] = Sampling()
    #: The wrapper by which a vision tower remembers features, and makes the calls of several requests as one.
    tower_class: type[RememberingTower] = RememberingTower
    #: The path of the embedding of the decoder's tokens in the language model.
    embeddings: ClassVar[str] = "model.embed_tokens"
    #: The path of the module in the language model whose answer is cut to the positions that logits are wanted of, so that the
    #: LM head runs once a prompt; None where the family answers for the last position by itself.
    last_hidden: ClassVar[str | None] = "model"

    def __init__(self, model: nn.Module) -> None:
        evaluate_arrays(model)
        self.config: Any = model.config
        self.model: Any = clone_modules(model, {**ROW_ROPES, **self.patches()})
        self.language: Any = self.model.language_model
        #: The embedding of the decoder's tokens, or None where it is made of several or named otherwise.
        self.token_table: Any = part_of(self.language, self.embeddings)
        self._num_words = num_words(self.token_table)
        self._longest_short = longest_short(self.language)
        self.hook_functions()
        if self.last_hidden is not None:
            cut_answer(part_of(self.language, self.last_hidden))
        remember_features(self, None)

    def hook_functions(self) -> None:
        """Put our functions in the place of mlx-vlm's in the language model's files; refuse a model that calls others."""
        put_hooks(files_of(self.language), HOOKS, family=self.spec.family)
        hooked = HOOKS["scaled_dot_product_attention"]
        check_attention(self.language, hooked, family=self.spec.family)

    def with_products(self, numbers: Mapping[str, Sequence[int]]) -> Adapter:
        """A copy, with modules of its own, whose products of some kinds are held to numbers of rows; itself for none."""
        if not numbers:
            return self
        twin = copy.copy(self)
        vars(twin).update(clone_modules(vars(self)))
        hold_products(twin.language, numbers)
        return twin

    @classmethod
    def patches(cls) -> Mapping[type, type]:
        """Module classes of mlx-vlm whose single-row result is wrong or that cannot hold rows apart -> what replaces them."""
        return {}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """The caller's processor, or a copy of it that does what the published one does, where mlx-vlm's does not."""
        return processor

    # Encode
    # -------------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Mapping[str, Any], call: Call = Call(), cached: int = 0) -> Encoded:
        """Turn a processor's output for one request (input_ids (1, L), pictures, ...) into a row ready for prefill.

        The first ``cached`` positions are in the row's caches already; if all of its pictures are among them, none is
        encoded. Raises InvalidPrompt for a key that the family does not know.
        """
        if isinstance(inputs, Looked):
            if inputs.answers.result is not None and not cached:
                return inputs.answers.result
            inputs.answers.place = 0
            call = replace(call, answers=inputs.answers)
        with running(call):
            try:
                return self._encoded(inputs, call, cached)
            finally:  # also of a request that raised, whose positions the next one must not meet
                for name in POSITIONS:
                    if hasattr(self.language, name):
                        setattr(self.language, name, None)

    def _encoded(self, inputs: Mapping[str, Any], call: Call, cached: int) -> Encoded:
        ids, extra = self._read(inputs)
        with self._fitting(ids, extra):
            is_text_left = cached > 0 and all(picture.end <= cached for picture in self.pictures(ids, extra))
            features = self.features_after(ids, extra, cached) if is_text_left else self.features(ids, sourced(extra))
        embeds = features["inputs_embeds"]
        dtype = dtype_of(self.token_table) if call.is_fixed and embeds.dtype == mx.float32 else None
        return Encoded(
            input_ids=ids,
            # rows of two types in one batch are computed in the wider one
            inputs_embeds=embeds if dtype is None else embeds.astype(dtype),
            position=self.positions(ids, extra, features),
            prefill=self._for_prefill(features),
            decode=features.get("decode", {}),
            atomic=self.atomic_spans(ids, extra),
            is_picture=self.picture_places(ids, extra),
            model_image_sizes=self.model_image_sizes(extra),
            cached=cached,
        )

    def encode_together(self, requests: Sequence[Mapping[str, Any]], call: Call = Call()) -> list[Mapping[str, Any]]:
        """Make the tower's calls for several requests as one, where they fit each other: of as many of the first requests as
        have ``call.most_patches`` together. Returns what ``encode`` takes in the place of each, or the inputs as they were."""
        is_apart = self.tower_class.why_apart is not None or self.spec.max_rows == 1 or not vision_towers(self.model)
        if call.is_fixed:
            is_apart = is_apart or call.pictures is None or self.tower_class.apart is RememberingTower.apart
        if is_apart:
            return list(requests)
        answers = {at: Answers() for at, inputs in enumerate(requests) if has_pictures(inputs)}

        def encode(at: int, answers: Answers) -> Encoded:
            return Adapter.encode(self, requests[at], replace(call, answers=answers))

        calls: dict[int, TowerCall] = {}
        room = call.most_patches
        for at, theirs in answers.items():
            asked = advance(theirs, partial(encode, at))
            if asked is not None:
                room -= asked.tower.count_patches(asked, self._values_of_patch)
                if room < 0 and calls:
                    break
                calls[at] = asked
        while len(calls) > 1:
            with running(call):
                found = make_calls(calls, by_shapes=call.is_fixed)
            for at, answer in found.items():
                answers[at].found.append(answer)
            again = {at: advance(answers[at], partial(encode, at)) for at in found}
            calls = {at: asked for at, asked in again.items() if asked is not None}
        return [
            Looked(inputs, answers[at]) if at in answers and answers[at].is_any else inputs
            for at, inputs in enumerate(requests)
        ]

    @property
    def _values_of_patch(self) -> int:
        """Values of one patch of a picture, by the configuration, or of the usual size."""
        side = getattr(getattr(self.config, "vision_config", None), "patch_size", None)
        return 3 * side**2 if isinstance(side, int) else 3 * 14**2

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a processor's output (numpy) that can be known not to fit, without MLX: on the submitter's thread."""
        extra = self._known_inputs(inputs)
        if type(self).expand_ids is Adapter.expand_ids:
            self._check_placeholders(inputs["input_ids"], extra)

    def _check_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> None:
        """Refuse ids (1, L), numpy or not, with room for more or for less than the pictures. Raises InvalidPrompt."""
        marks, is_any = list(self.image_token_ids), has_pictures(extra)
        given = int(np.isin(np.array(ids)[0], marks).sum())
        if given and not is_any:
            raise InvalidPrompt(f"the prompt has {given} placeholder tokens for pictures, and there is no picture")
        needed = self.count_placeholders(ids, extra) if is_any else None
        if not marks:  # the processor tells where pictures stand
            if needed:
                raise InvalidPrompt(
                    f"the pictures need {needed} placeholder tokens; the prompt has 0: config.json names no image_token_id"
                )
            return
        if is_any and needed is None and not given:
            raise InvalidPrompt("the pictures need placeholder tokens; the prompt has 0")
        if needed is not None and given != needed:
            raise InvalidPrompt(f"the pictures need {needed} placeholder tokens; the prompt has {given}")

    def count_placeholders(self, ids: Any, extra: Mapping[str, Any]) -> int | None:
        """Count the positions of a prompt (1, L) that its pictures' features take, by shapes and sizes alone; None where
        nothing but the model's own merge tells, which then refuses another number. Raises InvalidPrompt for inputs that name
        other places than the ids'."""
        return None

    def expand_ids(self, ids: mx.array, extra: Mapping[str, Any]) -> mx.array:
        """The prompt with a placeholder for each position of a picture, where the processor leaves fewer."""
        return ids

    def features_after(self, ids: mx.array, extra: Mapping[str, Any], cached: int) -> dict[str, Any]:
        """The features of a prompt whose rest after ``cached`` positions is text; zeros stand for what is cached."""
        start = min(cached, ids.shape[1] - 1)  # no model embeds nothing
        found = self.features(ids[:, start:], {})
        axes = {"inputs_embeds": 1, **self.prefill_axes}
        return {name: pad_front(value, axes[name], start) for name, value in found.items() if name in axes}

    # Recognise
    # ----------------------------------------------------------------------------------------------------------

    def prompt_key(self, inputs: Mapping[str, Any]) -> PromptKey:
        """Describe a prompt's positions so that equal ones can be told: ids, pictures' content, and whole two-way spans."""
        ids, extra = self._read(inputs)
        with self._fitting(ids, extra):
            pictures, atomic = self.pictures(ids, extra), self.atomic_spans(ids, extra)
        rows = np.zeros((ids.shape[1], 3), dtype=np.int64)
        rows[:, 0] = np.array(ids)[0]
        for picture in pictures:
            rows[picture.start : picture.end, 1:] = as_words(digest(picture.inputs))
        for start, end in atomic:  # its first position has seen its last
            rows[start:end, 1:] = as_words(digest(rows[start:end]))
        spans = tuple((picture.start, picture.end) for picture in pictures)
        key = PromptKey(rows, spans=(*spans, *atomic), pictures=spans)
        if any(picture.seen is not None for picture in pictures):
            key = key.mixed(sight_of(pictures, rows))
        is_long = self._longest_short is not None and key.length > self._longest_short
        return marked_long(key) if is_long else key

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """The pictures of a prompt, in order.

        The default takes them apart where every run of placeholders has one entry of each input, and all runs are of
        one length; otherwise all pictures are one, from the first placeholder to the last.
        """
        if not extra:
            return ()
        runs = spans_of(ids, self.image_token_ids)
        if not runs:
            return (Picture(0, ids.shape[1], extra),)
        lengths = {end - start for start, end in runs}
        if len(lengths) == 1 and all(num_entries(value) == len(runs) for value in extra.values()):
            parts = [{name: value[index] for name, value in extra.items()} for index in range(len(runs))]
            return tuple(Picture(start, end, part) for (start, end), part in zip(runs, parts, strict=True))
        return (Picture(runs[0][0], runs[-1][1], extra),)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model's ``get_input_embeddings`` on a request; None values are dropped."""
        extra = dict(extra)
        found = self.model.get_input_embeddings(ids, extra.pop("pixel_values", None), **extra)
        return {name: value for name, value in found.to_dict().items() if value is not None}

    def _for_prefill(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """What prefill needs of the features, whole. Others than the family knows are refused."""
        unknown = features.keys() - self.prefill_axes.keys() - self.ignored - KNOWN_FEATURES
        if unknown:
            raise TypeError(f"{self.spec.family} does not know the features {sorted(unknown)}")
        return {name: features[name] for name in self.prefill_axes if name in features}

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        """The row's positions; by default they count tokens."""
        return PositionState()

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Spans [start, end) of the prompt that one chunk must hold whole (bidirectional pictures)."""
        return ()

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        """The ids whose positions hold picture features; none for families whose processors tell where pictures stand."""
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        return frozenset(token for name in names if isinstance(token := getattr(self.config, name, None), int))

    def picture_places(self, ids: mx.array, extra: Mapping[str, Any]) -> np.ndarray:
        """A mask (L,) of the prompt's positions that hold picture features; all, where nothing tells."""
        tokens, marks = np.array(ids)[0], list(self.image_token_ids)
        return np.isin(tokens, marks) if marks or not has_pictures(extra) else np.ones(len(tokens), dtype=np.bool_)

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """(width, height) in pixels that the processor made of each picture, where it says so."""
        return ()

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------

    def make_cache(self, kv: KVQuantisation | None = None) -> list[Any]:
        """A fresh single-row cache, one entry a layer; of few bits where ``kv`` says so."""
        fresh = self.row_caches()
        return fresh if kv is None else kv.caches(fresh)

    def row_caches(self) -> list[Any]:
        """A fresh single-row cache of the kinds that the model asks for."""
        return make_prompt_cache(self.language)

    def prefill(self, rows: Sequence[Encoded], cache: list[Any], begin: int, end: int, call: Call = Call()) -> mx.array:
        """Run prompt positions [begin, end) of one row into its cache, or whole prompts into a fresh cache of R rows.

        Returns logits (R, V) of each row's last position before ``call.ends``; (end - begin, V) of one row that is scored,
        where ``scores_chunks`` is true. What lies behind a row's end is padding, in the caches, too: for families that pad.
        """
        with running(replace(call, begin=begin, lengths=tuple(row.length for row in rows))):
            filled = [row if row.length >= end else padded(row, end, self.prefill_axes) for row in rows]
            return self.run_chunk(filled, cache, begin, end)

    def run_chunk(self, rows: Sequence[Encoded], cache: list[Any], start: int, end: int) -> mx.array:
        """The forward of ``prefill``, of one row or of several plain ones, which are long enough."""
        ids = mx.concatenate([row.input_ids[:, start:end] for row in rows], axis=0)
        embeds = mx.concatenate([row.inputs_embeds[:, start:end] for row in rows], axis=0)
        extra = self.chunk_features(rows[0], start, end)
        prompts: list[Any] = [row.position.prompt for row in rows]
        if prompts[0] is not None:
            extra["position_ids"] = mx.concatenate([prompt[..., start:end] for prompt in prompts], axis=-2)
        return self.forward(ids, embeds, cache, extra)

    @property
    def scores_chunks(self) -> bool:
        """Whether one forward can answer for all positions of a chunk."""
        return self.last_hidden is not None

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        """Called once the whole prompt is in the row's cache, before the row joins the batch."""

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """The part of the prefill features that belongs to a chunk."""
        return {name: cut(value, self.prefill_axes[name], start, end) for name, value in encoded.prefill.items()}

    def decode(self, step: DecodeStep, call: Call = Call()) -> mx.array:
        """One token for every place of the batch: logits (B, V)."""
        with running(replace(call, positions=step.positions)):
            return self.run_step(step)

    def run_step(self, step: DecodeStep) -> mx.array:
        """The forward of ``decode``, with what it needs of the rows' own state."""
        return self.forward(step.tokens, None, step.caches, {})

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """The language model over (B, L) ids or (B, L, D) embeddings: logits (B, V) of the last position."""
        return self.language(ids, inputs_embeds=embeds, cache=cache, **extra).logits[:, -1]

    # Facts
    # --------------------------------------------------------------------------------------------------------------

    @cached_property
    def max_context(self) -> int | None:
        """The most positions that the model was made for, or None if its config does not say."""
        text = getattr(self.config, "text_config", None) or self.config
        limit = getattr(text, "max_position_embeddings", None)
        return int(limit) if limit else None

    def _read(self, inputs: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        """(a prompt's ids with a placeholder for each position of a picture, what else the family reads)."""
        extra = self._known_inputs(inputs)
        ids = self.expand_ids(inputs["input_ids"], extra)
        # without a picture, nothing takes a mark's place
        check_tokens(ids, self._num_words, self.image_token_ids if extra else frozenset())
        self._check_placeholders(ids, extra)
        return ids, extra

    @contextmanager
    def _fitting(self, ids: mx.array, extra: Mapping[str, Any]) -> Iterator[None]:
        """Say what did not fit what, where work raises ValueError, as mlx-vlm's merges and MLX's assignments do."""
        try:
            yield
        except InvalidRequest:
            raise
        except ValueError as error:
            if not has_pictures(extra):
                raise
            given = int(self.picture_places(ids, extra).sum())
            raise InvalidPrompt(
                f"the pictures do not fit the prompt, which has {given} placeholder tokens for them: {error}"
            ) from error

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in inputs.items() if value is not None and name != "input_ids"}
        unknown = set(given) - self.input_keys - self.ignored - IGNORED_INPUTS
        if unknown:
            raise InvalidPrompt(
                f"{self.spec.family} does not know the inputs {sorted(unknown)}; it takes {sorted(self.input_keys)}"
            )
        return {name: value for name, value in given.items() if name in self.input_keys}


def trunk_logits(
    language: Any, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
) -> mx.array:
    """A language model's trunk and head, for families whose own call does more than rows apart allow: logits (B, V)."""
    hidden = language.model(ids, inputs_embeds=embeds, cache=cache, **extra)  # (B, 1, D)
    return head_of(language)(hidden)[:, -1]


def head_of(language: Any) -> Any:
    """A language model's head: its own, or its table of tokens."""
    is_tied = getattr(language, "args", language.config).tie_word_embeddings
    return language.model.embed_tokens.as_linear if is_tied else language.lm_head


def has_pictures(extra: Mapping[str, Any]) -> bool:
    """Whether a request's inputs have any pictures or videos, or their features."""
    return any(name.startswith(PICTURE_INPUTS) for name in extra)
