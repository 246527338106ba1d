"""Prompts of published folders, recorded: ``python -m tests.published`` writes tests/data/published.json anew.

The folders themselves are nobody's to hand on: VLM_BATCH_PUBLISHED names a directory that has them by these names. The
facts are transformers' answers, or those of the folder's own code where transformers cannot read it (``BY_OWN_CODE``).
"""

from __future__ import annotations

import json
import os
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.checkpoints import layout
from vlm_batch.cli.prompts import CASES, NOT_FOLLOWED, Folder, ask_transformers

FACTS = Path(__file__).parent / "data" / "published.json"
#: transformers' answers of the cut folders (``tests/references/published.py`` writes them).
ANSWERS = Path(__file__).parent / "data" / "published_answers.json"
#: Prompts, and the sizes of their pictures (width, height).
ASKED: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("What is the capital of Wales?", ()),
    ("What is this?", ((320, 240),)),
)
#: Tokens of an answer.
MOST = 6
VARIABLE = "VLM_BATCH_PUBLISHED"
LLAMA = "tokenizers/llama3_1"
NAMES = (
    "cosmos-reason2",
    "florence-2-base",
    "granite-docling-258m",
    "medgemma-27b-it",
    "olmocr-7b",
    LLAMA,
)
#: Folders whose tokenizer is too large to lie with them: a stand-in has their special tokens at their places.
WITHOUT_TOKENIZER = ("deepseek-ocr-2", "qwen3.5-9b-mlx-8bit", "unlimited-ocr")
#: Folders that transformers cannot read -> what their own code makes of a prompt.
BY_OWN_CODE = {
    "florence-2-base": "processing_florence2.py of the publisher: <s> and </s> around the text, and the picture's features "
    "before them; the mark of a picture is mlx-vlm's",
}


def root() -> Path | None:
    """The directory with the folders, if there is one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def folder_at(directory: Path, name: str, scratch: Path) -> Path | None:
    """A folder by its name, if it is there; a tokenizer alone becomes one of Llama 3.2 Vision's kind under ``scratch``."""
    path = directory / name
    if (path / "config.json").exists() or not (path / "tokenizer.json").exists():
        return path if path.exists() else None
    for file in path.iterdir():
        (scratch / file.name).symlink_to(file)
    config = {
        **layout("mllama")["files"]["config.json"],
        "eos_token_id": [128001, 128008, 128009],
    }
    (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pictures = {
        "image_processor_type": "MllamaImageProcessor",
        "processor_class": "MllamaProcessor",
        "max_image_tiles": 4,
    }
    pictures |= {
        "size": {"height": 560, "width": 560},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (scratch / "preprocessor_config.json").write_text(
        json.dumps(pictures), encoding="utf-8"
    )
    return scratch


def runs(ids: list[int]) -> list[int | list[int]]:
    """Ids, a run of one as [id, times]."""
    found: list[int | list[int]] = []
    for token, several in groupby(ids):
        times = len(list(several))
        found.append(token if times == 1 else [token, times])
    return found


def florence_ids(folder: Folder, text: str, pictures: int) -> list[int]:
    """What the publisher's code makes, with mlx-vlm's marks in the features' places."""
    tokenizer = folder.processing.tokenizer
    marks = [tokenizer.convert_tokens_to_ids("<florence_image>")] * 577 * pictures
    return [*marks, *tokenizer.encode(f"<s>{text}</s>", add_special_tokens=False)]


def facts_of(folders: dict[str, Path]) -> dict[str, Any]:
    """The facts of each folder: its ends, and the ids of each case."""
    with TemporaryDirectory() as pixels:
        answers = ask_transformers(list(folders.values()), CASES, Path(pixels))
    found = {}
    for (name, path), answer in zip(folders.items(), answers, strict=True):
        folder = Folder(path)
        cases: dict[str, Any] = {}
        for at, case in enumerate(CASES):
            if name in BY_OWN_CODE:
                if case.name in ("text", "picture", "plain text"):
                    text = case.text or case.messages[-1]["content"][-1]["text"]  # type: ignore[index]
                    cases[case.name] = runs(
                        florence_ids(folder, text, len(case.images))
                    )
            elif "ids" in answer["cases"][at]:
                reads_no_tools = (
                    case.tools and "tools" not in folder.processing.template.reads
                )
                is_left = (
                    reads_no_tools or (folder.spec.family, case.name) in NOT_FOLLOWED
                )
                cases[case.name] = None if is_left else runs(answer["cases"][at]["ids"])
        ends = sorted(folder.published_ends)
        found[name] = {
            "by": BY_OWN_CODE.get(name) or answer["processor"],
            "ends": ends,
            "cases": cases,
        }
    return found


def main() -> None:
    directory = root()
    assert directory is not None, f"{VARIABLE} names no directory"
    with TemporaryDirectory() as scratch:
        folders = {name: folder_at(directory, name, Path(scratch)) for name in NAMES}
        facts = facts_of(
            {name: path for name, path in folders.items() if path is not None}
        )
    lines = [
        f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items()
    ]
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
