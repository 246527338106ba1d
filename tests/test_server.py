"""The server through the openai package and plain HTTP, on the embedded checkpoint."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import openai
import pydantic
import pytest

from tests.serving import IMAGES, Running, data_uri, picture, serving, text, wait_until
from vlm_batch import Request, SamplingParams, Video, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.cli import serve
from vlm_batch.runtime.memory import default_limit
from vlm_batch.server import edge
from vlm_batch.server.config import InvalidConfig, Key, ServerConfig, read_keys
from vlm_batch.server.doors.chat import ChatRequest
from vlm_batch.server.doors.chat_messages import wire_messages
from vlm_batch.server.doors.completions import CompletionRequest
from vlm_batch.server.sampled import Common

ACCESS = "vlm_batch.server.access"
DESCRIBED = {
    "red_circle.png": "a red circle",
    "digits_728.png": "the digits 728",
    "red_circle_above_blue_triangle.png": "a red circle above a blue triangle",
    "yellow_triangle_left_of_green_cross.png": "a yellow triangle left of a green cross",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def asked(*names: str, question: str = "describe the picture") -> list[Any]:
    return [
        {
            "role": "user",
            "content": [*(picture(name) for name in names), text(question)],
        }
    ]


# The openai package ------------------------------------------------------------------------------------------------


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="qwen2_vl", messages=[{"role": "user", "content": "count to 5"}]
    )
    assert answer.choices[0].message.content == "1 2 3 4 5"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert (
        answer.usage.total_tokens
        == answer.usage.prompt_tokens + answer.usage.completion_tokens
        > 10
    )


@pytest.mark.parametrize(("name", "words"), DESCRIBED.items())
def test_pictures(client: openai.OpenAI, name: str, words: str) -> None:
    answer = client.chat.completions.create(model="qwen2_vl", messages=asked(name))
    assert answer.choices[0].message.content == words


def test_several_pictures_and_turns(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="qwen2_vl",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            *asked(
                "red_circle.png",
                "yellow_triangle_left_of_green_cross.png",
                question="which picture has a cross?",
            ),
        ],
    )
    assert answer.choices[0].message.content == "the second"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="qwen2_vl",
            messages=asked("red_circle.png"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "a red circle"
    assert sum(bool(piece) for piece in pieces) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][
        -1
    ] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_asynchronously(server: Running) -> None:
    async def ask() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.chat.completions.create(
                model="qwen2_vl", messages=[{"role": "user", "content": "count to 3"}]
            )
            stream = await client.chat.completions.create(
                model="qwen2_vl", messages=asked("red_circle.png"), stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(ask()) == ("1 2 3", "a red circle")


def test_stops_and_lengths(client: openai.OpenAI) -> None:
    counting: list[Any] = [{"role": "user", "content": "count to 12"}]
    stopped = client.chat.completions.create(
        model="qwen2_vl", messages=counting, stop=" 5"
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "1 2 3 4",
        "stop",
    )
    cut = client.chat.completions.create(
        model="qwen2_vl", messages=counting, max_completion_tokens=3
    )
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (
        "1 2",
        "length",
    )
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 3


def test_several_answers_with_seeds_that_count_up(client: openai.OpenAI) -> None:
    """Sampled, ``n`` answers of one seed are the answers of that seed and those after it, alone."""
    options: dict[str, Any] = {
        "model": "qwen2_vl",
        "messages": asked("receipt.jpg"),
        "temperature": 3.0,
        "max_tokens": 8,
    }
    several = client.chat.completions.create(**options, n=3, seed=11)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [
        client.chat.completions.create(**options, seed=seed).choices[0].message.content
        for seed in (11, 12, 13)
    ]
    assert [choice.message.content for choice in several.choices] == alone
    assert len(set(alone)) > 1
    assert several.usage is not None
    single = client.chat.completions.create(**options, seed=11)
    assert single.usage is not None
    assert several.usage.prompt_tokens == single.usage.prompt_tokens


def test_several_answers_are_one_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompt is read, encoded and prefilled once, and counts once."""
    loaded = server.server.service.model
    assert loaded is not None
    adapter = loaded.batcher._loop.generator.adapter
    calls: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def noting(*given: Any) -> Any:
            calls.append(name)
            return call(*given)

        return noting

    for name in ("encode", "prefill"):
        monkeypatch.setattr(adapter, name, noted(name, getattr(adapter, name)))
    before = counted(server, "vlm_batch:pictures_total")
    body = {"messages": asked("digits_728.png", question="read the digits")}
    reply = server.ask(
        "POST", "/v1/chat/completions", {**body, "n": 6, "seed": 1, "temperature": 0.5}
    )
    assert {choice["message"]["content"] for choice in reply.json["choices"]} == {"728"}
    assert calls.count("encode") == 1
    assert calls.count("prefill") <= 2
    assert counted(server, "vlm_batch:pictures_total") == before + 1


def counted(server: Running, name: str) -> float:
    """A counter of ``/metrics``, over all of its labels."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith((f"{name} ", f"{name}{{"))
    )


def test_several_answers_streamed(client: openai.OpenAI) -> None:
    said = {0: "", 1: ""}
    for chunk in client.chat.completions.create(
        model="qwen2_vl", messages=asked("red_circle.png"), n=2, stream=True
    ):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "a red circle", 1: "a red circle"}


def test_text_completions(client: openai.OpenAI, server: Running) -> None:
    prompts = [
        f"<|im_start|>user\ncount to {n}<|im_end|>\n<|im_start|>assistant\n"
        for n in (3, 4)
    ]
    answer = client.completions.create(model="qwen2_vl", prompt=prompts, max_tokens=30)
    assert [choice.text for choice in answer.choices] == ["1 2 3", "1 2 3 4"]
    pieces = client.completions.create(
        model="qwen2_vl", prompt=prompts[0], max_tokens=30, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == "1 2 3"
    tokenizer = server.server.service.model
    assert tokenizer is not None
    ids = tokenizer.batcher.processing.tokenizer.encode(prompts[1])
    answer = client.completions.create(model="qwen2_vl", prompt=ids, max_tokens=30)
    assert answer.choices[0].text == "1 2 3 4"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    facts = model.model_dump()
    assert facts["id"] == "qwen2_vl"
    assert facts["max_model_len"] == 2048
    assert facts["vision"] is True
    assert facts["video"] is True
    assert facts["audio"] is False
    assert facts["tools"] is False
    assert client.models.retrieve("qwen2_vl").id == "qwen2_vl"
    with pytest.raises(openai.NotFoundError, match="this server's is 'qwen2_vl'"):
        client.models.retrieve("gpt-4o")


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    hello: list[Any] = [{"role": "user", "content": "count to 3"}]
    with pytest.raises(openai.NotFoundError, match="model"):
        client.chat.completions.create(model="gpt-4o", messages=hello)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="qwen2_vl", messages=hello, temperature=-1)
    assert caught.value.code == "InvalidParameters"
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model="qwen2_vl", input="x")


def test_log_probabilities_whole_and_streamed(client: openai.OpenAI) -> None:
    """They are the library's own; streamed, the same ones come token by token."""
    messages: list[Any] = [{"role": "user", "content": "count to 5"}]
    with VLMBatcher(default_checkpoint()) as batcher:
        result = batcher.submit(
            prompt="count to 5", params=SamplingParams(logprobs=2)
        ).result()
    assert result.logprobs is not None
    options: dict[str, Any] = {
        "model": "qwen2_vl",
        "messages": messages,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [token.logprob for token in whole.content] == pytest.approx(
        [step.logprob for step in result.logprobs], abs=1e-4
    )
    assert "".join(token.token for token in whole.content[:-1]) == "1 2 3 4 5"
    for token in whole.content:
        assert bytes(token.bytes or ()).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed += (choice.logprobs.content or []) if choice.logprobs else []
    assert [token.token for token in streamed] == [
        token.token for token in whole.content
    ]
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in whole.content], abs=1e-4
    )


