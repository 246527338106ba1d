"""Copies of a tokenizer for threads: equal, apart, and over one vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.tokenizer_utils import load_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vlm_batch.assets import default_checkpoint
from vlm_batch.inputs import processors
from vlm_batch.inputs.processors import copy_for_thread
from vlm_batch.loading.checkpoints import detokenizer_of

CHECKPOINTS = sorted(
    path.parent for path in default_checkpoint().parent.glob("*/tokenizer.json")
)
TEXTS = (
    "count to 5",
    "  two  spaces\n\ttab",
    "<|im_start|>user\nw\u00f6rld<|im_end|>",
    "<|image_pad|><|image_pad|>x",
    "",
)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_a_copy_is_equal_and_shares_the_vocabulary(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    copied = copy_for_thread(tokenizer)
    assert copied._tokenizer is not tokenizer._tokenizer
    assert copied._tokenizer.to_str() == tokenizer._tokenizer.to_str()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert copied.encode(text) == ids
        assert copied.decode(ids) == tokenizer.decode(ids)
    for name in ("_vocab", "_merges"):
        if name in vars(tokenizer):
            assert vars(copied)[name] is vars(tokenizer)[name]


def test_settings_of_a_copy_are_its_own() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_checkpoint())
    tokenizer._tokenizer.enable_truncation(max_length=3)
    copied = copy_for_thread(tokenizer)
    assert copied._tokenizer.truncation == tokenizer._tokenizer.truncation
    copied._tokenizer.no_truncation()
    copied._tokenizer.enable_padding(length=9)
    copied.add_tokens([AddedToken("<new>")])
    assert tokenizer._tokenizer.truncation["max_length"] == 3
    assert tokenizer._tokenizer.padding is None
    assert tokenizer.convert_tokens_to_ids("<new>") != copied.convert_tokens_to_ids(
        "<new>"
    )


def test_tokens_with_a_gap_between_their_ids_are_copied_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would get other ids in a tokenizer that is made anew."""
    made: list[Any] = []
    theirs = processors._with_same_vocabulary

    def watched(backend: processors.Tokenizer) -> Any:
        made.append(theirs(backend))
        return made[-1]

    monkeypatch.setattr(processors, "_with_same_vocabulary", watched)
    whole = json.loads((default_checkpoint() / "tokenizer.json").read_text())
    last = max(token["id"] for token in whole["added_tokens"])
    whole["added_tokens"].append(
        {**whole["added_tokens"][-1], "id": last + 40, "content": "<far>"}
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=processors.Tokenizer.from_str(json.dumps(whole))
    )
    copied = copy_for_thread(tokenizer)
    assert copied.encode("x<far>") == tokenizer.encode("x<far>")
    assert len(made) == 1


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_the_detokenizer_is_the_one_that_mlx_vlm_chooses(folder: Path) -> None:
    ours = detokenizer_of(folder)
    theirs = load_tokenizer(folder, return_tokenizer=False)
    assert getattr(ours, "func", ours) is getattr(theirs, "func", theirs)
    assert getattr(ours, "keywords", {}) == getattr(theirs, "keywords", {})


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        ({"type": "ByteLevel"}, "BPEStreamingDetokenizer"),
        (None, "NaiveStreamingDetokenizer"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {
                        "type": "Replace",
                        "pattern": {"String": "\u2581"},
                        "content": " ",
                    },
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "SPMStreamingDetokenizer",
        ),
    ],
)
def test_the_decoder_is_found_beside_tokens_that_are_spelled_like_it(
    decoder: object, name: str, tmp_path: Path
) -> None:
    added = [{"content": '"decoder": {"type": "ByteLevel"}'}, {"content": "decoder"}]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "decoder": decoder, "model": {}})
    )
    found = detokenizer_of(tmp_path)
    assert getattr(found, "func", found).__name__ == name
