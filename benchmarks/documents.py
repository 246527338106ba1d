"""Pages an hour: python -m benchmarks.documents [--shape 3b] [--pages 200]

Rendered pages of three kinds (a letter, a table, two columns; 1,000 by 1,400 pixels) are read in five ways:

- ``ours``: through ``VLMBatcher`` with its defaults, asked as ``vlm-batch read`` asks;
- ``page by page``: by mlx-vlm's ``stream_generate``, of which ``generate`` is the text;
- ``groups of eight``: as MinerU's ``mlx-engine`` does: sorted by pixels, each group encoded page by page and answered by
  mlx-vlm's ``BatchGenerator``. MinerU's bound of 9 megapixels a group, which would make it six of these pages, is left out;
- ``docling``: by its ``MlxVlmEngine`` as it is, which answers page by page;
- ``docling with ours``: by ``BatchedVlmEngine`` in its place. Both are given a round's pages in one call of ``predict_batch``,
  without the PDF before it and the document behind it. Both need docling (``pip install "vlm-batch[docling]"``).

Answers have 200 to 1,500 tokens, whatever the model says (no token ends one). Weights are random. Every way runs in a process
of its own, on the same pages, in turns; a round has pages of its own. Ratios are of each round, by the clock and by processor
time, which other work on the machine moves less: the median (least to most). The last line is JSON.
"""

from __future__ import annotations

from vlm_batch.runtime import blas, launches

launches.prefer_single_launches()  # before anything imports mlx.core
blas.preload_openblas()

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from dataclasses import asdict, dataclass, replace  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

from benchmarks.pictures import Spent, model_and_processor, watched  # noqa: E402
from vlm_batch import Request, SamplingParams, VLMBatcher  # noqa: E402
from vlm_batch.jobs.publishers import PLAIN_PROMPTS  # noqa: E402

WIDE, HIGH = 1000, 1400
MARGIN, LINE = 90, 26
KINDS = ("letter", "table", "columns")
#: Shapes whose vocabularies hold the tokenizer's, with pictures at their own size or at the family's one.
READ_SHAPES = (
    "small",
    "wide",
    "gemma3-small",
    "llava-small",
    "3b",
    "gemma3-4b",
    "llava-1b",
)
#: A page's pixels, unscaled.
MAX_PIXELS = 2 * WIDE * HIGH
PROMPT = PLAIN_PROMPTS["markdown"]
GROUP = 8
#: Pages, and tokens of their answers, before the clock starts.
WARM_PAGES, WARM_TOKENS = 1, 8
SYLLABLES = ("an", "be", "cor", "di", "el", "fa", "gra", "lo", "mi", "nor", "ste", "tu")


@dataclass(frozen=True)
class Page:
    """A page and the tokens of its answer."""

    picture: Image.Image
    tokens: int


#: Reads pages; returns seconds by part.
Read = Callable[[Sequence[Page]], dict[str, float]]


@dataclass(frozen=True)
class Run:
    """One way through one round's pages.

    Attributes:
        pages: of this run.
        seconds: from the first page's question to the last page's answer.
        processor_seconds: of all threads within them.
        tokens: of all answers.
        peak_bytes: the most that MLX held.
        parts: seconds by part of the work; what is left is waiting and what lies between.
    """

    pages: int
    seconds: float
    processor_seconds: float
    tokens: int
    peak_bytes: int
    parts: dict[str, float]

    @property
    def seconds_a_page(self) -> float:
        return self.seconds / self.pages

    @property
    def processor_seconds_a_page(self) -> float:
        return self.processor_seconds / self.pages


# Pages
# ----------------------------------------------------------------------------------------------------------------------


