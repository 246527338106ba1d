"""Conversion between results and an output's records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from vlm_batch.jobs.lines import Record
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import JobRow, name_of
from vlm_batch.types import Result, SamplingParams, Timings, TokenLogprobs, Usage

#: Above all numbers that a record has, such as the seconds since 1970.
MOST = 1e15


def with_form(params: SamplingParams, result: Result) -> Result:
    """Add an error to a result with an incomplete form."""
    others = tuple(with_form(params, other) for other in result.others)
    result = replace(result, others=others)
    lacking = _lacking_form(params, result)
    if lacking is None or result.error is not None:
        return result
    cut = ""
    if result.finish_reason == "length":
        cut = f" by its longest length (max_tokens is {params.max_tokens})"
    error = f"CutAnswer: the answer was ended{cut} before {lacking}"
    return replace(result, error=error)


def _lacking_form(params: SamplingParams, result: Result) -> str | None:
    """Return what an answer lacks of its form; None if it is whole."""
    if params.form is None or _has_form(params, result):
        return None
    lacking = {
        "choice": "it was one of the choices",
        "json_schema": "its JSON was whole",
    }
    return lacking.get(params.form, f"it had the form of its {params.form}")


def _has_form(params: SamplingParams, result: Result) -> bool:
    if params.choice is not None:
        return result.text in params.choice
    is_null = params.form == "json_schema" and result.text.strip() == "null"
    return is_null or result.parsed is not None


def record_of(item: Item, result: Result) -> Record:
    """Return the record of a row's answer."""
    record: Record = {
        "id": item.id,
        "request_id": item.id,
        "images": item.row.image_names,
        "videos": [name_of(video.source) for video in item.row.videos],
        "audios": [name_of(audio.source) for audio in item.row.audios],
        "prompt": item.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "image_sizes": result.image_sizes,
        "model_image_sizes": result.model_image_sizes,
        "video_sizes": result.video_sizes,
        "audio_seconds": result.audio_seconds,
        "usage": dict(vars(result.usage)),
        "timings": _rounded(vars(result.timings)),
        "created": round(time.time(), 3),
        "columns": item.row.columns,
    }
    if item.attempt > 1:
        record["attempts"] = item.attempt
    if item.params.json_schema is not None:
        record["parsed"] = result.parsed
    if result.logprobs is not None:
        record["logprobs"] = list(map(_as_json, result.logprobs))
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = list(map(_as_json, result.prompt_logprobs))
    if result.others:
        record["others"] = [_other(item, other) for other in result.others]
    return record


def _rounded(timings: Mapping[str, float]) -> dict[str, float | None]:
    """Return seconds to the microsecond; None for those that are unknown."""
    rounded: dict[str, float | None] = {}
    for name, seconds in timings.items():
        is_known = not math.isnan(seconds)
        rounded[name] = round(seconds, 6) if is_known else None
    return rounded


def result_of(record: Record) -> Result:
    """Return a record's result; missing numbers are 0 or NaN."""
    error = record.get("error")
    finish_reason: Any = record.get("finish_reason") or "stop"
    row_id = str(record["id"])
    others = []
    for other in listed(record.get("others")):
        others.append(result_of({**_mapping(other), "id": row_id}))
    sizes = listed(record.get("image_sizes")) or listed(record.get("images"))
    return Result(
        request_id=row_id,
        text=str(record.get("text") or ""),
        finish_reason="error" if error else finish_reason,
        error=str(error) if error else None,
        usage=_usage_of(record),
        timings=_timings_of(record),
        image_sizes=tuple(sizes),
        others=tuple(others),
    )


def _usage_of(record: Record) -> Usage:
    spread = {**record, **_mapping(record.get("usage"))}
    counts = {}
    for one in fields(Usage):
        counts[one.name] = int(number_of(spread.get(one.name), 0))
    return Usage(**counts)


def _timings_of(record: Record) -> Timings:
    timings = {**_mapping(record.get("timings"))}
    timings.setdefault("total", record.get("seconds"))
    seconds = {}
    for one in fields(Timings):
        default = math.nan if one.name == "total" else one.default
        seconds[one.name] = number_of(timings.get(one.name), default)
    return Timings(**seconds)


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return an object of a record; CSV has it as JSON."""
    found = _from_json(value)
    return found if isinstance(found, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    """Return a list of a record, likewise."""
    found = _from_json(value)
    return found if isinstance(found, (list, tuple)) else ()


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def number_of(value: Any, default: Any) -> float:
    """Return a number of seconds or tokens, or the default for what is none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if abs(found) < MOST:
        return found
    return float(default)


def _other(item: Item, result: Result) -> Record:
    names = ("text", "finish_reason", "error", "usage", "parsed", "logprobs")
    whole = record_of(item, result)
    return {name: whole[name] for name in names if name in whole}


def _as_json(one: TokenLogprobs | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {"token_id": one.token_id, "logprob": one.logprob, "top": one.top}


#: Fields of an answer that exist only on request.
_ASKED_FOR = ("parsed", "logprobs", "prompt_logprobs", "others", "attempts")
#: Fields of an answer that ``--columns`` may name.
ANSWER_FIELDS = frozenset(record_of(Item("", JobRow(id="")), Result(request_id=""))) - {
    "columns"
} | {
    "seconds",
    *_ASKED_FOR,
    *vars(Usage()),
}
