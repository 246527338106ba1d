"""Reasoning and tool calls on the wire: a scripted model's events through the server, whole and streamed."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from mlx_vlm.tools import load_tool_module
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from transformers import AutoTokenizer

from tests.serving import Running, serving
from vlm_batch.assets import default_checkpoint
from vlm_batch.handle import Handle
from vlm_batch.loading.recommended import RecommendedSampling
from vlm_batch.models import families
from vlm_batch.registry import ModelSpec
from vlm_batch.server.answers import AnswerReader, Dialect, UnreadableCall
from vlm_batch.types import Event, Request, Result, Stats, Usage

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{# {{ tool_call.name }} <tool_call> </tool_call> </think> #}{% if enable_thinking %}<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern", "days": [1, 2]}}\n</tool_call>'


@dataclass
class Scripted:
    """Stands for ``Processing`` of a model that reasons and calls tools."""

    tokenizer: Any = field(
        default_factory=lambda: AutoTokenizer.from_pretrained(default_checkpoint())
    )
    chat_template: str = TEMPLATE
    template: Any = field(
        default_factory=lambda: SimpleNamespace(
            reads=frozenset({"tools", "enable_thinking"})
        )
    )

    @property
    def processor(self) -> Any:
        return self.tokenizer


class ScriptedBatcher:
    """Answers every request with the same text, in pieces of a few characters, as a model's tokens are."""

    max_context = 100
    recommended_sampling = RecommendedSampling()

    def __init__(self, answer: str, piece: int = 3) -> None:
        self.answer = answer
        self.piece = piece
        self.processing = Scripted()
        self.requests: list[Request] = []

    @property
    def spec(self) -> ModelSpec:
        return families()[0]

    def submit_request(self, request: Request) -> Handle:
        self.requests.append(request)
        handle = Handle(request.request_id or "", lambda _: False)
        pieces = [
            self.answer[at : at + self.piece]
            for at in range(0, len(self.answer), self.piece)
        ]

        def answer() -> None:
            for text in pieces:
                handle.push(Event(handle.request_id, token=5, text=text))
            usage = Usage(prompt_tokens=3, completion_tokens=len(pieces))
            handle.push(
                Event(
                    handle.request_id,
                    result=Result(
                        request_id=handle.request_id, text=self.answer, usage=usage
                    ),
                )
            )

        threading.Thread(target=answer).start()
        return handle

    def stats(self) -> Stats:
        return Stats(*[0] * 9)

    def close(self) -> None:
        pass


class LastFirstBatcher(ScriptedBatcher):
    """Answers ``n`` times, the last answer first: which one of a batch goes first is nobody's promise."""

    def submit_request(self, request: Request) -> Handle:
        handle = Handle(request.request_id or "", lambda _: False)
        name = handle.request_id
        facts = {"prompt_tokens": 3, "prompt_token_ids": (7, 8, 9)}
        for index in reversed(range(request.params.n)):
            text = f"answer {index}"
            handle.push(Event(name, token=5, text=text, index=index, **facts))  # type: ignore[arg-type]
            usage = Usage(prompt_tokens=3, completion_tokens=1)
            end = Result(
                request_id=name, text=text, usage=usage, prompt_token_ids=(7, 8, 9)
            )
            is_last = index == 0
            handle.push(
                Event(name, index=index, answer=end, result=end if is_last else None)
            )
        return handle