def render(kind: str, seed: int) -> Image.Image:
    """Draw a page: (1,000, 1,400), black on white, other words for each seed."""
    random = np.random.default_rng(seed)
    page = Image.new("RGB", (WIDE, HIGH), "white")
    pen = ImageDraw.Draw(page)
    if kind == "table":
        _table(pen, random)
    elif kind == "columns":
        half = (WIDE - 3 * MARGIN) // 2
        for left in (MARGIN, 2 * MARGIN + half):
            _paragraphs(pen, random, left, MARGIN, half)
    else:
        _paragraphs(pen, random, WIDE - 3 * MARGIN, MARGIN, 2 * MARGIN, lines=4)
        _paragraphs(pen, random, MARGIN, 4 * MARGIN, WIDE - 2 * MARGIN)
    return page


def _word(random: np.random.Generator) -> str:
    return "".join(random.choice(SYLLABLES, random.integers(1, 4)))


def _paragraphs(
    pen: ImageDraw.ImageDraw,
    random: np.random.Generator,
    left: int,
    top: int,
    wide: int,
    lines: int = 99,
) -> None:
    """Fill a column with lines of words, a gap after each sixth or so."""
    font = ImageFont.load_default(size=18)
    bottom = min(HIGH - MARGIN, top + lines * LINE)
    while top < bottom:
        line = _word(random)
        while pen.textlength(f"{line} {'m' * 8}", font=font) < wide:
            line = f"{line} {_word(random)}"
        pen.text((left, top), line, fill="black", font=font)
        top += LINE if random.random() > 0.15 else 2 * LINE


def _table(pen: ImageDraw.ImageDraw, random: np.random.Generator) -> None:
    """Rule the page into rows of a word and four numbers."""
    font = ImageFont.load_default(size=18)
    step = (WIDE - 2 * MARGIN) // 5
    for top in range(MARGIN, HIGH - MARGIN - 36, 36):
        for column in range(5):
            left = MARGIN + column * step
            pen.rectangle((left, top, left + step, top + 36), outline="black")
            number = f"{random.integers(1, 10**6) / 100:,.2f}"
            said = number if column else _word(random)
            pen.text((left + 8, top + 8), said, fill="black", font=font)


def make_pages(count: int, first: int, tokens: Sequence[int]) -> list[Page]:
    """Return pages of the three kinds in turn; answers' lengths are spread evenly and shuffled."""
    least, most = tokens
    lengths = np.linspace(least, most, count).round().astype(int)
    np.random.default_rng(first).shuffle(lengths)
    return [
        Page(render(KINDS[number % len(KINDS)], first + number), int(lengths[number]))
        for number in range(count)
    ]


# Ways
# ----------------------------------------------------------------------------------------------------------------------


def ours(model: Any, processor: Any) -> Read:
    batcher = VLMBatcher(model, processor)
    spent = watched(batcher)

    def read(pages: Sequence[Page]) -> dict[str, float]:
        spent.seconds.clear()
        requests = [
            Request(
                prompt=PROMPT,
                images=page.picture,
                params=SamplingParams(max_tokens=page.tokens, ignore_eos=True),
            )
            for page in pages
        ]
        results = batcher.generate(requests, raise_on_error=True)
        counted = [result.usage.completion_tokens for result in results]
        assert counted == [page.tokens for page in pages]
        return {
            # other threads process pages while the engine's decodes
            "processing, beside": sum(one.timings.process for one in results),
            **_engine_parts(spent),
        }

    return read


def _engine_parts(spent: Spent) -> dict[str, float]:
    """Return the seconds of our engine's thread by part."""
    decode = ("decode, launch", "choose, launch", "wait for the last step")
    return {
        "encoding": spent.seconds.get("encode", 0.0),
        "prompts": spent.seconds.get("prefill", 0.0),
        "decoding": sum(spent.seconds.get(name, 0.0) for name in decode),
    }


class NoEnd:
    """mlx-vlm's criterion of an answer's end; no token ends one."""

    def __call__(self, token: Any) -> bool:
        return False

    def add_eos_token_ids(self, ids: Any) -> None:
        pass

    def reset(self, ids: Any = None) -> None:
        pass


class Silent:
    """A detokenizer that writes nothing: the model's vocabulary is not the tokenizer's."""

    text = last_segment = ""

    def reset(self) -> None:
        pass

    def add_token(self, token: int, skip_special_token_ids: Any = None) -> None:
        pass

    def finalize(self) -> None:
        pass


