"""What drafts save, and what they cost where they save nothing: python -m benchmarks.drafts [--model FOLDER]

The same requests are answered with and without drafts, in turns, by one model; each draw has other pictures and seeds. The
table has, for each kind of work and number of rows, the time with drafts over the time without (median, least and most of the
draws), decode forwards likewise, the share of drafted tokens that held, and the answers that differ: none may in float32; in
half precision a near-tie may fall the other way. The default model is the sample that reads.
`--model fixtures/checkpoints/qwen2_vl` is the small test checkpoint, which cannot read: its texts are bounded by the schema
alone.

    receipts  a made receipt as JSON, held to a schema: what the schema leaves no choice about is drafted
    again     the second turn of a conversation asks for what the first was told: n-grams of the prompt
    chats     sampled at temperature 1.3, nothing repeats: drafts can only cost
    heads     questions that training did not see, for --model fixtures/checkpoints/qwen3_5 with --draft
              fixtures/checkpoints/qwen3_5/heads, which draft as the model speaks

``--beside`` answers ``heads`` by mlx-vlm's batch generator with the same drafting model, too: a line has the time of this
library over mlx-vlm's, and the answers of mlx-vlm's that differ from those without drafts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from vlm_batch.runtime import blas

blas.preload_openblas()  # before anything imports mlx.core

import mlx.core as mx  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

from fixtures.training.scenes import record  # noqa: E402
from vlm_batch import Request, SamplingParams, VLMBatcher  # noqa: E402
from vlm_batch.assets import sample_model  # noqa: E402
from vlm_batch.runtime.device import Device, device  # noqa: E402

ROWS = (1, 8, 32)
#: Kinds of ``fixtures.training.scenes`` with the longest answers, and words of an answer at least.
KINDS, LEAST_WORDS = ("both", "count to"), 8
SHOPS = ("CORNER SHOP", "MARKET HALL", "GREEN GROCER")
GOODS = (
    "apples",
    "bread",
    "coffee",
    "milk",
    "rice",
    "soap",
    "tea",
    "cheese",
    "pasta",
    "butter",
)
AMOUNT = {"type": "string", "pattern": r"^[0-9]{1,5}\.[0-9]{2}$"}


def closed(**fields: Any) -> dict[str, Any]:
    """A schema's object of these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


#: The schema of docs/receipts-to-json.md, with fewer items at most.
RECEIPT = closed(
    shop={"type": "string", "maxLength": 24},
    date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    items={
        "type": "array",
        "maxItems": 6,
        "items": closed(name={"type": "string", "maxLength": 12}, price=AMOUNT),
    },
    total=AMOUNT,
)


def receipt(draw: random.Random) -> Image.Image:
    """A picture of a receipt, with other goods and prices each time."""
    goods = [(name, draw.randint(50, 2500)) for name in draw.sample(GOODS, 4)]
    lines = [
        draw.choice(SHOPS),
        f"2026-{draw.randint(1, 12):02}-{draw.randint(10, 28)}",
    ]
    lines += [f"{name:<12}{price // 100:>5}.{price % 100:02}" for name, price in goods]
    total = sum(price for _, price in goods)
    lines.append(f"{'TOTAL':<12}{total // 100:>5}.{total % 100:02}")
    picture = Image.new("L", (256, 256), 250)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(16)
    for row, line in enumerate(lines):
        pen.text((16, 16 + 26 * row), line, fill=20, font=font)
    return picture


def receipts(draw: random.Random, told: Callable[[Request], str]) -> Request:
    params = SamplingParams(max_tokens=400, json_schema=RECEIPT)
    return Request(images=[receipt(draw)], prompt="Read this receipt.", params=params)


def again(draw: random.Random, told: Callable[[Request], str]) -> Request:
    picture = receipt(draw)
    params = SamplingParams(max_tokens=200)
    first: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture},
                {"type": "text", "text": "Read the text."},
            ],
        }
    ]
    said = told(Request(messages=first, params=params))
    more = [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Read the text."},
    ]
    return Request(messages=[*first, *more], params=params)


