"""Records that inputs, adapters, caches and the engine exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Graphs(Enum):
    """Conditions under which a family's decode steps are compiled."""

    NEVER = "never"
    #: Without extras, a step depends on tokens, positions and caches alone: graphs that fuse nothing.
    UNFUSED = "unfused"
    #: Fused graphs were verified, too.
    IF_ASKED = "if asked"
    #: Launches dominate a step, and its graph needs no new kernels.
    BY_DEFAULT = "by default"


@dataclass(frozen=True)
class PositionState:
    """A row's positions."""

    prompt: Any | None = None  # (1, L) or (axes, 1, L); None for 0..L-1
    delta: int = 0  # the next token's position, less the tokens in the cache


@dataclass(frozen=True)
class Encoded:
    """One row, ready for prefill."""

    input_ids: Any  # (1, L); some families mark pictures with ids below 0
    inputs_embeds: Any  # (1, L, D)
    position: PositionState = PositionState()
    #: Further arguments of the forward for the whole prompt; the adapter slices them for each chunk.
    prefill: Mapping[str, Any] = field(default_factory=dict)
    #: Further arguments of each decode step.
    decode: Mapping[str, Any] = field(default_factory=dict)
    atomic: tuple[tuple[int, int], ...] = ()  # spans [start, end) that no chunk cuts
    # (L,) bool, numpy: positions of picture features; None for none
    is_picture: Any = None
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    # first positions that are in the caches already; their values here are not read
    cached: int = 0
    # tokens that this row chooses from; None: the model's
    vocabulary: int | None = None
    # whether features and masks of several rows can be joined along their first axis
    has_rows: bool = False

    @property
    def length(self) -> int:
        return int(self.inputs_embeds.shape[1])

    @property
    def image_tokens(self) -> int:
        if self.is_picture is None:
            return 0
        return int(self.is_picture.sum())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what prompts of one array have in common."""
        # nothing may stand behind a span's positions
        whole = self.length if self.atomic else 0
        return (self.inputs_embeds.dtype, whole, *sorted(self.prefill))

    @property
    def can_share(self) -> bool:
        """Whether whole prompts of one kind may share an array."""
        return self.has_rows or not (self.prefill or self.atomic)

    def facts(self, *, with_ids: bool = False) -> PromptFacts:
        """Return the facts that outlive it. ``with_ids``: the tokens, too."""
        ids = tuple(self.input_ids[0].tolist()) if with_ids else None
        return PromptFacts(
            length=self.length,
            delta=self.position.delta,
            image_tokens=self.image_tokens,
            model_image_sizes=self.model_image_sizes,
            vocabulary=self.vocabulary,
            extras=self.decode,
            token_ids=ids,
        )


@dataclass(frozen=True)
class PromptFacts:
    """Facts that outlive an encoded prompt (``PositionState``, ``Encoded``)."""

    length: int = 0
    delta: int = 0
    image_tokens: int = 0
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    vocabulary: int | None = None
    # arguments of every decode step
    extras: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None  # if they are asked for


@dataclass(frozen=True)
class Terms:
    """Terms of a request, beside its parameters."""

    priority: int = 0
    client: int = 0
    may_draft: bool = True
    returns_cache: bool = False
    returns_prompt_ids: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True)
class Picture:
    """A picture at prompt positions [start, end)."""

    start: int
    end: int
    inputs: Any  # its part of the processor's output
    # (L, tiles) bool, numpy: tiles that each position cross-attends
    seen: Any | None = None


@dataclass(frozen=True)
class PromptKey:
    """Identity of a prompt: equal first rows of ``positions`` mean equal keys and values."""

    #: (L, 3) int64, numpy: token id, and 128 bits of content. Content is 0 for text; for a picture's position it is the digest
    #: of its processed pixels, size and layout.
    positions: Any
    # [start, end), within which no row continues
    spans: tuple[tuple[int, int], ...] = ()
    pictures: tuple[tuple[int, int], ...] = ()
    answer: Any = (0, 0)  # (2,) int64, content of the tokens after the prompt

    @property
    def length(self) -> int:
        return len(self.positions)

    def mixed(self, contents: Any) -> PromptKey:
        """Return the key with ``contents`` mixed in, (2,) for all positions or (L, 2)."""
        positions = self.positions.copy()
        positions[:, 1:] ^= contents
        return replace(
            self,
            positions=positions,
            answer=contents if contents.ndim == 1 else contents[-1],
        )

    def before_span(self, length: int) -> int:
        """Return ``length``, or the beginning of the span that it cuts."""
        for start, end in sorted(self.spans):
            if start < length < end:
                return start
        return length


@dataclass(frozen=True)
class DecodeStep:
    """One token for each place. Empty places have token 0, position 0 and no extras."""

    tokens: Any  # (B, 1) int32
    positions: Any  # (B,) int32: tokens in the row's cache + delta
    caches: Sequence[Any]  # a LayerCache per layer
    extras: Sequence[Mapping[str, Any]]  # Encoded.decode of each row
    is_traced: bool = False  # the step becomes a graph


@dataclass(frozen=True)
class MediaSizes:
    """Sizes of a request's media, as they were given."""

    images: tuple[tuple[int, int], ...] = ()  # (width, height)
    videos: tuple[tuple[int, int, int], ...] = ()  # (frames, width, height)
    audios: tuple[float, ...] = ()  # seconds

    @property
    def has_any(self) -> bool:
        return bool(self.images or self.videos or self.audios)


