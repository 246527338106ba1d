"""Engine events to answers; mlx-vlm's parsers and stream states separate reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from mlx_vlm.server.responses_state import (
    ThinkingStreamState,
    ToolCallStreamState,
    _response_template_tokenizer,
    make_response_stream_state,
    prompt_has_open_thinking,
)
from mlx_vlm.tools import _infer_tool_parser, load_tool_module, process_tool_calls
from mlx_vlm.tools.registry import _template_text
from mlx_vlm.tools.streaming import ToolCallDeltaState
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.processors import copy_for_thread
from vlm_batch.server.asking import Abilities
from vlm_batch.server.calls import INNER_MARKS, CallWriter
from vlm_batch.types import Event, Template, TokenLogprobs

#: A tokenizer's text for part of a character.
_UNFINISHED = "\ufffd"
#: A number that Python refuses to parse, for which mlx-vlm drops the whole call.
_TOO_LONG = re.compile(r"[0-9]{4301}")
#: A byte as a token of tokenizers with a byte fallback.
_NAMED_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class UnreadableCall(Exception):
    """A tool call cannot be parsed, or contradicts what was streamed."""


@dataclass(frozen=True)
class Delta:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()  # if they are asked for

    def __add__(self, later: Delta) -> Delta:
        return Delta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
            self.logprobs + later.logprobs,
            self.token_ids + later.token_ids,
        )

    @property
    def is_empty(self) -> bool:
        return self == _EMPTY


_EMPTY = Delta()


class Dialect:
    """A checkpoint's form of reasoning, tool calls and tokens."""

    def __init__(
        self,
        processing: Processing,
        tool_parser: str | None = None,
        recommended: Mapping[str, Any] | None = None,
        *,
        shows_special: bool = False,
    ) -> None:
        """Read a checkpoint's dialect.

        Args:
            processing: The checkpoint's processor, tokenizer and chat template.
            tool_parser: A parser's name of mlx-vlm's, in place of the template's own.
            recommended: Sampling for requests that ask for it.
            shows_special: Answers have special tokens unless a request says otherwise.
        """
        self._processor = processing.processor
        # sampling for requests that ask for it
        self.recommended = dict(recommended or {})
        self._tokenizer = copy_for_thread(
            processing.tokenizer
        )  # a fast one serves one thread at a time; this is the loop's
        self._special = set(self._tokenizer.all_special_ids)
        for token, added in self._tokenizer.added_tokens_decoder.items():
            if added.special:
                self._special.add(token)
        self._shows_special = shows_special
        self._usually_hidden = processing.around if shows_special else self._special
        self._template = processing.chat_template
        self.reads = processing.template.reads  # arguments of the chat template
        self._known_token = lru_cache(maxsize=1 << 16)(self._token)
        self.tool_parser: str | None = _infer_tool_parser(self._template, tool_parser)
        self.tool_module = (
            None if self.tool_parser is None else load_tool_module(self.tool_parser)
        )
        pairs = ThinkingStreamState._build_open_close_markers(None, None)
        text = _template_text(self._template) or ""
        self.reasons = _response_template_tokenizer(self._processor) is not None or any(
            end in text for _, end in pairs
        )
        self._hidden = self._hidden_markers(
            [marker for pair in pairs for marker in pair]
        )

    @cached_property
    def abilities(self) -> Abilities:
        """This checkpoint's abilities, for requests."""
        return Abilities(
            writer=self.writer,
            reads=self.reads,
            recommended=self.recommended,
            thinks=self.reasons,
        )

    @cached_property
    def writer(self) -> CallWriter | None:
        if self.tool_parser is None:
            return None
        added = self._tokenizer.added_tokens_decoder
        marks = {str(word): int(token) for token, word in added.items()}
        return CallWriter(self.tool_parser, marks, _template_text(self._template) or "")

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; a partial character's text is U+FFFD."""
        text, raw = self._known_token(token_id)
        return text, list(raw)

    def opens_thinking(self, template: Template | None) -> bool:
        """Whether the template's prompt ends inside reasoning."""
        if (
            not self.reasons
            or template is None
            or not template.add_generation_prompt
            or template.continue_final_message
        ):
            return False
        turns = [{"role": "user", "content": "?"}]
        try:
            prompt = self._tokenizer.apply_chat_template(
                turns,
                chat_template=_template_text(self._template),
                tokenize=False,
                add_generation_prompt=True,
                **template.arguments,
            )
        except Exception:  # a template that wants more than one plain turn
            return False
        return prompt_has_open_thinking(prompt)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that decoding may leave it out of the text."""
        return token_id in self._special

    def is_hidden(self, token_id: int, skip_special_tokens: bool | None) -> bool:
        """Whether a text leaves a token out, with this value of ``SamplingParams``."""
        if skip_special_tokens is None:
            return token_id in self._usually_hidden
        return skip_special_tokens and self.is_special(token_id)

    def text_of(
        self, token_ids: Sequence[int], skip_special_tokens: bool | None
    ) -> str:
        """Return tokens' text, with this value of ``SamplingParams``."""
        ids = list(token_ids)
        if skip_special_tokens is None and self._shows_special:
            ids = [token for token in ids if token not in self._usually_hidden]
            skip_special_tokens = False
        skips = skip_special_tokens is not False
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips))

    def reader(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = False,
        is_forced: bool = False,
    ) -> AnswerReader:
        """Return a reader of one answer; an answer that ``is_forced`` to be calls has no content."""
        reasoning = (
            make_response_stream_state(self._processor, thinking)
            if self.reasons
            else None
        )
        return AnswerReader(
            reasoning,
            self.tool_module if tools else None,
            tools,
            self._hidden,
            is_forced,
        )

    def _hidden_markers(self, markers: Sequence[str]) -> dict[int, str]:
        """Return markers that decoding omits, by id."""
        wanted = list(markers)
        if self.tool_module is not None:
            wanted += [self.tool_module.tool_call_start, self.tool_module.tool_call_end]
            wanted += INNER_MARKS.get(self.tool_parser or "", ())
        hidden = {}
        omitted = self._special - {self._tokenizer.unk_token_id}
        for marker in filter(None, wanted):
            token = self._tokenizer.convert_tokens_to_ids(marker)
            if token in omitted:
                hidden[token] = marker
        return hidden

    def _token(self, token_id: int) -> tuple[str, bytes]:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if _UNFINISHED not in text:
            return text, text.encode("utf-8", "surrogatepass")
        raw = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        named = _NAMED_BYTE.fullmatch(raw)
        if named is not None:
            return text, bytes([int(named[1], 16)])
        if not raw or not _BYTES.keys() >= set(raw):
            return text, text.encode()
        return text, bytes(map(_BYTES.__getitem__, raw))


