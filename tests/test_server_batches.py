"""Files and batches through OpenAI's own package, beside other clients, and over the server's end."""

from __future__ import annotations

import json
import logging
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.batch_kills import killed_batch
from tests.serving import IMAGES, Reply, Running, data_uri, serving, wait_until
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.server.config import InvalidConfig, Key

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
FORM = "multipart/form-data; boundary=X"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "files"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(files=folder, max_files=3 << 20, max_upload=1 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:  # its overloads want literals
    with client_of(server) as made:
        yield made


def client_of(server: Running, key: str = "none") -> Any:
    url = f"{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def lines_of(bodies: list[Any], path: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"row-{at}", "method": "POST", "url": path, "body": body}
        for at, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, rows)).encode()


def begin(client: Any, lines: bytes, path: str = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
    asked = {"completion_window": "24h", "endpoint": path, **fields}
    return client.batches.create(input_file_id=file.id, **asked)


def ended(client: Any, batch: Any) -> Any:
    wait_until(
        lambda: client.batches.retrieve(batch.id).status in ENDED, "the batch to end"
    )
    return client.batches.retrieve(batch.id)


def rows_of(client: Any, file_id: str | None) -> dict[str, Any]:
    """Return a file's lines by their custom ids."""
    if file_id is None:
        return {}
    lines = client.files.content(file_id).text.splitlines()
    found = {row["custom_id"]: row for row in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def upload(server: Running, *parts: tuple[str, bytes], **headers: str) -> Reply:
    form = b""
    for head, value in parts:
        disposition = f"Content-Disposition: form-data; {head}\r\n\r\n"
        form += b"--X\r\n" + disposition.encode() + value + b"\r\n"
    sent = {"Content-Type": FORM, **headers}
    return server.ask("POST", "/v1/files", form + b"--X--\r\n", headers=sent)


#: Parts of an upload that is taken.
PURPOSE = ('name="purpose"', b"user_data")
FILE = ('name="file"; filename="a.txt"', b"hello")


# Batches -------------------------------------------------------------------------------------------------------------


def test_a_batch_answers_what_the_endpoint_does(server: Running, client: Any) -> None:
    """Answers and errors are the endpoint's, each in its file."""
    picture = client.files.create(file=IMAGES / "red_circle.png", purpose="vision")
    named = {"type": "file", "file": {"file_id": picture.id}}
    question = {"type": "text", "text": "What is it?"}
    uri = {"type": "image_url", "image_url": {"url": data_uri("red_circle.png")}}
    bodies: list[Any] = [
        chat("count to 3"),
        chat([uri, question], logprobs=True),
        chat([named, question], logprobs=True),
        chat("count to 4", temperature=-1),
        chat("count to 4", model="other"),
        chat("count to 4", stream=True),
        chat([{"type": "file", "file": {"file_id": "file-0"}}]),
        {"messages": []},
        chat("count to 4", min_pixels=9, max_pixels=8),
        chat([{"type": "file", "file": {"file_id": ""}}]),
    ]
    made = begin(client, lines_of(bodies), metadata={"a": "b"})
    assert (made.status, made.metadata) == ("validating", {"a": "b"})
    batch = ended(client, made)
    Batch.model_validate(batch.model_dump(), strict=True)
    counts = batch.request_counts
    assert batch.status == "completed"
    assert (counts.total, counts.completed, counts.failed) == (10, 3, 7)
    answered = rows_of(client, batch.output_file_id)
    failed = rows_of(client, batch.error_file_id)
    assert set(answered) == {"row-0", "row-1", "row-2"}
    used = 0
    for at, body in enumerate(bodies):
        if at == 5:  # which the endpoint streams
            continue
        wanted = server.ask("POST", CHAT, body)
        assert wanted.status < 500
        row = {**answered, **failed}[f"row-{at}"]
        assert row["error"] is None
        response = row["response"]
        assert response["status_code"] == wanted.status
        if wanted.status == 200:
            assert response["body"]["choices"] == wanted.json["choices"]
            used += response["body"]["usage"]["total_tokens"]
        else:
            assert response["body"] == wanted.json
    assert batch.usage.total_tokens == used
    first, second = (answered[name]["response"]["body"] for name in ("row-1", "row-2"))
    assert first["choices"] == second["choices"]
    assert "stream" in failed["row-5"]["response"]["body"]["error"]["message"]
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    metrics = server.ask("GET", "/metrics").body.decode()
    assert 'vlm_batch:batches_total{model_name="qwen2_vl",state="completed"}' in metrics
    assert "vlm_batch:files_bytes" in metrics


@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        ("/v1/completions", "prompt", {"echo": True}),
        ("/v1/responses", "input", {}),
    ],
)
def test_the_other_endpoints(
    server: Running, client: Any, path: str, field: str, others: dict[str, Any]
) -> None:
    bodies = [{field: "count to 3", **others}, {field: 3}, {field: "a", "no": 1}]
    batch = ended(client, begin(client, lines_of(bodies, path), path))
    answered = rows_of(client, batch.output_file_id)["row-0"]["response"]["body"]
    wanted = server.ask("POST", path, bodies[0]).json
    for name in ("choices", "usage"):
        assert answered.get(name) == wanted.get(name)
    if path == "/v1/responses":
        said = [one["output"][0]["content"] for one in (answered, wanted)]
        assert said[0] == said[1]
        # what a batch answers is in its file alone
        assert server.ask("GET", f"{path}/{answered['id']}").status == 404
    failed = rows_of(client, batch.error_file_id)
    for at in (1, 2):
        body = failed[f"row-{at}"]["response"]["body"]
        assert body == server.ask("POST", path, bodies[at]).json


