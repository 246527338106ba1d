"""Questions about rows: templates over columns, the system prompt, sampling, and a row's own prompt and parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vlm_batch.jobs.cells import hint
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.types import ImageInput, Message, Request, SamplingParams
from vlm_batch.types import Template as ChatTemplate

DEFAULT_PROMPT = "describe the picture"
#: ``{{`` and ``}}``, or ``{name}`` with a name that JSON in a prompt cannot be mistaken for.
_PARTS = re.compile(r"\{\{|\}\}|\{([^\W\d][\w .-]*)\}")
_PARAMS = frozenset(one.name for one in fields(SamplingParams)) - {"logits_processors"}


@dataclass(frozen=True)
class Template:
    """A text with ``{column}`` in it; ``{{`` and ``}}`` are braces, and any other brace is itself."""

    text: str

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(match[1] for match in _PARTS.finditer(self.text) if match[1])

    def fill(self, columns: Mapping[str, Any]) -> str:
        """The text for one row. Raises InvalidJob for a column that the row lacks, or has without a value."""

        def value(match: re.Match[str]) -> str:
            if not match[1]:
                return match[0][0]
            if columns.get(match[1]) is None:
                known = ", ".join(columns) or "none"
                why = "is empty" if match[1] in columns else f"is not there (columns: {known})"
                raise InvalidJob(f"the prompt's column {match[1]!r} {why}")
            # A name that is no UTF-8 is asked about with marks in its place: tokenizers take none of its bytes.
            return str(columns[match[1]]).encode("utf-8", "surrogateescape").decode("utf-8", "replace")

        return _PARTS.sub(value, self.text)


_PLAIN = SamplingParams()


@dataclass(frozen=True)
class Item:
    """One question about one row, the ``number``th of its job. ``error`` says why it cannot be asked."""

    id: str
    row: Row
    number: int = 0
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    params: SamplingParams = _PLAIN
    enable_thinking: bool | None = None
    error: str | None = None

    @property
    def names(self) -> list[str]:
        """The row's id and the names of its pictures, as they may stand in a message."""
        return [self.row.id, *self.row.image_names]

    def request(self) -> Request:
        """The request for the batcher; the row's pictures are read here, where they lie inside something larger."""
        row = self.row
        images: Sequence[ImageInput] = row.images if row.load is None else tuple(row.load())
        return Request(
            prompt=None if self.messages is not None else self.prompt,
            messages=self.messages,
            images=images,
            videos=row.videos,
            params=self.params,
            template=ChatTemplate(enable_thinking=self.enable_thinking),
            request_id=self.id,
        )


@dataclass(frozen=True)
class Questions:
    """Asked about each row. A row's own prompt, messages and params go before these.

    With several prompts each row is asked each of them, and "#1", "#2", ... is put to its id. ``enable_thinking`` is for
    models that can think; None leaves it to the chat template.
    """

    prompts: tuple[str, ...] = (DEFAULT_PROMPT,)
    system: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    enable_thinking: bool | None = None

    def __post_init__(self) -> None:
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise InvalidJob("the prompt is empty; say what is asked about the pictures")

    @property
    def columns(self) -> frozenset[str]:
        """The columns that rows must have."""
        texts = self.prompts + ((self.system,) if self.system else ())
        return frozenset[str]().union(*(Template(text).columns for text in texts))

    def ask(self, row: Row) -> Iterator[Item]:
        """The row's questions, filled in. A question that cannot be asked has an ``error``."""
        own = row.error is not None or row.prompt is not None or row.messages is not None
        for number, text in enumerate(self.prompts[:1] if own else self.prompts, 1):
            item_id = row.id if own or len(self.prompts) == 1 else f"{row.id}#{number}"
            item = Item(item_id, row, enable_thinking=self.enable_thinking, error=row.error)
            if row.error is None:
                try:
                    item = self._filled(item, text)
                except ValueError as error:  # InvalidJob, InvalidParameters
                    item = replace(item, error=f"{type(error).__name__}: {error}")
            yield item

    def _filled(self, item: Item, text: str) -> Item:
        row = item.row
        params = merged(self.params, row.params)
        if row.messages is not None:
            return replace(item, messages=self._with_system(row), params=params)
        prompt = row.prompt if row.prompt is not None else Template(text).fill(row.columns)
        if not prompt.strip():
            raise InvalidJob("the prompt is empty")
        if self.system is None:
            return replace(item, prompt=prompt, params=params)
        system = Template(self.system).fill(row.columns)
        chat = ({"role": "system", "content": system}, {"role": "user", "content": prompt})
        return replace(item, prompt=prompt, messages=chat, params=params)

    def _with_system(self, row: Row) -> tuple[Message, ...]:
        """The row's own chat, begun by the system prompt unless it has one."""
        messages = tuple(row.messages or ())
        has_one = any(isinstance(one, Mapping) and one.get("role") == "system" for one in messages)
        if self.system is None or has_one:
            return messages
        return ({"role": "system", "content": Template(self.system).fill(row.columns)}, *messages)

    def settings(self) -> dict[str, Any]:
        """The settings in an output's header, which are compared when the job is resumed."""
        params = {one.name: vars(self.params)[one.name] for one in fields(SamplingParams) if one.name in _PARAMS}
        return {"prompts": list(self.prompts), "system": self.system, "thinking": self.enable_thinking, **params}


def schema_fields(params: SamplingParams) -> frozenset[str]:
    """The fields that a JSON schema has answers' objects have; none without one."""
    schema = params.json_schema
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(properties) if isinstance(properties, Mapping) else frozenset()


def merged(params: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """``params`` with a row's own. Raises InvalidJob for a name that is none, InvalidParameters for a value out of range."""
    if unknown := sorted(set(own) - _PARAMS):
        raise InvalidJob(
            f"params does not know {', '.join(unknown)}{hint(unknown[0], _PARAMS)}; it takes {', '.join(sorted(_PARAMS))}"
        )
    return replace(params, **own) if own else params