def test_log_probabilities_of_text_completions(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\ncount to 3<|im_end|>\n<|im_start|>assistant\n"
    whole = (
        client.completions.create(model="qwen2_vl", prompt=prompt, logprobs=1)
        .choices[0]
        .logprobs
    )
    assert whole is not None
    assert whole.tokens is not None
    assert "".join(whole.tokens[:-1]) == "1 2 3"
    assert whole.text_offset == [0, 1, 2, 3, 4, 5]
    assert whole.token_logprobs is not None
    assert whole.top_logprobs is not None
    assert [max(step.values()) for step in whole.top_logprobs] == whole.token_logprobs


RENDERED = "<|im_start|>user\ncount to 3<|im_end|>\n<|im_start|>assistant\n"


def test_the_sampled_token_is_among_the_most_likely(server: Running) -> None:
    """As OpenAI's text completions have it: up to one more than was asked for, and alone with 0; whole and streamed."""
    body = {
        "prompt": RENDERED,
        "temperature": 5.0,
        "seed": 1,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    for count in (0, 1, 2):
        told = server.ask("POST", "/v1/completions", {**body, "logprobs": count}).json[
            "choices"
        ][0]["logprobs"]
        for token, logprob, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
            assert 1 <= len(top) <= count + 1
        assert any(len(top) == count + 1 for top in told["top_logprobs"])
        events = server.ask(
            "POST", "/v1/completions", {**body, "logprobs": count, "stream": True}
        ).body.split(b"\n\n")
        chunks = [
            json.loads(event[6:])["choices"][0]["logprobs"]
            for event in events
            if event.startswith(b"data: {")
        ]
        for name in ("tokens", "text_offset"):
            assert [one for chunk in chunks if chunk for one in chunk[name]] == told[
                name
            ]


def test_text_offsets_count_what_is_shown(server: Running) -> None:
    """A special token is in no text; the bytes of a character are one character."""
    asked = {"prompt": RENDERED, "logprobs": 0, "max_tokens": 6, "ignore_eos": True}
    (choice,) = server.ask(
        "POST", "/v1/completions", {**asked, "logit_bias": {"479": 100}}
    ).json["choices"]
    told = choice["logprobs"]
    assert (choice["text"], told["tokens"]) == ("", ["<|im_end|>"] * 6)
    assert told["text_offset"] == [0] * 6
    form = {"guided_regex": "é١ x", "max_tokens": 20, "ignore_eos": False}
    (choice,) = server.ask("POST", "/v1/completions", {**asked, **form}).json["choices"]
    assert choice["text"] == "é١ x"
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 1, 1, 2], (
        "each of the first two has two tokens"
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"stop_token_ids": [10**6]},
            "stop_token_ids",
            "holds 1000000; this model has 512 tokens",
        ),
        (
            {"stop_token_ids": [10**9]},
            "stop_token_ids",
            "holds 1000000000; this model has 512 tokens",
        ),
        (
            {"allowed_token_ids": [10**9]},
            "allowed_token_ids",
            "holds 1000000000; this model has 512 tokens",
        ),
        (
            {"logit_bias": {"9999999999": 1}},
            "logit_bias",
            "holds 9999999999; this model has 512 tokens",
        ),
        ({"seed": 2**64}, "seed", "-9223372036854775808..18446744073709551615"),
        ({"seed": -(2**63) - 1}, "seed", "-9223372036854775808..18446744073709551615"),
        ({"logit_bias": {"7": 1, "x": 1}}, "logit_bias", "the key 'x'"),
        ({"logit_bias": {"7": 1, "07": 1}}, "logit_bias", "the token 7 twice"),
        (
            {"structured_outputs": {"regex": "["}},
            "structured_outputs.regex",
            "structured_outputs.regex: ",
        ),
        (
            {"structured_outputs": {"grammar": "["}},
            "structured_outputs.grammar",
            "structured_outputs.grammar: ",
        ),
        (
            {"structured_outputs": {"json": {"type": "obect"}}},
            "structured_outputs.json",
            "structured_outputs.json: ",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "structured_outputs.choice is empty",
        ),
        ({"guided_regex": "["}, "guided_regex", "guided_regex: "),
        ({"max_tokens": 0}, "max_tokens", "at least one token"),
        ({"use_beam_search": True}, "use_beam_search", "may only be false or null"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_refusals_name_the_value_and_the_clients_own_field(
    server: Running, fields: dict[str, Any], param: str, words: str
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": RENDERED}),
    ):
        reply = server.ask("POST", path, {**body, "max_tokens": 3, **fields})
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": "x", "odd": 1}], "messages[0].content[0].odd"),
        ([{"type": "text", "text": {"text": 1}}], "messages[0].content[0].text"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        (
            [{"type": "image_url", "image_url": {"url": "x", "odd": 1}}],
            "messages[0].content[0].image_url.odd",
        ),
        (
            [{"type": "image_url", "image_url": {}}],
            "messages[0].content[0].image_url.url",
        ),
        (
            [{"type": "text", "text": "x"}, {"type": "text", "text": "x", "user": 1}],
            "messages[0].content[1].user",
        ),
    ],
    ids=str,
)
def test_places_are_the_clients_own(server: Running, content: Any, param: str) -> None:
    assert server.chat(content).error["param"] == param


def test_no_number_of_tokens_is_the_servers_own(server: Running) -> None:
    """-1, as llama.cpp's clients write it."""
    assert (
        server.chat("count to 3", max_tokens=-1).json["choices"][0]["message"][
            "content"
        ]
        == "1 2 3"
    )
    assert server.chat("count to 3", max_completion_tokens=-1).status == 200
    assert (
        server.ask(
            "POST", "/v1/completions", {"prompt": RENDERED, "max_tokens": -1}
        ).status
        == 200
    )


def test_a_choice_among_no_tools_is_refused_as_openai_does(server: Running) -> None:
    assert server.chat("count to 3", tool_choice="auto").error["param"] == "tool_choice"
    assert server.chat("count to 3", tool_choice="none").status == 200
    assert server.chat("count to 3", tool_choice="auto", tools=[]).status == 200


def test_metrics_are_described_as_text(server: Running) -> None:
    described = server.ask("GET", "/openapi.json").json["paths"]["/metrics"]["get"][
        "responses"
    ]["200"]["content"]
    kind = server.ask("GET", "/metrics").headers["content-type"]
    assert list(described) == ["text/plain"] == [kind.partition(";")[0]]


@pytest.mark.parametrize(
    "spelt",
    ["lines", "returns", "unpadded", "for urls", "spaced", "for urls, unpadded"],
)
@pytest.mark.parametrize("is_plain", [False, True])
def test_pictures_in_every_spelling_of_base64(
    server: Running, spelt: str, is_plain: bool
) -> None:
    data = (IMAGES / "red_circle.png").read_bytes()
    usual = base64.b64encode(data).decode()
    assert {"+", "/", "="} <= set(usual)
    lines = [usual[at : at + 76] for at in range(0, len(usual), 76)]
    for_urls = base64.urlsafe_b64encode(data).decode()
    words = {
        "lines": "\n".join(lines) + "\n",
        "returns": "\r\n".join(lines),
        "unpadded": usual.rstrip("="),
        "for urls": for_urls,
        "spaced": usual,
        "for urls, unpadded": for_urls.rstrip("="),
    }[spelt]
    head = (
        ""
        if is_plain
        else "data:image/png; base64,"
        if spelt == "spaced"
        else "data:image/png;base64,"
    )
    part = {"type": "image_url", "image_url": {"url": head + words}}
    reply = server.chat([part, text("describe the picture")])
    assert reply.json["choices"][0]["message"]["content"] == "a red circle"


