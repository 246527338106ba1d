"""``VLMBatcher`` end to end on the embedded checkpoint: every way to ask, every way to fail, from any thread and asyncio."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import shutil
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
import pandas
import pyarrow
import pytest
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import prepare_inputs
from PIL import Image

from tests.test_loaders import wait
from vlm_batch import (
    BatcherClosed,
    Caches,
    Handle,
    InvalidAudio,
    InvalidCache,
    InvalidImage,
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    KVQuantisation,
    PromptCache,
    PromptTooLong,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
    Stats,
    UnsupportedModel,
    VLMBatcher,
    assets,
)
from vlm_batch.engine import loop as engine_loop
from vlm_batch.engine import schedule
from vlm_batch.errors import RaisedAt
from vlm_batch.inputs.checking import ModelFacts
from vlm_batch.inputs.loaders import Loaders
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.question import Lane
from vlm_batch.models import spec_for
from vlm_batch.types import Event, failed_result

CHECKPOINT = assets.default_checkpoint()
IMAGES = Path(__file__).parent.parent / "fixtures" / "images"
CIRCLE = IMAGES / "red_circle.png"
SQUARE = IMAGES / "blue_square.png"
TWO = IMAGES / "red_circle_above_blue_triangle.png"
DESCRIBE = "describe the picture"
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(CHECKPOINT) as shared:
        yield shared


@pytest.fixture(scope="module")
def alone() -> Any:
    """The answer that mlx-vlm itself gives, one request at a time, on a model of its own in float32."""
    import mlx.core as mx

    model, processor = mlx_vlm.load(str(CHECKPOINT))
    model.set_dtype(mx.float32)

    def ask(prompt: str, images: list[Path]) -> str:
        text = apply_chat_template(
            processor, model.config, prompt, num_images=len(images)
        )
        paths: Any = [str(path) for path in images]
        found = mlx_vlm.generate(
            model,
            processor,
            text,
            paths or None,
            max_tokens=40,
            temperature=0.0,
            verbose=False,
        )
        return str(found.text)

    return ask


QUESTIONS: list[tuple[str, list[Path]]] = [
    (DESCRIBE, [CIRCLE]),
    (DESCRIBE, [TWO]),
    ("repeat: a a a a", []),
    ("what colour is the square?", [SQUARE]),
    ("count to 7", []),
    ("read the digits", [IMAGES / "digits_12036.png"]),
    ("what is in the first picture?", [CIRCLE, SQUARE]),
    ("what is in the second picture?", [CIRCLE, SQUARE]),
    ("reverse: a b c d", []),
    (DESCRIBE, [IMAGES / "receipt.jpg"]),
    ("repeat: b b b b b b", []),
    (DESCRIBE, [IMAGES / "page_of_text.png"]),
]


def test_a_mixed_job_gets_mlx_vlms_own_answers(batcher: VLMBatcher, alone: Any) -> None:
    """Pictures, two pictures and texts in one batch: the words that each request gets alone through mlx-vlm."""
    requests = [
        Request(prompt=prompt, images=images, params=SamplingParams(max_tokens=40))
        for prompt, images in QUESTIONS
    ]
    for order in (requests, requests[::-1]):
        for result, request in zip(batcher.generate(order), order, strict=True):
            assert result.error is None
            assert request.prompt is not None
            assert result.text == alone(request.prompt, list(request.images)), (
                request.prompt
            )


# Ways to ask ------------------------------------------------------------------------------------------------------------


def test_every_way_to_ask_is_the_same_question(batcher: VLMBatcher) -> None:
    """A path, an image, an array, a chat, a rendered prompt, processed inputs and token ids."""
    _, processor = mlx_vlm.load(str(CHECKPOINT))
    picture = Image.open(CIRCLE)
    asked = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": DESCRIBE}],
        }
    ]
    rendered = processor.apply_chat_template(asked, add_generation_prompt=True)
    inputs = prepare_inputs(processor, images=[picture], prompts=rendered)
    part = {"type": "image_url", "image_url": {"url": str(CIRCLE)}}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": DESCRIBE}]}]
    bare = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": DESCRIBE}],
        }
    ]
    # all that follow find its state
    assert batcher.submit(CIRCLE, DESCRIBE).result(timeout=60).error is None
    handles = [
        batcher.submit(CIRCLE, DESCRIBE),
        batcher.submit(str(CIRCLE), DESCRIBE),
        batcher.submit([picture], DESCRIBE),
        batcher.submit(CIRCLE.read_bytes(), DESCRIBE),
        batcher.submit(np.asarray(picture.convert("RGB")), DESCRIBE),
        batcher.submit(messages=chat),
        batcher.submit([CIRCLE], messages=bare),
        batcher.submit(CIRCLE, messages=[{"role": "user", "content": DESCRIBE}]),
        batcher.submit(CIRCLE, rendered, template=None),
        batcher.submit_request(Request(inputs=inputs)),
        batcher.submit(CIRCLE, token_ids=np.array(inputs["input_ids"])[0].tolist()),
    ]
    results = [handle.result(timeout=60) for handle in handles]
    assert [result.error for result in results] == [None] * len(results)
    assert {(result.text, result.usage) for result in results} == {
        (results[0].text, results[0].usage)
    }
    assert results[0].image_sizes == (picture.size,)
    assert results[0].model_image_sizes


def test_a_chat_of_several_turns_and_pictures(batcher: VLMBatcher) -> None:
    with Image.open(SQUARE) as square:
        square.load()
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "You look at pictures."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": CIRCLE},
                {"type": "text", "text": DESCRIBE},
            ],
        },
        {"role": "assistant", "content": "a red circle"},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": square},
                {"type": "text", "text": DESCRIBE},
            ],
        },
    ]
    result = batcher.submit(messages=chat).result(timeout=60)
    assert result.error is None
    assert len(result.image_sizes) == 2


def test_a_stream_joins_to_the_text_and_can_be_read_again(batcher: VLMBatcher) -> None:
    handle = batcher.submit(TWO, DESCRIBE)
    pieces = list(handle)
    assert "".join(pieces) == handle.result().text
    assert list(handle) == pieces
    assert handle.done()
    assert not handle.cancel()


def test_generate_keeps_the_order_and_reads_generators_lazily(
    batcher: VLMBatcher,
) -> None:
    produced = 0

    def source() -> Iterator[Request]:
        nonlocal produced
        for n in range(40):
            produced += 1
            yield Request(
                prompt=f"count to {n % 9 + 1}",
                request_id=f"lazy-{n}",
                params=SamplingParams(max_tokens=8),
            )

    first = next(stream := batcher.as_completed(source()))
    assert first.request_id.startswith("lazy-")
    # beside a batch's worth
    assert (
        produced
        <= batcher.policy["look_ahead"]["value"] + batcher.stats().most_rows + 1
    )
    stream.close()  # type: ignore[attr-defined]
    results = batcher.generate(source())
    assert [result.request_id for result in results] == [f"lazy-{n}" for n in range(40)]


def test_generate_fills_a_batch_of_more_rows_than_are_read_ahead() -> None:
    most = 0

    def source(stats: Callable[[], Stats]) -> Iterator[Request]:
        nonlocal most
        for number in range(30):
            most = max(most, stats().decoding)
            # they end one by one
            params = SamplingParams(max_tokens=100 + 4 * number, ignore_eos=True)
            yield Request(prompt="count to 9", params=params)

    with VLMBatcher(CHECKPOINT, max_rows=24, policy={"look_ahead": 2}) as wide:
        assert all(result.ok for result in wide.generate(source(wide.stats)))
    assert most > 8


def test_generate_takes_mappings_and_shows_progress(
    batcher: VLMBatcher, capfd: pytest.CaptureFixture[str]
) -> None:
    results = batcher.generate(
        [{"prompt": "count to 3"}, {"prompt": ""}, {"prompt": "count to 4"}],
        progress=True,
    )
    assert [result.error is None for result in results] == [True, False, True]
    assert "3/3" in capfd.readouterr().err


def test_asyncio(batcher: VLMBatcher) -> None:
    async def main() -> tuple[list[str], list[Result]]:
        handles = [
            batcher.submit(CIRCLE, DESCRIBE),
            batcher.submit(None, "count to 5"),
            batcher.submit(TWO, DESCRIBE),
        ]
        pieces = [piece async for piece in handles[2]]
        return pieces, list(await asyncio.gather(*handles))

    pieces, results = asyncio.run(main())
    assert "".join(pieces) == results[2].text
    assert [result.text for result in results] == [
        batcher.submit(image, prompt).result().text
        for image, prompt in ((CIRCLE, DESCRIBE), (None, "count to 5"), (TWO, DESCRIBE))
    ]


def test_many_threads_submit_at_once(batcher: VLMBatcher) -> None:
    right = batcher.submit(CIRCLE, DESCRIBE).result().text
    texts: list[str] = []

    def ask() -> None:
        for _ in range(5):
            texts.append(batcher.submit(CIRCLE, DESCRIBE).result(timeout=60).text)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [right] * 40


def test_logprobs_and_seeds_through_the_api(batcher: VLMBatcher) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=8.0, seed=7, logprobs=3, ignore_eos=True
    )
    alone = batcher.submit(CIRCLE, DESCRIBE, params=params).result()
    beside = [batcher.submit(TWO, DESCRIBE, params=params) for _ in range(3)]
    again = batcher.submit(CIRCLE, DESCRIBE, params=params).result()
    assert again.token_ids == alone.token_ids
    assert alone.logprobs is not None
    assert [entry.token_id for entry in alone.logprobs] == list(alone.token_ids)
    assert len({handle.result().token_ids for handle in beside}) == 1
    other = SamplingParams(max_tokens=12, temperature=8.0, seed=8, ignore_eos=True)
    assert (
        batcher.submit(CIRCLE, DESCRIBE, params=other).result().token_ids
        != alone.token_ids
    )


# Bad input --------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty_prompt": ({"prompt": "  "}, InvalidPrompt, "the prompt is empty"),
    "nothing_asked": ({"images": CIRCLE}, InvalidPrompt, "exactly one of prompt, messages, token_ids and inputs"),
    "asked_twice": ({"prompt": "a", "token_ids": [1]}, InvalidPrompt, "given: prompt, token_ids"),
    "empty_chat": ({"messages": []}, InvalidPrompt, "no messages"),
    "no_role": ({"messages": [{"content": "a"}]}, InvalidPrompt, "role"),
    "no_token_ids": ({"token_ids": []}, InvalidPrompt, "token_ids is empty"),
    "too_few_placeholders": (
        {"images": [CIRCLE, SQUARE], "prompt": "<|vision_start|><|image_pad|><|vision_end|> what?", "template": None},
        InvalidPrompt,
        "1 picture placeholders for 2 pictures",
    ),
    "more_parts_than_pictures": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]},
        InvalidPrompt,
        "more picture parts than pictures",
    ),
    "inputs_without_ids": ({"inputs": {"pixel_values": np.zeros((4, 3))}}, InvalidPrompt, "input_ids"),
    "inputs_of_two_rows": ({"inputs": {"input_ids": np.zeros((2, 3), int)}}, InvalidPrompt, r"\(1, L\)"),
    "inputs_and_images": (
        {"inputs": {"input_ids": np.zeros((1, 3), int)}, "images": CIRCLE}, InvalidPrompt, "pixel_values"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_at_submit_is_raised_there(
    batcher: VLMBatcher, case: str
) -> None:
    arguments, error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        submitted(batcher, arguments)


def submitted(batcher: VLMBatcher, arguments: dict[str, Any]) -> Any:
    """As ``submit`` takes it; processed inputs come in a ``Request``."""
    return (
        batcher.submit_request(Request(**arguments))
        if "inputs" in arguments
        else batcher.submit(**arguments)
    )


NO_REQUESTS: dict[str, tuple[Callable[[Handle], Any], str]] = {
    "handle": (lambda handle: handle, "given: Handle; submit gives handles"),
    "result": (lambda handle: handle.result(), "given: Result; submit gives handles"),
    "table": (
        lambda handle: pandas.DataFrame({"prompt": ["a"]}),
        "given: DataFrame; map_table",
    ),
    "arrow": (
        lambda handle: pyarrow.table({"prompt": ["a"]}),
        "given: Table; map_table",
    ),
    "bytes": (
        lambda handle: CIRCLE.read_bytes(),
        "given: bytes; a picture goes with its question",
    ),
    "path": (
        lambda handle: CIRCLE,
        "given: PosixPath; a picture goes with its question",
    ),
    "picture": (lambda handle: Image.new("L", (4, 4)), "given: Image"),
    "none": (lambda handle: None, "given: NoneType"),
    "number": (lambda handle: 5, "given: int"),
}


@pytest.mark.parametrize("case", NO_REQUESTS)
def test_what_are_no_requests_is_refused_as_a_whole(
    batcher: VLMBatcher, case: str
) -> None:
    """Rather than taken apart: a handle is its pieces, a table its columns' names, bytes are numbers."""
    make, said = NO_REQUESTS[case]
    given = make(batcher.submit(prompt="count to 2"))
    for ask in (batcher.generate, lambda given: list(batcher.as_completed(given))):
        with pytest.raises(
            InvalidRequest, match=f"requests must be Request objects.*{said}"
        ):
            ask(given)

    async def one() -> Result | None:
        return await anext(aiter(batcher.as_completed_async(given)), None)

    with pytest.raises(InvalidRequest, match=said):
        asyncio.run(one())


