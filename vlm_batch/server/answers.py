"""Engine events to answers; mlx-vlm's parsers and stream states separate reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

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


#: Pieces of calls, in OpenAI's form.
Calls: TypeAlias = tuple[Mapping[str, Any], ...]


class UnreadableCall(Exception):
    """A tool call cannot be parsed, or contradicts what was streamed."""


@dataclass(frozen=True)
class Delta:
    content: str = ""
    reasoning: str = ""
    tool_calls: Calls = ()
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
        recommended: Mapping[str, Any] = MappingProxyType({}),
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
        self.recommended = dict(recommended)
        self._tokenizer = copy_for_thread(
            processing.tokenizer
        )  # a fast one serves one thread at a time; this is the loop's
        added = self._tokenizer.added_tokens_decoder
        self._special = {
            *self._tokenizer.all_special_ids,
            *(token for token in added if added[token].special),
        }
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
        self._template_text = _template_text(self._template) or ""
        has_parser = _response_template_tokenizer(self._processor) is not None
        self.reasons = has_parser or any(end in self._template_text for _, end in pairs)
        self._hidden = self._hidden_markers(list(chain.from_iterable(pairs)))

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
        return CallWriter(self.tool_parser, marks, self._template_text)

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
        reasoning = None
        if self.reasons:
            reasoning = make_response_stream_state(self._processor, thinking)
        module = self.tool_module if tools else None
        is_plain = reasoning is None and module is None
        hidden = {} if is_plain else self._hidden
        return AnswerReader(reasoning, module, tools, hidden, is_forced=is_forced)

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


class _NoThoughts:
    """An answer in which nothing is reasoning."""

    num_tokens = 0

    def count(self) -> None:
        """Count a token that came."""

    def split(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return what is reasoning of the text so far, and what is content."""
        return "", text


class _Thoughts(_NoThoughts):
    """Reasoning, as mlx-vlm's state finds it."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def count(self) -> None:
        state = self._state
        if isinstance(state, ThinkingStreamState) and state.in_thinking:
            self.num_tokens += 1

    def split(self, text: str, *, last: bool) -> tuple[str, str]:
        told = self._state.feed(text, last=last)
        return told.reasoning or "", told.content or ""


class _NoCalls:
    """An answer in which nothing is a call."""

    has_any = False

    def split(self, content: str, *, last: bool) -> tuple[str, Calls]:
        """Return what clients see of content, and the pieces of calls in it. Raises UnreadableCall."""
        return content, ()

    def ended(self, delta: Delta) -> Delta:
        """Return the last piece of an answer, with what is left of its calls. Raises UnreadableCall."""
        return delta


class _Calls(_NoCalls):
    """Calls within content, as mlx-vlm's parser finds them; an answer that ``is_forced`` to be calls has nothing else."""

    def __init__(
        self, module: Any, tools: Sequence[Mapping[str, Any]], *, is_forced: bool
    ) -> None:
        self._module = module
        self._tools = list(tools)
        self._is_forced = is_forced
        self._shown = ToolCallStreamState(module.tool_call_start, module.tool_call_end)
        self._state = ToolCallDeltaState(module, self._tools)
        self._content: list[str] = []  # with its calls

    def split(self, content: str, *, last: bool) -> tuple[str, Calls]:
        self._content.append(content)
        try:
            calls = tuple(self._state.feed(content))
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(str(error)) from error
        self.has_any = self.has_any or bool(calls)
        if self._is_forced:
            return "", calls
        return self._shown.feed(content, last=last) or "", calls

    def ended(self, delta: Delta) -> Delta:
        text = "".join(self._content)
        found = process_tool_calls(text, self._module, self._tools).calls
        num_begun = text.count(self._module.tool_call_start)
        if len(found) < num_begun and _TOO_LONG.search(text):
            raise UnreadableCall("it has a number of more than 4,300 digits")
        # the answer ended inside a call: what was given out of it stands
        if len(found) < len(self._state.calls):
            self.has_any = bool(found)
            return replace(delta, content="")
        try:
            rest = self._state.finish(found)
        except ValueError as error:
            raise UnreadableCall(str(error)) from error
        self.has_any = self.has_any or bool(found)
        return replace(delta, tool_calls=(*delta.tool_calls, *rest))


class AnswerReader:
    """Reads an answer's events: first its reasoning is parted from the rest, then its calls. By default all is content.

    Args:
        reasoning: mlx-vlm's state of reasoning.
        tool_module: mlx-vlm's parser of calls.
        tools: What may be called.
        hidden: Markers that decoding leaves out, by token.
        is_forced: The answer is calls alone.
    """

    def __init__(
        self,
        reasoning: Any = None,
        tool_module: Any = None,
        tools: Sequence[Mapping[str, Any]] = (),
        hidden: Mapping[int, str] = MappingProxyType({}),
        *,
        is_forced: bool = False,
    ) -> None:
        self._hidden = hidden
        self._thoughts, self._calls = _NoThoughts(), _NoCalls()
        if reasoning is not None:
            self._thoughts = _Thoughts(reasoning)
        if tool_module is not None:
            self._calls = _Calls(tool_module, tools, is_forced=is_forced)

    @property
    def has_calls(self) -> bool:
        return self._calls.has_any

    @property
    def reasoning_tokens(self) -> int:
        return self._thoughts.num_tokens

    def feed(self, event: Event) -> Delta:
        text = event.text
        if event.token is not None:
            marker = self._hidden.get(event.token, "")
            if marker not in text:
                text = marker + text
            self._thoughts.count()
        logprobs = () if event.logprobs is None else (event.logprobs,)
        return self._read(text, logprobs, last=False)

    def finish(self) -> Delta:
        """Return held-back text and calls."""
        return self._calls.ended(self._read("", (), last=True))

    def _read(
        self, text: str, logprobs: tuple[TokenLogprobs, ...], *, last: bool
    ) -> Delta:
        reasoning, content = self._thoughts.split(text, last=last)
        shown, calls = self._calls.split(content, last=last)
        return Delta(shown, reasoning, calls, logprobs)
