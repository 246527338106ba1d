"""Pages an hour: python -m benchmarks.documents [--shape 3b] [--pages 200]

Rendered pages of three kinds (a letter, a table, two columns; 1,000 by 1,400 pixels) are read in three ways:

- ``ours``: through ``VLMBatcher`` with its defaults, asked as ``vlm-batch read`` asks;
- ``page by page``: by mlx-vlm's ``stream_generate``, of which ``generate`` is the text;
- ``groups of eight``: as MinerU's ``mlx-engine`` does: sorted by pixels, each group encoded page by page and answered by
  mlx-vlm's ``BatchGenerator``. MinerU's bound of 9 megapixels a group, which would make it six of these pages, is left out.

Answers have 200 to 1,500 tokens, whatever the model says (no token ends one). Weights are random. Every way runs in a process
of its own, on the same pages, in turns; a round has pages of its own. Ratios are ours over the other's in each round: the
median (least to most). The last line is JSON.
"""

from __future__ import annotations

from vlm_batch.runtime import blas, launches

launches.prefer_single_launches()  # before anything imports mlx.core
blas.preload_openblas()

import argparse  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

from benchmarks.pictures import model_and_processor, watched  # noqa: E402
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


@dataclass(frozen=True)
class Run:
    """One way through one round's pages.

    Attributes:
        pages: of this run.
        seconds: from the first page's question to the last page's answer.
        tokens: of all answers.
        peak_bytes: the most that MLX held.
        parts: seconds by part of the work; what is left is waiting and what lies between.
    """

    pages: int
    seconds: float
    tokens: int
    peak_bytes: int
    parts: dict[str, float]

    @property
    def seconds_a_page(self) -> float:
        return self.seconds / self.pages


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


def ours(model: Any, processor: Any) -> Callable[[Sequence[Page]], dict[str, float]]:
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
        decode = ("decode, launch", "wait for the last step")
        return {
            # other threads process pages while the engine's decodes
            "processing, beside": sum(one.timings.process for one in results),
            "encoding": spent.seconds.get("encode", 0.0),
            "prompts": spent.seconds.get("prefill", 0.0),
            "decoding": sum(spent.seconds.get(name, 0.0) for name in decode),
        }

    return read


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


def page_by_page(
    model: Any, processor: Any
) -> Callable[[Sequence[Page]], dict[str, float]]:
    from mlx_vlm.generate import dispatch

    prompt = _asked(processor)
    encode = model.get_input_embeddings
    encoding = [0.0]

    def timed(*args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        found = encode(*args, **keywords)
        mx.eval([one for one in found.to_dict().values() if isinstance(one, mx.array)])
        encoding[0] += time.perf_counter() - begin
        return found

    model.get_input_embeddings = timed
    dispatch.make_streaming_detokenizer = lambda processor: Silent()

    def read(pages: Sequence[Page]) -> dict[str, float]:
        encoding[0] = prompts = decoding = 0.0
        for page in pages:
            begin = last = time.perf_counter()
            first, count = 0.0, 0
            for _ in dispatch.stream_generate(
                model,
                processor,
                prompt,
                [page.picture],
                max_tokens=page.tokens,
                temperature=0.0,
                stopping_criteria=NoEnd(),
            ):
                last = time.perf_counter()
                first = first or last
                count += 1
            assert count >= page.tokens
            prompts += first - begin
            decoding += last - first
        return {
            "encoding": encoding[0],
            "processing and prompts": prompts - encoding[0],
            "decoding": decoding,
        }

    return read


def groups_of_eight(
    model: Any, processor: Any
) -> Callable[[Sequence[Page]], dict[str, float]]:
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


WAYS = {"ours": ours, "page by page": page_by_page, "groups of eight": groups_of_eight}


def run_way(way: str, args: argparse.Namespace) -> Run:
    """Read one round's pages in this process."""
    model, processor = model_and_processor(args.shape, args.max_pixels)
    read = WAYS[way](model, processor)
    first = 1000 * args.round
    read(make_pages(WARM_PAGES, first + 900_000, (WARM_TOKENS, WARM_TOKENS)))
    pages = make_pages(args.pages, first, args.tokens)
    mx.reset_peak_memory()
    begin = time.perf_counter()
    parts = read(pages)
    seconds = time.perf_counter() - begin
    tokens = sum(page.tokens for page in pages)
    return Run(args.pages, seconds, tokens, mx.get_peak_memory(), parts)


# The table
# ----------------------------------------------------------------------------------------------------------------------


def say(way: str, runs: Sequence[Run]) -> None:
    each = statistics.median(run.seconds_a_page for run in runs)
    peak = max(run.peak_bytes for run in runs) / 1e9
    shares = {
        part: statistics.median(run.parts[part] / run.seconds for run in runs)
        for part in runs[0].parts
    }
    said = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    print(
        f"{way:16} {each:7.2f} s a page, {3600 / each:6.0f} pages an hour, peak {peak:.2f} GB; {said}"
    )


def ratios(runs: dict[str, list[Run]], other: str) -> list[float]:
    """Return ours over the other's seconds a page, sorted."""
    pairs = zip(runs["ours"], runs[other], strict=True)
    return sorted(mine.seconds_a_page / theirs.seconds_a_page for mine, theirs in pairs)


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
        help="of a round's pages, so many page by page, as long as all on average",
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
    parser.add_argument("--way", choices=WAYS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run_apart(way: str, number: int, args: argparse.Namespace) -> Run:
    command = [sys.executable, "-m", "benchmarks.documents", "--way", way]
    command += ["--round", str(number), "--shape", args.shape]
    command += ["--max-pixels", str(args.max_pixels)]
    pages = args.pages
    if way == "page by page" and args.alone is not None:
        pages = args.alone
    command += ["--pages", str(pages), "--tokens", *map(str, args.tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    args = parse()
    if args.way is not None:
        print(json.dumps(asdict(run_way(args.way, args))))
        return
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS:
            runs[way].append(_run_apart(way, number, args))
            print(
                f"round {number + 1}, {way}: {runs[way][-1].seconds:.1f} s", flush=True
            )
    for way, each in runs.items():
        say(way, each)
    found = {other: ratios(runs, other) for other in WAYS if other != "ours"}
    for other, shares in found.items():
        middle = statistics.median(shares)
        print(f"ours / {other}: {middle:.2f} ({shares[0]:.2f} to {shares[-1]:.2f})")
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
