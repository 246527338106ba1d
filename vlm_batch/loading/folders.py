"""Facts of a checkpoint's folder, from its small files and the heads of its weights. No tensor is read.

``folder_facts`` never raises for what a folder lacks: it lists the faults. ``check_folder`` raises the first.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading.quantised import quantisation_fault
from vlm_batch.loading.recommended import (
    RecommendedSampling,
    json_object,
    recommended_sampling,
)

#: First bytes of a file that Git LFS has not fetched.
POINTER = b"version https://git-lfs.github.com/spec/"
#: The size of the file that is pointed to.
POINTED_SIZE = re.compile(rb"^size (\d+)\r?$", re.MULTILINE)
INDEX = "model.safetensors.index.json"
#: Largest head of a safetensors file that is believed, as in the format's own reader.
MOST_HEAD_BYTES = 100_000_000
#: Most files that a fault names.
MOST_NAMED = 5
#: Any of these files holds a vocabulary.
VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "*.model",
    "*.model.v*",
)
#: Files that are read as JSON.
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    INDEX,
)


#: Files of a folder without config.json -> what it is instead.
OTHER_LAYOUTS = {
    "*.gguf": "it holds GGUF files, which are llama.cpp's. Take the model's safetensors, or a folder of mlx-community",
    "params.json": (
        "it has Mistral's own files (params.json) and no config.json. Take the folder in transformers' layout"
    ),
    "model_index.json": "it is a pipeline of diffusers, which makes pictures, not text: there is no config.json",
}
#: Files of weights that are not read -> whose they are.
OTHER_WEIGHTS = {
    "*.bin": "PyTorch's (.bin)",
    "*.pth": "PyTorch's (.pth)",
    "*.pt": "PyTorch's (.pt)",
    "*.gguf": "llama.cpp's (.gguf)",
    "*.npz": "NumPy's (.npz)",
    "consolidated*.safetensors": "in Mistral's own layout (consolidated.safetensors)",
}
#: Files beside the JSON ones that Git LFS may not have fetched.
OTHER_FILES = ("*.model", "*.tiktoken", "*.jinja", "*.txt")


@dataclass(frozen=True)
class TensorHead:
    """A tensor's type, as safetensors names it ("BF16"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file by its head; ``fault`` says why it cannot be read, else None."""

    path: Path
    tensors: Mapping[str, TensorHead]
    fault: str | None = None


@dataclass(frozen=True)
class FolderFacts:
    """A folder's files.

    Attributes:
        folder: Where it is.
        config: config.json as it is written; empty if it cannot be read.
        faults: Why it cannot be loaded, a sentence each; empty if nothing is missing.
        missing_files: Files of weights that the index names and the folder lacks.
        missing_tensors: Tensors that the index names and no file has.
        recommended: Sampling that the publisher recommends in generation_config.json.
    """

    folder: Path
    config: Mapping[str, Any]
    faults: tuple[str, ...]
    missing_files: tuple[str, ...] = ()
    missing_tensors: tuple[str, ...] = ()
    recommended: RecommendedSampling = field(default_factory=RecommendedSampling)


def folder_facts(folder: str | Path) -> FolderFacts:
    """Return what a folder holds. Reads small files and the heads of weights."""
    found = _Folder(Path(folder))
    return FolderFacts(
        folder=found.path,
        config=found.config,
        faults=tuple(found.faults()),
        missing_files=tuple(found.missing_files),
        missing_tensors=tuple(found.missing_tensors),
        recommended=recommended_sampling(found.json_of("generation_config.json")),
    )


def check_config(folder: Path) -> None:
    """Raise UnsupportedModel if a folder has no config.json that can be read, with what it is instead."""
    found = _Folder(folder)
    if not found.config:
        raise UnsupportedModel(f"{folder}: {next(found.faults())}")


def check_folder(folder: Path) -> None:
    """Raise UnsupportedModel with what a folder lacks, or why its weights cannot be read."""
    for fault in _Folder(folder).faults():
        raise UnsupportedModel(f"{folder}: {fault}")


