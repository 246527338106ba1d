"""Rows of a job from everything that people have them in, and what is asked about each."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlm_batch.errors import InvalidImage
from vlm_batch.jobs import (
    Columns,
    InvalidJob,
    JobRow,
    Questions,
    Reading,
    Source,
    open_sources,
)
from vlm_batch.jobs.cells import audios_of, media_of
from vlm_batch.jobs.plan import Job, Plan
from vlm_batch.jobs.rows import Ids
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.sources import Pdf
from vlm_batch.types import SamplingParams


def png(colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(out, format="PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(*arguments: str, scan: bool = False, **reading: Any) -> list[JobRow]:
    sources, _ = open_sources(arguments, Reading(**reading))
    return [
        row for source in sources for row in (source.scan() if scan else source.rows())
    ]


def only(source: list[Source]) -> Source:
    (one,) = source
    return one


# ---- JSON lines ----


def test_plain_json_lines(folder: Path) -> None:
    lines = [
        {
            "id": "a",
            "image": "a.png",
            "prompt": "what?",
            "params": {"max_tokens": 5},
            "kind": "bill",
        },
        {"id": 7, "images": ["b.png", "http://x/c.png"], "prompt": "compare"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "only words"},
        {"image": {"bytes": None, "path": "d.png"}, "images": None},
        {"image": None, "images": ["b.png"]},
    ]
    (folder / "in").mkdir()
    (folder / "in" / "a.png").write_bytes(png())
    (folder / "in" / "rows.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    a, b, chat, words, d, e = rows_of("in/rows.jsonl")
    assert (a.id, a.images, a.prompt, a.params["max_tokens"]) == (
        "a",
        ("in/a.png",),
        "what?",
        5,
    )
    assert a.columns["kind"] == "bill"
    assert (b.id, b.images) == ("7", ("in/b.png", "http://x/c.png"))
    assert chat.messages and chat.id == "in/rows.jsonl:5"
    assert words.prompt == "only words" and not words.images
    assert d.images == ("in/d.png",) and e.images == ("in/b.png",)
    assert (a.strange, b.strange) == (("kind",), ())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "rows.jsonl:2: the line is not JSON"),
        (
            '{"image": "a.png", "score": NaN}',
            "rows.jsonl:2: the line is not JSON: NaN is no number",
        ),
        (
            '{"image": "a.png", "score": 1e400}',
            "rows.jsonl:2: the line is not JSON: '1e400' is larger",
        ),
        ("[1]", "rows.jsonl:2: the line is list, not an object"),
        ("[" * 100_000, "rows.jsonl:2: the line is"),
        ('{"image": 5}', "a picture is a path, URL, bytes or a list of these, not int"),
        ('{"image": ""}', "column 'image' is empty"),
        ('{"image": {"x": 1}}', "needs bytes, path or url"),
        ('{"image": "a.png", "prompt": 5}', "prompt is int, not str"),
        ('{"messages": "hello"}', "messages is str, not list"),
        ('{"prompt": "a", "messages": []}', "exclude each other"),
        ('{"prompt": "a", "params": {"tokens": 5}}', "params does not know tokens"),
        ('{"prompt": "a", "params": {"max_tokens": 0}}', "max_tokens is 0"),
        (
            '{"prompt": "a", "params": {"logits_processors": []}}',
            "params does not know logits_processors",
        ),
        ('{"prompt": "a", "params": 5}', "params is int, not dict"),
        ('{"prompt": " "}', "the prompt is empty"),
        (
            '{"image": "a.png", "images": ["b.png"]}',
            "image and images exclude each other",
        ),
        (
            '{"prompt": "a", "params": {"max_token": 5}}',
            "params does not know max_token ('max_tokens' is probably meant)",
        ),
        (
            '{"custom_id": "x", "body": {"messages": []}, "image": "a.png"}',
            "the line has 'image' beside its body",
        ),
        (
            '{"custom_id": "x", "body": {"messages": [], "max_token": 1}}',
            "('max_tokens' is probably meant)",
        ),
        ('{"custom_id": "x", "body": {}}', "body has no list of messages"),
        (
            '{"custom_id": "x", "body": {"messages": [], "voice": 1}}',
            "body has 'voice'",
        ),
        (
            '{"custom_id": "x", "body": {"messages": [], "stream": true}}',
            "stream is True",
        ),
        (
            '{"custom_id": "x", "url": "/v1/embeddings", "body": {"messages": []}}',
            "/v1/embeddings is not answered",
        ),
    ],
)
def test_a_line_that_cannot_be_asked_is_one_row(
    folder: Path, line: str, said: str
) -> None:
    """It names its number, and the rows around it are as they were."""
    good = '{"id": "first", "image": "a.png"}\n', '\n{"id": "last", "image": "b.png"}\n'
    (folder / "rows.jsonl").write_text(line.join(good))
    items = [
        item for row in rows_of("rows.jsonl") for item in Questions(("?",)).ask(row)
    ]
    assert [item.error for item in items[::2]] == [None, None]
    assert said in (items[1].error or "")
    assert len(items) == 3


def test_openai_batch_lines(folder: Path) -> None:
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "?"},
                {"type": "image_url", "image_url": {"url": "u"}},
            ],
        }
    ]
    body = {
        "model": "gpt",
        "messages": chat,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stop": ["x"],
        "n": 1,
    }
    line = {
        "custom_id": "r-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    (folder / "batch.jsonl").write_text(json.dumps(line))
    (row,) = rows_of("batch.jsonl")
    (item,) = Questions(params=SamplingParams(max_tokens=3, top_k=4)).ask(row)
    assert item.id == "r-1" and item.messages == tuple(chat)
    assert item.params == SamplingParams(
        max_tokens=9, temperature=0.5, stop=("x",), top_k=4
    )
    assert item.request().messages == tuple(chat)


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            },
            SamplingParams(json_schema={"type": "object"}),
        ),
        (
            {"response_format": {"type": "json_object"}},
            SamplingParams(json_schema={"type": "object"}),
        ),
        ({"response_format": {"type": "text"}, "stream": False}, SamplingParams()),
        (
            {"logit_bias": {"17": -5}, "n": 2},
            SamplingParams(logit_bias={17: -5.0}, n=2),
        ),
        ({"logprobs": True, "top_logprobs": 3}, SamplingParams(logprobs=3)),
        (
            {
                "skip_special_tokens": False,
                "no_repeat_ngram_size": 30,
                "window_size": 90,
                "bad_words": ["x"],
            },
            SamplingParams(
                skip_special_tokens=False,
                no_repeat_ngram_size=30,
                window_size=90,
                bad_words=["x"],
            ),
        ),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 1},
            SamplingParams(presence_penalty=0.5, frequency_penalty=1),
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format is text, json_object, or json_schema",
        ),
        (
            {"response_format": "json"},
            "response_format is text, json_object, or json_schema",
        ),
        ({"logit_bias": [1]}, "logit_bias maps token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "invalid literal"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        ({"tools": [{"type": "function"}]}, "which is not done here"),
        ({"audio": {}}, "which is not known here"),
    ],
    ids=str,
)
def test_fields_of_openai_batch_lines(
    folder: Path, given: dict[str, Any], params: SamplingParams | str
) -> None:
    """Each is honoured or refused by its name."""
    line = {
        "custom_id": "r",
        "body": {"messages": [{"role": "user", "content": "?"}], **given},
    }
    (folder / "batch.jsonl").write_text(json.dumps(line))
    (row,) = rows_of("batch.jsonl")
    (item,) = Questions().ask(row)
    if isinstance(params, str):
        assert item.error is not None and params in item.error
    else:
        assert item.error is None and item.params == params


# ---- CSV ----


@pytest.mark.parametrize(
    ("separator", "name"),
    [(",", "t.csv"), (";", "t.csv"), ("\t", "t.tsv"), ("\t", "t.csv")],
)
def test_delimited_tables(folder: Path, separator: str, name: str) -> None:
    table = [
        ["file_name", "kind", "note"],
        ["a.png", "bill", f'"with {separator} and\nline"'],
        ["b.png", "menu", ""],
    ]
    (folder / name).write_text(
        "\n".join(map(separator.join, table)), encoding="utf-8-sig"
    )
    first, second = rows_of(name)
    assert (first.images, first.columns["kind"]) == (("a.png",), "bill")
    assert first.columns["note"] == f"with {separator} and\nline"
    assert (first.id, second.id) == (f"{name}:2", f"{name}:4")


def test_lines_with_bytes_that_end_strings_and_lines(folder: Path) -> None:
    (folder / "t.csv").write_bytes(
        b"image,kind\na.png,x\nb\0.png,y\nc\rd.png,z\ne.png,z\n"
    )
    first, null, half, rest, last = rows_of("t.csv")
    assert (first.images, rest.images, last.images) == (
        ("a.png",),
        ("d.png",),
        ("e.png",),
    )
    assert null.images == ("b\0.png",) or "NUL" in (null.error or "")
    assert half.error == "t.csv:4: 1 cells under 2 columns; quote cells with separators"


def test_ragged_lines_and_other_bytes(folder: Path) -> None:
    (folder / "t.csv").write_bytes(
        b"image,kind\na.png,caf\xe9\nb.png\nc.png,x,y\n\nd.png,z\n"
    )
    rows = rows_of("t.csv")
    assert rows[0].columns["kind"] == os.fsdecode(b"caf\xe9")
    assert [row.error for row in rows] == [
        None,
        "t.csv:3: 1 cells under 2 columns; quote cells with separators",
        "t.csv:4: 3 cells under 2 columns; quote cells with separators",
        None,
    ]


def test_tables_as_people_write_them(folder: Path) -> None:
    """Excel's UTF-16, bars, blanks around paths, pictures in base64."""
    (folder / "a.png").write_bytes(png())
    text = "id,image\n1,a.png\n2, a.png \n"
    (folder / "wide.csv").write_text(text, encoding="utf-16")
    (folder / "bars.csv").write_text(text.replace(",", "|"))
    for name in ("wide.csv", "bars.csv"):
        assert [(row.id, row.images) for row in rows_of(name)] == [
            ("1", ("a.png",)),
            ("2", ("a.png",)),
        ]
    whole = base64.b64encode(png()).decode()
    (folder / "inside.csv").write_text(f"image\n{whole}\n{whole[:-3]}\n")
    first, second = rows_of("inside.csv")
    assert first.images == (png(),) and "a picture in base64 of" in str(second.error)