def test_answers_begin_in_order_whichever_has_the_first_token() -> None:
    """openai's helpers append a choice that they do not know, so that a second one before the first is an error."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields = {
        "n": 3,
        "stream": True,
        "stream_options": usage,
        "return_token_ids": True,
    }
    said = {"messages": [{"role": "user", "content": "hello"}]}
    echoed = {"prompt": ["hello", "dear"], "echo": True}
    batcher = LastFirstBatcher("")
    with serving(lambda: batcher) as server:  # type: ignore[arg-type,return-value]
        chat = chunks(server, "/v1/chat/completions", {**said, **fields})
        texts = chunks(server, "/v1/completions", {**echoed, **fields})
    openings, rest = chat[:3], chat[3:-1]
    for index, chunk in enumerate(openings):
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["delta"]["role"]) == (index, "assistant")
        assert chunk["prompt_token_ids"] == [7, 8, 9]
        assert chunk["usage"]["prompt_tokens"] == 3
    assert [chunk["choices"][0]["index"] for chunk in rest] == [2, 2, 1, 1, 0, 0]
    state = ChatCompletionStreamState()
    for chunk in chat:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    snapshot = state.current_completion_snapshot
    contents = [choice.message.content for choice in snapshot.choices]
    assert contents == ["answer 0", "answer 1", "answer 2"]
    begun = list(dict.fromkeys(one["choices"][0]["index"] for one in texts[:-1]))
    assert sorted(begun) == list(range(6))
    assert [one for one in begun if one < 3] == [0, 1, 2]
    assert [one for one in begun if one >= 3] == [3, 4, 5]


def chunks(server: Running, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's events."""
    reply = server.ask("POST", path, {"model": "qwen2_vl", **asked})
    assert reply.status == 200, reply.body
    lines = reply.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def answered(answer: str, piece: int, **options: Any) -> list[tuple[Any, str]]:
    """The message and finish reason of an answer, whole and put together from its stream."""
    batcher = ScriptedBatcher(answer, piece)
    with serving(lambda: batcher) as server:  # type: ignore[arg-type,return-value]
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        )
        asked: dict[str, Any] = {
            "model": "qwen2_vl",
            "messages": [{"role": "user", "content": "hello"}],
            **options,
        }
        with client:
            whole = client.chat.completions.create(**asked).choices[0]
            streamed = joined(server, asked)
    return [(whole.message.model_dump(), whole.finish_reason), streamed]


def joined(server: Running, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A stream's deltas, put together as clients do."""
    body = server.ask(
        "POST", "/v1/chat/completions", {**asked, "stream": True}
    ).body.decode()
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for line in body.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found["tool_calls"]):
                found["tool_calls"].append(call)
            else:
                found["tool_calls"][call["index"]]["function"]["arguments"] += call[
                    "function"
                ]["arguments"]
        reason = choice["finish_reason"] or reason
    return found, reason


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_tool_calls_whole_and_streamed(piece: int) -> None:
    second = CALL.replace("Bern", "Z\u00fcrich")
    for message, reason in answered(
        f"Let me see.\n{CALL}\n{second}", piece, tools=[TOOL]
    ):
        assert reason == "tool_calls"
        assert message["content"].strip() == "Let me see."
        assert [call["function"]["name"] for call in message["tool_calls"]] == [
            "weather",
            "weather",
        ]
        arguments = [
            json.loads(call["function"]["arguments"]) for call in message["tool_calls"]
        ]
        assert arguments == [
            {"place": place, "days": [1, 2]} for place in ("Bern", "Z\u00fcrich")
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_call_alone_has_no_content() -> None:
    (message, _), _ = answered(CALL, 5, tools=[TOOL])
    assert message["content"] is None


def test_text_that_looks_like_a_call_is_text_without_tools() -> None:
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        for message, reason in answered(CALL, 4, **options):
            assert (message["content"], reason) == (CALL, "stop")
            assert not message["tool_calls"]


def test_a_call_that_is_cut_off_is_no_call() -> None:
    """What was streamed of it cannot be taken back; the finish reason says that it is not whole."""
    for message, reason in answered("Well. " + CALL[:60], 4, tools=[TOOL]):
        assert reason == "stop"
        assert message["content"].strip() == "Well."
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"].startswith('{"place": ')
    # not even its name is there
    for message, reason in answered("Well. " + CALL[:20], 4, tools=[TOOL]):
        assert reason == "stop"
        assert not message["tool_calls"]
        assert message["content"].startswith("Well. <tool_call>")


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_reasoning_is_told_apart(piece: int) -> None:
    thought = "<think>\nRed, I think.\n</think>\n\na red circle"
    for message, reason in answered(thought, piece):
        assert message["reasoning_content"].strip() == "Red, I think."
        assert message["content"] == "a red circle"
        assert reason == "stop"
    for message, _ in answered(
        "Red, I think.</think>a red circle", piece, extra_body={"enable_thinking": True}
    )[:1]:
        assert message["reasoning_content"] == "Red, I think."
        assert message["content"] == "a red circle"


def test_the_model_gets_the_tools_and_earlier_calls() -> None:
    batcher = ScriptedBatcher("Fine.")
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Bern"}'},
    }
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    with serving(lambda: batcher) as server:  # type: ignore[arg-type,return-value]
        reply = server.ask(
            "POST", "/v1/chat/completions", {"messages": messages, "tools": [TOOL]}
        )
        assert reply.status == 200
    (request,) = batcher.requests
    assert request.template is not None and request.template.tools == [TOOL]
    assert request.messages is not None
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "place": "Bern"
    }
    assert request.messages[1]["content"] == ""


# Parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    return Dialect(Scripted())  # type: ignore[arg-type]


def test_every_token_has_its_bytes(dialect: Dialect) -> None:
    """Whatever a text's tokens are, their bytes join to the text's."""
    words = "h\u00e9llo \u4f60\u597d \U0001f600 \u0627\u0644 1 2 3"
    ids = dialect._tokenizer.encode(words, add_special_tokens=False)
    assert b"".join(bytes(dialect.token(one)[1]) for one in ids).decode() == words


def test_markers_that_decoding_leaves_out_are_put_back() -> None:
    """A special token that ends reasoning has no text of its own; its id says that it came."""
    from mlx_vlm.server.responses_state import ThinkingStreamState

    reader = AnswerReader(
        ThinkingStreamState(False), None, (), {7: "<think>", 8: "</think>"}
    )
    deltas = [
        reader.feed(event)
        for event in (
            Event("a", token=7),
            Event("a", token=1, text="hm"),
            Event("a", token=8),
            Event("a", token=2, text="yes"),
            Event("a", result=Result(request_id="a")),
        )
    ]
    deltas.append(reader.finish())
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.content for delta in deltas) == "yes"
    assert reader.reasoning_tokens == 2


def test_a_checkpoint_without_markers_is_not_searched_for_them() -> None:
    plain = Dialect(Scripted(chat_template="{{ messages }}"))  # type: ignore[arg-type]
    assert not plain.reasons
    assert plain.tool_module is None
    reader = plain.reader(tools=[TOOL])
    assert reader.feed(Event("a", token=1, text="<think>x")).content == "<think>x"


def test_mlx_vlm_has_what_is_used_of_it() -> None:
    """Its private names that answers are read with: a new version that lacks one is noticed here."""
    import inspect

    from mlx_vlm.server import responses_state
    from mlx_vlm.tools import registry, streaming

    assert list(
        inspect.signature(responses_state.make_response_stream_state).parameters
    )[:2] == [
        "processor",
        "enable_thinking",
    ]
    assert list(
        inspect.signature(responses_state.ThinkingStreamState.feed).parameters
    ) == ["self", "text", "last"]
    assert list(
        inspect.signature(responses_state.ToolCallStreamState.feed).parameters
    ) == ["self", "text", "last"]
    assert list(inspect.signature(streaming.ToolCallDeltaState).parameters) == [
        "module",
        "tools",
    ]
    assert len(registry.SPECS) >= 14


NESTED, DIGITS = "[" * 5000 + "]" * 5000, "1" * 5000


@pytest.mark.parametrize(
    ("parser", "value"),
    [
        ("json_tools", NESTED),
        ("gemma4", NESTED),
        ("json_tools", DIGITS),
        ("qwen3_coder", DIGITS),
    ],
)
@pytest.mark.parametrize("piece", [100, 10**6])
def test_a_call_that_python_has_no_room_for_is_said_to_be_unreadable(
    parser: str, value: str, piece: int
) -> None:
    module = load_tool_module(parser)
    call = {
        "gemma4": f"call:f{{x:{value}}}",
        "json_tools": f'{{"name": "f", "arguments": {{"x": {value}}}}}',
        "qwen3_coder": f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>",
    }[parser]
    text = module.tool_call_start + call + module.tool_call_end
    tool = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }
    reader = AnswerReader(None, module, [{"type": "function", "function": tool}])
    events = [Event("a", 1, text[at : at + piece]) for at in range(0, len(text), piece)]
    with pytest.raises(UnreadableCall):
        [*map(reader.feed, events), reader.finish()]