def test_rows_go_on_from_kept_responses(tmp_path: Path) -> None:
    """A batch over the turns of many conversations; of one key's alone, and its answers are kept in its file."""
    keys = (Key("one"), Key("two"))
    with serving(keys=keys, files=tmp_path) as server:
        one, two = client_of(server, "one"), client_of(server, "two")
        first = one.responses.create(model="qwen2_vl", input="count to 3")
        next_turn = {"previous_response_id": first.id, "input": "count to 4"}
        wanted = one.responses.create(model="qwen2_vl", **next_turn)
        answers = {}
        for owner in (one, two):
            lines = lines_of([next_turn], "/v1/responses")
            batch = ended(owner, begin(owner, lines, "/v1/responses"))
            file_id = batch.output_file_id or batch.error_file_id
            (answers[owner],) = rows_of(owner, file_id).values()
        body = answers[one]["response"]["body"]
        said = body["output"][0]["content"][0]["text"]
        assert said == wanted.output_text
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(body["id"])
        error = answers[two]["response"]["body"]["error"]
        assert error["code"] == "previous_response_not_found"


def test_wrong_files_fail_before_a_row_is_asked(client: Any) -> None:
    row = json.loads(lines_of([chat("count to 3")]))
    wrong = [
        json.dumps(row),
        "{",
        "[]",
        json.dumps(row),
        json.dumps({**row, "custom_id": 3}),
        json.dumps({**row, "custom_id": "a", "url": "/v1/completions"}),
        json.dumps({**row, "custom_id": "b", "method": "GET"}),
        json.dumps({**row, "custom_id": "c", "body": []}),
    ]
    batch = ended(client, begin(client, "\n".join(wrong).encode()))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [one.line for one in batch.errors.data] == [2, 3, 4, 5, 6, 7, 8]
    assert batch.errors.data[2].code == "duplicate_custom_id"
    empty = ended(client, begin(client, b"\n\n"))
    assert [one.code for one in empty.errors.data] == ["empty_file"]


def test_what_a_batch_cannot_be_made_of(server: Running, client: Any) -> None:
    picture = client.files.create(file=IMAGES / "red_circle.png", purpose="vision")
    file = client.files.create(file=("a", b"{}"), purpose="batch").id
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for fields, status in (
        ({"input_file_id": picture.id}, 400),
        ({"input_file_id": "file-0"}, 404),
        ({"input_file_id": "../lock"}, 404),
        ({"endpoint": "/v1/embeddings"}, 400),
        ({"completion_window": "1d"}, 400),
        ({"completion_window": "999h"}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400),
        ({"model": "other"}, 404),
        ({"priority": 1}, 400),
    ):
        reply = server.ask("POST", "/v1/batches", {**good, **fields})
        assert reply.status == status, (fields, reply.body)
    assert server.ask("GET", "/v1/batches/batch_0").status == 404


def test_a_cancelled_batch_keeps_its_answers(server: Running, client: Any) -> None:
    long = {"min_tokens": 1200, "max_tokens": 1200}
    bodies = [chat("count to 2"), *(chat("count to 3", **long) for _ in range(60))]
    made = begin(client, lines_of(bodies))
    wait_until(
        lambda: client.batches.retrieve(made.id).request_counts.completed > 0, "a row"
    )
    with pytest.raises(openai.ConflictError, match=made.id):  # it is being read
        client.files.delete(made.input_file_id)
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    batch = ended(client, made)
    assert batch.status == "cancelled"
    answered = rows_of(client, batch.output_file_id)
    assert 1 <= len(answered) == batch.request_counts.completed < 61
    assert batch.error_file_id is None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)
    assert client.files.delete(made.input_file_id).deleted
    wait_until(lambda: not server.server.service.num_open, "rows to end")