def test_log_probabilities_of_prompts(server: Running) -> None:
    """In vLLM's form and places: beside a chat's choices, and in each of a text completion's."""
    chat = server.chat("count to 3", prompt_logprobs=1).json
    told = chat["prompt_logprobs"]
    assert len(told) == chat["usage"]["prompt_tokens"]
    assert told[0] is None
    assert all(min(entry["logprob"] for entry in one.values()) <= 0 for one in told[1:])
    assert {
        entry["rank"] for one in told[1:] for entry in one.values() if "rank" in entry
    } == {1}
    prompts = [
        f"<|im_start|>user\ncount to {n}<|im_end|>\n<|im_start|>assistant\n"
        for n in (3, 12)
    ]
    reply = server.ask(
        "POST",
        "/v1/completions",
        {"prompt": prompts, "prompt_logprobs": 0, "max_tokens": 2},
    )
    said = [
        "".join(
            next(iter(one.values()))["decoded_token"]
            for one in choice["prompt_logprobs"][1:]
        )
        for choice in reply.json["choices"]
    ]
    assert all(
        prompt.endswith(words) for prompt, words in zip(prompts, said, strict=True)
    )
    assert server.chat("count to 3").json["prompt_logprobs"] is None
    assert (
        server.chat("count to 3", prompt_logprobs=1, stream=True).error["param"]
        == "prompt_logprobs"
    )


# Concurrency -------------------------------------------------------------------------------------------------------


def test_64_streams_are_each_answered_as_if_alone(server: Running) -> None:
    """Pictures, pairs and text of different lengths, started together; compared with a batcher of one row."""
    names = list(DESCRIBED)
    asks: list[list[Any]] = []
    for index in range(64):
        name, other = names[index % 4], names[(index + 1) % 4]
        kinds = (
            asked(name),
            asked(name, other, question="describe both pictures"),
            [{"role": "user", "content": f"count to {index % 12 + 1}"}],
            [
                {
                    "role": "user",
                    "content": "repeat: " + "a b c d e f g h"[: 2 * (index % 8) + 1],
                }
            ],
        )
        asks.append(kinds[index // 4 % 4])
    with VLMBatcher(default_checkpoint(), max_rows=1, caches=None) as alone:
        params = SamplingParams(max_tokens=2048)
        expected = [
            alone.submit(messages=messages, params=params).result().text
            for messages in asks
        ]

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(messages: list[Any]) -> str:
                stream = await client.chat.completions.create(
                    model="qwen2_vl", messages=messages, stream=True
                )
                return "".join(
                    [chunk.choices[0].delta.content or "" async for chunk in stream]
                )

            return await asyncio.gather(*(one(messages) for messages in asks))

    assert asyncio.run(all_at_once()) == expected
    assert len(set(expected)) > 16


ENDLESS: dict[str, Any] = {
    "ignore_eos": True,
    "max_tokens": 2000,
    "temperature": 1.0,
    "seed": 3,
}


def begin_stream(server: Running, **fields: Any) -> socket.socket:
    """A stream that nobody reads beyond its first bytes."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "count to 12"}],
            "stream": True,
            **ENDLESS,
            **fields,
        }
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    return connection


def rows(server: Running) -> int:
    stats = server.server.service.stats()
    assert stats is not None
    return stats.queued + stats.waiting + stats.prefilling + stats.decoding


def decoding(server: Running) -> bool:
    stats = server.server.service.stats()
    return stats is not None and stats.decoding > 0


def test_a_client_that_leaves_ends_its_request(server: Running) -> None:
    wait_until(lambda: rows(server) == 0, "the batch to be empty")
    stats = server.server.service.stats()
    assert stats is not None
    before = stats.cancelled
    for stream in (True, False):
        connection = begin_stream(server, stream=stream)
        wait_until(lambda: rows(server) == 1, "the request to run")
        if stream:
            assert connection.recv(10)
        connection.close()
        wait_until(lambda: rows(server) == 0, "the request to end")
    stats = server.server.service.stats()
    assert stats is not None
    assert stats.cancelled == before + 2
    assert b'finished_reason="abort"' in server.ask("GET", "/metrics").body


def test_a_slow_reader_holds_up_nobody(server: Running) -> None:
    slow = begin_stream(server, n=8)
    try:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        wait_until(lambda: rows(server) >= 1, "the slow request to run")
        assert (
            server.chat("count to 5").json["choices"][0]["message"]["content"]
            == "1 2 3 4 5"
        )
    finally:
        slow.close()
    wait_until(lambda: rows(server) == 0, "the slow request to end")


def test_priorities_are_taken_from_those_who_may_have_them(
    server: Running, tmp_path: Path
) -> None:
    for wrong in ("1.5", "high", "1000", "--1", "", "-"):
        assert server.chat("count to 3", headers={"X-Priority": wrong}).status == 400
    assert server.chat("count to 3", headers={"X-Priority": "0"}).status == 200
    assert server.chat("count to 3", headers={"X-Priority": "5"}).status == 403
    (tmp_path / "keys").write_text("# ours\nplain\n\ntrusted priority\n")
    with serving(keys=read_keys(tmp_path / "keys"), api_key="shared") as keyed:
        for key, status in (
            ("plain", 403),
            ("shared", 403),
            ("trusted", 200),
            ("priority", 401),
            ("ours", 401),
        ):
            headers = {"X-Priority": "5", "Authorization": f"Bearer {key}"}
            assert keyed.chat("count to 3", headers=headers).status == status, key


@pytest.mark.parametrize("text", ["", "# none", "one two", "one priority more"])
def test_keys_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidConfig, match="a key a line"):
        read_keys(tmp_path / "keys")


def test_a_client_with_many_answers_holds_up_no_other() -> None:
    """Four requests of 16 answers each have all places; another client's answer comes while they run."""
    with (
        serving(keys=(Key("many"), Key("one"))) as keyed,
        ThreadPoolExecutor(4) as pool,
    ):
        ask = partial(
            keyed.chat, "count to 9", headers={"Authorization": "Bearer many"}, n=16
        )
        long = [
            pool.submit(ask, max_tokens=400, ignore_eos=True, min_tokens=400)
            for _ in range(4)
        ]
        service = keyed.server.service
        wait_until(
            lambda: getattr(service.stats(), "decoding", 0) == 16,
            "the many answers to have all places",
        )
        reply = keyed.chat("count to 5", headers={"Authorization": "Bearer one"})
        assert reply.status == 200 and not any(one.done() for one in long)
        assert reply.json["choices"][0]["message"]["content"] == "1 2 3 4 5"
        assert [one.result(120).status for one in long] == [200] * 4


def test_clients_are_told_apart_by_their_networks() -> None:
    same = [
        edge._number(address) for address in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::7")
    ]
    others = [
        edge._number(address)
        for address in ("2001:db8:1:3::1", "10.0.0.1", "10.0.0.2", "")
    ]
    assert len(set(same)) == 1 and len({*same, *others}) == 5


# The wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"nonsense": 1}, "nonsense"),
        ({"functions": [{}]}, "use tools"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n is 0"),
        ({"n": 1000}, "n is 1000"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"store": True}, "store"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": -(2**64)}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_file"}]}]}, "type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input_audio",
        ),
    ],
    ids=str,
)
def test_a_field_is_honoured_or_refused_by_name(
    server: Running, fields: dict[str, Any], named: str
) -> None:
    reply = server.chat("count to 3", **fields)
    assert reply.status == 400
    assert named in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"