def test_lists_of_paths_are_said_how_to_be_read(folder: Path) -> None:
    (folder / "list.txt").write_text("a.png\n")
    with pytest.raises(
        InvalidJob,
        match=r"no picture in list.txt \(skipped: 1 .txt \(a list of paths .* run - < FILE",
    ):
        rows_of("list.txt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no header"),
        ("a,a\n1,2", "'a' twice"),
        (",,\n1,2,3", "no header"),
        ("1,a.png\n2,b.png", r"no header: its first line names a picture \(a.png\)"),
    ],
)
def test_tables_that_are_none(folder: Path, text: str, said: str) -> None:
    (folder / "t.csv").write_text(text)
    with pytest.raises(InvalidJob, match=said):
        rows_of("t.csv")


def test_a_table_that_is_not_there(folder: Path) -> None:
    with pytest.raises(InvalidJob, match=r"t\.csv does not exist"):
        rows_of("t.csv")
    (folder / "t.csv").write_text("image\na.png")
    with pytest.raises(
        InvalidJob, match=r"no column 'picture' \(--image-column\); it has image"
    ):
        rows_of("t.csv", columns=Columns(image="picture"))


def test_the_prompt_column_is_asked_unless_the_job_has_a_prompt(folder: Path) -> None:
    (folder / "t.csv").write_text("image,prompt,question\na.png,one,two\n")
    assert rows_of("t.csv")[0].prompt == "one"
    assert rows_of("t.csv", own_prompts=False)[0].prompt is None
    assert rows_of("t.csv", columns=Columns(prompt="question"))[0].prompt == "two"


