"""LangChain's and LiteLLM's adapters for Responses and Messages against a running server, where they are installed.

They are too large for every run: ``pip install --target FOLDER langchain-openai langchain-anthropic litellm``, and FOLDER
on the path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from tests.serving import Running, data_uri, serving
from tests.test_server_tools import copy_with_tools
from vlm_batch import VLMBatcher

# their own, of their own packages
pytestmark = pytest.mark.filterwarnings("ignore")

PICTURE = data_uri("red_circle.png")
ASKED = "count to 3"
WHAT = "describe the picture"
SCHEMA: dict[str, Any] = {
    "title": "place",
    "description": "a place",
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Bern", "Basel"]}},
    "required": ["place"],
    "additionalProperties": False,
}
PLACES = ("Bern", "Basel")


def weather(place: Literal["Bern", "Basel"]) -> str:
    """the weather"""
    return "sun"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = copy_with_tools(tmp_path_factory.mktemp("adapters") / "qwen2_vl")
    with serving(lambda: VLMBatcher(str(folder), max_rows=8)) as running:
        yield running


# LangChain -------------------------------------------------------------------------------------------------------------


def responses(server: Running, **settings: Any) -> Any:
    package = pytest.importorskip("langchain_openai")
    how = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    return package.ChatOpenAI(
        model="qwen2_vl", use_responses_api=True, **how, **settings
    )


def messages(server: Running, **settings: Any) -> Any:
    package = pytest.importorskip("langchain_anthropic")
    how = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    return package.ChatAnthropic(model="qwen2_vl", max_tokens=60, **how, **settings)


LANGCHAIN: dict[str, Callable[[Running], Any]] = {
    "responses": responses,
    "responses, blocks": lambda one: responses(one, output_version="responses/v1"),
    "responses, by id": lambda one: responses(one, use_previous_response_id=True),
    "messages": messages,
    "messages, blocks": lambda one: messages(one, output_version="v1"),
}


def gathered(model: Any) -> Any:
    """The pieces of a stream, as LangChain adds them up."""
    first, *others = model.stream(ASKED)
    for one in others:
        first += one
    return first


@pytest.mark.parametrize("name", LANGCHAIN)
def test_langchain_is_answered(server: Running, name: str) -> None:
    model = LANGCHAIN[name](server)
    kinds = pytest.importorskip("langchain_core.messages")
    first = model.invoke(ASKED)
    assert first.text == gathered(model).text == "1 2 3"
    model.invoke(
        [kinds.SystemMessage("be brief"), kinds.HumanMessage(ASKED), first, ASKED]
    )
    image = {
        "type": "image",
        "base64": PICTURE.partition(",")[2],
        "mime_type": "image/png",
    }
    seen = model.invoke([kinds.HumanMessage([image, {"type": "text", "text": WHAT}])])
    assert seen.text == "a red circle"
    for method in ("json_schema", "function_calling"):
        formed = model.with_structured_output(SCHEMA, method=method).invoke(ASKED)
        assert formed["place"] in PLACES


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LANGCHAIN)
def test_langchains_tools_go_back_and_forth(
    server: Running, name: str, stream: bool
) -> None:
    model = LANGCHAIN[name](server)
    kinds = pytest.importorskip("langchain_core.messages")
    forced = model.bind_tools([weather], tool_choice="any")
    called = gathered(forced) if stream else forced.invoke(ASKED)
    assert called.tool_calls
    assert called.tool_calls[0]["args"]["place"] in PLACES
    image = {
        "type": "image",
        "base64": PICTURE.partition(",")[2],
        "mime_type": "image/png",
    }
    told = [
        kinds.ToolMessage([image], tool_call_id=one["id"]) for one in called.tool_calls
    ]
    free = model.bind_tools([weather]).bind(max_tokens=60)
    assert free.invoke([kinds.HumanMessage(ASKED), called, *told]).usage_metadata


# LiteLLM ---------------------------------------------------------------------------------------------------------------

#: Names of models, which choose the API -> what is behind the server's address.
LITELLM = {"openai/responses/qwen2_vl": "/v1", "anthropic/qwen2_vl": ""}


@pytest.fixture
def lite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm")


@pytest.mark.parametrize("model", LITELLM)
def test_litellm_is_answered(server: Running, lite: Any, model: str) -> None:
    how = {"model": model, "api_base": server.url + LITELLM[model], "api_key": "none"}

    def ask(turns: Any = ASKED, **said: Any) -> Any:
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        return lite.completion(messages=turns, max_tokens=60, **how, **said)

    assert ask().choices[0].message.content == "1 2 3"
    whole = lite.stream_chunk_builder(list(ask(stream=True)))
    assert whole.choices[0].message.content == "1 2 3"
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    turn = {"role": "user", "content": [image, {"type": "text", "text": WHAT}]}
    assert ask([turn]).choices[0].message.content == "a red circle"
    schema = {"name": "place", "schema": SCHEMA, "strict": True}
    formed = ask(response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(formed.choices[0].message.content)["place"] in PLACES
    function = {"name": "weather", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    answer = ask(tools=tools, tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        for call in answer.tool_calls
    ]
    turns = [{"role": "user", "content": ASKED}, answer.model_dump(), *results]
    assert ask(turns, tools=tools).usage.total_tokens
