"""mlx-vlm's server with this library's engine: through its own application, on trained checkpoints."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
import uvicorn
from fastapi import HTTPException
from mlx_vlm.server.generation import GenerationArguments, ResponseGenerator
from transformers import AutoTokenizer

from tests.serving import IMAGES, Running, data_uri, picture, text, wait_until
from vlm_batch.assets import default_checkpoint
from vlm_batch.integrations import mlx_vlm as door

#: The members that mlx-vlm's application uses.
USED = (
    "generate",
    "validate_context_budget",
    "_cpu_preprocess",
    "wait_until_ready",
    "stop_and_join",
    "__init__",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    module = importlib.import_module("mlx_vlm.server.app")
    before = module.ResponseGenerator, module.app.router.lifespan_context
    door.install()
    config = uvicorn.Config(
        module.app, host="127.0.0.1", port=0, log_level="error", ws="none"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_until(lambda: running.started or not thread.is_alive(), "the server to listen")
    yield Running(running, running.servers[0].sockets[0].getsockname()[1])  # type: ignore[arg-type]
    running.should_exit = True
    thread.join(30)
    module.unload_model_sync()
    module.ResponseGenerator, module.app.router.lifespan_context = before  # type: ignore[attr-defined]
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


MODEL = str(default_checkpoint())


def test_the_members_have_the_signatures_that_the_application_calls() -> None:
    """What theirs takes, ours takes, in the same order. A new mlx-vlm that adds an argument is noticed here."""
    for name in USED:
        theirs = list(inspect.signature(getattr(ResponseGenerator, name)).parameters)
        ours = list(inspect.signature(getattr(door.ResponseEngine, name)).parameters)
        assert ours[: len(theirs)] == theirs, name
    engine = door.ResponseEngine(MODEL)
    for attribute in ("tokenizer", "model", "processor", "config"):
        assert attribute in vars(engine)
    assert engine.requests.qsize() == 0


def test_the_application_uses_nothing_else_of_its_engine() -> None:
    """Every attribute that their sources read of ``response_generator`` is one that is here."""
    import re
    from pathlib import Path

    import mlx_vlm.server

    folder = Path(mlx_vlm.server.__file__).parent
    sources = [
        path.read_text() for path in folder.glob("*.py") if path.name != "generation.py"
    ]
    used = {
        name
        for source in sources
        for name in re.findall(r"runtime\.response_generator\.(\w+)", source)
    }
    used |= {
        name
        for source in sources
        for name in re.findall(r"\bresponse_generator\.(\w+)\(", source)
    }
    assert used
    engine = door.ResponseEngine(MODEL)
    assert {
        name
        for name in used
        if name not in vars(engine) and name not in vars(door.ResponseEngine)
    } == set()


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "count to 5"}]
    )
    assert answer.choices[0].message.content == "1 2 3 4 5"
    assert answer.usage is not None
    described: list[Any] = [
        {
            "role": "user",
            "content": [picture("red_circle.png"), text("describe the picture")],
        }
    ]
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=described, stream=True)
    )
    assert (
        "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        == "a red circle"
    )


def test_concurrent_pictures_are_answered_as_alone(server: Running) -> None:
    described = {
        "red_circle.png": "a red circle",
        "digits_728.png": "the digits 728",
        "red_circle_above_blue_triangle.png": "a red circle above a blue triangle",
    }

    async def all_at_once() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(name: str) -> str | None:
                messages: list[Any] = [
                    {
                        "role": "user",
                        "content": [picture(name), text("describe the picture")],
                    }
                ]
                answer = await client.chat.completions.create(
                    model=MODEL, messages=messages
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*(one(name) for name in [*described] * 8))

    assert asyncio.run(all_at_once()) == [*described.values()] * 8


def test_log_probabilities(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "count to 3"}], logprobs=True
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [token.token for token in found.content][:5] == ["1", " ", "2", " ", "3"]
    assert all(-1 < token.logprob <= 0 for token in found.content)


def test_responses_and_messages(server: Running, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="count to 4")
    assert response.output_text == "1 2 3 4"
    reply = server.ask(
        "POST",
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 20,
            "messages": [{"role": "user", "content": "count to 4"}],
        },
    )
    assert reply.json["content"][0]["text"] == "1 2 3 4"


@pytest.mark.parametrize(
    "seen", [b"data: ", b"HTTP/1.1 200"], ids=["a-token", "the-headers"]
)
def test_a_streaming_client_that_leaves_ends_its_request(
    server: Running, seen: bytes
) -> None:
    server.ask(
        "POST", "/v1/responses", {"model": MODEL, "input": "count to 2"}
    )  # the model is there from the first one on
    module = importlib.import_module("mlx_vlm.server.runtime")
    batcher = module.runtime.response_generator.batcher
    before = batcher.stats()
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "count to 12"}], "stream": True, "max_tokens": 2000,
         "temperature": 1.5, "logit_bias": {"479": -100, "477": -100}}
    )  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    received = b""
    while seen not in received:
        more = connection.recv(100)
        assert more
        received += more
    connection.close()

    def is_over() -> bool:
        stats = batcher.stats()
        # the headers go out before it is asked for
        submitted = seen == b"data: " or stats.cancelled > before.cancelled
        return (
            stats.queued + stats.waiting + stats.decoding == 0
            and stats.cancelled == before.cancelled + submitted
        )

    wait_until(is_over, "its end")
    assert batcher.stats().finished == before.finished


# The engine alone --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[door.ResponseEngine]:
    made = door.ResponseEngine(MODEL, top_logprobs_k=2)
    made.wait_until_ready()
    yield made
    made.stop_and_join()


def rendered(words: str) -> str:
    return f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_with_counts_and_probabilities(engine: door.ResponseEngine) -> None:
    context, tokens = engine.generate(
        rendered("count to 3"), args=GenerationArguments(max_tokens=20, temperature=0)
    )
    found = list(tokens)
    assert context.prompt_tokens == 12
    assert "".join(token.text for token in found) == "1 2 3"
    assert found[-1].finish_reason == "stop"
    assert all(len(token.top_logprobs or ()) == 2 for token in found)


def test_pixel_limits_reach_the_processor(engine: door.ResponseEngine) -> None:
    prompt = rendered("<|vision_start|><|image_pad|><|vision_end|>describe the picture")
    image = [str(IMAGES / "receipt.jpg")]
    lengths = []
    for limits in (
        {},
        {"max_pixels": 28 * 28 * 4},
        {"min_pixels": 28 * 28 * 64, "max_pixels": 28 * 28 * 128},
    ):
        args = GenerationArguments(max_tokens=2, temperature=0, **limits)
        context, tokens = engine.generate(prompt, image, args=args)
        assert len(list(tokens)) == 2
        lengths.append(context.prompt_tokens)
    assert lengths[1] < lengths[0]
    assert lengths[2] > lengths[1]


def test_data_uris(engine: door.ResponseEngine) -> None:
    prompt = rendered("<|vision_start|><|image_pad|><|vision_end|>describe the picture")
    _, tokens = engine.generate(
        prompt,
        [data_uri("red_circle.png")],
        args=GenerationArguments(max_tokens=20, temperature=0),
    )
    assert "".join(token.text for token in tokens) == "a red circle"


def test_a_thinking_budget_closes_the_block(engine: door.ResponseEngine) -> None:
    """Tokens of this checkpoint stand for the markers: after so many tokens the end marker is forced, and only once."""
    args = GenerationArguments(
        max_tokens=12,
        temperature=0,
        enable_thinking=True,
        thinking_budget=3,
        thinking_start_token="<|im_start|>",
        thinking_end_token="7",
    )
    _, tokens = engine.generate(rendered("count to 12"), args=args)
    said = [token.token for token in tokens]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    newline, end = (
        tokenizer.encode(marker, add_special_tokens=False)[-1] for marker in ("\n", "7")
    )
    assert said[4:6] == [newline, end]  # the fourth token is beyond the budget
    assert newline not in said[6:]
    args.thinking_budget = None
    _, tokens = engine.generate(rendered("count to 12"), args=args)
    assert newline not in [token.token for token in tokens]


def test_what_the_engine_has_nothing_for_is_refused(
    engine: door.ResponseEngine,
) -> None:
    for options in ({"typical_p": 0.5}, {"top_n_sigma": 1.0}):
        with pytest.raises(door.BadRequest, match=next(iter(options))):
            engine.generate(rendered("count to 3"), args=GenerationArguments(**options))
    for token, said in ((10**9, "this model has 512 tokens"), (-1, "at least 0")):
        args = GenerationArguments(logit_bias={token: 5.0, 7: 1.0})
        with pytest.raises(
            door.BadRequest, match=f"logit_bias holds {token}; .*{said}"
        ):
            list(engine.generate(rendered("count to 3"), args=args)[1])
    with pytest.raises(ValueError, match="recordings"):
        engine.generate(rendered("count to 3"), audio=["x.wav"])
    for settings in ({"draft_model_path": "x"}, {"kv_key_bits": 4}):
        with pytest.raises(ValueError, match="not supported"):
            door.ResponseEngine(MODEL, **settings)  # type: ignore[arg-type]


FORM = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "integer"}},
}
#: Tokens of this checkpoint stand for the markers of thinking.
THINKING = {
    "enable_thinking": True,
    "thinking_start_token": "<|im_start|>",
    "thinking_end_token": "2",
}


def test_a_form_begins_where_thinking_ends(
    server: Running, client: openai.OpenAI
) -> None:
    """As with mlx-vlm's own engine: what is thought has no form, what is answered has it, streamed or not."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "count to 5"}],
        "temperature": 0,
        "max_tokens": 9,
    }
    free = server.ask("POST", "/v1/chat/completions", body).json
    formed = server.ask(
        "POST", "/v1/chat/completions", {**body, "response_format": FORM}
    ).json
    assert free["choices"][0]["message"]["content"] == "1 2 3 4 5"
    assert formed["choices"][0]["message"]["content"].isdigit()
    asked = {**body, "response_format": FORM, **THINKING}
    reply = server.ask("POST", "/v1/chat/completions", asked)
    assert reply.status == 200, reply.body
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"].strip().isdigit()) == (
        "1",
        True,
    )
    streamed = server.ask("POST", "/v1/chat/completions", {**asked, "stream": True})
    assert streamed.status == 200 and b'"error"' not in streamed.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"top_p": 2.0}, 200),  # off, as mlx-vlm takes it
        ({"top_p": 0.0}, 200),
        ({"resize_shape": [32, 32]}, 200),
        ({"temperature": -1.0}, 400),
        ({"min_p": 3.0}, 400),
        ({"typical_p": 0.5}, 400),
        ({"repetition_penalty": -2.0}, 400),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_no_fault_of_the_server(
    server: Running, fields: dict[str, Any], status: int, stream: bool
) -> None:
    content = [picture("red_circle.png"), text("describe the picture")]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.5,
        "max_tokens": 5,
    }
    reply = server.ask(
        "POST", "/v1/chat/completions", {**body, "stream": stream, **fields}
    )
    assert reply.status == status, reply.body
    assert b'"error"' not in reply.body or status == 400
    if status == 400:
        assert next(iter(fields)).removeprefix("repetition_") in reply.body.decode()


