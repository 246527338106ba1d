"""Folders as they are published: prompts and ends as transformers makes them, or the publisher's own code."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests import cut
from tests.published import (
    ANSWERS,
    ASKED,
    BY_OWN_CODE,
    FACTS,
    LLAMA,
    MOST,
    NAMES,
    VARIABLE,
    WITHOUT_TOKENIZER,
    folder_at,
    root,
    runs,
)
from vlm_batch import SamplingParams, UnsupportedModel, VLMBatcher
from vlm_batch.cli.oracle import picture
from vlm_batch.cli.prompts import CASES, Folder, verify_prompts
from vlm_batch.loading import load_model

RECORDED: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
ANSWERED: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))


@cache
def folder_of(name: str) -> Folder:
    directory = root()
    if directory is None:
        pytest.skip(f"{VARIABLE} names no directory with published folders")
    path = folder_at(directory, name, Path(mkdtemp(dir=os.environ["VLM_BATCH_CACHE"])))
    if path is None:
        pytest.skip(f"{directory} has no {name}")
    return Folder(path)


def test_facts_are_recorded_of_every_folder() -> None:
    assert set(RECORDED) == set(NAMES)
    for name, facts in RECORDED.items():
        assert facts["ends"], name
        assert "plain text" in facts["cases"], name
        assert {"text", "turns of text"} & facts["cases"].keys(), name
        runs_first = [
            ids[0]
            for ids in facts["cases"].values()
            if ids and isinstance(ids[0], list)
        ]
        assert all(name in BY_OWN_CODE and times > 100 for _, times in runs_first), (
            f"{name} begins twice"
        )


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_ends_are_those_recorded(name: str) -> None:
    folder, facts = folder_of(name), RECORDED[name]
    assert set(facts["ends"]) <= set(folder.processing.eos_token_ids)
    compared = 0
    for case in CASES:
        ids = facts["cases"].get(case.name)
        made = folder.make(case)
        if ids is None:  # a template without tools, or one that refuses these turns
            continue
        assert made.error is None, case.name
        assert runs(list(made.ids)) == ids, case.name
        compared += 1
    assert compared >= (1 if name == LLAMA else 3)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_OWN_CODE])
def test_transformers_answers_as_recorded(name: str) -> None:
    """Through the command that users have."""
    found = verify_prompts(folder_of(name))
    assert found.ok, found.text()
    assert found.compared >= (1 if name == LLAMA else 6)  # its template takes no parts


def test_tools_on_a_template_without_them_are_refused_by_what_it_reads() -> None:
    """Gemma 3's sets first_user_prefix, loop_messages and role itself."""
    folder = folder_of("medgemma-27b-it")
    made = folder.make(next(case for case in CASES if case.name == "tools"))
    assert made.error is not None
    assert "does not read that; it reads none" in made.error


# Answers of folders whose layers and widths are cut
# ---------------------------------------------------------------------------------------------------------------------


def published(name: str) -> Path:
    directory = root()
    if directory is None or not (directory / name).exists():
        pytest.skip(f"{VARIABLE} names no directory with {name}")
    return directory / name


@pytest.fixture
def small(name: str, tmp_path: Path) -> Iterator[Path]:
    path = published(name)
    with cut.small_towers():
        folder = cut.write(tmp_path / name, path, cut.CUTS[name])
        if name in WITHOUT_TOKENIZER:
            cut.write_tokenizer(folder, cut.special_tokens(path))
        yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", cut.CUTS)
def test_answers_in_company_are_those_alone(name: str, small: Path) -> None:
    """And transformers' own, where it has the class."""
    params = SamplingParams(max_tokens=MOST, ignore_eos=True, logprobs=0)
    with VLMBatcher(small) as batcher:
        asked = [
            ([picture(*size, 0) for size in sizes], prompt) for prompt, sizes in ASKED
        ]
        alone = [
            batcher.submit(*one, params=params).result(timeout=60) for one in asked
        ]
        together = [
            batcher.submit(*one, params=params)
            for one in (*asked, ([], "And of France?"), *asked)
        ]
        found = [one.result(timeout=60) for one in together]
    assert all(one.ok for one in (*alone, *found)), [
        one.error for one in (*alone, *found)
    ]
    assert [one.token_ids for one in (*found[:2], *found[3:])] == [
        one.token_ids for one in alone
    ] * 2
    assert alone[0].logprobs != alone[1].logprobs
    for one, recorded in zip(alone, ANSWERED.get(name, []), strict=name in ANSWERED):
        assert list(one.token_ids) == recorded["tokens"]
        assert one.logprobs is not None
        given = [step.logprob for step in one.logprobs]
        assert given == pytest.approx(recorded["logprobs"], abs=1e-4)


@pytest.mark.parametrize("name", ["deepseek-ocr-2", "unlimited-ocr"])
def test_a_folder_without_a_tokenizer_is_refused_by_that(
    name: str, tmp_path: Path
) -> None:
    with cut.small_towers():
        folder = cut.write(tmp_path / name, published(name), cut.CUTS[name])
        with pytest.raises(
            UnsupportedModel, match=r"it has no tokenizer: there is no tokenizer\.json"
        ):
            load_model(folder)


def test_a_folder_in_nf4_is_refused_by_its_method(tmp_path: Path) -> None:
    """Its index names packed matrices and their scales; a few of them do."""
    path = published("molmo-7b-d-nf4")
    folder = tmp_path / path.name
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns(cut.INDEX))
    index = json.loads((path / cut.INDEX).read_text(encoding="utf-8"))["weight_map"]
    names = [name for name in index if re.search(r"blocks\.0\.", name)]
    assert any(name.endswith(".absmax") for name in names)
    cut.save_bytes(folder, names)
    with pytest.raises(UnsupportedModel, match=r"quantised by bitsandbytes \(NF4\)"):
        load_model(folder)
