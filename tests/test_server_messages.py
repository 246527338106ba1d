"""Anthropic's door: through its own package, by its own types, and with bodies as Claude Code writes them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message, MessageParam, RawMessageStreamEvent
from PIL import Image
from pydantic import TypeAdapter

from tests.serving import IMAGES, Reply, Running, data_uri, serving
from tests.test_server_tools import copy_with_tools
from vlm_batch import VLMBatcher
from vlm_batch.server.config import Key

PDF = Path(__file__).parent / "data" / "locked.pdf"
IS_MESSAGE = TypeAdapter[Any](MessageParam)
IS_EVENT = TypeAdapter[Any](RawMessageStreamEvent)
ASKED = {"role": "user", "content": "count to 3"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Bern", "Basel"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_tools(tmp_path_factory.mktemp("messages") / "qwen2_vl")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(lambda: VLMBatcher(str(folder), max_rows=8)) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:  # its overloads want literals
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def ask(server: Running, **body: Any) -> Reply:
    said = {"max_tokens": 60, "messages": [ASKED], **body}
    return server.ask("POST", "/v1/messages", said)


def image(name: str = "red_circle.png") -> dict[str, Any]:
    data = data_uri(name).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    events = []
    for block in reply.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_chat_whole_and_streamed(server: Running, client: Any) -> None:
    """The answer is the one of the chat door."""
    wanted = server.chat("count to 3").json
    asked: dict[str, Any] = {"model": "qwen2_vl", "max_tokens": 60, "messages": [ASKED]}
    whole = client.messages.create(**asked)
    assert [block.text for block in whole.content] == ["1 2 3"]
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == (
        "end_turn",
        None,
        "assistant",
    )
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert total == wanted["usage"]["prompt_tokens"]
    assert whole.usage.output_tokens == wanted["usage"]["completion_tokens"]
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "1 2 3"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole._request_id


def test_events_come_in_anthropics_order(server: Running) -> None:
    events = events_of(ask(server, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    for event in events:
        IS_EVENT.validate_python(event)


def test_pictures_of_every_place(server: Running, client: Any) -> None:
    """In a turn, in a tool's result, and as pages of a document."""
    wanted = server.chat(
        [{"type": "image_url", "image_url": {"url": data_uri("red_circle.png")}},
         {"type": "text", "text": "describe the picture"}]
    ).json["choices"][0]["message"]["content"]  # fmt: skip
    turn = {"role": "user", "content": [image(), text("describe the picture")]}
    answer = client.messages.create(model="qwen2_vl", max_tokens=60, messages=[turn])
    assert answer.content[0].text == wanted == "a red circle"
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [text("see"), image()],
        "is_error": False,
    }
    turns = [
        ASKED,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, text("describe the picture")]},
    ]
    reply = ask(server, messages=turns, tools=[WEATHER])
    assert reply.status == 200, reply.body
    bare = {"role": "user", "content": [{**result, "content": "see"}]}
    alone = ask(server, messages=[*turns[:2], bare], tools=[WEATHER])
    more = reply.json["usage"]["input_tokens"] - alone.json["usage"]["input_tokens"]
    assert more > 5  # the picture's