def test_fields_that_no_request_has_and_names_of_pictures_for_prompts(
    batcher: VLMBatcher,
) -> None:
    asked: list[Any] = [
        {"image": str(CIRCLE), "prompt": "?"},
        str(CIRCLE),
        "https://x/y.JPG?size=1",
        {"promt": "?"},
        CIRCLE,
    ]
    errors = [result.error or "" for result in batcher.generate(asked)]
    for error, said in zip(
        errors,
        ("item 0 has no image ('images' is", "name of a picture", "name of a picture"),
        strict=False,
    ):
        assert said in error
    assert (
        "item 3 has no promt ('prompt' is probably meant)" in errors[3]
        and "item 4 is a PosixPath" in errors[4]
    )
    for result in batcher.generate(["what is a.png, and why?", "a.b"]):
        assert result.error is None


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (
            np.array([str(CIRCLE)]),
            "ndarray is no path.*; several pictures go in a list",
        ),
        (
            np.array([Image.new("L", (4, 4)), None], object),
            "ndarray is no path.*; several pictures go in a list",
        ),
        (
            pandas.Series([str(CIRCLE)]),
            "Series is no path.*; several pictures go in a list",
        ),
        (pandas.DataFrame({"a": [0.1, 0.2]}), "DataFrame is no path"),
        ([[str(CIRCLE)]], "list is no path.*; several pictures go in a list"),
        ({"bytes": b"x"}, "dict is no path"),
        ([None], "NoneType is no path"),
        (Request(prompt="a"), "Request is no path"),
        ({str(CIRCLE)}, "set is no path"),
        (5, "int is no path"),
        (io.StringIO("x"), "opened by 'rb'"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_no_picture_is_refused_at_submit(
    batcher: VLMBatcher, images: Any, said: str
) -> None:
    with pytest.raises(InvalidImage, match=said):
        batcher.submit(images, "what?")


def test_keys_of_messages_that_hold_no_picture_are_nobodys_concern(
    batcher: VLMBatcher,
) -> None:
    """Tables fill absent keys with null, and numbers are facts."""
    parts = [
        {"type": "image", "text": None, "image": CIRCLE, "image_url": None},
        {"type": "text", "text": "a", "image": None},
    ]
    message = {
        "role": "user",
        "content": parts,
        "images": [],
        "image": None,
        "image_id": 5,
        "name": "x",
    }
    assert (
        batcher.submit(messages=[message], params={"max_tokens": 1}).result().error
        is None
    )


def test_a_schema_that_says_nothing_is_none() -> None:
    with pytest.raises(
        InvalidParameters, match="which says nothing of an answer's form"
    ):
        SamplingParams(json_schema={"total": "string"})
    assert (
        SamplingParams(json_schema={}).form
        and SamplingParams(json_schema={"title": "anything"}).form
    )


def test_parameters_are_checked_where_they_are_made() -> None:
    with pytest.raises(InvalidParameters, match="temperature is -1"):
        SamplingParams(temperature=-1)


FAILING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "missing_file": (
        {"images": "no_such.png", "prompt": DESCRIBE},
        InvalidImage,
        "no_such.png does not exist",
    ),
    "not_a_picture": (
        {"images": IMAGES / "awkward/not_a_picture.jpg", "prompt": DESCRIBE},
        InvalidImage,
        "not a picture",
    ),
    "truncated": (
        {"images": IMAGES / "awkward/truncated.jpg", "prompt": DESCRIBE},
        InvalidImage,
        "truncated",
    ),
    "bomb": (
        {"images": IMAGES / "awkward/decompression_bomb.png", "prompt": DESCRIBE},
        InvalidImage,
        "256,000,000 pix",
    ),
    "second_is_missing": (
        {"images": [CIRCLE, "gone.png"], "prompt": DESCRIBE},
        InvalidImage,
        "gone.png does not exist",
    ),
    "too_narrow": (
        {"images": IMAGES / "awkward/too_long_2500x10.png", "prompt": DESCRIBE},
        InvalidPrompt,
        "aspect ratio",
    ),
    "too_long": (
        {"prompt": "repeat: " + "a " * 3000},
        InvalidRequest,
        "the model's context holds 2048",
    ),
    "ids_without_placeholders": (
        {"images": CIRCLE, "token_ids": [5, 6, 7]},
        InvalidPrompt,
        "4 placeholder tokens",
    ),
    "broken_processor": (
        {
            "prompt": "count to 3",
            "params": SamplingParams(logits_processors=[lambda tokens, logits: 1 / 0]),
        },
        ZeroDivisionError,
        "division by zero",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_bad_request_fails_alone(batcher: VLMBatcher, case: str) -> None:
    """Its own result says why; the tokens of requests around it are the same as without it."""
    arguments, error, said = FAILING[case]
    right = [
        batcher.submit(image, DESCRIBE).result().token_ids for image in (TWO, SQUARE)
    ]
    before = batcher.submit(TWO, DESCRIBE)
    bad = batcher.submit(**arguments)
    after = batcher.submit(SQUARE, DESCRIBE)
    result = bad.result(timeout=60)
    assert result.finish_reason == "error"
    assert isinstance(result.exception, error)
    assert said in str(result.error)
    assert list(bad) == []
    with pytest.raises(RequestFailed, match=result.request_id):
        result.raise_for_error()
    assert [before.result().token_ids, after.result().token_ids] == right


def test_raise_on_error_raises_the_first_once_all_are_done(batcher: VLMBatcher) -> None:
    done = batcher.stats().finished
    with pytest.raises(RequestFailed, match=r"gone\.png"):
        batcher.generate(
            [
                Request(prompt="count to 2"),
                Request(prompt="x", images=["gone.png"]),
                Request(prompt="count to 3"),
            ],
            raise_on_error=True,
        )
    assert batcher.stats().finished == done + 2


def test_an_id_in_use_is_refused_and_free_again_afterwards(batcher: VLMBatcher) -> None:
    first = batcher.submit(None, "count to 9", request_id="mine", params=LONG)
    with pytest.raises(InvalidRequest, match="'mine' is in use"):
        batcher.submit(None, "count to 3", request_id="mine")
    first.cancel()
    assert first.result(timeout=60).finish_reason == "cancelled"
    assert (
        batcher.submit(None, "count to 3", request_id="mine")
        .result(timeout=60)
        .request_id
        == "mine"
    )


def test_tokens_wake_nobody_who_waits_for_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 50 tokens: a thread in ``result`` and a task that awaits look again at the end alone, a reader at each."""
    handle, woken = Handle("one", lambda name: True), Counter[str]()
    looks, change, futures = Handle.done, Handle._next_change, list[bool]()

    def done(self: Handle) -> bool:
        woken[threading.current_thread().name] += 1
        return looks(self)

    def counted(self: Handle, **how: Any) -> Any:
        futures.append(True)
        return change(self, **how)

    monkeypatch.setattr(Handle, "done", done)
    monkeypatch.setattr(Handle, "_next_change", counted)
    waiting = threading.Thread(target=handle.result, name="result")
    texts: list[str] = []
    reading = threading.Thread(target=lambda: texts.extend(handle), name="reader")
    awaiting = threading.Thread(
        target=lambda: asyncio.run(asyncio.wait_for(handle, 30)), name="task"
    )
    for thread in (waiting, reading, awaiting):
        thread.start()
    until = time.monotonic() + 60
    while not (futures and woken["result"] and woken["reader"]):
        assert time.monotonic() < until
        time.sleep(0.001)
    for count in range(50):
        handle.push(Event("one", count, "a"))
        while len(texts) <= count:  # the reader has it: wake-ups do not become one
            assert time.monotonic() < until
            time.sleep(0.001)
    handle.push(Event("one", result=failed_result("one", RuntimeError("the end"))))
    for thread in (waiting, reading, awaiting):
        thread.join(30)
    assert len(texts) == 50 and len(futures) == 1
    assert woken["result"] < 25


def test_a_stream_that_is_left_keeps_no_listener_and_misses_no_end() -> None:
    """The end may come between the look at the events and the one whether the request has ended."""
    handle = Handle("one", lambda name: True)
    handle.push(Event("one", 0, "a"))

    class Ending(list[Event]):
        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            if isinstance(place, slice) and not found:
                handle.push(
                    Event("one", result=failed_result("one", RuntimeError("the end")))
                )
            return found

    async def read() -> list[Event]:
        for _ in range(10):
            async for event in handle.events():
                assert event.text == "a"
                break
        assert handle._at_next == handle._at_end == []
        handle._events = Ending(handle._events)
        return [event async for event in handle.events()]

    assert [
        event.result is None for event in asyncio.run(asyncio.wait_for(read(), 30))
    ] == [True, False]


def test_result_times_out(batcher: VLMBatcher) -> None:
    handle = batcher.submit(None, "count to 9", params=LONG)
    with pytest.raises(TimeoutError, match="has not ended within"):
        handle.result(timeout=0.01)
    assert handle.cancel()


# Ends -------------------------------------------------------------------------------------------------------------------


def test_cancel_while_queued_and_while_decoding(batcher: VLMBatcher) -> None:
    handles = [batcher.submit(None, "count to 9", params=LONG) for _ in range(24)]
    while not any(handle._events for handle in handles):
        time.sleep(0.001)
    for handle in handles:
        assert batcher.cancel(handle.request_id)
    results = [handle.result(timeout=60) for handle in handles]
    assert {result.finish_reason for result in results} == {"cancelled"}
    assert any(result.token_ids for result in results)
    assert any(not result.token_ids for result in results)
    assert not batcher.cancel(handles[0].request_id)
    stats = batcher.stats()
    assert (
        stats.queued,
        stats.waiting,
        stats.prefilling,
        stats.decoding,
        stats.kv_bytes,
    ) == (0, 0, 0, 0, 0)


def test_closing_ends_every_request_with_a_result() -> None:
    with VLMBatcher(CHECKPOINT, max_rows=2) as own:
        handles = [own.submit(CIRCLE, DESCRIBE, params=LONG)]
        # the others may be ready before it, and would have its place
        next(iter(handles[0]))
        handles += [own.submit(CIRCLE, DESCRIBE, params=LONG) for _ in range(11)]
    assert all(handle.done() for handle in handles)
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    with pytest.raises(BatcherClosed, match="closed"):
        own.submit(None, "count to 3")
    own.close()


def test_submitting_while_another_thread_closes_never_hangs() -> None:
    for _ in range(5):
        own = VLMBatcher(CHECKPOINT, max_rows=2)
        handles: list[Any] = []

        def submit(own: VLMBatcher = own, handles: list[Any] = handles) -> None:
            try:
                while True:
                    handles.append(own.submit(None, "count to 3", params=LONG))
            except BatcherClosed:
                pass

        thread = threading.Thread(target=submit)
        thread.start()
        time.sleep(0.02)
        own.close()
        thread.join()
        assert all(
            handle.result(timeout=60).finish_reason == "cancelled" for handle in handles
        )


def test_an_async_with_block_closes_the_batcher() -> None:
    async def ask() -> tuple[VLMBatcher, Any, Result]:
        async with VLMBatcher(CHECKPOINT) as own:
            result = await own.submit(prompt="count to 3")
            return own, own.submit(prompt="count to 3", params=LONG), result

    own, left, result = asyncio.run(ask())
    assert result.text == "1 2 3"
    assert left.result(timeout=60).finish_reason == "cancelled"
    with pytest.raises(BatcherClosed):
        own.submit(prompt="a")


def test_one_request_by_itself_and_prompts(batcher: VLMBatcher) -> None:
    forms: list[Any] = [
        "count to 3",
        {"prompt": "count to 3"},
        Request(prompt="count to 3"),
    ]
    for asked in [*forms, forms[:1], iter(forms[:1])]:
        (result,) = batcher.generate(asked)
        assert result.text == "1 2 3", asked
    (result,) = batcher.as_completed("count to 3")
    assert result.text == "1 2 3"

    async def ended() -> list[Result]:
        return [result async for result in batcher.as_completed_async("count to 3")]

    assert [result.text for result in asyncio.run(ended())] == ["1 2 3"]
    unknown: Any = [3]
    assert "a prompt" in str(batcher.generate(unknown)[0].error)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("What is this?", "cat.png"), "have they changed places"),
        (("What is this?", "https://example.org/cat"), "have they changed places"),
        (("What is this?", CIRCLE), "comes after the pictures"),
        (("What is this?",), "text alone is prompt="),
    ],
)
def test_a_prompt_in_the_pictures_place_is_noticed(
    batcher: VLMBatcher, asked: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        batcher.submit(*asked)


def test_a_prompt_may_name_a_picture(batcher: VLMBatcher, tmp_path: Path) -> None:
    shutil.copy(CIRCLE, tmp_path / "no suffix")
    for given in (CIRCLE, str(CIRCLE), str(tmp_path / "no suffix")):
        assert batcher.submit(given, "describe a.png").result(timeout=60).error is None
    assert "places" not in str(
        batcher.submit("missing.png", "describe a.png").result(timeout=60).error
    )


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_an_empty_file_is_said_to_be_empty(
    batcher: VLMBatcher, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    asked: dict[str, Any] = {"videos" if name == "a.mp4" else "images": tmp_path / name}
    assert "is empty (0 bytes)" in str(
        batcher.submit(prompt=DESCRIBE, **asked).result(timeout=60).error
    )
    assert "is empty (0 bytes)" in str(
        batcher.submit(b"", DESCRIBE).result(timeout=60).error
    )


class Passes:
    """A logits processor that changes nothing; it may raise."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.error is not None:
            raise self.error
        return logits


#: By the way in which a request ends: what it asks, its parameters, and how it ends.
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a stop token": ({}, {}, "stop"),
    "its length": ({}, {"max_tokens": 2}, "length"),
    "a stop string": ({}, {"stop": ["2"]}, "stop"),
    "its form": ({}, {"choice": ["a b", "c d"]}, "stop"),
    "several answers": ({}, {"n": 3, "temperature": 1.0, "seed": 1}, "stop"),
    "a picture's": ({"images": CIRCLE}, {}, "stop"),
    "a cache": ({"return_cache": True}, {}, "stop"),
    "cancel": ({}, {"max_tokens": 1500, "ignore_eos": True}, "cancelled"),
    "an error at the door of the engine": ({"images": "missing.png"}, {}, "error"),
    "an error at a step": ({}, {}, "error"),
}


@pytest.mark.parametrize("way", ENDS)
def test_an_idle_engine_holds_nothing_of_a_request_that_ended(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its row, parameters, handle or error, however it ended; and a forgotten batcher goes at once, with its model,
    whoever keeps the result. Nobody waits for the garbage collector."""
    held: list[weakref.ref[Any]] = []
    make = engine_loop.new_row

    def noted(*given: Any, **how: Any) -> Any:
        row = make(*given, **how)
        held.extend(
            weakref.ref(one) for one in (row, *row.siblings, row.answer, row.params)
        )
        return row

    monkeypatch.setattr(engine_loop, "new_row", noted)
    asked, params, reason = ENDS[way]
    gc.collect()
    gc.disable()
    try:
        own = VLMBatcher(CHECKPOINT, caches=None)
        processor = Passes(
            AttributeError("of the test", obj=own)
            if way == "an error at a step"
            else None
        )
        held.append(weakref.ref(processor))
        handle = own.submit(
            prompt="count to 3",
            params=SamplingParams(logits_processors=[processor], **params),
            **asked,
        )
        held.append(weakref.ref(handle))
        if way == "cancel":
            next(iter(handle))
            handle.cancel()
        result = handle.result(timeout=60)
        assert result.finish_reason == reason, result
        del processor, handle
        assert wait(lambda: not any(one() for one in held)), [
            one() for one in held if one() is not None
        ]
        generator: Any = own._loop.generator
        engine = [
            weakref.ref(one)
            for one in (
                own,
                own._loop,
                generator,
                generator.adapter,
                generator.adapter.model,
            )
        ]
        running = own._running
        del own, generator
        running.join()
        assert wait(lambda: not any(one() for one in engine)), [
            one() for one in engine if one() is not None
        ]
        if result.exception is not None:
            assert isinstance(
                result.exception.__cause__, RaisedAt
            ) and "Traceback" in str(result.exception.__cause__)
    finally:
        gc.enable()


def test_results_of_requests_that_were_refused_hold_no_batcher() -> None:
    own = VLMBatcher(CHECKPOINT, caches=None)
    (refused,) = own.generate([{"prompt": 1}])
    assert isinstance(refused.exception, InvalidPrompt) and "in check" in str(
        refused.exception.__cause__
    )
    own.close()
    late = []
    for _ in range(2):
        with pytest.raises(BatcherClosed) as raised:
            own.submit(prompt="a")
        late.append(raised.value)
    assert late[0] is not late[1], (
        "its traceback would grow with every call, and hold each"
    )
    gone = weakref.ref(own)
    del own, raised, late
    gc.collect()
    assert gone() is None


def test_a_defect_of_the_engine_ends_its_requests_and_the_next_one_works(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the plan is broken")

    with monkeypatch.context() as patch:
        patch.setattr(schedule, "chunks", broken)
        results = [
            batcher.submit(None, "count to 3").result(timeout=60) for _ in range(2)
        ]
    assert all("the plan is broken" in str(result.error) for result in results)
    assert batcher.submit(None, "count to 3").result(timeout=60).error is None


# Loading ----------------------------------------------------------------------------------------------------------------


def test_a_loaded_model_with_its_processor(batcher: VLMBatcher) -> None:
    """The caller's model and processor; it answers as before when the batcher is gone."""
    model, processor = mlx_vlm.load(str(CHECKPOINT))
    with VLMBatcher(model, processor) as own:
        assert (
            own.submit(CIRCLE, DESCRIBE).result(timeout=60).text
            == batcher.submit(CIRCLE, DESCRIBE).result().text
        )
    with pytest.raises(ValueError, match="needs its processor"):
        VLMBatcher(model)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no folder here"):
        VLMBatcher("/no/such/folder")


def copied(folder: Path, **changes: Any) -> Path:
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, **changes}), encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("minicpmv", "the nearest are minicpmv4_6, minicpmv4_7, minicpmo"),
        ("deepseek_ocr", "the nearest are deepseekocr, deepseekocr_2"),
        ("no_such_model", "no other is spelled like it"),
    ],
)
def test_an_unknown_model_type_names_the_nearest_first(
    written: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"'{written}' is not known; {said}"):
        VLMBatcher(copied(tmp_path / "model", model_type=written))


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (
            "hidden_size",
            "config.json does not describe a whole qwen2_vl model: .*hidden_size",
        ),
        (
            "vision_config",
            "its tensors are not those of the qwen2_vl model .* by its config.json: .*vision_tower",
        ),
    ],
)
def test_an_incomplete_config_is_refused_by_name(
    tmp_path: Path, lacking: str, said: str
) -> None:
    folder = copied(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config[lacking]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=f"model: {said}"):
        VLMBatcher(folder)


