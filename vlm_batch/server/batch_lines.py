"""Lines of batches: what comes in, what is wrong with it, and what answers used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from vlm_batch.jobs.rows import Ids

#: Most rows of one file, and wrong lines that are told.
MAX_ROWS, MAX_TOLD = 200_000, 100


@dataclass(frozen=True)
class BatchRow:
    """One line of a batch's input."""

    custom_id: str
    body: Any
    num_bytes: int
    num_values: int
    num_nested: int


Wrong: TypeAlias = tuple[int | None, str, str]


def rows_in(lines: BinaryIO) -> Iterator[BatchRow]:
    """Yield rows of a file that was checked."""
    for line in lines:
        if not line.strip():
            continue
        found = json.loads(line)
        num_nested = line.count(b"[") + line.count(b"{")
        num_values = line.count(b",")
        body = found["body"]
        yield BatchRow(found["custom_id"], body, len(line), num_values, num_nested)


def check_lines(path: Path, endpoint: str) -> tuple[int, list[Wrong]]:
    """Return the number of rows, and what is wrong with lines, by number, code and words."""
    total, seen = 0, Ids()
    wrong: list[Wrong] = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            total += 1
            told = _wrong_with(line, endpoint, seen)
            if told is not None:
                wrong.append((number, *told))
            if len(wrong) == MAX_TOLD:
                break
    if total > MAX_ROWS:
        said = f"{total:,} requests; a batch has {MAX_ROWS:,} at most"
        wrong.append((None, "too_many_requests", said))
    if not total:
        wrong.append((None, "empty_file", "the file has no requests"))
    return total, wrong


def _wrong_with(line: bytes, endpoint: str, seen: Ids) -> tuple[str, str] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return "invalid_json_line", "this line is not JSON"
    if not isinstance(found, dict):
        return "invalid_json_line", "this line is no object"
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        return "missing_required_parameter", "custom_id must be a text of 1..512"
    if found.get("method") != "POST":
        return "invalid_method", "method must be POST"
    if found.get("url") != endpoint:
        return "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}"
    if not isinstance(found.get("body"), dict):
        return "missing_required_parameter", "body must be an object"
    if not seen.add(custom_id):
        return "duplicate_custom_id", "another line has this custom_id"
    return None


def errors_of(wrong: list[Wrong]) -> dict[str, Any]:
    data = [
        {"code": code, "message": said, "line": number, "param": None}
        for number, code, said in wrong
    ]
    return {"object": "list", "data": data}


def no_usage() -> dict[str, Any]:
    return {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }


def add_usage(total: dict[str, Any], usage: Mapping[str, Any]) -> None:
    """Add an answer's tokens, whatever its door calls them."""
    found = {}
    for name, value in usage.items():
        kind = name.replace("prompt_", "input_").replace("completion_", "output_")
        found[kind] = value
    _add_counts(total, found)


def _add_counts(total: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add numbers by their names; those that are not there, or null, are none."""
    for name, value in total.items():
        if isinstance(value, dict):
            _add_counts(value, found.get(name) or {})
        else:
            total[name] += found.get(name) or 0
