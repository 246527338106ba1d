"""Sampling as generation_config.json recommends it: read as transformers reads it, and taken only where somebody says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.cli.run import _sampling_params
from vlm_batch.loading import load_model
from vlm_batch.loading.recommended import read_recommended, recommended_sampling
from vlm_batch.server.asking import Abilities
from vlm_batch.server.config import InvalidConfig, ServerConfig
from vlm_batch.server.doors.chat import ChatRequest, chat_ask
from vlm_batch.server.doors.completions import CompletionRequest, completion_ask

PUBLISHED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
}
TAKEN = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "repetition_context_size": 2**31 - 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that recommends sampling."""
    copied = Path(shutil.copytree(default_checkpoint(), tmp_path / "model"))
    written = json.loads((copied / "generation_config.json").read_text())
    (copied / "generation_config.json").write_text(json.dumps(written | PUBLISHED))
    return copied


@pytest.mark.parametrize(
    ("written", "params"),
    [
        ({}, {}),
        # transformers samples with do_sample alone
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        (
            {
                "do_sample": True,
                "top_k": 20,
                "top_p": 0.8,
                "repetition_penalty": 1.0,
                "temperature": 0.7,
            },
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        ),
        ({"do_sample": True, "top_k": 0, "temperature": 0.1}, {"temperature": 0.1}),
        (
            {"repetition_penalty": 1.05},
            {"repetition_penalty": 1.05, "repetition_context_size": 2**31 - 1},
        ),
    ],
)
def test_what_a_publisher_recommends(
    written: dict[str, Any], params: dict[str, Any]
) -> None:
    """As transformers fills in what generation_config.json leaves out."""
    assert dict(recommended_sampling(written).params) == params
    theirs = transformers.GenerationConfig(**written)
    defaults = theirs._get_default_generation_params()
    whole = defaults | {
        name: value for name, value in theirs.to_dict().items() if value is not None
    }
    if whole["do_sample"]:
        named = ("temperature", "top_k", "top_p")
        ours = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} | params
        assert {name: ours[name] for name in named} == {
            name: whole[name] for name in named
        }


def test_what_is_not_taken_is_said() -> None:
    found = recommended_sampling(
        {
            "num_beams": 3,
            "no_repeat_ngram_size": 3,
            "forced_bos_token_id": 0,
            "eos_token_id": 2,
        }
    )
    assert dict(found.not_taken) == {
        "num_beams": 3,
        "no_repeat_ngram_size": 3,
        "forced_bos_token_id": 0,
    }
    assert (
        str(found)
        == "greedy; not taken: forced_bos_token_id 0, no_repeat_ngram_size 3, num_beams 3"
    )


def test_a_file_out_of_range_recommends_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": -1})
    )
    assert read_recommended(tmp_path).not_taken == {"temperature": -1, "top_k": 50}
    (tmp_path / "generation_config.json").write_text("no json")
    assert read_recommended(tmp_path).params == {}


# Who takes it
# ---------------------------------------------------------------------------------------------------------------------


def test_the_library_says_it_and_takes_nothing_by_itself(folder: Path) -> None:
    with VLMBatcher(folder) as batcher:
        assert dict(batcher.recommended_sampling.params) == TAKEN
        plain = batcher.submit(prompt="count to 5").result(60)
        greedy = batcher.submit(
            prompt="count to 5", params={"temperature": 0.0}
        ).result(60)
        asked = {**batcher.recommended_sampling.params, "seed": 3, "max_tokens": 8}
        sampled = batcher.submit(prompt="count to 5", params=asked).result(60)
    assert plain.token_ids == greedy.token_ids
    assert sampled.ok


def test_a_loaded_model_knows_its_folder(folder: Path) -> None:
    with VLMBatcher(*load_model(folder)) as batcher:
        assert dict(batcher.recommended_sampling.params) == TAKEN


def params_of_run(*options: str) -> Any:
    return _sampling_params(cli.parser().parse_args(["run", "pictures", *options]))


def test_run_takes_it_where_it_is_told_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = params_of_run("--model", str(folder))
    assert (plain.temperature, plain.top_k, plain.max_tokens) == (0.0, 0, 256)
    assert capsys.readouterr().err == ""
    taken = params_of_run(
        "--model",
        str(folder),
        "--sampling",
        "recommended",
        "--top-k",
        "0",
        "--max-tokens",
        "9",
    )
    assert {name: vars(taken)[name] for name in TAKEN} == TAKEN | {"top_k": 0}
    assert taken.max_tokens == 9
    assert (
        "recommends: temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.05"
        in capsys.readouterr().err
    )


def test_run_names_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        "run",
        str(default_checkpoint() / "README.md"),
        "--model",
        "/no/such/folder",
        "--sampling",
        "recommended",
    ]
    assert cli.main(command) == cli.USAGE
    assert "Traceback" not in capsys.readouterr().err


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("config", "body", "expected"),
    [
        ("greedy", {}, {"temperature": 0.0, "top_k": 0}),
        ("greedy", {"sampling": "recommended"}, TAKEN),
        ("recommended", {}, TAKEN),
        (
            "recommended",
            {"sampling": "greedy"},
            {"temperature": 0.0, "repetition_penalty": 1.0},
        ),
        (
            "recommended",
            {"temperature": 0, "top_k": 5},
            TAKEN | {"temperature": 0.0, "top_k": 5},
        ),
        ("recommended", {"temperature": None}, TAKEN),
    ],
)
def test_a_request_says_whether_it_is_taken(
    config: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = ServerConfig(model="m", sampling=config)
    chat = chat_ask(
        ChatRequest.model_validate(CHAT | body), settings, Abilities(recommended=TAKEN)
    )
    text = completion_ask(
        CompletionRequest.model_validate({"prompt": "x", **body}),
        settings,
        Abilities(recommended=TAKEN),
    )
    for asked in (chat, text):
        assert {name: vars(asked.params)[name] for name in expected} == expected


def test_the_server_takes_no_other_word() -> None:
    with pytest.raises(
        InvalidConfig, match="sampling is 'best'; it must be one of greedy, recommended"
    ):
        ServerConfig(model="m", sampling="best")
