"""The model that reads: what it is trained on, its steps, and its way from a minute's training to a checkpoint."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm import load
from PIL import Image
from tokenizers import Tokenizer

from fixtures.training import scenes
from fixtures.training.reader import documents, export, learning, measure, papers
from fixtures.training.reader import model as reader
from fixtures.training.reader.pool import BUCKETS
from fixtures.training.reader.rows import (
    NO_LABEL,
    SIDE,
    SLOTS,
    SLOTS_ACROSS,
    TOKENIZER,
    Bucket,
    Collator,
    mark_cells,
)
from tests.test_training import Always, inputs_of, prefilled
from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.loading import adapt, checkpoints, load_model

ROOT = Path(__file__).parent.parent
STRIP = Bucket("line", (128, 32), 40)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three of matplotlib's fonts, one of them under a name that is held out."""
    folder = tmp_path_factory.mktemp("fonts")
    source = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name, font in (
        ("DejaVuSans", "DejaVuSans"),
        ("Mono", "DejaVuSansMono"),
        ("Caladea", "DejaVuSerif"),
    ):
        (folder / f"{name}.ttf").write_bytes((source / f"{font}.ttf").read_bytes())
    before, papers.FOLDERS = papers.FOLDERS, (str(folder),)
    papers.fonts.cache_clear()
    yield folder
    papers.FOLDERS = before
    papers.fonts.cache_clear()


@pytest.fixture(scope="module")
def collate() -> Collator:
    return Collator(Tokenizer.from_file(str(TOKENIZER)))


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("kind", sorted(documents.KINDS))
def test_a_seed_makes_the_same_document(kind: str) -> None:
    bucket = next(bucket for bucket, _, _ in BUCKETS if bucket.kind == kind)
    first, second, other = (
        bucket.record(random.Random(seed), False) for seed in (5, 5, 6)
    )
    assert (first.dialogues, first.letters) == (second.dialogues, second.letters)
    assert all(
        (one == two).all()
        for one, two in zip(first.pictures, second.pictures, strict=True)
    )
    assert first.dialogues != other.dialogues


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("line", "Read"),
        ("page", "Read"),
        ("table", "Read the table."),
        ("chart", "Read"),
    ],
)
def test_what_is_held_out_goes_by_content(
    kind: str, asked: str, is_held_out: bool
) -> None:
    """The first line that is read, the first row of a table, the first bar: on one side, or on the other."""
    bucket = next(
        bucket
        for bucket, _, _ in BUCKETS
        if bucket.kind == kind and bucket.size[0] > 200
    )
    rng = random.Random(3)
    records = [bucket.record(rng, is_held_out) for _ in range(60)]
    answers = {
        answer
        for one in records
        for turns in one.dialogues
        for question, answer in turns
        if asked in question
    }
    number = 1 if kind == "table" else 0
    assert len(answers) > 10
    assert {
        documents.is_held_out(answer.split("\n")[number]) for answer in answers
    } == {is_held_out}


@pytest.mark.usefixtures("fonts")
def test_held_out_receipts_and_fonts() -> None:
    rng = random.Random(4)
    for is_held_out in (False, True):
        for _ in range(30):
            paper, receipt = documents.print_receipt(rng, (256, 320), is_held_out)
            assert ("Caladea" in paper.path) == is_held_out
            form = receipt.form
            assert (
                not form["date"]
                or documents.is_held_out(f"{form['shop']} {form['date']}".lower())
                == is_held_out
            )
            prices = sum(round(100 * float(item["price"])) for item in form["items"])
            assert prices == round(100 * float(form["total"]))


@pytest.mark.usefixtures("fonts")
def test_cells_hold_the_characters_that_are_printed_there() -> None:
    """Read slot by slot, the cells of each line of a typewriter's page are its text."""
    rng = random.Random(1)
    paper = papers.Paper(rng, (256, 96), 16)
    while "Mono" not in paper.path or paper.is_drawn:
        paper = papers.Paper(rng, (256, 96), 16)
    texts = ["Wide, 12.50!", "it is ~ thin", "last line"]
    for number, text in enumerate(texts):
        paper.write((6, 4 + 30 * number), text)
    grid = 96 // SIDE, 256 // SIDE
    cells = np.zeros((grid[0] * grid[1], SLOTS), np.uint8)
    lines = np.zeros(grid[0] * grid[1], np.uint8)
    mark_cells(paper.letters, grid, cells, lines)
    slots = (
        cells.reshape(*grid, -1, SLOTS_ACROSS)
        .transpose(0, 2, 1, 3)
        .reshape(-1, grid[1] * SLOTS_ACROSS)
    )
    found = ["".join(chr(32 + one) for one in row if one) for row in slots if row.any()]
    assert found == [text.replace(" ", "") for text in texts]
    written = cells.any(axis=1)
    assert (lines[~written] == 0).all()
    assert sorted(set(lines[written])) == [1, 2, 3]
    for x, y, character, _ in paper.letters:  # and ink is there
        assert (
            chr(character) in "~,.!"
            or paper.ink[int(y) - 5 : int(y) + 5, int(x) - 4 : int(x) + 5].any()
        )