def test_a_schema_a_bias_and_several_answers(server: Running) -> None:
    """What the library does for a request, by OpenAI's names."""
    shape = {
        "type": "object",
        "properties": {"sides": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["sides"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": shape}}
    reply = server.chat(
        "count to 3", response_format=form, n=3, temperature=2.0, seed=1
    )
    assert reply.status == 200
    for choice in reply.json["choices"]:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"sides"}
    wrong = {
        "type": "json_schema",
        "json_schema": {"name": "shape", "schema": {"type": "obect"}},
    }
    reply = server.chat("count to 3", response_format=wrong)
    assert (reply.status, "Invalid type: obect" in reply.error["message"]) == (
        400,
        True,
    )
    plain, held = (
        server.chat("count to 3", **more).json
        for more in ({}, {"guided_choice": ["4", "5"]})
    )
    assert plain["choices"][0]["message"]["content"] == "1 2 3"
    assert held["choices"][0]["message"]["content"] in ("4", "5")


def test_an_answer_goes_on_with_the_last_turn(server: Running) -> None:
    chat = [
        {"role": "user", "content": "count to 5"},
        {"role": "assistant", "content": "1 2 3"},
    ]
    reply = server.ask(
        "POST",
        "/v1/chat/completions",
        {"messages": chat, "continue_final_message": True},
    )
    assert reply.json["choices"][0]["message"]["content"] == " 4 5"
    with VLMBatcher(default_checkpoint()) as batcher:
        unbegun = batcher.submit(
            messages=chat[:1],
            template={"add_generation_prompt": False},
            params={"max_tokens": 9},
        ).result()
    reply = server.chat("count to 5", add_generation_prompt=False, max_tokens=9)
    assert reply.json["choices"][0]["message"]["content"] == unbegun.text


def _asking_for_nothing(kind: type[Common], needed: str) -> Iterator[dict[str, Any]]:
    """A kind of body's fields with values that ask for nothing, and with null; a body has 128 at most."""
    values: dict[str, Any] = {}
    for name, given in kind.nothing.items():
        if given:
            values[name] = given[0] if isinstance(given, tuple) else ["anything"]
    yield values
    names = sorted({*kind.model_fields, *kind.nothing} - {needed})
    for at in range(0, len(names), 100):
        yield dict.fromkeys(names[at : at + 100])


def test_fields_that_ask_for_nothing_are_taken(
    server: Running, client: openai.OpenAI
) -> None:
    neutral = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [],
        "n": None, "user": "me", "parallel_tool_calls": True, "tool_choice": "auto", "top_k": -1, "metadata": {"run": "7"},
        "structured_outputs": None, "stream_options": None, "seed": -1, "best_of": 1.0,
    }  # fmt: skip
    of_chats = {"messages": [{"role": "user", "content": "count to 3"}]}
    for more in (neutral, *_asking_for_nothing(ChatRequest, "messages")):
        reply = server.ask("POST", "/v1/chat/completions", {**of_chats, **more})
        assert reply.status == 200, reply.body
        assert reply.json["choices"][0]["message"]["content"] == "1 2 3"
    for more in _asking_for_nothing(CompletionRequest, "prompt"):
        assert (
            server.ask(
                "POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, **more}
            ).status
            == 200
        )
    answer = client.chat.completions.create(
        model="qwen2_vl",
        messages=[{"role": "user", "content": "count to 3"}],
        extra_body=next(_asking_for_nothing(ChatRequest, "messages")),
        store=False,
        n=1,
    )
    assert (answer.choices[0].message.content, answer.choices[0].message.refusal) == (
        "1 2 3",
        None,
    )
    assert answer.system_fingerprint


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_more_than_nothing_is_refused_by_name(
    server: Running, kind: type[Common]
) -> None:
    least = {"messages": [{"role": "user", "content": "x"}]}
    path = "/v1/chat/completions"
    if kind is CompletionRequest:
        least, path = {"prompt": "x"}, "/v1/completions"  # type: ignore[dict-item]
    for name, taken in kind.nothing.items():
        # of the others every value asks for nothing
        if not isinstance(taken, tuple):
            continue
        flag = True if name != "store" and False not in taken else 1
        for value in ("other", 7, flag):
            if value is True and True in taken:
                continue
            reply = server.ask("POST", path, {**least, name: value})
            assert (reply.status, reply.error["param"]) == (400, name), (
                name,
                value,
                reply.body,
            )
            assert name in reply.error["message"]


CALL: dict[str, Any] = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}
ASKED = {"role": "user", "content": "count to 3"}


def _with(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat in which a message occurs where it may."""
    before = (
        [ASKED, {"role": "assistant", "tool_calls": [CALL]}]
        if message["role"] == "tool"
        else [ASKED]
    )
    return (
        [*before, message, ASKED]
        if message["role"] in ("assistant", "tool")
        else [message]
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "count to 3", "id": "lc_1234"}]},
        {"role": "user", "content": [{"type": "text", "text": "count to 3", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "count to 3", "cache_control": {"type": "ephemeral"}, "id": "x"},
        {"role": "assistant", "content": "x", "parsed": {"a": 1}, "refusal": None},
        {"role": "assistant", "content": "x", "provider_specific_fields": None, "thinking_blocks": [], "images": []},
        {"role": "assistant", "content": "x", "reasoning_details": [{"type": "x"}], "id": "y", "audio": None},
        {"role": "assistant", "tool_calls": [{**CALL, "caller": None, "index": 0, "provider_specific_fields": {}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {}}}]},
        {"role": "tool", "tool_call_id": "a", "content": None, "status": "success", "is_error": False},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x", "name": "y"}], "artifact": None},
        {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_clients_write_for_themselves_is_taken_at_every_depth(
    server: Running, message: dict[str, Any]
) -> None:
    reply = server.ask(
        "POST", "/v1/chat/completions", {"messages": _with(message), "max_tokens": 3}
    )
    assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "x",
                        "thinking_blocks": [{"thinking": "x"}],
                    }
                ]
            },
            "thinking_blocks",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "caller": "x"}]}
                ]
            },
            "tool_calls[0].caller",
        ),
        ({"messages": [{**ASKED, "parsed": 1}]}, "parsed"),
        (
            {
                "messages": [
                    {**ASKED, "content": [{"type": "text", "text": "x", "status": 1}]}
                ]
            },
            "content[0].status",
        ),
    ],
    ids=str,
)
def test_what_asks_for_something_is_refused_at_every_depth(
    server: Running, fields: Any, param: str
) -> None:
    reply = server.ask("POST", "/v1/chat/completions", fields)
    assert (reply.status, reply.error["param"]) == (400, f"messages[0].{param}")


def test_pictures_tools_and_thinking_that_ask_for_nothing(server: Running) -> None:
    part = picture("red_circle.png")
    part |= {
        "uuid": "x",
        "image_url": {**part["image_url"], "detail": "", "format": "image/png"},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "cache_control": {}},
        "cache_control": {"type": "ephemeral"},
    }
    reply = server.chat([part, text("describe the picture")], max_tokens=5)
    assert reply.status == 200, reply.body
    assert ChatRequest.model_validate({"messages": [ASKED], "tools": [tool]}).tools
    for fields in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert server.chat("count to 3", **fields).status == 200, fields
    for fields in ({"enable_thinking": True}, {"chat_template_kwargs": {"x": False}}):
        assert server.chat("count to 3", **fields).error["param"] == next(iter(fields))


def test_unknown_fields_are_refused_with_the_nearest_name(server: Running) -> None:
    assert (
        "(temperature is probably meant)"
        in server.chat("x", temprature=1).error["message"]
    )
    assert "probably" not in server.chat("x", zzz=1).error["message"]


# openai's own, of what it has parsed
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_openais_helpers_return_is_taken_again(client: openai.OpenAI) -> None:
    """The documented loop: the message that ``parse`` or a stream's helper returns goes back into the messages."""

    class Number(pydantic.BaseModel):
        value: Literal["one", "two"]

    first: Any = [ASKED]
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "messages": first,
        "response_format": Number,
        "max_tokens": 64,
    }
    parsed = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(parsed.parsed, Number)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    forms: list[Any]
    for message in (parsed, streamed):
        forms = [message, message.model_dump(), message.model_dump(exclude_unset=True)]
        for form in forms:
            turns: Any = [*first, form, ASKED]
            again = client.chat.completions.create(
                model="qwen2_vl", messages=turns, max_tokens=3
            )
            assert again.choices[0].message.role == "assistant"


