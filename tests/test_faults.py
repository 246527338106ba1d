"""What goes wrong ends the request that it belongs to, and nobody waits for a thread that is gone."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.harness import NUM_TOKENS, inputs_of, oracle, settings_for, shared_adapter
from tests.histories import History
from vlm_batch import (
    BatcherClosed,
    Caches,
    FetchPolicy,
    Handle,
    InvalidImage,
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    InvalidVideo,
    Limits,
    Request,
    Result,
    SamplingParams,
    Template,
    Video,
    VLMBatcher,
    assets,
)
from vlm_batch.arrays import arrays_of, as_mlx, as_numpy
from vlm_batch.caches import Placement, SlabCache
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine import retry
from vlm_batch.engine.admission import Admission
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.inbox import MESSAGES_A_TURN, NO_CLIENT, Message
from vlm_batch.engine.loop import EngineLoop
from vlm_batch.engine.memory import (
    PROBE,
    STEPS_OF_ENCODING,
    EncoderMemory,
    RowMemory,
)
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Stage
from vlm_batch.engine.sampling import Sampled, SamplingRow, sample
from vlm_batch.engine.shapes import FixedShapes, FreeShapes
from vlm_batch.engine.text import AnswerText
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import DoesNotFit, OutOfMemory
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading import load_model
from vlm_batch.policy import Policy, policy_of
from vlm_batch.runtime import memory as memory_of_device
from vlm_batch.runtime import threads, watchdog
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.types import Event

CHECKPOINT = assets.default_checkpoint()
CIRCLE = Path(__file__).parent.parent / "fixtures" / "images" / "red_circle.png"
DESCRIBE = "describe the picture"
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
FAMILY = "qwen2_vl"


@pytest.fixture(autouse=True)
def steps_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that a test puts in the place of the adapter's is called in every step."""
    monkeypatch.setattr("vlm_batch.engine.decoding.can_leave_unfused", lambda: False)


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(CHECKPOINT) as shared:
        yield shared


def answers(batcher: VLMBatcher) -> bool:
    return batcher.submit(None, "count to 3").result(timeout=60).text == "1 2 3"


# Types and bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", ["high", None, 10**400, 1.5, True, math.nan])
def test_a_priority_that_cannot_be_ordered_is_refused_at_submit(
    batcher: VLMBatcher, priority: Any
) -> None:
    with pytest.raises(InvalidRequest, match="priority is"):
        batcher.submit(None, "count to 3", priority=priority)
    with pytest.raises(InvalidRequest, match="request_id is"):
        batcher.submit(None, "count to 3", request_id=[])  # type: ignore[arg-type]
    assert answers(batcher)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_rows": 1.5},
        {"max_rows": "8"},
        {"max_rows": True},
        {"max_bytes": 0},
        {"kv_bits": "8"},
        {"kv": KVQuantisation(8), "kv_bits": 8},
        {"kv": 8},
        {"limits": {"prompt_tokens": 9}},
        {"caches": 0},
        {"trust_remote_code": "yes"},
        {"warm_up": 1},
        {"fetch": "all"},
        {"policy": "fast"},
    ],
    ids=str,
)
def test_every_option_is_checked_when_the_batcher_is_made(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=next(reversed(wrong))):
        VLMBatcher(CHECKPOINT, **wrong)


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (Policy, {"prefill_budget": 0}),
        (Policy, {"token_gap": math.nan}),
        (Policy, {"token_gap": "fast"}),
        (Policy, {"look_ahead": None}),
        (Policy, {"look_ahead_bytes": 0}),
        (Policy, {"look_ahead_bytes": 1.5}),
        (Limits, {"prompt_tokens": 1.5}),
        (Limits, {"image_pixels": "many"}),
        (Limits, {"video_pixels": -1}),
        (Limits, {"min_pixels": 9, "max_pixels": 8}),
        (Caches, {"max_bytes": 1.5}),
        (Caches, {"directory": 3}),
        (Caches, {"directory_bytes": "1"}),
        (KVQuantisation, {"bits": 8, "group_size": 64.0}),
        (KVQuantisation, {"bits": 8, "start": -1}),
    ],
    ids=str,
)
def test_every_record_is_checked_when_it_is_made(
    record: Callable[..., Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(reversed(wrong))):
        record(**wrong)


def test_a_model_is_a_path_or_a_model() -> None:
    with pytest.raises(ValueError, match="model is a NoneType"):
        VLMBatcher(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2**70},
        {"temperature": 1e-40},
        {"temperature": 1e30},
        {"temperature": 10**400},
        {"repetition_penalty": 1e-40},
        {"repetition_context_size": 2**70},
        {"max_tokens": 2**70},
        # those beyond the vocabulary are refused where it is known
        {"stop_token_ids": [-1]},
        {"top_p": 1e-46},
        {"logits_processors": 3},
        {"ignore_eos": "no"},
    ],
    ids=str,
)
def test_sampling_parameters_have_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_what_is_natural_is_taken(batcher: VLMBatcher) -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop=None,  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
    )
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (5, (), (3, 4))
    assert type(params.max_tokens) is int and type(params.temperature) is float
    result = batcher.submit(
        None, "count to 9", params={"max_tokens": 2}, priority=np.int32(3)
    ).result(60)  # type: ignore[arg-type]
    assert len(result.token_ids) == 2
    with pytest.raises(
        InvalidParameters, match=r"params has no max_token .*; it has .*max_tokens"
    ):
        batcher.submit(None, "count to 9", params={"max_token": 2})