@dataclass(frozen=True)
class Call:
    """A forward's facts beside its arrays, an argument of adapters.

    mlx-vlm's functions do not take it; below them it is the thread's mark (``vlm_batch.adapters.hooks``).
    """

    #: Prefill: end of each row's own positions; its logits are of the last one. None: the end of the call.
    ends: tuple[int, ...] | None = None
    #: Prefill of one row: return logits of every position.
    is_scored: bool = False
    #: Choose kernels by the shapes of this call alone, not by earlier calls.
    is_fixed: bool = False
    #: Prefill: each row attends in a call of its own shape.
    attends_apart: bool = False
    #: Encode: the prompt is made up, so a family that needs a picture does without.
    is_made_up: bool = False
    #: CUDA: make a plan at the first call of an attention shape.
    makes_plans: bool = False
    #: Encode: most patches of several requests' pictures in a tower's call.
    most_patches: int = 8192
    #: Encode: number of pictures, idle ones included, in a tower's call of this shape. None: 1 if ``is_fixed``, else any.
    pictures: Callable[[Any], int] | None = None

    # Set by the adapter while it runs.
    #: Prefill: first position of the call.
    begin: int = 0
    #: Prefill: length of each row's whole prompt.
    lengths: tuple[int, ...] = ()
    #: Decode: each row's position (B,), the same on all axes.
    positions: Any = None
    #: Weights of low-rank adapters, by name: of each row (R, 1, 1), or of all rows.
    adapters: Mapping[str, Any] = field(default_factory=dict)
    #: Encode: outputs of towers for pictures that were encoded together.
    tower_outputs: Any = None
    #: Prefill and decode: takes the final hidden states (B, L, D), if somebody drafts from them.
    hidden: list[Any] | None = None


@dataclass(frozen=True)
class Hidden:
    """Final hidden states of a row's positions from ``begin``: rows [first, first + count) of ``states`` (N, D)."""

    states: Any
    first: int
    begin: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.begin + self.count


@dataclass(eq=False)
class DraftState:
    """A drafting model's view of one row."""

    #: The row's last hidden states that were not read yet.
    hidden: deque[Hidden]
    #: Caches of the drafting model's own.
    caches: list[Any] = field(default_factory=list)
    #: The tokens behind ``hidden``, one for each state. Set before each draft.
    tokens: Sequence[int] = ()

    @property
    def end(self) -> int | None:
        """The position behind the last hidden state, if there is one."""
        if self.hidden:
            return self.hidden[-1].end
        return None

    def keep(self, count: int) -> None:
        """Keep the first ``count`` positions of the last forward."""
        self.hidden.append(replace(self.hidden.pop(), count=count))

    def clear(self) -> None:
        self.hidden.clear()
        self.caches = []

    def copy(self) -> DraftState:
        """Return a state for another answer to the same prompt."""
        return DraftState(self.hidden.copy())


@dataclass(frozen=True)
class Thinking:
    """Token ids that mark a model's thinking, and its state after the prompt."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False  # the prompt ends within thinking
    may_begin: bool = False  # the answer's first token may begin it
