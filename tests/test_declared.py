"""Sampling parameters are declared once: flags, jobs' columns, HTTP's fields and checks follow from it."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from vlm_batch import SamplingParams
from vlm_batch.cli.main import parser
from vlm_batch.cli.options import said_sampling
from vlm_batch.errors import InvalidParameters
from vlm_batch.jobs.openai import row_of_body
from vlm_batch.jobs.questions import PARAMETERS, Questions, merged
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.parameters import RealNumber, TrueOrFalse, WholeNumber
from vlm_batch.server.fields import ALIASES, SAMPLING
from vlm_batch.server.sampled import Common
from vlm_batch.types import FORMS, SAMPLING_PARAMETERS

#: A value of each parameter that differs from its default.
OTHER: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "repetition_context_size": 30,
    "no_repeat_ngram_size": 4,
    "window_size": 60,
    "whitelist_token_ids": (3,),
    "seed": 3,
    "stop": ("a", "b"),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logits_processors": (lambda tokens, logits: logits,),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {3: 1.5},
    "allowed_token_ids": (1, 2),
    "bad_words": ("x",),
    "min_tokens": 2,
    "n": 2,
    "skip_special_tokens": False,
    "thinking_budget": 9,
    "json_schema": {"type": "object"},
    "regex": "a+",
    "grammar": 'start: "a"',
    "choice": ("a", "b"),
}
#: What else a parameter needs.
WITH: dict[str, dict[str, Any]] = {
    name: {"no_repeat_ngram_size": 4} for name in ("window_size", "whitelist_token_ids")
}
EVERY = pytest.mark.parametrize("one", SAMPLING_PARAMETERS, ids=lambda one: one.name)


def test_every_parameter_is_tried_here() -> None:
    assert list(OTHER) == [one.name for one in SAMPLING_PARAMETERS]


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("temperature", (0, 1e-6, 1e6), (-0.1, 9e-7, 1.1e6)),
        ("top_p", (1e-30, 1), (0, 1.001)),
        ("min_p", (0, 1 - 2**-53), (-1e-9, 1, np.float32(1 - 2**-53))),
        ("repetition_penalty", (1e-3, 1e3), (9e-4, 1001)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
    ],
)
def test_bounds_belong_to_the_range(
    name: str, taken: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    """Of numpy's numbers, too: in float32 the largest number below 1 of a float is 1."""

    def made(value: Any) -> SamplingParams:
        given: dict[str, Any] = {name: value}
        return SamplingParams(**given)

    for value in taken:
        assert getattr(made(value), name) == value
    for value in refused:
        with pytest.raises(InvalidParameters, match=name):
            made(value)


@EVERY
def test_a_wrong_value_names_the_parameter(one: Any) -> None:
    wrong: list[Any] = [object()]
    if isinstance(one.check, WholeNumber):
        wrong += [one.check.least - 1, one.check.most + 1, 1.5, True, "1"]
    if isinstance(one.check, RealNumber):
        wrong += [float("nan"), float("inf"), 1e9, True, "1", None]
    if isinstance(one.check, TrueOrFalse):
        wrong += [1, "true"]
    if isinstance(one.check, (WholeNumber, RealNumber, TrueOrFalse)):
        wrong += [None] * (one.default is not None)
    for value in wrong:
        with pytest.raises(InvalidParameters, match=one.name):
            SamplingParams(**{one.name: value})


@EVERY
def test_a_flag_says_the_parameter(one: Any, tmp_path: Any) -> None:
    value, flag = OTHER[one.name], f"--{one.name.replace('_', '-')}"
    if one.flag is None:
        with pytest.raises(SystemExit):
            run_args(flag, "1", is_known=False)
        return
    if isinstance(one.check, TrueOrFalse):
        given = [flag if value else flag.replace("--", "--no-")]
    elif one.flag.metavar == "FILE":
        (tmp_path / "file").write_text('{"type": "object"}')
        given = [flag, str(tmp_path / "file")]
    elif one.flag.is_repeated:
        given = [word for text in value for word in (flag, text)]
    else:
        given = [flag, str(value)]
    for command in ("run", "read") if one.name not in FORMS else ("run",):
        said = said_sampling(run_args(*given, command=command))
        assert said.keys() == {one.name}
        params = SamplingParams(**WITH.get(one.name, {}), **said)
        assert getattr(params, one.name) == value


def run_args(
    *given: str, command: str = "run", is_known: bool = True
) -> argparse.Namespace:
    args, unknown = parser().parse_known_args(
        [command, "a.png", "--out", "out", *given]
    )
    if unknown and not is_known:
        args.parser.refuse(unknown)
    assert not unknown
    return args


@EVERY
def test_a_row_says_the_parameter(one: Any) -> None:
    own = {**WITH.get(one.name, {}), one.name: OTHER[one.name]}
    if not one.in_jobs:
        assert one.name not in PARAMETERS
        with pytest.raises(InvalidJob, match=f"does not know {one.name}"):
            merged(SamplingParams(), own)
        return
    assert getattr(merged(SamplingParams(), own), one.name) == OTHER[one.name]
    assert one.name in Questions().settings()


@EVERY
def test_a_line_of_a_batch_file_says_the_parameter(one: Any) -> None:
    body = {"messages": [], one.name: OTHER[one.name]}
    row = row_of_body({"custom_id": "a", "body": body}, "here")
    if one.in_jobs and one.name not in ("json_schema", "logprobs"):
        assert row.params == {one.name: OTHER[one.name]}
    elif one.name != "logprobs":
        assert row.error is not None and repr(one.name) in row.error


@EVERY
def test_a_body_over_http_has_the_field(one: Any) -> None:
    """Of the name, which sets the parameter; what HTTP spells otherwise is tried in test_server_fields.py."""
    is_alone = SAMPLING.get(one.name) == one.name and one.name not in ALIASES
    assert is_alone == one.over_http
    if one.over_http and one.name != "thinking_budget":  # a field of chats alone
        assert one.name in Common.model_fields
