"""OpenAI's Responses through its own package, by its own types; what is kept, and what runs in the background."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseInputItemParam,
    ResponseStreamEvent,
)
from PIL import Image
from pydantic import TypeAdapter

from tests.serving import IMAGES, Reply, Running, data_uri, serving, wait_until
from tests.test_server_tools import copy_with_tools
from vlm_batch import VLMBatcher
from vlm_batch.server.config import InvalidConfig, Key, ServerConfig
from vlm_batch.server.kept import Kept, KeptResponses, ResponseFolder
from vlm_batch.server.private import AGE

IS_EVENT = TypeAdapter[Any](ResponseStreamEvent)
IS_ITEM = TypeAdapter[Any](ResponseInputItemParam)
PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "the weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Bern", "Basel"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_tools(tmp_path_factory.mktemp("responses") / "qwen2_vl")


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


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def ask(server: Running, given: Any = "count to 3", **body: Any) -> Reply:
    headers = body.pop("headers", None)
    return server.ask("POST", PATH, {"input": given, **body}, headers=headers)


def image() -> dict[str, Any]:
    return {
        "type": "input_image",
        "detail": "auto",
        "image_url": data_uri("red_circle.png"),
    }


def words(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    events = []
    for block in reply.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        IS_EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_answer_whole_and_streamed(server: Running, client: Any) -> None:
    """The answer is the one of the chat door."""
    wanted = server.chat("count to 3").json["usage"]
    whole = client.responses.create(
        model="qwen2_vl", input="count to 3", metadata={"a": "b"}
    )
    assert (whole.output_text, whole.status, whole.metadata) == (
        "1 2 3",
        "completed",
        {"a": "b"},
    )
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        wanted["prompt_tokens"],
        wanted["completion_tokens"],
    )
    with client.responses.stream(model="qwen2_vl", input="count to 3") as stream:
        said = [one.delta for one in stream if one.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(said) == final.output_text == "1 2 3"
    assert whole.id != final.id


def test_events_come_in_openais_order(server: Running) -> None:
    events = events_of(ask(server, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
    ]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []
    final = Response.model_validate(events[-1]["response"])
    assert final.output_text == "1 2 3"


def test_pictures_files_and_a_conversation(server: Running, client: Any) -> None:
    """Each turn goes on from the kept beginning, and a tenth turn computes its own words alone."""
    turn = {"role": "user", "content": [image(), words("describe the picture")]}
    answer = client.responses.create(model="qwen2_vl", input=[turn])
    assert answer.output_text == "a red circle"
    fresh = []
    for _ in range(5):
        before = answer.id
        answer = client.responses.create(
            model="qwen2_vl",
            previous_response_id=before,
            input="count to 3",
            max_output_tokens=8,
        )
        assert answer.previous_response_id == before
        usage = answer.usage
        fresh.append(usage.input_tokens - usage.input_tokens_details.cached_tokens)
    assert usage.input_tokens > 4 * fresh[-1], (usage, fresh)
    made = io.BytesIO()
    Image.open(IMAGES / "red_circle.png").convert("RGB").save(made, "PDF")
    data = "data:application/pdf;base64," + base64.b64encode(made.getvalue()).decode()
    file = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    pages = [{"role": "user", "content": [file, words("describe the picture")]}]
    said = client.responses.create(model="qwen2_vl", input=pages).output_text
    assert "circle" in said or "red" in said


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_loop_by_items_and_by_id(client: Any, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "tools": [WEATHER],
        "input": "count to 3",
    }
    forced = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    if stream:
        with client.responses.stream(**forced) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(**forced)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "weather"
    assert json.loads(call.arguments)["place"] in ("Bern", "Basel")
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [words("sun"), image()],
    }
    # what the client reads of an answer goes back as it is
    items = [
        {"role": "user", "content": "count to 3"},
        *[one.model_dump() for one in answer.output],
        result,
    ]
    for item in items[1:]:
        IS_ITEM.validate_python(
            {name: value for name, value in item.items() if value is not None}
        )
    by_items = client.responses.create(
        **{**asked, "input": items, "tool_choice": "none"}
    )
    by_id = client.responses.create(
        **{
            **asked,
            "input": [result],
            "tool_choice": "none",
            "previous_response_id": answer.id,
        }
    )
    assert by_items.output_text == by_id.output_text
    assert by_items.usage.input_tokens == by_id.usage.input_tokens


def test_forms_scores_and_ends(server: Running, client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {
        "format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    }
    assert json.loads(
        client.responses.create(model="qwen2_vl", input="x", text=form).output_text
    ) == {"a": 1}
    scored = client.responses.create(
        model="qwen2_vl",
        input="count to 3",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (part,) = scored.output[0].content
    assert "".join(one.token for one in part.logprobs).startswith("1 2 3")
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    cut = client.responses.create(
        model="qwen2_vl", input="count to 3", max_output_tokens=2
    )
    assert (cut.status, cut.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    told = client.responses.create(
        model="qwen2_vl", instructions="be short", input="count to 3"
    )
    assert told.instructions == "be short"
    assert told.usage.input_tokens > scored.usage.input_tokens


def test_tokens_are_counted_as_used(client: Any) -> None:
    asked: dict[str, Any] = {"model": "qwen2_vl", "instructions": "be short", "tools": [WEATHER],
                             "input": [{"role": "user", "content": [image(), words("describe the picture")]}]}  # fmt: skip
    counted = client.responses.input_tokens.count(**asked)
    used = client.responses.create(**asked, max_output_tokens=1).usage
    assert counted.input_tokens == used.input_tokens


def test_sampling_of_every_door(server: Running) -> None:
    """Fields that others' clients add; a seed is the chat door's seed."""
    more = {
        "top_k": 5,
        "min_p": 0.01,
        "seed": 3,
        "temperature": 1.5,
        "repetition_penalty": 1.1,
    }
    chat = server.chat("count to 9", max_tokens=20, **more).json["choices"][0][
        "message"
    ]["content"]
    ours = ask(server, "count to 9", max_output_tokens=20, **more).json
    turns = [{"role": "user", "content": "count to 9"}]
    theirs = server.ask(
        "POST", "/v1/messages", {"max_tokens": 20, "messages": turns, **more}
    ).json
    assert (
        ours["output"][0]["content"][0]["text"] == theirs["content"][0]["text"] == chat
    )


def test_what_is_kept_is_shown_listed_and_deleted(server: Running, client: Any) -> None:
    made = client.responses.create(
        model="qwen2_vl", input=[{"role": "user", "content": [words("count to 3")]}]
    )
    assert client.responses.retrieve(made.id).output_text == "1 2 3"
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "count to 3"
    again = ask(server, [{"type": "item_reference", "id": item.id}])
    assert again.json["output"][0]["content"][0]["text"] == "1 2 3", again.body
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    unkept = client.responses.create(model="qwen2_vl", input="count to 3", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    for before in (made.id, unkept.id, "resp_0"):
        reply = ask(server, previous_response_id=before)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (
            400, "previous_response_not_found", "previous_response_id",
        )  # fmt: skip


def test_in_the_background(server: Running, client: Any) -> None:
    queued = client.responses.create(
        model="qwen2_vl", input="count to 3", background=True
    )
    assert queued.status in ("queued", "in_progress")
    wait_until(
        lambda: client.responses.retrieve(queued.id).status == "completed", "the answer"
    )
    assert client.responses.retrieve(queued.id).output_text == "1 2 3"
    stream = client.responses.create(
        model="qwen2_vl", input="count to 3", background=True, stream=True
    )
    first = next(iter(stream))
    stream.close()  # it goes on without its reader
    path = f"{PATH}/{first.response.id}?stream=true"
    whole = events_of(server.ask("GET", path))
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == "1 2 3"
    rest = server.ask("GET", f"{path}&starting_after=3").body
    assert (
        f'"sequence_number":{whole[4]["sequence_number"]}'.encode()
        in rest.split(b"\n\n")[0]
    )
    wait_until(lambda: not server.server.service.num_open, "all places to be free")


def test_a_background_response_is_cancelled(server: Running, client: Any) -> None:
    for stop in (client.responses.cancel, client.responses.delete):
        made = client.responses.create(
            model="qwen2_vl",
            input="count to 9",
            background=True,
            temperature=2.0,
            max_output_tokens=4000,
        )
        ended = stop(made.id)
        if ended is not None:
            assert ended.status in ("cancelled", "completed")
    wait_until(lambda: not server.server.service.num_open, "all places to be free")
    whole = client.responses.create(model="qwen2_vl", input="count to 3")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)
    assert ask(server, background=True, store=False).error["param"] == "background"


def test_a_failure_in_the_background_is_told(server: Running) -> None:
    made = ask(server, "too long " * 3000, background=True).json
    path = f"{PATH}/{made['id']}"
    wait_until(
        lambda: server.ask("GET", path).json["status"] == "failed", "the failure"
    )
    assert server.ask("GET", path).json["error"]["code"] == "invalid_prompt"
    Response.model_validate(server.ask("GET", path).json)


def test_nobody_sees_another_ones(folder: Path) -> None:
    keys = Key("one"), Key("two")
    with serving(lambda: VLMBatcher(str(folder)), keys=keys) as server:
        one, two = ({"Authorization": f"Bearer {key.text}"} for key in keys)
        made = ask(server, headers=one).json
        path = f"{PATH}/{made['id']}"
        assert server.ask("GET", path, headers=one).status == 200
        for method, place in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            reply = server.ask(method, path + place, headers=two)
            assert (reply.status, reply.error["type"]) == (404, "not_found_error")
        after = ask(server, previous_response_id=made["id"], headers=two)
        assert after.error["code"] == "previous_response_not_found"
        item = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert ask(server, [item], headers=two).error["code"] == "item_not_found"
        assert server.ask("GET", path, headers=one).status == 200


def kept_one(name: str, owner: str, size: int = 10, **body: Any) -> Kept:
    whole = {"id": name, "status": "completed", "output": [], **body}
    return Kept(owner, whole, turns=[{"content": "x" * size}])


@awaited
async def test_what_is_kept_has_a_bound() -> None:
    kept = KeptResponses(most=4000)
    kept.keep(kept_one("a", "one", 1000))
    for number in range(6):
        kept.keep(kept_one(f"b{number}", "two", 1000))
    # who has the most gives way
    assert await kept.find("a", "one") is not None
    assert await kept.find("b0", "two") is None
    assert await kept.find("b5", "two") is not None
    kept.keep(kept_one("large", "one", 5000))
    assert await kept.find("large", "one") is None
    assert await kept.find("a", "two") is None


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


@awaited
async def test_a_folder_has_what_memory_has_not(tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    item = {"id": "msg_1", "type": "message"}
    kept = KeptResponses(0, ResponseFolder(folder, 1 << 20))
    kept.keep(kept_one("resp_a", "one", output=[item]))
    # what has not ended with an answer is not written
    kept.keep(kept_one("resp_b", "one", status="queued"))
    found = await kept.find("resp_a", "one")
    assert found is not None
    assert found.turns == [{"content": "x" * 10}]
    assert await kept.item("msg_1", "one") == item
    assert await kept.find("resp_a", "two") is None
    assert await kept.item("msg_1", "two") is None
    with pytest.raises(InvalidConfig, match="another server has"):
        ResponseFolder(folder, 1 << 20)
    with pytest.raises(InvalidConfig, match="folders of their own"):
        ServerConfig(model="reader", files=folder, responses=folder)
    kept.close()
    assert files_in(folder) == ["resp_a"]
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "resp_a")] == [
        0o700,
        0o600,
    ]
    # half of one, as a killed process leaves it, is not taken for whole; nor is what others put there
    whole = (folder / "resp_a").read_bytes()
    (folder / ".resp_c.1.tmp").write_bytes(whole)
    (folder / "resp_d").write_bytes(whole[: len(whole) // 2])
    (folder / "resp_e").write_bytes(b"[]\n")
    (folder / "resp_f").write_bytes(whole)
    head, rest = whole.split(b"\n", 1)
    odd = {"expires_at": "never", "owner": ["one"], "items": 3, "id": 7}
    for number, (name, value) in enumerate(odd.items()):
        line = json.dumps({**json.loads(head), "id": f"resp_g{number}", name: value})
        (folder / f"resp_g{number}").write_bytes(line.encode() + b"\n" + rest)
    line = json.dumps({**json.loads(head), "id": "resp_h"})
    (folder / "resp_h").write_bytes(line.encode() + b'\n{"body": 1, "items": 2}\n')
    (folder / "resp_i").symlink_to(folder / "gone")
    (folder / "resp_j").mkdir()
    (folder / ".resp_k").mkdir()
    again = KeptResponses(1 << 20, ResponseFolder(folder, 1 << 20))
    assert ".resp_c.1.tmp" not in files_in(folder)
    found = await again.find("resp_a", "one")
    assert found is not None
    assert found.body["output"] == [item]
    for name in ("d", "e", "f", "g0", "g1", "g2", "g3", "h", "i", "j"):
        assert await again.find(f"resp_{name}", "one") is None
    again.forget(found)
    assert await again.find("resp_a", "one") is None
    again.close()
    assert "resp_a" not in files_in(folder)


@awaited
async def test_a_folder_has_bounds_of_bytes_and_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptResponses(0, ResponseFolder(tmp_path, 4000))
    kept.keep(kept_one("resp_a", "one", 1000))
    for number in range(4):
        kept.keep(kept_one(f"resp_b{number}", "two", 1000))
    kept.keep(kept_one("resp_large", "one", 5000))
    kept.close()
    left = files_in(tmp_path)
    assert "resp_a" in left
    assert "resp_b3" in left
    assert {"resp_b0", "resp_large"}.isdisjoint(left)
    assert sum((tmp_path / name).stat().st_size for name in left) < 6000
    old = time.time() + AGE + 60
    monkeypatch.setattr(time, "time", lambda: old)
    folder = ResponseFolder(tmp_path, 4000)
    assert await folder.read("resp_a", "one") is None
    folder.sweep()
    folder.close()
    assert files_in(tmp_path) == []


def test_what_runs_in_the_background_needs_no_room(tmp_path: Path) -> None:
    """It is found while it is made, however little may be kept in memory; then it is in the folder."""
    with serving(max_kept=1, responses=tmp_path) as server:
        begun = ask(server, background=True, max_output_tokens=300, min_tokens=300)
        path = f"{PATH}/{begun.json['id']}"
        found = server.ask("GET", path)
        assert found.status == 200
        wait_until(
            lambda: server.ask("GET", path).json["status"] == "incomplete", "its end"
        )
        stopped = ask(server, background=True, max_output_tokens=900, min_tokens=900)
        path = f"{PATH}/{stopped.json['id']}"
        assert server.ask("POST", f"{path}/cancel").json["status"] == "cancelled"
    assert files_in(tmp_path) == [begun.json["id"]]


def test_a_conversation_outlives_its_server(folder: Path, tmp_path: Path) -> None:
    def begin() -> Any:
        keys = (Key("one"), Key("two"))
        return serving(
            lambda: VLMBatcher(str(folder), max_rows=8),
            keys=keys,
            responses=tmp_path / "kept",
        )

    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with begin() as server:
        first = ask(server, [{"role": "user", "content": [image()]}], headers=one).json
        hidden = ask(server, store=False, headers=one).json["id"]
        wanted = ask(server, previous_response_id=first["id"], headers=one).json
    with begin() as server:
        path = f"{PATH}/{first['id']}"
        assert server.ask("GET", path, headers=one).json == first
        for name, key in ((first["id"], two), (hidden, one)):
            assert server.ask("GET", f"{PATH}/{name}", headers=key).status == 404
            refused = ask(server, previous_response_id=name, headers=key)
            assert refused.error["code"] == "previous_response_not_found"
        again = ask(server, previous_response_id=first["id"], headers=one).json
        said = [one["output"][0]["content"][0]["text"] for one in (wanted, again)]
        assert said[0] == said[1]
        assert server.ask("DELETE", path, headers=one).json["deleted"]
    assert first["id"] not in files_in(tmp_path / "kept")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "shell_call"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}]}]},
         "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "filename": "a"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}}, "text.format"),
        ({"instruction": "x"}, "instruction"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_place(
    server: Running, body: dict[str, Any], place: str
) -> None:
    reply = ask(
        server,
        **{"given": "x", **({"given": body.pop("input")} if "input" in body else {})},
        **body,
    )
    assert reply.status == 400, reply.body
    assert reply.error["param"] == place, reply.error


#: As Codex writes it; ``tests/data/clients/codex.json`` is what the program wrote, in full.
CODEX: dict[str, Any] = {
    "model": "qwen2_vl",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [words("<permissions instructions>")]},
        {"type": "message", "role": "user", "content": [words("<environment_context>")]},
        {"type": "message", "role": "user", "content": [words("count to 3")]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                        "required": ["command"], "additionalProperties": False}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-abc",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0"},
}  # fmt: skip


def test_a_call_names_its_namespace(client: Any) -> None:
    group = {
        "type": "namespace",
        "name": "agents",
        "description": "",
        "tools": [WEATHER],
    }
    asked: dict[str, Any] = {
        "model": "qwen2_vl",
        "input": "count to 3",
        "tools": [group],
    }
    answer = client.responses.create(
        **asked, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    assert (call.name, call.namespace) == ("weather", "agents")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    items = [call.model_dump(exclude_none=True), result]
    again = client.responses.create(**{**asked, "input": items}, max_output_tokens=3)
    assert again.status in ("completed", "incomplete")


def test_codex_is_answered(server: Running) -> None:
    events = events_of(server.ask("POST", PATH, {**CODEX, "max_output_tokens": 60}))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    output = events[-1]["response"]["output"]
    call = {
        "type": "function_call",
        "name": "shell",
        "arguments": '{"command":["ls"]}',
        "call_id": "c1",
    }
    thought: dict[str, Any] = {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": None,
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}
    longer = {
        **CODEX,
        "input": [*CODEX["input"], *output, thought, call, result],
        "max_output_tokens": 5,
    }
    again = events_of(server.ask("POST", PATH, longer))
    usage = again[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] / 2
