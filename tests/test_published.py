"""Folders as they are published: prompts and ends as transformers makes them, or the publisher's own code."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.published import BY_OWN_CODE, FACTS, LLAMA, NAMES, VARIABLE, folder_at, root, runs
from vlm_batch.cli.prompts import CASES, Folder, verify_prompts

RECORDED: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))


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
        runs_first = [ids[0] for ids in facts["cases"].values() if ids and isinstance(ids[0], list)]
        assert all(name in BY_OWN_CODE and times > 100 for _, times in runs_first), f"{name} begins twice"


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