# ---- Parquet and datasets ----


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([png(), png("blue")]),
        pa.array(
            [{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": "x.png"}]
        ),
        pa.array([[png()], [png("blue")]]),
        pa.array(
            [[{"bytes": png(), "path": "y"}], [{"bytes": png("blue"), "path": "x"}]]
        ),
    ],
    ids=["bytes", "struct", "list", "list of structs"],
)
def test_parquet_with_pictures_inside(folder: Path, cells: pa.Array) -> None:
    pq.write_table(pa.table({"picture": cells, "label": ["a", "b"]}), "t.parquet")
    assert [row.images for row in rows_of("t.parquet")] == [(png(),), (png("blue"),)]
    assert [row.columns for row in rows_of("t.parquet")] == [
        {"label": "a"},
        {"label": "b"},
    ]
    assert [(row.id, row.images) for row in rows_of("t.parquet", scan=True)] == [
        ("t.parquet:0", ()),
        ("t.parquet:1", ()),
    ]
    pq.write_table(pa.table({"picture": cells}), "t.parquet")
    assert [row.id for row in rows_of("t.parquet", scan=True)] == [
        "t.parquet:0",
        "t.parquet:1",
    ]


def test_parquet_with_paths_ids_and_empty_cells(folder: Path) -> None:
    pq.write_table(
        pa.table(
            {"id": ["x", "y"], "image_path": ["a.png", None], "mask": [b"m", b"n"]}
        ),
        "t.parquet",
    )
    x, y = rows_of("t.parquet")
    assert (x.id, x.images, x.error) == ("x", ("a.png",), None)
    assert y.error == "t.parquet:1: column 'image_path' is empty; leave the row out"


