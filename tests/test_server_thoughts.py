"""Thinking through the doors of agents: as blocks and items, whole and streamed, and back again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from tests.serving import Running, serving
from tests.test_server_tools import copy_with_tools
from tests.test_server_ways_back import THINKS
from vlm_batch import VLMBatcher
from vlm_batch.server import asking
from vlm_batch.types import SamplingParams

THOUGHT = "<think>so it is</think>yes"
TURN = {"role": "user", "content": "count to 3"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that thinks, and reads whether it should."""
    folder = copy_with_tools(tmp_path_factory.mktemp("thoughts") / "qwen2_vl")
    plain = (folder / "chat_template.jinja").read_text()
    reads = "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}"
    template = THINKS + reads + plain
    (folder / "chat_template.jinja").write_text(template)
    said = json.dumps({"chat_template": template})
    (folder / "chat_template.json").write_text(said)
    with serving(lambda: VLMBatcher(folder, max_rows=8)) as running:
        yield running


@pytest.fixture
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is a thought and a word."""
    forced = partial(SamplingParams, regex=THOUGHT)
    monkeypatch.setattr(asking, "SamplingParams", forced)


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_thinking(server: Running, stream: bool) -> None:
    client: Any = anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0
    )
    asked: dict[str, Any] = {"model": "qwen2_vl", "max_tokens": 60, "messages": [TURN]}

    def answer(**more: Any) -> Any:
        if not stream:
            return client.messages.create(**asked, **more)
        with client.messages.stream(**asked, **more) as events:
            return events.get_final_message()

    said = answer(thinking={"type": "adaptive"})
    assert [block.type for block in said.content] == ["thinking", "text"]
    assert said.content[0].thinking.strip() == "so it is"
    assert said.content[1].text == "yes"
    assert said.usage.output_tokens_details.thinking_tokens > 0
    hidden = answer(thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == ""
    asked["messages"] = [TURN, {"role": "assistant", "content": said.content}, TURN]
    assert answer().content[1].text == "yes"


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("stream", [False, True])
def test_items_of_reasoning(server: Running, stream: bool) -> None:
    client: Any = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    )
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "input": [TURN],
        "max_output_tokens": 60,
    }

    def answer(**more: Any) -> Any:
        if not stream:
            return client.responses.create(**asked, **more)
        with client.responses.stream(**asked, **more) as events:
            kinds = [event.type for event in events]
            assert "response.reasoning_text.done" in kinds
            return events.get_final_response()

    said = answer(include=["reasoning.encrypted_content"], reasoning={"effort": "high"})
    assert [item.type for item in said.output] == ["reasoning", "message"]
    assert said.output[0].content[0].text.strip() == "so it is"
    assert said.output_text == "yes"
    assert said.usage.output_tokens_details.reasoning_tokens > 0
    by_id = answer(previous_response_id=said.id)
    asked["input"] = [
        TURN,
        *[item.model_dump(exclude_none=True) for item in said.output],
        TURN,
    ]
    by_items = answer()
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_thinking_is_switched_off(server: Running) -> None:
    """What the template reads: a prompt that says not to think is longer here."""

    def size(path: str, **body: Any) -> int:
        reply = server.ask("POST", path, body)
        assert reply.status == 200, reply.body
        return int(reply.json["input_tokens"])

    count = "/v1/messages/count_tokens"
    on = size(count, messages=[TURN], thinking={"type": "enabled", "budget_tokens": 30})
    off = size(count, messages=[TURN], thinking={"type": "disabled"})
    assert off > on == size(count, messages=[TURN])
    inputs = "/v1/responses/input_tokens"
    assert size(inputs, input="count to 3", reasoning={"effort": "none"}) == off
    assert size(inputs, input="count to 3", reasoning={"effort": "high"}) == on
    assert size(inputs, input="count to 3", enable_thinking=False) == off
