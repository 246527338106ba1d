"""The adapter: the only place that knows a model family. Every adaptation to mlx-vlm's objects in general lives here."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import make_prompt_cache

from vlm_batch.digest import as_words, digest
from vlm_batch.errors import InvalidPrompt
from vlm_batch.features import FeatureStore
from vlm_batch.models.modules import (
    LastPosition,
    RememberingGridTower,
    RememberingTower,
    clone_modules,
    evaluate_arrays,
    hook_attention,
    split_patches,
)
from vlm_batch.registry import ModelSpec
from vlm_batch.types import DecodeStep, Encoded, Picture, PositionState, PromptKey
from vlm_batch.videos import Sampling

#: Names under which models keep their vision towers.
VISION_TOWERS = ("vision_tower", "vision_model", "vision_encoder", "vision", "visual")
#: Values of each weight that go into a model's fingerprint.
SAMPLES = 16
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

#: What processors put beside the inputs and no decoder reads: one row has no padding, token types repeat the ids, and
#: most families do not count a video's seconds.
IGNORED_INPUTS = frozenset(
    {"attention_mask", "token_type_ids", "mm_token_type_ids", "image_sizes", "second_per_grid_ts"}
)


class Adapter:
    """Makes one family's model encode, prefill and decode rows whose state is their own.

    It works on a structural copy of the model (the same weights): the caller's model object is left as it was, and
    nothing of a request stays on it. A family overrides only what is special to it.
    """

    spec: ClassVar[ModelSpec]
    #: Processor outputs that ``get_input_embeddings`` needs; others than these and the ignored ones are refused.
    input_keys: ClassVar[frozenset[str]] = frozenset({"pixel_values", "cached_image_features"})
    #: Further outputs of the family's processor that its model does not read.
    ignored_inputs: ClassVar[frozenset[str]] = frozenset()
    #: What ``get_input_embeddings`` returns for the decoder, and the axis along which a chunk is cut (None: passed
    #: whole).
    prefill_axes: ClassVar[Mapping[str, int | None]] = {}
    #: What it returns that the family does not need, absorbed on purpose.
    ignored_features: ClassVar[frozenset[str]] = frozenset()
    #: Whether a decode step without extras is a function of its tokens, positions and caches alone, so that it can be traced.
    compiles: ClassVar[bool] = False
    #: Whether whole prompts of one length may be prefilled as one array (R, L): true of families whose prefill takes no more
    #: than embeddings and positions, and whose caches are plain keys and values.
    shares_prefill: ClassVar[bool] = False
    #: The most rows that may share a batch; None leaves it to the caller.
    max_rows: ClassVar[int | None] = None
    #: Which frames of a video file the family's published processor takes; a checkpoint's own settings go first.
    video_sampling: ClassVar[Sampling] = Sampling()
    #: How the vision tower remembers what it saw.
    tower_class: ClassVar[type[RememberingTower]] = RememberingTower
    #: Why a row cannot go on from what another row with the same beginning has left in its caches; None if it can.
    starts_afresh: ClassVar[str | None] = None

    def __init__(self, model: nn.Module) -> None:
        evaluate_arrays(model)
        self.config: Any = model.config
        self.model: Any = clone_modules(model, self.mends())
        self.language: Any = self.model.language_model
        hook_attention(self.language)
        self.shorten()

    @classmethod
    def mends(cls) -> Mapping[type, type]:
        """Module classes of mlx-vlm whose single-row result is wrong or that cannot hold rows apart -> what replaces them."""
        return {}

    @classmethod
    def processor(cls, processor: Any) -> Any:
        """The caller's processor, or a copy of it that does what the published one does, where mlx-vlm's does not."""
        part = getattr(processor, "video_processor", None)
        right = cls.video_processor(part)
        if right is part:
            return processor
        processor = copy.copy(processor)
        processor.video_processor = right
        return processor

    @classmethod
    def video_processor(cls, part: Any) -> Any:
        """The part of a processor that takes frames, or what replaces it where mlx-vlm's is not the published one."""
        return part

    def shorten(self) -> None:
        """Let the trunk answer for its last position only."""
        self.language.model = LastPosition(self.language.model)

    # Features by content
    # ------------------------------------------------------------------------------------------------------------------

    def remember_features(self, store: FeatureStore) -> None:
        """Let the vision tower look at a picture once: what it saw is kept in ``store``."""
        for owner, name in self.towers():
            tower = owner[name]
            tower = tower.tower if isinstance(tower, RememberingTower) else tower
            setattr(owner, name, self.tower_class(tower, store, self.read_features))

    def towers(self) -> list[tuple[nn.Module, str]]:
        """The modules that encode pictures: each the attribute of another."""
        return [(self.model, name) for name in VISION_TOWERS if isinstance(self.model.get(name), nn.Module)]

    def read_features(self, result: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the model reads of a tower's result: of all hidden states only the selected layers'."""
        wanted = getattr(self.config, "vision_feature_layer", None)
        is_list = isinstance(result, (list, tuple)) and len(result) and isinstance(result[-1], (list, tuple))
        if not kwargs.get("output_hidden_states") or wanted is None or not is_list:
            return result
        layers = list(result[-1])
        wanted = [wanted] if isinstance(wanted, int) else wanted
        kept = {range(len(layers))[layer] for layer in wanted}
        return (*result[:-1], [layer if index in kept else None for index, layer in enumerate(layers)])

    @property
    def fingerprint(self) -> str:
        """Tells this model from others: its configuration, and of every weight the sum of all its bits and some values."""
        flat: Any = tree_flatten(self.model.parameters())
        weights: list[tuple[str, mx.array]] = sorted(flat, key=lambda item: str(item[0]))
        samples = [array.reshape(-1)[:: max(1, array.size // SAMPLES)][:SAMPLES] for _, array in weights]
        sums = [mx.sum(array.view(UNSIGNED[array.itemsize])) for _, array in weights]
        mx.eval(samples, sums)
        shapes = [[path, list(array.shape), str(array.dtype)] for path, array in weights]
        return digest([plain(self.config), shapes, samples, sums]).hex()

    # Encode
    # -------------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Mapping[str, Any], cached: int = 0) -> Encoded:
        """Turn a processor's output for one request (input_ids (1, L), pictures, ...) into a row ready for prefill.

        The first ``cached`` positions are in the row's caches already; if all of its pictures are among them, none is
        encoded. Raises InvalidPrompt for a key that the family does not know.
        """
        extra = self._known_inputs(inputs)
        ids = self.expand_ids(inputs["input_ids"], extra)
        self.check_ids(ids)
        is_text_left = cached > 0 and all(picture.end <= cached for picture in self.pictures(ids, extra))
        features = self.features_after(ids, extra, cached) if is_text_left else self.features(ids, extra)
        embeds = features.pop("inputs_embeds")
        prefill, decode = self.split(features)
        encoded = Encoded(
            input_ids=ids,
            inputs_embeds=embeds,
            position=self.positions(ids, extra, features),
            prefill=prefill,
            decode=decode,
            atomic=self.atomic_spans(ids, extra),
            image_tokens=self.count_image_tokens(ids, extra),
            model_image_sizes=self.model_image_sizes(extra),
            cached=cached,
            vocabulary=self.vocabulary(features),
        )
        self.forget()
        return encoded

    def look(self, requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Processor outputs with their pictures' features beside them, made by one call of the encoder, where that is known to
        be the same; elsewhere as they are."""
        return list(requests)

    def check_ids(self, ids: mx.array) -> None:
        """Refuse tokens that the model has no embedding for: MLX would look them up in other memory."""
        weight = getattr(self.token_table, "weight", None)
        if weight is None:
            return
        tokens = np.array(ids[0])
        beyond = tokens[(tokens >= weight.shape[0]) & ~np.isin(tokens, list(self.image_token_ids()))]
        if beyond.size:
            raise InvalidPrompt(
                f"token id {beyond[0]} is beyond the model's {weight.shape[0]}: does the tokenizer belong to this model?"
            )

    @property
    def token_table(self) -> Any:
        """The embedding of the decoder's tokens, or None where it is made of several or named otherwise."""
        return getattr(getattr(self.language, "model", None), "embed_tokens", None)

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
        """What tells the prompt's positions apart: ids, the pictures' content, and whole spans that attend both ways."""
        extra = self._known_inputs(inputs)
        ids = self.expand_ids(inputs["input_ids"], extra)
        pictures, atomic = self.pictures(ids, extra), self.atomic_spans(ids, extra)
        rows = np.zeros((ids.shape[1], 3), dtype=np.int64)
        rows[:, 0] = np.array(ids[0])
        for picture in pictures:
            rows[picture.start : picture.end, 1:] = as_words(digest(picture.inputs))
        for start, end in atomic:  # its first position has seen its last
            rows[start:end, 1:] = as_words(digest(rows[start:end]))
        spans = tuple((picture.start, picture.end) for picture in pictures)
        return PromptKey(rows, spans=(*spans, *atomic), pictures=spans)

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """The pictures of a prompt, in order.

        The default takes them apart where every run of placeholders has one entry of each input, and all runs are of
        one length; otherwise all pictures are one, from the first placeholder to the last.
        """
        if not extra:
            return ()
        runs = spans_of(ids, self.image_token_ids())
        if not runs:
            return (Picture(0, ids.shape[1], extra),)
        lengths = {end - start for start, end in runs}
        if len(lengths) == 1 and all(num_entries(value) == len(runs) for value in extra.values()):
            parts = [{name: value[index] for name, value in extra.items()} for index in range(len(runs))]
            return tuple(Picture(start, end, part) for (start, end), part in zip(runs, parts, strict=True))
        return (Picture(runs[0][0], runs[-1][1], extra),)

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """What the model's ``get_input_embeddings`` makes of a request; None values are dropped."""
        extra = dict(extra)
        found = self.model.get_input_embeddings(ids, extra.pop("pixel_values", None), **extra)
        return {name: value for name, value in found.to_dict().items() if value is not None}

    def split(self, features: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Features -> (what prefill needs, whole; what every decode step of the row needs)."""
        self.check_features(features)
        return {name: features[name] for name in self.prefill_axes if name in features}, {}

    def check_features(self, features: Mapping[str, Any]) -> None:
        """Refuse what the family does not know: a keyword is absorbed on purpose, or refused."""
        unknown = set(features) - set(self.prefill_axes) - self.ignored_features - {"position_ids", "rope_deltas"}
        if unknown:
            raise TypeError(f"{self.spec.family} does not know the features {sorted(unknown)}")

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        """Where the row stands; the default counts tokens."""
        return PositionState()

    def vocabulary(self, features: Mapping[str, Any]) -> int | None:
        """How many tokens the row chooses from, where the model's requests differ in that; its logits are as many."""
        return None

    def atomic_spans(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Spans [start, end) of the prompt that one chunk must hold whole (bidirectional pictures)."""
        return ()

    def image_token_ids(self) -> frozenset[int]:
        """The ids whose positions hold picture features."""
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        return frozenset(token for name in names if isinstance(token := getattr(self.config, name, None), int))

    def count_image_tokens(self, ids: mx.array, extra: Mapping[str, Any]) -> int:
        """How many prompt positions hold picture features."""
        tokens = self.image_token_ids()
        return sum(token in tokens for token in np.array(ids[0]).tolist())

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """(width, height) in pixels that the processor made of each picture, where it says so."""
        return ()

    def forget(self) -> None:
        """Drop what a forward pass left on the working copy."""
        for name in ("_position_ids", "_rope_deltas"):
            if hasattr(self.language, name):
                setattr(self.language, name, None)

    # Prefill and decode
    # -------------------------------------------------------------------------------------------------

    def probe(self, ids: mx.array) -> dict[str, Any]:
        """The smallest request with the prompt ``ids`` (1, L), by which a model's abilities are tried."""
        return {"input_ids": ids}

    def make_cache(self) -> list[Any]:
        """A fresh single-row cache, one entry a layer, of the kinds that the model asks for."""
        return make_prompt_cache(self.language)

    def prefill(self, encoded: Encoded, cache: list[Any], start: int, end: int) -> mx.array:
        """Run prompt positions [start, end) of one row into its cache; logits (1, V) of the last of them."""
        ids, embeds = encoded.input_ids[:, start:end], encoded.inputs_embeds[:, start:end]
        return self.forward(ids, embeds, cache, self.chunk(encoded, start, end))

    def prefill_together(self, rows: Sequence[Encoded], cache: list[Any]) -> mx.array:
        """Run whole prompts of one length into a fresh cache of R rows; logits (R, V). For families that share a prefill."""
        ids = mx.concatenate([row.input_ids for row in rows])
        embeds = mx.concatenate([row.inputs_embeds for row in rows])
        return self.forward(ids, embeds, cache, self.positions_together(rows))

    def positions_together(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        """The positions of prompts of one length, for families that take them."""
        return {}

    def finish_prefill(self, encoded: Encoded, cache: list[Any]) -> None:
        """Called once the whole prompt is in the row's cache, before the row joins the batch."""

    def chunk(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """The keywords of a chunk's forward."""
        return {**self.chunk_features(encoded, start, end), **self.chunk_positions(encoded, start, end)}

    def chunk_features(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """The part of the prefill features that belongs to a chunk."""
        return {name: cut(value, self.prefill_axes[name], start, end) for name, value in encoded.prefill.items()}

    def chunk_positions(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        """The positions of a chunk, for families that take them; the others count what is in the cache."""
        return {}

    def decode(self, step: DecodeStep) -> mx.array:
        """One token for every place of the batch: logits (B, V)."""
        return self.forward(step.tokens, None, step.caches, self.decode_extras(step))

    def decode_extras(self, step: DecodeStep) -> dict[str, Any]:
        """Keywords of the decode forward, made of the rows' own state."""
        return {}

    def forward(
        self, ids: mx.array, embeds: mx.array | None, cache: Sequence[Any], extra: Mapping[str, Any]
    ) -> mx.array:
        """The language model over (B, L) ids or (B, L, D) embeddings: logits (B, V) of the last position."""
        return self.language(ids, inputs_embeds=embeds, cache=cache, **extra).logits[:, -1]

    # Facts
    # --------------------------------------------------------------------------------------------------------------

    @property
    def max_context(self) -> int | None:
        """The most positions that the model was made for, or None if its config does not say."""
        text = getattr(self.config, "text_config", None) or self.config
        limit = getattr(text, "max_position_embeddings", None)
        return int(limit) if limit else None

    def _known_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in inputs.items() if value is not None and name != "input_ids"}
        unknown = set(given) - self.input_keys - self.ignored_inputs - IGNORED_INPUTS
        if unknown:
            raise InvalidPrompt(
                f"{self.spec.family} does not know the inputs {sorted(unknown)}; it takes {sorted(self.input_keys)}"
            )
        return {name: value for name, value in given.items() if name in self.input_keys}


def cut(value: Any, axis: int | None, start: int, end: int) -> Any:
    """``value`` between two prompt positions along an axis; None passes it whole."""
    if axis is None:
        return value
    index = [slice(None)] * value.ndim
    index[axis] = slice(start, end)
    return value[tuple(index)]


def plain(value: Any) -> Any:
    """A configuration as mappings, lists and texts."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return plain(vars(value)) if hasattr(value, "__dict__") else str(value)


def pad_front(value: mx.array, axis: int | None, count: int) -> mx.array:
    """``value`` with ``count`` zeros in front of an axis; None leaves it as it is."""
    if axis is None:
        return value
    shape = list(value.shape)
    shape[axis] = count
    return mx.concatenate([mx.zeros(shape, value.dtype), value], axis=axis)


def num_entries(value: Any) -> int | None:
    """The length of an array's or list's first axis; None for anything else."""
    if isinstance(value, (mx.array, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def spans_of(ids: mx.array, markers: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """The runs [start, end) of placeholder ids in a prompt (1, L)."""
    inside = np.isin(np.array(ids[0]), list(markers)).astype(np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def repeat_placeholders(ids: mx.array, marker: int, counts: Sequence[int]) -> mx.array:
    """Ids (1, L) with the n-th placeholder repeated ``counts[n]`` times.

    Raises InvalidPrompt if there are not as many placeholders as counts.
    """
    tokens = np.array(ids[0])
    places = np.flatnonzero(tokens == marker)
    if len(places) != len(counts):
        raise InvalidPrompt(f"the prompt has {len(places)} placeholders for {len(counts)} pictures")
    repeats = np.ones(len(tokens), dtype=np.int64)
    repeats[places] = counts
    return mx.array(np.repeat(tokens, repeats)[None])


def put_features(embeds: mx.array, ids: mx.array, markers: frozenset[int], features: mx.array) -> mx.array:
    """(1, L, D) embeddings with the rows of (N, D) features in place of the N placeholder ids.

    Raises InvalidPrompt if the prompt has another number of placeholders.
    """
    places = [index for index, token in enumerate(np.array(ids[0]).tolist()) if token in markers]
    if len(places) != len(features):
        raise InvalidPrompt(f"the pictures need {len(features)} placeholder tokens; the prompt has {len(places)}")
    filled = mx.array(embeds)
    filled[:, mx.array(places)] = features.astype(embeds.dtype)[None]
    return filled


def bidirectional_mask(
    spans: Sequence[tuple[int, int]], start: int, end: int, window: int | None = None, *, cut_pictures: bool = True
) -> mx.array | None:
    """The mask of a chunk whose pictures attend within themselves both ways: (1, 1, end - start, end) bool, True attends.

    With a ``window``, a token sees no further back than that many positions, its own included; unless ``cut_pictures``,
    it sees all of its own picture. None if no span lies in the chunk, which then is causal as usual. A span is atomic,
    so a chunk holds all of it or nothing.
    """
    inside = [(first, stop) for first, stop in spans if start <= first < end]
    if not inside:
        return None
    rows, columns = mx.arange(start, end)[:, None], mx.arange(end)[None, :]
    near = mx.array(True) if window is None else columns > rows - window
    mask = (columns <= rows) & near
    for first, stop in inside:
        picture = (rows >= first) & (rows < stop) & (columns >= first) & (columns < stop)
        mask = mask | (picture & near if cut_pictures else picture)
    return mask[None, None]


class GridAdapter(Adapter):
    """Families whose pictures come with grids of patches: (pictures, 3), of time, height and width."""

    input_keys = Adapter.input_keys | {"image_grid_thw"}
    tower_class = RememberingGridTower

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses what upstream would answer wrongly: it drops the pictures that the prompt has no room for."""
        grids = [extra[name] for name in ("image_grid_thw", "video_grid_thw") if name in extra]
        needed = sum(t * h * w // self.merged for grid in grids for t, h, w in np.array(grid).tolist())
        if (given := self.count_image_tokens(ids, extra)) != needed:
            pictures = sum(len(grid) for grid in grids)
            unnamed = "" if self.image_token_ids() else ": config.json names no image_token_id"
            raise InvalidPrompt(
                f"{pictures} pictures need {needed} placeholder tokens; the prompt has {given}{unnamed}"
            )
        return super().features(ids, extra)

    def look_at_grids(self, requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``look`` for towers that take the patches of several pictures in a row, and models that take features for pixels."""
        pictured = [inputs for inputs in requests if inputs.get("pixel_values") is not None]
        is_plain = all("image_grid_thw" in inputs and "pixel_values_videos" not in inputs for inputs in pictured)
        if len(pictured) < 2 or not is_plain:
            return list(requests)
        tower, merge = self.model.vision_tower, int(self.config.vision_config.spatial_merge_size)
        pixels = mx.concatenate([inputs["pixel_values"] for inputs in pictured])
        grids = [np.array(inputs["image_grid_thw"]) for inputs in pictured]
        ends: list[int] = np.cumsum([grid.prod(axis=1).sum() // merge**2 for grid in grids]).tolist()
        features = tower(pixels.astype(tower.patch_embed.proj.weight.dtype), mx.array(np.concatenate(grids)))
        parts = iter(mx.split(features, ends[:-1]))
        return [
            {**inputs, "cached_image_features": next(parts)} if inputs.get("pixel_values") is not None else inputs
            for inputs in requests
        ]

    @property
    def merged(self) -> int:
        """How many patches become one token."""
        return int(self.config.vision_config.spatial_merge_size) ** 2

    def pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[Picture, ...]:
        """One for each grid: its patches are rows of the pixels, and its placeholders the next in the prompt."""
        if set(extra) != {"pixel_values", "image_grid_thw"}:
            return super().pictures(ids, extra)
        merged = self.merged
        grids = np.array(extra["image_grid_thw"])
        counts: list[int] = grids.prod(axis=1).tolist()
        places = np.flatnonzero(np.isin(np.array(ids[0]), list(self.image_token_ids())))
        pixels = split_patches(extra["pixel_values"], counts)
        if pixels is None or sum(count // merged for count in counts) != len(places):
            return super().pictures(ids, extra)  # the encoder refuses them
        found, place = [], 0
        for grid, picture in zip(grids, pixels, strict=True):
            positions = places[place : place + int(grid.prod()) // merged]
            found.append(Picture(int(positions[0]), int(positions[-1]) + 1, {"pixels": picture, "grid": grid}))
            place += len(positions)
        return tuple(found)

    def model_image_sizes(self, extra: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        if "image_grid_thw" not in extra:
            return ()
        patch = int(self.config.vision_config.patch_size)
        return tuple((width * patch, height * patch) for _, height, width in extra["image_grid_thw"].tolist())


class MRoPEAdapter(GridAdapter):
    """Families with three-dimensional positions (time, height, width), given to every forward.

    A text token has the same position on all three axes; after a picture it is shifted by the row's delta
    (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """

    input_keys = GridAdapter.input_keys | {"pixel_values_videos", "video_grid_thw"}

    def features(self, ids: mx.array, extra: Mapping[str, Any]) -> dict[str, Any]:
        """A video goes through the model as one picture for each of its time steps, which is what the towers make of it.

        Upstream, a prompt with both loses its videos (qwen2_vl.py:42, qwen2_5_vl.py:42: one grid, one placeholder).
        """
        if "pixel_values_videos" in extra:
            ids, extra = self.videos_as_pictures(ids, extra)
        return super().features(ids, extra)

    def videos_as_pictures(self, ids: mx.array, extra: Mapping[str, Any]) -> tuple[mx.array, dict[str, Any]]:
        """Ids (1, L) and inputs in which pictures and videos are pictures, in the order of the prompt."""
        image, video = (self.marker(kind) for kind in ("image", "video"))
        parts: list[tuple[int, mx.array, list[list[int]]]] = []
        for marker, pixels, grid in (
            (image, "pixel_values", "image_grid_thw"),
            (video, "pixel_values_videos", "video_grid_thw"),
        ):
            grids = np.array(extra.get(grid, np.zeros((0, 3), np.int32))).tolist()
            row = 0
            for first, (t, h, w) in zip(self.starts(ids, marker, grids), grids, strict=True):
                parts.append((first, extra[pixels][row : row + t * h * w], [[1, h, w]] * t))
                row += t * h * w
        parts.sort(key=lambda part: part[0])
        others = {name: extra[name] for name in extra.keys() - {"pixel_values_videos", "video_grid_thw"}}
        pictures = {
            "pixel_values": mx.concatenate([pixels for _, pixels, _ in parts]),
            "image_grid_thw": mx.array([grid for *_, grids in parts for grid in grids], dtype=mx.int32),
        }
        return mx.where(ids == video, image, ids), {**others, **pictures}

    def starts(self, ids: mx.array, marker: int, grids: Sequence[Sequence[int]]) -> list[int]:
        """Where each grid's first placeholder stands. Raises InvalidPrompt if there are more or fewer of them."""
        places = np.flatnonzero(np.array(ids[0]) == marker)
        needed = [int(np.prod(grid)) // self.merged for grid in grids]
        if sum(needed) != len(places):
            noun = "videos" if marker == self.marker("video") else "pictures"
            raise InvalidPrompt(
                f"{len(grids)} {noun} need {sum(needed)} placeholder tokens; the prompt has {len(places)}"
            )
        return [int(places[count]) for count in np.cumsum([0, *needed])[: len(needed)]]

    def marker(self, kind: str) -> int:
        """The placeholder id of a picture or video."""
        found = getattr(self.config, f"{kind}_token_id", None)
        return int(getattr(self.config, f"{kind}_token_index") if found is None else found)

    def positions(self, ids: mx.array, extra: Mapping[str, Any], features: Mapping[str, Any]) -> PositionState:
        found, delta = self.language.get_rope_index(ids, extra.get("image_grid_thw"), extra.get("video_grid_thw"))
        if found.ndim == 2:
            found = mx.broadcast_to(found[None], (3, *found.shape))
        return PositionState(prompt=found.astype(mx.int32), delta=int(delta.item()))

    def grid_positions(self, ids: mx.array, extra: Mapping[str, Any], steps: Sequence[float]) -> PositionState:
        """Positions of a prompt whose videos' time steps lie ``steps`` apart, each a video's, rounded down.

        What follows a picture or video begins after the largest of its positions, on whatever axis that is.
        """
        side = int(self.config.vision_config.spatial_merge_size)
        blocks: list[tuple[int, tuple[int, int, int], float]] = []
        for kind, apart in (("image", None), ("video", steps)):
            grids = np.array(extra.get(f"{kind}_grid_thw", np.zeros((0, 3), np.int32))).tolist()
            starts = self.starts(ids, self.marker(kind), grids)
            spacing = [1.0] * len(grids) if apart is None else apart
            for first, (t, h, w), step in zip(starts, grids, spacing, strict=True):
                blocks.append((first, (t, h // side, w // side), step))
        found = np.empty((3, ids.shape[1]), dtype=np.int32)
        place = following = 0
        for first, shape, step in sorted(blocks):
            found[:, place:first] = np.arange(following, following + first - place)
            following += first - place
            inside = np.indices(shape).reshape(3, -1).astype(np.float32) * np.array([[step], [1], [1]], np.float32)
            place = first + inside.shape[1]
            found[:, first:place] = inside.astype(np.int32) + following
            following = int(found[:, first:place].max()) + 1
        length = ids.shape[1]
        found[:, place:] = np.arange(following, following + length - place)
        return PositionState(prompt=mx.array(found[:, None]), delta=following - place)

    def chunk_positions(self, encoded: Encoded, start: int, end: int) -> dict[str, Any]:
        return {"position_ids": cut(encoded.position.prompt, 2, start, end)}

    def positions_together(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        prompts: list[Any] = [row.position.prompt for row in rows]
        return {"position_ids": mx.concatenate(prompts, axis=1)}

    def decode_extras(self, step: DecodeStep) -> dict[str, Any]:
        return {"position_ids": mx.broadcast_to(step.positions[None, :, None], (3, step.positions.size, 1))}
