"""An evaluation of made questions about pictures: python -m benchmarks.vqa [--questions 100] [--seed 0] [--cache FILE]

Each question has four options. It is answered twice: by the option with the largest log-probability, and by a generated
text that must be right to the letter. Prints both accuracies with Wilson's 95 % interval. Scores that are in the cache are
not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from pathlib import Path

from fixtures.training.scenes import Record, held_out
from vlm_batch import Request, VLMBatcher
from vlm_batch.assets import default_checkpoint

KINDS = ("describe", "colour", "count", "where", "is there", "digits")
NUM_OPTIONS = 4


def with_options(records: list[Record], seed: int) -> list[list[str]]:
    """Return each record's options: the right answer among others of its kind, in an order of the seed."""
    answers: dict[str, list[str]] = {}
    for record in records:
        known = answers.setdefault(record.kind, [])
        if record.answer not in known:
            known.append(record.answer)
    chosen = random.Random(seed)
    found: list[list[str]] = []
    for record in records:
        others = [one for one in answers[record.kind] if one != record.answer]
        count = min(NUM_OPTIONS - 1, len(others))
        options = [record.answer, *chosen.sample(others, count)]
        chosen.shuffle(options)
        found.append(options)
    return found


def key_of(model: str, record: Record, options: list[str]) -> str:
    """Return a name for what decides the scores."""
    whole = hashlib.sha256(json.dumps([model, record.question, options]).encode())
    for image in record.images:
        whole.update(image.tobytes())
    return whole.hexdigest()


def interval(right: int, asked: int) -> tuple[float, float]:
    """Return Wilson's interval of a share at 95 %."""
    z = 1.96
    share = right / asked
    middle = share + z * z / (2 * asked)
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    whole = 1 + z * z / asked
    return (middle - half) / whole, (middle + half) / whole


def say(name: str, right: int, asked: int) -> None:
    least, most = interval(right, asked)
    print(f"{name}: {right} of {asked} right, {least:.1%} to {most:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(default_checkpoint()))
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="a file of scores (JSON)")
    given = parser.parse_args()
    records = held_out(given.questions, given.seed, KINDS)
    options = with_options(records, given.seed)
    keys = [key_of(given.model, *one) for one in zip(records, options, strict=True)]
    known: dict[str, list[float]] = {}
    if given.cache is not None and given.cache.exists():
        known = json.loads(given.cache.read_text())
    new = [at for at, key in enumerate(keys) if key not in known]
    with VLMBatcher(given.model, reproducible=True) as batcher:
        # without its end, an option that begins another would never score less
        end = batcher.processing.decode_all(batcher.processing.eos_token_ids[:1])
        scored: list[Request] = []
        for at in new:
            ended = [f"{option}{end}" for option in options[at]]
            asked = records[at]
            scored.append(
                Request(images=asked.images, prompt=asked.question, options=ended)
            )
        results = batcher.generate(scored, raise_on_error=True)
        for at, result in zip(new, results, strict=True):
            known[keys[at]] = [one.logprob for one in result.options]
        answers = batcher.generate(
            [Request(images=one.images, prompt=one.question) for one in records],
            raise_on_error=True,
        )
    if given.cache is not None:
        given.cache.write_text(json.dumps(known))
    by_options = by_text = 0
    for at, record in enumerate(records):
        scores = known[keys[at]]
        by_options += options[at][scores.index(max(scores))] == record.answer
        by_text += answers[at].text.strip() == record.answer
    print(f"{len(records)} questions, {len(records) - len(new)} from the cache")
    say("by options", by_options, len(records))
    say("by text", by_text, len(records))


if __name__ == "__main__":
    main()
