"""A table with an answer for each of its rows: ``datasets``, pyarrow and pandas, and what converts to Arrow."""

from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vlm_batch.handle import Handle
from vlm_batch.jobs.arrow import BATCH_ROWS, picture_columns, picture_features, stored_rows
from vlm_batch.jobs.cells import Columns, row_of_cells
from vlm_batch.jobs.questions import DEFAULT_PROMPT, Questions
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.jobs.runner import submitted_row
from vlm_batch.types import Result, SamplingParams, params_of

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_batch.batcher import VLMBatcher

#: Rows that are submitted ahead of the one whose answer is due: enough for any batch, and a slow row holds up no more.
WINDOW = 64


def map_table(
    batcher: VLMBatcher,
    table: Any,
    prompt: str | None = None,
    *,
    image: str | None = None,
    video: str | None = None,
    system: str | None = None,
    params: SamplingParams | Mapping[str, Any] | None = None,
    into: str = "answer",
) -> Any:
    """Ask about every row of a table; the same table comes back with three more columns, in the order of its rows.

    ``table`` is a ``datasets.Dataset`` or ``IterableDataset``, a ``pyarrow.Table`` or ``RecordBatchReader``, a pandas or
    polars ``DataFrame``, or anything that pyarrow makes a table of, which comes back as one. An ``IterableDataset`` and a
    ``RecordBatchReader`` are answered while the result is read; of the others, pictures are read as they are asked about.

    ``prompt`` may name columns (``"What is on this {kind}?"``); without one, the column "prompt" is asked. ``image`` is the
    column with paths, URLs, bytes or pictures, and ``video`` likewise; by default columns of the usual names, or that hold
    pictures by their type. ``into`` holds the text, ``into_error`` why there is none, ``into_tokens`` how many tokens it has.

    Raises InvalidJob for a table or columns that do not fit.
    """
    asked = _Asked(batcher, prompt, Columns(image=image, video=video), system, params_of(params), into)
    if "pandas" in sys.modules and isinstance(table, sys.modules["pandas"].DataFrame):
        return _map_pandas(asked, table)
    if "polars" in sys.modules:
        polars = sys.modules["polars"]
        if isinstance(table, polars.LazyFrame):
            raise InvalidJob("a LazyFrame is no table yet: collect() it")
        if isinstance(table, polars.DataFrame):
            return polars.from_arrow(_map_arrow(asked, table))
    if "datasets" in sys.modules:
        datasets = sys.modules["datasets"]
        if isinstance(table, datasets.Dataset):
            return _map_dataset(asked, table)
        if isinstance(table, datasets.IterableDataset):
            return _map_stream(asked, table, datasets)
    return _map_arrow(asked, table)


def _map_arrow(asked: _Asked, table: Any) -> pa.Table | pa.RecordBatchReader:
    import pyarrow as pa

    if isinstance(table, pa.RecordBatchReader):
        return pa.RecordBatchReader.from_batches(asked.schema(table.schema), _batches(asked, table, table.schema))
    if not isinstance(table, pa.Table):
        try:
            table = pa.table(table)
        except (TypeError, ValueError) as error:
            raise InvalidJob(f"{type(table).__name__} is no table that is known here: {error}") from error
    batches = list(_batches(asked, table.to_batches(max_chunksize=BATCH_ROWS), table.schema))
    return pa.Table.from_batches(batches, schema=asked.schema(table.schema))


class _Asked:
    """Asks about a table's rows, and gives the answers as cells."""

    def __init__(
        self,
        batcher: VLMBatcher,
        prompt: str | None,
        columns: Columns,
        system: str | None,
        params: SamplingParams,
        into: str,
    ) -> None:
        self._batcher = batcher
        self._prompt = prompt
        self._columns = columns
        self._questions = Questions((prompt or DEFAULT_PROMPT,), system, params)
        self.names = (into, f"{into}_error", f"{into}_tokens")

    def columns(self, names: list[str], pictures: list[str]) -> Columns:
        """Find the columns of pictures, videos and prompts. Raises InvalidJob."""
        if taken := [name for name in self.names if name in names]:
            raise InvalidJob(f"the table has a column {taken[0]!r} already; into= takes another name")
        missing = sorted(self._questions.columns - set(names))
        if missing and self._prompt is not None:
            raise InvalidJob(f"the prompt names {{{missing[0]}}}, which is no column (columns: {', '.join(names)})")
        if self._prompt is None and "prompt" not in names:
            raise InvalidJob("prompt= is needed: the table has no column 'prompt'")
        found = self._columns.among(names, "the table", pictures)
        return found if self._prompt is not None else replace(found, prompt="prompt")

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """An Arrow schema with the answers' columns."""
        import pyarrow as pa

        kinds = (pa.string(), pa.string(), pa.int64())
        for name, kind in zip(self.names, kinds, strict=True):
            schema = schema.append(pa.field(name, kind))
        return schema

    def answers(
        self, table: Iterable[Mapping[str, Any]], columns: Columns
    ) -> Iterator[tuple[str | None, str | None, int]]:
        """(text, error, tokens) of each row, in order. Rows are read ``WINDOW`` ahead of the one that is due."""
        ahead: deque[Handle | Result] = deque()
        try:
            for number, cells in enumerate(table):
                row = row_of_cells(cells, columns, place=f"row {number}", folder="")
                ahead.append(submitted_row(self._batcher, self._questions, row))
                if len(ahead) == WINDOW:
                    yield _cells(ahead.popleft())
            while ahead:
                yield _cells(ahead.popleft())
        finally:  # whoever reads the answers may stop
            for one in ahead:
                if isinstance(one, Handle):
                    one.cancel()