def test_a_parquet_file_that_is_none(folder: Path) -> None:
    (folder / "t.parquet").write_text("no")
    with pytest.raises(InvalidJob, match=r"t\.parquet is no Parquet file"):
        rows_of("t.parquet")


def test_directories_of_the_datasets_library(folder: Path) -> None:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("string")}
    )
    made = datasets.Dataset.from_dict(
        {"image": [{"bytes": png()}] * 2, "label": ["a", "b"]}, features=features
    )
    made.save_to_disk("one")
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk("two")
    assert [(row.id, row.images, row.columns) for row in rows_of("one")] == [
        ("one:0", (png(),), {"label": "a"}),
        ("one:1", (png(),), {"label": "b"}),
    ]
    assert [row.id for row in rows_of("one", scan=True)] == ["one:0", "one:1"]
    assert [row.id for row in rows_of("two")] == [
        "two/train:0",
        "two/train:1",
        "two/test:0",
    ]
    assert [row.columns["label"] for row in rows_of("two", split="test")] == ["b"]
    features = datasets.Features({"images": datasets.List(datasets.Image())})
    datasets.Dataset.from_dict(
        {"images": [[{"bytes": png()}] * 2]}, features=features
    ).save_to_disk("lists")
    assert [row.images for row in rows_of("lists")] == [(png(), png())]
    assert [row.id for row in rows_of("lists", scan=True)] == ["lists:0"]
    with pytest.raises(InvalidJob, match="no split 'dev'; it has train, test"):
        rows_of("two", split="dev")


# ---- documents and archives ----


