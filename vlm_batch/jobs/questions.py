"""Questions about rows: prompt templates, system prompt, sampling."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.jobs.cells import did_you_mean
from vlm_batch.jobs.rows import InvalidJob, JobRow
from vlm_batch.types import (
    SAMPLING_PARAMETERS,
    Message,
    Request,
    Result,
    SamplingParams,
    Template,
)

DEFAULT_PROMPT = "describe the picture"
#: ``{{``, ``}}``, or ``{name}`` with a name that JSON cannot look like.
_PARTS = re.compile(r"\{\{|\}\}|\{([^\W\d][\w .-]*)\}")
#: Sampling parameters that rows and a job's settings may name, in their order.
PARAMETERS = tuple(one.name for one in SAMPLING_PARAMETERS if one.in_jobs)


def columns_in(text: str) -> frozenset[str]:
    """Return the columns that a prompt names."""
    return frozenset(filter(None, _PARTS.findall(text)))


def filled(text: str, columns: Mapping[str, Any]) -> str:
    """Fill in a prompt: ``{column}`` is a value, ``{{`` and ``}}`` are braces."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if not name:
            return match[0][0]
        if name not in columns:
            there = ", ".join(columns) or "none"
            raise InvalidJob(
                f"the prompt's column {name!r} is not there (columns: {there})"
            )
        if columns[name] is None:
            raise InvalidJob(f"the prompt's column {name!r} is empty")
        # Tokenizers take no lone surrogates, so bytes of names that are not UTF-8 become replacement marks.
        raw = str(columns[name]).encode("utf-8", "surrogateescape")
        return raw.decode("utf-8", "replace")

    return _PARTS.sub(value, text)


_PLAIN = SamplingParams()


@dataclass(frozen=True)
class Item:
    """One question about a row; ``error`` says why it cannot be asked. ``attempt`` counts from 1."""

    id: str
    row: JobRow
    number: int = 0
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    params: SamplingParams = _PLAIN
    enable_thinking: bool | None = None
    error: str | None = None
    attempt: int = 1

    @property
    def names(self) -> list[str]:
        return [self.row.id, *self.row.image_names]

    def request(self) -> Request:
        """Return the request with its pictures read."""
        row = self.row
        request = Request(
            prompt=None if self.messages is not None else self.prompt,
            messages=self.messages,
            images=tuple(row.pictures()),
            videos=row.videos,
            audios=row.audios,
            params=self.params,
            template=Template(enable_thinking=self.enable_thinking),
            request_id=self.id,
        )
        return row.shown(request)


@dataclass(frozen=True)
class Questions:
    """Asked about each row that has no prompt or messages of its own; a row's params override ``params``.

    Several prompts add "#1", "#2", ... to the row's id. ``enable_thinking=None`` leaves thinking to the chat template.
    ``again`` returns the item to ask once more, or None where the answer will do; the second answer is stored.
    """

    prompts: tuple[str, ...] = (DEFAULT_PROMPT,)
    system: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    enable_thinking: bool | None = None
    again: Callable[[Item, Result], Item | None] = lambda item, result: None

    def __post_init__(self) -> None:
        if not self.prompts or not all(map(str.strip, self.prompts)):
            raise InvalidJob(
                "the prompt is empty; say what is asked about the pictures"
            )

    @property
    def columns(self) -> frozenset[str]:
        """Columns that a prompt or the system prompt names."""
        texts = (*self.prompts, self.system or "")
        return frozenset[str]().union(*map(columns_in, texts))

    def check_columns(self, known: Collection[str], where: str = "") -> None:
        """Raise InvalidJob if a prompt names a column that is none of those that are known ``where``."""
        missing = sorted(self.columns.difference(known))
        if missing:
            raise InvalidJob(
                f"the prompt names {{{missing[0]}}}, which is no column{where}; columns: {', '.join(known) or 'none'} "
                "(write {{ and }} for braces)"
            )

    def ask(self, row: JobRow) -> Iterator[Item]:
        """Yield the row's questions, filled in or with an ``error``."""
        if row.error is not None:
            yield Item(row.id, row, error=row.error)
            return
        if len(self.prompts) == 1 or row.asks_itself:
            yield self._item(row.id, row, self.prompts[0])
            return
        for number, text in enumerate(self.prompts, 1):
            yield self._item(f"{row.id}#{number}", row, text)

    def _item(self, item_id: str, row: JobRow, text: str) -> Item:
        item = Item(item_id, row, enable_thinking=self.enable_thinking)
        try:
            return self._filled(item, text)
        except ValueError as error:  # InvalidJob, InvalidParameters
            return replace(item, error=f"{type(error).__name__}: {error}")

    def _filled(self, item: Item, text: str) -> Item:
        row = item.row
        params = merged(self.params, row.params)
        if row.messages is not None:
            return replace(item, messages=self._with_system(row), params=params)
        prompt = row.prompt if row.prompt is not None else filled(text, row.columns)
        if not prompt.strip():
            raise InvalidJob("the prompt is empty")
        if self.system is None:
            return replace(item, prompt=prompt, params=params)
        system = filled(self.system, row.columns)
        chat = (
            {"role": "system", "content": system},
            {"role": "user", "content": prompt},
        )
        return replace(item, prompt=prompt, messages=chat, params=params)

    def _with_system(self, row: JobRow) -> tuple[Message, ...]:
        messages = tuple(row.messages or ())
        if self.system is None or any(map(_is_system, messages)):
            return messages
        system = {"role": "system", "content": filled(self.system, row.columns)}
        return (system, *messages)

    def settings(self) -> dict[str, Any]:
        params = {name: vars(self.params)[name] for name in PARAMETERS}
        return {
            "prompts": list(self.prompts),
            "system": self.system,
            "thinking": self.enable_thinking,
            **params,
        }


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "system"


def schema_fields(params: SamplingParams) -> frozenset[str]:
    """Return the fields of the object that answers are, by their schema."""
    schema = params.json_schema
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(properties)


def merged(params: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """Override ``params`` by a row's."""
    if not own:
        return params
    unknown = sorted(set(own).difference(PARAMETERS))
    if unknown:
        raise InvalidJob(
            f"params does not know {', '.join(unknown)}{did_you_mean(unknown[0], PARAMETERS)}; "
            f"it takes {', '.join(sorted(PARAMETERS))}"
        )
    return replace(params, **own)
