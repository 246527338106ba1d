"""Constrained answers: JSON schemas, regular expressions, grammars and choices, compiled by llguidance.

A form gives masks of next tokens (``vlm_batch.engine.constraints``). A hundred characters can take seconds, so forms
have their own threads.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from json import JSONDecoder
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from vlm_batch.errors import InvalidParameters
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.inputs.pool import Pool
from vlm_batch.inputs.processors import copy_for_thread
from vlm_batch.runtime import threads
from vlm_batch.schemas import check_regexes, check_schema
from vlm_batch.types import SamplingParams

#: Most compiled forms to keep, and their total compile time in seconds. llguidance does not report its memory; it grows by
#: about 300 MB for each second of compile time.
MOST_KEPT, MOST_SECONDS_KEPT = 64, 0.5
#: Most characters of a form as llguidance reads it, and the size from which it counts as large. Some large forms, such as
#: an object with thousands of optional properties, compile for tenths of a second.
MOST_CHARACTERS, LARGE = 2**17, 2**13
#: Threads that compile forms, and as many that follow them: at least two, so that a slow form does not stop the others.
NUM_THREADS = max(2, min(4, threads.num_cores() // 2))
#: Most seconds for one token; a slower request fails. llguidance's own limits stop what would take much longer.
MOST_SECONDS = 2.0
#: Seconds after which looking ahead stops: less than a decode step.
AHEAD_SECONDS = 0.002
#: llguidance's "fuel" for building a lexer: a base, an addition for each character, and the maximum. 200,000 last a quarter
#: of a second. Nested repetitions use it up; ordinary long forms do not.
FUEL, FUEL_A_CHARACTER, MOST_FUEL = 60_000, 16, 1_000_000
#: llguidance's limits for one step, and for lexer states (1-2 KB each).
_STEP: Any = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
}
#: Most levels of a parsed answer: ``dataclasses.asdict``, copies and JSON writers recurse several Python calls for each.
MOST_LEVELS = 128
#: A JSON schema within a grammar; comments, strings and regular expressions of a grammar.
_SCHEMA = re.compile(r"%json\s*")
_LITERALS = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"?|/(?:\\.|[^/\\\n])+/?")
#: A literal that is a regular expression, and no comment.
_REGEX = re.compile(r"/[^/]")
#: Threads that validate forms, with deep stacks: llguidance recurses along references between rules.
_checks = Pool(NUM_THREADS, "vlm-batch-form-check", is_awaited=True, is_deep=True)
#: JSON's whitespace as ``json.dumps`` writes it: a model that may choose could write whitespace for ever.
_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class Form:
    """One answer's state in its grammar. Copies share ``start`` and ``bits``, the first state and token mask.

    Use nothing else until ``follow``'s future is done.
    """

    def __init__(
        self,
        start: LLMatcher,
        bits: np.ndarray,
        name: str,
        read: Callable[[str], Any],
        pool: Pool,
    ) -> None:
        self._start = self._matcher = start
        self._first = self._bits = bits
        self._ahead: list[tuple[int, np.ndarray]] = []
        self._name = name
        self.read = read  # the value of an answer's text
        self._pool = pool
        self._client = 0
        self._num_followed = 0  # tokens given to ``follow``
        self._lock = Lock()  # one thread at a time steps or copies the matcher
        self.seconds = 0.0  # that compiling it took

    def copy(self, client: int | None = None) -> Form:
        """Return a copy at the beginning."""
        made = Form(self._start, self._first, self._name, self.read, self._pool)
        made._client = self._client if client is None else client
        return made

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]:
        """Consume a token, compute the next mask, and find at most ``most_ahead`` forced tokens.

        The future raises InvalidParameters on failure.
        """
        self._num_followed += 1
        return self._pool.submit(
            partial(self._step, token, most_ahead), Cancelled(), client=self._client
        )

    def look_ahead(self, tokens: Sequence[int]) -> Future[None]:
        """Set ``ahead`` to the longest prefix of ``tokens`` that fits, unless another token follows meanwhile."""
        call = partial(self._check, tokens, self._num_followed)
        return self._pool.submit(call, Cancelled(), client=self._client)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that may come next, in order."""
        return tuple(token for token, _ in self._ahead)

    def fill_ahead(self, at: int, bits: np.ndarray) -> None:
        """``fill`` for the position after ``ahead[at]``."""
        self._fill(bits, self._ahead[at][1])

    def fill(self, bits: np.ndarray) -> None:
        """Write the mask of next tokens: bit i of (W,) uint32 for token i."""
        self._fill(bits, self._bits)

    @staticmethod
    def _fill(bits: np.ndarray, found: np.ndarray) -> None:
        # a model may have more columns than tokens, or fewer
        known = min(len(bits), len(found))
        bits[:known], bits[known:] = found[:known], 0

    @property
    def is_whole(self) -> bool:
        """True when nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """True when the answer may end."""
        return bool(self._matcher.is_accepting())

    def _check(self, tokens: Sequence[int], num_followed: int) -> None:
        with self._lock:
            if num_followed == self._num_followed:
                self._look_ahead(tokens)

    def _step(self, token: int, most_ahead: int) -> None:
        with self._lock:
            self._follow(token, most_ahead)

    def _follow(self, token: int, most_ahead: int) -> None:
        if self._matcher is self._start:  # which copies share
            self._matcher, self._bits = self._start.deep_copy(), self._first.copy()
        begin = time.perf_counter()
        self._matcher.consume_token(token)
        if not self._matcher.is_stopped():  # an error stops it, too
            self._matcher.unsafe_compute_mask_ptr(
                self._bits.ctypes.data, self._bits.nbytes
            )
        if self._matcher.is_error():
            raise InvalidParameters(
                _cannot_follow(self._name, self._matcher.get_error())
            )
        if time.perf_counter() - begin > MOST_SECONDS:
            raise InvalidParameters(
                f"{self._name} cannot be followed further: a token took over {MOST_SECONDS:g} s"
            )
        self._ahead = []
        if most_ahead and not self._matcher.is_stopped():
            with suppress(Exception):  # nothing is known ahead
                self._look_ahead(self._matcher.compute_ff_tokens()[:most_ahead])

    def _look_ahead(self, tokens: Sequence[int]) -> None:
        """Look ahead on a copy: a token beyond llguidance's limits leaves an error that no rollback clears."""
        matcher, begin = self._matcher.deep_copy(), time.perf_counter()
        found: list[tuple[int, np.ndarray]] = []
        for token in tokens:
            if not matcher.try_consume_tokens([token]):
                break
            bits = np.zeros_like(self._first)
            found.append((token, bits))
            is_late = time.perf_counter() - begin > AHEAD_SECONDS
            if is_late or matcher.is_stopped():
                break  # nothing may follow, or it is not worth it
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if found and not found[-1][1].any():
            found.pop()
        self._ahead = found


