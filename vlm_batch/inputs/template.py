"""Chat templates: their arguments, rendering, and marks of thinking."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlm_batch.errors import InvalidPrompt
from vlm_batch.types import PLAIN_TEMPLATE, Template

#: Names in a template that users cannot set: the chat, the tokenizer's words, transformers' functions.
_GIVEN = frozenset(
    (
        *(
            "messages",
            "conversation",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "tokenize",
        ),
        *(
            "raise_exception",
            "strftime_now",
            "kwargs",
            "args",
            "self",
            "processor_kwargs",
            "template_kwargs",
        ),
        *(
            "tokenizer_kwargs",
            "return_dict",
            "return_tensors",
            "return_assistant_tokens_mask",
            "padding",
            "truncation",
        ),
        *(
            "sanitize_control_tokens",
            "max_length",
            "load_audio_from_video",
            "images",
            "image",
            "audio",
            "videos",
        ),
        *("video", "fps", "num_frames"),
    )
)
#: Marks of thinking, start and end. The first pair whose end the template writes counts.
_THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)


#: Words of the tokenizer that every template may read.
_SPECIAL = {"bos_token", "eos_token", "pad_token", "unk_token"}
_NAMED = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
#: What stands in a chat that tells what a template takes.
_PROBE = "probe"
_TEXT_PART = {"type": "text", "text": _PROBE}


def refuse(template: Template, why: str) -> None:
    """Raise InvalidPrompt if ``template`` sets anything."""
    if said := template.said:
        raise InvalidPrompt(f"{', '.join(said)}: {why}")


@dataclass(frozen=True)
class ThinkingMarks:
    """The words between which a model thinks."""

    start: str
    end: str

    def is_open(self, text: str) -> bool:
        """Whether a prompt ends within thinking."""
        if text.rstrip().endswith(self.start):
            return True
        last_end = text.rfind(self.end)
        return last_end >= 0 and text.rfind(self.start) > last_end

    def is_over(self, text: str) -> bool:
        """Whether a prompt ends with finished thinking."""
        return text.rstrip().endswith(self.end)


class ChatTemplate:
    """One processor's chat template, if any."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)

    @cached_property
    def owner(self) -> Any:
        """The object whose ``apply_chat_template`` mlx-vlm calls."""
        for part in (self._processor, self._tokenizer):
            has_template = getattr(part, "chat_template", None) is not None
            if has_template and hasattr(part, "apply_chat_template"):
                return part
        return None

    @property
    def sources(self) -> Mapping[str, str]:
        """The template's texts by name, mostly "default"."""
        given = getattr(self.owner, "chat_template", None)
        if isinstance(given, str):
            return {"default": given}
        return dict(given or {})

    @cached_property
    def reads(self) -> frozenset[str]:
        """The arguments that it reads."""
        read: set[str] = set()
        environment = ImmutableSandboxedEnvironment(
            extensions=[_Generation, loopcontrols]
        )
        for source in self.sources.values():
            with suppress(TemplateError):  # rendering says what is wrong with it
                parsed = environment.parse(source)
                read |= find_undeclared_variables(parsed) - _set_first(parsed)
        # some processors render in Python, with arguments of their own
        if self.owner is not None:
            read |= _arguments_of(self.owner.apply_chat_template)
        special = getattr(self._tokenizer, "special_tokens_map", None) or {}
        return frozenset(read - _GIVEN - _SPECIAL - set(special))

    @cached_property
    def thinking(self) -> ThinkingMarks | None:
        text = "".join(self.sources.values())
        for start, end in _THINKING:
            if end in text:
                return ThinkingMarks(start, end)
        return None

    def check(self, options: Template) -> None:
        """Raise InvalidPrompt for unread arguments."""
        if self.owner is None:
            refuse(
                options, "this model has no chat template, which alone could read it"
            )
        taken = sorted(_GIVEN.intersection(options.args))
        if taken:
            raise InvalidPrompt(
                f"args holds {taken[0]!r}, which is not an argument of the template to set"
            )
        unknown = sorted(options.arguments.keys() - self.reads)
        if unknown:
            known = ", ".join(sorted(self.reads)) or "none"
            holds = "args holds " if unknown[0] in options.args else ""
            raise InvalidPrompt(
                f"{holds}{', '.join(unknown)}: this model's chat template does not read that; it reads {known}"
            )

    def fill(self, messages: Sequence[Any], options: Template = PLAIN_TEMPLATE) -> str:
        """Render messages, as transformers does: with what the request says and no default of our own.

        mlx-vlm's ``get_chat_template`` switches thinking off where nobody asked, and sorts the keys of tools.
        """
        arguments = options.arguments
        thinks = arguments.get("enable_thinking") is True
        if thinks and "thinking_mode" in self.reads:
            arguments.setdefault("thinking_mode", "enabled")
        continues = options.continue_final_message
        if continues:
            arguments["continue_final_message"] = True
        found: str = self.owner.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt and not continues,
            **arguments,
        )
        return found

    def takes(self, turns: str | Sequence[Mapping[str, Any]], num_images: int) -> bool:
        """Whether it renders these turns as they are."""
        if self.owner is None:
            return False
        if num_images:
            return self.takes_parts and self.writes_pictures
        if self.takes_parts or isinstance(turns, str):
            return True
        return all(map(_is_text, turns))

    @cached_property
    def takes_text(self) -> bool:
        """Whether a turn's content may be text; some templates know parts alone."""
        return self.owner is None or _PROBE in self._probed(_PROBE)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a turn's content may be parts; others would write them out as Python does."""
        found = self._probed([_TEXT_PART])
        return _PROBE in found and f"'{_PROBE}'" not in found

    @property
    def takes_text_alone(self) -> bool:
        """Whether it would write a list of parts out as Python does, or fail at it."""
        return self.owner is not None and self.takes_text and not self.takes_parts

    @cached_property
    def writes_pictures(self) -> bool:
        """Whether it has a mark for a picture's part."""
        with_one = self._probed([{"type": "image"}, _TEXT_PART])
        return with_one not in ("", self._probed([_TEXT_PART]))

    def _probed(self, content: Any) -> str:
        """Render a turn; "" if that fails."""
        try:
            return self.fill([{"role": "user", "content": content}])
        except Exception:  # whatever a template raises, it does not take this
            return ""