def test_messages_as_openais_clients_write_them(server: Running) -> None:
    """Names, refusals, reasoning, and whatever an answer of this server held."""
    first = server.chat("count to 3").json["choices"][0]["message"]
    turns = [
        {"role": "system", "content": "x", "name": "rules"},
        {"role": "user", "content": "count to 3", "name": "Ada"},
        {
            **first,
            "annotations": None,
            "tool_calls": None,
            "reasoning": "so",
            "reasoning_content": "so",
            "name": "Bob",
        },
        {"role": "user", "content": "count to 3"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [picture("red_circle.png"), text("count to 3")]},
    ]
    turns[-1]["content"][0]["image_url"]["detail"] = "low"  # type: ignore[index]
    reply = server.ask(
        "POST", "/v1/chat/completions", {"messages": turns, "max_tokens": 3}
    )
    assert reply.status == 200, reply.body
    body = ChatRequest.model_validate({"messages": turns})
    assert [turn.get("content") for turn in wire_messages(body.messages)][4:6] == [
        "no",
        [{"type": "text", "text": "no"}],
    ]


def test_the_form_of_an_answer_by_vllms_name(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for form, right in (
        ({"json": schema}, '{"a": 1}'), ({"json": json.dumps(schema)}, '{"a": 1}'), ({"regex": "ab+c"}, None),
        ({"choice": ["4"]}, "4"), ({"grammar": 'start: "xyz"'}, "xyz"),
    ):  # fmt: skip
        reply = server.chat("count to 3", structured_outputs=form, max_tokens=60)
        assert reply.status == 200, reply.body
        said = reply.json["choices"][0]["message"]["content"]
        assert (
            right is None or json.loads(said) == json.loads(right)
            if right and right[0] == "{"
            else said.strip()
        )
    for wrong in ({"regex": "a", "choice": ["b"]}, {"whitespace_pattern": " "}):
        reply = server.chat("count to 3", structured_outputs=wrong)
        assert (reply.status, str(reply.error["param"]).split(".")[0]) == (
            400,
            "structured_outputs",
        )
    assert (
        server.chat(
            "count to 3", structured_outputs={"regex": "a"}, guided_regex="a"
        ).status
        == 400
    )


def test_a_negative_seed_is_a_seed(server: Running) -> None:
    drawn = [
        server.chat("count to 9", temperature=3.0, seed=seed).json["choices"][0][
            "message"
        ]["content"]
        for seed in (-5, -5, 2**64 - 5, -6)
    ]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    assert server.chat("x", seed=-(2**63) - 1).error["param"] == "seed"


def test_errors_name_what_the_client_wrote(
    server: Running, client: openai.OpenAI
) -> None:
    turn = {"role": "user", "content": "x"}
    for fields, param in (
        ({"stop": [1]}, "stop[0]"), ({"messages": [turn, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"messages": [{"role": "no"}]}, "messages[0]"),
        ({"messages": [{**turn, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"type": "function", "function": {"x": 1}}]}, "tools[0].function.name"),
    ):  # fmt: skip
        reply = server.ask(
            "POST", "/v1/chat/completions", {"messages": [turn], **fields}
        )
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
    for name, value in (
        *(
            (name, value)
            for name in ("max_tokens", "max_completion_tokens")
            for value in (0, -2, 2**63, 10**400)
        ),
        *(
            ("chat_template_kwargs", {name: 1})
            for name in ("nobody_reads_it", "enable_thinking", "messages")
        ),
    ):
        reply = server.ask(
            "POST", "/v1/chat/completions", {"messages": [turn], name: value}
        )
        assert (reply.status, reply.error["param"]) == (400, name), reply.body
    for path, body, field in (
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            "messages",
        ),
        ("/v1/completions", {"prompt": "word " * 5000}, "prompt"),
    ):
        error = server.ask("POST", path, body).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    error = server.ask(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}
    ).error
    assert error["param"] == "max_tokens"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(
            model="qwen2_vl", messages=[{"role": "user", "content": "word " * 5000}]
        )
    assert (found.value.code, found.value.param) == (
        "context_length_exceeded",
        "messages",
    )
    for prompt in ([10**8], [[1], [600]], [-1], ""):
        assert (
            server.ask("POST", "/v1/completions", {"prompt": prompt}).error["param"]
            == "prompt"
        ), prompt
    assert server.chat("<|im_end|>").error["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"mesages": []}, "mesages: there is no field mesages (messages is probably meant)"),
        ({"mesages": [], "x": 1}, "mesages: there is no field mesages (messages is probably meant)"),
        ({"messages": []}, "messages: it is empty"),
        ([], "the body: an object with fields is expected"),
        ({"messages": [{"role": "usr"}]}, "messages[0]: 'role' is 'usr'; it must be one of 'system'"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "gpt"}, "there is no model 'gpt' here; this server's is"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_say_what_would_be_right(
    server: Running, body: Any, said: str
) -> None:
    error = server.ask("POST", "/v1/chat/completions", body).error
    assert said in error["message"]
    for url, option in (("http://x/a.png", "--allow-urls"), ("a.png", "--allow-dir")):
        assert (
            option
            in server.chat([{"type": "image_url", "image_url": {"url": url}}]).error[
                "message"
            ]
        )


def test_an_error_says_which_of_several_pictures_it_is_about(server: Running) -> None:
    kinds = {
        "aGVsbG8=": "not a picture",
        "PHN2ZyAvPg==": "an SVG drawing",
        "JVBERi0xLjc=": "a PDF",
    }
    for data, said in kinds.items():
        urls = [data_uri("red_circle.png"), f"data:image/png;base64,{data}"]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        assert (
            f"picture 2 of 2: the data URI is {said}"
            in server.chat(parts).error["message"]
        )
        assert (
            server.chat(parts[1:])
            .error["message"]
            .startswith(f"the data URI is {said}")
        )


@pytest.mark.parametrize("word", ["NaN", "-Infinity", "1e400"])
def test_numbers_that_json_does_not_have_are_refused_where_they_stand(
    server: Running, word: str
) -> None:
    schema = '{"type": "json_schema", "json_schema": {"schema": {"enum": [1, WORD]}}}'
    for field, value, place in (
        ("temperature", "WORD", "temperature"),
        ("logit_bias", '{"5": WORD}', "logit_bias.5"),
        ("response_format", schema, "response_format.json_schema.schema.enum[1]"),
        ("chat_template_kwargs", '{"a": [[WORD]]}', "chat_template_kwargs.a[0][0]"),
    ):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value.replace("WORD", word)}}}'
        error = server.ask("POST", "/v1/chat/completions", body.encode()).error
        assert (error["param"], error["code"]) == (place, "json_invalid"), error
        assert word in error["message"]


def test_numbers_of_a_schema_that_would_be_others_are_refused(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 2**53 + 1}}}
    reply = server.chat("x", response_format=form)
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    reply = server.chat(
        "x", guided_grammar='start: %json {"minimum": 9007199254740993}'
    )
    assert (reply.status, reply.error["param"]) == (400, "guided_grammar")