def what_is_missing(folder: Path) -> str | None:
    """Describe weights that the index names and the folder lacks; None if all are there."""
    found = _Folder(folder)
    if not found.missing_tensors:
        return None
    files = ""
    if found.missing_files:
        are = "is" if len(found.missing_files) == 1 else "are"
        files = f"{_listed(found.missing_files)} {are} missing, so "
    count = f"{len(found.missing_tensors)} of {len(found.weight_map)} tensors that {INDEX} names are in no file"
    first = f"the first is {found.missing_tensors[0]}"
    return f"the folder is not whole: {files}{count}; {first}. Download it again"


class _Folder:
    """A folder's files, each read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # Small files
    # -----------------------------------------------------------------------------------------------------------------

    def json_of(self, name: str) -> dict[str, Any]:
        """Return a file's object; empty if there is none, or it cannot be read."""
        return json_object(self.path / name)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.json_of("config.json")

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The index: tensor -> file."""
        found = self.json_of(INDEX).get("weight_map")
        if not isinstance(found, dict):
            return {}
        return {tensor: str(file) for tensor, file in found.items()}

    @property
    def named_files(self) -> list[str]:
        """The files that the index names."""
        return sorted(set(self.weight_map.values()))

    # Weights
    # -----------------------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> list[WeightsFile]:
        """The files of weights that mlx-vlm's loader reads."""
        indexed = [self.path / name for name in self.named_files]
        there = list(filter(os.path.lexists, indexed))
        # none are there where the index is of another layout
        return list(map(read_head, there or self._files_of_weights()))

    def _files_of_weights(self) -> list[Path]:
        """Return all files of weights but those in Mistral's own layout."""
        found = set(self.path.glob("*.safetensors"))
        return sorted(found - set(self.path.glob("*consolidated.safetensors")))

    @cached_property
    def tensors(self) -> dict[str, TensorHead]:
        found: dict[str, TensorHead] = {}
        for file in self.weights:
            found |= file.tensors
        return found

    @cached_property
    def index_in_use(self) -> dict[str, str]:
        """The index; empty if it names no file that is there, as one of another layout."""
        there = {file.path.name for file in self.weights}
        is_used = not there.isdisjoint(self.named_files)
        return self.weight_map if is_used else {}

    @property
    def missing_files(self) -> list[str]:
        there = {file.path.name for file in self.weights}
        return sorted(set(self.index_in_use.values()) - there)

    @cached_property
    def missing_tensors(self) -> list[str]:
        return list(itertools.filterfalse(self.tensors.__contains__, self.index_in_use))

    # Faults
    # -----------------------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[str]:
        """Yield why the folder cannot be loaded, the most telling first."""
        if not (self.path / "config.json").exists():
            yield self._without_config()
            return
        broken = list(self._broken_files())
        yield from broken
        if not self.config:
            yield "config.json says nothing"
            return
        quantised = quantisation_fault(self.config, self.tensors)
        if quantised is not None:
            yield quantised
            return
        yield from self._weights_faults()
        if not broken:
            yield from self._tokenizer_faults()

    def _weights_faults(self) -> Iterator[str]:
        if not self.weights:
            yield self._without_weights()
        faults = [file.fault for file in self.weights]
        yield from filter(None, faults)

    def _without_config(self) -> str:
        if self.path.is_file():
            return "it is a file. Give the folder that it is in, with config.json and the tokenizer"
        if (self.path / "adapter_config.json").exists():
            return self._lora()
        inner = sorted(self.path.glob("snapshots/*/config.json"))
        if inner:
            return f"it is a hub's cache, and the model is within it: give {inner[-1].parent}"
        said = self._first_of(OTHER_LAYOUTS)
        if said is not None:
            return said
        files = sorted(path.name for path in self.path.iterdir())
        there = f"its files are {_listed(files)}" if files else "it is empty"
        return f"there is no config.json; {there}. The download has not ended, or it is another folder"

    def _first_of(self, patterns: Mapping[str, str]) -> str | None:
        """Return what is said of the first pattern that a file matches."""
        for pattern, said in patterns.items():
            if any(self.path.glob(pattern)):
                return said
        return None

    def _lora(self) -> str:
        settings = self.json_of("adapter_config.json")
        base = settings.get("base_model_name_or_path") or "its base model"
        return (
            f"it is a LoRA adapter for {base} and no model: there is no config.json. Merge it into its base "
            "(peft: merge_and_unload, then save_pretrained), and give the merged folder"
        )

    def _broken_files(self) -> Iterator[str]:
        yield from filter(None, map(self._fault_of, JSON_FILES))
        for pattern in OTHER_FILES:
            faults = map(_pointer, sorted(self.path.glob(pattern)))
            yield from filter(None, faults)

    def _fault_of(self, name: str) -> str | None:
        """Return why a JSON file that is there cannot be read."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        if not path.exists():
            return f"{name} is a link to nothing. Download it again"
        pointer = _pointer(path)
        if pointer is not None:
            return pointer
        # a tokenizer's files are large, and read by its own parser
        is_large = name in ("tokenizer.json", "vocab.json")
        check = _check_ends if is_large else _check_json
        try:
            check(path)
        except (OSError, ValueError, RecursionError) as error:
            said = " ".join(str(error).split())[:120]
            return f"{name} is not whole: {said}. Download it again"
        return None

    def _without_weights(self) -> str:
        said = self._first_of(OTHER_WEIGHTS)
        if said is not None:
            return (
                f"it has no weights that can be read: those that are there are {said}. Take a folder with "
                "safetensors, or save it as such (transformers: from_pretrained, then save_pretrained)"
            )
        named = ""
        if self.named_files:
            named = f" {INDEX} names {len(self.named_files)} of them."
        return f"it has no weights: there is no *.safetensors.{named} Download it again"

    def _tokenizer_faults(self) -> Iterator[str]:
        there = [name for name in VOCABULARIES if any(self.path.glob(name))]
        if not there:
            yield (
                "it has no tokenizer: there is no tokenizer.json, tokenizer.model, vocab.json with merges.txt, or "
                "other file with a vocabulary. Download it again, or copy these files from the model that it was made of"
            )
        has_merges = (self.path / "merges.txt").exists()
        if there == ["vocab.json"] and not has_merges:
            yield "its tokenizer is not whole: there is vocab.json, and neither merges.txt nor tokenizer.json"


def read_head(path: Path) -> WeightsFile:
    """Read the head of a safetensors file, and compare its size with what the head says."""
    pointer = _pointer(path)
    if pointer is not None:
        return WeightsFile(path, {}, pointer)
    again = "Download it again"
    broken = partial(WeightsFile, path, {})
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            most = min(size - 8, MOST_HEAD_BYTES)
            if not 0 < length <= most:
                said = f"is no whole safetensors file ({size:,} bytes)"
                return broken(f"{path.name} {said}. {again}")
            head = json.loads(file.read(length))
        tensors, end = _tensors_of(head)
    except OSError as error:
        said = f"cannot be read: {error.strerror or error}"
        return broken(f"{path.name} {said}. {again}")
    except Exception:  # whatever a head of the wrong form raises
        said = "is no whole safetensors file: its head cannot be read"
        return broken(f"{path.name} {said}. {again}")
    missing = 8 + length + end - size
    if missing <= 0:
        return WeightsFile(path, tensors)
    said = f"is cut off: {missing:,} of its bytes are missing"
    return WeightsFile(path, tensors, f"{path.name} {said}. {again}")


def _tensors_of(head: Any) -> tuple[dict[str, TensorHead], int]:
    """Return the tensors of a file's head, and the bytes of all of them."""
    tensors, end = {}, 0
    head.pop("__metadata__", None)
    for name, entry in head.items():
        tensors[name] = TensorHead(str(entry["dtype"]), tuple(entry["shape"]))
        end = max(end, entry["data_offsets"][1])
    return tensors, end


def _pointer(path: Path) -> str | None:
    """Return the fault of a file that Git LFS has not fetched."""
    start = b""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(1024)
    if not start.startswith(POINTER):
        return None
    found = POINTED_SIZE.search(start)
    size = f" of {int(found[1]):,} bytes" if found else ""
    return f"{path.name} is a pointer of Git LFS to a file{size} that was not fetched: run git lfs pull in the folder"


def _check_json(path: Path) -> None:
    """Raise ValueError if a file is no whole JSON object or list."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, (dict, list)):
        raise ValueError("it is no JSON object")


def _check_ends(path: Path) -> None:
    """Raise ValueError if a file does not begin and end as a JSON object does."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()[:1]
        file.seek(max(0, path.stat().st_size - 64))
        ends = start + file.read().rstrip()[-1:]
    if ends != b"{}":
        raise ValueError("it does not end as JSON does")


def _listed(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