def test_pdf_pages_are_rendered_one_at_a_time(folder: Path) -> None:
    pages = [Image.new("RGB", (100, 50), colour) for colour in ("red", "blue")]
    pages[0].save("scan.pdf", save_all=True, append_images=pages[1:], resolution=100)
    (folder / "bad.pdf").write_bytes(b"%PDF-1.4 no")
    first, second, bad = rows_of("scan.pdf", "bad.pdf", dpi=200)
    assert (first.id, second.id, second.columns["page"], second.columns["pages"]) == (
        "scan.pdf#1",
        "scan.pdf#2",
        2,
        2,
    )
    assert bad.id == "bad.pdf" and "cannot be read as a PDF" in (bad.error or "")
    (item,) = Questions(("page {page} of {name}?",)).ask(second)
    assert item.prompt == "page 2 of scan.pdf?"
    (picture,) = item.request().images
    assert picture.size == (200, 100) and picture.getpixel((9, 9))[2] > 200
    assert rows_of(".", pdfs=True)[0].id == "./bad.pdf"
    (item,) = Questions().ask(rows_of("scan.pdf", dpi=10**6)[0])
    with pytest.raises(
        InvalidImage, match=r"scan.pdf#1 cannot be rendered: .* pixels at 1000000 dots"
    ):
        item.request()


def test_web_dataset_archives(folder: Path) -> None:
    def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))

    for name in ("s.tar", "s.tar.gz"):
        with tarfile.open(name, "w:gz" if name.endswith("gz") else "w") as archive:
            add(archive, "x/one.png", png())
            add(archive, "x/one.json", b'{"kind": "bill"}')
            add(archive, "x/one.txt", b"caption")
            add(archive, "two.seg.png", png("blue"))
            add(archive, "three.json", b"{}")
        for scan in (False, True):
            one, two, three = rows_of(name, scan=scan)
            assert (one.id, one.columns["kind"], one.columns["txt"]) == (
                f"{name}/x/one",
                "bill",
                "caption",
            )
            assert (two.id, three.error) == (
                f"{name}/two",
                f"{name}/three has no picture, only json",
            )
        one, two, _ = rows_of(name)
        assert [next(Questions().ask(row)).request().images for row in (one, two)] == [
            (png(),),
            (png("blue"),),
        ]
    (folder / "cut.tar").write_bytes((folder / "s.tar").read_bytes()[:-9000])
    rows = rows_of("cut.tar")
    assert [row.id for row in rows] == ["cut.tar/x/one", "cut.tar:damaged"]
    assert "cut.tar is damaged after x/one: it ends without" in (rows[-1].error or "")


def test_a_damaged_archive_keeps_the_rows_before(folder: Path) -> None:
    with tarfile.open("s.tar", "w") as archive:
        for name in ("one.png", "two.png"):
            member = tarfile.TarInfo(name)
            member.size = 3000
            archive.addfile(member, io.BytesIO(b"x" * 3000))
    (folder / "s.tar").write_bytes((folder / "s.tar").read_bytes()[:5000])
    one, damaged = rows_of("s.tar")
    assert one.id == "s.tar/one" and "s.tar is damaged after" in (damaged.error or "")


def test_a_broken_page_is_its_row_alone(folder: Path) -> None:
    (row,) = Pdf("gone.pdf").rows()
    assert "cannot be read as a PDF" in (row.error or "")


# ---- standard input ----


