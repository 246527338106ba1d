"""Random histories of the engine: requests, cancels and faults in any order, and what must hold after each of them.

The engine's objects are driven without threads, so that a history is a function of its seed:

    python -m tests.histories --steps 1000000 --processes 16

``tests.many_histories`` is that command: several processes, and the sum of several runs.
"""

from __future__ import annotations

import gc
import math
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from tests.allocations import WANT, announced, check_alike
from tests.harness import settings_for
from tests.zoo import PLAIN, Inputs
from tests.zoo import family as tiny_family
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.towers import remember_features
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement, slab
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.choosing import Flight
from vlm_batch.engine.drafts import NO_DRAFTS, Drafts
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.loop import EngineLoop
from vlm_batch.engine.memory import GROWTH, RowMemory, tokens
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import NO_LOADING, Row, Stage
from vlm_batch.engine.sampling import Sampled, SamplingRow, sample
from vlm_batch.engine.text import AnswerText
from vlm_batch.engine.work import Made
from vlm_batch.handle import Handle
from vlm_batch.models import adapter_for
from vlm_batch.records import DraftState, OptionTokens
from vlm_batch.runtime.available import Available
from vlm_batch.store.budget import ByteBudget, footprint
from vlm_batch.store.directory import RowFiles
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.store.prompt import PromptCache
from vlm_batch.types import Event, Request, Result, SamplingParams

#: Plain positions in three dimensions, features at every layer, windows, pictures' own layers, recurrent states beside keys
#: and values, prompts that attend both ways.
KINDS = ("qwen2_vl", "qwen3_vl", "gemma3n", "mllama", "qwen3_5", "paligemma")
TURBO = KVQuantisation(8, scheme="turboquant")
#: Kinds whose keys and values are asked for in eight bits, too. Their rows equal themselves alone but for code flips.
QUANTISED = {"qwen2_vl": KVQuantisation(8, 32)} | dict.fromkeys(
    ("qwen3_vl", "gemma3n", "mllama", "qwen3_5"), TURBO
)
#: Kinds whose conversations cannot be gone on with: their prompts attend both ways, so that only the same prompt is the same.
NO_GOING_ON = ("paligemma",)
ROWS = 8
#: Bytes of the system's memory, as the guard reads it.
TOTAL = 1 << 34
CLIENTS = (1, 1, 1, 1, 2, 3, -1, -1)
CACHE_BYTES = 300_000  # a few rows and pictures, so that they push each other out
END_IDS = frozenset({7, 33, 91})
TEXTS = ("text:4:9", "text:5:26", "text:6:14", "text:7:9")
PICTURES = ("image:2:1", "image:3:0", "image:4:2", "two:5")
VIDEOS = ("video:3:0", "video:4:1")
#: Options of which some need no place, all, or none.
OPTIONS = (((3,), (9,)), ((3, 8), (9,), (4, 5, 6, 7)), ((1, 2, 3), (1, 2, 4)))
#: Tokens of the longest answer.
LONGEST = 10
#: A greedy token of a quantised row that leads by less than this may be another in company.
LEAD = 0.2


class Injected(Exception):
    """A fault of a history."""


# Answers ----------------------------------------------------------------------------------------------------------------


def decode(ids: Sequence[int]) -> str:
    """A text in which every token can be told."""
    return "".join(chr(0x4E00 + token) for token in ids)


TEXT = AnswerText(decode, END_IDS)


class Later(Future[None]):
    """Is done when it was asked so many times whether it is."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def done(self) -> bool:
        self._times -= 1
        if self._times < 0 and not super().done():
            self.set_result(None)
        return super().done()


class Blind:
    """A form that looks along nothing."""

    ahead: tuple[int, ...] = ()

    def look_ahead(self, tokens: Sequence[int]) -> Future[None]:
        return Later(0)

    def fill_ahead(self, at: int, bits: np.ndarray) -> None:
        raise AssertionError("nothing is ahead")


class Stairs(Blind):
    """A form: six tokens, the n-th of which leaves n modulo 3. Some of them take it longer than a step waits."""

    LENGTH = 6

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def fill(self, bits: np.ndarray) -> None:
        for token in range(self.count % 3, PLAIN, 3):
            bits[token // 32] |= np.uint32(1 << (token % 32))

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]:
        if token % 3 != self.count % 3:
            raise ValueError(f"{token} is not the form's")
        self.count += 1
        return Later(token % 4)

    def copy(self) -> Stairs:
        return Stairs(self.count)

    def read(self, text: str) -> Any:
        return len(text)

    @property
    def is_whole(self) -> bool:
        return self.count >= self.LENGTH

    @property
    def may_end(self) -> bool:
        return self.is_whole


@dataclass(frozen=True)
class Asked:
    """A request as the engine gets it: its prompt's name, or a prompt of ids, and its parameters."""

    key: str | tuple[int, ...]
    params: SamplingParams
    has_form: bool = False
    options: tuple[tuple[int, ...], ...] = ()

    def request(self, name: str, params: SamplingParams, **terms: Any) -> Request:
        if self.options:
            params = SamplingParams()
        return Request(
            prompt="x", params=params, request_id=name, options=self.options, **terms
        )

    def prepared(self, inputs: Inputs) -> Prepared:
        form = Stairs() if self.has_form else None
        options = tuple(OptionTokens(tokens, tokens) for tokens in self.options)
        return Prepared(as_mlx(inputs), form, kept=inputs, options=options)


