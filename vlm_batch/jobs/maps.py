"""Answers for tables in memory: ``datasets``, pyarrow, pandas, polars."""

from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vlm_batch.handle import Handle
from vlm_batch.jobs.answers import with_form
from vlm_batch.jobs.arrow import (
    BATCH_ROWS,
    picture_columns,
    picture_features,
    rows_of,
    stored,
)
from vlm_batch.jobs.cells import (
    THE_TABLE,
    Columns,
    checked_row,
)
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.jobs.runner import submitted_row
from vlm_batch.progress import progress_bar
from vlm_batch.types import Result, SamplingParams, params_of

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_batch.batcher import VLMBatcher

#: Text, error, tokens.
Answer: TypeAlias = tuple[str | None, str | None, int]

#: Rows submitted ahead of the one whose answer is due.
WINDOW = 64


def map_table(
    batcher: VLMBatcher,
    table: Any,
    prompt: str | None = None,
    *,
    image: str | None = None,
    video: str | None = None,
    audio: str | None = None,
    system: str | None = None,
    params: SamplingParams | Mapping[str, Any] | None = None,
    into: str = "answer",
    progress: bool = False,
) -> Any:
    """Ask about every row of a table; return it with three more columns.

    Streams (``IterableDataset``, ``RecordBatchReader``) are answered as their result is read.

    Args:
        table: A ``datasets`` dataset, pyarrow table or reader, pandas or polars ``DataFrame``, or what pyarrow
            converts.
        prompt: May name columns (``"What is on this {kind}?"``); None asks the column "prompt".
        image: Column of paths, URLs, bytes or pictures; found if None. ``video`` and ``audio`` likewise.
        into: Column of the text; ``into_error`` says why it is missing, ``into_tokens`` counts tokens.
        progress: Show a progress bar on stderr.

    Raises:
        InvalidJob: The table or columns do not fit.
    """
    questions = Questions((prompt or DEFAULT_PROMPT,), system, params_of(params))
    names = (into, f"{into}_error", f"{into}_tokens")
    own_prompt = "prompt" if prompt is None else None
    given = Columns(image=image, video=video, audio=audio, prompt=own_prompt)
    asked = _Asked(batcher, given, questions, names, progress)
    for module, kind, mapped in _KINDS:
        # a library that nobody has imported has made no table
        library = sys.modules.get(module)
        if library is not None and isinstance(table, getattr(library, kind)):
            return mapped(asked, table)
    return _map_arrow(asked, table)


def _map_pandas(asked: _Asked, table: Any) -> Any:
    def rows() -> Iterator[Mapping[str, Any]]:
        for start in range(0, len(table), BATCH_ROWS):
            yield from table.iloc[start : start + BATCH_ROWS].to_dict("records")

    names = [str(name) for name in table.columns]
    return table.assign(**asked.lists(rows(), names, [], len(table)))


def _map_lazy(asked: _Asked, table: Any) -> Any:
    raise InvalidJob("a LazyFrame is no table yet: collect() it")


def _map_polars(asked: _Asked, table: Any) -> Any:
    import polars

    return polars.from_arrow(_map_arrow(asked, table))


def _map_dataset(asked: _Asked, table: Any) -> Any:
    rows = rows_of(stored(table))
    pictures = picture_features(table)
    found = asked.lists(rows, table.column_names, pictures, len(table))
    for name, values in found.items():
        table = table.add_column(name, values)
    return table


@dataclass(frozen=True)
class _Asked:
    batcher: VLMBatcher
    given: Columns
    questions: Questions
    names: tuple[str, str, str]
    progress: bool

    def columns(self, names: list[str], pictures: list[str]) -> Columns:
        """Return where the rows' media are. Raises InvalidJob."""
        for name in self.names:
            if name in names:
                raise InvalidJob(
                    f"the table has a column {name!r} already; into= takes another name"
                )
        if self.given.prompt is None:
            self.questions.check_columns(names)
        elif self.given.prompt not in names:
            raise InvalidJob("prompt= is needed: the table has no column 'prompt'")
        found = self.given.resolve(names, THE_TABLE, pictures)
        found.check_overlooked(names, THE_TABLE, self.questions.columns, asks=True)
        return found

    def answers(
        self,
        rows: Iterable[Mapping[str, Any]],
        columns: Columns,
        total: int | None = None,
    ) -> Iterator[tuple[Mapping[str, Any], Answer]]:
        """Yield rows with answers, in order; ``total`` None: nobody knows how many."""
        ahead: deque[tuple[Mapping[str, Any], Handle | Result]] = deque()
        with progress_bar(total, enabled=self.progress) as advance:

            def first() -> tuple[Mapping[str, Any], Answer]:
                cells, one = ahead.popleft()
                result = one.result() if isinstance(one, Handle) else one
                result = with_form(self.questions.params, result)
                advance(result)
                return cells, _answer_of(result)

            try:
                for number, cells in enumerate(rows):
                    ahead.append((cells, self._submitted(cells, columns, number)))
                    if len(ahead) == WINDOW:
                        yield first()
                while ahead:
                    yield first()
            finally:  # whoever reads the answers may stop
                for _, one in ahead:
                    if isinstance(one, Handle):
                        one.cancel()

    def _submitted(
        self, cells: Mapping[str, Any], columns: Columns, number: int
    ) -> Handle | Result:
        row = checked_row(
            cells, columns, self.given, table=THE_TABLE, place=f"row {number}"
        )
        return submitted_row(self.batcher, self.questions, row)

    def lists(
        self,
        rows: Iterable[Mapping[str, Any]],
        names: list[str],
        pictures: list[str],
        total: int,
    ) -> dict[str, list[Any]]:
        """Return the new columns of a table with so many rows."""
        columns = self.columns(names, pictures)
        return self.by_name(
            [answer for _, answer in self.answers(rows, columns, total)]
        )

    def by_name(self, answers: Sequence[Answer]) -> dict[str, list[Any]]:
        found = {}
        for place, name in enumerate(self.names):
            found[name] = [answer[place] for answer in answers]
        return found


