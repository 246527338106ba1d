"""Tool calls of a running model through the openai package: forced, free and refused, whole and streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.serving import Running, picture, serving, text
from tests.test_server_answers import joined
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{# {{ tool_call.name }} <tool_call> </tool_call> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Bern", "Basel"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "the time"},
}
HELLO = [{"role": "user", "content": "count to 3"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_tools(tmp_path_factory.mktemp("tools") / "qwen2_vl")


def copy_with_tools(made: Path) -> Path:
    """The embedded checkpoint with tools in its template, and with the marks of calls among its tokens."""
    shutil.copytree(default_checkpoint(), made)
    template = json.loads((made / "chat_template.json").read_text())["chat_template"]
    (made / "chat_template.json").write_text(
        json.dumps({"chat_template": TEMPLATE + template})
    )
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    tokenizer.save_pretrained(made)
    (made / "chat_template.jinja").write_text(TEMPLATE + template)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(lambda: VLMBatcher(str(folder), max_rows=8)) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:  # its overloads want literals
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def called(choice: Any) -> list[tuple[str, Any]]:
    assert choice.finish_reason == "tool_calls"
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]


def test_a_call_that_is_required(client: Any) -> None:
    answer = client.chat.completions.create(
        model="qwen2_vl",
        messages=[
            {
                "role": "user",
                "content": [picture("red_circle.png"), text("describe the picture")],
            }
        ],
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        n=3,
        temperature=2.0,
        seed=3,
    )
    for choice in answer.choices:
        ((name, arguments),) = called(choice)
        assert choice.message.content is None
        if name == "weather":
            assert set(arguments) == {"place", "days"}
            assert arguments["place"] in ("Bern", "Basel")
            assert 1 <= arguments["days"] <= 9
        else:
            assert (name, arguments) == ("clock", {})


def test_a_named_call_whole_and_streamed(server: Running, client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "messages": HELLO,
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    whole = client.chat.completions.create(**asked).choices[0]
    ((name, arguments),) = called(whole)
    assert name == "weather"
    message, reason = joined(server, asked)
    assert reason == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == arguments
    assert message["content"] == ""


def test_free_answers_with_strict_tools(server: Running, client: Any) -> None:
    """A model that begins a call, here by a bias, has to end it rightly; one that does not says what it would have said."""
    model = server.server.service.model
    assert model is not None
    start = model.batcher.processing.tokenizer.convert_tokens_to_ids("<tool_call>")
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    asked: dict[str, Any] = {"model": "qwen2_vl", "messages": HELLO, "max_tokens": 200}
    free = client.chat.completions.create(
        **asked, tools=[strict], parallel_tool_calls=False
    )
    plain = client.chat.completions.create(**asked, tools=[WEATHER])
    assert not plain.choices[0].message.tool_calls
    assert free.choices[0].message.content == plain.choices[0].message.content
    biased = client.chat.completions.create(
        **asked, tools=[strict], parallel_tool_calls=False, logit_bias={str(start): 100}
    )
    ((name, arguments),) = called(biased.choices[0])
    assert name == "weather"
    assert set(arguments) == {"place", "days"}


def test_an_answer_that_is_cut_off_is_no_call(client: Any) -> None:
    cut = client.chat.completions.create(
        model="qwen2_vl",
        messages=HELLO,
        tools=[CLOCK],
        tool_choice="required",
        max_tokens=3,
    )
    assert cut.choices[0].finish_reason == "length"


def test_a_forced_call_without_its_name_is_no_content(client: Any) -> None:
    """Wherever it is cut: the marks and half a name are no words for anybody."""
    asked = {
        "model": "qwen2_vl",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
    }
    for length in range(1, 9):
        cut = client.chat.completions.create(**asked, max_tokens=length)
        assert not cut.choices[0].message.content, length
        pieces = client.chat.completions.create(**asked, max_tokens=length, stream=True)
        assert not "".join(
            piece.choices[0].delta.content or "" for piece in pieces if piece.choices
        )


def test_the_tools_that_are_allowed(server: Running) -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": tools},
        }

    asked = {"tools": [WEATHER, CLOCK], "max_tokens": 200}
    reply = server.chat(
        "count to 3", **asked, tool_choice=choice("required", "weather")
    )
    assert {
        call["function"]["name"]
        for call in reply.json["choices"][0]["message"]["tool_calls"]
    } == {"weather"}
    assert (
        server.chat("count to 3", **asked, tool_choice=choice("auto", "clock")).status
        == 200
    )
    reply = server.chat("count to 3", **asked, tool_choice=choice("auto", "other"))
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
            "'x'",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "no other",
        ),
        ({"tools": [WEATHER], "tool_choice": "required", "stop": "a"}, "stop", "stop"),
        ({"tools": [WEATHER], "tool_choice": "any"}, None, ""),
    ],
    ids=["no-tools", "unknown", "two-forms", "stop", "any"],
)
def test_what_cannot_be_is_refused(
    server: Running, fields: dict[str, Any], param: str | None, said: str
) -> None:
    reply = server.ask("POST", "/v1/chat/completions", {"messages": HELLO, **fields})
    assert reply.status == 400
    assert said in reply.error["message"]
    assert param is None or reply.error["param"] in (param, None)


def test_a_model_without_a_form_of_calls() -> None:
    with serving() as server:
        reply = server.ask(
            "POST",
            "/v1/chat/completions",
            {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"},
        )
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
        assert "no form for tool calls" in reply.error["message"]