@pytest.mark.parametrize("form", ["application/pdf", "text/plain"])
def test_documents(server: Running, form: str) -> None:
    data = pdf_of_picture()
    source: dict[str, Any] = {"type": "base64", "media_type": form, "data": data}
    if form == "text/plain":
        source = {"type": "text", "media_type": form, "data": "count to 3"}
    document = {"type": "document", "source": source, "title": None}
    turn = {"role": "user", "content": [document, text("describe the picture")]}
    counted = server.ask("POST", "/v1/messages/count_tokens", {"messages": [turn]})
    assert counted.status == 200, counted.body
    reply = ask(server, messages=[turn], max_tokens=9)
    assert reply.status == 200, reply.body
    usage = reply.json["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json == {"input_tokens": total}
    alone = ask(server, messages=[{"role": "user", "content": "describe the picture"}])
    assert total > alone.json["usage"]["input_tokens"]
    said = reply.json["content"][0]["text"]
    assert ("circle" in said or "red" in said) == (form == "application/pdf"), said


def pdf_of_picture() -> str:
    made = io.BytesIO()
    Image.open(IMAGES / "red_circle.png").convert("RGB").save(made, "PDF")
    return base64.b64encode(made.getvalue()).decode()


def test_a_document_that_cannot_be_read(server: Running) -> None:
    for data in (PDF.read_bytes(), b"\xff\xfe\x00"):
        coded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": coded}
        turn = {"role": "user", "content": [{"type": "document", "source": source}]}
        reply = ask(server, messages=[turn])
        assert reply.status == 400, reply.body
        assert "the document" in reply.error["message"]
        assert "/tmp" not in reply.error["message"]


def test_tokens_are_counted_as_used(server: Running, client: Any) -> None:
    turns = [{"role": "user", "content": [image(), text("describe the picture")]}]
    for tools in ([], [WEATHER]):
        asked = {
            "model": "qwen2_vl",
            "messages": turns,
            "tools": tools,
            "system": "be short",
        }
        counted = client.messages.count_tokens(**asked)
        usage = client.messages.create(max_tokens=1, **asked).usage
        assert (
            counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        )


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(client: Any, stream: bool) -> None:
    """Anthropic's tool loop: what came goes back as it is."""
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "max_tokens": 60,
        "tools": [WEATHER],
        "messages": [ASKED],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    if stream:
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.name == "weather"
    assert use.input["place"] in ("Bern", "Basel")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sun"}
    turns = [
        ASKED,
        {"role": "assistant", "content": [one.model_dump() for one in answer.content]},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(
        **{**asked, "messages": turns, "tool_choice": {"type": "none"}}
    )
    assert again.stop_reason in ("end_turn", "max_tokens")
    for turn in turns:
        IS_MESSAGE.validate_python(turn)


def test_a_runner_of_tools_goes_on_without_a_thread(
    server: Running, client: Any
) -> None:
    """Runners ask for a conversation that the server keeps, and read in the refusal that they are to send it whole."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(place: Literal["Bern", "Basel"]) -> str:
        """the weather"""
        asked.append(place)
        return "sun"

    runner = client.beta.messages.tool_runner(
        model="qwen2_vl",
        max_tokens=60,
        max_iterations=2,
        messages=[ASKED],
        tools=[weather],
        tool_choice={"type": "any"},
    )
    runner.until_done()
    assert set(asked) <= {"Bern", "Basel"}
    assert asked
    error = ask(server, thread={"type": "create"}).error
    assert error["message"].startswith("thread: thread is not supported")
    assert ask(server, thread=None).status == 200


def test_ends(server: Running) -> None:
    assert ask(server, max_tokens=1).json["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["2"]).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "2")
    assert stopped["content"][0]["text"] == "1 "
    begun = [ASKED, {"role": "assistant", "content": "1"}]
    assert ask(server, messages=begun).json["content"][0]["text"].strip() == "2 3"
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    said = ask(server, output_config=form).json["content"][0]["text"]
    assert json.loads(said) == {"a": 1}


def test_turns_of_one_role_are_one(server: Running) -> None:
    halves = [
        {"role": "user", "content": "count "},
        {"role": "user", "content": [text("to 3")]},
    ]
    assert ask(server, messages=halves).json["content"][0]["text"] == "1 2 3"


DRAFT = "http://json-schema.org/draft-07/schema#"
#: As Claude Code writes it, with an older one's fields; ``tests/data/clients/claude_code.json`` is what the program wrote.
CLAUDE_CODE: dict[str, Any] = {
    "model": "qwen2_vl",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch=a7eb2;"),
        {**text("You are Claude Code, Anthropic's official CLI for Claude."), "cache_control": {"type": "ephemeral"}},
        {**text("You are an interactive CLI tool. "), "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                text("<system-reminder>\nAs you answer, use this.\n</system-reminder>"),
                {**text("count to 3"), "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {**WEATHER, "name": f"Tool{number}", "input_schema": {"$schema": DRAFT, **WEATHER["input_schema"]}}
        for number in range(24)
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
}  # fmt: skip


def test_claude_code_is_answered_and_its_beginning_is_kept(folder: Path) -> None:
    """A bill's address that changes keeps nobody from the kept beginning."""
    with serving(lambda: VLMBatcher(str(folder), max_rows=8), any_model=True) as server:
        body = json.loads(json.dumps(CLAUDE_CODE))
        body["tools"] = body["tools"][:4]  # the tiny model's context is short
        body |= {"model": "claude-sonnet-4-5", "max_tokens": 20}
        path = "/v1/messages?beta=true"
        first = events_of(server.ask("POST", path, body))
        body["system"][0]["text"] = "x-anthropic-billing-header: cch=00000;"
        again = events_of(server.ask("POST", path, body))
        assert first[-1]["type"] == again[-1]["type"] == "message_stop"
        usage = again[-2]["usage"]
        assert usage["cache_read_input_tokens"] > usage["input_tokens"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "x"}}]}]},
         "messages[0].content[0].source.media_type"),
        ({"top_p": 7}, "top_p"),
        ({"stop_sequences": ["a", 3]}, "stop_sequences[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(
    server: Running, client: Any, body: dict[str, Any], place: str
) -> None:
    reply = ask(server, **body)
    assert (reply.status, reply.json["type"]) == (400, "error"), reply.body
    assert reply.error["type"] == "invalid_request_error"
    assert place in reply.error["message"], reply.error
    assert reply.json["request_id"] == reply.headers["request-id"]


def test_errors_before_the_body_and_keys(folder: Path, server: Running) -> None:
    for path, data, status, kind in (
        ("/v1/messages", b"{", 400, "invalid_request_error"),
        ("/v1/messages", b"", 400, "invalid_request_error"),
        ("/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("/v1/messages", json.dumps({"model": "other", "max_tokens": 1, "messages": [ASKED]}).encode(), 404, "not_found_error"),
    ):  # fmt: skip
        reply = server.ask("POST", path, data)
        assert (reply.status, reply.json["type"], reply.error["type"]) == (
            status,
            "error",
            kind,
        )
    with serving(lambda: VLMBatcher(str(folder)), keys=(Key("mine"),)) as keyed:
        made = anthropic.Anthropic(base_url=keyed.url, api_key="other", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            made.messages.create(model="qwen2_vl", max_tokens=3, messages=[ASKED])  # type: ignore[typeddict-item,list-item]
        for right in ({"api_key": "mine"}, {"auth_token": "mine"}):
            made = anthropic.Anthropic(base_url=keyed.url, max_retries=0, **right)  # type: ignore[arg-type]
            answer = made.messages.create(
                model="qwen2_vl", max_tokens=3, messages=[ASKED]
            )  # type: ignore[typeddict-item,list-item]
            assert isinstance(answer, Message)
