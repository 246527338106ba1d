"""Arguments of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vlm_batch.checks import is_flag
from vlm_batch.errors import InvalidPrompt
from vlm_batch.types.rules import FieldRule, check_fields, is_bool, is_text

#: Arguments of chat templates that are fields of ``Template``.
_NAMED = ("tools", "documents", "enable_thinking", "reasoning_effort")


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
        check_fields(self, _RULES, InvalidPrompt)
        put = partial(object.__setattr__, self)
        put("tools", _copies(self.tools))
        put("documents", _copies(self.documents))
        put("args", dict(self.args))
        twice = sorted(self.args.keys() & self._by_name.keys())
        if twice:
            raise InvalidPrompt(f"{twice[0]} is given twice: by itself and in args")

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
        if self.continue_final_message:
            said.append("continue_final_message")
        elif not self.add_generation_prompt:
            said.append("add_generation_prompt=False")
        return said


def _copies(given: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    return None if given is None else list(map(dict, given))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_mapping, value))


def _is_named(value: Any) -> bool:
    """Return whether a value is a mapping of names."""
    return isinstance(value, Mapping) and all(map(is_text, value))


_LIST = FieldRule(_are_mappings, "a list of mappings, or None", or_none=True)
_FLAG = FieldRule(is_flag, "True or False")
_RULES = {
    "tools": _LIST,
    "documents": _LIST,
    "enable_thinking": FieldRule(is_bool, "True, False or None", or_none=True),
    "reasoning_effort": FieldRule(is_text, "text, or None", or_none=True),
    "args": FieldRule(_is_named, "a mapping of names to values"),
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "escape_special_tokens": _FLAG,
}
PLAIN_TEMPLATE = Template()
