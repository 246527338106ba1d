"""What requests ask for of their answers, for every family: the same tokens alone, in company and joining late.

How large pictures are seen (``min_pixels``, ``max_pixels``) is settled before the engine (``tests/test_picture_sizes.py``);
log-probabilities of prompts are in ``tests/test_prompt_logprobs.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.harness import every_family, inputs_of, settings_for, shared_adapter
from tests.histories import Blind, Later
from tests.recording import record
from tests.zoo import END_OF_TEXT, VOCABULARY
from vlm_batch.arrays import as_mlx
from vlm_batch.caches import Placement
from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Prompt, Row, new_row
from vlm_batch.engine.several import Several
from vlm_batch.engine.text import AnswerText
from vlm_batch.records import Thinking
from vlm_batch.types import SamplingParams

#: One family for each kind of state; every family with VLM_BATCH_PARAMETERS=all in the environment, which takes minutes.
KINDS = [
    "qwen2_vl",
    "mllama",
    "falcon_h1",
    "gemma3",
    "gemma3n",
    "deepseek_v4",
    "unlimited_ocr",
    "florence2",
    "qwen3_5",
]
KINDS += ["paligemma", "molmo_point", "mistral3_mistral4", "minimax_m3_vl", "lfm2_vl"]
EVERY = os.environ.get("VLM_BATCH_PARAMETERS") == "all"
TOKENS = 10
BAD = ((7,), (3, 4), *((token,) for token in range(40, 60)))
#: Token 5 begins thinking, 9 and 11 end it.
THINKS = Thinking((5,), (9, 11), is_open=True)


@dataclass
class Residues(Blind):
    """A form: the n-th token's id leaves n's remainder when divided by three. It is whole after eight."""

    seen: list[int] = field(default_factory=list)

    def fill(self, bits: np.ndarray) -> None:
        for token in range(len(self.seen) % 3, min(VOCABULARY, 32 * len(bits)), 3):
            bits[token // 32] |= np.uint32(1 << (token % 32))

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]:
        if token % 3 != len(self.seen) % 3:
            raise ValueError(f"{token} does not fit")
        self.seen.append(token)
        return Later(token % 2)

    def copy(self) -> Residues:
        return Residues()

    def read(self, text: str) -> Any:
        return tuple(self.seen)

    @property
    def is_whole(self) -> bool:
        return len(self.seen) == 8

    @property
    def may_end(self) -> bool:
        return self.is_whole


#: name -> (prompt, parameters); what else a row has is set by ``make``.
ASKED: Mapping[str, tuple[str, SamplingParams]] = {
    "penalties": (
        "image:1:0",
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, min_tokens=6),
    ),
    "biases": (
        "text:4:9",
        SamplingParams(
            temperature=1.2,
            logit_bias={3: 4.0, 8: -50.0},
            allowed_token_ids=[*range(2, 90, 2), 3],
        ),
    ),
    "bad_words": ("image:3:2", SamplingParams(temperature=0.8, bad_words=["x"])),
    "several": (
        "text:5:26",
        SamplingParams(temperature=1.5, n=3, frequency_penalty=0.3),
    ),
    "form": ("image:2:1", SamplingParams(temperature=0.6)),
    "thinking": ("text:6:14", SamplingParams(temperature=1.0, thinking_budget=3)),
    "thinking_then_form": ("image:1:0", SamplingParams(thinking_budget=2)),
}


def make(generator: BatchGenerator, name: str, family: str) -> Row:
    """A row as the batcher would make it of a request, without its tokenizer."""
    key, params = ASKED[name]
    params = replace(params, max_tokens=TOKENS, seed=len(name))
    row = new_row(
        name, Prompt(inputs=as_mlx(inputs_of(family, key))), params, text=generator.text
    )
    generator.rows.add(row)
    if name == "bad_words":
        row.answer.rules = replace(row.answer.rules, bad_words=BAD)
    form = Residues() if name in ("form", "thinking_then_form") else None
    row.answer.guide = Guide.of(
        params,
        form,
        THINKS if name.startswith("thinking") else None,
        row.answer.rules.end_ids,
    )
    return row


def run(
    family: str, names: Sequence[str], placement: Placement, gap: int = 0
) -> dict[str, tuple[int, ...]]:
    """Every answer's tokens, by the names of its row; each row comes ``gap`` steps after the one before."""
    generator = BatchGenerator(
        shared_adapter(family),
        text=AnswerText(eos_token_ids=frozenset({END_OF_TEXT})),
        policy=settings_for(placement, max_rows=5, prefill_budget=16),
    )
    ends: dict[str, tuple[int, ...]] = {}
    coming, step = list(names), 0
    while coming or generator.has_work:
        while coming and step >= gap * (len(names) - len(coming)):
            make(generator, coming.pop(0), family)
        for event in generator.step():
            if event.result is not None:
                assert event.result.error is None, (
                    f"{event.request_id}: {event.result.error}"
                )
                ends[event.request_id] = event.result.token_ids
        step += 1
        assert step < 1000
    return ends


@pytest.mark.parametrize("family", every_family() if EVERY else KINDS)
def test_parameters_are_a_rows_own(family: str) -> None:
    alone: dict[str, tuple[int, ...]] = {}
    for name in ASKED:
        alone |= run(family, [name], Placement.ROWS)
    assert len(alone) == len(ASKED) + 2
    assert len({alone[name] for name in Several("several", 3).row_ids}) > 1
    assert not {(token,) for token in alone["bad_words"]} & set(BAD)
    assert set(alone["biases"]) <= {*range(2, 90, 2), 3, END_OF_TEXT}
    assert [token % 3 for token in alone["form"]] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert alone["thinking"][3:5] == (9, 11) or 9 in alone["thinking"][:3]
    for placement in Placement:
        assert run(family, list(ASKED), placement) == alone
        assert run(family, list(ASKED)[::-1], placement, gap=2) == alone
        record(family, "parameters", placement, 0.0)