def test_a_batch_yields_to_others(tmp_path: Path) -> None:
    """Whoever asks beside a full batch gets a place at once, and keeps it."""

    def small() -> VLMBatcher:
        return VLMBatcher(default_checkpoint(), max_rows=2)

    with serving(small, files=tmp_path / "files") as server, client_of(server) as made:
        long = {"min_tokens": 1500, "max_tokens": 1500}
        bodies = [chat("count to 3", **long) for _ in range(6)]
        batch = begin(made, lines_of(bodies))
        stats = server.server.service.stats
        wait_until(lambda: (now := stats()) is not None and now.decoding == 2, "rows")
        replies = [server.chat("count to 3") for _ in range(5)]
        assert all(reply.status == 200 for reply in replies)
        assert made.batches.retrieve(batch.id).request_counts.completed <= 2
        made.batches.cancel(batch.id)


def test_rows_have_lines_in_the_log_without_their_words(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_batch.server.access"):
        batch = ended(client, begin(client, lines_of([chat("count to 4")])))
    lines = [json.loads(line) for line in caplog.messages]
    rows = [line for line in lines if line["client"] == "batch"]
    assert [row["batch"] for row in rows] == [batch.id]
    assert (rows[0]["status"], rows[0]["path"]) == (200, CHAT)
    assert "count to 4" not in json.dumps(lines)


# Over the server's end -----------------------------------------------------------------------------------------------


def test_a_stopped_server_goes_on(tmp_path: Path) -> None:
    """Rows under way when the server stops are no errors: the next one answers them, and no row twice."""
    length = {"min_tokens": 60, "max_tokens": 60}
    bodies = [chat(f"count to {at % 9 + 1}", **length) for at in range(80)]
    with serving(files=tmp_path) as server, client_of(server) as made:
        batch = begin(made, lines_of(bodies))
        wait_until(
            lambda: made.batches.retrieve(batch.id).request_counts.completed > 3, "rows"
        )
        before = made.batches.retrieve(batch.id)
    assert before.status == "in_progress"
    with serving(files=tmp_path) as server, client_of(server) as made:
        found = ended(made, batch)
        assert (found.status, found.error_file_id) == ("completed", None)
        assert len(rows_of(made, found.output_file_id)) == 80
        assert found.request_counts.completed == 80


def test_a_killed_server_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """``python -m tests.batch_kills`` does it 200 times."""
    killed_batch(tmp_path, kills=3, rows=400)


def test_rows_whose_time_is_over(tmp_path: Path) -> None:
    with serving(files=tmp_path) as server, client_of(server) as made:
        long = {"min_tokens": 1500, "max_tokens": 1500}
        bodies = [chat("count to 2"), *(chat("count to 3", **long) for _ in range(60))]
        batch = begin(made, lines_of(bodies))
        wait_until(
            lambda: made.batches.retrieve(batch.id).request_counts.completed > 0, "rows"
        )
    record = tmp_path / f"{batch.id}.json"
    known = json.loads(record.read_bytes())
    known["shown"]["expires_at"] = int(time.time()) - 1
    record.write_text(json.dumps(known))
    with serving(files=tmp_path) as server, client_of(server) as made:
        found = ended(made, batch)
        answered = rows_of(made, found.output_file_id)
        over = rows_of(made, found.error_file_id)
        assert found.status == "expired" and len(answered) + len(over) == 61
        assert {row["error"]["code"] for row in over.values()} == {"batch_expired"}
        assert "row-0" in answered


def test_files_end_by_age(tmp_path: Path) -> None:
    with serving(files=tmp_path) as server, client_of(server) as made:
        young = made.files.create(file=("a", b"a"), purpose="user_data")
        old = made.files.create(
            file=("a", b"a"),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert old.expires_at - old.created_at == 3600
    record = tmp_path / f"{old.id}.json"
    known = json.loads(record.read_bytes())
    known["file"]["expires_at"] = int(time.time()) - 1
    record.write_text(json.dumps(known))
    # what a killed process leaves of an upload, and of an answer's record
    for name in (".upload_0", "file-0", ".batch_0.json.3.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with serving(files=tmp_path) as server, client_of(server) as made:
        assert [one.id for one in made.files.list()] == [young.id]
        assert server.ask("GET", f"/v1/files/{old.id}/content").status == 404
        wait_until(lambda: not record.exists(), "the file to go")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"lock", young.id, f"{young.id}.json"}


# Files ---------------------------------------------------------------------------------------------------------------


def test_files_are_found_listed_read_and_deleted(folder: Path, client: Any) -> None:
    data = bytes(range(256)) * 500 + b"\r\n--X"
    names = [client.files.create(file=("a b.bin", data), purpose="user_data").id]
    names.append(client.files.create(file=("é.txt", b"x"), purpose="vision").id)
    found = client.files.retrieve(names[0])
    assert (found.filename, found.bytes) == ("a b.bin", len(data))
    assert client.files.content(names[0]).content == data
    assert client.files.retrieve(names[1]).filename == "é.txt"
    listed = [one.id for one in client.files.list(purpose="vision", order="asc")]
    assert names[1] in listed and names[0] not in listed
    pages = [one.id for one in client.files.list(limit=1)]
    assert set(names) <= set(pages) and len(pages) == len(set(pages))
    for path in (folder, *folder.iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert path.is_dir() or path.suffix or mode == 0o600 or path.name == "lock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert client.files.delete(names[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(names[0])
    assert not list(folder.glob(f"*{names[0]}*"))


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((PURPOSE, FILE), 200),
        ((FILE, PURPOSE), 200),
        ((PURPOSE,), 400),
        ((FILE,), 400),
        ((('name="purpose"', b"fine-tune"), FILE), 400),
        ((PURPOSE, FILE, ('name="other"', b"1")), 400),
        ((PURPOSE, ('name="purpose"', b"x" * 300), FILE), 400),
        ((PURPOSE, ('name="expires_after[seconds]"', b"1"), FILE), 400),
        ((PURPOSE,) * 9, 400),
        ((PURPOSE, ('name="file"; filename="a"', b"x" * (2 << 20))), 413),
    ],
)
def test_uploads_by_hand(
    server: Running, folder: Path, parts: Any, status: int
) -> None:
    before = set(folder.iterdir())
    reply = upload(server, *parts)
    assert reply.status == status, reply.body
    if status != 200:
        assert reply.error["message"]
        assert set(folder.iterdir()) == before


def test_uploads_that_are_no_forms(server: Running, folder: Path) -> None:
    before = set(folder.iterdir())
    for body, kind, status in (
        (b"{}", "application/json", 415),
        (b"{}", "multipart/form-data", 415),
        (b"nonsense", FORM, 400),
        (b"--X\r\n\r\n\r\n", FORM, 400),
        (b"", FORM, 400),
    ):
        headers = {"Content-Type": kind}
        reply = server.ask("POST", "/v1/files", body, headers=headers)
        assert reply.status == status, (body, kind, reply.body)
    assert upload(server, PURPOSE, FILE, Origin="http://evil.example").status == 403
    assert upload(server, PURPOSE, FILE, Origin=server.url).status == 200
    hidden = upload(server, PURPOSE, ('name="file"; filename="../../x"', b"a"))
    assert hidden.json["filename"] == "x"
    assert len(set(folder.iterdir()) - before) == 4


def test_half_an_upload_is_no_file(server: Running, folder: Path) -> None:
    before = set(folder.iterdir())
    connection = server.connect()
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Content-Type", FORM)
    connection.putheader("Content-Length", "100000")
    connection.endheaders()
    head = 'name="file"; filename="a"'
    connection.send(f"--X\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode())
    connection.send(b"x" * 5000)
    wait_until(lambda: set(folder.iterdir()) != before, "the upload to begin")
    connection.close()
    wait_until(lambda: set(folder.iterdir()) == before, "the upload to go")


def test_the_folder_has_a_bound(tmp_path: Path) -> None:
    """A client has three quarters of it."""
    with serving(files=tmp_path, max_files=4000) as server:
        big = ('name="file"; filename="a"', b"x" * 2000)
        first = upload(server, PURPOSE, big)
        assert first.status == 200
        refused = upload(server, PURPOSE, big)
        assert refused.status == 413 and "delete some" in refused.error["message"]
        server.ask("DELETE", f"/v1/files/{first.json['id']}")
        assert upload(server, PURPOSE, big).status == 200
        with (
            pytest.raises(InvalidConfig, match="another server"),
            serving(files=tmp_path),
        ):
            pass


def test_a_key_does_not_see_anothers(tmp_path: Path) -> None:
    """Nor does a file's name in a chat, and a key keeps its files when the list of keys changes."""
    keys = (Key("one"), Key("two"))
    with serving(files=tmp_path, keys=keys) as server, client_of(server, "one") as one:
        file = one.files.create(file=IMAGES / "red_circle.png", purpose="vision").id
        batch = ended(one, begin(one, lines_of([chat("count to 3")])))
        with client_of(server, "two") as two:
            assert not list(two.files.list()) and not list(two.batches.list())
            for call in (
                lambda: two.files.retrieve(file),
                lambda: two.files.content(file),
                lambda: two.files.delete(file),
                lambda: two.batches.retrieve(batch.id),
                lambda: two.batches.cancel(batch.id),
                lambda: begin_with(two, batch.input_file_id),
                lambda: ask_with(two, file),
            ):
                with pytest.raises(openai.NotFoundError):
                    call()
        with pytest.raises(openai.AuthenticationError):
            list(client_of(server, "three").files.list())
    later = (Key("zero"), Key("one"))
    with serving(files=tmp_path, keys=later) as server, client_of(server, "one") as one:
        assert file in [found.id for found in one.files.list()]
        assert one.batches.retrieve(batch.id).status == "completed"


def begin_with(client: Any, file_id: str) -> Any:
    asked = {"completion_window": "24h", "endpoint": CHAT}
    return client.batches.create(input_file_id=file_id, **asked)


def ask_with(client: Any, file_id: str) -> Any:
    content = [{"type": "file", "file": {"file_id": file_id}}]
    return client.chat.completions.create(model="qwen2_vl", **chat(content))


def test_pictures_by_their_ids_at_every_door(server: Running, client: Any) -> None:
    file = client.files.create(file=IMAGES / "red_circle.png", purpose="vision").id
    words = "What is it?"
    uri = {"type": "image_url", "image_url": {"url": data_uri("red_circle.png")}}
    asked = server.chat([uri, {"type": "text", "text": words}]).json
    wanted = asked["choices"][0]["message"]["content"]
    tokens = asked["usage"]["prompt_tokens"]
    image = {"type": "input_image", "file_id": file, "detail": "auto"}
    given = [image, {"type": "input_text", "text": words}]
    body = {"input": [{"role": "user", "content": given}]}
    response = server.ask("POST", "/v1/responses", body).json
    assert response["output"][0]["content"][0]["text"] == wanted
    assert response["usage"]["input_tokens"] == tokens
    source = {"type": "file", "file_id": file}
    for kind in ("image", "document"):
        block = {"type": kind, "source": source}
        message = chat([block, {"type": "text", "text": words}], max_tokens=300)
        said = server.ask("POST", "/v1/messages", message).json
        assert said["content"][0]["text"] == wanted
        used = said["usage"]
        read = used["input_tokens"] + used["cache_read_input_tokens"]
        assert read == tokens
    data = {"file_data": data_uri("red_circle.png")}
    part = {"type": "file", "file": data}
    said = server.chat([part, {"type": "text", "text": words}]).json
    assert said["choices"][0]["message"]["content"] == wanted
    for wrong in ({}, {**data, "file_id": file}):
        assert server.chat([{"type": "file", "file": wrong}]).status == 400


def test_without_a_folder_the_answer_says_how_to_have_one() -> None:
    with serving() as server:
        asked = {"input_file_id": "a", "endpoint": CHAT, "completion_window": "24h"}
        for reply in (
            upload(server, PURPOSE, FILE),
            server.ask("GET", "/v1/files"),
            server.ask("GET", "/v1/batches"),
            server.ask("POST", "/v1/batches", asked),
        ):
            assert reply.status == 404
            assert "--files" in reply.error["message"]
        named = server.chat([{"type": "file", "file": {"file_id": "file-0"}}])
        assert named.status == 400 and "--files" in named.error["message"]


def test_odd_records_are_left_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, of another version, no mapping: the folder serves on without them."""
    batch = dict.fromkeys(("client", "output", "errors", "age", "ends_as"), "a")
    odd = {
        "cut": "{",
        "list": "[]",
        "other": '{"owner": "a"}',
        "void": "",
        "deep": "[" * 100_000,
        "file": '{"owner": "a", "file": 3}',
        "number": '{"owner": "a", "file": {"id": 3, "bytes": "b"}}',
        "batch": json.dumps({"owner": "a", "shown": 3, **batch}),
    }
    for name, text in odd.items():
        (tmp_path / f"batch_{name}.json").write_text(text)
        (tmp_path / f"file-{name}.json").write_text(text)
    with serving(files=tmp_path) as server:
        listed = server.ask("GET", "/v1/batches")
        assert listed.status == 200
    for name in odd:
        assert f"batch_{name}.json" in caplog.text
        assert f"file-{name}.json" in caplog.text