def chats(draw: random.Random, told: Callable[[Request], str]) -> Request:
    params = SamplingParams(
        max_tokens=96, temperature=1.3, seed=draw.randrange(2**31), ignore_eos=True
    )
    return Request(images=[receipt(draw)], prompt="What do you see?", params=params)


def heads(draw: random.Random, told: Callable[[Request], str]) -> Request:
    drawn = (
        record(f"held out {draw.random()}", draw.choice(KINDS), held_out=True)
        for _ in itertools.count()
    )
    asked = next(one for one in drawn if len(one.answer.split()) >= LEAST_WORDS)
    params = SamplingParams(max_tokens=64)
    return Request(images=list(asked.images), prompt=asked.question, params=params)


WORK: dict[str, Callable[[random.Random, Callable[[Request], str]], Request]] = {
    "receipts": receipts,
    "again": again,
    "chats": chats,
    "heads": heads,
}


class Run(NamedTuple):
    """Tokens of the answers, seconds of the wall's clock and of the processors, and decode forwards."""

    told: list[tuple[int, ...]]
    wall: float
    work: float
    forwards: int


class Way:
    """A batcher with or without drafts, and the forwards that it has launched."""

    def __init__(self, model: str, draft: str) -> None:
        self.batcher = VLMBatcher(model, policy={"draft": draft}, caches=None)
        self.forwards = 0
        decoder: Any = self.batcher._loop.generator._decoder
        logits = decoder.logits

        def counting(*args: Any) -> mx.array:
            self.forwards += 1
            return logits(*args)

        decoder.logits = counting

    def run(self, requests: list[Request], rows: int) -> Run:
        """Answer requests, ``rows`` at a time."""
        forwards, wall, work = self.forwards, time.perf_counter(), time.process_time()
        told: list[tuple[int, ...]] = []
        for first in range(0, len(requests), rows):
            results = self.batcher.generate(
                requests[first : first + rows], raise_on_error=True
            )
            told += [result.token_ids for result in results]
        return Run(
            told,
            time.perf_counter() - wall,
            time.process_time() - work,
            self.forwards - forwards,
        )