class _Generation(Extension):
    """transformers' ``{% generation %}``, which marks assistants' words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _set_first(template: nodes.Template) -> set[str]:
    """Return the names that a template sets before it reads them; jinja2 counts those of one branch as arguments, too."""
    first: dict[str, str] = {}
    for name in _names(template):
        first.setdefault(name.name, name.ctx)
    return {name for name, ctx in first.items() if ctx != "load"}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield a template's names in the order in which they are used: a value before the name that it is set to."""
    if isinstance(node, nodes.Name):
        yield node
    first, last = _placed(node)
    placed = set(map(id, first + last))
    rest = [child for child in node.iter_child_nodes() if id(child) not in placed]
    for child in first + rest + last:
        yield from _names(child)


def _placed(node: nodes.Node) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Return the children of a node that are used before its others, and behind them."""
    if isinstance(node, nodes.For):
        return [node.iter, node.target], []
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        return [], [node.target]
    return [], []


def _is_text(turn: Mapping[str, Any]) -> bool:
    """Whether a turn's content is text, or none."""
    return isinstance(turn.get("content"), (str, NoneType))


def _arguments_of(function: Callable[..., Any]) -> set[str]:
    """Return the named arguments of a function of mlx-vlm's that renders chats."""
    if not function.__module__.startswith("mlx_vlm."):
        return set()
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        return {one.name for one in parameters if one.kind in _NAMED}
    return set()