def _cannot_follow(name: str, error: str) -> str:
    said = _said(error)
    if said.startswith("NoExtension"):  # NoExtension, NoExtensionBias
        return (
            f"{name}: no text has this form: it refers to itself, or contradicts itself"
        )
    return f"{name} cannot be followed further: {said}"


def read_json(text: str) -> Any:
    """Parse JSON; None for what Python's ``json`` cannot hold."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        # an integer of more than 4,300 digits, a thousand levels
        return None
    level: list[Any] = [found]
    for _ in range(MOST_LEVELS):
        level = list(itertools.chain.from_iterable(map(_held_by, level)))
        if not level:
            return found
    return None


def _held_by(value: Any) -> Iterable[Any]:
    """Return the values within a parsed list or object."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def check_form(params: SamplingParams) -> None:
    """Raise InvalidParameters for a form that no model can take."""
    if params.form is not None:
        _raise_for(params, _validated(_sized_grammar(params)))


def _validated(text: str) -> str:
    """Return llguidance's complaint about a form."""
    call = partial(LLMatcher.validate_grammar, text, limits=_limits(text))
    said: str = _checks.submit(call, Cancelled()).result()
    return said


def _raise_for(params: SamplingParams, said: str) -> None:
    if said and not said.startswith("WARNING"):
        raise InvalidParameters(f"{params.form}: {_said(said)}")


def _is_made(found: Future[Form]) -> bool:
    return found.done() and found.exception() is None


def _first_mask(matcher: LLMatcher, bits: np.ndarray, name: str) -> str | None:
    """Fill the mask of first tokens; return what is wrong with a form."""
    if matcher.is_error():
        return f"{name}: {_said(matcher.get_error())}"
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if matcher.is_error():
        return _cannot_follow(name, matcher.get_error())
    return None


