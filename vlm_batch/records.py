"""Records that inputs, adapters, caches and the engine hand to each other. Users of the library do not meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Graphs(Enum):
    """Whether a family's decode steps may be compiled."""

    NEVER = "never"
    #: A step is a function of its tokens, positions and caches alone, but for rows with extras.
    IF_ASKED = "if asked"
    #: Launches decide here, and a traced step has no kernel that an untraced one has not, to be built beside rows that decode.
    BY_DEFAULT = "by default"


@dataclass(frozen=True)
class PositionState:
    """A row's place in position space.

    ``prompt`` holds the prompt's positions, (1, L) or (axes, 1, L), or None for 0..L-1.
    ``delta``: the position of the next token is the number of tokens in the row's cache plus this.
    """

    prompt: Any | None = None
    delta: int = 0


@dataclass(frozen=True)
class Encoded:
    """One row, ready for prefill.

    ``input_ids`` may hold ids below zero, with which some families mark their pictures' positions. ``prefill`` holds the
    further arguments of the family's forward for the whole prompt; the adapter cuts each chunk's part out of them.
    ``decode`` holds the arguments of every later step of this row. A chunk may not cut the ``atomic`` spans [start, end).
    The first ``cached`` positions are in the row's caches already, and nobody reads what stands for them here.
    ``vocabulary`` is the number of tokens that this row chooses from, where requests of one model differ in that.
    """

    input_ids: Any  # (1, L)
    inputs_embeds: Any  # (1, L, D)
    position: PositionState = PositionState()
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    atomic: tuple[tuple[int, int], ...] = ()
    is_picture: Any = None  # (L,) bool, numpy: the positions that hold picture features; None for none
    model_image_sizes: tuple[tuple[int, int], ...] = ()
    cached: int = 0
    vocabulary: int | None = None

    @property
    def length(self) -> int:
        """The number of prompt positions, pictures included."""
        return int(self.inputs_embeds.shape[1])

    @property
    def image_tokens(self) -> int:
        """The number of prompt positions that hold picture features."""
        return 0 if self.is_picture is None else int(self.is_picture.sum())

    @property
    def is_plain(self) -> bool:
        """Whether embeddings and positions are all that prefill takes: such prompts of one length can be one array."""
        return not self.prefill and not self.atomic


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt: its features stand in [start, end), and ``inputs`` is its part of the processor's output.

    ``seen`` says which of its tiles each position of the prompt sees, where the decoder looks at it in layers of their own.
    """

    start: int
    end: int
    inputs: Any
    seen: Any | None = None  # (L, tiles) bool, numpy


@dataclass(frozen=True)
class PromptKey:
    """The identity of a prompt, position by position: equal first rows of ``positions`` mean equal keys and values.

    A row of ``positions`` (L, 3) int64 is a token id and 128 bits of content: zero for text, for a picture's position
    the digest of its processed pixels, size and layout. A row cannot go on from inside one of the ``spans``
    [start, end). ``answer`` is the content of the tokens that follow the prompt.
    """

    positions: Any  # (L, 3) int64, numpy
    spans: tuple[tuple[int, int], ...] = ()
    pictures: tuple[tuple[int, int], ...] = ()
    answer: Any = (0, 0)  # (2,) int64

    @property
    def length(self) -> int:
        return len(self.positions)

    def mixed(self, contents: Any) -> PromptKey:
        """The same where keys and values depend on more: ``contents`` of all positions (2,), or of each (L, 2)."""
        positions = self.positions.copy()
        positions[:, 1:] ^= contents
        return replace(self, positions=positions, answer=contents if contents.ndim == 1 else contents[-1])

    def before_span(self, length: int) -> int:
        """``length``, or the beginning of the span that it would cut."""
        return min([start for start, end in self.spans if start < length < end], default=length)


@dataclass(frozen=True)
class DecodeStep:
    """One token for each place of the batch; an empty place has token 0, position 0 and no extras."""

    tokens: Any  # (B, 1) int32
    positions: Any  # (B,) int32, the position of each row's token: the tokens in its cache + its delta
    caches: Sequence[Any]  # one LayerCache a layer
    extras: Sequence[Mapping[str, Any]]  # each row's Encoded.decode


@dataclass(frozen=True)
class Call:
    """The facts that a forward must know beside its arrays.

    An adapter's calls take it as an argument. mlx-vlm's signatures do not let it through: further down it is the mark of the
    thread (``vlm_batch.adapters.hooks``).
    """

    #: Prefill: where each row's own positions end; its logits are of the position before. None: at the call's end.
    ends: tuple[int, ...] | None = None
    #: Prefill of one row: logits of every position.
    is_scored: bool = False
    #: Kernels go by the shapes of this call alone, and not by what was called before.
    is_fixed: bool = False
    #: Rows of a prefill attend in calls of the shape that each has alone.
    attends_apart: bool = False
    #: Encode: the prompt is made up, to try the model: a family that needs a picture does without.
    is_made_up: bool = False
    #: On CUDA a shape of attention has its plan at its first call.
    makes_plans: bool = False
    #: Encode: patches of several requests' pictures in one call of a tower.
    most_patches: int = 8192
    #: Encode: pictures, idle ones among them, in every call of a tower with one of such a call's shape; None: one alone where
    #: kernels go by shapes, and as many as come otherwise.
    pictures: Callable[[Any], int] | None = None

    # What the adapter adds while it runs.
    #: Prefill: the position that the call begins at.
    begin: int = 0
    #: Prefill: the length of each row's whole prompt.
    lengths: tuple[int, ...] = ()
    #: Decode: each row's position (B,), the same on all axes.
    positions: Any = None
    #: Encode: what towers answered when pictures of several requests were encoded together.
    answers: Any = None


@dataclass(frozen=True)
class Thinking:
    """The token ids with which a model marks its thinking, and the state in which a prompt leaves it.

    ``is_open``: the prompt ends within thinking. ``may_begin``: the answer's first token may begin it.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False
    may_begin: bool = False