def test_a_picture_that_cannot_be_read_is_the_requests_fault(server: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [part, text("x")]}],
        "max_tokens": 5,
    }
    assert server.ask("POST", "/v1/chat/completions", body).status == 400


def test_a_model_that_cannot_be_loaded_is_said_as_theirs_says_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(HTTPException) as ours:
        door.ResponseEngine(str(tmp_path)).wait_until_ready()
    assert ours.value.status_code == 400
    assert str(ours.value.detail).startswith("Failed to load model: ")


def test_special_tokens_are_shown_where_parsers_look_for_them(
    engine: door.ResponseEngine,
) -> None:
    from vlm_batch.handle import Handle
    from vlm_batch.types import Event, Result

    handle = Handle("a", lambda _: False)
    for event in (
        Event("a", token=480),
        Event("a", token=1, text="x"),
        Event("a", token=479, result=Result(request_id="a")),
    ):
        handle.push(event)
    said = [
        token.text
        for token in door.Tokens(handle, door.special_tokens(engine.tokenizer))
    ]
    assert said == ["<|vision_start|>", "x", ""]


def test_a_budget_is_a_logits_processor() -> None:
    class Criteria:
        def __call__(self, token: int) -> int | None:
            return 2 if token == 9 else None

    budget = door.ThinkingBudget(Criteria())
    logits = mx.zeros((1, 4))
    # a prompt's tokens are no thoughts
    assert budget(mx.array([1, 9]), logits).tolist() == [[0, 0, 0, 0]]
    assert budget(mx.array([1, 9, 9]), logits).tolist() == [
        [-mx.inf, -mx.inf, 0, -mx.inf]
    ]
    assert budget(mx.array([1, 9, 9, 2]), logits).tolist() == [[0, 0, 0, 0]]


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert door.arguments(["--model", "m"]) == ["--model", "m", "--host", "127.0.0.1"]
    assert door.arguments(["--host", "0.0.0.0"]) == ["--host", "0.0.0.0"]
    assert door.arguments(["--host=::1"]) == ["--host=::1"]