@dataclass(frozen=True)
class Prepared:
    """What the loaders give."""

    inputs: Mapping[str, Any]
    form: Any = None
    image_sizes: tuple[tuple[int, int], ...] = ()
    video_sizes: tuple[tuple[int, int, int], ...] = ()
    audio_seconds: tuple[float, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking: Any = None
    kept: Mapping[str, Any] | None = None
    options: tuple[Any, ...] = ()


@cache
def adapter_of(family: str, of: str = "histories") -> Adapter:
    """A tiny model's adapter: one for all histories, and one for the answers alone, which remembers nothing."""
    tiny = tiny_family(family)
    return adapter_for(tiny.registered)(tiny.build())


@lru_cache(maxsize=4096)
def _inputs(family: str, key: str | tuple[int, ...]) -> Inputs:
    if not isinstance(key, str):
        return {**tiny_family(family).text(1, 5), "input_ids": np.array([key])}
    kind, *numbers = key.split(":")
    return _makers(family)[kind](*map(int, numbers))


def _makers(family: str) -> dict[str, Any]:
    """Kinds of prompts -> what makes one, or None."""
    tiny = tiny_family(family)
    return {
        "text": tiny.text,
        "image": tiny.image,
        "two": tiny.two_images,
        "video": tiny.video,
    }


def keys_of(family: str) -> list[str]:
    """The prompts that a family can be asked."""
    makers = _makers(family)
    every = (*TEXTS, *PICTURES, *VIDEOS)
    return [key for key in every if makers[key.partition(":")[0]] is not None]


def inputs_of(family: str, key: str | tuple[int, ...]) -> Inputs:
    """A prompt's inputs, with arrays of their own."""
    return {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in _inputs(family, key).items()
    }


def alone(family: str, asked: Asked, is_quantised: bool) -> tuple[Result, ...]:
    """Each answer to a request, as it is with nobody beside it. A shorter one is the beginning of the longest; a
    conversation that is gone on with is hardly ever asked again, and has what it asks for."""
    params, found = asked.params, []
    most = LONGEST if isinstance(asked.key, str) else params.max_tokens
    for index in range(params.n):
        assert params.seed is not None
        seed = params.seed + index if params.temperature else 1
        longest = replace(
            asked, params=replace(params, max_tokens=most, seed=seed, n=1)
        )
        found.append(
            _beginning(_alone(family, longest, is_quantised), params.max_tokens, most)
        )
    return tuple(found)


def _beginning(whole: Result, count: int, most: int) -> Result:
    """An answer of at most ``count`` tokens, cut from one of at most ``most``."""
    if len(whole.token_ids) <= count and (
        whole.finish_reason != "length" or count == most
    ):
        return whole
    ids, logprobs = whole.token_ids[:count], whole.logprobs and whole.logprobs[:count]
    return replace(
        whole,
        token_ids=ids,
        text=decode(ids),
        logprobs=logprobs,
        finish_reason="length",
        stop_reason=None,
        parsed=None,
    )


#: Answers alone that processes which play at the same time have from each other, as bytes.
shared_answers: MutableMapping[str, bytes] = {}


@lru_cache(maxsize=20_000)
def _alone(family: str, asked: Asked, is_quantised: bool) -> Result:
    """The one answer to a request, with nobody beside it."""
    name = f"{family} {asked} {is_quantised}"
    found = shared_answers.get(name)
    if found is not None:
        answer: Result = pickle.loads(found)
        return answer
    answer = _answered_alone(family, asked, is_quantised)
    shared_answers[name] = pickle.dumps(answer)
    return answer


def _answered_alone(family: str, asked: Asked, is_quantised: bool) -> Result:
    """The one answer to a request in an engine of its own, from the beginning."""
    generator = BatchGenerator(
        adapter_of(family, "alone"),
        text=TEXT,
        policy=settings_for(max_rows=1),
        kv=_kv(family, is_quantised),
    )
    loaders: Any = ManualLoaders()
    loop = EngineLoop(generator, loaders)
    handle = Handle("alone", loop.cancel)
    question: Any = Asking(asked)
    loop.submit(question, asked.request("alone", asked.params), handle)
    while not handle.done():
        loop._serve()
        for loading in loaders.take():
            inputs = inputs_of(family, asked.key)
            loading.finish(asked.prepared(inputs))
    return handle.result()


def _kv(family: str, is_quantised: bool) -> KVQuantisation | None:
    return QUANTISED.get(family, TURBO) if is_quantised else None


# Loaders, without threads -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asking:
    """A question."""

    asked: Asked
    videos: tuple[Any, ...] = ()
    least_tokens = 1

    @property
    def lane(self) -> str:
        return "video" if self.videos else "other"


class ManualLoading:
    """Is read at once, and done when the history says so."""

    nbytes, num_pixels, known_nbytes, is_read = 0, 1000, None, True
    read_seconds = process_seconds = 0.0

    def __init__(self, asking: Any) -> None:
        self.asking = asking
        self._outcome: Prepared | Exception | None = None
        self._tell: Callable[[], None] = lambda: None

    def result(self) -> Prepared:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        outcome, self._outcome = self._outcome, None
        return outcome

    def when_done(self, call: Callable[[], None]) -> None:
        self._tell = call

    def cancel(self) -> None:
        if self._outcome is None:
            self.finish(Injected("given up"))

    def finish(self, outcome: Prepared | Exception) -> None:
        self._outcome = outcome
        self._tell()
        self._tell = lambda: None


class ManualLoaders:
    """Keeps what is to be loaded until it is taken."""

    def __init__(self) -> None:
        self.waiting: list[ManualLoading] = []

    def start(self, question: Any, /, when_read: Callable[[], None]) -> ManualLoading:
        return ManualLoading(question)

    def process(self, loading: Any, /) -> None:
        self.waiting.append(loading)

    def take(self) -> list[ManualLoading]:
        taken, self.waiting = self.waiting, []
        return taken

    def close(self) -> None:
        pass


# A history --------------------------------------------------------------------------------------------------------------

#: Where a request of its own accord fails, for good.
PLACES = (
    "load",
    "encode",
    "prefill",
    "decode",
    "sample",
    "nan",
    "processor",
    "listener",
)
#: What befalls the engine once, and is nobody's fault.
ACCIDENTS = (
    "decode",
    "launch",
    "read",
    "memory",
    "memory of one",
    "allocation",
    "disk",
    "store",
    "together",
)
#: Allocations of caches within which one fails, if one is to: about as many as a row's joining and a few steps take.
ALLOCATIONS = 60
#: Columns by which slabs grow, so that short rows make them do it.
COLUMNS = (8, 16, 256)


@dataclass
class Told:
    """A request and what its submitter saw of it."""

    asked: Asked
    handle: Handle
    fault: str = ""
    fault_at: int = 0  # answer tokens before it
    cache: PromptCache | None = None
    is_cancelled: bool = False
    may_fail: bool = False  # the engine itself was broken while it was alive
    ends: int = 0
    is_checked: bool = False
    inputs: list[weakref.ref[Any]] = field(default_factory=list)
    rows: list[weakref.ref[Row]] = field(default_factory=list)


class CountedHandle(Handle):
    """Counts how often it is told the end."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ends = 0

    def push(self, event: Event) -> None:
        self.ends += event.result is not None
        assert self.ends <= 1, "a request has ended twice"
        assert event.result is not None or not self.done(), (
            "a request goes on after its end"
        )
        super().push(event)


class FaultyTier(RowFiles):
    """A disk for rows that the budget pushes out; it may fail."""

    def __init__(self, history: History) -> None:
        self._history = history

    def put(self, row: Any) -> None:
        if self._history.befalls("disk"):
            raise OSError("No space left on device")

    def find(self, keys: np.ndarray, beyond: int) -> None:
        if self._history.befalls("disk"):
            raise OSError("Input/output error")


class FaultySampled(Sampled):
    """What a device does not deliver."""

    where = ""

    def arrays(self) -> list[mx.array]:
        if self.where == "launch":
            raise RuntimeError("the device failed")
        return super().arrays()

    def read(self) -> Any:
        if self.where == "read":
            raise RuntimeError("the device failed")
        return super().read()


class Guessing:
    """A model that drafts anything, for rows whose last hidden state it was given."""

    context, bytes_per_token = 4, 0

    def __init__(self) -> None:
        self._draw = random.Random(7)

    def propose(
        self, rows: Sequence[DraftState | None], layers: Sequence[Any], count: int
    ) -> mx.array:
        for row in rows:
            assert (
                row is None
                or len(row.tokens) == sum(one.count for one in row.hidden) > 0
            )
            mx.eval(
                []
                if row is None
                else [
                    one.states[one.first : one.first + one.count] for one in row.hidden
                ]
            )
        return mx.array(
            [[self._draw.randrange(PLAIN) for _ in range(count)] for _ in rows]
        )


class DrawnDrafts(Drafts):
    """Drafts of random lengths at random steps, of which most tokens are right, for rows without forms; else a model's."""

    def __init__(self, history: History) -> None:
        guessing: Any = Guessing()
        super().__init__(guessing)
        self.acceptance.rates["model"] = 0.3
        self._history = history
        self._draw = random.Random(26)

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        return self._draw.random() < 0.6

    def gain(
        self,
        rows: int,
        hoped: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        return 2.0 + hoped

    def draft(self, row: Row, form_seconds: Callable[[], float]) -> tuple[int, ...]:
        name, _, index = row.request_id.partition("\0")
        told, answer = self._history.told.get(name), row.answer
        if told is None or answer.guide is not None or self._draw.random() < 0.2:
            return ()
        answers = alone(self._history.family, told.asked, self._history.is_quantised)
        right = answers[int(index or 0)].token_ids[answer.num_sampled :]
        most = min(
            self._draw.randrange(1, 8), answer.max_tokens - answer.num_sampled - 1
        )
        return tuple(
            token if self._draw.random() < 0.8 else self._draw.randrange(PLAIN)
            for token in right[: max(0, most)]
        )


class FaultyAdapter:
    """An adapter that fails as its history says."""

    def __init__(self, adapter: Adapter, history: History) -> None:
        self._adapter = adapter
        self._history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def with_products(self, numbers: Any) -> FaultyAdapter:
        return FaultyAdapter(self._adapter.with_products(numbers), self._history)

    def encode(self, inputs: Any, call: Any, cached: int = 0) -> Any:
        self._history.fail_by(self._history.current, "encode")
        return self._adapter.encode(inputs, call, cached)

    def encode_together(self, requests: Any, call: Any) -> Any:
        if self._history.befalls("together"):
            raise Injected("together")
        return self._adapter.encode_together(requests, call)

    def prefill(
        self, rows: Any, cache: Any, begin: int, end: int, call: Any
    ) -> mx.array:
        if len(rows) > 1:
            self._fail_together(rows)
        # its caches are written by then
        logits = self._adapter.prefill(rows, cache, begin, end, call)
        if len(rows) == 1:
            self._fail_alone()
        return logits

    def _fail_together(self, rows: Any) -> None:
        if self._history.befalls("together"):
            raise Injected("together")
        for row in self._history.generator.rows.ledger.at(Stage.PREFILL):
            if any(row.prompt.encoded is encoded for encoded in rows):
                self._history.fail_by(row, "prefill")

    def _fail_alone(self) -> None:
        self._history.fail_by(self._history.current, "prefill")
        if len(self._history.generator.rows.batch) and self._history.befalls(
            "memory of one"
        ):
            raise RuntimeError(WANT)


class History:
    """An engine, its requests, and what is known of them. Every operation leaves it in a state that ``check`` looks at."""

    def __init__(
        self,
        family: str,
        placement: Placement,
        *,
        is_quantised: bool = False,
        keeps: bool = True,
        most_rows: int | None = None,
        columns: int = COLUMNS[0],
        drafts: bool = False,
        places: int = ROWS,
    ) -> None:
        """``most_rows``: as many fit into memory at a time; of slabs, as many as have all of their places. ``columns``: slabs
        grow by so many."""
        self.family, self.is_quantised = family, is_quantised
        self.adapter = adapter_of(family)
        self.budget = ByteBudget(CACHE_BYTES if keeps else 0)
        self.features = FeatureStore(self.budget)
        remember_features(self.adapter, self.features)
        faulty: Any = FaultyAdapter(self.adapter, self)
        has_prefix = keeps and self.adapter.spec.no_prefix_reuse is None
        self.prefix = PrefixCache(self.budget, FaultyTier(self)) if has_prefix else None
        self.generator = BatchGenerator(
            faulty,
            text=TEXT,
            policy=settings_for(
                placement,
                max_rows=places,
                prefill_budget=16,
                look_ahead=4,
                ageing_seconds=1.0,
                max_bytes=None
                if most_rows is None
                else _rows_of(family, placement, is_quantised).together([64])
                * most_rows,
            ),
            reuse=Reuse(faulty, self.prefix, budget=self.budget),
            kv=_kv(family, is_quantised),
            sampler=self._sample,
            drafts=DrawnDrafts(self) if drafts else NO_DRAFTS,
        )
        if most_rows is not None:
            # what would be learned in time
            learned = _rows_of(family, placement, is_quantised)._at
            vars(self.generator.memory)["_at"] = learned
        loaders: Any = ManualLoaders()
        self.loaders = loaders
        self.loop = EngineLoop(self.generator, loaders)
        self.told: dict[str, Told] = {}
        self.ended: list[Told] = []  # and checked
        self.caches: list[tuple[PromptCache, Asked]] = []
        self.armed: Counter[str] = Counter()
        self.current: Row | None = None
        self.counts: Counter[str] = Counter()
        self._number = 0
        self._columns = columns
        self._coming: list[Callable[[], None]] = []
        self._now, self._seconds = 1.0, random.Random(columns)
        self._time = SimpleNamespace(perf_counter=lambda: self._now)
        self.is_short = False  # whether other programs have the memory
        self.generator.guard.read = self._memory_left
        self.generator.guard.clock = lambda: self._now
        self._watch_rows()

    def _memory_left(self) -> Available:
        return Available(0 if self.is_short else TOTAL, TOTAL)

    def _watch_rows(self) -> None:
        """Have the adapter know for which row it works, rows begin by the history's clock, and others come in between."""
        runner, reuse = self.generator.runner, self.generator.reuse
        launches = {
            name: getattr(runner, name) for name in ("encode", "decode", "prefill")
        }
        add = self.generator.rows.add

        def adds(row: Row) -> None:
            row.clock.submitted = self._now
            add(row)

        def come_after(name: str) -> Callable[[Any], Any]:
            def launched(given: Any) -> Any:
                made = launches[name](given)
                self._come()
                return made

            return launched

        changed: Any = self.generator
        changed.rows.add = adds
        decode = self.generator._decoder.logits
        # outside of the graphs, which would keep a fault
        changed._decoder.logits = lambda group, rows: self._with_faults(
            group, decode(group, rows)
        )
        for name in launches:
            setattr(runner, name, come_after(name))
        encode, prefill, store = runner._encode_row, runner._prefill_alone, reuse.store

        def encodes(row: Row) -> Made:
            self.current = row
            return encode(row)

        def prefills(row: Row, begin: int, end: int) -> Made:
            self.current = row
            return prefill(row, begin, end)

        def stores(saved: Any) -> None:
            if self.befalls("store"):
                return None if self.prefix is None else self.prefix.store(None)  # type: ignore[arg-type]
            return store(saved)

        patched: Any = (runner, reuse)
        patched[0]._encode_row = encodes
        patched[0]._prefill_alone = prefills
        patched[1].store = stores

    # Operations

    def submit(
        self,
        key: str | tuple[int, ...],
        *,
        max_tokens: int = 6,
        temperature: float = 0.0,
        seed: int = 1,
        n: int = 1,
        has_form: bool = False,
        penalty: float = 1.0,
        stops: bool = True,
        priority: int = 0,
        fault: str = "",
        fault_at: int = 0,
        cache: tuple[PromptCache, Asked] | None = None,
        return_cache: bool = False,
        client: int = 0,
        options: tuple[tuple[int, ...], ...] = (),
        is_late: bool = False,
    ) -> None:
        """Ask something; with ``cache``, the conversation that it holds is gone on with.

        Args:
            is_late: it comes in the middle of a step.
        """
        if cache is not None:
            key = (*cache[0].token_ids, 5, 17, 29)
            n = 1
        shown = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            n=n,
            repetition_penalty=penalty,
            ignore_eos=not stops or has_form,
            logprobs=2,
        )
        asked = Asked(key, shown, has_form, options)
        self._number += 1
        name = f"r{self._number}"
        handle = CountedHandle(name, self.loop.cancel)
        params = (
            replace(shown, logits_processors=[self._processor(fault_at)])
            if fault == "processor"
            else shown
        )
        asking: Any = Asking(asked, (object(),) if str(key).startswith("video") else ())
        returns = (
            return_cache
            and self.adapter.spec.no_prefix_reuse is None
            and isinstance(key, str)
            and key.startswith("text")
        )
        given = None if cache is None else cache[0]
        if given is not None:
            given.claim(self.generator.reuse.identity)
        request = asked.request(
            name,
            params,
            priority=priority,
            cache=given,
            return_cache=returns,
            client=client,
        )
        self.told[name] = Told(asked, handle, fault, fault_at, given)
        self.counts["submit"] += 1
        self.counts["options"] += bool(options)

        def come() -> None:
            self.loop.submit(asking, request, handle)
            if fault == "listener":
                handle.when_done(self._raise)

        if is_late and self.loop._is_busy:
            self._coming.append(come)
            self._turn()
            self._come()
        else:
            come()
        self._follow()

    def _come(self) -> None:
        """Let those come who do so in the middle of a step."""
        while self._coming:
            self._coming.pop()()

    def load(self, which: int, count: int = 1) -> None:
        """Some questions are prepared, in any order."""
        for _ in range(count):
            if not self.loaders.waiting:
                return
            loading = self.loaders.waiting.pop(which % len(self.loaders.waiting))
            told = next(
                (
                    told
                    for told in self.told.values()
                    if told.asked is loading.asking.asked
                ),
                None,
            )
            if told is not None and told.fault == "load":
                loading.finish(Injected("load"))
            else:
                asked = loading.asking.asked
                inputs = inputs_of(self.family, asked.key)
                if told is not None:
                    told.inputs = [
                        weakref.ref(value)
                        for value in inputs.values()
                        if isinstance(value, np.ndarray)
                    ]
                loading.finish(asked.prepared(inputs))
                del inputs
            self._follow()

    def step(self) -> None:
        """The engine takes a step."""
        self.counts["engine steps"] += 1
        self._serve()

    def cancel(self, which: int) -> None:
        """One of the requests is not wanted any more."""
        alive = [told for told in self.told.values() if not told.handle.done()]
        if alive:
            told = alive[which % len(alive)]
            told.is_cancelled = True
            assert told.handle.cancel()
            self._follow()

    def press(self) -> None:
        """Other programs take the memory, or give it back."""
        self.is_short = not self.is_short
        self.counts["pressed"] += self.is_short

    def accident(self, kind: str, after: int = 1) -> None:
        """Something will befall the engine, at the next occasion, or so many occasions from now."""
        self.armed[kind] = after

    def break_engine(self) -> None:
        """A defect of the engine itself: all that is alive may end with it."""
        for told in self.told.values():
            told.may_fail = True
        views = self.generator.runner.views

        def broken(*_: Any) -> Any:
            raise Injected("the engine is broken")

        patched: Any = self.generator.runner
        patched.views = broken
        self._serve()
        patched.views = views
        self.check()

    def finish(self) -> None:
        """Let everything come to its end."""
        for _ in range(3000):
            if (
                all(told.handle.done() for told in self.told.values())
                and not self.loop._is_busy
            ):
                break
            self.load(0, len(self.loaders.waiting))
            self._serve()
        else:
            raise AssertionError(
                f"requests that do not end: {[t for t in self.told.values() if not t.handle.done()]}"
            )
        self.check()
        generator = self.generator
        assert not len(generator.rows.ledger) and not generator.rows.batch.groups
        assert generator.rows.batch.nbytes == 0
        assert not generator.rows.ledger.at(*Stage)
        assert (
            not self.loop._alive and not self.loop._several and not self.loop._is_busy
        )

    def close(self) -> None:
        """The batcher is closed, whatever it is doing."""
        for told in self.told.values():
            told.is_cancelled = True
        self.loop._finish()
        for told in list(self.told.values()):
            assert told.handle.done(), "a request outlives its batcher"
        self.check()
        assert self.budget.nbytes == 0 and not len(self.features)
        gc.collect()
        for told in self.ended:
            assert all(inputs() is None for inputs in told.inputs), (
                f"{told.asked}: its inputs are held after the close"
            )

    # What must hold

    def check(self) -> None:
        """After every operation."""
        self._check_rows()
        self._check_bytes()
        alive = {name for name, told in self.told.items() if not told.handle.done()}
        assert alive == set(self.loop._alive), (
            "the engine and the handles know of different requests"
        )
        for name in [name for name in self.told if name not in alive]:
            told = self.told.pop(name)
            self._check_end(told)
            self.ended.append(told)

    def _check_rows(self) -> None:
        generator, ledger = self.generator, self.generator.rows.ledger
        placed = generator.rows.batch.rows
        prefilling = ledger.at(Stage.PREFILL)
        last = {  # their last token is on its way, and they have no place any more
            row
            for flight in generator._launched
            if isinstance(flight, Flight)
            for _, row in flight.waiting()
            if row.answer.num_sampled >= row.answer.max_tokens and row not in placed
        }
        last |= {
            row
            for row in generator.rows.untold()
            if row.answer.num_sampled >= row.answer.max_tokens and row not in placed
        }
        assert len(set(placed)) == len(placed), "a row has two places"
        assert set(ledger.at(Stage.DECODE)) == set(placed)
        late = {row for row in last if row.stage is Stage.READY}
        awaited = [row for row in ledger.at(Stage.LAST) if row.params.max_tokens]
        assert last - late == set(awaited), "what is awaited is not"
        everywhere = ledger.at(*Stage)
        assert len(set(everywhere)) == len(everywhere), "a row is at two stages"
        assert set(everywhere) == set(ledger._by_id.values()), "a row is nowhere"
        assert all(row in ledger.at(row.stage) for row in everywhere)
        assert not ledger.num(Stage.ENDED)
        for row in everywhere:
            self._check_stage(row)
        assert len(placed) + len(prefilling) <= generator.capacity.most_rows, (
            "more rows than places"
        )
        memory = generator.memory
        if memory.max_bytes is not None:
            taken = memory.together(
                [tokens(row) - GROWTH for row in (*placed, *prefilling)]
            )
            assert taken <= memory.max_bytes, (
                "rows have places that memory has no room for"
            )
        held = [row for row in placed if row.prompt.encoded or row.prompt.cache]
        assert not held, "a prompt is kept after its prefill"
        for group in generator.rows.batch.groups:
            check_alike(group)
            assert group.layers or not group.places

    def _check_stage(self, row: Row) -> None:
        """A row has what its stage says."""
        prompt, stage = row.prompt, row.stage
        assert (prompt.question is not None) is (stage is Stage.INBOX)
        with_loaders = (Stage.READING, Stage.READ, Stage.PROCESSING)
        assert (prompt.loading is not NO_LOADING) is (stage in with_loaders)
        assert bool(prompt.inputs) is (stage is Stage.PREPARED)
        has_embeddings = stage in (Stage.ENCODED, Stage.PREFILL)
        assert (prompt.encoded is not None) is has_embeddings
        if stage is Stage.READY:
            assert prompt.cache
            is_fed = row.answer.num_fed == row.answer.num_sampled
            assert (prompt.logits is not None) is is_fed
            self.counts["parked"] += not is_fed

    def _check_bytes(self) -> None:
        budget, prefix = self.budget, self.prefix
        held = {key: one.nbytes for key, one in budget._held.items()}
        assert budget.nbytes == sum(held.values()) <= budget.max_bytes
        features = {
            (id(self.features), key): value
            for key, value in self.features._features.items()
        }
        rows = (
            {}
            if prefix is None
            else {(id(prefix), number): row for number, row in prefix._rows.items()}
        )
        assert held.keys() == features.keys() | rows.keys(), (
            "the budget holds what nobody has, or not what somebody has"
        )
        for key, row in rows.items():
            assert held[key] == row.footprint
        for name, value in features.items():
            arrays = [value] if isinstance(value, mx.array) else list(_arrays(value))
            assert held[name] == footprint(arrays)

    def _check_end(self, told: Told) -> None:
        """An end is the request's own: with its reason, and with what it is alone."""
        result, handle = told.handle.result(), told.handle
        self.counts[result.finish_reason] += 1
        self.counts[f"fault {told.fault}"] += bool(told.fault)
        assert isinstance(handle, CountedHandle) and handle.ends == 1
        assert result.finish_reason in ("stop", "length", "cancelled", "error")
        assert (result.error is None) == (result.finish_reason != "error")
        results = (result, *result.others)
        assert len(results) == told.asked.params.n or result.finish_reason == "error"
        expected = alone(self.family, told.asked, self.is_quantised)
        for index, (one, right) in enumerate(zip(results, expected, strict=False)):
            self._check_answer(told, one, right)
            events = [
                event
                for event in handle._events
                if event.index == index and event.token is not None
            ]
            assert tuple(event.token for event in events) == one.token_ids, (
                "a token was told twice, or not at all"
            )
            assert (
                "".join(event.text for event in handle._events if event.index == index)
                == one.text
            )
        if (
            result.cache is not None
            and len(self.caches) < 4
            and result.finish_reason != "cancelled"
        ):
            self.caches.append((result.cache, told.asked))
        for reference in told.inputs:
            assert reference() is None or self._is_waiting_to_be_read(), (
                f"{told.asked}: its inputs outlive it"
            )

    def _check_answer(self, told: Told, one: Result, right: Result) -> None:
        ids, want = one.token_ids, right.token_ids
        if self.is_quantised and ids != want[: len(ids)]:
            at = next(
                index
                for index, (a, b) in enumerate(zip(ids, want, strict=False))
                if a != b
            )
            top = (
                [value for _, value in right.logprobs[at].top] if right.logprobs else []
            )
            assert len(top) > 1 and top[0] - top[1] < LEAD, (
                f"{told.asked}: {ids} and alone {want}"
            )
            return
        assert ids == want[: len(ids)], f"{told.asked}: {ids}, and alone {want}"
        if one.finish_reason in ("stop", "length"):
            _check_options(told, one, right)
            assert (ids, one.finish_reason, one.text, one.stop_reason, one.parsed) == (
                (want, right.finish_reason, right.text, right.stop_reason, right.parsed)
            ), f"{told.asked}: ended otherwise than alone"
            off = 0.05 if self.is_quantised else 2e-4
            for mine, its in zip(one.logprobs or (), right.logprobs or (), strict=True):
                assert math.isclose(mine.logprob, its.logprob, abs_tol=off), (
                    f"{told.asked}: {mine} and {its}"
                )
            assert told.fault not in ("load", "encode"), (
                f"{told.asked}: it was to fail at {told.fault}"
            )
        elif one.finish_reason == "cancelled":
            assert told.is_cancelled, f"{told.asked}: nobody has cancelled it"
        else:
            own = told.fault not in ("", "listener")
            assert own or told.may_fail, (
                f"{told.asked}: it failed by another's fault: {one.error}"
            )
            if not told.may_fail:
                said = {"nan": "not finite"}.get(told.fault, told.fault)
                assert said in str(one.error), f"{told.fault}: {one.error}"

    def _is_waiting_to_be_read(self) -> bool:
        """Whether the engine still holds a launched step, which may hold what ended rows were computed from."""
        return bool(self.generator._launched)

    # Faults

    def befalls(self, kind: str) -> bool:
        """Whether an accident happens now; it does so once."""
        if not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        if self.armed[kind]:
            return False
        self.counts[f"accident {kind}"] += 1
        return True

    def fails(self, row: Row, place: str) -> bool:
        """Whether a row is at its fault."""
        told = self.told.get(row.request_id.partition("\0")[0])
        return (
            told is not None
            and told.fault == place
            and row.answer.num_sampled >= told.fault_at
        )

    def _with_faults(self, group: DecodeBatch, logits: mx.array) -> mx.array:
        """Fail after a forward, which has written its caches."""
        for row in group.rows:
            self.fail_by(row, "decode")
        if len(group.rows) > 1:
            if self.befalls("decode"):
                raise Injected("an accident")
            if self.befalls("memory"):
                raise RuntimeError(WANT)
        bad: list[bool] = []
        for row in group.rows:
            bad += [self.fails(row, "nan")] * (1 + len(row.answer.drafter.ahead))
        return mx.where(mx.array(bad)[:, None], mx.nan, logits) if any(bad) else logits

    def fail_by(self, row: Row | None, place: str) -> None:
        if row is not None and self.fails(row, place):
            raise Injected(place)

    def _sample(self, logits: mx.array, rows: Sequence[SamplingRow]) -> Sampled:
        by_seed = {row.seed: row for row in self.generator.rows.ledger.at(*Stage)}
        for sampled_row in rows:
            row = by_seed.get(sampled_row.seed)
            if row is not None and self.fails(row, "sample"):
                raise Injected("sample")
        sampled = sample(logits, rows)
        for where in ("launch", "read"):
            if len(rows) > 1 and self.befalls(where):
                faulty = FaultySampled(**vars(sampled))
                object.__setattr__(faulty, "where", where)
                return faulty
        return sampled

    def _processor(self, at: int) -> Any:
        calls = 0

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Injected("processor")
            return logits

        return process

    def _raise(self) -> None:
        raise Injected("listener")

    # The engine's thread

    def _follow(self) -> None:
        """Have the engine read its inbox, and take the turn that comes with it."""
        while self.loop.has_messages:
            self._turn()
        self.check()

    def _serve(self) -> None:
        if self.loop._is_busy or self.loop.has_messages:
            self._turn()
        self.check()

    def _turn(self) -> None:
        self._now += self._seconds.choice((0.01, 0.05, 0.3))
        with (
            announced(self._allocates),
            mock.patch.object(slab, "CAPACITY_STEP", self._columns),
            mock.patch("vlm_batch.engine.rows.time", self._time),
        ):
            self.loop._serve()
        self.counts["rests"] += bool(self.generator._planner._resting)
        self.counts["still"] += self.generator._planner.is_still

    def _allocates(self) -> None:
        """An allocation; who fails alone twice is said never to fit, so that it is one of several rows'."""
        if len(self.generator.rows.batch) > 1 and self.befalls("allocation"):
            raise RuntimeError(WANT)


def _check_options(told: Told, one: Result, right: Result) -> None:
    scores = one.options or ()
    assert len(scores) == len(told.asked.options)
    for mine, its in zip(scores, right.options or (), strict=True):
        if told.may_fail and mine.error is not None:
            continue
        assert mine.token_ids == its.token_ids == mine.option
        assert math.isclose(mine.logprob, its.logprob, abs_tol=1e-3), told.asked


def _apart(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(1, length) for length in lengths]


def _slabs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(ROWS, max(lengths, default=0))]