def _cells(one: Handle | Result) -> tuple[str | None, str | None, int]:
    result = one.result() if isinstance(one, Handle) else one
    return (result.text if result.ok else None), result.error, result.usage.completion_tokens


def _map_pandas(asked: _Asked, frame: Any) -> Any:
    columns = asked.columns([str(name) for name in frame.columns], [])
    starts = range(0, len(frame), BATCH_ROWS)
    rows = (row for start in starts for row in frame.iloc[start : start + BATCH_ROWS].to_dict("records"))
    texts, errors, tokens = _columns(asked.answers(rows, columns))
    return frame.assign(**dict(zip(asked.names, (texts, errors, tokens), strict=True)))


def _map_dataset(asked: _Asked, dataset: Any) -> Any:
    columns = asked.columns(dataset.column_names, picture_features(dataset))
    for name, values in zip(asked.names, _columns(asked.answers(stored_rows(dataset), columns)), strict=True):
        dataset = dataset.add_column(name, values)
    return dataset


def _columns(answers: Iterator[tuple[str | None, str | None, int]]) -> tuple[list[Any], list[Any], list[int]]:
    rows = list(answers)
    return [text for text, _, _ in rows], [error for _, error, _ in rows], [count for *_, count in rows]


def _map_stream(asked: _Asked, dataset: Any, datasets: Any) -> Any:
    pictures = picture_features(dataset)
    bare = dataset
    for name in pictures:  # as they are stored: they are decoded when they are asked about
        kind, stored = dataset.features[name], datasets.Image(decode=False)
        bare = bare.cast_column(name, stored if isinstance(kind, datasets.Image) else type(kind)(stored))
    columns = asked.columns(list(dataset.features or next(iter(dataset), {})), pictures)

    kinds = (datasets.Value("string"), datasets.Value("string"), datasets.Value("int64"))
    features = None
    if dataset.features is not None:
        features = datasets.Features({**dataset.features, **dict(zip(asked.names, kinds, strict=True))})
    return datasets.IterableDataset.from_generator(_Stream(asked, bare, columns), features=features)


class _Stream:
    """A generator of rows with their answers, for ``datasets``, which takes a digest of it: one that is its own."""

    def __init__(self, asked: _Asked, rows: Any, columns: Columns) -> None:
        self._asked = asked
        self._rows = rows
        self._columns = columns

    def __call__(self) -> Iterator[dict[str, Any]]:
        waiting: deque[dict[str, Any]] = deque()
        for answer in self._asked.answers(_kept(self._rows, waiting.append), self._columns):
            yield {**waiting.popleft(), **dict(zip(self._asked.names, answer, strict=True))}

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (uuid.uuid4().hex,)


def _batches(asked: _Asked, table: Iterable[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Record batches with their answers, each as soon as its rows have ended."""
    import pyarrow as pa

    columns = asked.columns(schema.names, picture_columns(schema))
    waiting: deque[pa.RecordBatch] = deque()
    whole = asked.schema(schema)

    def rows() -> Iterator[Mapping[str, Any]]:
        for batch in _kept(table, waiting.append):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()

    def filled(batch: pa.RecordBatch, answers: list[tuple[Any, ...]]) -> pa.RecordBatch:
        cells = [[answer[place] for answer in answers] for place in range(3)]
        arrays = [pa.array(values, whole.field(name).type) for name, values in zip(asked.names, cells, strict=True)]
        return pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=whole)

    ready: list[tuple[Any, ...]] = []
    for answer in asked.answers(rows(), columns):
        ready.append(answer)
        while waiting and len(ready) >= waiting[0].num_rows:
            batch = waiting.popleft()
            yield filled(batch, ready[: batch.num_rows])
            del ready[: batch.num_rows]
    yield from (filled(batch, []) for batch in waiting)  # batches without rows


def _kept(table: Iterable[Any], keep: Callable[[Any], None]) -> Iterator[Any]:
    """A table's parts, each noted before it is given."""
    for part in table:
        keep(part)
        yield part