def _asked(processor: Any) -> str:
    """Return the prompt for mlx-vlm, whose loader hands the processor's settings to what makes pictures arrays."""
    part = processor.image_processor
    if not isinstance(part, WithoutPadding):
        kinds = (WithoutPadding, type(part))
        part.__class__ = type(type(part).__name__, kinds, {})
    question = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": question}]
    return str(
        processor.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
    )


class WithoutPadding:
    """Leaves out a text's ``padding``, which transformers' CLIP refuses and mlx-vlm's LLaVA passes on."""

    def __call__(self, *images: Any, padding: Any = None, **how: Any) -> Any:
        return super().__call__(*images, **how)  # type: ignore[misc]


class Alone:
    """mlx-vlm's ``stream_generate`` without an end or a text, and the seconds that it took by part."""

    def __init__(self, model: Any) -> None:
        from mlx_vlm.generate import dispatch

        dispatch.make_streaming_detokenizer = lambda processor: Silent()
        self._stream = dispatch.stream_generate
        self._encode = model.get_input_embeddings
        model.get_input_embeddings = self._timed_encode
        self._encoding = self._prompts = self._decoding = 0.0

    def __call__(self, *args: Any, **keywords: Any) -> Iterator[Any]:
        begin = last = time.perf_counter()
        first = 0.0
        for piece in self._stream(*args, stopping_criteria=NoEnd(), **keywords):
            last = time.perf_counter()
            first = first or last
            yield piece
        self._prompts += first - begin
        self._decoding += last - first

    def _timed_encode(self, *args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        found = self._encode(*args, **keywords)
        mx.eval([one for one in found.to_dict().values() if isinstance(one, mx.array)])
        self._encoding += time.perf_counter() - begin
        return found

    def parts(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        parts = {
            "encoding": self._encoding,
            "processing and prompts": self._prompts - self._encoding,
            "decoding": self._decoding,
        }
        self._encoding = self._prompts = self._decoding = 0.0
        return parts


def page_by_page(model: Any, processor: Any) -> Read:
    prompt = _asked(processor)
    stream = Alone(model)

    def read(pages: Sequence[Page]) -> dict[str, float]:
        for page in pages:
            pieces = stream(
                model,
                processor,
                prompt,
                [page.picture],
                max_tokens=page.tokens,
                temperature=0.0,
            )
            assert sum(1 for _ in pieces) >= page.tokens
        return stream.parts()

    return read


def groups_of_eight(model: Any, processor: Any) -> Read:
    from mlx_vlm.generate import BatchGenerator
    from mlx_vlm.utils import prepare_inputs

    prompt = _asked(processor)
    processor.tokenizer.stopping_criteria = NoEnd()

    def prepared(page: Page) -> tuple[list[int], dict[str, Any]]:
        inputs = prepare_inputs(processor, images=[page.picture], prompts=[prompt])
        ids = inputs.pop("input_ids")
        pixels, mask = inputs.pop("pixel_values"), inputs.pop("attention_mask", None)
        features = model.get_input_embeddings(ids, pixels, mask=mask, **inputs)
        found = features.to_dict().items()
        given = {name: value for name, value in found if value is not None}
        mx.eval(given)
        return ids.squeeze(0).tolist(), {**inputs, **given}

    def answer(group: Sequence[Page], spent: dict[str, float]) -> None:
        begin = time.perf_counter()
        items = [prepared(page) for page in group]
        encoded = first = time.perf_counter()
        generator = BatchGenerator(
            model.language_model,
            processor,
            prefill_batch_size=len(group),
            completion_batch_size=len(group),
            compute_logprobs=False,
        )
        uids = generator.insert(
            [ids for ids, _ in items],
            max_tokens=[page.tokens for page in group],
            prompt_kwargs=[given for _, given in items],
        )
        counts = dict.fromkeys(uids, 0)
        while generator.has_work:
            _, responses = generator.next()
            for response in responses:
                counts[response.uid] += 1
            if not all(counts.values()):
                first = time.perf_counter()
        generator.close()
        assert list(counts.values()) == [page.tokens for page in group]
        spent["processing and encoding"] += encoded - begin
        spent["prompts"] += first - encoded
        spent["decoding"] += time.perf_counter() - first

    def read(pages: Sequence[Page]) -> dict[str, float]:
        spent = dict.fromkeys(("processing and encoding", "prompts", "decoding"), 0.0)
        ordered = sorted(
            pages, key=lambda page: page.picture.width * page.picture.height
        )
        for start in range(0, len(ordered), GROUP):
            answer(ordered[start : start + GROUP], spent)
        return spent

    return read


def docling_itself(model: Any, processor: Any) -> Read:
    from docling.datamodel.vlm_engine_options import MlxVlmEngineOptions
    from docling.models.inference_engines.vlm.mlx_engine import MlxVlmEngine

    _asked(processor)  # tells the processor what LLaVA's refuses
    stream = Alone(model)
    engine = MlxVlmEngine(MlxVlmEngineOptions(), artifacts_path=None)
    engine.initialize()
    engine.vlm_model, engine.processor = model, processor
    engine.config = {"model_type": model.config.model_type}
    engine.stream_generate = stream

    def read(pages: Sequence[Page]) -> dict[str, float]:
        outputs = engine.predict_batch(_docling_inputs(pages))
        for page, output in zip(pages, outputs, strict=True):
            assert output.metadata["num_tokens"] >= page.tokens
        return stream.parts()

    return read


def docling_with_ours(model: Any, processor: Any) -> Read:
    from docling.datamodel.vlm_engine_options import MlxVlmEngineOptions

    from vlm_batch.integrations.docling import BatchedVlmEngine

    class Endless(BatchedVlmEngine):
        def _request(self, given: Any) -> Request:
            request = super()._request(given)
            return replace(request, params=replace(request.params, ignore_eos=True))

    batcher = VLMBatcher(model, processor)
    spent = watched(batcher)
    engine = Endless(MlxVlmEngineOptions(), batcher=batcher)

    def read(pages: Sequence[Page]) -> dict[str, float]:
        spent.seconds.clear()
        outputs = engine.predict_batch(_docling_inputs(pages))
        counted = [output.metadata["num_tokens"] for output in outputs]
        assert counted == [page.tokens for page in pages]
        return _engine_parts(spent)

    return read


def _docling_inputs(pages: Sequence[Page]) -> list[Any]:
    from docling.models.inference_engines.vlm.base import VlmEngineInput

    return [
        VlmEngineInput(image=page.picture, prompt=PROMPT, max_new_tokens=page.tokens)
        for page in pages
    ]


WAYS: dict[str, Callable[[Any, Any], Read]] = {
    "ours": ours,
    "page by page": page_by_page,
    "groups of eight": groups_of_eight,
    "docling": docling_itself,
    "docling with ours": docling_with_ours,
}
#: Ways that answer one page after another, for which ``--alone`` is.
ALONE = ("page by page", "docling")
#: Ways that need docling.
NEEDS_DOCLING = ("docling", "docling with ours")
#: Ways whose times are divided, the first by the second.
PAIRS = (
    ("ours", "page by page"),
    ("ours", "groups of eight"),
    ("ours", "docling"),
    ("docling with ours", "docling"),
)


def has_docling() -> bool:
    return importlib.util.find_spec("docling") is not None


def run_way(way: str, args: argparse.Namespace) -> Run:
    """Read one round's pages in this process."""
    model, processor = model_and_processor(args.shape, args.max_pixels)
    read = WAYS[way](model, processor)
    first = 1000 * args.round
    read(make_pages(WARM_PAGES, first + 900_000, (WARM_TOKENS, WARM_TOKENS)))
    pages = make_pages(args.pages, first, args.tokens)
    mx.reset_peak_memory()
    begin, worked = time.perf_counter(), time.process_time()
    parts = read(pages)
    seconds = time.perf_counter() - begin
    worked = time.process_time() - worked
    tokens = sum(page.tokens for page in pages)
    return Run(args.pages, seconds, worked, tokens, mx.get_peak_memory(), parts)


# The table
# ----------------------------------------------------------------------------------------------------------------------


def say(way: str, runs: Sequence[Run]) -> None:
    each = statistics.median(run.seconds_a_page for run in runs)
    worked = statistics.median(run.processor_seconds_a_page for run in runs)
    peak = max(run.peak_bytes for run in runs) / 1e9
    shares = {
        part: statistics.median(run.parts[part] / run.seconds for run in runs)
        for part in runs[0].parts
    }
    said = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    print(
        f"{way:17} {each:7.2f} s a page ({worked:.2f} of the processor), {3600 / each:6.0f} pages an hour,"
        f" peak {peak:.2f} GB; {said}"
    )


def ratios(mine: Sequence[Run], theirs: Sequence[Run]) -> dict[str, list[float]]:
    """Return one way's time of a page over another's, round by round, sorted: by the clock, and of the processor."""
    rounds = list(zip(mine, theirs, strict=True))
    return {
        "clock": sorted(
            one.seconds_a_page / other.seconds_a_page for one, other in rounds
        ),
        "processor": sorted(
            one.processor_seconds_a_page / other.processor_seconds_a_page
            for one, other in rounds
        ),
    }


def spread(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=READ_SHAPES, default="small")
    parser.add_argument("--pages", type=int, default=12, help="of a round")
    parser.add_argument(
        "--alone",
        type=int,
        default=None,
        help="of a round's pages, so many page by page and by docling's engine, as long as all on average",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=(200, 1500),
        metavar=("LEAST", "MOST"),
        help="of an answer",
    )
    parser.add_argument(
        "--max-pixels",
        type=int,
        default=MAX_PIXELS,
        help="of a page as the model sees it (default: all)",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=None,
        metavar="WAY",
        help=f"some of: {', '.join(WAYS)} (default: all that are installed)",
    )
    parser.add_argument("--way", choices=WAYS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if has_docling():
        args.ways = args.ways or list(WAYS)
        return args
    for way in NEEDS_DOCLING:
        if way in (*(args.ways or ()), args.way):
            parser.error(
                f'{way!r} needs docling, which is not installed: pip install "vlm-batch[docling]"'
            )
    args.ways = args.ways or [way for way in WAYS if way not in NEEDS_DOCLING]
    return args


def _run_apart(way: str, number: int, args: argparse.Namespace) -> Run:
    command = [sys.executable, "-m", "benchmarks.documents", "--way", way]
    command += ["--round", str(number), "--shape", args.shape]
    command += ["--max-pixels", str(args.max_pixels)]
    pages = args.pages
    if way in ALONE and args.alone is not None:
        pages = args.alone
    command += ["--pages", str(pages), "--tokens", *map(str, args.tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    args = parse()
    if args.way is not None:
        print(json.dumps(asdict(run_way(args.way, args))))
        return
    if not has_docling():
        print("docling is not installed, so its two ways are left out")
    runs: dict[str, list[Run]] = {way: [] for way in args.ways}
    for number in range(args.rounds):
        for way in args.ways:
            run = _run_apart(way, number, args)
            runs[way].append(run)
            print(
                f"round {number + 1}, {way}: {run.seconds:.1f} s ({run.processor_seconds:.1f} of the processor)",
                flush=True,
            )
    for way, each in runs.items():
        say(way, each)
    found = {}
    for one, other in PAIRS:
        if one in runs and other in runs:
            shares = ratios(runs[one], runs[other])
            found[f"{one} / {other}"] = shares
            print(
                f"{one} / {other}: {spread(shares['clock'])}, of processor time {spread(shares['processor'])}"
            )
    facts = {
        "shape": args.shape,
        "pages": args.pages,
        "tokens": list(args.tokens),
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "runs": {way: [asdict(run) for run in each] for way, each in runs.items()},
        "ratios": found,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