@cache
def _rows_of(family: str, placement: Placement, is_quantised: bool) -> RowMemory:
    """The bytes of rows of all requests, pictures included; no video is longer."""
    adapter = adapter_of(family, "alone")
    memory = RowMemory(2**62, _slabs if placement is Placement.SLAB else _apart)
    for key in keys_of(family):
        if key in VIDEOS:
            continue
        encoded = adapter.encode(as_mlx(inputs_of(family, key)))
        caches = adapter.make_cache(_kv(family, is_quantised))
        adapter.prefill([encoded], caches, 0, encoded.length)
        adapter.finish_prefill(encoded, caches)
        memory.learn(caches, encoded.length)
    return memory


def _arrays(tree: Any) -> Iterator[mx.array]:
    for item in tree:
        if isinstance(item, mx.array):
            yield item
        elif item is not None:
            yield from _arrays(item)


# Random histories -------------------------------------------------------------------------------------------------------


def act(history: History, draw: random.Random) -> None:
    """One operation, drawn."""
    alive = sum(not told.handle.done() for told in history.told.values())
    chance = draw.random()
    if chance < (0.3 if alive < 2 * ROWS else 0.05):
        history.submit(**request_of(history, draw))
    elif chance < 0.45:
        history.load(draw.randrange(8), draw.randrange(1, 4))
    elif chance < 0.48:
        history.cancel(draw.randrange(16))
    elif chance < 0.52:
        history.accident(
            kind := draw.choice(ACCIDENTS),
            draw.randrange(1, ALLOCATIONS) if kind == "allocation" else 1,
        )
    elif chance < 0.521:
        history.break_engine()
    elif chance < 0.535:
        history.press()
    else:
        history.step()