def test_a_family_without_an_adapter_runs_one_row_at_a_time_and_says_so(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    """As if qwen2_vl were not verified: its requests queue for one place, and the answers are mlx-vlm's own."""
    monkeypatch.setattr("vlm_batch.loading.spec_for", lambda model_type: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        own = VLMBatcher(CHECKPOINT)
    assert len([w for w in said if "one request at a time" in str(w.message)]) == 1
    with own:
        handles = [
            own.submit(images, prompt, params=SamplingParams(max_tokens=40))
            for prompt, images in QUESTIONS
        ]
        for handle, (prompt, images) in zip(handles, QUESTIONS, strict=True):
            assert handle.result(timeout=60).text == alone(prompt, images), prompt


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="max_rows is 0"):
        VLMBatcher(CHECKPOINT, max_rows=0)


# What is kept ----------------------------------------------------------------------------------------------------------


def about(
    batcher: VLMBatcher, image: Any, question: str = DESCRIBE, **how: Any
) -> Result:
    """A chat whose picture comes first."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return batcher.submit(
        messages=[{"role": "user", "content": content}],
        params=SamplingParams(max_tokens=12),
        **how,
    ).result()


def test_an_overwritten_file_is_another_picture(tmp_path: Path) -> None:
    """The answer follows the pixels, not the path; the same pixels under another name are the same picture."""
    path = tmp_path / "picture.png"
    with (
        VLMBatcher(CHECKPOINT) as keeping,
        VLMBatcher(CHECKPOINT, caches=None) as forgetting,
    ):
        for source in (CIRCLE, SQUARE, CIRCLE):
            shutil.copy(source, path)
            kept, right = about(keeping, str(path)), about(forgetting, str(path))
            assert kept.text == right.text
            assert right.usage.cached_tokens == 0
        assert kept.usage.cached_tokens == kept.usage.prompt_tokens
        shutil.copy(CIRCLE, tmp_path / "other.png")
        assert (
            about(keeping, str(tmp_path / "other.png")).usage.cached_tokens
            == kept.usage.prompt_tokens
        )
        larger = Image.open(CIRCLE).resize((140, 140))
        assert about(keeping, larger).text == about(forgetting, larger).text
        assert keeping.stats().cache_bytes > 0
        assert keeping.stats().cached_tokens >= 2 * kept.usage.prompt_tokens
        assert (forgetting.stats().cache_bytes, forgetting.stats().cached_tokens) == (
            0,
            0,
        )


def test_another_setting_of_the_processor_makes_another_picture() -> None:
    """The same file through the same processor, which was told other means or another size in between."""
    with VLMBatcher(CHECKPOINT) as batcher:
        part = batcher._preparer.processing.processor.image_processor
        before = about(batcher, str(TWO)).usage
        assert before.prompt_tokens > 8
        for name, value in (
            ("image_mean", [0.4, 0.4, 0.4]),
            ("max_pixels", 28 * 28 * 4),
        ):
            setattr(part, name, value)
            # fewer words before it than are looked for
            assert about(batcher, str(TWO)).usage.cached_tokens == 0
        setattr(part, name, 12544)
        part.image_mean = [0.5, 0.5, 0.5]
        assert about(batcher, str(TWO)).usage.cached_tokens == before.prompt_tokens


def test_a_conversation_goes_on_from_its_cache(tmp_path: Path) -> None:
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": str(TWO)},
                {"type": "text", "text": DESCRIBE},
            ],
        }
    ]
    params = SamplingParams(max_tokens=12)
    with VLMBatcher(CHECKPOINT, caches=None) as batcher:
        first = batcher.submit(messages=chat, params=params, return_cache=True).result()
        assert first.cache is not None
        assert batcher.submit(messages=chat, params=params).result().cache is None
        chat += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "how many shapes are there?"},
        ]
        right = batcher.submit(messages=chat, params=params).result()
        assert right.usage.cached_tokens == 0
        path = tmp_path / "conversation.safetensors"
        first.cache.save(path)
        branch, held = first.cache.copy(), first.cache
        for cache in (held, branch, PromptCache.load(path)):
            again = batcher.submit(messages=chat, params=params, cache=cache).result()
            assert again.token_ids == right.token_ids
            assert again.usage.cached_tokens >= first.usage.prompt_tokens
        with pytest.raises(InvalidCache, match="continued by another request"):
            batcher.submit(messages=chat, params=params, cache=held)
        unread = PromptCache.load(path)
        failed = batcher.submit(
            images=["missing.png"], prompt=DESCRIBE, cache=unread
        ).result()
        assert failed.finish_reason == "error"
        assert not unread.is_continued  # the request never had it
    with VLMBatcher(CHECKPOINT, kv=KVQuantisation(8, group_size=32)) as other:
        assert about(other, str(CIRCLE)).text == right_answer(CIRCLE)
        with pytest.raises(
            InvalidCache, match="kv_bits=None; this batcher has kv_bits=8"
        ):
            other.submit(messages=chat, cache=unread)


def right_answer(path: Path) -> str:
    with VLMBatcher(CHECKPOINT, caches=None) as batcher:
        return about(batcher, str(path)).text


def test_what_is_kept_outlives_the_batcher(tmp_path: Path) -> None:
    cached = []
    for _ in range(2):
        with VLMBatcher(
            CHECKPOINT, caches=Caches(directory=tmp_path / "rows")
        ) as batcher:
            cached.append(about(batcher, str(CIRCLE)).usage.cached_tokens)
    assert cached[0] == 0
    assert cached[1] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"kv_bits": 3.5}, "turboquant"),
        ({"kv": KVQuantisation(8, group_size=128)}, "numbers a head"),
    ],
)
def test_cache_options_out_of_range_are_refused_at_construction(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        VLMBatcher(CHECKPOINT, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_bytes": 0, "directory": "somewhere"}, "directory needs max_bytes"),
    ],
)
def test_bounds_on_what_is_kept_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Caches(**options)


def test_live_counters_and_times_say_where_a_request_was() -> None:
    """Rows, tokens a second, KV and hits while it runs; queue, encode, prefill and decode times at its end."""
    with VLMBatcher(CHECKPOINT, max_rows=2) as batcher:
        first = batcher.submit(
            CIRCLE, DESCRIBE, params=SamplingParams(max_tokens=12, ignore_eos=True)
        ).result(timeout=60)
        again = batcher.submit(
            CIRCLE, DESCRIBE, params=SamplingParams(max_tokens=12, ignore_eos=True)
        ).result(timeout=60)
        running = [batcher.submit(SQUARE, DESCRIBE, params=LONG) for _ in range(3)]
        while batcher.stats().decoding < 2:
            time.sleep(0.005)
        busy = batcher.stats()
        for handle in running:
            handle.cancel()
    assert busy.queued + busy.waiting + busy.prefilling >= 1
    assert busy.kv_bytes > 0
    assert busy.tokens_per_second > 0
    assert busy.cache_hits >= 1
    assert busy.cached_tokens >= again.usage.cached_tokens > 0
    for result in (first, again):
        timings = result.timings
        assert timings.queue >= 0
        assert min(timings.prefill, timings.decode) > 0
        parts = timings.queue + timings.encode + timings.prefill + timings.decode
        assert parts == pytest.approx(timings.total, abs=1e-3)
    assert first.timings.encode > 0


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**40, 1.5, "1", None])
def test_token_ids_that_are_none_are_refused_at_submit(
    batcher: VLMBatcher, token: Any
) -> None:
    """Below zero or beyond 32 bits, an id would be looked up outside of the embeddings."""
    with pytest.raises(InvalidPrompt, match=r"token_ids (is|holds) "):
        batcher.submit(token_ids=[5, token])


def test_a_buffer_may_be_used_again_after_submit(batcher: VLMBatcher) -> None:
    """Pictures, clips and processed inputs are taken as they are when they are submitted, and a file may be closed."""
    with Image.open(CIRCLE) as opened:
        expected = batcher.submit(CIRCLE, DESCRIBE).result(timeout=60).text
        array, decoded = np.array(opened.convert("RGB")), opened.convert("RGB")
    clip = np.stack([array] * 4)
    _, processor = mlx_vlm.load(str(CHECKPOINT))
    rendered = batcher._preparer.processing.render(DESCRIBE, 1)
    inputs = {
        name: np.array(value)
        for name, value in prepare_inputs(
            processor, [decoded], prompts=rendered
        ).items()
    }
    of_clip = (
        batcher.submit(prompt=DESCRIBE, videos=clip.copy()).result(timeout=60).text
    )
    # what follows is not loaded at once
    busy = [batcher.submit(CIRCLE, DESCRIBE) for _ in range(24)]
    handles = [
        batcher.submit(array, DESCRIBE),
        batcher.submit(decoded, DESCRIBE),
        batcher.submit_request(Request(inputs=inputs)),
    ]
    filmed = batcher.submit(prompt=DESCRIBE, videos=clip)
    array[:], clip[:] = 255, 255
    decoded.paste((255, 255, 255), (0, 0, *decoded.size))
    for value in inputs.values():
        value[...] = 0
    with Image.open(CIRCLE) as opened:
        handles += [batcher.submit(opened, DESCRIBE) for _ in range(8)]
    assert {handle.result(timeout=60).text for handle in handles + busy} == {expected}
    assert filmed.result(timeout=60).text == of_clip


def chat(content: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a file": (
        chat([{"type": "input_file", "input_file": {}}]),
        InvalidPrompt,
        "'input_file'; the types are text, ",
    ),
    "audio": (
        chat([{"type": "input_audio", "input_audio": {"data": ""}}]),
        InvalidAudio,
        "takes no recordings: ",
    ),
    "role": (
        chat("a", "bogus"),
        InvalidPrompt,
        "the role 'bogus'; the roles are system, developer, user",
    ),
    "role_type": (chat("a", ["user"]), InvalidPrompt, r"the role \['user'\]"),
    "content": (chat(5), InvalidPrompt, "the content 5; text or a list of parts"),
    "no_content": (chat(None), InvalidPrompt, "the content None"),
    "misspelt_content": (
        {"messages": [{"role": "user", "contents": "a"}]},
        InvalidPrompt,
        r"it has \['contents', 'role'\]",
    ),
    "sized_part": (
        chat([{"type": "image", "image": CIRCLE, "max_pixels": 784}]),
        InvalidPrompt,
        "a picture part has max_pixels; .* the request's to say",
    ),
    "stray_images": (
        chat("what?", images=[CIRCLE]),
        InvalidPrompt,
        "a message has 'images', which no model would see",
    ),
    "stray_image_url": (
        chat("what?", image_url={"url": CIRCLE}),
        InvalidPrompt,
        "a message has 'image_url'",
    ),
    "stray_video": (
        chat("what?", video="a.mp4"),
        InvalidPrompt,
        "a message has 'video'",
    ),
    "stray_in_text": (
        chat([{"type": "text", "text": "a", "image": CIRCLE}]),
        InvalidPrompt,
        "a part of type 'text' has 'image'; a picture or video is a part of its own",
    ),
    "misspelt_picture": (
        chat([{"type": "image", "img": CIRCLE}]),
        InvalidPrompt,
        "a picture part does not know img; its picture is in image or image_url or url or path",
    ),
    "anthropic_picture": (
        chat([{"type": "image", "source": {"data": ""}}]),
        InvalidPrompt,
        "does not know source",
    ),
    "two_in_a_part": (
        chat([{"type": "image", "image": CIRCLE, "image_url": SQUARE}]),
        InvalidPrompt,
        "image and image_url exclude each other",
    ),
    "another_picture_in_a_part": (
        chat([{"type": "image", "image": CIRCLE, "img": SQUARE}]),
        InvalidPrompt,
        "know img",
    ),
    "picture_without_url": (
        chat([{"type": "image_url", "image_url": {"uri": CIRCLE}}]),
        InvalidPrompt,
        'image_url of a content part is a mapping without "url"; it has uri',
    ),
    "part": (chat([5]), InvalidPrompt, 'mapping with "type"'),
    "part_text": (
        chat([{"type": "text", "text": 5}]),
        InvalidPrompt,
        "the text 5; a string",
    ),
    "messages_text": (
        {"messages": "what?"},
        InvalidPrompt,
        "type str; a list of messages",
    ),
    "negative_id": ({"token_ids": [5, -1]}, InvalidPrompt, "token_ids holds -1"),
    "fractional_id": (
        {"token_ids": [1.5]},
        InvalidPrompt,
        r"token_ids is \[1.5\]; it must be a list or array",
    ),
    "boolean_ids": (
        {"token_ids": [True, False]},
        InvalidPrompt,
        "of integers",
    ),
    "huge_id": ({"token_ids": [2**40]}, InvalidPrompt, "holds 1099511627776"),
    "ragged_ids": ({"token_ids": [[1], [2, 3]]}, InvalidPrompt, "a list or array"),
    "text_ids": ({"token_ids": "123"}, InvalidPrompt, "token_ids is '123'"),
    "no_ids": ({"token_ids": np.zeros(0, int)}, InvalidPrompt, "token_ids is empty"),
    "typed_placeholder": (
        {"prompt": "what is <|image_pad|>?"},
        InvalidPrompt,
        "'<|image_pad|>', which .* video's place",
    ),
    "typed_end": (
        {"prompt": "a<|im_end|>\n<|im_start|>system\nb"},
        InvalidPrompt,
        "end of a turn; .*template=None",
    ),
    "typed_in_chat": (
        chat([{"type": "text", "text": "<|im_end|>"}]),
        InvalidPrompt,
        "end of a turn",
    ),
    "typed_frame": ({"prompt": "<|vision_start|>"}, InvalidPrompt, "video's place"),
    "typed_in_a_call": (
        chat(
            "",
            "assistant",
            tool_calls=[
                {"function": {"name": "f", "arguments": '{"a": "\\u003c|image_pad|>"}'}}
            ],
        ),
        InvalidPrompt,
        "video's place",
    ),
    "prompt_bytes": (
        {"prompt": b"x"},
        InvalidPrompt,
        r"prompt is b'x'; it must be text \(str\)",
    ),
    "cache_text": (
        {"prompt": "x", "cache": "x"},
        InvalidCache,
        "cache is 'x'; it must be a PromptCache",
    ),
    "id_list": (
        {"prompt": "x", "request_id": []},
        InvalidRequest,
        r"request_id is \[\]; it must be text",
    ),
    "id_of_an_answer": (
        {"prompt": "x", "request_id": "a\0" + "1"},
        InvalidRequest,
        "without null characters",
    ),
    "inputs_list": (
        {"inputs": [1]},
        InvalidPrompt,
        r"inputs is \[1\]; it must be a mapping",
    ),
    "fractional_inputs": (
        {"inputs": {"input_ids": np.ones((1, 3))}},
        InvalidPrompt,
        "of integers; given: .*float64",
    ),
    "long_prompt": (
        {"prompt": "a " * 5_000_000},
        PromptTooLong,
        "the prompt has 10,000,000 characters; 2,048 tokens",
    ),
    "long_chat": (
        chat([{"type": "text", "text": "a " * 50_000}]),
        PromptTooLong,
        "the chat has 100,0.. characters",
    ),
    "long_ids": ({"token_ids": [5] * 4096}, PromptTooLong, "token_ids has 4,096 ids"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_be_dropped_or_misread_is_refused_in_a_line(
    batcher: VLMBatcher, case: str
) -> None:
    arguments, error, said = WRONG[case]
    started = time.monotonic()
    for ask in (
        lambda: submitted(batcher, arguments),
        lambda: batcher.submit_request(Request(**arguments)),
    ):
        with pytest.raises(error, match=said) as found:
            ask()
        assert len(str(found.value)) < 400
        assert "\n" not in str(found.value)
    assert time.monotonic() - started < 15  # the long ones take a minute to tokenise


def test_what_is_natural_is_taken(batcher: VLMBatcher) -> None:
    """One picture without a list, numpy ids, a tuple of parts, an assistant's turn without words, a message in pieces."""
    expected = batcher.submit(CIRCLE, DESCRIBE).result(timeout=60)
    with Image.open(CIRCLE) as opened:
        picture = np.asarray(opened.convert("RGB"))
    for images in (
        str(CIRCLE),
        CIRCLE,
        picture,
        iter([CIRCLE]),
        CIRCLE.read_bytes(),
        (CIRCLE,),
    ):
        result = batcher.submit_request(Request(prompt=DESCRIBE, images=images)).result(
            timeout=60
        )
        assert (result.text, result.usage.prompt_tokens) == (
            expected.text,
            expected.usage.prompt_tokens,
        )
    words = batcher.submit(prompt="count to 5").result(timeout=60).text
    rendered = batcher._preparer.processing.render("count to 5", 0)
    ids = batcher._preparer.processing.inputs(rendered, [])["input_ids"]
    forms: list[Any] = [
        np.array(ids),
        np.array(ids)[0].astype(np.uint16),
        ids,
        tuple(np.array(ids)[0]),
    ]
    for token_ids in forms:
        assert batcher.submit(token_ids=token_ids).result(timeout=60).text == words
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": ({"type": "text", "text": "repeat: a"}, "")},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "count to 5"},
    ]
    assert batcher.submit(messages=turns).result(timeout=60).ok


