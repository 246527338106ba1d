"""What official clients send is answered: bodies recorded from their packages, sent to a server of the tiny checkpoint."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from tests.serving import Reply, Running, serving
from tests.test_server_tools import copy_with_tools
from vlm_batch import VLMBatcher
from vlm_batch.server.config import ServerConfig
from vlm_batch.server.doors import DOORS
from vlm_batch.server.doors.chat import ChatRequest, chat_ask

DATA = Path(__file__).parent / "data" / "clients"
#: What stands for a picture in recorded bodies (``scripts/clients/listener.py``).
PICTURE = "data:image/png;base64,PICTURE"
#: A video that lmms-eval leaves to the server.
VIDEO = "file:///tmp/a.mp4"
#: The doors of agents.
AGENTS = ("/v1/messages", "/v1/responses")
#: Most tokens of an answer.
MOST_TOKENS = 60


def recorded() -> dict[str, dict[str, Any]]:
    """Requests by name: the client's file and the place in it."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(DATA.glob("*.json")):
        for place, request in enumerate(
            json.loads(file.read_text(encoding="utf-8"))["requests"]
        ):
            found[f"{file.stem}-{place}"] = request
    return found


REQUESTS = recorded()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose template reads tools."""
    folder = copy_with_tools(tmp_path_factory.mktemp("clients") / "qwen2_vl")
    with serving(
        lambda: VLMBatcher(folder, max_rows=8), served_names=("model",)
    ) as running:
        yield running


def clip() -> str:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (56, 56), grey) for grey in ("black", "white")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), "white").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def send(server: Running, request: dict[str, Any], most: int = MOST_TOKENS) -> Reply:
    """Send a recorded request with a picture in its places, for a short answer of this server's model."""
    if "body" not in request:
        return server.ask(request["method"], request["path"])
    text = json.dumps(request["body"]).replace(PICTURE, picture())
    body = json.loads(text.replace(VIDEO, clip()))
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    named = next((name for name in names if name in body), "max_tokens")
    if "input" in body:
        named = "max_output_tokens"
    # the tiny model's context is short
    body[named] = min(body.get(named, most), most)
    if "tools" in body:  # an agent's
        body["tools"] = body["tools"][:2]
    body["model"] = "model"  # clients name the models of the hub
    return server.ask(request["method"], request["path"], body)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_clients_request_is_answered(server: Running, name: str) -> None:
    reply = send(server, REQUESTS[name])
    assert reply.status == 200, reply.body[:400]
    request = REQUESTS[name]
    if not (request.get("body") or {}).get("stream"):
        return
    last = reply.body.rstrip().split(b"\n\n")[-1]
    if request["path"].startswith(AGENTS):
        ends = (b"message_stop", b"response.completed", b"response.incomplete")
        assert last.startswith(tuple(b"event: " + end for end in ends))
        return
    assert last == b"data: [DONE]"
    assert b'"error"' not in reply.body


@pytest.mark.parametrize("name", ["claude_code-0", "codex-0", "cline-1", "continue-1"])
def test_every_tool_of_an_agent_is_taken(name: str) -> None:
    """A body as its program writes it, but for its texts' ends: dozens of tools, and none is unknown."""
    request = REQUESTS[name]
    door = DOORS.at(request["path"].partition("?")[0])
    assert door is not None
    body = door.body.model_validate(request["body"])
    assert len(body.tools) == len(request["body"]["tools"]) > 5  # type: ignore[attr-defined]


def test_what_is_recorded_is_whole() -> None:
    """Each client has a version and bodies without pictures."""
    for file in DATA.glob("*.json"):
        said = json.loads(file.read_text(encoding="utf-8"))
        assert said["client"].split()[-1][0].isdigit()
        assert any("body" in request for request in said["requests"])
        assert "base64," not in json.dumps(said).replace(PICTURE, "")


def test_the_page_has_what_was_recorded() -> None:
    from tests import pipelines_page

    page = pipelines_page.PAGE.read_text(encoding="utf-8")
    assert pipelines_page.tables(page) == page, (
        "python -m tests.pipelines_page writes the tables anew"
    )


def test_arguments_of_vllms_processors_are_sampling_parameters() -> None:
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "skip_special_tokens": False,
        "vllm_xargs": {
            "ngram_size": 30,
            "window_size": 90,
            "whitelist_token_ids": [4, 5],
        },
        "mm_processor_kwargs": {"min_pixels": 4000, "max_pixels": 9000},
    }
    config = ServerConfig(model="model")
    ask = chat_ask(ChatRequest.model_validate(body), config)
    params = ask.params
    assert (
        params.skip_special_tokens,
        params.no_repeat_ngram_size,
        params.window_size,
    ) == (False, 30, 90)
    assert params.whitelist_token_ids == (4, 5)
    assert ask.pixels == {"min_pixels": 4000, "max_pixels": 9000}
    off = chat_ask(
        ChatRequest.model_validate(
            {**body, "vllm_xargs": {"window_size": 90, "debug": False}}
        ),
        config,
    )
    assert off.params.no_repeat_ngram_size == 0
    with pytest.raises(ValidationError, match="other"):
        ChatRequest.model_validate({**body, "vllm_xargs": {"other": 1}})
