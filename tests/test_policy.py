"""The settings of each kind of device: one table, what a caller says, and what is measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests import policy_page
from vlm_batch import Request, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.cli import measuring
from vlm_batch.cli.measuring import Measured, settings_of
from vlm_batch.policy import POLICIES, SETTINGS, Policy, check_policy, policy_of
from vlm_batch.runtime.device import Device

CPU = POLICIES[Device.CPU]
QUESTION = Request(prompt="count to 5", params={"max_tokens": 8})  # type: ignore[arg-type]


def test_every_setting_has_a_meaning_and_a_source_for_every_device() -> None:
    bounds = {"max_rows", "max_bytes", "max_prompt_tokens"}  # options of their own
    assert [field.name for field in fields(Policy)] == [
        *SETTINGS,
        "max_rows",
        "max_bytes",
        "max_prompt_tokens",
    ]
    for setting in SETTINGS.values():
        assert setting.meaning and set(setting.values) == set(Device)
        assert all(source for _, source in setting.values.values())
    assert Policy() == CPU and not bounds & set(SETTINGS)


def test_what_is_said_goes_over_the_table() -> None:
    assert policy_of({}, Device.CUDA) == POLICIES[Device.CUDA]
    said = {"max_rows": 3, "max_chunk": 7, "encode_seconds": 1.0, "encode_ahead": 0}
    assert policy_of(said, Device.CPU) == replace(
        CPU, max_rows=3, max_chunk=7, encode_seconds=1.0, encode_ahead=0
    )


def test_whoever_counts_tokens_wants_no_more_of_them() -> None:
    assert policy_of({"prefill_budget": 9}, Device.CUDA).slack == 0
    assert policy_of({"prefill_budget": 9, "slack": 5}, Device.CUDA).slack == 5
    assert (
        policy_of({"prefill_budget": None}, Device.CUDA).slack
        == POLICIES[Device.CUDA].slack
    )


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        ({"most_rows": 4}, (4, 4)),
        ({"first_rows": 48}, (48, 48)),
        ({"most_rows": 24}, (16, 24)),
    ],
)
def test_one_bound_of_the_rows_moves_the_other(
    said: Mapping[str, int], rows: tuple[int, int]
) -> None:
    policy = policy_of(said, Device.CPU)
    assert (policy.first_rows, policy.most_rows) == rows


def test_another_layout_comes_with_the_settings_that_fit_it() -> None:
    """But for what goes by how fast the device is."""
    slabs = policy_of({"placement": "slab"}, Device.CPU)
    assert slabs == replace(
        POLICIES[Device.CUDA],
        idle_budget=CPU.idle_budget,
        draft=CPU.draft,
        wide_products=CPU.wide_products,
    )
    rows = policy_of({"placement": "rows"}, Device.METAL)
    assert rows == replace(CPU, idle_budget=POLICIES[Device.METAL].idle_budget)
    assert policy_of({"placement": "slab"}, Device.METAL) == POLICIES[Device.METAL]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("device", "policy is 'device'; it must be a mapping of settings, or None"),
        (3, "policy is 3"),
        ({"rows": 3}, "policy has no rows; it has placement, few_bits, first_rows"),
        ({"max_rows": 3}, "policy has no max_rows"),
        ({"max_chunk": 0}, "max_chunk is 0; it must be an integer of at least 1"),
        ({"max_chunk": True}, "max_chunk is True"),
        ({"placement": "heap"}, "placement is 'heap'; it must be one of rows, slab"),
        (
            {"few_bits": "some"},
            "few_bits is 'some'; it must be one of packed, unpacked, kernel",
        ),
        ({"encode_seconds": -1}, "encode_seconds is -1"),
        ({"grid": 100}, "grid is 100; it must be a multiple of 256"),
        ({"first_rows": "9"}, "first_rows is '9'"),
        (
            {"first_rows": 9, "most_rows": 8},
            "first_rows is 9, above most_rows, which is 8",
        ),
        (
            {"token_gap": 0},
            "token_gap is 0; it must be a finite number of seconds above 0",
        ),
    ],
)
def test_what_is_no_policy_is_refused(said: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VLMBatcher(default_checkpoint(), policy=said)


def test_a_batcher_runs_with_what_is_said_and_tells_it() -> None:
    said = {
        "max_chunk": 16,
        "smallest_chunk": 16,
        "idle_budget": 16,
        "placement": "slab",
        "most_rows": 4,
    }
    with (
        VLMBatcher(default_checkpoint()) as plain,
        VLMBatcher(default_checkpoint(), policy=said) as other,
    ):
        assert list(plain.policy) == list(SETTINGS)
        assert plain.policy["max_chunk"]["value"] == CPU.max_chunk
        assert plain.policy["grid"]["source"].startswith("the table for cpu: ")
        assert {name: other.policy[name]["value"] for name in said} == said
        assert other.policy["max_chunk"]["source"] == "said: VLMBatcher(policy=)"
        assert other.stats().most_rows == 4
        config = other._loop.generator.policy
        assert (config.max_chunk, config.idle_budget, config.most_rows) == (16, 16, 4)
        one = plain.submit_request(QUESTION).result()
        two = other.submit_request(QUESTION).result()
        assert one.token_ids == two.token_ids and one.error is None


# ---- what is measured here ----


def test_rows_end_where_they_stop_paying_and_chunks_where_longer_ones_gain_nothing() -> (
    None
):
    measured = Measured(
        decode={
            "rows": {
                1: 0.010,
                2: 0.011,
                4: 0.013,
                8: 0.017,
                12: 0.021,
                16: 0.028,
                24: 0.042,
            },
            "slab": {1: 0.014, 2: 0.015, 4: 0.016, 8: 0.019, 12: 0.023, 16: 0.030},
        },
        chunks={64: 3.0, 128: 2.0, 256: 1.0, 512: 0.99, 1024: 1.2},
        prompts={1: 1.0, 2: 0.7, 4: 0.5, 8: 0.49},
        pictures={1: 1.0, 2: 1.01, 4: 1.1},
    )
    assert settings_of(measured, CPU) == {
        "placement": "rows",
        "first_rows": 12,
        "most_rows": 12,
        "max_chunk": 512,
        "smallest_chunk": 256,
        "idle_budget": 8 * 512,
        "prefill_together": 4,
        "encode_together": 1,
    }
    assert settings_of(measured, POLICIES[Device.CUDA])["idle_budget"] == 8 * 512
    noisy = replace(
        measured, decode={"rows": {1: 0.01, 2: 0.05, 4: 0.012, 8: 0.014, 16: 0.027}}
    )
    assert settings_of(noisy, CPU)["most_rows"] == 8
    slow = replace(measured, decode={"rows": {1: 0.09, 2: 0.095, 4: 0.12}})
    assert settings_of(slow, CPU)["most_rows"] == 2, (
        "four would take longer than the gap between tokens may be"
    )


def test_a_layout_changes_only_for_a_gain() -> None:
    for slab, placement in ((0.0095, "rows"), (0.005, "slab")):
        measured = Measured(decode={"rows": {1: 0.01}, "slab": {1: slab}})
        assert settings_of(measured, CPU)["placement"] == placement
    assert settings_of(Measured(), CPU) == {}


def test_the_page_has_the_table() -> None:
    page = policy_page.PAGE.read_text(encoding="utf-8")
    assert policy_page.render(page) == page, "python -m tests.policy_page writes it"


# ---- the command ----


def test_the_command_measures_and_prints_the_line_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "PROMPT": 96,
        "CONTEXT": 24,
        "MOST_ROWS": 4,
        "STEPS": 2,
        "RUNS": 1,
        "CHUNKS": (32, 64),
    }.items():
        monkeypatch.setattr(measuring, name, value)
    figures = tmp_path / "figures.jsonl"
    assert cli.main(["bench", "--tune", "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["device"] == "cpu" and set(found["settings"]) <= set(SETTINGS)
    assert set(found["measured"]["decode"]) == {"rows", "slab"}
    assert set(found["measured"]["chunks"]) == {"32", "64"}
    assert all(seconds > 0 for seconds in found["measured"]["decode"]["rows"].values())
    for name in SETTINGS:
        assert name in said
    assert f"VLMBatcher(..., policy={found['settings']})" in said
    (line,) = (line for line in said.splitlines() if "--policy " in line)
    policy = cli.parser().parse_args(["bench", *line.split()[-2:]]).policy
    assert policy == found["settings"]
    with VLMBatcher(default_checkpoint(), policy=policy) as batcher:
        assert batcher.submit_request(QUESTION).result().error is None


def test_the_command_says_nothing_where_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--tune", "--tune-seconds", "0"]) == 0
    assert "--policy" not in capsys.readouterr().out
    assert cli.main(["bench", "--tune", "--kv-bits", "7"]) == 2
    assert "kv_bits is 7" in capsys.readouterr().err
    assert cli.main(["bench", "--tune", "--model", str(tmp_path)]) == 2
    assert "cannot measure the model" in capsys.readouterr().err


def test_the_command_line_says_a_policy() -> None:
    given = {
        "max_chunk": 64,
        "placement": "slab",
        "encode_seconds": 0.1,
        "wide_products": True,
    }
    for command in (["bench"], ["run", "x.png"], ["serve"]):
        text = "max_chunk=64, placement=slab,encode_seconds=0.1,wide_products=true"
        assert cli.parser().parse_args([*command, "--policy", text]).policy == given
    assert check_policy(given) == given and check_policy(None) == {}


def test_a_policy_that_is_none_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text, said in (
        ("chunk=3", "policy has no chunk"),
        ("tuned", "policy has no tuned"),
    ):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["bench", "--policy", text])
        assert said in capsys.readouterr().err
