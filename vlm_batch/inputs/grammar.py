"""Forms that answers are held to: JSON schemas, regular expressions, grammars and choices, compiled by llguidance.

A form is compiled once for each tokenizer, and copied for each request. What it says of a next token is a bit for each token,
made on the CPU; the engine applies it (``vlm_batch.engine.constraints``).

A hundred characters can ask for seconds of work. So forms are compiled, and followed, on a few threads of their own, on which
clients take turns. llguidance lets go of Python's lock meanwhile, and stops where its limits are reached.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
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
from vlm_batch.types import SamplingParams

#: Compiled forms that are kept, and seconds that they took together: what llguidance has of a form goes with these, some 300 MB
#: a second, and it does not say how much that is.
MOST_KEPT, MOST_SECONDS_KEPT = 64, 0.5
#: Characters of a form at most, as llguidance reads it, and those from which on it counts as large: some kinds (an object
#: with thousands of properties that may lack) take tenths of a second to compile.
MOST_CHARACTERS, LARGE = 2**17, 2**13
#: Threads that compile forms, and that follow them: two at least, so that one slow form stops no other.
NUM_THREADS = max(2, min(4, threads.num_cores() // 2))
#: Seconds that a token may take: whoever needs more ends. llguidance's limits end what would take much more.
MOST_SECONDS = 2.0
#: llguidance's "fuel" for a form's lexer, which goes with what nested repetitions cost, and much less with the length of honest
#: forms: for any form, and for each of its characters. 200,000 are a quarter of a second.
FUEL, FUEL_A_CHARACTER, MOST_FUEL = 60_000, 16, 1_000_000
#: Its limits of one step, and of states, of which each takes a kilobyte or two.
_STEP: Any = {"step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 50_000}
#: Levels of a parsed answer at most: ``dataclasses.asdict``, copies and writers of JSON need several calls of Python for each.
MOST_LEVELS = 128
#: How JSON is written, as ``json.dumps`` does it: whitespace that is left to the model can go on for ever.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Form:
    """An answer's state in its form. ``read`` makes the parsed value of a whole answer's text.

    ``start`` is the form at its beginning, which all copies share, and ``bits`` are the tokens that may begin it. Its steps run
    on threads of ``pool``; between ``follow`` and the end of what that returns nothing else may be asked.
    """

    def __init__(self, start: LLMatcher, bits: np.ndarray, name: str, read: Callable[[str], Any], pool: Pool) -> None:
        self._start = self._matcher = start
        self._first = self._bits = bits
        self._name = name
        self._read = read
        self._pool = pool
        self._client = 0
        self.seconds = 0.0  # that compiling it took

    def copy(self, client: int | None = None) -> Form:
        """A copy for another answer, at its beginning; ``client`` is whose turn its steps take."""
        made = Form(self._start, self._first, self._name, self._read, self._pool)
        made._client = self._client if client is None else client
        return made

    def follow(self, token: int) -> Future[None]:
        """Take the next token, and find those that may come then. What that comes to raises InvalidParameters for a token that
        does not fit, and where the form is too complex."""
        return self._pool.submit(partial(self._step, token), Cancelled(), client=self._client)

    def fill(self, bits: np.ndarray) -> None:
        """Write which tokens may come next: bit i of (W,) uint32 for token i."""
        known = min(len(bits), len(self._bits))  # a model may have more columns than tokens, or fewer
        bits[:known], bits[known:] = self._bits[:known], 0

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

    def _step(self, token: int) -> None:
        if self._matcher is self._start:
            self._matcher, self._bits = self._start.deep_copy(), np.zeros_like(self._first)
        begin = time.perf_counter()
        self._matcher.consume_token(token)
        if not self._matcher.is_stopped():  # as it is where it has an error
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise InvalidParameters(_cannot_follow(self._name, self._matcher.get_error()))
        if time.perf_counter() - begin > MOST_SECONDS:
            raise InvalidParameters(f"{self._name} cannot be followed further: a token took over {MOST_SECONDS:g} s")


def _cannot_follow(name: str, error: str) -> str:
    said = _said(error)
    if said.startswith("NoExtension"):  # NoExtension, NoExtensionBias
        return f"{name}: no text has this form: it refers to itself, or contradicts itself"
    return f"{name} cannot be followed further: {said}"


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
        text = _sized_grammar(params)
        _raise_for(params, LLMatcher.validate_grammar(text, limits=_limits(text)))


def _raise_for(params: SamplingParams, said: str) -> None:
    if said and not said.startswith("WARNING"):
        raise InvalidParameters(f"{params.form}: {_said(said)}")


class Forms:
    """The forms of one model's answers; every method is for any thread."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self._tokenizer = copy_for_thread(tokenizer)  # written out while other threads encode
        self._end_ids = list(end_ids)
        self._compiling = Pool(NUM_THREADS, "vlm-batch-form", is_awaited=True)
        self._compiling_large = Pool(1, "vlm-batch-large-form", is_awaited=True)
        self._following = Pool(NUM_THREADS, "vlm-batch-mask", is_awaited=True)
        self._lock = Lock()  # of what is kept; nothing is compiled within it
        self._compiled: OrderedDict[tuple[str, str], Future[Form]] = OrderedDict()  # refused ones too
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._vocabulary_lock = Lock()
        self._vocabulary: LLTokenizer | None = None

    def check(self, params: SamplingParams) -> int:
        """Refuse a form that is none, or too large. Raises InvalidParameters with what is wrong with it.

        Returns how many characters have still to be compiled: all of them, or none.
        """
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidParameters(f"{params.form}: this model's tokenizer is not one that forms can be compiled for")
        assert params.form is not None
        text = _sized_grammar(params)
        with self._lock:
            said, found = self._checked.get(text), self._compiled.get((params.form, text))
        if said is None:
            said = LLMatcher.validate_grammar(text, limits=_limits(text))
            with self._lock:
                _keep(self._checked, text, said)
        _raise_for(params, said)
        return len(text) if found is None or not found.done() else 0

    def compiled(self, params: SamplingParams, cancelled: Cancelled, client: int = 0) -> Future[Form]:
        """A request's form, at its beginning, or that it is refused: what it returns raises InvalidParameters then.

        Forms that are the same are compiled once, by the turn of the ``client`` who came first. If that request is
        ``cancelled`` before its turn, all who wait for the form get OperationCancelled, and may ask again.
        """
        name = params.form
        assert name is not None
        key = (name, _grammar(params))
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        if found is None or (found.done() and isinstance(found.exception(), OperationCancelled)):
            pool = self._compiling_large if len(key[1]) >= LARGE else self._compiling
            found = pool.submit(partial(self._compile, *key), cancelled, client=client)
            with self._lock:
                _keep(self._compiled, key, found)
            found.add_done_callback(partial(self._without_callbacks, key))
        return found

    def _without_callbacks(self, key: tuple[str, str], found: Future[Form]) -> None:
        """Keep a compiled form without those who waited for it: a future holds its callbacks after it has called them."""
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
            made = {name: one.result() for name, one in self._compiled.items() if one.done() and not one.exception()}
            seconds = sum(form.seconds for form in made.values())
            for name, form in made.items():
                if seconds > MOST_SECONDS_KEPT and name != key:
                    seconds -= form.seconds
                    del self._compiled[name]

    def _compile(self, name: str, text: str) -> Form:
        vocabulary, begin = self._words(), time.thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits(text))
        wrong = f"{name}: {_said(matcher.get_error())}" if matcher.is_error() else None
        bits = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.uint32)
        if wrong is None:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            wrong = _cannot_follow(name, matcher.get_error()) if matcher.is_error() else None
        if wrong is not None:
            del matcher  # megabytes, which the error's traceback would keep with it
            raise InvalidParameters(wrong)
        made = Form(matcher, bits, name, read_json if name == "json_schema" else str, self._following)
        made.seconds = time.thread_time() - begin
        return made

    def _words(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it, made once."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(self._tokenizer, eos_token=self._end_ids or None)
            return self._vocabulary


def _limits(text: str) -> LLParserLimits:
    """Return llguidance's bounds on what compiling and following a form may cost."""
    return LLParserLimits(initial_lexer_fuel=min(FUEL + FUEL_A_CHARACTER * len(text), MOST_FUEL), **_STEP)


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