def test_facts_of_the_family_are_asked_at_submit(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, checker = batcher.spec, batcher._preparer._checker
    facts = batcher._preparer.facts
    one = replace(facts, spec=replace(spec, multi_image=False))
    monkeypatch.setattr(checker, "_facts", one)
    with pytest.raises(InvalidImage, match="takes one picture a request; given: 2"):
        batcher.submit([CIRCLE, CIRCLE], DESCRIBE)
    assert batcher.submit(CIRCLE, DESCRIBE).result(60).ok
    none = replace(facts, spec=replace(spec, images=False))
    monkeypatch.setattr(checker, "_facts", none)
    with pytest.raises(InvalidImage, match="takes no pictures"):
        batcher.submit(CIRCLE, DESCRIBE)
    part = {"type": "image_url", "image_url": {"url": str(CIRCLE)}}
    with pytest.raises(InvalidImage, match="takes no pictures"):
        batcher.submit(messages=[{"role": "user", "content": [part]}])


class Unspeakable:
    """A value whose ``repr`` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


#: Ways to hand a value over, by name: each must refuse it with an error of its own, or take it.
DOORS: dict[str, Callable[[VLMBatcher, Any], Any]] = {
    "priority": lambda batcher, value: batcher.submit(
        prompt="count to 3", priority=value
    ),
    "request_id": lambda batcher, value: batcher.submit(
        prompt="count to 3", request_id=value
    ),
    "cache": lambda batcher, value: batcher.submit(prompt="count to 3", cache=value),
    "template": lambda batcher, value: batcher.submit(
        prompt="count to 3", template=value
    ),
    **{
        name: lambda _, value, name=name: Template(**{name: value})  # type: ignore[misc]
        for name in (
            "tools",
            "enable_thinking",
            "reasoning_effort",
            "add_generation_prompt",
        )
    },
    "return_cache": lambda batcher, value: batcher.submit(
        prompt="count to 3", return_cache=value
    ),
    "params": lambda batcher, value: batcher.submit(prompt="count to 3", params=value),
    "prompt": lambda batcher, value: batcher.submit(prompt=value),
    "messages": lambda batcher, value: batcher.submit(messages=value),
    "role": lambda batcher, value: batcher.submit(
        messages=[{"role": value, "content": "a"}]
    ),
    "content": lambda batcher, value: batcher.submit(
        messages=[{"role": "user", "content": value}]
    ),
    "part": lambda batcher, value: batcher.submit(
        messages=[{"role": "user", "content": [{"type": value}]}]
    ),
    "text": lambda batcher, value: batcher.submit(
        messages=chat_of({"type": "text", "text": value})
    ),
    "token_ids": lambda batcher, value: batcher.submit(token_ids=value),
    "a token id": lambda batcher, value: batcher.submit(token_ids=[value]),
    "inputs": lambda batcher, value: batcher.submit_request(Request(inputs=value)),
    "input_ids": lambda batcher, value: batcher.submit_request(
        Request(inputs={"input_ids": value})
    ),
    "cancel": lambda batcher, value: batcher.cancel(value),
    "timeout": lambda batcher, value: batcher.submit(prompt="count to 3").result(
        timeout=value
    ),
    **{
        name: lambda _, value, name=name: SamplingParams(**{name: value})  # type: ignore[misc]
        for name in (
            "max_tokens",
            "temperature",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "logprobs",
            "logits_processors",
        )
    },
    **{
        name: lambda _, value, name=name: Video("a.mp4", **{name: value})  # type: ignore[misc]
        for name in ("fps", "num_frames", "max_frames", "max_pixels")
    },
    **{
        name: lambda _, value, name=name: FetchPolicy(**{name: value})  # type: ignore[misc]
        for name in (
            "allow_http",
            "allow_private",
            "allow_files",
            "directories",
            "max_bytes",
            "seconds",
            "max_redirects",
        )
    },
    **{
        name: lambda _, value, name=name: VLMBatcher(CHECKPOINT, **{name: value})  # type: ignore[misc]
        for name in (
            "policy",
            "caches",
            "limits",
            "kv",
            "kv_bits",
            "trust_remote_code",
            "fetch",
        )
    },
    "token_gap": lambda _, value: VLMBatcher(CHECKPOINT, policy={"token_gap": value}),
    "cache bytes": lambda _, value: Caches(value),
    "cache directory": lambda _, value: Caches(directory=value),
    "scheme": lambda _, value: KVQuantisation(4, scheme=value),
}


def chat_of(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize("door", DOORS)
def test_what_is_of_another_kind_is_refused_in_a_line_whatever_it_is(
    batcher: VLMBatcher, door: str
) -> None:
    """Also what cannot be shown in a message, or compared, or hashed."""
    for value in (
        Unspeakable(),
        -(10**5000),
        object(),
        np.array([["a", "b"]]),
        {"a": []},
    ):
        with pytest.raises(
            (ValueError, TimeoutError), match=r"\A.{10,500}\Z"
        ) as found:  # the library's own are ValueErrors
            DOORS[door](batcher, value)
        said = str(found.value)
        assert (
            "no repr" not in said and "ambiguous" not in said and "digits" not in said
        )
    assert answers(batcher)


class Raising(Sequence[Any]):
    """A sequence whose own code raises, as of a data set that has gone."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: Any) -> Any:
        raise OSError("the data set has gone")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise SystemExit


@pytest.mark.parametrize(
    "name", ["token_ids", "options", "stop", "choice", "video", "frames"]
)
@pytest.mark.parametrize("value", [Raising(), range(10**12)], ids=["raises", "long"])
def test_a_sequence_that_cannot_be_read_is_refused(
    batcher: VLMBatcher, name: str, value: Any
) -> None:
    given: dict[str, Any] = {
        "token_ids": {"token_ids": value},
        "options": {"options": value},
        "stop": {"params": {"stop": value}},
        "choice": {"params": {"choice": value}},
        "video": {"videos": [Video(value)]},
        "frames": {"videos": [value]},
    }[name]
    if name != "token_ids":
        given["prompt"] = "count to 3"
    with pytest.raises(InvalidRequest):
        batcher.submit_request(Request(**given))


@pytest.mark.parametrize("ids", [[[1, -1, 2]], [[1, -(2**31), 2]], [[1, 2**40, 2]]])
@pytest.mark.parametrize("family", ["embedded", "molmo_point"])
def test_ids_that_no_embedding_has_are_refused(
    batcher: VLMBatcher, ids: list[list[int]], family: str
) -> None:
    """MLX reads other memory for them: a wrong answer, or the end of the process."""
    if family == "embedded":
        request = Request(inputs={"input_ids": np.array(ids)})
        try:
            said = batcher.submit_request(request).result(timeout=60).error
        except InvalidRequest as error:  # what shows beforehand
            said = str(error)
        assert re.search("InvalidPrompt: token id|input_ids beyond 32 bits", str(said))
    else:
        with pytest.raises(InvalidRequest, match="token id"):
            shared_adapter(family).encode(
                {"input_ids": mx.array(np.array(ids).clip(-(2**31), 2**31 - 1))}
            )


@pytest.mark.parametrize(
    "wrong",
    [{"stop": ["a"] * 2000}, {"stop": "a" * 2**21}, {"stop_token_ids": range(2**15)}],
    ids=["1", "2", "3"],
)
def test_stops_that_would_hold_up_everybody_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=r"are looked for|are the most"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("where", ["prompt", "chat"])
def test_half_a_surrogate_pair_is_no_text(batcher: VLMBatcher, where: str) -> None:
    given: dict[str, Any] = (
        {"prompt": "a\ud800b"}
        if where == "prompt"
        else {"messages": chat_of("a\ud800b")}
    )
    with pytest.raises(
        InvalidPrompt, match=r"'\\ud800' at character 1, half of a surrogate pair"
    ):
        batcher.submit(**given)


def test_errors_can_be_written_to_any_file(batcher: VLMBatcher) -> None:
    error = batcher.submit("caf\udce9.png", DESCRIBE).result(timeout=60).error
    assert error is not None and "caf\\udce9.png" in error
    error.encode("utf-8")


def test_pictures_may_come_from_an_iterator(batcher: VLMBatcher) -> None:
    first, second = (
        batcher.submit(images, DESCRIBE) for images in (iter([CIRCLE]), [CIRCLE])
    )
    assert first.result(timeout=60).text == second.result(timeout=60).text
    assert first.result().usage.image_tokens > 0


# One request never takes the others with it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError]
)
def test_whatever_a_processor_raises_ends_its_request_alone(
    batcher: VLMBatcher, kind: type[BaseException]
) -> None:
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise kind("of the test")

    beside = batcher.submit(None, "count to 5")
    bad = batcher.submit(
        None, "count to 3", params=SamplingParams(logits_processors=[raises])
    )
    result = bad.result(timeout=60)
    assert result.finish_reason == "error" and kind.__name__ in str(result.error)
    assert beside.result(timeout=60).text == "1 2 3 4 5"
    assert answers(batcher)


#: What a processor may return that is joined with six other rows' logits, and what comes of it; None: an answer as without.
RETURNED: dict[str, tuple[Callable[[mx.array], Any], str | None]] = {
    "complex64": (
        lambda logits: logits.astype(mx.complex64),
        "a floating type, not mlx.core.complex64",
    ),
    "int32": (
        lambda logits: logits.astype(mx.int32),
        "a floating type, not mlx.core.int32",
    ),
    "bool": (lambda logits: logits > 0, "a floating type, not mlx.core.bool"),
    "numpy": (np.array, r"logits of shape \(1, \d+\), not ndarray"),
    "no batch": (lambda logits: logits[0], "logits of shape"),
    "NaN": (lambda logits: logits * math.nan, "not finite"),
    "bfloat16": (lambda logits: logits.astype(mx.bfloat16), None),
    "float16": (lambda logits: logits.astype(mx.float16), None),
}


@pytest.mark.parametrize("what", RETURNED)
def test_whatever_a_processor_returns_harms_nobody_else(
    batcher: VLMBatcher, what: str
) -> None:
    give, said = RETURNED[what]
    params = SamplingParams(logits_processors=(lambda tokens, logits: give(logits),))
    before = batcher.submit(None, "count to 5")
    bad = batcher.submit(None, "count to 3", params=params)
    beside = [before, *(batcher.submit(None, "count to 5") for _ in range(5))]
    result = bad.result(timeout=60)
    assert [one.result(timeout=60).text for one in beside] == ["1 2 3 4 5"] * 6
    if said is None:
        assert result.text == "1 2 3"
    else:
        assert re.search(said, str(result.error)), result.error


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "pixel_values",
            lambda array: array.astype(np.complex64),
            "pixel_values of complex64",
        ),
        (
            "image_grid_thw",
            lambda array: np.concatenate([array] * 2, axis=-1),
            "what the model's processor makes",
        ),
        (
            "image_grid_thw",
            lambda array: array[None],
            "what the model's processor makes",
        ),
    ],
)
def test_processed_inputs_of_odd_types_and_shapes_are_refused_by_submit(
    batcher: VLMBatcher, name: str, change: Callable[[np.ndarray], Any], said: str
) -> None:
    inputs = as_numpy(inputs_of(FAMILY, "image:1:0"))
    with pytest.raises(InvalidPrompt, match=said):
        batcher.submit_request(Request(inputs={**inputs, name: change(inputs[name])}))


def test_embeddings_that_are_no_real_numbers_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = BatchGenerator(shared_adapter(FAMILY))
    encode = generator.adapter.encode

    def odd(inputs: Any, *rest: Any) -> Any:
        encoded = encode(inputs, *rest)
        is_bad = encoded.length == 9
        return (
            replace(encoded, inputs_embeds=encoded.inputs_embeds.astype(mx.complex64))
            if is_bad
            else encoded
        )

    monkeypatch.setattr(generator.adapter, "encode", odd)
    for key in ("text:4:9", "text:5:26", "text:6:14"):
        generator.insert(
            key, as_mlx(inputs_of(FAMILY, key)), SamplingParams(max_tokens=4)
        )
    results: dict[str, Any] = {}
    while generator.has_work:
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
    assert "real numbers (1, L, D)" in str(results["text:4:9"].error)
    assert all(results[key].error is None for key in ("text:5:26", "text:6:14"))


class Speechless(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ZeroDivisionError]
)
@pytest.mark.parametrize("what", ["images", "videos", "frames"])
def test_whatever_a_pictures_own_code_raises_is_the_pictures_fault(
    batcher: VLMBatcher, what: str, kind: type[BaseException]
) -> None:
    """It runs when the request is submitted, on the submitter's thread: refused there, and by nobody's end."""

    class Bad:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise kind("of the picture")

    media: dict[str, Any] = (
        {what: Bad()} if what != "frames" else {"videos": [Video([Bad(), Bad()])]}
    )
    raised: list[BaseException] = []

    # not on the main thread, whose KeyboardInterrupt is the user's own
    def submit() -> None:
        try:
            batcher.submit(prompt=DESCRIBE, **media)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join(60)
    assert isinstance(raised[0], InvalidImage if what == "images" else InvalidVideo)
    assert kind.__name__ in str(raised[0])
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            batcher.submit(prompt=DESCRIBE, **media)
    else:
        bad, good = batcher.generate(
            [{"prompt": DESCRIBE, **media}, {"prompt": "count to 3"}]
        )
        assert (bad.ok, good.text) == (False, "1 2 3")
    assert answers(batcher)


