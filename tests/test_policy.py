"""The settings of each kind of device: one table, what is measured here, and what a caller says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests import policy_page
from vlm_batch import Request, VLMBatcher, tuning
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.engine.defaults import for_policy
from vlm_batch.engine.scheduler import SchedulerConfig
from vlm_batch.loading import EngineOptions, adapt, choose_policy, load_model
from vlm_batch.policy import POLICIES, SETTINGS, TUNED, Chosen, Policy, check_policy, policy_for
from vlm_batch.runtime.device import Device
from vlm_batch.tuning import Measured, settings_of

CPU = POLICIES[Device.CPU]
QUESTION = Request(prompt="count to 5", params={"max_tokens": 8})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing that was found on this machine, and nothing that is found here stays."""
    monkeypatch.setenv("VLM_BATCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def adapter() -> Any:
    return adapt(load_model(default_checkpoint())[0])


def test_every_setting_is_in_the_table_with_a_source_for_every_device() -> None:
    assert set(POLICIES) == set(Device)
    assert list(SETTINGS) == [field.name for field in fields(Policy)]
    for setting in SETTINGS.values():
        assert setting.meaning
        for kind in Device:
            assert setting.source(kind)


def test_nothing_but_the_table_names_a_devices_settings() -> None:
    """A config that leaves all open has exactly the policy's values, and one that says something keeps it."""
    for policy in POLICIES.values():
        filled = for_policy(SchedulerConfig(), policy)
        assert (filled.max_rows, filled.first_rows) == (policy.most_rows, policy.first_rows)
        shared = {
            "placement",
            "few_bits",
            "grid",
            "call_tokens",
            "call_patches",
            "most_patches",
            "most_rows",
            "first_rows",
        }
        for name in SETTINGS.keys() - shared:
            assert vars(filled)[name] == vars(policy)[name]
    said = SchedulerConfig(max_rows=3, max_chunk=7, prefill_budget=9, encode_seconds=1.0, encode_ahead=0)
    filled = for_policy(said, POLICIES[Device.CUDA])
    assert (filled.max_rows, filled.first_rows, filled.max_chunk, filled.slack) == (3, None, 7, 0)
    assert (filled.encode_seconds, filled.encode_ahead) == (1.0, 0)


def test_what_is_found_here_and_what_is_said_go_over_the_table() -> None:
    chosen = Chosen(Device.CPU, {"max_chunk": 512, "most_rows": 24, "first_rows": 24}, {"max_chunk": 128})
    assert chosen.policy == replace(CPU, max_chunk=128, most_rows=24, first_rows=24)
    described = chosen.describe()
    assert list(described) == list(SETTINGS)
    assert described["max_chunk"] == {"value": 128, "source": "said: VLMBatcher(policy=)"}
    assert described["most_rows"] == {"value": 24, "source": "measured here: vlm-batch bench --tune"}
    assert described["grid"]["source"].startswith("the table for cpu: ")


@pytest.mark.parametrize(
    ("said", "rows"),
    [({"most_rows": 4}, (4, 4)), ({"first_rows": 48}, (48, 48)), ({"most_rows": 24}, (16, 24))],
)
def test_one_bound_of_the_rows_moves_the_other(said: Mapping[str, int], rows: tuple[int, int]) -> None:
    policy = Chosen(Device.CPU, {}, said).policy
    assert (policy.first_rows, policy.most_rows) == rows


def test_another_layout_comes_with_the_settings_that_fit_it() -> None:
    """But for what goes by how fast the device is."""
    slabs = Chosen(Device.CPU, {}, {"placement": "slab"}).policy
    assert slabs == replace(POLICIES[Device.CUDA], idle_budget=CPU.idle_budget)
    assert policy_for("rows", Device.METAL) == replace(CPU, idle_budget=POLICIES[Device.METAL].idle_budget)
    assert policy_for("slab", Device.METAL) == POLICIES[Device.METAL]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("fast", "policy is 'fast'; it must be 'tuned', 'device' or a mapping"),
        (3, "policy is 3"),
        ({"rows": 3}, "policy has no rows; it has placement, few_bits, first_rows"),
        ({"max_chunk": 0}, "max_chunk is 0; it must be an integer of at least 1"),
        ({"max_chunk": True}, "max_chunk is True"),
        ({"placement": "heap"}, "placement is 'heap'; it must be one of rows, slab"),
        ({"few_bits": "some"}, "few_bits is 'some'; it must be one of packed, unpacked, kernel"),
        ({"encode_seconds": -1}, "encode_seconds is -1"),
        ({"grid": 100}, "grid is 100; it must be a multiple of 256"),
        ({"first_rows": 9, "most_rows": 8}, "first_rows is 9, above most_rows, which is 8"),
    ],
)
def test_what_is_no_policy_is_refused(said: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VLMBatcher(default_checkpoint(), policy=said)


def test_a_batcher_runs_with_what_is_said_and_tells_it() -> None:
    said = {"max_chunk": 16, "smallest_chunk": 16, "idle_budget": 16, "placement": "slab", "most_rows": 4}
    with VLMBatcher(default_checkpoint()) as plain, VLMBatcher(default_checkpoint(), policy=said) as other:
        assert plain.policy["max_chunk"]["value"] == CPU.max_chunk
        assert {name: other.policy[name]["value"] for name in said} == said
        assert other.stats().most_rows == 4
        config = other._loop.generator.scheduler.config
        assert (config.max_chunk, config.idle_budget, config.max_rows) == (16, 16, 4)
        one, two = plain.submit_request(QUESTION).result(), other.submit_request(QUESTION).result()
        assert one.token_ids == two.token_ids and one.error is None


# ---- what is measured here ----


def test_rows_end_where_they_stop_paying_and_chunks_where_longer_ones_gain_nothing() -> None:
    measured = Measured(
        decode={
            "rows": {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 12: 0.021, 16: 0.028, 24: 0.042},
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
    noisy = replace(measured, decode={"rows": {1: 0.01, 2: 0.05, 4: 0.012, 8: 0.014, 16: 0.027}})
    assert settings_of(noisy, CPU)["most_rows"] == 8
    slow = replace(measured, decode={"rows": {1: 0.09, 2: 0.095, 4: 0.12}})
    assert settings_of(slow, CPU)["most_rows"] == 2, "four would take longer than the gap between tokens may be"


def test_a_layout_changes_only_for_a_gain() -> None:
    for slab, placement in ((0.0095, "rows"), (0.005, "slab")):
        measured = Measured(decode={"rows": {1: 0.01}, "slab": {1: slab}})
        assert settings_of(measured, CPU)["placement"] == placement
    assert settings_of(Measured(), CPU) == {}


def test_what_was_kept_is_this_models_on_this_device_and_with_these_keys(adapter: Any) -> None:
    from vlm_batch.caches.quantisation import KVQuantisation

    assert tuning.tuned_settings(adapter, None) == {}
    kept = tuning.keep(tuning.key_of(adapter, None), {"max_chunk": 64}, Measured(chunks={64: 0.1}))
    assert kept is not None and Path(kept).parent.name == "tuned"
    assert tuning.tuned_settings(adapter, None) == {"max_chunk": 64}
    assert tuning.tuned_settings(adapter, KVQuantisation(8)) == {}
    found = json.loads(Path(kept).read_text(encoding="utf-8"))
    assert found["found"]["measured"]["chunks"] == {"64": 0.1}
    for broken in ({"max_chunk": "64"}, {"max_chunk": 0}, {"chunk": 64}, [64], None):
        found["found"]["settings"] = broken
        Path(kept).write_text(json.dumps(found), encoding="utf-8")
        assert tuning.tuned_settings(adapter, None) == {}
    Path(kept).write_text("{", encoding="utf-8")
    assert tuning.tuned_settings(adapter, None) == {}


def test_a_batcher_takes_over_what_was_found_unless_told_otherwise(adapter: Any) -> None:
    tuning.keep(tuning.key_of(adapter, None), {"max_chunk": 64, "most_rows": 3, "first_rows": 3}, Measured())
    with VLMBatcher(default_checkpoint()) as batcher:
        assert batcher.policy["max_chunk"] == {"value": 64, "source": "measured here: vlm-batch bench --tune"}
        assert batcher.stats().most_rows == 3
    with VLMBatcher(default_checkpoint(), max_rows=5) as batcher:
        assert batcher.stats().most_rows == 5
    with VLMBatcher(default_checkpoint(), policy="device") as batcher:
        assert batcher.policy["max_chunk"]["value"] == CPU.max_chunk
    chosen = choose_policy(adapter, EngineOptions(policy={"idle_budget": 32}))
    assert (chosen.policy.max_chunk, chosen.policy.idle_budget) == (CPU.max_chunk, 32), (
        "said settings go over the table's"
    )


def test_what_was_found_moves_no_bit_of_a_reproducible_answer(adapter: Any) -> None:
    tuning.keep(tuning.key_of(adapter, None), {"placement": "slab", "grid": 512, "max_chunk": 64}, Measured())
    assert choose_policy(adapter, EngineOptions()).policy.placement == "slab"
    held = choose_policy(adapter, EngineOptions(reproducible=True)).policy
    assert (held.placement, held.grid, held.max_chunk) == ("rows", CPU.grid, 64)


def test_the_page_has_the_table() -> None:
    page = policy_page.PAGE.read_text(encoding="utf-8")
    assert policy_page.render(page) == page, "python -m tests.policy_page writes it"


# ---- the command ----


def test_the_command_measures_shows_and_keeps(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PROMPT": 96, "CONTEXT": 24, "MOST_ROWS": 4, "STEPS": 2, "RUNS": 1, "CHUNKS": (32, 64)}.items():
        monkeypatch.setattr(tuning, name, value)
    figures = own_folder / "figures.jsonl"
    assert cli.main(["bench", "--tune", "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["device"] == "cpu" and set(found["settings"]) <= set(SETTINGS)
    assert set(found["measured"]["decode"]) == {"rows", "slab"}
    assert set(found["measured"]["chunks"]) == {"32", "64"}
    assert all(seconds > 0 for seconds in found["measured"]["decode"]["rows"].values())
    for name in SETTINGS:
        assert name in said
    assert "kept in" in said and Path(found["kept"]).is_file()
    with VLMBatcher(default_checkpoint()) as batcher:
        for name, value in found["settings"].items():
            assert batcher.policy[name]["value"] == value
        assert batcher.submit_request(QUESTION).result().error is None


def test_the_command_keeps_nothing_where_nothing_is_wanted_or_measured(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--tune", "--no-keep", "--tune-seconds", "0"]) == 0
    assert "kept" not in capsys.readouterr().out
    assert not (own_folder / "tuned").exists()
    assert cli.main(["bench", "--tune", "--kv-bits", "7"]) == 2
    assert "kv_bits is 7" in capsys.readouterr().err
    assert cli.main(["bench", "--tune", "--model", str(own_folder)]) == 2
    assert "cannot measure the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("tuned", TUNED),
        ("device", "device"),
        (
            "max_chunk=64,placement=slab,encode_seconds=0.1",
            {"max_chunk": 64, "placement": "slab", "encode_seconds": 0.1},
        ),
    ],
)
def test_the_command_line_says_a_policy(text: str, given: Any) -> None:
    for command in (["bench"], ["run", "x.png"], ["serve"]):
        assert cli.parser().parse_args([*command, "--policy", text]).policy == given
    assert check_policy(given) == given


def test_a_policy_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["bench", "--policy", "chunk=3"])
    assert "policy has no chunk" in capsys.readouterr().err