def test_documents_on_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (100, 50)).save("scan.pdf")
    monkeypatch.setattr("sys.stdin", io.StringIO("scan.pdf\nb.png\nclip.mp4\n"))
    page, picture, clip = rows_of("-", fps=2.0)
    assert (page.id, picture.id, clip.videos[0].fps) == ("scan.pdf#1", "b.png", 2.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "a", "image": "a.png"}\n{"id": "b", "image": "b.png"}\n',
        "a.png\nb.png\n",
    ],
)
def test_standard_input(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    sources, _ = open_sources(["-"])
    assert only(sources).is_once
    assert [row.images for row in only(sources).rows()] == [("a.png",), ("b.png",)]


def test_empty_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(InvalidJob, match="standard input is empty"):
        open_sources(["-"])


# ---- what is asked ----


def test_templates_fill_columns_and_leave_json_alone() -> None:
    row = JobRow(
        id="r",
        images=("a.png",),
        columns={"kind": "bill", "no": 3, "Invoice No": "X", "empty": None},
    )
    text = 'The {kind} no {no} ({Invoice No}) as {{"total": 1}} or {"total": number} {{kind}}?'
    (item,) = Questions((text,)).ask(row)
    assert (
        item.prompt == 'The bill no 3 (X) as {"total": 1} or {"total": number} {kind}?'
    )
    (item,) = Questions(("{x}",)).ask(
        JobRow(id="r", columns={"x": os.fsdecode(b"caf\xe9")})
    )
    assert item.prompt == "caf\ufffd"
    for name, said in (("size", "is not there (columns: kind"), ("empty", "is empty")):
        (item,) = Questions((f"{{{name}}}",)).ask(row)
        assert said in (item.error or "")


def test_several_prompts_and_a_system_prompt() -> None:
    questions = Questions(("what?", "where {x}?"), system="You read {x}.")
    first, second = questions.ask(
        JobRow(id="r", images=("a.png",), columns={"x": "bills"})
    )
    assert (first.id, second.id, second.prompt) == ("r#1", "r#2", "where bills?")
    request = second.request()
    assert request.prompt is None and request.images == ("a.png",)
    assert request.messages == (
        {"role": "system", "content": "You read bills."},
        {"role": "user", "content": "where bills?"},
    )
    for chat in (
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "own"}],
    ):
        (item,) = questions.ask(JobRow(id="r", messages=chat, columns={"x": "bills"}))
        begun = (
            [{"role": "system", "content": "You read bills."}, *chat]
            if chat[0]["role"] == "user"
            else chat
        )
        assert list(item.request().messages or ()) == begun
    (own,) = questions.ask(JobRow(id="r", prompt="mine", columns={"x": 1}))
    assert (own.id, own.prompt) == ("r", "mine")


def test_a_picture_that_cannot_be_made_is_its_rows_error() -> None:
    def load() -> tuple[object, ...]:
        raise RuntimeError("gone")

    (item,) = Questions().ask(JobRow(id="r", images=("r",), load=load))
    with pytest.raises(RuntimeError, match="gone"):
        item.request()


# ---- addresses, and what is none ----


@pytest.mark.parametrize(
    "address",
    ["HTTPS://Host.example/a.PNG?size=1", "DATA:image/png;base64,iVBORw0KGgo="],
)
def test_an_address_is_one_in_any_case(folder: Path, address: str) -> None:
    """As the loaders read it: no path beside the table, and no file that is missing."""
    (folder / "in").mkdir()
    (folder / "in" / "rows.jsonl").write_text(json.dumps({"image": address}))
    (folder / "in" / "rows.csv").write_text(f'kind,scan\nbill,"{address}"\n')
    (row,) = rows_of("in/rows.jsonl")
    assert row.images == (address,) and row.error is None
    (row,) = rows_of("in/rows.csv", columns=Columns(image="scan"))
    assert row.images == (address,) and row.error is None
    with pytest.raises(InvalidJob, match="has no column of images, but 'scan'"):
        plan_of("in/rows.csv")
    (row,) = rows_of(address)
    assert row.images == (address,)
    assert row.columns["name"] in ("a.PNG", "png;base64,iVBORw0KGgo=")
    said = "data URI of 34 characters"
    assert row.id == (said if address.startswith("DATA") else address)


def plan_of(*arguments: str) -> Plan:
    sources, _ = open_sources(arguments)
    return Job(sources, Questions(), Sink()).plan(Ids(), Ids())


@pytest.mark.parametrize("nothing", [b"", bytearray(), memoryview(b""), "", None])
def test_a_cell_without_bytes_is_no_picture(nothing: Any) -> None:
    assert media_of(nothing, "") == ()
    assert audios_of(nothing, "") == ()
