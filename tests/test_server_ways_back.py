"""Every kind of answer is what openai's own types say, and is taken again as a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
)
from pydantic import TypeAdapter

from tests.serving import Running, picture, serving, text
from tests.test_server_tools import CLOCK, TEMPLATE, WEATHER, copy_with_tools
from vlm_batch import VLMBatcher

#: Makes the server read thinking: marks in a comment of the template.
THINKS = "{# <think> </think> #}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
#: What an answer is made of, and fields that bring it about.
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "cut": {"max_tokens": 1},
    "nothing": {"guided_regex": "(x)?", "max_tokens": 1, "logit_bias": {}},
    "reasoning": {"guided_regex": "<think>so it is</think>yes"},
    "thinking alone": {"guided_regex": "<think>so it is</think>"},
    "call": {"tools": [WEATHER], "tool_choice": "required"},
    "calls": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "max_tokens": 80,
    },
    "one call": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
    },
    "cut call": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 3},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA},
        }
    },
    "cut schema": {"response_format": {"type": "json_object"}, "max_tokens": 3},
    "choice": {"guided_choice": ["yes", "no"]},
    "stop": {"stop": ["3"]},
    "special": {"skip_special_tokens": False},
}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just(True),
        "n": st.just(2),
        "return_token_ids": st.just(True),
        "temperature": st.just(1.5),
        "seed": st.just(3),
    },
)
OF_STREAMS = st.sampled_from(
    [
        None,
        {},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ]
)
CONTENT = [picture("red_circle.png"), text("count to 4")]
ASKED: dict[str, Any] = {"role": "user", "content": CONTENT}
IS_MESSAGE: TypeAdapter[Any] = TypeAdapter(ChatCompletionMessageParam)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = copy_with_tools(tmp_path_factory.mktemp("back") / "qwen2_vl")
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    assert template.startswith(TEMPLATE)
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": THINKS + template})
    )
    (folder / "chat_template.jinja").write_text(THINKS + template)
    with serving(lambda: VLMBatcher(folder, max_rows=8)) as running:
        yield running


def chat(server: Running, **body: Any) -> Any:
    reply = server.ask("POST", "/v1/chat/completions", {"max_tokens": 60, **body})
    assert reply.status == 200, (reply.body[:400], body)
    return reply


def of_stream(lines: bytes) -> ChatCompletion:
    """Read a stream as openai's helpers do."""
    state = ChatCompletionStreamState()
    for line in lines.decode().splitlines():
        if line.startswith("data: {"):
            state.handle_chunk(ChatCompletionChunk.model_validate_json(line[6:]))
    # what is asked for at the end raises for an answer that was cut
    return state.current_completion_snapshot


# openai's own, of what it has parsed
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(options=OPTIONS, stream=OF_STREAMS)
def test_answers_are_what_the_types_say_and_go_back(
    server: Running, kind: str, options: dict[str, Any], stream: dict[str, Any] | None
) -> None:
    fields = {**options, **KINDS[kind]}
    if stream is None:
        answer = ChatCompletion.model_validate(
            chat(server, messages=[ASKED], **fields).json
        )
    else:
        fields |= {"stream": True, "stream_options": stream}
        answer = of_stream(chat(server, messages=[ASKED], **fields).body)
    assert len(answer.choices) == fields.get("n", 1)
    for choice in answer.choices:
        message = choice.message
        # the type has no nulls
        IS_MESSAGE.validate_python(message.model_dump(exclude_none=True))
        forms: list[dict[str, Any]] = [
            message.to_dict(),
            message.model_dump(),
            message.model_dump(exclude_none=True),
        ]
        for form in forms:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                for call in form.get("tool_calls") or ()
            ]
            chat(server, messages=[ASKED, form, *results, ASKED], max_tokens=1)


@pytest.mark.parametrize(
    ("kind", "has"),
    [("reasoning", "reasoning_content"), ("thinking alone", "reasoning_content"), ("call", "tool_calls"),
     ("calls", "tool_calls"), ("one call", "tool_calls"), ("schema", "content")],
)  # fmt: skip
def test_the_kinds_come_about(server: Running, kind: str, has: str) -> None:
    (choice,) = chat(server, messages=[ASKED], **KINDS[kind]).json["choices"]
    assert choice["message"][has]


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(options=OPTIONS, stream=OF_STREAMS, most=st.sampled_from([1, 20]))
def test_texts_are_what_the_types_say(
    server: Running, options: dict[str, Any], stream: dict[str, Any] | None, most: int
) -> None:
    """``echo`` apart: its first log-probability is null, as in OpenAI's own answers, which the type leaves out."""
    body = {
        **options,
        "prompt": "<|im_start|>user\ncount to 3<|im_end|>\n<|im_start|>assistant\n",
        "max_tokens": most,
    }
    if "logprobs" in body:
        body["logprobs"] = 2
    if stream is not None:
        body |= {"stream": True, "stream_options": stream}
    reply = server.ask("POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    said = [
        line[6:]
        for line in reply.body.decode().splitlines()
        if line.startswith("data: {")
    ]
    for one in said if stream is not None else [reply.body]:
        Completion.model_validate_json(
            one
        ) if stream is None else Completion.model_validate(_with_end(json.loads(one)))


def _with_end(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk with the end that the type wants of every one, which OpenAI's own have not."""
    return {
        **chunk,
        "choices": [
            {**one, "finish_reason": one["finish_reason"] or "stop"}
            for one in chunk["choices"]
        ],
    }