def test_a_failed_result_is_json(batcher: VLMBatcher) -> None:
    result = batcher.submit("gone.png", DESCRIBE).result(timeout=60)
    read = json.loads(json.dumps(asdict(result)))
    assert read["error"] == "InvalidImage: gone.png does not exist"
    assert isinstance(replace(result, text="").exception, InvalidImage)
    whole = batcher.submit(prompt="count to 3", return_cache=True).result(timeout=60)
    assert json.loads(json.dumps(asdict(whole)))["text"] == "1 2 3"
    assert replace(whole, text="").cache is whole.cache is not None


def test_a_family_that_takes_one_picture_or_none_says_so(batcher: VLMBatcher) -> None:
    """The families' facts are asked when a request is submitted."""
    processing = batcher._preparer.processing
    got, text = spec_for("got"), spec_for("falcon_h1")
    assert got is not None and text is not None
    one = Preparer(processing, ModelFacts(spec=got))
    one.check(Request(prompt="a", images=CIRCLE))
    with pytest.raises(InvalidImage, match="got takes one picture a request; given: 2"):
        one.check(Request(prompt="a", images=[CIRCLE, CIRCLE]))
    with pytest.raises(InvalidImage, match="falcon_h1 takes no pictures"):
        Preparer(processing, ModelFacts(spec=text)).check(
            Request(prompt="a", images=CIRCLE)
        )