class Forms:
    """Compiled forms for one model's tokenizer. All methods are thread-safe."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        # written out while other threads encode
        self._tokenizer = copy_for_thread(tokenizer)
        self._end_ids = list(end_ids)
        self._compiling = Pool(
            NUM_THREADS, "vlm-batch-form", is_awaited=True, is_deep=True
        )
        self._compiling_large = Pool(
            1, "vlm-batch-large-form", is_awaited=True, is_deep=True
        )
        self._following = Pool(
            NUM_THREADS, "vlm-batch-mask", is_awaited=True, is_deep=True
        )
        self._lock = Lock()  # of what is kept; nothing is compiled within it
        # refused ones too
        self._compiled: OrderedDict[tuple[str, str], Future[Form]] = OrderedDict()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._vocabulary_lock = Lock()
        self._vocabulary: LLTokenizer | None = None

    def check(self, params: SamplingParams) -> int:
        """Raise InvalidParameters for a bad form; return the characters still to compile."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidParameters(
                f"{params.form}: this model's tokenizer is not one that forms can be compiled for"
            )
        text = _sized_grammar(params)
        with self._lock:
            said = self._checked.get(text)
            found = self._compiled.get((str(params.form), text))
        if said is None:
            said = _validated(text)
            with self._lock:
                _keep(self._checked, text, said)
        _raise_for(params, said)
        if found is None or not found.done():
            return len(text)
        return 0

    def compiled(
        self, params: SamplingParams, cancelled: Cancelled, client: int = 0
    ) -> Future[Form]:
        """Compile a request's form at ``client``'s turn, equal forms once.

        If that request is cancelled, all waiting ones get OperationCancelled and may ask again.
        """
        key = (str(params.form), _grammar(params))
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        if found is None or _was_cancelled(found):
            pool = self._compiling_large if len(key[1]) >= LARGE else self._compiling
            found = pool.submit(partial(self._compile, *key), cancelled, client=client)
            with self._lock:
                _keep(self._compiled, key, found)
            found.add_done_callback(partial(self._without_callbacks, key))
        return found

    def _without_callbacks(self, key: tuple[str, str], found: Future[Form]) -> None:
        """Replace a finished future by one without callbacks."""
        kept: Future[Form] = Future()
        error = found.exception()
        if error is None:
            kept.set_result(found.result())
        else:
            kept.set_exception(error)
        with self._lock:
            if self._compiled.get(key) is not found:
                return
            self._compiled[key] = kept
            self._forget_oldest(key)

    def _forget_oldest(self, newest: tuple[str, str]) -> None:
        """Drop compiled forms from the oldest on, until the rest took few enough seconds; keep the newest."""
        made = {
            key: one.result() for key, one in self._compiled.items() if _is_made(one)
        }
        seconds = sum(form.seconds for form in made.values())
        for key, form in made.items():
            if seconds <= MOST_SECONDS_KEPT:
                return
            if key != newest:
                seconds -= form.seconds
                del self._compiled[key]

    def _compile(self, name: str, text: str) -> Form:
        vocabulary, begin = self._words(), time.thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits(text))
        bits = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.uint32)
        wrong = _first_mask(matcher, bits, name)
        if wrong is not None:
            del matcher  # megabytes, which the error's traceback would keep with it
            raise InvalidParameters(wrong)
        read = read_json if name == "json_schema" else str
        made = Form(matcher, bits, name, read, self._following)
        made.seconds = time.thread_time() - begin
        return made

    def _words(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(
                    self._tokenizer, eos_token=self._end_ids or None
                )
            return self._vocabulary


def _limits(text: str) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=min(FUEL + FUEL_A_CHARACTER * len(text), MOST_FUEL), **_STEP
    )


def _sized_grammar(params: SamplingParams) -> str:
    text = _grammar(params)
    if len(text) > MOST_CHARACTERS:
        raise InvalidParameters(
            f"{params.form} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are compiled"
        )
    return text


def _grammar(params: SamplingParams) -> str:
    name = str(params.form)
    return _MAKERS[name](getattr(params, name))


def _of_schema(schema: Any) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
    except ValueError as error:
        raise InvalidParameters(f"json_schema: {_said(str(error))}") from error


def _of_regex(pattern: str) -> str:
    check_regexes("regex", [pattern])
    return LLMatcher.grammar_from_regex(pattern)


def _of_lark(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        return text  # and it is refused
    for match in _SCHEMA.finditer(text):
        try:
            schema, _ = JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):  # llguidance says what is wrong with it
            continue
        check_schema("grammar", schema)
    check_regexes("grammar", filter(_REGEX.match, _LITERALS.findall(text)))
    return LLMatcher.grammar_from_lark(text)


def _of_choice(texts: Sequence[str]) -> str:
    """Make them one lexeme: llguidance follows at most 2,000 alternatives of a rule."""
    either = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {either}")


#: What makes a form's grammar, as llguidance reads it, of its value.
_MAKERS: dict[str, Callable[[Any], str]] = {
    "json_schema": _of_schema,
    "regex": _of_regex,
    "grammar": _of_lark,
    "choice": _of_choice,
}


def _was_cancelled(compiling: Future[Form]) -> bool:
    return compiling.done() and isinstance(compiling.exception(), OperationCancelled)


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MOST_KEPT:
        kept.popitem(last=False)


def _said(text: str) -> str:
    """Return llguidance's message alone."""
    said = " ".join(text.partition("<state>")[0].split())
    if len(said) <= 300:
        return said
    return f"{said[:300]}..."
