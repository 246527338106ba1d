"""From an answer to the record that an output keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_batch.jobs.lines import Record
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.rows import Row, name_of
from vlm_batch.types import Result, SamplingParams, TokenLogprobs, Usage


def with_form(params: SamplingParams, result: Result) -> Result:
    """The result, with an error where its answer ended before it had the form that was asked for."""
    others = tuple(with_form(params, other) for other in result.others)
    if params.json_schema is not None:
        is_whole, what = result.parsed is not None or result.text.strip() == "null", "its JSON was whole"
    else:
        is_whole, what = params.choice is None or result.text in params.choice, "it was one of the choices"
    if is_whole or result.error is not None:
        return replace(result, others=others)
    cut = f" by its longest length (max_tokens is {params.max_tokens})" if result.finish_reason == "length" else ""
    return replace(result, error=f"CutAnswer: the answer was ended{cut} before {what}", others=others)


def record_of(item: Item, result: Result) -> Record:
    """An answer as a record: its own fields, and the row's columns under "columns"."""
    timings = {
        name: None if seconds != seconds else round(seconds, 6) for name, seconds in vars(result.timings).items()
    }
    record: Record = {
        "id": item.id,
        "request_id": item.id,
        "images": item.row.image_names,
        "videos": [name_of(video.source) for video in item.row.videos],
        "prompt": item.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "image_sizes": result.image_sizes,
        "model_image_sizes": result.model_image_sizes,
        "video_sizes": result.video_sizes,
        "usage": dict(vars(result.usage)),
        "timings": timings,
        "columns": item.row.columns,
    }
    if item.params.json_schema is not None:
        record["parsed"] = result.parsed
    if result.logprobs is not None:
        record["logprobs"] = list(map(_as_json, result.logprobs))
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = list(map(_as_json, result.prompt_logprobs))
    if result.others:
        record["others"] = [_other(item, other) for other in result.others]
    return record


def _other(item: Item, result: Result) -> Record:
    """A further answer of a request that asked for several."""
    names = ("text", "finish_reason", "error", "usage", "parsed", "logprobs")
    whole = record_of(item, result)
    return {name: whole[name] for name in names if name in whole}


def _as_json(one: TokenLogprobs | None) -> dict[str, Any] | None:
    return None if one is None else {"token_id": one.token_id, "logprob": one.logprob, "top": one.top}


#: Fields that an answer has where they were asked for.
_ASKED_FOR = ("parsed", "logprobs", "prompt_logprobs", "others")
#: The names of an answer's fields that an output can choose among, beside its row's columns.
ANSWER_FIELDS = frozenset(record_of(Item("", Row(id="")), Result(request_id=""))) - {"columns"} | {
    "seconds",
    *_ASKED_FOR,
    *vars(Usage()),
}