@pytest.mark.usefixtures("fonts")
def test_a_row_asks_for_the_answer_and_nothing_else(collate: Collator) -> None:
    row = collate.row(STRIP, random.Random(2))
    for tokens, labels in zip(row["tokens"], row["labels"], strict=True):
        wanted = labels != NO_LABEL
        assert (labels[:-1][wanted[:-1]] == tokens[1:][wanted[:-1]]).all()
        assert collate.end in labels[wanted]
        assert (tokens == collate.image).sum() == STRIP.features
        assert not wanted[:-1][tokens[1:] == collate.image].any()


def test_matrices_of_a_stack_step_as_they_would_alone() -> None:
    mx.random.seed(0)

    def tree(numbers: range) -> dict[str, Any]:
        layers = {str(number): mx.random.normal((6, 4)) for number in numbers}
        return {
            "model": {
                "layers": layers,
                "norm": mx.random.normal((5,)),
                "table": mx.random.normal((3, 5)),
            }
        }

    def singles(whole: dict[str, Any]) -> list[dict[str, Any]]:
        other = {"bias": mx.zeros((1,))}
        return [
            {"model": {"layers": {"0": one}}, "aside": other}
            for one in whole["model"]["layers"].values()
        ]

    weights, gradients = tree(range(3)), tree(range(3))
    together = learning.Steps(weights)
    alone = [learning.Steps(one) for one in singles(weights)]
    for _ in range(2):
        together.apply(gradients, 0.1, most=1e9)
        for steps, one in zip(alone, singles(gradients), strict=True):
            steps.apply(one, 0.1, most=1e9)
    found = together.weights()["model"]
    for steps, one in zip(alone, found["layers"], strict=True):
        np.testing.assert_allclose(
            np.array(one), np.array(steps.weights()["model"]["layers"][0]), atol=1e-6
        )
    assert not np.allclose(
        np.array(found["table"]), np.array(weights["model"]["table"])
    )


def flat(weights: Any) -> dict[str, mx.array]:
    """A tree's arrays by name."""
    return dict(tree_flatten(weights))  # type: ignore[arg-type]


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("kind", ["line", "papers", "text"])
def test_both_ways_to_train_have_one_loss_and_one_step(
    kind: str, collate: Collator
) -> None:
    """PyTorch's forward pass, gradients and optimizer are MLX's; the library's tests do without torch."""
    torch = pytest.importorskip("torch")
    torch_model, torch_train = (
        importlib.import_module(f"fixtures.training.reader.torch_{name}")
        for name in ("model", "train")
    )
    bucket = next(one for one, _, _ in BUCKETS if one.kind == kind)
    rows = [collate.row(bucket, random.Random(seed)) for seed in (1, 2)]
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    tokens, labels = (
        arrays[name][:, 0].astype(np.int32) for name in ("tokens", "labels")
    )
    pixels = np.repeat(
        arrays["pixels"].reshape(-1, *bucket.pixels[1:])[..., None], 3, axis=-1
    )
    config = reader.configuration(collate.tokenizer)
    mx.random.seed(1)
    model = reader.build(config)
    weights = {
        "model": model.parameters(),
        "aside": learning.aside(config["hidden_size"]),
    }
    first = {
        name: torch.from_numpy(np.array(value)) for name, value in flat(weights).items()
    }
    steps = learning.Steps(weights)
    theirs = torch_train.Steps(first, "cpu", torch.float32)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "positions": collate.positions(tokens, bucket),
        "pixels": pixels,
    }
    batch |= {name: arrays[name] for name in ("cells", "lines")}
    loss = mx.value_and_grad(partial(learning.losses, model, collate.image, mx.float32))
    (_, told), gradients = loss(
        weights, {name: mx.array(value) for name, value in batch.items()}, 1.0
    )
    steps.apply(gradients, 1e-3)
    batch = {
        name: torch.from_numpy(batch[name].astype(np.int64))
        for name in ("tokens", "labels", "cells", "lines")
    }
    batch |= {name: batch[name][:, None] for name in ("tokens", "labels")}
    batch["pictures"] = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1)
    found, found_told = torch_model.Network(collate.image).losses(
        theirs.weights, bucket, batch, torch.ones(())
    )
    np.testing.assert_allclose(found_told.numpy(), np.array(told), atol=1e-4)
    theirs.gather(found)
    theirs.at(1e-3)
    theirs.apply()
    for name, moved in flat(steps.weights()).items():
        began = first[name].numpy()
        wanted = np.array(moved)
        got = theirs.weights[name].detach().numpy()
        # its gradient is nothing but rounding, and AdamW's step its sign
        if not name.endswith("k_proj.bias"):
            assert np.linalg.norm(got - wanted) <= 0.05 * np.linalg.norm(
                wanted - began
            ), name


