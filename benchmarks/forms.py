"""The price of answers that are held to a form, for the others: python -m benchmarks.forms [--help]

Eight plain rows decode beside some more, which are plain as well or held to a JSON schema of three texts. The table has the
plain rows' gap between two tokens, and how many times as long it is for the forms; both kinds take turns in one run. The
model is small and random, the tokenizer as large as the vocabulary. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from vlm_batch.runtime.blas import preload_openblas

preload_openblas()

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from benchmarks import caches  # noqa: E402
from vlm_batch.adapters.base import Adapter  # noqa: E402
from vlm_batch.arrays import as_mlx  # noqa: E402
from vlm_batch.engine.constraints import Guide  # noqa: E402
from vlm_batch.engine.generator import BatchGenerator  # noqa: E402
from vlm_batch.engine.row import Prompt, new_row  # noqa: E402
from vlm_batch.inputs.fetch import Cancelled  # noqa: E402
from vlm_batch.inputs.grammar import Forms  # noqa: E402
from vlm_batch.policy import policy_of  # noqa: E402
from vlm_batch.types import SamplingParams  # noqa: E402

PLAIN = 8
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("shop", "item", "note")},
    "required": ["shop", "item", "note"],
    "additionalProperties": False,
}


def random_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Bytes, and merges of random pairs up to ``size`` tokens."""
    draw = random.Random(3)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    words, merges = list(letters), []
    while len(vocabulary) < size - 1:
        left, right = draw.choice(words), draw.choice(letters)
        if left + right not in vocabulary and len(left) < 12:
            vocabulary[left + right] = len(vocabulary)
            words.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def gaps(
    adapter: Adapter, forms: Forms, extra: int, tokens: int, is_held: bool
) -> tuple[list[float], list[float]]:
    """Seconds between two tokens of the plain rows: of the wall's clock, and of the processors."""
    generator = BatchGenerator(adapter, policy=policy_of({"max_rows": PLAIN + extra}))
    for index in range(PLAIN + extra):
        inputs = as_mlx({"input_ids": caches.np.full((1, 32), 5 + index)})
        params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=index)
        row = new_row(str(index), Prompt(inputs=inputs), params)
        generator.rows.add(row)
        if is_held and index >= PLAIN:
            form = (
                forms.compiled(SamplingParams(json_schema=SCHEMA), Cancelled())
                .result()
                .copy()
            )
            row.answer.guide = Guide.of(params, form, None, row.answer.rules.end_ids)
    walls, works = [], []
    while len(generator.rows.batch) < PLAIN + extra:
        generator.step()
    for step in range(tokens - 12):
        wall, work = time.perf_counter(), time.process_time()
        generator.step()
        if step >= 4:
            walls.append(time.perf_counter() - wall)
            works.append(time.process_time() - work)
    return walls, works


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--extra", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    caches.VOCABULARY = args.vocabulary
    adapter = caches.plain_model(args.layers)
    forms = Forms(random_tokenizer(args.vocabulary), [args.vocabulary - 1])
    rows: list[dict[str, Any]] = []
    print(
        f"{PLAIN} plain rows, {args.layers} layers, {args.vocabulary:,} tokens; ms of a step's fastest tenth (wall, processor)"
    )
    for extra in args.extra:
        times: dict[bool, tuple[list[float], list[float]]] = {
            False: ([], []),
            True: ([], []),
        }
        for _ in range(args.rounds):
            for is_held in (False, True):
                for kept, found in zip(
                    times[is_held],
                    gaps(adapter, forms, extra, args.tokens, is_held),
                    strict=True,
                ):
                    kept += found
        plain, held = (
            [statistics.quantiles(kind, n=10)[0] * 1e3 for kind in times[is_held]]
            for is_held in (False, True)
        )
        rows.append({"extra": extra, "plain_ms": plain, "held_ms": held})
        print(
            f"{extra} more: {plain[0]:.1f}, {plain[1]:.1f} plain; {held[0]:.1f}, {held[1]:.1f} held to a form: "
            f"{held[0] / plain[0]:.2f} times, {held[1] / plain[1]:.2f} of the processors"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
