"""The requests of each workload: the same for every engine, a seed a draw. No MLX in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.compare.shapes import IMAGE, VISION_END, VISION_START, Shape

SEED = 4


@dataclass(frozen=True)
class Ask:
    """One request: what a processor would have made of it, as numpy arrays. ``arrival`` is in seconds from the start."""

    name: str
    # input_ids (1, L); pixel_values (patches, values), image_grid_thw (1, 3)
    inputs: Mapping[str, np.ndarray]
    max_tokens: int
    arrival: float = 0.0
    same_as: str = ""  # asks of one source have the same inputs

    @property
    def source(self) -> str:
        """What names the inputs."""
        return self.same_as or self.name

    @property
    def length(self) -> int:
        return int(self.inputs["input_ids"].shape[1])

    @property
    def has_picture(self) -> bool:
        return "pixel_values" in self.inputs


@dataclass(frozen=True)
class Workload:
    """``rows`` decode together at most. ``in_flight`` bounds the asks handed to the engine at once (a closed loop).

    ``recalled``: prompts are not computed again but recalled from a store, so that decoding, joining and leaving are
    all that is measured.
    """

    name: str
    title: str
    asks: Sequence[Ask]
    rows: int
    in_flight: int | None = None
    recalled: bool = False
    # prompt tokens a step, where the workload needs a whole prompt in one
    chunk: int | None = None
    # the workload whose answers hold for this one's asks too; its own by default
    answers_of: str = ""


def make_workload(name: str, shape: Shape, draw: int = 0) -> Workload:
    """The workload with the arrivals, lengths, pictures and words of one draw. KeyError for an unknown name."""
    return WORKLOADS[name](shape, draw)


def _captions(shape: Shape, draw: int) -> Workload:
    scale, random = shape.scale, _random(shape, 1, draw)
    side = scale.image_patches[-2]
    text = _words(random, shape, 24)
    asks = [
        Ask(
            f"caption-{i}",
            _prompt(random, shape, text[:8], (side, side), text[8:]),
            scale.caption_tokens,
        )
        for i in range(scale.captions)
    ]
    return Workload(
        "captions",
        f"(a) captioning: {len(asks)} pictures of {_pixels(shape, side)}, one prompt, {scale.caption_tokens} tokens each",
        asks,
        rows=scale.captions,  # as many as batch_generate takes at once
    )


def question(shape: Shape, random: np.random.RandomState) -> dict[str, np.ndarray]:
    """A picture between 24 words, all drawn anew."""
    side = shape.scale.image_patches[-2]
    text = _words(random, shape, 24)
    return _prompt(random, shape, text[:8], (side, side), text[8:])


def _documents(shape: Shape, draw: int) -> Workload:
    scale, random = shape.scale, _random(shape, 2, draw)
    sides = scale.image_patches
    sizes = list(
        dict.fromkeys(
            (high, wide) for high in sides for wide in sides if abs(high - wide) <= 4
        )
    )[:10]
    asks = []
    for i in range(scale.documents):
        size = sizes[i % len(sizes)]
        length = int(random.randint(*scale.document_prompts))
        text = _words(random, shape, max(8, length - shape.count_tokens(size) - 2))
        asks.append(
            Ask(
                f"document-{i}",
                _prompt(random, shape, text[:4], size, text[4:]),
                scale.document_tokens,
            )
        )
    return Workload(
        "documents",
        f"(b) documents: {len(asks)} pictures of {len(sizes)} sizes, prompts of "
        f"{scale.document_prompts[0]}-{scale.document_prompts[1]}, {scale.document_tokens} tokens each",
        asks,
        rows=8,
    )


def _chat(rows: int) -> Callable[[Shape, int], Workload]:
    def make(shape: Shape, draw: int) -> Workload:
        scale, random = shape.scale, _random(shape, 3, draw)
        rate = scale.chat_rate * rows / 8
        arrival, asks = 0.0, []
        for i in range(scale.chat_requests):
            length = _between(random, scale.chat_prompts)
            tokens = _between(random, scale.chat_tokens)
            fitting = [
                side
                for side in scale.image_patches
                if shape.count_tokens((side, side)) + 12 <= length
            ]
            if fitting and random.random_sample() < 0.6:
                side = fitting[random.randint(len(fitting))]
                text = _words(
                    random, shape, length - shape.count_tokens((side, side)) - 2
                )
                inputs = _prompt(random, shape, text[:4], (side, side), text[4:])
            else:
                inputs = {"input_ids": _ids(_words(random, shape, length))}
            asks.append(Ask(f"chat-{i}", inputs, tokens, arrival))
            arrival += float(random.exponential(1 / rate))
        pictures = sum(ask.has_picture for ask in asks)
        return Workload(
            f"chat-{rows}",
            f"(c) chat, {rows} rows: {len(asks)} requests ({pictures} with a picture), Poisson arrivals at "
            f"{rate:g}/s, prompts of {scale.chat_prompts[0]}-{scale.chat_prompts[1]}, "
            f"{scale.chat_tokens[0]}-{scale.chat_tokens[1]} tokens",
            asks,
            rows,
            answers_of="chat-8",
        )

    return make


def _churn(every: int) -> Callable[[Shape, int], Workload]:
    def make(shape: Shape, draw: int) -> Workload:
        scale, random = shape.scale, _random(shape, 5, draw)
        rows = 8
        spread = scale.churn_context // 20
        contexts = [
            {
                "input_ids": _ids(
                    [
                        10 + i,
                        *_words(
                            random, shape, scale.churn_context - 1 + spread * (i - 2)
                        ),
                    ]
                )
            }
            for i in range(4)
        ]
        # the first rows leave one by one
        ends = [every * (row + 1) for row in range(rows)]
        ends += [every * rows] * (scale.churn_steps // every)
        asks = [
            Ask(f"churn-{i}", contexts[i % 4], tokens, same_as=f"context-{i % 4}")
            for i, tokens in enumerate(ends)
        ]
        return Workload(
            f"churn-{every}",
            f"(d) churn: {rows} rows at {scale.churn_context} tokens, a leave and a join every {every} steps, "
            f"{shape.text['num_key_value_heads']} KV heads",
            asks,
            rows,
            in_flight=rows,
            recalled=True,
            chunk=2 * scale.churn_context,
            answers_of="churn-8",
        )

    return make


def _single(shape: Shape, draw: int) -> Workload:
    random = _random(shape, 6, draw)
    side = shape.scale.image_patches[-1]
    text = _words(random, shape, shape.scale.document_prompts[0])
    ask = Ask(
        "single",
        _prompt(random, shape, text[:4], (side, side), text[4:]),
        shape.scale.caption_tokens * 2,
    )
    asks = [replace(ask, name=f"single-{i}", same_as="single") for i in range(4)]
    title = f"one request at a time: a picture of {_pixels(shape, side)}, prompt {ask.length}, {ask.max_tokens} tokens"
    return Workload("single", title, asks, rows=1, in_flight=1)


def _steady(shape: Shape, draw: int) -> Workload:
    random = _random(shape, 7, draw)
    asks = [
        Ask(
            f"steady-{i}",
            {"input_ids": _ids(_words(random, shape, 40 + 8 * i))},
            2 * shape.scale.caption_tokens,
        )
        for i in range(8)
    ]
    return Workload(
        "steady",
        f"8 rows of text, {asks[0].max_tokens} tokens each, nothing joins",
        asks,
        rows=8,
    )


WORKLOADS: dict[str, Callable[[Shape, int], Workload]] = {
    "single": _single,
    "captions": _captions,
    "documents": _documents,
    "chat-8": _chat(8),
    "chat-32": _chat(32),
    "churn-2": _churn(2),
    "churn-8": _churn(8),
    "steady": _steady,
}


def _random(shape: Shape, number: int, draw: int) -> np.random.RandomState:
    return np.random.RandomState(SEED + 100 * number + len(shape.name) + 10_000 * draw)


def _words(random: np.random.RandomState, shape: Shape, length: int) -> list[int]:
    return [
        int(token) for token in random.randint(16, shape.vocabulary - 8, size=length)
    ]


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array([list(tokens)], dtype=np.int32)


def _between(random: np.random.RandomState, limits: tuple[int, int]) -> int:
    """Log-uniform: as many short ones as long ones by order of magnitude."""
    low, high = np.log(limits[0]), np.log(limits[1])
    return round(float(np.exp(random.uniform(low, high))))


def _prompt(
    random: np.random.RandomState,
    shape: Shape,
    before: Sequence[int],
    size: tuple[int, int],
    after: Sequence[int],
) -> dict[str, np.ndarray]:
    """Text, a picture of ``size`` patches (high, wide), text."""
    last = shape.vocabulary
    picture = [
        last + VISION_START,
        *[last + IMAGE] * shape.count_tokens(size),
        last + VISION_END,
    ]
    ids = _ids([*before, *picture, *after])
    mask = {"attention_mask": np.ones_like(ids)} if shape.has_mask else {}
    return {"input_ids": ids, **mask, **shape.picture(random, size)}


def _pixels(shape: Shape, side: int) -> str:
    return " x ".join([str(side * int(shape.vision["patch_size"]))] * 2)