@dataclass
class AnswerReader:
    """Reads an answer's events; ``reasoning`` is mlx-vlm's state, or None. By default all is content."""

    reasoning: Any = None
    tool_module: Any = None
    tools: Sequence[Mapping[str, Any]] = ()
    hidden: Mapping[int, str] = field(default_factory=dict)
    is_forced: bool = False
    has_calls: bool = False
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        module = self.tool_module
        self._shown = (
            ToolCallStreamState(module.tool_call_start, module.tool_call_end)
            if module
            else None
        )
        self._calls = ToolCallDeltaState(module, list(self.tools)) if module else None
        self._content: list[str] = []  # with its calls

    def feed(self, event: Event) -> Delta:
        logprobs = () if event.logprobs is None else (event.logprobs,)
        if not self._reads:
            return Delta(event.text, logprobs=logprobs)
        text = event.text
        if event.token is not None:
            marker = self.hidden.get(event.token, "")
            if marker not in text:
                text = marker + text
            self._count_thought()
        return self._read(text, logprobs, last=False)

    def _count_thought(self) -> None:
        state = self.reasoning
        if isinstance(state, ThinkingStreamState) and state.in_thinking:
            self.reasoning_tokens += 1

    def finish(self) -> Delta:
        """Return held-back text and calls."""
        if not self._reads:
            return Delta()
        delta = self._read("", (), last=True)
        if self._calls is None:
            return delta
        text = "".join(self._content)
        found = process_tool_calls(text, self.tool_module, list(self.tools)).calls
        if len(found) < text.count(
            self.tool_module.tool_call_start
        ) and _TOO_LONG.search(text):
            raise UnreadableCall("it has a number of more than 4,300 digits")
        # the answer ended inside a call: what was given out of it stands
        if len(found) < len(self._calls.calls):
            self.has_calls = bool(found)
            return Delta(reasoning=delta.reasoning, tool_calls=delta.tool_calls)
        try:
            rest = self._calls.finish(found)
        except ValueError as error:
            raise UnreadableCall(str(error)) from error
        self.has_calls = self.has_calls or bool(found)
        return Delta(delta.content, delta.reasoning, (*delta.tool_calls, *rest))

    @property
    def _reads(self) -> bool:
        return self.reasoning is not None or self.tool_module is not None

    def _read(
        self, text: str, logprobs: tuple[TokenLogprobs, ...], *, last: bool
    ) -> Delta:
        reasoning, content = "", text
        if self.reasoning is not None:
            told = self.reasoning.feed(text, last=last)
            reasoning = told.reasoning or ""
            content = told.content or ""
        if self._shown is None or self._calls is None:
            return Delta(content, reasoning, logprobs=logprobs)
        self._content.append(content)
        try:
            calls = tuple(self._calls.feed(content))
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(str(error)) from error
        if calls:
            self.has_calls = True
        if self.is_forced:
            return Delta("", reasoning, calls, logprobs)
        shown = self._shown.feed(content, last=last)
        return Delta(shown or "", reasoning, calls, logprobs)
