"""An actor class for Ray Data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from types import MappingProxyType
from typing import Any

import numpy as np

from vlm_batch.checks import demand
from vlm_batch.errors import describe
from vlm_batch.jobs.cells import (
    THE_DATASET,
    Columns,
    checked_row,
)
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.ray import ended, open_here
from vlm_batch.jobs.rows import InvalidJob, JobRow
from vlm_batch.jobs.runner import submitted_row
from vlm_batch.types import Result, SamplingParams, params_of

#: Added columns, named as in ``ray.data.llm``. The error is "" for an answer.
OUTPUT_COLUMNS = (
    "generated_text",
    "generated_tokens",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "time_taken_llm",
    "__inference_error__",
)


class Predictor:
    """An engine for ``Dataset.map_batches``; several batches may run at once.

    A row has ``messages`` (OpenAI's form) or a ``prompt``, unless the class has one. Media are in columns of the usual
    names or in messages. ``sampling_params`` override ``params``. Rows get ``OUTPUT_COLUMNS``.

    ``max_concurrency`` and a ``batch_size`` of a few dozen keep the engine full. Raises InvalidJob if the model cannot
    be loaded.
    """

    def __init__(
        self,
        model: str | None,
        *,
        prompt: str | None = None,
        system: str | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        image: str | None = None,
        video: str | None = None,
        audio: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._prompt = prompt
        self._columns = Columns(image=image, video=video, audio=audio)
        self._questions = Questions(
            (prompt or DEFAULT_PROMPT,), system, params_of(params)
        )
        self._batcher = open_here(model, options)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if not isinstance(batch, dict):
            raise InvalidJob(
                f"a batch is {type(batch).__name__}; leave batch_format as it is (numpy)"
            )
        asked = []
        for number, cells in enumerate(zip(*batch.values(), strict=True)):
            row = dict(zip(batch, cells, strict=True))
            asked.append(self._answer(row, f"row {number}"))
        answers = await asyncio.gather(*asked)
        found = {}
        for place, name in enumerate(OUTPUT_COLUMNS):
            found[name] = _column([answer[place] for answer in answers])
        yield {**batch, **found}

    async def _answer(self, cells: dict[str, Any], place: str) -> tuple[Any, ...]:
        began = time.perf_counter()
        result: Result = await ended(
            submitted_row(self._batcher, self._questions, self._row(cells, place))
        )
        seconds = time.perf_counter() - began if result.ok else -1.0
        tokens, usage = np.asarray(result.token_ids, np.int64), result.usage
        counts = (usage.prompt_tokens, usage.completion_tokens)
        return (
            result.text,
            tokens,
            *counts,
            result.finish_reason,
            seconds,
            result.error or "",
        )

    def _row(self, cells: dict[str, Any], place: str) -> JobRow:
        try:
            plain = {name: _plain(value) for name, value in cells.items()}
            return self._row_of(plain, place)
        except Exception as error:
            return JobRow(id=place, error=describe(error))

    def _row_of(self, cells: dict[str, Any], place: str) -> JobRow:
        """Return a row of plain cells. Raises InvalidJob."""
        messages, params = cells.get("messages"), cells.get("sampling_params") or {}
        columns = self._columns_of(cells)
        row = checked_row(cells, columns, self._columns, table=THE_DATASET, place=place)
        right = "a mapping"
        is_right = isinstance(params, Mapping)
        demand(is_right, InvalidJob, "sampling_params", params, right)
        row = replace(row, params=params)
        if self._prompt is not None:
            return row
        if messages:
            return replace(row, messages=messages)
        prompt = cells.get("prompt")
        if isinstance(prompt, str):
            return replace(row, prompt=prompt)
        raise InvalidJob(
            f"a row needs messages, or a prompt; it has the columns {', '.join(cells)}"
        )

    def _columns_of(self, cells: dict[str, Any]) -> Columns:
        """Return where a row's media are. Raises InvalidJob."""
        columns = self._columns.resolve(list(cells), THE_DATASET)
        if not cells.get("messages"):
            others = [name for name in cells if name != "messages"]
            columns.check_overlooked(
                others, THE_DATASET, self._questions.columns, asks=True
            )
            return columns
        # a chat needs no pictures beside it
        image = columns.image or ""
        has_none = cells.get(image) is None
        return replace(columns, image="" if has_none else image)


@singledispatch
def _plain(value: Any) -> Any:
    """Return a cell as Python values, without Arrow's added None."""
    return value


@_plain.register
def _of_number(value: np.generic) -> Any:
    return _plain(value.item())


@_plain.register
def _of_array(value: np.ndarray) -> Any:
    return _plain(value.tolist()) if value.dtype == object else value


@_plain.register(list)
@_plain.register(tuple)
def _of_list(value: Sequence[Any]) -> list[Any]:
    return list(map(_plain, value))


@_plain.register(Mapping)
def _of_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    held = value.items()
    return {str(name): _plain(one) for name, one in held if one is not None}


def _column(values: list[Any]) -> np.ndarray:
    """Return a column of a batch; of texts and arrays, one of objects."""
    holds_objects = not values or isinstance(values[0], (np.ndarray, str))
    if not holds_objects:
        return np.array(values)
    column = np.empty(len(values), object)
    for place, value in enumerate(values):
        column[place] = value
    return column