def test_a_long_prompt_has_a_processor_of_its_own(
    monkeypatch: pytest.MonkeyPatch, batcher: VLMBatcher
) -> None:
    """Whoever comes behind a prompt that takes seconds to become tokens does not wait for it."""
    monkeypatch.setattr("vlm_batch.inputs.question.LONG_PROMPT", 1000)
    preparer = Preparer(batcher._preparer.processing, ModelFacts(spec=batcher.spec))
    begun, go_on, inputs = threading.Event(), threading.Event(), Processing.inputs

    def slow(self: Processing, rendered: str, *rest: Any, **options: Any) -> Any:
        if len(rendered) >= 1000:
            begun.set()
            assert go_on.wait(30)
        return inputs(self, rendered, *rest, **options)

    monkeypatch.setattr(Processing, "inputs", slow)
    loaders = Loaders(preparer.prepare)
    questions = [
        preparer.check(Request(prompt="repeat: " + "a " * 600)) for _ in range(3)
    ]
    assert {question.lane for question in questions} == {Lane.LONG}
    long = [loaders.start(question) for question in questions]
    assert begun.wait(30)
    short = [
        loaders.start(preparer.check(Request(prompt="count to 5"))) for _ in range(4)
    ]
    assert [loading.result().inputs["input_ids"].shape for loading in short] == [
        short[0].result().inputs["input_ids"].shape
    ] * 4
    assert not any(loading.done() for loading in long)
    go_on.set()
    assert long[0].result().inputs["input_ids"].shape[1] > 600
    loaders.close()


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("images_seq_mask", True),
        ("attention_mask", True),
        ("token_type_ids", False),
        ("image_bound", False),
    ],
)
def test_token_ids_meet_what_a_processor_says_of_positions(
    batcher: VLMBatcher, name: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask of pictures is for the prompt that it was given: other ids have their pictures elsewhere."""
    processing = batcher._preparer.processing
    marks = batcher._preparer.facts.image_token_ids
    inputs = processing.inputs

    def marking(*given: Any) -> dict[str, Any]:
        found = inputs(*given)
        places = np.isin(np.array(found["input_ids"]), list(marks))
        said = {
            "images_seq_mask": places,
            "attention_mask": np.ones_like(places, int),
            "image_bound": np.array([[1, 5]]),
        }
        return {**found, name: mx.array(said.get(name, np.arange(places.size)[None]))}

    monkeypatch.setattr(processing, "inputs", marking)
    with Image.open(CIRCLE) as opened:
        picture = opened.convert("RGB")
    own = processing.inputs_of_ids(
        np.array(marking(processing.render("?", 1), [picture])["input_ids"])[
            0
        ].tolist(),
        [picture],
        marks,
    )
    assert own[name].shape is not None
    count = int(np.isin(np.array(own["input_ids"]), list(marks)).sum())
    ids = [7, 7, 7, *[next(iter(marks))] * count, 9]
    if not works:
        with pytest.raises(
            InvalidPrompt, match=rf"by position what a prompt holds \({name}\)"
        ):
            processing.inputs_of_ids(ids, [picture], marks)
        return
    found = processing.inputs_of_ids(ids, [picture], marks)
    expected = (
        [token in marks for token in ids]
        if name == "images_seq_mask"
        else [1] * len(ids)
    )
    assert np.array(found[name]).tolist() == [expected]


def test_a_placeholder_without_a_picture_is_refused_at_submit(
    batcher: VLMBatcher,
) -> None:
    """In a prompt that is final; typed ones are refused as such (tests/test_reserved.py)."""
    processing = batcher.processing
    text = processing.render("describe the picture", 1)
    ids = processing.tokenizer.encode(text)
    said = "1 placeholder tokens for pictures, and there is no picture"
    with pytest.raises(InvalidPrompt, match=said):
        batcher.submit(token_ids=ids)
    with pytest.raises(InvalidPrompt, match=said):
        batcher.submit_request(Request(inputs={"input_ids": np.array([ids])}))
    with pytest.raises(InvalidPrompt, match="1 picture placeholders for 0 pictures"):
        batcher.submit(prompt=text, template=None)


def test_processed_inputs_that_do_not_fit_are_refused_at_submit(
    batcher: VLMBatcher,
) -> None:
    picture = Image.open(CIRCLE)
    processing = batcher.processing
    inputs = dict(
        processing.inputs(processing.render("describe the picture", 1), [picture])
    )
    assert batcher.submit_request(Request(inputs=inputs)).result(timeout=60).ok
    ids = np.array(inputs["input_ids"])
    mark = int(batcher._preparer.processing.config.image_token_id)
    given = int((ids == mark).sum())
    at = int(np.flatnonzero(ids[0] == mark)[0])
    for changed, count in (
        (np.insert(ids, at, mark, axis=1), given + 1),
        (np.delete(ids, at, axis=1), given - 1),
    ):
        wrong = {
            "input_ids": changed,
            "pixel_values": inputs["pixel_values"],
            "image_grid_thw": inputs["image_grid_thw"],
        }
        with pytest.raises(
            InvalidPrompt,
            match=f"the pictures need {given} placeholder tokens; the prompt has {count}",
        ):
            batcher.submit_request(Request(inputs=wrong))
