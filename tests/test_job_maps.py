"""``map_table``: a table of the same kind with an answer for each row, in order."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

from tests.test_job_runs import Echo
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.handle import Handle
from vlm_batch.jobs import InvalidJob, map_table
from vlm_batch.jobs.maps import WINDOW
from vlm_batch.types import Event, Request

ANSWERS = [
    "what bill?: a.png",
    "what menu?: b.png",
    None,
    "what bill?: c.png",
    "what menu?: d.png",
]
COLUMNS = {
    "image": ["a.png", "b.png", "bad.png", "c.png", "d.png"],
    "kind": ["bill", "menu", "bill", "bill", "menu"],
}


def png(colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(out, format="PNG")
    return out.getvalue()


def echo() -> Any:
    """As much of a batcher as a table needs."""
    return Echo()


def check(texts: Any, errors: Any, tokens: Any) -> None:
    assert [None if text is None or text != text else text for text in texts] == ANSWERS
    assert [error is not None and error == error for error in errors] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert list(tokens) == [2, 2, 0, 2, 2]


def test_arrow_tables() -> None:
    table = pa.table(COLUMNS)
    found = map_table(echo(), table, "what {kind}?")
    assert found.select(["image", "kind"]) == table
    check(
        *(
            found.column(name).to_pylist()
            for name in ("answer", "answer_error", "answer_tokens")
        )
    )
    assert map_table(echo(), table.slice(0, 0), "what {kind}?").num_rows == 0


def test_pandas() -> None:
    frame = pd.DataFrame(COLUMNS, index=list("vwxyz"))
    found = map_table(echo(), frame, "what {kind}?", into="caption")
    assert isinstance(found, pd.DataFrame) and list(found.index) == list("vwxyz")
    assert list(frame.columns) == ["image", "kind"]
    check(found["caption"], found["caption_error"], found["caption_tokens"])
    empty = map_table(echo(), pd.DataFrame({"image": ["a.png", float("nan")]}), "?")
    assert (
        empty["answer_error"][1] == "row 1: column 'image' is empty; leave the row out"
    )


def test_polars() -> None:
    frame = pl.DataFrame(COLUMNS)
    found = map_table(echo(), frame, "what {kind}?")
    assert isinstance(found, pl.DataFrame) and found.select("image", "kind").equals(
        frame
    )
    check(
        *(found[name].to_list() for name in ("answer", "answer_error", "answer_tokens"))
    )
    with pytest.raises(InvalidJob, match=r"collect\(\) it"):
        map_table(echo(), frame.lazy(), "what {kind}?")


def test_datasets() -> None:
    found = map_table(echo(), datasets.Dataset.from_dict(COLUMNS), "what {kind}?")
    assert isinstance(found, datasets.Dataset)
    check(found["answer"], found["answer_error"], found["answer_tokens"])


def test_streams_are_answered_while_they_are_read() -> None:
    read = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for start in range(0, 300, 3):
            read += 1
            yield pa.RecordBatch.from_pydict(
                {"image": [f"{start + n}.png" for n in range(3)]}
            )

    schema = pa.schema([("image", pa.string())])
    reader = map_table(
        echo(), pa.RecordBatchReader.from_batches(schema, batches()), "?"
    )
    assert isinstance(reader, pa.RecordBatchReader)
    first = reader.read_next_batch()
    assert first.column("answer").to_pylist() == ["?: 0.png", "?: 1.png", "?: 2.png"]
    assert read <= 1 + WINDOW // 3
    assert reader.read_all().column("answer").to_pylist() == [
        f"?: {n}.png" for n in range(3, 300)
    ]

    def rows() -> Iterator[dict[str, str]]:
        nonlocal read
        for number in range(300):
            read += 1
            yield {"image": f"{number}.png"}

    read = 0
    stream = datasets.IterableDataset.from_generator(
        rows, features=datasets.Features({"image": datasets.Value("string")})
    )
    found = iter(map_table(echo(), stream, "?"))
    assert next(found) == {
        "image": "0.png",
        "answer": "?: 0.png",
        "answer_error": None,
        "answer_tokens": 2,
    }
    assert read <= WINDOW
    assert [row["answer"] for row in found] == [f"?: {n}.png" for n in range(1, 300)]
    bare = datasets.IterableDataset.from_generator(lambda: iter([{"image": "a.png"}]))
    assert [row["answer"] for row in map_table(echo(), bare, "?")] == ["?: a.png"]


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        (
            {"image": ["a"]},
            {"prompt": "{kind}?"},
            r"names \{kind\}, which is no column",
        ),
        ({"image": ["a"]}, {}, "has no column 'prompt'"),
        ({"image": ["a"]}, {"prompt": "?", "image": "picture"}, "no column 'picture'"),
        (
            {"image": ["a"], "answer": ["b"]},
            {"prompt": "?"},
            "has a column 'answer' already",
        ),
        (
            {"img": ["a"]},
            {"prompt": "?"},
            "no column of images, but 'img': image='img' takes it for that",
        ),
        (
            {"image": ["a"], "image_path": ["a"]},
            {"prompt": "?"},
            "image= says which one holds the images",
        ),
        ({"image": ["a"]}, {"prompt": " "}, "the prompt is empty"),
    ],
)
def test_tables_that_do_not_fit(
    table: dict[str, list[str]], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidJob, match=said):
        map_table(echo(), pa.table(table), **options)


def test_rows_whose_pictures_nobody_would_see_are_errors() -> None:
    """Unless it is said that rows are asked without."""
    table = pa.table({"receipt": ["a.png", "words"]})
    errors = map_table(echo(), table, "?")["answer_error"].to_pylist()
    assert (
        "the table has no column of images, but 'receipt': image='receipt' takes it"
        in errors[0]
        and errors[1] is None
    )
    assert map_table(echo(), table, "?", image="")["answer_error"].to_pylist() == [
        None,
        None,
    ]


def test_something_that_is_no_table() -> None:
    with pytest.raises(InvalidJob, match="int is no table"):
        map_table(echo(), 5, "?")


def test_the_real_batcher_with_every_kind_of_picture(tmp_path: Path) -> None:
    """Bytes, decoded pictures and paths of one table; the other requests of the batcher go on beside it."""
    features = datasets.Features(
        {"image": datasets.Image(), "prompt": datasets.Value("string")}
    )
    shapes = [path for path in sample_images() if "shapes" not in path.stem][:3]
    with VLMBatcher(default_checkpoint(), max_rows=4) as batcher:
        alone = [
            batcher.submit(path, "describe the picture").result(60).text
            for path in shapes
        ]
        prompts = ["describe the picture"] * 3
        stored = datasets.Dataset.from_dict(
            {"image": list(map(str, shapes)), "prompt": prompts}, features=features
        )
        frames = pd.DataFrame(
            {"image": [Image.open(path).convert("RGB") for path in shapes]}
        )
        stream = datasets.IterableDataset.from_generator(
            lambda: (
                {
                    "image": {"path": None, "bytes": path.read_bytes()},
                    "prompt": prompts[0],
                }
                for path in shapes
            ),
            features=features,
        )
        arrow = pa.table({"picture": [path.read_bytes() for path in shapes]})
        found: dict[str, Any] = {}

        def map_frames() -> None:
            found["pandas"] = list(map_table(batcher, frames, prompts[0])["answer"])

        beside = threading.Thread(target=map_frames)
        beside.start()
        found["datasets"] = list(map_table(batcher, stored)["answer"])
        answered = list(map_table(batcher, stream))
        # as the stream itself gives them
        assert all(isinstance(row["image"], Image.Image) for row in answered)
        found["stream"] = [row["answer"] for row in answered]
        found["arrow"] = (
            map_table(batcher, arrow, prompts[0], image="picture")
            .column("answer")
            .to_pylist()
        )
        found["polars"] = map_table(batcher, pl.from_arrow(arrow), prompts[0])[
            "answer"
        ].to_list()
        short = map_table(batcher, arrow, prompts[0], params={"max_tokens": 2})
        assert short.column("answer_tokens").to_pylist() == [2, 2, 2]
        beside.join()
    assert found == dict.fromkeys(
        ("pandas", "datasets", "stream", "arrow", "polars"), alone
    )


def test_rows_that_end_out_of_order_come_back_in_order() -> None:
    class Late(Echo):
        def submit_request(self, request: Request) -> Handle:
            handle = Handle("some", lambda request_id: False)
            result = self.answer(replace(request, request_id="some"))
            threading.Timer(
                0.05 if len(self.asked) % 7 == 1 else 0.0,
                handle.push,
                [Event("some", result=result)],
            ).start()
            return handle

    table = pa.table({"image": [f"{number}.png" for number in range(150)]})
    late = cast("Any", Late())
    assert map_table(late, table, "?").column("answer").to_pylist() == [
        f"?: {n}.png" for n in range(150)
    ]


@pytest.mark.parametrize("kind", ["arrow", "pandas", "datasets", "reader"])
def test_progress_is_shown_where_it_is_asked_for(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table's rows are known; a stream's are counted."""
    arrow = pa.table(COLUMNS)
    tables: dict[str, Any] = {
        "arrow": arrow,
        "pandas": arrow.to_pandas(),
        "datasets": datasets.Dataset.from_dict(COLUMNS),
        "reader": pa.RecordBatchReader.from_batches(arrow.schema, arrow.to_batches()),
    }
    found = map_table(echo(), tables[kind], "what {kind}?", progress=True)
    if kind == "reader":
        found.read_all()
    said = capsys.readouterr().err
    assert f"5/{'?' if kind == 'reader' else 5}" in said
    assert "8 tokens, 1 failed" in said
    map_table(echo(), arrow, "what {kind}?")
    assert capsys.readouterr().err == ""
