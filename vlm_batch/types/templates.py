"""Arguments of the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vlm_batch.checks import demand, is_flag
from vlm_batch.errors import InvalidPrompt

#: Arguments of chat templates that are fields of ``Template``.
_NAMED = ("tools", "documents", "enable_thinking", "reasoning_effort")
#: Fields that are no arguments of it, and say how it is used.
_FLAGS = (
    "add_generation_prompt",
    "continue_final_message",
    "escape_special_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """Arguments for the model's chat template. An unread one is refused.

    Args:
        tools: functions for the model to call, in OpenAI's form.
        documents: mappings, as the template reads them.
        enable_thinking: None leaves it to the template.
        reasoning_effort: amount of thinking, in the template's words.
        args: other arguments, by name.
        add_generation_prompt: begin the assistant's turn.
        continue_final_message: continue the last turn.
        escape_special_tokens: read special tokens in the chat (``<|im_end|>``) as plain text. Else those of turns and
            pictures are refused.

    Raises:
        InvalidPrompt: a value has another type, or an argument is given twice.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    escape_special_tokens: bool = False

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("tools", "documents"):
            value = getattr(self, name)
            if value is not None:
                put(name, _mappings(name, value))
        self._check("enable_thinking", _is_bool_or_none, "True, False or None")
        self._check("reasoning_effort", _is_text_or_none, "text, or None")
        self._check("args", _is_named, "a mapping of names to values")
        put("args", dict(self.args))
        twice = sorted(self.args.keys() & self._by_name.keys())
        if twice:
            raise InvalidPrompt(f"{twice[0]} is given twice: by itself and in args")
        for name in _FLAGS:
            self._check(name, is_flag, "True or False")

    def _check(self, name: str, is_right: Callable[[Any], bool], right: str) -> None:
        value = getattr(self, name)
        demand(is_right(value), InvalidPrompt, name, value, right)

    @property
    def _by_name(self) -> dict[str, Any]:
        """Arguments that are fields, but None."""
        found = {}
        for name in _NAMED:
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by the template's names."""
        return {**self.args, **self._by_name}

    @property
    def said(self) -> list[str]:
        """Names of arguments that differ from the defaults."""
        said = sorted(self.arguments)
        if not self.add_generation_prompt and not self.continue_final_message:
            said.append("add_generation_prompt=False")
        if self.continue_final_message:
            said.append("continue_final_message")
        return said


def _mappings(name: str, given: Any) -> list[dict[str, Any]]:
    is_sequence = isinstance(given, (list, tuple))
    is_right = is_sequence and all(isinstance(one, Mapping) for one in given)
    demand(is_right, InvalidPrompt, name, given, "a list of mappings, or None")
    return [dict(one) for one in given]


def _is_bool_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_named(value: Any) -> bool:
    """Return whether a value is a mapping of names."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(name, str) for name in value)


PLAIN_TEMPLATE = Template()