def test_every_error_has_the_envelope(server: Running) -> None:
    asked = [
        ("GET", "/nowhere"), ("GET", "/v1/models/"), ("DELETE", "/v1/models"), ("PATCH", "/v1/chat/completions"),
        ("POST", "/health"), ("GET", "/v1/models/other"), ("POST", "/v1/chat/completions"), ("GET", "/health/"),
    ]  # fmt: skip
    for method, path in asked:
        reply = server.ask(method, path)
        assert reply.status >= 400
        assert set(reply.error) == {"message", "type", "param", "code"}, (method, path)
        assert "location" not in reply.headers
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(b"no HTTP at all\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_names_and_paths_as_clients_have_them() -> None:
    """Several names, or any; the paths without /v1, whose base URL is the server's own."""
    with serving(served_names=("reader", "PaddlePaddle/PaddleOCR-VL")) as server:
        with openai.OpenAI(
            base_url=server.url, api_key="none", max_retries=0, timeout=60
        ) as client:
            assert [card.id for card in client.models.list()] == [
                "reader",
                "PaddlePaddle/PaddleOCR-VL",
            ]
            for name in ("reader", "PaddlePaddle/PaddleOCR-VL"):
                answer = client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": "count to 3"}]
                )
                assert (answer.model, answer.choices[0].message.content) == (
                    "reader",
                    "1 2 3",
                )
                assert client.models.retrieve(name).id == name
            assert (
                client.completions.create(model="reader", prompt=RENDERED)
                .choices[0]
                .text
                == "1 2 3"
            )
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(
                    model="qwen2_vl", messages=[{"role": "user", "content": "x"}]
                )
        wrong = server.ask(
            "POST", "/chat/completions", b"x", headers={"Content-Type": "text/plain"}
        )
        assert wrong.status == 415, "the same checks"
        assert server.ask("GET", "/version").json["version"]
    with serving(any_model=True) as server:
        body = {
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": "count to 3"}],
        }
        assert server.ask("POST", "/v1/chat/completions", body).status == 200


def test_behind_a_proxy_at_a_path_of_its_own() -> None:
    """Whether the proxy takes its own path off or not; the page's files and its requests are at relative paths."""
    with serving(root_path="/models/own", api_key="key") as server:
        for root in ("", "/models/own"):
            page = server.ask("GET", f"{root}/")
            assert page.status == 200
            assert '<base href="/models/own/">' in page.body.decode()
            for name in ("app.js", "style.css", "icon.svg"):
                assert f'"page/{name}"' in page.body.decode()
                assert server.ask("GET", f"{root}/page/{name}").status == 200
            assert server.ask("GET", f"{root}/health").status == 200
            body = {"messages": [{"role": "user", "content": "count to 3"}]}
            assert server.ask("POST", f"{root}/v1/chat/completions", body).status == 401
            key = {"Authorization": "Bearer key"}
            assert (
                server.ask(
                    "POST", f"{root}/v1/chat/completions", body, headers=key
                ).status
                == 200
            )
        assert server.ask("GET", "/models/own").status == 200
        assert not re.search(
            r"""["'`]/(v1|stats|page)""",
            server.ask("GET", "/page/app.js").body.decode(),
        )


def test_head_is_get_without_its_body(server: Running) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/", "/page/app.js"):
        got, headed = server.ask("GET", path), server.ask("HEAD", path)
        assert (headed.status, headed.body) == (200, b"")
        assert headed.headers["content-type"] == got.headers["content-type"]
    assert server.ask("HEAD", "/v1/chat/completions").status == 405


def test_bodies_that_are_none(server: Running) -> None:
    path = "/v1/chat/completions"
    assert server.ask("POST", path, b"{").error["message"] == "the body is not JSON"
    assert server.ask("POST", path, b"\xff\xfe").status == 400
    assert server.ask("POST", path, b"[" * 60_000).status == 400
    deep = server.ask("POST", path, b"[" * 5000 + b"]" * 5000)  # which is JSON
    assert deep.error["message"] == "the body: it is nested too deeply"
    assert server.ask("POST", path, b"[]").status == 400
    assert (
        server.ask(
            "POST", path, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        ).status
        == 400
    )
    assert (
        server.ask(
            "POST",
            path,
            b'{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}',
        ).status
        == 400
    )
    assert (
        server.ask("POST", path, b"{}", headers={"Content-Type": "text/plain"}).status
        == 415
    )
    assert server.ask("PUT", path, b"{}").status == 405


def test_what_is_not_served_is_said(server: Running) -> None:
    for path, named in (
        ("/v1/realtime", "integrations"),
        ("/v1/audio/speech", "audio"),
        ("/v2", "/v1/chat"),
    ):
        reply = server.ask("POST", path, {})
        assert reply.status == 404
        assert named in reply.error["message"]


def test_request_ids_are_echoed(server: Running) -> None:
    reply = server.chat("count to 3", headers={"X-Request-Id": "mine-7"})
    assert reply.headers["x-request-id"] == "mine-7"
    assert reply.json["id"] == "chatcmpl-mine-7"
    made = server.chat("count to 3", headers={"X-Request-Id": "no good\u00e9"}).headers[
        "x-request-id"
    ]
    assert made != "no good\u00e9"
    twice = [
        threading.Thread(
            target=server.chat,
            args=("count to 9",),
            kwargs={"headers": {"X-Request-Id": "same"}},
        )
    ] * 1
    for thread in twice:
        thread.start()
    assert server.chat("count to 9", headers={"X-Request-Id": "same"}).status == 200
    for thread in twice:
        thread.join()


def test_unreadable_pictures_fail_alone_and_before_the_stream(server: Running) -> None:
    broken = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,aGVsbG8="},
    }
    for stream in (False, True):
        reply = server.chat([broken, text("describe the picture")], stream=stream)
        assert reply.status == 400
        assert reply.error["code"] == "InvalidImage"
    assert server.chat("count to 3").status == 200


def test_a_video_beside_a_picture(server: Running, tmp_path: Path) -> None:
    """The answer is the library's own for the same file, and how frames are taken can be said."""
    file = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(
        str(file),
        cv2.VideoWriter_fourcc(*"mp4v"),  # type: ignore[attr-defined]
        4.0,
        (112, 112),
    )
    for shade in range(8):
        frame = np.full((112, 112, 3), 255 - shade, dtype=np.uint8)
        cv2.circle(frame, (56, 56), 40, (20, 20, 220), -1)
        writer.write(frame)
    writer.release()
    clip = "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode()
    part = {"type": "video_url", "video_url": {"url": clip}, "num_frames": 4}
    content = [part, picture("red_circle.png"), text("describe the picture")]
    reply = server.chat(content, max_tokens=20).json
    with VLMBatcher(default_checkpoint()) as batcher:
        messages = [
            {
                "role": "user",
                "content": [
                    {"type": "video"},
                    {"type": "image"},
                    text("describe the picture"),
                ],
            }
        ]
        request = Request(
            messages=messages,
            images=[IMAGES / "red_circle.png"],
            videos=[Video(file, num_frames=4)],
            params=SamplingParams(max_tokens=20),
        )
        alone = batcher.submit_request(request).result()
    assert alone.error is None
    assert reply["choices"][0]["message"]["content"] == alone.text
    assert reply["usage"]["prompt_tokens"] == alone.usage.prompt_tokens
    assert server.chat([{**part, "speed": 2}, text("x")]).status == 400


def test_pictures_in_plain_base64(server: Running) -> None:
    part = {
        "type": "image_url",
        "image_url": data_uri("red_circle.png").partition(",")[2],
    }
    assert (
        server.chat([part, text("describe the picture")]).json["choices"][0]["message"][
            "content"
        ]
        == "a red circle"
    )


