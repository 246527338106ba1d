"""Forms that answers are held to: JSON schemas, regular expressions, grammars and choices, compiled by llguidance.

A form is compiled once for each tokenizer, on a loader's thread, and copied for each request. What it says of a next token
is a bit for each token, made on the CPU; the engine applies it (``vlm_batch.engine.constraints``).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from vlm_batch.errors import InvalidParameters
from vlm_batch.inputs.processors import copy_for_thread
from vlm_batch.types import SamplingParams

#: Compiled forms that are kept.
MOST_KEPT = 64
#: Characters of a form at most, as llguidance reads it, and those from which on it counts as large: some kinds (an object
#: with thousands of properties that may lack) take seconds to compile.
MOST_CHARACTERS, LARGE = 2**17, 2**13
#: Levels of a parsed answer at most: ``dataclasses.asdict``, copies and writers of JSON need several calls of Python for each.
MOST_LEVELS = 128
#: How JSON is written, as ``json.dumps`` does it: whitespace that is left to the model can go on for ever.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Form:
    """An answer's state in its form. ``read`` makes the parsed value of a whole answer's text."""

    def __init__(self, matcher: LLMatcher, num_words: int, name: str, read: Callable[[str], Any]) -> None:
        self._matcher = matcher
        self._bits = np.zeros(num_words, dtype=np.uint32)
        self._name = name
        self._read = read

    def copy(self) -> Form:
        """A copy for another request, independent of this one."""
        return Form(self._matcher.deep_copy(), len(self._bits), self._name, self._read)

    def fill(self, bits: np.ndarray) -> None:
        """Write which tokens may come next: bit i of (W,) uint32 for token i. Raises InvalidParameters if the form is lost."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        known = min(len(bits), len(self._bits))  # a model may have more columns than tokens, or fewer
        bits[:known], bits[known:] = self._bits[:known], 0

    def consume(self, token: int) -> None:
        """Take the next token. Raises InvalidParameters for one that does not fit, and where the form is too complex."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its form and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether the answer has its form, though more could follow."""
        return bool(self._matcher.is_accepting())

    def read(self, text: str) -> Any:
        """The parsed value of an answer."""
        return self._read(text)

    def _check(self) -> None:
        if self._matcher.is_error():
            said = _said(self._matcher.get_error())
            if said.startswith("NoExtension"):  # NoExtension, NoExtensionBias
                raise InvalidParameters(
                    f"{self._name}: no text has this form: it refers to itself, or contradicts itself"
                )
            raise InvalidParameters(f"{self._name} cannot be followed further: {said}")


def read_json(text: str) -> Any:
    """An answer's JSON as a value; None for what Python's ``json``, or who works with the value, has no room for."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, a thousand levels
        return None
    values, levels = [found], 0
    while values:
        values = [
            inner
            for value in values
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        levels += 1
    return found if levels <= MOST_LEVELS else None


def check_form(params: SamplingParams) -> None:
    """Refuse a form that is none, whatever the model. Raises InvalidParameters with what is wrong with it."""
    if params.form is not None:
        _raise_for(params, LLMatcher.validate_grammar(_sized_grammar(params)))


def _raise_for(params: SamplingParams, said: str) -> None:
    if said and not said.startswith("WARNING"):
        raise InvalidParameters(f"{params.form}: {_said(said)}")


class Forms:
    """The forms of one model's answers. ``check`` is for any thread, ``compiled`` for loaders' threads."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self._tokenizer = copy_for_thread(tokenizer)  # written out while other threads encode
        self._end_ids = list(end_ids)
        self._lock = Lock()  # of what is kept; nothing is compiled within it
        self._compiled: OrderedDict[tuple[str, str], Form] = OrderedDict()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._vocabulary_lock = Lock()
        self._vocabulary: LLTokenizer | None = None

    def check(self, params: SamplingParams) -> bool:
        """Refuse a form that is none, or too large. Raises InvalidParameters with what is wrong with it.

        Returns whether it is so large that compiling it may take long.
        """
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidParameters(f"{params.form}: this model's tokenizer is not one that forms can be compiled for")
        text = _sized_grammar(params)
        with self._lock:
            said = self._checked.get(text)
        if said is None:
            said = LLMatcher.validate_grammar(text)
            with self._lock:
                _keep(self._checked, text, said)
        _raise_for(params, said)
        return len(text) >= LARGE

    def compiled(self, params: SamplingParams) -> Form:
        """A request's form, at its beginning. Raises InvalidParameters."""
        name = params.form
        assert name is not None
        text = _grammar(params)
        with self._lock:
            found = self._compiled.get((name, text))
        if found is None:
            found = self._compile(name, text)
        with self._lock:
            _keep(self._compiled, (name, text), found)
            return found.copy()

    def _compile(self, name: str, text: str) -> Form:
        vocabulary = self._words()
        matcher = LLMatcher(vocabulary, text, log_level=0)
        if matcher.is_error():
            raise InvalidParameters(f"{name}: {_said(matcher.get_error())}")
        num_words = -(-vocabulary.vocab_size // 32)
        made = Form(matcher, num_words, name, read_json if name == "json_schema" else str)
        made.fill(np.zeros(num_words, dtype=np.uint32))  # the first mask takes longest
        return made

    def _words(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it, made once."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(self._tokenizer, eos_token=self._end_ids or None)
            return self._vocabulary


def _sized_grammar(params: SamplingParams) -> str:
    """Like ``_grammar``; raises InvalidParameters if it is too large to be compiled."""
    text = _grammar(params)
    if len(text) > MOST_CHARACTERS:
        raise InvalidParameters(f"{params.form} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are compiled")
    return text


def _grammar(params: SamplingParams) -> str:
    """llguidance's text of a request's form."""
    makers: dict[str, Callable[[], str]] = {
        "json_schema": partial(_of_schema, params.json_schema),
        "regex": lambda: LLMatcher.grammar_from_regex(params.regex or ""),
        "grammar": lambda: LLMatcher.grammar_from_lark(params.grammar or ""),
        "choice": lambda: LLMatcher.grammar_from_lark(_of_choice(params.choice or ())),
    }
    assert params.form is not None
    return makers[params.form]()


def _of_schema(schema: Any) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
    except ValueError as error:
        raise InvalidParameters(f"json_schema: {_said(str(error))}") from error


def _of_choice(texts: Sequence[str]) -> str:
    """A grammar of one lexeme: alternatives of a rule are followed one by one, and 2,000 at most."""
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MOST_KEPT:
        kept.popitem(last=False)


def _said(text: str) -> str:
    """llguidance's complaint in one line, without the state of its parser, which holds the answer so far."""
    said = " ".join(text.partition("<state>")[0].split())
    return said if len(said) <= 300 else f"{said[:300]}..."