def _answer_of(result: Result) -> Answer:
    text = result.text if result.error is None else None
    return text, result.error, result.usage.completion_tokens


def _map_arrow(asked: _Asked, table: Any) -> pa.Table | pa.RecordBatchReader:
    import pyarrow as pa

    kinds = list(map(pa.field, asked.names, (pa.string(), pa.string(), pa.int64())))
    if isinstance(table, pa.RecordBatchReader):
        whole = pa.schema([*table.schema, *kinds], table.schema.metadata)
        return pa.RecordBatchReader.from_batches(whole, _batches(asked, table, whole))
    if not isinstance(table, pa.Table):
        try:
            table = pa.table(table)
        except (TypeError, ValueError) as error:
            raise InvalidJob(
                f"{type(table).__name__} is no table of datasets, pyarrow, pandas or polars: {error}"
            ) from error
    rows = rows_of(table.to_batches(max_chunksize=BATCH_ROWS))
    pictures = picture_columns(table.schema)
    found = asked.lists(rows, table.schema.names, pictures, table.num_rows)
    for field in kinds:
        table = table.append_column(field, pa.array(found[field.name], field.type))
    return table


def _batches(
    asked: _Asked, table: pa.RecordBatchReader, whole: pa.Schema
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    columns = asked.columns(table.schema.names, picture_columns(table.schema))
    waiting: deque[pa.RecordBatch] = deque()
    ready: list[Answer] = []

    def rows() -> Iterator[Mapping[str, Any]]:
        for batch in table:
            waiting.append(batch)
            yield from rows_of(
                batch.slice(start, BATCH_ROWS)
                for start in range(0, batch.num_rows, BATCH_ROWS)
            )

    def filled(batch: pa.RecordBatch) -> pa.RecordBatch:
        found = asked.by_name(ready[: batch.num_rows])
        del ready[: batch.num_rows]
        made = [
            pa.array(values, whole.field(name).type) for name, values in found.items()
        ]
        return pa.RecordBatch.from_arrays([*batch.columns, *made], schema=whole)

    for _, answer in asked.answers(rows(), columns):
        ready.append(answer)
        while waiting and len(ready) >= waiting[0].num_rows:
            yield filled(waiting.popleft())
    yield from map(filled, waiting)  # batches without rows


def _map_stream(asked: _Asked, dataset: Any) -> Any:
    import datasets

    pictures = picture_features(dataset)
    bare = dataset
    # as they are stored: they are decoded when they are asked about
    as_stored = datasets.Image(decode=False)
    for name in pictures:
        kind = dataset.features[name]
        is_list = not isinstance(kind, datasets.Image)
        bare = bare.cast_column(name, type(kind)(as_stored) if is_list else as_stored)
    names = list(dataset.features or next(iter(dataset), {}))
    stream = _Stream(asked, bare, asked.columns(names, pictures))
    features = None
    if dataset.features is not None:
        text, number = datasets.Value("string"), datasets.Value("int64")
        added = dict(zip(asked.names, (text, text, number), strict=True))
        features = datasets.Features({**dataset.features, **added})
    return datasets.IterableDataset.from_generator(stream, features=features)


class _Stream:
    """A generator for ``datasets`` with a unique digest."""

    def __init__(self, asked: _Asked, rows: Any, columns: Columns) -> None:
        self._asked = asked
        self._rows = rows
        self._columns = columns

    def __call__(self) -> Iterator[dict[str, Any]]:
        for cells, answer in self._asked.answers(self._rows, self._columns):
            yield {**cells, **dict(zip(self._asked.names, answer, strict=True))}

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (uuid.uuid4().hex,)


#: Tables by the libraries that make them, and their ways; what is none of them is for pyarrow.
_KINDS: tuple[tuple[str, str, Callable[[_Asked, Any], Any]], ...] = (
    ("pandas", "DataFrame", _map_pandas),
    ("polars", "LazyFrame", _map_lazy),
    ("polars", "DataFrame", _map_polars),
    ("datasets", "Dataset", _map_dataset),
    ("datasets", "IterableDataset", _map_stream),
)