def test_the_access_log_has_a_json_line_for_each_request(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vlm_batch.server.access"):
        server.chat(
            [picture("red_circle.png"), text("describe the picture")],
            user="someone",
            headers={"X-Request-Id": "logged"},
        )
        wait_until(
            lambda: any("logged" in record.message for record in caplog.records),
            "the line",
        )
    (line,) = [
        json.loads(record.message)
        for record in caplog.records
        if "logged" in record.message
    ]
    assert line["status"] == 200
    assert line["path"] == "/v1/chat/completions"
    assert line["pictures"] == 1
    assert line["user"] == "someone"
    assert line["finish_reasons"] == ["stop"]
    assert line["seconds"] > 0
    assert "describe" not in json.dumps(line)


def _cut_off(server: Running, then: bytes) -> None:
    """A client that leaves in the middle of its body."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: own\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + then)


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_fault_is_a_line_in_the_log(
    server: Running,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its line in the access log says what was wrong; a trace is for defects of the server."""

    from vlm_batch.server.doors import chat

    def too_deep(*_: Any, **__: Any) -> Any:
        raise RecursionError("maximum recursion depth exceeded")

    png = base64.b64decode(data_uri("red_circle.png").partition(",")[2])
    parts = [
        {
            "type": "image_url",
            "image_url": {
                "url": f"data:image/png;base64,{base64.b64encode(png[:60]).decode()}"
            },
        },
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGVsbG8="}},
        text("too long " * 3000),
    ]
    own = {"X-Request-Id": "own"}
    with caplog.at_level(logging.INFO):
        for part in parts:
            reply = server.chat([part, text("x")], stream=stream, headers=own)
            assert reply.status == 400, reply.body
        for body in (b"{", b'{"messages": 3}', b"\xff"):
            assert (
                server.ask("POST", "/v1/chat/completions", body, headers=own).status
                == 400
            )
        with monkeypatch.context() as patched:
            patched.setattr(chat, "chat_ask", too_deep)
            assert server.chat("x", stream=stream, headers=own).status == 400
        _cut_off(server, b"")
        _cut_off(server, b'{"messages": [')
        asked = len(parts) + 3 + 1 + 2
        wait_until(
            lambda: sum(record.name == ACCESS for record in caplog.records) >= asked,
            "the lines",
        )
    # which commands do not show
    records = [record for record in caplog.records if record.name != "uvicorn.access"]
    lines = [record.getMessage() for record in records]
    assert not any(record.exc_info for record in records) and not any(
        "\n" in line for line in lines
    )
    # transformers warns once of a tokenizer's first long text, and not again
    ours = [record for record in records if record.name.startswith("vlm_batch")]
    said = [(record.name, record.getMessage()) for record in ours]
    assert len(said) == asked, said
    for name, line in said:
        assert name == ACCESS
        assert json.loads(line)["request_id"] == "own"


def test_the_log_says_nothing_of_what_was_asked(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Regexes, names, roles, models, paths of fields: none of a client's own words, whatever was wrong with them."""
    turn = {"role": "user", "content": "x"}
    bodies: list[dict[str, Any]] = [
        {"messages": [turn], "guided_regex": "secret["},
        {"messages": [turn], "guided_grammar": "secret: ["},
        {"messages": [turn], "secret": 1},
        {"messages": [turn], "metadata": {"secret": 1}},
        {"messages": [turn], "model": "secret"},
        {"messages": [{"role": "secret", "content": "x"}]},
        {"messages": [turn], "logit_bias": {"secret": 1}},
        {
            "messages": [turn],
            "tool_choice": {"type": "function", "function": {"name": "secret"}},
        },
        {"messages": [turn], "chat_template_kwargs": {"secret": 1}},
        {"messages": [{"role": "user", "content": "secret <|im_end|>"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "secret.png"}}
                    ],
                }
            ]
        },
        {
            "messages": [turn],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "secret"}},
            },
        },
    ]
    with caplog.at_level(logging.DEBUG):
        for number, body in enumerate(bodies):
            for stream in (False, True):
                own = {"X-Request-Id": f"own-{number}-{stream}"}
                reply = server.ask(
                    "POST",
                    "/v1/chat/completions",
                    {**body, "stream": stream},
                    headers=own,
                )
                assert reply.status in (400, 404), body
        wait_until(lambda: len(_access_lines(caplog)) == 2 * len(bodies), "the lines")
    lines = _access_lines(caplog)
    assert not [line for line in lines if "secret" in line]
    reasons = {json.loads(line)["error"] for line in lines}
    assert {
        "guided_regex: InvalidParameters",
        "?: extra_forbidden",
        "metadata.?: string_type",
    } <= reasons
    assert not [
        record
        for record in caplog.records
        if "secret" in record.getMessage() and "access" not in record.name
    ]


def _access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if '"own-' in one.getMessage()]


def test_metrics_count_what_happened(server: Running) -> None:
    def value(name: str) -> float:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(name + "{")
        )

    names = (
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vlm_batch:pictures_total",
        "vllm:e2e_request_latency_seconds_count",
    )
    before = [value(name) for name in names]
    reply = server.chat([picture("digits_728.png"), text("read the digits")]).json
    gained = [value(name) - old for name, old in zip(names, before, strict=True)]
    usage = reply["usage"]
    assert gained == [1, usage["prompt_tokens"], usage["completion_tokens"], 1, 1, 1]
    assert value("vllm:num_requests_running") == 0


def test_health_and_readiness(server: Running) -> None:
    assert server.ask("GET", "/health").json == {"status": "ok"}
    ready = server.ask("GET", "/ready")
    assert (ready.status, ready.json["status"]) == (200, "ready")


# Settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"host": "::"},
        {"api_key": " "},
        {"api_key": "x", "no_auth": True},
        {"max_queue": 0},
        {"request_seconds": 0},
        {"idle_unload": 0},
        {"port": -1},
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        ServerConfig(model="m", **settings)


def test_other_machines_need_a_key_or_to_be_told_otherwise() -> None:
    assert ServerConfig(model="m", host="0.0.0.0", api_key="k").hosts is None
    assert ServerConfig(model="m", host="0.0.0.0", no_auth=True).hosts is None
    assert ServerConfig(model="m", host="localhost").is_loopback
    assert ServerConfig(model="m", host="127.0.0.3").is_loopback


def test_the_command_lines_flags_become_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--port",
        "0",
        "--max-tokens",
        "9",
        "--allow-urls",
        "--idle-unload",
        "5",
        "--max-memory-gb",
        "1.5",
        "--no-warm-up",
    ]
    args = cli.parser().parse_args(["serve", *flags])
    config = serve.config_of(args, {serve.API_KEY: "from the environment"})
    assert config.name == "reader"
    assert config.api_key == "from the environment"
    assert (
        config.default_max_tokens,
        config.allow_urls,
        config.idle_unload,
        args.warm_up,
    ) == (9, True, 5.0, False)
    assert config.max_memory == 1.5 * 2**30
    for wrong in (
        ["--host", "0.0.0.0"],
        ["--allow-dir", "/no/such/folder"],
        ["--max-queue", "0"],
    ):
        assert cli.main(["serve", *wrong]) == 2
    said = capsys.readouterr().err
    assert "--no-auth" in said
    assert "/no/such/folder" in said


def test_the_memory_limit_is_the_devices_unless_it_is_said() -> None:
    limits = {
        said: serve.config_of(
            cli.parser().parse_args(["serve", *said.split()]), {}
        ).max_memory
        for said in ("", "--max-memory-gb 0", "--max-memory-gb 2")
    }
    assert limits == {
        "": default_limit(),
        "--max-memory-gb 0": None,
        "--max-memory-gb 2": 2 << 30,
    }
    assert 2**28 < default_limit() < 2**44


@pytest.mark.parametrize(
    ("said", "most"), [("", None), ("--max-bytes 30MB", 30_000_000)]
)
def test_memory_for_keys_and_values_is_bounded_by_a_flag(
    said: str, most: int | None
) -> None:
    args = cli.parser().parse_args(["serve", *said.split()])
    with serve.load_batcher(args) as batcher:
        found = batcher.stats().max_kv_bytes
    assert found is not None and (found == most if most is not None else found > 10**8)


def test_sizes_of_pictures_are_bounded_by_flags() -> None:
    """--max-pixels is the batcher's own bound: pictures are seen no larger, and nobody may ask for more."""
    flags = [
        "--model",
        str(default_checkpoint()),
        "--max-pixels",
        "1568",
        "--min-pixels",
        "784",
    ]
    args = cli.parser().parse_args(["serve", *flags])
    with serving(lambda: serve.load_batcher(args)) as small, serving() as usual:
        asked_of = [
            one.ask("POST", "/v1/chat/completions", {"messages": asked("receipt.jpg")})
            for one in (small, usual)
        ]
        tokens = [
            reply.json["usage"]["prompt_tokens_details"]["image_tokens"]
            for reply in asked_of
        ]
        assert 0 < tokens[0] <= 2 < tokens[1]
        assert (
            small.chat("count to 3").json["choices"][0]["message"]["content"] == "1 2 3"
        )
        refused = small.chat([picture("receipt.jpg"), text("x")], max_pixels=10**6)
        assert (refused.status, "1,568" in refused.error["message"]) == (400, True)