def request_of(history: History, draw: random.Random) -> dict[str, Any]:
    """A request of few kinds, so that its answer alone is mostly known."""
    keys = keys_of(history.family)
    fault = draw.choice(PLACES) if draw.random() < 0.12 else ""
    asked: dict[str, Any] = {
        "key": draw.choice(keys),
        "max_tokens": draw.choice((1, 3, 6, 6, LONGEST)),
        "priority": draw.choice((0, 0, 0, 1, -1)),
        "client": draw.choice(CLIENTS),
        "is_late": draw.random() < 0.3,
        "fault": fault,
        "fault_at": 0 if fault in ("load", "encode", "prefill") else draw.randrange(4),
    }
    if fault == "sample":
        asked["seed"] = draw.randrange(10**6, 10**7)  # by which the sampler tells it
    kind = draw.random()
    if history.is_quantised:
        return gone_on(history, draw, asked)
    if kind < 0.3 and fault != "sample":
        asked |= {"temperature": 0.9, "seed": draw.choice((11, 22))}
    elif kind < 0.4:
        asked |= {"has_form": True}
    elif kind < 0.5:
        asked |= {"penalty": 1.2}
    if kind < 0.15 and fault != "sample":
        asked |= {"n": 2}
    if draw.random() < 0.12:
        alike = {"client": asked["client"], "is_late": asked["is_late"]}
        return {"key": asked["key"], "options": draw.choice(OPTIONS), **alike}
    return gone_on(history, draw, asked)


