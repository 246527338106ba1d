"""No sequence twice: the tokens that other programs exclude, in any company, and with drafts."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.references.ngrams import RECORDED
from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.engine.sampling import RowRules, SamplingRow, process
from vlm_batch.errors import InvalidParameters

VOCABULARY = 6
PROMPT = [3, 3, 3, 1, 2]  # tokens before the answer, which do not count


def banned(history: list[int], **settings: Any) -> list[int]:
    row = SamplingRow(
        SamplingParams(**settings),
        0,
        len(history),
        mx.array([*PROMPT, *history], dtype=mx.int32),
        rules=RowRules(),
    )
    return np.flatnonzero(
        np.isinf(np.array(process(mx.zeros((1, VOCABULARY)), row))[0])
    ).tolist()


def transformers_functions() -> dict[str, Any]:
    """Two functions of transformers' that need no torch, whose file does."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "generation" / "logits_process.py"
    names = {"_get_ngrams", "_get_generated_ngrams"}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [
        one
        for one in tree.body
        if isinstance(one, ast.FunctionDef) and one.name in names
    ]
    space: dict[str, Any] = {"torch": SimpleNamespace(Tensor=object)}
    exec(compile(tree, str(file), "exec"), space)
    return {name: space[name] for name in names}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_transformers_excludes(size: int) -> None:
    """NoRepeatNGramLogitsProcessor's own helpers, over the answer."""
    theirs = transformers_functions()
    history = np.random.default_rng(size).integers(0, 2, 40)
    hits = 0
    for end in range(size, 41):
        seen = history[:end]
        ngrams = theirs["_get_ngrams"](size, seen[None], 1)[0]
        right = sorted(set(theirs["_get_generated_ngrams"](ngrams, seen, size, end)))
        assert banned(seen.tolist(), no_repeat_ngram_size=size) == right
        hits += bool(right)
    assert hits > 3


@pytest.mark.parametrize(
    "case",
    json.loads(RECORDED.read_text()),
    ids=lambda case: f"{case['source']} {case['settings']}",
)
def test_what_published_processors_exclude(case: dict[str, Any]) -> None:
    """DeepSeek-OCR's, with its window and its white list, and MinerU's (``tests/references/ngrams.py``)."""
    found = [
        banned(case["history"][:end], **case["settings"])
        for end in range(len(case["banned"]))
    ]
    assert found == case["banned"]
    assert any(case["banned"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_repeat_ngram_size": -1},
        {"no_repeat_ngram_size": 2.0},
        {"window_size": 4, "no_repeat_ngram_size": 5},
        {"whitelist_token_ids": [-1], "no_repeat_ngram_size": 5},
        {"whitelist_token_ids": 7, "no_repeat_ngram_size": 5},
        {"window_size": 0, "no_repeat_ngram_size": 5},
        {"window_size": 90},
        {"whitelist_token_ids": [1]},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_a_white_list_of_tokens_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(
        InvalidParameters, match="whitelist_token_ids holds 6; this model has 6 tokens"
    ):
        banned([1, 1, 1], no_repeat_ngram_size=1, whitelist_token_ids=[6])


def looping(tokens: Any, logits: mx.array) -> mx.array:
    """A model in a loop: it would say one thing for ever."""
    return mx.where(mx.arange(logits.shape[-1]) == 11, 100.0, logits)


def repeats(tokens: tuple[int, ...], size: int, window: int | None = None) -> int:
    """How many sequences occur again within ``window`` tokens, counted plainly."""
    count = 0
    for end in range(size, len(tokens)):
        seen = tokens[:end] if window is None else tokens[max(0, end - window) : end]
        ngrams = {seen[at : at + size] for at in range(len(seen) - size + 1)}
        count += tokens[end - size + 1 : end + 1] in ngrams
    return count


def test_through_the_door_in_company_and_with_drafts() -> None:
    """Loops end, and everybody's answer is the one that it gets alone; what drafts propose is bound by the rule, too."""
    settings: list[dict[str, Any]] = [
        {},
        {"no_repeat_ngram_size": 3},
        {"no_repeat_ngram_size": 4, "window_size": 12},
        {"no_repeat_ngram_size": 2, "whitelist_token_ids": [11]},
        {"no_repeat_ngram_size": 3, "temperature": 1.0, "logprobs": 2},
    ]
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 5}
    asked = [
        Request(prompt=prompt, images=images, params=SamplingParams(**common, **one))
        for one in settings
        for prompt, images in (
            ("count to 9", ()),
            ("describe the image", str(sample_images()[3])),
        )
    ]
    with VLMBatcher(default_checkpoint(), max_rows=8) as batcher:
        alone = [batcher.submit_request(one).result(timeout=60) for one in asked]
        together = list(batcher.generate(asked * 2))
        loop = SamplingParams(
            logits_processors=[looping], no_repeat_ngram_size=3, max_tokens=30
        )
        broken = batcher.submit(prompt="count to 9", params=loop).result(timeout=60)
        drafted = batcher.stats().drafted
    for expected, found in zip(alone * 2, together, strict=True):
        assert (found.error, found.token_ids, found.text) == (
            None,
            expected.token_ids,
            expected.text,
        )
    for one, result in zip(asked, alone, strict=True):
        params = one.params
        if params.no_repeat_ngram_size and not params.whitelist_token_ids:
            assert (
                repeats(
                    result.token_ids, params.no_repeat_ngram_size, params.window_size
                )
                == 0
            )
    assert repeats(alone[0].token_ids, 3) > 0  # without the rule they do come again
    assert broken.token_ids[:3] != (11,) * 3 or broken.token_ids[3] != 11
    assert repeats(broken.token_ids, 3) == 0
    assert drafted > 0