class MlxVlm:
    """mlx-vlm's batch generator with a drafting model, fed as its server feeds it, with the settings of both folders."""

    def __init__(self, model: str, draft: str) -> None:
        import mlx_vlm
        from mlx_vlm.speculative.drafters import load_drafter

        self.model, self.processor = mlx_vlm.load(model)
        self.draft, self.kind = load_drafter(draft)

    def run(self, requests: list[Request], rows: int) -> Run:
        """Answer requests, ``rows`` at a time. Its forwards are not counted."""
        wall, work = time.perf_counter(), time.process_time()
        told: list[tuple[int, ...]] = []
        for first in range(0, len(requests), rows):
            told += self._together(requests[first : first + rows])
        return Run(told, time.perf_counter() - wall, time.process_time() - work, 0)

    def _together(self, requests: list[Request]) -> list[tuple[int, ...]]:
        from mlx_vlm.generate.ar import BatchGenerator
        from mlx_vlm.prompt_utils import apply_chat_template
        from mlx_vlm.utils import prepare_inputs

        generator: Any = BatchGenerator(
            self.model.language_model,
            self.processor,
            completion_batch_size=len(requests),
            prefill_batch_size=len(requests),
            compute_logprobs=False,
            stream=mx.default_stream(mx.default_device()),
            draft_model=self.draft,
            draft_kind=self.kind,
        )
        told: dict[int, list[int]] = {}
        for request in requests:
            config: Any = self.model.config
            pictures: Any = list(request.images)
            text = apply_chat_template(
                self.processor, config, request.prompt, num_images=len(pictures)
            )
            found: Any = prepare_inputs(
                self.processor, images=pictures or None, prompts=[text]
            )
            ids, pixels, mask = (
                found.pop(name, None)
                for name in ("input_ids", "pixel_values", "attention_mask")
            )
            features = self.model.get_input_embeddings(
                ids, pixels, mask=mask, **found
            ).to_dict()
            given = {
                **found,
                **{
                    name: value for name, value in features.items() if value is not None
                },
            }
            (uid,) = generator.insert(
                [ids[0].tolist()],
                max_tokens=request.params.max_tokens,
                prompt_kwargs=[given],
            )
            told[uid] = []
        while generator.has_work:
            for response in generator.next()[1]:
                told[response.uid] += (
                    [] if response.token is None else [int(response.token)]
                )
        generator.close()
        return [tuple(tokens) for tokens in told.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(sample_model()))
    parser.add_argument(
        "--draft", default="auto", help="auto, or the folder of a model that drafts"
    )
    parser.add_argument(
        "--work", nargs="+", default=["receipts", "again", "chats"], choices=list(WORK)
    )
    parser.add_argument(
        "--beside", action="store_true", help="with --work heads: mlx-vlm's drafts, too"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seed", type=int, default=26)
    args = parser.parse_args()
    ways = {"off": Way(args.model, "off"), "auto": Way(args.model, args.draft)}
    if args.beside and (args.work != ["heads"] or args.draft == "auto"):
        parser.error("--beside needs --work heads and --draft")
    beside = MlxVlm(args.model, args.draft) if args.beside else None
    is_cpu = device() is Device.CPU
    about = {
        "device": device().value,
        "mlx": version("mlx"),
        "clock": "processors" if is_cpu else "wall",
    }
    found: list[dict[str, Any]] = []

    def told(request: Request) -> str:
        return ways["off"].batcher.generate([request], raise_on_error=True)[0].text

    print(
        f"{'work':<10}{'rows':>5}{'time':>8}{'least':>8}{'most':>8}{'wall':>8}{'forwards':>10}{'held':>7}{'differ':>9}",
        flush=True,
    )
    for name in args.work:
        for rows in args.rows:
            ratios, walls, forwards = [], [], []
            held, drafted, differ, asked = 0, 0, 0, 0
            over, wrong = list[float](), 0
            # the first is not counted: kernels are made
            for number in range(-1, args.draws):
                draw = random.Random(f"{args.seed} {name} {rows} {number}")
                requests = [WORK[name](draw, told) for _ in range(max(rows, 4))]
                stats = ways["auto"].batcher.stats()
                ends = {}
                for draft in sorted(ways, reverse=number % 2 == 0):
                    ends[draft] = ways[draft].run(requests, rows)
                auto, off = ends["auto"], ends["off"]
                differ += sum(
                    one != right for one, right in zip(auto.told, off.told, strict=True)
                )
                asked += len(requests)
                theirs = None if beside is None else beside.run(requests, rows)
                if number < 0:
                    continue
                if theirs is not None:
                    wrong += sum(
                        one != right
                        for one, right in zip(theirs.told, off.told, strict=True)
                    )
                    over.append(
                        auto.work / theirs.work if is_cpu else auto.wall / theirs.wall
                    )
                after = ways["auto"].batcher.stats()
                held = held + after.drafts_held - stats.drafts_held
                drafted = drafted + after.drafted - stats.drafted
                ratios.append(auto.work / off.work if is_cpu else auto.wall / off.wall)
                walls.append(auto.wall / off.wall)
                forwards.append(auto.forwards / off.forwards)
            share = held / drafted if drafted else None
            line = {
                "work": name,
                "rows": rows,
                "time": ratios,
                "wall": walls,
                "forwards": forwards,
                "held": share,
            }
            line |= {"differ": differ, "asked": asked}
            line |= {"over mlx-vlm": over, "wrong by mlx-vlm": wrong} if beside else {}
            found.append(line)
            middle = statistics.median
            print(
                f"{name:<10}{rows:>5}{middle(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}{middle(walls):>8.2f}"
                f"{middle(forwards):>10.2f}"
                + ("      -" if share is None else f"{share:>7.0%}")
                + f"{differ:>4} of {asked}",
                flush=True,
            )
            if over:
                print(
                    f"over mlx-vlm: {middle(over):.2f} ({min(over):.2f} to {max(over):.2f}); "
                    f"{wrong} of its {len(over) * max(rows, 4)} answers are wrong",
                    flush=True,
                )
    for way in ways.values():
        way.batcher.close()
    print(json.dumps({**about, "model": args.model, "seed": args.seed, "found": found}))


if __name__ == "__main__":
    main()