def test_a_minute_of_training_leaves_a_checkpoint(
    fonts: Path, collate: Collator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two short pieces of a narrow model; what they leave is loaded by mlx-vlm, has training's logits, and answers."""
    options = "--pieces 2 --minutes 0.2 --limit 0 --width 0.25 --cost 400 --workers 1 --only line:128 --dtype float32"
    for piece in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "fixtures.training.reader.train",
            "--state",
            str(tmp_path / "state"),
            "--piece",
            piece,
        ]
        subprocess.run(
            [*command, *options.split()],
            check=True,
            cwd=ROOT,
            env={**os.environ, "FONTS": str(fonts)},
        )
    export.export(tmp_path / "state", tmp_path / "whole", bits=0)
    export.export(tmp_path / "state", tmp_path / "small", bits=8)
    assert (tmp_path / "small/model.safetensors").stat().st_size < (
        tmp_path / "whole/model.safetensors"
    ).stat().st_size
    model, processor = load(str(tmp_path / "whole"))
    model.set_dtype(mx.float32)
    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (32, 128, 3), np.uint8)
    )
    record = scenes.Record([picture], "Read the text.", "", "line")
    inputs = inputs_of(model, processor, record)
    ids, marks = collate.ids([(record.question, "")], 1, STRIP.features, Always(0.4))
    tokens = np.array([ids[: marks.index(1)]])
    assert inputs["input_ids"].tolist() == tokens.tolist()
    batch = {
        "tokens": tokens,
        "pixels": np.array(picture)[None],
        "positions": collate.positions(tokens, STRIP),
    }
    trained, _ = reader.logits(
        model, {name: mx.array(value) for name, value in batch.items()}, collate.image
    )
    wanted = np.array(trained)[0, -1]
    np.testing.assert_allclose(
        wanted, prefilled(adapt(model), inputs), atol=1e-3, rtol=0
    )
    small, _ = load(str(tmp_path / "small"))
    small.set_dtype(mx.float32)
    np.testing.assert_allclose(
        wanted, prefilled(adapt(small), inputs), atol=0.1 * np.ptp(wanted), rtol=0
    )
    kept = load_model(tmp_path / "small", dtype="checkpoint")[0]
    found = load_model(tmp_path / "small")[0]
    assert any("scales" in name for name in flat(kept.parameters()))
    assert {array.dtype for array in flat(found.parameters()).values()} == {mx.float32}
    assert not any("scales" in name for name in flat(found.parameters()))
    np.testing.assert_allclose(
        prefilled(adapt(found), inputs),
        prefilled(adapt(small), inputs),
        atol=1e-3,
        rtol=0,
    )
    monkeypatch.setattr(checkpoints, "MOST_WIDENED", 1000)
    assert any(
        "scales" in name
        for name in flat(load_model(tmp_path / "small")[0].parameters())
    )
    with VLMBatcher(tmp_path / "small") as batcher:
        assert (
            batcher.submit(
                picture, "Read the text.", params=SamplingParams(max_tokens=4)
            )
            .result(timeout=60)
            .ok
        )


def test_a_table_of_figures_takes_its_place(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n\n{measure.BEGIN}\nold\n{measure.END}\n\nafter\n")
    params = SamplingParams(max_tokens=1)
    asked = [
        measure.Asked([], "as JSON", answer, params, said) for answer, said in FORMS
    ]
    measure.write(page, measure.row("forms", asked))
    assert measure.as_python("17.80") == "17.80"
    assert (
        page.read_text()
        == f"before\n\n{measure.BEGIN}\n\n{FOUND}\n\n{measure.END}\n\nafter\n"
    )


FORMS = (
    ('{"total": "1.20"}', '{"total":"1.20"}'),
    ('{"total": "1.20"}', '{"total": "1.'),
)
FOUND = "| forms | 2 | 11.8% | 50% | totals 50%, fields 50%, JSON 50% |"