def test_thinking_by_flag_needs_a_template_that_reads_it() -> None:
    with serving(enable_thinking=True) as server:
        reply = server.chat("count to 3")
        assert reply.status == 503
        assert "does not read enable_thinking" in reply.error["message"]


def test_a_request_has_so_much_time() -> None:
    with serving(request_seconds=0.3) as hurried:
        late = hurried.chat("count to 12", **ENDLESS)
        assert late.status == 504
        wait_until(lambda: rows(hurried) == 0, "the late request to end")
        streamed = hurried.chat("count to 12", stream=True, **ENDLESS).body.decode()
        events = [
            json.loads(line[6:])
            for line in streamed.splitlines()
            if line.startswith("data: {")
        ]
        assert "not done within" in events[-1]["error"]["message"]
        assert streamed.endswith("data: [DONE]\n\n")


def test_nobody_waits_while_memory_is_short() -> None:
    def one_row() -> VLMBatcher:
        return VLMBatcher(default_checkpoint(), max_rows=1)

    with serving(one_row, max_memory=1) as busy:
        assert busy.chat("count to 3").status == 200  # nobody waits
        streams: list[socket.socket] = []
        try:
            for count in (1, 2):
                streams.append(begin_stream(busy))
                wait_until(
                    lambda count=count: rows(busy) == count and decoding(busy),  # type: ignore[misc]
                    "a row",
                    5,
                )
            reply = busy.chat("count to 3")
            assert reply.status == 429
            assert "bytes" in reply.error["message"]
        finally:
            for stream in streams:
                stream.close()


def test_an_idle_model_is_let_go_of_and_comes_back() -> None:
    with serving(idle_unload=0.5) as server:
        assert server.chat("count to 3").status == 200
        wait_until(
            lambda: server.server.service.state == "idle", "the model to be let go of"
        )
        assert server.ask("GET", "/ready").json["status"] == "idle"
        assert server.ask("GET", "/stats").json["batch"] is None
        assert (
            server.chat("count to 4").json["choices"][0]["message"]["content"]
            == "1 2 3 4"
        )


def test_a_model_that_cannot_be_loaded_is_said() -> None:
    def broken() -> VLMBatcher:
        raise FileNotFoundError("/secret/place/model.safetensors is not there")

    with serving(broken) as server:
        reply = server.chat("count to 3")
        assert reply.status == 503
        assert "FileNotFoundError" in reply.error["message"]
        assert "/secret" not in reply.body.decode()
        assert server.ask("GET", "/ready").status == 503
        assert server.ask("GET", "/health").status == 200


def test_stopping_lets_answers_end_and_ends_the_rest_in_order() -> None:
    with serving(shutdown_seconds=1.0) as server:
        connection = begin_stream(server)
        wait_until(lambda: rows(server) == 1, "the stream to run")
        server.server.should_exit = True
        connection.settimeout(20)
        said = b""
        while part := connection.recv(65536):
            said += part
        connection.close()
    assert b"shutting down" in said
    # the last chunk: the stream was closed, not cut
    assert said.rstrip().endswith(b"0")
    assert b"data: [DONE]" in said


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """A process of its own: it says where it listens, answers, and ends in order at SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vlm_batch",
        "serve",
        "--port",
        str(port),
        "--shutdown-timeout",
        "1",
    ]
    with (tmp_path / "err").open("wb") as errors, (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        running = Running(None, port)  # type: ignore[arg-type]
        try:
            wait_until(
                lambda: process.poll() is not None or _is_up(port),
                "the server to listen",
            )
            assert (
                running.chat("count to 3").json["choices"][0]["message"]["content"]
                == "1 2 3"
            )
            connection = begin_stream(running)
            assert connection.recv(100)
            process.terminate()
            connection.settimeout(20)
            said = b""
            while part := connection.recv(65536):
                said += part
            connection.close()
            assert said.endswith(b"0\r\n\r\n")
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()
            process.wait()
    assert f"http://127.0.0.1:{port}" in (tmp_path / "err").read_text()
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [
        line["status"] for line in lines if line["path"] == "/v1/chat/completions"
    ] == [200, 200]


def test_a_first_interrupt_says_what_is_waited_for_and_a_second_ends_it(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path / "err"
    with log.open("wb") as errors:
        command = [
            sys.executable,
            "-m",
            "vlm_batch",
            "serve",
            "--port",
            str(port),
            "--shutdown-timeout",
            "600",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            wait_until(
                lambda: process.poll() is not None or _is_up(port),
                "the server to listen",
            )
            connection = begin_stream(Running(None, port))  # type: ignore[arg-type]
            assert connection.recv(100)
            process.send_signal(signal.SIGINT)
            said = "waiting up to 600 s for 1 request; Ctrl-C again ends now"
            wait_until(
                lambda: said in log.read_text(), "the server to say what it waits for"
            )
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            connection.settimeout(30)
            told = b"".join(iter(lambda: connection.recv(65536), b""))
            connection.close()
            assert b"shutting down" in told
            assert told.endswith(b"0\r\n\r\n")
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def _is_up(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=1),
    ):
        return True
    return False


# Faults ------------------------------------------------------------------------------------------------------------


def test_a_failing_step_is_a_500_with_a_reason_and_the_next_request_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vlm_batch.engine.generator import BatchGenerator

    step, failing = BatchGenerator.step, threading.Event()

    def sometimes(self: BatchGenerator) -> Any:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("the device is gone: /usr/lib/metal/driver.so")
        return step(self)

    monkeypatch.setattr(BatchGenerator, "step", sometimes)
    with serving() as server:
        failing.set()
        whole = server.chat("count to 5")
        assert whole.status == 500
        assert "RuntimeError: the device is gone" in whole.error["message"]
        assert "/usr" not in whole.body.decode()
        assert "Traceback" not in whole.body.decode()
        assert (
            server.chat("count to 5").json["choices"][0]["message"]["content"]
            == "1 2 3 4 5"
        )
        failing.set()
        assert server.chat("count to 5", stream=True).status == 500
        connection = begin_stream(server)
        wait_until(lambda: rows(server) == 1, "the stream to run")
        assert connection.recv(200)
        failing.set()
        said = b""
        while b"[DONE]" not in said:
            said += connection.recv(65536)
        connection.close()
        assert b'"type":"server_error"' in said
        assert server.chat("count to 5").status == 200


def test_an_engine_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_batch.engine.generator import BatchGenerator
    from vlm_batch.runtime import watchdog

    step, go_on = BatchGenerator.step, threading.Event()

    def hanging(self: BatchGenerator) -> Any:
        assert go_on.wait(120)
        return step(self)

    monkeypatch.setattr(BatchGenerator, "step", hanging)
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.3)
    with serving() as server:
        assert server.ask("GET", "/ready").status == 200
        assert (
            "vlm_batch:stalled_seconds" in server.ask("GET", "/metrics").body.decode()
        )
        connection = begin_stream(server)
        wait_until(
            lambda: server.ask("GET", "/ready").status == 503, "the stall to be noticed"
        )
        assert server.ask("GET", "/ready").json["status"] == "stalled"
        assert server.ask("GET", "/health").status == 200
        go_on.set()
        wait_until(
            lambda: server.ask("GET", "/ready").status == 200, "the engine to step"
        )
        connection.close()


def test_a_defect_of_the_server_is_a_500_without_a_trace(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm_batch.server.doors import chat

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("at /home/somebody/app.py")

    monkeypatch.setattr(chat, "chat_ask", broken)
    reply = server.chat("count to 3")
    assert reply.status == 500
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert b"somebody" not in reply.body
    assert b"Zero" not in reply.body