def gone_on(
    history: History, draw: random.Random, asked: dict[str, Any]
) -> dict[str, Any]:
    """The request, or one that gives its cache back, or goes on with such a one."""
    if draw.random() < 0.25:
        asked |= {"return_cache": True, "fault": ""}
    if history.caches and history.family not in NO_GOING_ON and draw.random() < 0.3:
        cache = history.caches.pop(0)
        asked |= {"cache": cache, "fault": "", "has_form": False, "max_tokens": 3}
        if draw.random() < 0.5:
            history.caches.append((cache[0].copy(), cache[1]))
    return asked


def play(seed: int, length: int = 120) -> Counter[str]:
    """A history of so many operations and its end; what happened in it. The same for the same seed."""
    draw = random.Random(seed)
    family = KINDS[seed % len(KINDS)]
    placement = list(Placement)[seed // len(KINDS) % 2]
    is_quantised = family in QUANTISED and draw.random() < 0.2
    keeps, most_rows = draw.random() < 0.8, draw.choice((None, None, 2, 4))
    columns = draw.choice(COLUMNS)
    how: dict[str, Any] = {
        "keeps": keeps,
        "most_rows": most_rows,
        "columns": columns,
        "drafts": draw.random() < 0.5,
        "places": draw.choice((2, 3, ROWS)),
    }
    history = History(family, placement, is_quantised=is_quantised, **how)
    for _ in range(length):
        act(history, draw)
        history.counts["operations"] += 1
    if draw.random() < 0.5:
        history.finish()
    history.close()
    history.counts["recomputed"] += history.generator.retry.num_recomputed
    history.counts["drafted"] += history.generator.drafts.num_drafted
    history.counts["drafts held"] += history.generator.drafts.num_held
    return history.counts


if __name__ == "__main__":
    from tests.many_histories import main

    main()