def test_an_error_without_a_text_ends_its_request_alone(batcher: VLMBatcher) -> None:
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise Speechless

    def talks(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("x" * 10**6)

    beside = batcher.submit(None, "count to 9", params=LONG)
    next(iter(beside))
    bad = [
        batcher.submit(
            None, "count to 3", params=SamplingParams(logits_processors=[one])
        )
        for one in (raises, talks)
    ]
    assert bad[0].result(timeout=60).error == "Speechless"
    assert len(str(bad[1].result(timeout=60).error)) < 2100
    assert not beside.done()
    beside.cancel()
    assert beside.result(timeout=60).finish_reason == "cancelled"


@pytest.mark.parametrize("kind", [SystemExit, ValueError])
def test_a_listener_that_raises_is_no_part_of_the_engine(
    batcher: VLMBatcher, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise kind("of the test")

    beside = batcher.submit(None, "count to 9", params=LONG)
    next(iter(beside))
    heard = batcher.submit(None, "count to 3")
    others = [batcher.submit(None, "count to 5") for _ in range(3)]
    heard.when_done(raises)
    assert heard.result(timeout=60).text == "1 2 3"
    assert [other.result(timeout=60).text for other in others] == ["1 2 3 4 5"] * 3
    assert not beside.done()
    beside.cancel()
    assert beside.result(timeout=60).error is None
    assert "a listener of request" in caplog.text


@pytest.mark.parametrize("waits", ["result", "for", "generate"])
def test_nobody_waits_on_the_engines_own_thread(
    batcher: VLMBatcher, waits: str
) -> None:
    """A listener or a processor that waits for an answer would wait for ever, and everybody with it."""
    said: list[str] = []
    other = batcher.submit(None, "count to 9", params=LONG)

    def wait() -> None:
        try:
            if waits == "generate":
                batcher.generate([Request(prompt="count to 3")])
            else:
                other.result() if waits == "result" else list(other)
        except RuntimeError as error:
            said.append(str(error))

    heard = batcher.submit(None, "count to 3")
    heard.when_done(wait)
    heard.result(timeout=60)
    assert answers(batcher)
    assert "is waited for on the engine's own thread" in said[0]
    other.cancel()
    other.result(timeout=60)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_whatever_loading_raises_ends_its_request_alone(
    batcher: VLMBatcher, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    render = Processing.inputs

    def inputs(
        self: Processing, prompt: str, *media: Any, is_templated: bool = True
    ) -> Any:
        if "repeat" in prompt:
            raise kind("of the test")
        return render(self, prompt, *media, is_templated=is_templated)

    monkeypatch.setattr(Processing, "inputs", inputs)
    bad = batcher.submit(None, "repeat: a")
    beside = batcher.submit(None, "count to 5")
    assert kind.__name__ in str(bad.result(timeout=60).error)
    assert beside.result(timeout=60).text == "1 2 3 4 5"


def test_without_threads_a_request_ends_and_none_waits(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may give no thread to any pool: to read on, to process on, or for what is watched."""
    begin = threads.start
    for lacking in ("reader", "loader", "watch"):
        with VLMBatcher(CHECKPOINT) as own:

            def start(
                work: Any, name: str, *, lacking: str = lacking, **how: Any
            ) -> Any:
                if lacking in name:
                    raise RuntimeError("can't start new thread")
                return begin(work, name, **how)

            with monkeypatch.context() as patch:
                patch.setattr(threads, "start", start)
                results = [own.submit(CIRCLE, DESCRIBE) for _ in range(6)]
                for handle in results:
                    assert lacking == "watch" or "can't start new thread" in str(
                        handle.result(timeout=60).error
                    )
                    assert handle.result(timeout=60).ok is (lacking == "watch")
            assert own.submit(CIRCLE, DESCRIBE).result(timeout=60).ok


def test_loaders_that_cannot_start_end_the_request(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(question: Any, when_read: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(batcher._loop._loaders, "start", start)
        assert "can't start new thread" in str(
            batcher.submit(None, "count to 3").result(timeout=60).error
        )
    assert answers(batcher)


@pytest.mark.parametrize("kind", [SystemExit, KeyError])
def test_a_defect_of_admission_ends_what_there_is_and_the_engine_goes_on(
    batcher: VLMBatcher, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = batcher.submit(None, "count to 9", params=LONG)
    next(iter(running))

    def broken(*_: Any) -> Any:
        raise kind("the admission is broken")

    with monkeypatch.context() as patch:
        patch.setattr(Admission, "next_to_read", broken)
        late = batcher.submit(None, "count to 3")
        results = [running.result(timeout=60), late.result(timeout=60)]
    assert all("the admission is broken" in str(result.error) for result in results)
    assert results[0].text == "".join(running) != ""  # what it had is not lost
    assert answers(batcher)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["raises", "returns"])
def test_nobody_waits_for_a_thread_that_is_gone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort fails, too: every way of waiting ends, and what comes later is refused."""
    own = VLMBatcher(CHECKPOINT, max_rows=1)
    begun, may_die = threading.Event(), threading.Event()

    def holds(tokens: mx.array, logits: mx.array) -> mx.array:
        begun.set()
        may_die.wait(60)
        return logits

    first = own.submit(
        None, "count to 9", params=replace(LONG, logits_processors=[holds])
    )
    assert begun.wait(60)  # the others may be ready before it, and would have its place
    handles = [first, *(own.submit(None, "count to 9", params=LONG) for _ in range(3))]
    waiting = threading.Thread(target=lambda: list(handles[3]))
    waiting.start()

    def dies(*_: Any) -> bool:
        if how == "raises":
            raise SystemError("the engine is broken beyond repair")
        return False

    monkeypatch.setattr(EngineLoop, "_serve", dies)
    monkeypatch.setattr(EngineLoop, "_finish", lambda *_: None)
    monkeypatch.setattr(EngineLoop, "_recover", dies)
    handles[3].cancel()
    may_die.set()

    async def wait() -> Result:
        return await handles[1]

    assert asyncio.run(asyncio.wait_for(wait(), 60)).finish_reason == "error"
    assert all(
        "engine has stopped" in str(handle.result(timeout=60).error)
        for handle in handles
    )
    assert list(handles[2]) == []
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(BatcherClosed, match="engine has stopped"):
        own.submit(None, "count to 3")
    own.close()


def test_a_sampler_error_is_the_culprits_alone() -> None:
    def raises(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
        if any(row.seed == 13 for row in rows):
            raise RuntimeError("std::bad_cast")
        return sample(logits, rows)

    generator = BatchGenerator(shared_adapter(FAMILY), sampler=raises)
    keys = {"a": "text:4:9", "bad": "text:5:26", "b": "image:2:1"}
    for name, key in keys.items():
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=13 if name == "bad" else 1)
        generator.insert(name, as_mlx(inputs_of(FAMILY, key)), params)
    results = _finish(generator)
    assert "std::bad_cast" in str(results["bad"].error)
    for name in ("a", "b"):
        assert (
            list(results[name].token_ids)
            == oracle(FAMILY, keys[name]).tokens[:NUM_TOKENS]
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_ends_with_an_error(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = shared_adapter(FAMILY)
    generator = BatchGenerator(adapter)
    for name, key in (("a", "text:4:9"), ("bad", "text:5:26")):
        generator.insert(
            name, as_mlx(inputs_of(FAMILY, key)), SamplingParams(max_tokens=NUM_TOKENS)
        )
    while len(generator.rows.batch) < 2:
        generator.step()
    decode = adapter.decode

    def spoilt(step: Any, call: Any) -> mx.array:
        logits = decode(step, call)
        rows = [
            row is not None and row.request_id == "bad"
            for row in generator.rows.batch.groups[0].places
        ]
        return mx.where(mx.array(rows)[:, None], value, logits)

    monkeypatch.setattr(adapter, "decode", spoilt)
    results = _finish(generator)
    assert results["bad"].finish_reason == "error"
    assert "not finite" in str(results["bad"].error)
    assert 0 < len(results["bad"].token_ids) < NUM_TOKENS
    assert (
        list(results["a"].token_ids) == oracle(FAMILY, "text:4:9").tokens[:NUM_TOKENS]
    )


def test_a_prompt_that_overflows_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared_adapter(FAMILY)
    prefix = PrefixCache(ByteBudget(2**28))
    generator = BatchGenerator(adapter, reuse=Reuse(adapter, prefix))
    prefill = adapter.prefill
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "prefill", lambda *given: prefill(*given) * math.nan)
        generator.insert(
            "bad", as_mlx(inputs_of(FAMILY, "text:5:26")), SamplingParams(max_tokens=4)
        )
        assert "not finite" in str(_finish(generator)["bad"].error)
    assert len(prefix) == 0
    generator.insert(
        "good",
        as_mlx(inputs_of(FAMILY, "text:5:26")),
        SamplingParams(max_tokens=NUM_TOKENS),
    )
    assert (
        list(_finish(generator)["good"].token_ids)
        == oracle(FAMILY, "text:5:26").tokens[:NUM_TOKENS]
    )
    assert len(prefix) == 1


def test_an_entry_that_cannot_be_kept_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("the budget is broken")

    adapter = shared_adapter(FAMILY)
    generator = BatchGenerator(
        adapter, reuse=Reuse(adapter, PrefixCache(ByteBudget(2**28)))
    )
    monkeypatch.setattr(PrefixCache, "store", broken)
    generator.insert(
        "a",
        as_mlx(inputs_of(FAMILY, "text:5:26")),
        SamplingParams(max_tokens=NUM_TOKENS),
    )
    assert (
        list(_finish(generator)["a"].token_ids)
        == oracle(FAMILY, "text:5:26").tokens[:NUM_TOKENS]
    )


#: Families by the kinds of state that a row loses with a failed step: keys and values, with pictures' features at every layer,
#: windows, pictures' own layers, recurrent states beside keys and values, prompts that attend both ways.
KINDS = ("qwen2_vl", "qwen3_vl", "gemma3n", "mllama", "qwen3_5", "paligemma")
FOUR = {"a": "text:4:9", "bad": "text:5:26", "b": "image:2:1", "c": "text:6:14"}


def _joined(
    generator: BatchGenerator, family: str, asks: dict[str, str], **params: Any
) -> None:
    """Insert requests, and step until all of them decode and have said something."""
    for seed, (name, key) in enumerate(asks.items()):
        given = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, **params)
        generator.insert(name, as_mlx(inputs_of(family, key)), given)
    while len(generator.rows.batch) < len(asks) or not all(
        row.answer.token_ids for row in generator.rows.batch.rows
    ):
        assert not [
            event.result for event in generator.step() if event.result is not None
        ]


@pytest.mark.fails_steps
@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
@pytest.mark.parametrize("family", KINDS)
def test_a_decode_forward_that_raises_ends_the_culprit_alone(
    family: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it: some layers have their token by then, and others have not."""
    adapter = shared_adapter(family)
    generator = BatchGenerator(adapter, policy=settings_for(placement))
    _joined(generator, family, FOUR)
    decode = adapter.decode
    forwards: list[list[str]] = []

    def breaks(step: Any, call: Any) -> mx.array:
        group = next(
            group
            for group in generator.rows.batch.groups
            if group.layers is step.caches
        )
        names = [row.request_id for row in group.rows]
        forwards.append(names)
        row = next((row for row in group.rows if row.request_id == "bad"), None)
        decoded = decode(step, call)
        if row is not None and row.answer.num_sampled >= 3:
            # as they are when the second layer's attention raises
            for layer in step.caches[1:]:
                for array in layer.arrays():
                    array[...] = math.nan if array.dtype == mx.float32 else 0
            raise ZeroDivisionError("of the test")
        return decoded

    monkeypatch.setattr(adapter, "decode", breaks)
    results = _finish(generator)
    assert results["bad"].error == "ZeroDivisionError: of the test"
    assert (
        list(results["bad"].token_ids)
        == oracle(family, FOUR["bad"]).tokens[: len(results["bad"].token_ids)]
    )
    for name in ("a", "b", "c"):
        assert (
            list(results[name].token_ids)
            == oracle(family, FOUR[name]).tokens[:NUM_TOKENS]
        )
    assert ["bad"] in forwards  # tried apart
    # and the others are together again
    assert any(len(names) > 1 for names in forwards[forwards.index(["bad"]) :])
    assert generator.retry.num_recomputed == 4
    assert not generator.rows.batch.groups and generator.rows.batch.nbytes == 0


@pytest.mark.fails_steps
def test_what_fails_once_costs_nobody_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nobody fails apart; drawn tokens, log-probabilities, penalties and pieces of text come out as alone."""
    adapter = shared_adapter(FAMILY)
    how: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "logprobs": 2,
        "repetition_penalty": 1.3,
        "ignore_eos": True,
    }

    def answers(fails: bool) -> tuple[dict[str, Result], dict[str, list[int | None]]]:
        generator = BatchGenerator(
            adapter, text=AnswerText(lambda ids: "".join(f"<{token}>" for token in ids))
        )
        for seed, (name, key) in enumerate(FOUR.items()):
            generator.insert(
                name,
                as_mlx(inputs_of(FAMILY, key)),
                SamplingParams(max_tokens=12, seed=seed, **how),
            )
        decode, count, failed = adapter.decode, 0, 0
        results: dict[str, Result] = {}
        streams: dict[str, list[int | None]] = {name: [] for name in FOUR}

        def flaky(step: Any, call: Any) -> mx.array:
            nonlocal count, failed
            count += 1
            if (
                fails
                and step.tokens.shape[0] > 1
                and failed < 2
                and count >= (3, 20)[failed]
            ):
                failed += 1
                raise RuntimeError("a device had a bad moment")
            return decode(step, call)

        with monkeypatch.context() as patch:
            patch.setattr(adapter, "decode", flaky)
            while generator.has_work:
                for event in generator.step():
                    streams[event.request_id].append(event.token)
                    results |= (
                        {} if event.result is None else {event.request_id: event.result}
                    )
        assert (generator.retry.num_recomputed > 0) is fails
        return results, streams

    (calm, told), (flaky, told_again) = answers(False), answers(True)
    assert told == told_again
    for name, result in calm.items():
        again = flaky[name]
        assert (again.token_ids, again.text, again.error) == (
            result.token_ids,
            result.text,
            None,
        )
        for one, other in zip(result.logprobs or (), again.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.fails_steps
@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_step_that_fails_on_the_device_is_tried_again(where: str) -> None:
    """What was launched fails later than the forward: when it is evaluated, or waited for."""
    count = 0

    class Failing(Sampled):
        def arrays(self) -> list[mx.array]:
            if where == "launch":
                raise RuntimeError("the device failed")
            return super().arrays()

        def read(self) -> Any:
            raise RuntimeError("the device failed")

    def sampler(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
        nonlocal count
        count += 1
        bad = any(row.seed == 1 and row.step == 4 for row in rows)
        has_failed_before = count in (2, 7) and len(rows) > 1
        sampled = sample(logits, rows)
        return (
            Failing(sampled.tokens, sampled.highest)
            if bad or has_failed_before
            else sampled
        )

    generator = BatchGenerator(shared_adapter(FAMILY), sampler=sampler)
    _joined(generator, FAMILY, FOUR)
    results = _finish(generator)
    assert "the device failed" in str(results["bad"].error)
    for name in ("a", "b", "c"):
        assert (
            list(results[name].token_ids)
            == oracle(FAMILY, FOUR[name]).tokens[:NUM_TOKENS]
        )


@pytest.mark.fails_steps
@pytest.mark.parametrize("fails", [(2,), (2, 6)], ids=["once", "twice"])
def test_who_begins_again_is_not_sampled_by_what_was_launched_beside_it(
    fails: tuple[int, ...],
) -> None:
    """Rows are sampled one by one, and the first of them fails when it is launched: the others begin again with it."""
    count = 0

    class Failing(Sampled):
        def arrays(self) -> list[mx.array]:
            raise RuntimeError("the device failed")

    def sampler(logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
        nonlocal count
        count += 1
        if len(rows) > 1 and count < 4:
            raise ValueError("each alone, please")
        sampled = sample(logits, rows)
        return Failing(sampled.tokens, sampled.highest) if count in fails else sampled

    generator = BatchGenerator(
        shared_adapter(FAMILY), policy=settings_for(Placement.SLAB), sampler=sampler
    )
    for seed, (name, key) in enumerate(FOUR.items()):
        generator.insert(
            name,
            as_mlx(inputs_of(FAMILY, key)),
            SamplingParams(max_tokens=NUM_TOKENS, seed=seed),
        )
    results = _finish(generator)
    assert generator.retry.num_recomputed == len(FOUR)
    ended = [name for name, result in results.items() if result.error]
    assert len(ended) == len(fails) - 1  # who fails apart, too
    for name, key in [(name, key) for name, key in FOUR.items() if name not in ended]:
        assert list(results[name].token_ids) == oracle(FAMILY, key).tokens[:NUM_TOKENS]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fits", [2, 3])
def test_for_want_of_memory_the_last_in_line_waits(
    fits: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not fit together are answered all the same: fewer at a time, to the same tokens, drawn ones too."""
    adapter = shared_adapter(FAMILY)
    alone: dict[str, Result] = {}
    how = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
    setting = FixedShapes(counts=(1, 2, 3, 4)) if exact else None
    for seed, (name, key) in enumerate(FOUR.items()):
        generator = BatchGenerator(adapter, shapes=setting)
        generator.insert(name, as_mlx(inputs_of(FAMILY, key)), replace(how, seed=seed))
        alone |= _finish(generator)
    generator = BatchGenerator(adapter, shapes=setting)
    for seed, (name, key) in enumerate(FOUR.items()):
        generator.insert(
            name,
            as_mlx(inputs_of(FAMILY, key)),
            replace(how, seed=seed),
            priority=name == "c",
        )
    decode, most = adapter.decode, 0

    def full(step: Any, call: Any) -> mx.array:
        nonlocal most
        live = len(generator.rows.batch)
        if live > fits:
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        most = max(most, live)
        return decode(step, call)

    monkeypatch.setattr(adapter, "decode", full)
    ended: list[str] = []
    results: dict[str, Result] = {}
    steps = itertools.count()
    while generator.has_work:
        assert next(steps) < 2000
        for event in generator.step():
            if event.result is not None:
                ended.append(event.request_id)
                results[event.request_id] = event.result
    assert [results[name].token_ids for name in FOUR] == [
        alone[name].token_ids for name in FOUR
    ]
    assert most == fits
    assert set(ended[:fits]) == set(
        ["c", "a", "bad", "b"][:fits]
    )  # "c" is urgent, and the others are as old as they come


@pytest.mark.parametrize("end", ["length", "stop", "cancelled"])
@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("where", ["take", "end"])
def test_for_want_of_memory_when_a_complete_answers_caches_are_saved_it_still_ends(
    where: str, is_wanted: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins again where its user waits for them, and has no further token to say; else they are not kept."""
    adapter, prefix = shared_adapter(FAMILY), PrefixCache(ByteBudget(2**28))
    generator = BatchGenerator(
        adapter, reuse=Reuse(adapter, prefix), policy=settings_for(Placement.SLAB)
    )
    owner: Any = DecodeBatch if where == "take" else Reuse
    name = "take" if where == "take" else "_saved"
    right, failed = getattr(owner, name), 0

    def full(self: Any, *given: Any) -> Any:
        nonlocal failed
        is_end = given[0].request_id == "a" and (where == "take" or given[2])
        if is_end and failed < (2 if end == "cancelled" else 1):
            failed += 1
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        return right(self, *given)

    monkeypatch.setattr(owner, name, full)
    tokens = {name: oracle(FAMILY, key).tokens for name, key in FOUR.items()}
    stops = (tokens["a"][3],) if end == "stop" else ()
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=stops
    )
    generator.insert(
        "a", as_mlx(inputs_of(FAMILY, FOUR["a"])), params, return_cache=is_wanted
    )
    generator.insert(
        "b",
        as_mlx(inputs_of(FAMILY, FOUR["b"])),
        SamplingParams(max_tokens=NUM_TOKENS + 9, ignore_eos=True),
    )
    told: dict[str, list[int]] = {"a": [], "b": []}
    results: dict[str, Result] = {}
    steps = itertools.count()
    while generator.has_work:
        assert next(steps) < 200
        for event in generator.step():
            told[event.request_id] += [] if event.token is None else [event.token]
            results |= {} if event.result is None else {event.request_id: event.result}
        if end == "cancelled" and failed and "a" not in results:
            generator.cancel("a")
    count = tokens["a"].index(stops[0]) + 1 if stops else NUM_TOKENS
    said = results["a"].token_ids
    assert failed and said == tuple(told["a"]) == tuple(tokens["a"][: len(said)])
    assert len(said) == count or end == "cancelled"
    if end == "cancelled":
        assert results["a"].finish_reason in ("cancelled", "length")
    else:
        assert (
            results["a"].finish_reason == end
            and (results["a"].cache is not None) is is_wanted
        )
    assert (generator.retry.num_recomputed > 0) is is_wanted
    assert results["b"].error is None and not generator.rows.batch.rows


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3n", "qwen3_5"])
def test_a_long_row_that_joins_some_layers_leaves_all_of_them_as_wide(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share their mask, so that one which had been widened already would no longer fit it."""
    generator = BatchGenerator(
        shared_adapter(family), policy=settings_for(Placement.SLAB)
    )
    short, long = "text:5:300", "text:7:600"
    generator.insert(
        "short", as_mlx(inputs_of(family, short)), SamplingParams(max_tokens=NUM_TOKENS)
    )
    results = {
        event.request_id: event.result
        for event in generator.step()
        if event.result is not None
    }
    put, joined = SlabCache.put, list[int]()

    def failing(self: SlabCache, place: int, cache: Any) -> None:
        joined.append(cache.offset)
        if len(joined) == 2:
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        put(self, place, cache)

    monkeypatch.setattr(SlabCache, "put", failing)
    generator.insert(
        "long", as_mlx(inputs_of(family, long)), SamplingParams(max_tokens=2)
    )
    steps = itertools.count()
    while generator.has_work:
        assert next(steps) < 200
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
        slabs = [
            layer
            for group in generator.rows.batch.groups
            for layer in group.layers
            if type(layer) is SlabCache and layer.arrays()
        ]
        assert len({layer.capacity for layer in slabs}) <= 1
    assert len(joined) > 2
    for name, key in (("short", short), ("long", long)):
        count = len(results[name].token_ids)
        assert (
            count
            and list(results[name].token_ids) == oracle(family, key).tokens[:count]
        ), results[name].error


@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_for_want_of_memory_what_mlx_keeps_is_given_back_each_time(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the failed call had made, too, before anybody is tried again: MLX itself does not try without its cache first."""
    adapter, large, held = shared_adapter(FAMILY), 64_000_000, []
    generator = BatchGenerator(adapter, policy=policy_of({"prefill_together": 1}))
    for name, key in FOUR.items():
        generator.insert(
            name,
            as_mlx(inputs_of(FAMILY, key)),
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        )
    forward, release_memory, wants = getattr(adapter, work), retry.release_memory, 0
    base = mx.get_active_memory()

    def full(*given: Any) -> mx.array:
        nonlocal wants
        if (work == "prefill" or len(generator.rows.batch) > 1) and wants < 2:
            wants += 1
            made = mx.arange(large // 4)
            mx.eval(made)
            raise RuntimeError(
                "CUBLAS_STATUS_ALLOC_FAILED"
                if wants == 1
                else "[malloc] Unable to allocate 9 bytes."
            )
        return forward(*given)

    def watched() -> None:
        held.append(mx.get_active_memory() - base)
        release_memory()

    monkeypatch.setattr(adapter, work, full)
    monkeypatch.setattr(retry, "release_memory", watched)
    results = _finish(generator)
    assert len(held) == wants == 2 and max(held) < large
    assert not any(result.error for result in results.values())


@pytest.mark.parametrize(
    "placement", list(Placement), ids=lambda placement: placement.value
)
@pytest.mark.parametrize("family", KINDS)
def test_rows_keep_within_a_bound_on_bytes(family: str, placement: Placement) -> None:
    """Ten times as many as fit: nothing is refused or lost, nobody waits for those that came later, and the bound holds."""
    adapter = shared_adapter(family)
    generator = BatchGenerator(adapter, policy=settings_for(placement))
    generator.insert(
        "first",
        as_mlx(inputs_of(family, "text:5:26")),
        SamplingParams(max_tokens=NUM_TOKENS),
    )
    while not len(generator.rows.batch):
        generator.step()
    row = generator.rows.batch.nbytes
    # a slab has one place, two or four: eight would be too many
    rows = 5 if placement is Placement.SLAB else 3
    config = {"max_rows": 8, "max_bytes": int(rows * 1.2 * row)}
    generator = BatchGenerator(adapter, policy=settings_for(placement, **config))
    generator.memory.learn(adapter_caches(adapter, family), 26)
    keys = list(FOUR.values())
    for index in range(30):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=index)
        generator.insert(str(index), as_mlx(inputs_of(family, keys[index % 4])), params)
    results: dict[str, Result] = {}
    steps = itertools.count()
    most = 0
    while generator.has_work:
        assert next(steps) < 3000
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
        most = max(most, len(generator.rows.batch))
        assert generator.rows.batch.nbytes <= int(rows * 1.2 * row) * 1.05
    assert most >= 2
    for index in range(30):
        assert (
            list(results[str(index)].token_ids)
            == oracle(family, keys[index % 4]).tokens[:NUM_TOKENS]
        )
    overtaken = [
        sum(int(other) > int(name) for other in list(results)[:at])
        for at, name in enumerate(results)
    ]
    assert max(overtaken) <= 8  # those that have a place beside it


@pytest.mark.parametrize("family", KINDS)
def test_further_answers_to_one_prompt_keep_within_the_bound(family: str) -> None:
    """Twelve answers where three rows fit, and a request behind them that fits at any time: it does not go before them."""
    adapter = shared_adapter(family)
    memory = RowMemory(2**62, lambda lengths: [(1, length) for length in lengths])
    memory.learn(adapter_caches(adapter, family), 26)
    bound = int(3.5 * memory.of(40))
    params = SamplingParams(n=12, temperature=1.0, seed=3, max_tokens=NUM_TOKENS)
    asks = [
        ("many", "text:5:26", params),
        ("last", "text:4:9", SamplingParams(max_tokens=NUM_TOKENS)),
    ]
    answers = []
    for max_bytes in (2**62, bound):
        config = {"max_rows": 16, "max_bytes": max_bytes}
        generator = BatchGenerator(
            adapter, policy=settings_for(Placement.ROWS, **config)
        )
        generator.memory.learn(adapter_caches(adapter, family), 26)
        for name, key, how in asks:
            generator.insert(name, as_mlx(inputs_of(family, key)), how)
        results: dict[str, Result] = {}
        while generator.has_work:
            results |= {
                event.request_id: event.result
                for event in generator.step()
                if event.result is not None
            }
            assert generator.rows.batch.nbytes <= max_bytes
        answers.append({name: result.token_ids for name, result in results.items()})
    assert answers[0] == answers[1] and len(answers[0]) == 13


@pytest.mark.parametrize(
    "kv", [None, KVQuantisation(8, 32, "uniform", 0)], ids=["exact", "8 bits"]
)
def test_a_rows_bytes_are_those_that_are_allocated(kv: KVQuantisation | None) -> None:
    """By steps of 256 positions, not by the positions that are filled."""
    adapter = shared_adapter(FAMILY)
    memory = RowMemory(2**62, lambda lengths: [(1, length) for length in lengths])
    memory.probe(Trial(adapter, kv, FreeShapes()))
    encoded = adapter.encode(as_mlx(inputs_of(FAMILY, "text:5:26")))
    caches = adapter.make_cache(kv)
    adapter.prefill([encoded], caches, 0, encoded.length)
    assert memory.of(26) == sum(cache.nbytes for cache in caches)


def test_a_decoder_behind_an_encoder_of_text_counts_no_less_than_is_allocated() -> None:
    """After a prompt of 26 tokens Florence-2's layers hold one, in 256 positions."""
    adapter = shared_adapter("florence2")
    memory = RowMemory(2**62, lambda lengths: [(1, length) for length in lengths])
    memory.probe(Trial(adapter, None, FreeShapes()))
    encoded = adapter.encode(as_mlx(inputs_of("florence2", "text:5:26")))
    caches = adapter.make_cache(None)
    adapter.prefill([encoded], caches, 0, encoded.length)
    assert memory.of(26) >= sum(cache.nbytes for cache in caches) > 0


def test_a_made_up_prompt_stays_within_learned_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX looks nothing up safely: what lies behind a table is another array's memory, or a segmentation fault."""
    adapter, look_up = shared_adapter("florence2"), nn.Embedding.__call__
    assert adapter.max_context is not None and adapter.max_context < PROBE
    behind: list[int] = []

    def checked(table: nn.Embedding, ids: mx.array) -> mx.array:
        last = int(np.max(np.array(ids)))
        if last >= len(table.weight):
            behind.append(last)
        return look_up(table, ids)

    monkeypatch.setattr(nn.Embedding, "__call__", checked)
    trial = Trial(adapter, None, FreeShapes())
    memory = RowMemory(2**62, lambda lengths: [(1, length) for length in lengths])
    memory.probe(trial)
    assert memory.of(PROBE)  # it has run
    trial.row(PROBE)
    assert not behind


def adapter_caches(adapter: Any, family: str) -> list[Any]:
    """A row's caches after a prompt of 26 tokens."""
    encoded = adapter.encode(as_mlx(inputs_of(family, "text:5:26")))
    caches = adapter.make_cache()
    adapter.prefill([encoded], caches, 0, encoded.length)
    return caches


def test_what_does_not_fit_the_bound_alone_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the first request, too: by ``submit`` where the length is known there, else before anything is encoded."""
    numbers = r"the request has at least [\d,]+ tokens .* take [\d.]+ MB; max_bytes is 0.6 MB, which (\d+) tokens fit into"
    with VLMBatcher(CHECKPOINT, max_bytes=600_000) as own:
        for known in (
            {"token_ids": [5] * 400},
            {"inputs": {"input_ids": np.full((1, 400), 5)}},
            {"prompt": "a" * 6400},
        ):
            with pytest.raises(DoesNotFit, match=numbers) as error:
                own.submit_request(Request(**known))  # type: ignore[arg-type]
            most = int(re.search(numbers, str(error.value))[1])  # type: ignore[index]
        encoded: list[int] = []
        adapter = own._loop.generator.adapter
        encode = adapter.encode

        def watched(*given: Any) -> Any:
            encoded.append(1)
            return encode(*given)

        monkeypatch.setattr(adapter, "encode", watched)
        refused = own.submit(CIRCLE, "count to 3 " * 100).result(timeout=60)
        assert isinstance(refused.exception, DoesNotFit) and isinstance(
            refused.exception, OutOfMemory
        )
        assert re.search(numbers, str(refused.error)) and not encoded
        assert (
            own.submit(token_ids=[5] * most, params=SamplingParams(max_tokens=4))
            .result(timeout=60)
            .ok
        )
        with pytest.raises(DoesNotFit):
            own.submit(token_ids=[5] * (most + 1))
        outgrown = own.submit(token_ids=[5] * (most - 20), params=LONG).result(
            timeout=60
        )  # by its answer, with nobody beside
        assert isinstance(outgrown.exception, DoesNotFit) and outgrown.token_ids
        assert re.search(numbers.replace("at least ", ""), str(outgrown.error))
        stats = own.stats()
        assert (
            stats.max_kv_bytes == 600_000
            and stats.mlx_bytes > 10**6
            and stats.input_bytes == 0
        )
    with pytest.raises(ValueError, match="max_bytes"):
        VLMBatcher(CHECKPOINT, max_bytes=1.5)  # type: ignore[arg-type]
    with VLMBatcher(CHECKPOINT) as own:
        bound = own.stats().max_kv_bytes
        assert bound is not None and 10**8 < bound < 10**13


def test_a_flood_of_messages_does_not_hold_up_the_engine() -> None:
    """Threads that submit and cancel without pause keep the inbox full; those who wait are answered all the same."""
    history = History("qwen2_vl", Placement.ROWS)
    history.submit("text:4:9", max_tokens=3)
    told = history.told["r1"]
    history.load(0)
    for _ in range(20 * MESSAGES_A_TURN):
        history.loop._inbox.put(
            Message(lambda loop: loop._cancel("of nobody"), NO_CLIENT)
        )
    while not told.handle.done():
        assert history.loop.has_messages, (
            "it was answered only when nobody wanted anything any more"
        )
        history.loop._serve()
    assert told.handle.result().ok


def test_many_cancels_of_one_request_are_one() -> None:
    with VLMBatcher(CHECKPOINT) as own:
        stopped, go_on = threading.Event(), threading.Event()

        def stops(tokens: mx.array, logits: mx.array) -> mx.array:
            stopped.set()
            assert go_on.wait(60)
            return logits

        handle = own.submit(
            None, "count to 9", params=SamplingParams(logits_processors=[stops])
        )
        assert stopped.wait(60)
        assert all(own.cancel(handle.request_id) for _ in range(1000))
        assert own._loop._inbox.qsize() == 1
        go_on.set()
        assert handle.result(timeout=60).finish_reason == "cancelled"
        again = own.submit(None, "count to 9", request_id=handle.request_id)
        assert again.result(timeout=60).ok and not again.cancel()


def test_the_room_that_an_encoder_needs_is_learned_from_the_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active, peak = [1000], [1000]
    monkeypatch.setattr(mx, "get_active_memory", lambda: active[0])
    monkeypatch.setattr(mx, "get_peak_memory", lambda: peak[0])
    memory = EncoderMemory(limit=10_000)
    assert memory.fits(10**9)  # nothing is known yet
    memory.begin(0)  # a text
    memory.begin(100)
    peak[0] = 4000
    for _ in range(STEPS_OF_ENCODING + 1):
        assert memory.expected(100) == 0
        memory.step()
    assert [memory.expected(nbytes) for nbytes in (0, 50, 100, 127, 128, 400)] == [
        0,
        3000,
        3000,
        3000,
        6000,
        12_000,
    ]
    assert memory.fits(100) and not memory.fits(400)
    active[0] = 8000
    assert not memory.fits(100) and memory.fits(0)
    memory.begin(400)  # alone: that was enough
    peak[0] = 9500
    for _ in range(STEPS_OF_ENCODING + 1):
        memory.step()
    assert memory.expected(400) == 1500


def test_a_load_that_took_nearly_all_memory_says_nothing_of_an_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its peak is forgotten before the first picture, or every picture would be encoded alone; what is told of it is not."""
    peak = [9500]
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1000)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: peak[0])
    monkeypatch.setattr(mx, "reset_peak_memory", lambda: peak.__setitem__(0, 0))
    monkeypatch.setattr(memory_of_device, "_forgotten_peak", 0)
    memory = EncoderMemory(limit=9000)
    memory.step()
    memory.begin(100)
    peak[0] = max(peak[0], 4000)
    for _ in range(STEPS_OF_ENCODING + 1):
        memory.step()
    assert memory.expected(100) == 3000 and memory.fits(100)
    assert memory_of_device.peak_bytes() == 9500
    memory.step()
    # it is the process's: it is left alone where an encoding can be told by it
    assert peak[0] == 4000


def test_pictures_are_encoded_beside_others_only_where_there_is_room() -> None:
    with VLMBatcher(CHECKPOINT, caches=None) as own:
        generator = own._loop.generator
        asks: list[dict[str, Any]] = [
            {
                "prompt": "count to 9",
                "params": SamplingParams(max_tokens=30, ignore_eos=True),
            },
            {"images": CIRCLE, "prompt": DESCRIBE},
            {"prompt": "count to 7"},
            {"images": CIRCLE, "prompt": "count to 3"},
        ]
        alone = own.generate(asks)
        full = EncoderMemory(limit=0)
        full._sizes._seen[10] = 1
        generator.runner.encoding = full
        beside: list[int] = []
        encode = generator.adapter.encode

        def watched(inputs: Any, *given: Any) -> Any:
            if "pixel_values" in inputs:
                beside.append(generator.rows.ledger.num(Stage.PREFILL, Stage.DECODE))
            return encode(inputs, *given)

        generator.adapter.encode = watched  # type: ignore[assignment,method-assign]
        full_again = own.generate(asks)
    assert [result.token_ids for result in full_again] == [
        result.token_ids for result in alone
    ]
    assert beside == [0, 0]


def test_what_never_fits_ends_alone_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter(FAMILY)
    generator = BatchGenerator(
        adapter, reuse=Reuse(adapter, PrefixCache(ByteBudget(2**28)))
    )
    prefill = adapter.prefill

    def full(rows: Any, *given: Any) -> mx.array:
        if any(row.length == 26 for row in rows):
            raise MemoryError("[malloc_or_wait] Unable to allocate 99 bytes")
        return prefill(rows, *given)

    monkeypatch.setattr(adapter, "prefill", full)
    for name, key in FOUR.items():
        generator.insert(
            name, as_mlx(inputs_of(FAMILY, key)), SamplingParams(max_tokens=NUM_TOKENS)
        )
    results = _finish(generator)
    assert isinstance(results["bad"].exception, OutOfMemory)
    said = str(results["bad"].error)
    assert (
        "even alone: a prompt of 26 tokens (0 of pictures)" in said
        and f"{NUM_TOKENS} of answer" in said
    )
    for name in ("a", "b", "c"):
        assert (
            list(results[name].token_ids)
            == oracle(FAMILY, FOUR[name]).tokens[:NUM_TOKENS]
        )


@pytest.mark.fails_steps
def test_answers_that_are_held_to_a_form_and_answers_to_one_prompt_begin_again_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form has seen what was said and is not told again; further answers have the prompt of the first."""
    with VLMBatcher(CHECKPOINT) as own:
        adapter = own._loop.generator.adapter
        schema = {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
        }
        asks: list[dict[str, Any]] = [
            {
                "prompt": "count to 9",
                "params": SamplingParams(max_tokens=24, json_schema=schema, seed=1),
            },
            {
                "prompt": "count to 7",
                "params": SamplingParams(n=3, temperature=1.0, max_tokens=20, seed=2),
            },
            {
                "images": CIRCLE,
                "prompt": DESCRIBE,
                "params": SamplingParams(max_tokens=16),
                "return_cache": True,
            },
        ]
        calm = own.generate(asks)
        decode, count = adapter.decode, 0

        def flaky(step: Any, call: Any) -> mx.array:
            nonlocal count
            count += 1
            if count % 7 == 0 and count < 60 and step.tokens.shape[0] > 1:
                raise RuntimeError("a device had a bad moment")
            return decode(step, call)

        with monkeypatch.context() as patch:
            patch.setattr(adapter, "decode", flaky)
            shaken = own.generate(asks)
        assert own._loop.generator.retry.num_recomputed > 3
        for one, other in zip(calm, shaken, strict=True):
            assert (other.text, other.token_ids, other.parsed, other.error) == (
                one.text,
                one.token_ids,
                one.parsed,
                None,
            )
            assert [each.text for each in other.others] == [
                each.text for each in one.others
            ]
        cache = shaken[2].cache
        # The token that ends an answer is in its caches if the next step was launched before it was read.
        assert (
            cache is not None and 0 <= calm[2].cache.num_tokens - cache.num_tokens <= 1  # type: ignore[union-attr]
        )
        assert own.stats().recomputed == own._loop.generator.retry.num_recomputed


@pytest.mark.fails_steps
@pytest.mark.parametrize("place", ["encode", "prefill", "decode"])
def test_a_result_that_is_kept_holds_nothing_of_a_request_that_failed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception says where it was raised, and would hold on to pictures and arrays of every call on the way there."""
    adapter, generator = shared_adapter(FAMILY), BatchGenerator(shared_adapter(FAMILY))
    seen: list[weakref.ref[Any]] = []
    work = getattr(adapter, place)

    def breaks(*given: Any, **how: Any) -> Any:
        found = work(*given, **how)
        rows = given[0] if isinstance(given[0], list) else []
        arrays = arrays_of(list(given)) + arrays_of(
            [
                vars(value)
                for value in (*given, *rows, found)
                if hasattr(value, "__dict__")
            ]
        )
        seen.extend(weakref.ref(array) for array in arrays_of([found, *arrays]))
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(adapter, place, breaks)
    generator.insert(
        "bad", as_mlx(inputs_of(FAMILY, "image:2:1")), SamplingParams(max_tokens=4)
    )
    result = _finish(generator)["bad"]
    assert (
        result.exception is not None and result.exception.__traceback__ is None
    )  # its frames would hold their callers'
    assert len(seen) > 1 and all(array() is None for array in seen)
    assert "in breaks" in "".join(traceback.format_exception(result.exception))


@pytest.mark.parametrize("where", ["a logits processor", "a listener"])
def test_a_step_that_hangs_is_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it hangs, by ``stats`` and in the log, with the place where it is; afterwards all is as it was."""
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.05)
    listened, begun, released = threading.Event(), threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        assert released.wait(60)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if where == "a listener":
            assert listened.wait(60)  # else it would be called on the thread that asks
        else:
            hangs()
        return logits

    with VLMBatcher(CHECKPOINT) as own:
        assert own.stats().stalled == 0
        handle = own.submit(
            None,
            "count to 3",
            params=SamplingParams(logits_processors=[process], max_tokens=1),
        )
        if where == "a listener":
            handle.when_done(hangs)
        listened.set()
        assert begun.wait(60)
        seconds = time.monotonic()
        while not (own.stats().stalled and "in hangs" in caplog.text):
            assert time.monotonic() < seconds + 60
            time.sleep(0.01)
            own._loop._watchdog.look()  # as the thread that watches does
        assert caplog.text.count("a step of the engine has not ended") == 1
        released.set()
        assert handle.result(timeout=60).ok
        assert answers(own)
        while own.stats().stalled:
            assert time.monotonic() < seconds + 120


def test_two_batchers_on_one_model_object_know_nothing_of_each_other() -> None:
    """Also while one of them fails and is closed."""
    model, processor = load_model(CHECKPOINT)

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("of the test")

    with VLMBatcher(model, processor) as one, VLMBatcher(model, processor) as other:
        asks: list[tuple[Any, str]] = [
            (CIRCLE, DESCRIBE),
            (None, "count to 5"),
            (None, "count to 9"),
        ] * 3
        handles = [
            [own.submit(picture, prompt) for picture, prompt in asks]
            for own in (one, other)
        ]
        bad = one.submit(
            None, "count to 3", params=SamplingParams(logits_processors=[broken])
        )
        texts = [
            [handle.result(timeout=60).text for handle in each] for each in handles
        ]
        assert (
            texts[0] == texts[1] == texts[0][:3] * 3
            and texts[0][2] == "1 2 3 4 5 6 7 8 9"
        )
        assert "of the test" in str(bad.result(timeout=60).error)
        running = other.submit(None, "count to 9", params=LONG)
        next(iter(running))
        one.close()
        assert answers(other) and not running.done()
        running.cancel()
        assert running.result(timeout=60).error is None


def _finish(generator: BatchGenerator) -> dict[str, Result]:
    results: dict[str, Result] = {}
    steps = itertools.count()
    while generator.has_work:
        assert next(steps) < 2000
        results |= {
            event.request_id: event.result
            for event in generator.step()
            if event.result is not None
        }
    return results


def test_an_urgent_request_goes_before_all_that_wait() -> None:
    """Also before what is prepared ahead: only those that have a place are not overtaken."""
    ended: list[str] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with VLMBatcher(CHECKPOINT, max_rows=2) as own:
        first = own.submit(None, "count to 9", params=LONG)
        next(iter(first))
        for index in range(40):
            handle = own.submit(None, f"count to {index % 9 + 1}", params=params)
            handle.when_done(lambda name=handle.request_id: ended.append(name))  # type: ignore[misc]
        while own.stats().waiting < 10:
            time.sleep(0.001)
        before = len(ended)
        own.submit(
            None, "count to 9", params=params, priority=10, request_id="urgent"
        ).result(timeout=60)
        # the one that decodes beside it, and what ended while it was prepared
        assert len(ended) - before <= 4


# Nothing lost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [False, True])
def test_cancelling_twice_loses_nothing(closes: bool) -> None:
    with VLMBatcher(CHECKPOINT) as own:
        handles = [own.submit(None, "count to 9", params=LONG) for _ in range(8)]
        streams = [iter(handle) for handle in handles]
        heads = [next(stream) for stream in streams]
        for _ in range(3):
            for handle in handles:
                handle.cancel()
        if closes:
            own.close()
        for handle, head, stream in zip(handles, heads, streams, strict=True):
            result = handle.result(timeout=60)
            assert result.finish_reason == "cancelled"
            assert result.text == head + "".join(stream)
            assert result.usage.completion_tokens == len(result.token_ids) > 0


def test_a_handle_has_one_end() -> None:
    handle = Handle("a", lambda _: True)
    first = Result(request_id="a", text="x", token_ids=(1,), finish_reason="cancelled")
    handle.push(Event("a", 1, "x"))
    handle.push(Event("a", result=first))
    handle.push(Event("a", result=Result(request_id="a", finish_reason="cancelled")))
    assert handle.result() is first
    assert len(list(handle.events())) == 2
    assert not handle.cancel()


def test_a_bad_item_is_a_bad_result(batcher: VLMBatcher) -> None:
    good = Request(prompt="count to 2")
    results = batcher.generate(
        [good, 0.5, 5, {"promt": "x"}, {"prompt": "x", "priority": "high"}, good]  # type: ignore[list-item]
    )
    assert [result.ok for result in results] == [True, False, False, False, False, True]
    assert "item 1 is a float; it must be a Request" in str(results[1].error)
    assert "promt" in str(results[3].error)


def test_an_iterator_that_raises_loses_nothing(batcher: VLMBatcher) -> None:
    def source() -> Iterator[Request]:
        for index in range(6):
            yield Request(prompt=f"count to {index + 1}")
        raise OSError("the disk is gone")

    results = batcher.generate(source())
    assert [result.ok for result in results] == [True] * 6 + [False]
    assert "the disk is gone" in str(results[6].error)
    assert isinstance(results[6].exception, OSError)


def test_as_completed_for_asyncio(batcher: VLMBatcher) -> None:
    async def source() -> AsyncIterator[Any]:
        for index in range(5):
            await asyncio.sleep(0)
            yield {"prompt": f"count to {index + 1}", "request_id": f"async-{index}"}
        yield 5
        yield None  # an item like any other, and no end
        yield {"prompt": "count to 9", "request_id": "async-last"}

    async def main() -> list[Result]:
        found = [result async for result in batcher.as_completed_async(source())]
        found += [
            result
            async for result in batcher.as_completed_async(
                [Request(prompt="count to 3")]
            )
        ]
        return found

    results = asyncio.run(main())
    assert {result.request_id for result in results if result.ok} > {
        f"async-{index}" for index in range(5)
    }
    assert "async-last" in {result.request_id for result in results if result.ok}
    assert sum(not result.ok for result in results) == 2
    assert results[-1].text == "1 2 3"


def test_a_timeout_of_asyncio_does_not_cancel_and_cancel_does(
    batcher: VLMBatcher,
) -> None:
    async def main() -> Result:
        handle = batcher.submit(None, "count to 9", params=LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.05)
        assert not handle.done()
        handle.cancel()
        return await handle

    assert asyncio.run(main()).finish_reason == "cancelled"


def test_awaits_that_are_given_up_leave_nothing(batcher: VLMBatcher) -> None:
    async def main(handle: Handle) -> int:
        for _ in range(20):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(handle, 0.001)
        return len(handle._at_next) + len(handle._at_end)

    # the last waits for a place
    before = [batcher.submit(None, "count to 9", params=LONG) for _ in range(9)]
    assert asyncio.run(main(before[-1])) == 0
    for handle in before:
        handle.cancel()


def test_events_have_all_that_is_known_of_each_step(batcher: VLMBatcher) -> None:
    handle = batcher.submit(
        CIRCLE, DESCRIBE, params=SamplingParams(max_tokens=6, logprobs=2)
    )

    async def read() -> list[Event]:
        return [event async for event in handle.events()]

    events = list(handle.events())
    assert asyncio.run(read()) == events == list(handle.events())
    result = handle.result()
    assert events[-1].result is result
    assert all(event.result is None for event in events[:-1])
    assert tuple(event.token for event in events) == result.token_ids
    assert tuple(event.logprobs for event in events) == result.logprobs
    assert "".join(event.text for event in events) == result.text == "".join(handle)


def test_timeouts_that_are_no_time(batcher: VLMBatcher) -> None:
    handle = batcher.submit(None, "count to 9", params=LONG)
    with pytest.raises(ValueError, match="timeout is nan"):
        handle.result(timeout=math.nan)
    with pytest.raises(TimeoutError):
        handle.result(timeout=-1)
    handle.cancel()
    assert handle.result(timeout=math.inf).finish_reason == "cancelled"
    assert handle.result(timeout=1e300) is handle.result()


# Processes --------------------------------------------------------------------------------------------------------------


def python(script: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run a script with this tree's package."""
    root = Path(__file__).parent.parent
    head = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_a_child_says_that_the_batcher_is_another_processes_and_ends() -> None:
    done = python("""
        import os, warnings
        warnings.simplefilter("ignore")
        from vlm_batch import BatcherClosed, SamplingParams, VLMBatcher, assets
        batcher = VLMBatcher(assets.default_checkpoint())
        ended = batcher.submit(prompt="count to 3")
        ended.result()
        running = batcher.submit(prompt="count to 9", params=SamplingParams(max_tokens=1500, ignore_eos=True))
        next(iter(running))
        child = os.fork()
        if child == 0:
            assert ended.result().text == "1 2 3"
            assert "made in another process" in running.result().error, running.result()
            assert not running.cancel()
            list(running)
            try:
                batcher.submit(prompt="count to 3")
            except BatcherClosed as error:
                assert "made in another process" in str(error)
            else:
                raise AssertionError("the child may submit")
            batcher.close()
            try:
                VLMBatcher(assets.default_checkpoint())
            except RuntimeError as error:
                assert "MLX does not outlive a fork" in str(error)
            else:
                raise AssertionError("the child may make one")
            assert batcher.stats().finished == 1
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert not running.done()
        running.cancel()
        assert batcher.submit(prompt="count to 3").result().text == "1 2 3"
    """)
    assert done.returncode == 0, done.stderr


def test_a_child_frees_no_array_of_its_parents() -> None:
    """MLX frees under a lock, which a thread of the parent's may hold at the fork: the child would wait for ever."""
    done = python("""
        import gc, os, warnings
        warnings.simplefilter("ignore")
        import mlx.core as mx
        from vlm_batch import SamplingParams, VLMBatcher, assets
        batcher = VLMBatcher(assets.default_checkpoint())
        own = [mx.zeros((1000,)), mx.compile(lambda array: array + 1)]
        mx.eval(own[0])
        ended = batcher.submit(prompt="count to 3", return_cache=True)
        ended.result()
        running = batcher.submit(prompt="count to 9", params=SamplingParams(max_tokens=1500, ignore_eos=True))
        next(iter(running))
        child = os.fork()
        if child == 0:
            mx.clear_streams = lambda: os._exit(8)  # mlx-vlm calls it at the exit
            before = mx.get_active_memory()
            del batcher, own, ended, running
            gc.collect()
            assert mx.get_active_memory() == before, (mx.get_active_memory(), before)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        running.cancel()
        batcher.close()  # whose steps take and free memory, too
        before = mx.get_active_memory()
        del own
        gc.collect()
        assert mx.get_active_memory() < before
    """)
    assert done.returncode == 0, done.stderr


def test_a_child_of_the_moment_in_which_an_answer_comes_does_not_wait_for_it() -> None:
    """The engine holds the handle's lock then, and has the request no longer among the others."""
    done = python("""
        import os, signal, threading, types, warnings
        warnings.simplefilter("ignore")
        from vlm_batch import SamplingParams, VLMBatcher, assets, handle
        comes, go = threading.Event(), threading.Event()
        class Condition(threading.Condition):
            def __enter__(self):
                entered = super().__enter__()
                if threading.current_thread() is not threading.main_thread():
                    comes.set()
                    go.wait()
                return entered
        batcher = VLMBatcher(assets.default_checkpoint())
        handle.threading = types.SimpleNamespace(Condition=Condition, RLock=threading.RLock, TIMEOUT_MAX=threading.TIMEOUT_MAX)
        asked = batcher.submit(prompt="count to 3", params=SamplingParams(max_tokens=1))
        comes.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            assert "made in another process" in asked.result().error
            assert [event.result for event in asked.events()] == [asked.result()]
            sys.exit(7)
        go.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert asked.result().text == "1"
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_batcher_that_nobody_holds_does_not_abort_the_exit(end: str) -> None:
    """The answer is there and the interpreter goes at once: its thread is stopped first, in the middle of other work, too."""
    script = f"""
        from vlm_batch import SamplingParams, VLMBatcher, assets
        long = SamplingParams(max_tokens=1500, ignore_eos=True)
        def work():
            batcher = VLMBatcher(assets.default_checkpoint())
            for _ in range(6):
                batcher.submit(prompt="count to 9", params=long)
            return batcher.submit(prompt="count to 3").result().text
        print(work())
        print(VLMBatcher(assets.default_checkpoint()).submit(prompt="count to 3").result().text)
        {end}
    """
    for _ in range(2):
        done = python(script)
        assert (done.returncode, done.stdout.split("\n")[:2]) == (
            0,
            ["1 2 3", "1 2 3"],
        ), done.stderr


def test_a_child_forked_before_the_first_batcher_makes_its_own() -> None:
    done = python("""
        import os
        from vlm_batch import VLMBatcher, assets
        child = os.fork()
        if child == 0:
            assert VLMBatcher(assets.default_checkpoint()).submit(prompt="count to 3").result().text == "1 2 3"
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """)
    assert done.returncode == 0, done.stderr


#: Work of some seconds, nearly all in MLX, and with more to come: a large model's step, load or picture.
SLOW = """
    import atexit, os, signal, threading, time
    import mlx.core as mx
    from vlm_batch import SamplingParams, VLMBatcher, assets, loading
    from vlm_batch.engine.generator import BatchGenerator
    from vlm_batch.inputs import loaders
    from vlm_batch.inputs.prepare import Preparer
    from vlm_batch.runtime import threads
    threads.SILENT_SECONDS = loaders.CLOSE_SECONDS = 0.1
    begun = threading.Event()

    def make_slow(owner, name, seconds=2):
        def slow(*given, **how):
            begun.set()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                mx.eval(mx.ones((300, 300)) @ mx.ones((300, 300)))
            return real(*given, **how)
        real = getattr(owner, name)
        setattr(owner, name, slow)
"""


@pytest.mark.parametrize("what", ["BatchGenerator, 'step'", "Preparer, 'prepare'"])
def test_the_exit_waits_for_what_is_in_mlx_however_long_it_takes(what: str) -> None:
    done = python(
        SLOW
        + f"""
    make_slow({what})
    batcher = VLMBatcher(assets.default_checkpoint())
    batcher.submit(prompt="count to 3")
    begun.wait()
    print("done")
    """
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "the exit waits for a step or a load" in done.stderr


def test_a_load_that_nobody_waits_for_ends_after_its_stage() -> None:
    """At the exit, and where the wait for it was interrupted: what would come next takes for ever here."""
    done = python(
        SLOW
        + """
    make_slow(loading, "make_engine", seconds=1e9)
    make_slow(loading, "read_model")
    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        VLMBatcher(assets.default_checkpoint())
    except KeyboardInterrupt:
        print("interrupted")
    while any(running.is_awaited for running in tuple(threads._running)):
        time.sleep(0.01)
    begun.clear()
    threading.Thread(target=lambda: VLMBatcher(assets.default_checkpoint()), daemon=True).start()
    begun.wait()
    """
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_ctrl_c_ends_an_exit_that_waits() -> None:
    done = python(
        SLOW
        + """
    batcher = VLMBatcher(assets.default_checkpoint())
    make_slow(BatchGenerator, "step", seconds=1e9)
    handle = batcher.submit(prompt="count to 3")
    begun.wait()
    def interrupt():
        time.sleep(4)  # the exit says after a second that it waits
        os.kill(os.getpid(), signal.SIGINT)
    atexit.register(lambda: threading.Thread(target=interrupt, daemon=True).start())
    print("done")
    """
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "done\n"), done.stderr
    assert "Ctrl-C ends it now" in done.stderr


def test_processes_of_multiprocessing_end_well(tmp_path: Path) -> None:
    """Forked before the first batcher and spawned; while a long step goes on that nobody waits for."""
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
    script = tmp_path / "script.py"
    script.write_text(
        head
        + textwrap.dedent(SLOW)
        + textwrap.dedent(f"""
        import multiprocessing

        def work():
            batcher = VLMBatcher(assets.default_checkpoint())
            print(batcher.submit({str(CIRCLE)!r}, "describe the picture").result().text, flush=True)
            make_slow(BatchGenerator, "step")
            batcher.submit(prompt="count to 9")
            begun.wait()

        if __name__ == "__main__":
            children = [multiprocessing.get_context(kind).Process(target=work) for kind in ("fork", "spawn")]
            for child in children:
                child.start()
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0, 0], children
        """)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    answer = "a red circle"
    assert (done.returncode, [answer in line for line in done.stdout.splitlines()]) == (
        0,
        [True] * 2,
    ), (
        done.stdout,
        done.stderr,
    )
