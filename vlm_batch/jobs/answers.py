"""Conversion between results and an output's records."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from vlm_batch.jobs.lines import Record
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import JobRow, name_of
from vlm_batch.types import Result, SamplingParams, Timings, TokenLogprobs, Usage


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
    if params.json_schema is not None:
        is_null = result.text.strip() == "null"
        is_whole = is_null or result.parsed is not None
        return None if is_whole else "its JSON was whole"
    if params.choice is not None:
        return None if result.text in params.choice else "it was one of the choices"
    if params.form is None or result.parsed is not None:
        return None
    return f"it had the form of its {params.form}"


def record_of(item: Item, result: Result) -> Record:
    timings = {
        name: None if seconds != seconds else round(seconds, 6)
        for name, seconds in vars(result.timings).items()
    }
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
        "timings": timings,
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


def result_of(record: Record) -> Result:
    """Return a record's result; missing numbers are 0 or NaN."""
    error = record.get("error") or None
    others = record.get("others") or ()
    return Result(
        request_id=str(record["id"]),
        text=str(record.get("text") or ""),
        finish_reason="error" if error else record.get("finish_reason") or "stop",
        error=error and str(error),
        usage=_usage_of(record),
        timings=_timings_of(record),
        image_sizes=tuple(record.get("image_sizes") or record.get("images") or ()),
        others=tuple(result_of({"id": record["id"], **one}) for one in others),
    )


def _usage_of(record: Record) -> Usage:
    spread = {**record, **_mapping(record.get("usage"))}
    counts = {}
    for one in fields(Usage):
        counts[one.name] = int(_number(spread.get(one.name), 0))
    return Usage(**counts)


def _timings_of(record: Record) -> Timings:
    timings = {**_mapping(record.get("timings"))}
    timings.setdefault("total", record.get("seconds"))
    defaults = {one.name: one.default for one in fields(Timings)}
    defaults["total"] = math.nan
    seconds = {}
    for name, default in defaults.items():
        seconds[name] = _number(timings.get(name), default)
    return Timings(**seconds)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return float(default)
    return found if math.isfinite(found) else float(default)


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
