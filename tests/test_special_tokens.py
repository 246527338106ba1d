"""Special tokens in answers: left out or shown as asked, whole in streams, and shown where a family answers in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from vlm_batch import SamplingParams, VLMBatcher, families
from vlm_batch.assets import default_checkpoint
from vlm_batch.engine.text import ShownText
from vlm_batch.errors import InvalidParameters
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.reserved import ReservedWords
from vlm_batch.jobs.publishers import PUBLISHERS
from vlm_batch.loading import answer_text, load_model
from vlm_batch.registry import ModelSpec

# special tokens of the tiny checkpoint
START, END = "<|vision_start|>", "<|vision_end|>"
MARKED = {
    (spec.family, word): spec for spec in families() for word, _ in spec.special_tokens
}


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


class Says:
    """A logits processor that says given tokens, one after the other, and then the end."""

    def __init__(self, tokens: Sequence[int], prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        wanted = self._tokens[
            min(tokens.shape[0] - self._prompt, len(self._tokens) - 1)
        ]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)


def answer(batcher: VLMBatcher, text: str, **params: Any) -> Any:
    """The handle of a request whose answer is ``text``."""
    tokenizer = batcher.processing.tokenizer
    ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    prompt = tokenizer.encode("count to 9", add_special_tokens=False)
    said = SamplingParams(
        logits_processors=[Says(ids, len(prompt))], max_tokens=40, **params
    )
    return batcher.submit(token_ids=prompt, params=said)


TEXT = f"{START}red 1 2{END}{START} circle{END} 3"


@pytest.mark.parametrize(
    ("skip", "right"),
    [(None, "red 1 2 circle 3"), (True, "red 1 2 circle 3"), (False, TEXT)],
    ids=str,
)
def test_they_are_left_out_or_shown(
    batcher: VLMBatcher, skip: bool | None, right: str
) -> None:
    """The end token is never shown; pieces join to the text, and each special token comes whole."""
    handle = answer(batcher, TEXT, skip_special_tokens=skip)
    pieces = list(handle)
    result = handle.result(timeout=60)
    assert result.finish_reason == "stop"
    assert "".join(pieces) == result.text == right
    theirs = AutoTokenizer.from_pretrained(default_checkpoint())
    assert right == theirs.decode(
        result.token_ids[:-1], skip_special_tokens=skip is not False
    )
    marks = [piece for piece in pieces if "<" in piece or ">" in piece]
    assert all(piece.count("<|") == piece.count("|>") for piece in marks)
    assert len(marks) == (4 if skip is False else 0)


def test_stop_strings_count_what_is_shown(batcher: VLMBatcher) -> None:
    shown = answer(batcher, TEXT, skip_special_tokens=False, stop=[END]).result(
        timeout=60
    )
    assert (shown.text, shown.finish_reason, shown.stop_reason) == (
        f"{START}red 1 2",
        "stop",
        END,
    )
    hidden = answer(batcher, TEXT, skip_special_tokens=True, stop=[END]).result(
        timeout=60
    )
    assert (hidden.text, hidden.stop_reason) == (
        "red 1 2 circle 3",
        batcher.processing.tokenizer.eos_token_id,
    )
    across = answer(
        batcher, TEXT, skip_special_tokens=False, stop=[f"2{END}{START} c"]
    ).result(timeout=60)
    assert (across.text, across.stop_reason) == (f"{START}red 1 ", f"2{END}{START} c")


def test_each_row_of_a_batch_has_its_own(batcher: VLMBatcher) -> None:
    handles = [
        answer(batcher, TEXT, skip_special_tokens=skip)
        for skip in (False, True, None, False) * 3
    ]
    texts = [handle.result(timeout=60).text for handle in handles]
    assert texts == [TEXT, "red 1 2 circle 3", "red 1 2 circle 3", TEXT] * 3


@pytest.mark.parametrize("wrong", [0, "no", 1.0])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidParameters, match="skip_special_tokens"):
        SamplingParams(skip_special_tokens=wrong)


def processing_with(*words: str) -> Processing:
    """The tiny checkpoint's processor, with more special tokens and a token that begins a text."""
    model, processor = load_model(default_checkpoint())
    processor.tokenizer.add_special_tokens(
        {"bos_token": "<|begins|>", "additional_special_tokens": list(words)},
        replace_extra_special_tokens=False,
    )
    return Processing(processor, model.config)


@pytest.mark.parametrize(("family", "word"), MARKED)
def test_a_checkpoint_that_answers_in_them_shows_them(family: str, word: str) -> None:
    """Not those that begin, pad or end a text; and a checkpoint of the same family without such tokens shows none."""
    spec = MARKED[family, word]
    processing = processing_with(word)
    text = answer_text(processing, spec)
    tokenizer = processing.tokenizer
    ids = tokenizer.encode(
        f"<|begins|>{word}red<|endoftext|>{END} 1<|im_end|>", add_special_tokens=False
    )
    assert tokenizer.convert_tokens_to_ids(word) in ids
    shown = ShownText(text.decoder(None))
    pieces = [shown.piece(token) for token in ids]
    assert "".join(pieces) + shown.rest() == f"{word}red{END} 1"
    assert word in pieces
    assert text.decoder(True)(ids) == "red 1"
    assert text.decoder(False)(ids) == tokenizer.decode(ids)
    plain = processing_with("<|another|>")
    found = answer_text(plain, spec)
    assert found.decoder(None)(ids) == found.decoder(True)(ids)


def test_the_table_has_a_source_for_each() -> None:
    assert {
        "idefics3",
        "florence2",
        "nemotron_parse",
        "deepseekocr",
        "paligemma",
        "qwen2_vl",
    } <= {spec.family for spec in MARKED.values()}
    for spec in MARKED.values():
        for word, source in spec.special_tokens:
            assert word.strip() == word
            assert word
            assert len(source) >= len("as deepseekocr")


def test_a_new_checkpoint_shows_them_through_the_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tiny checkpoint stands for one that answers in marks: its family's table names one of its tokens."""
    spec = next(spec for spec in families() if spec.family == "qwen2_vl")
    assert spec.adapter is not None
    marked = ModelSpec(**{**vars(spec), "special_tokens": ((START, "a test"),)})
    monkeypatch.setattr(spec.adapter, "spec", marked)
    with VLMBatcher(default_checkpoint()) as made:
        assert answer(made, TEXT).result(timeout=60).text == TEXT
        assert (
            answer(made, TEXT, skip_special_tokens=True).result(timeout=60).text
            == "red 1 2 circle 3"
        )


def test_an_answer_with_a_form_is_read_without_them(batcher: VLMBatcher) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        json_schema=schema, skip_special_tokens=False, max_tokens=60
    )
    result = batcher.submit(prompt="count to 9", params=params).result(timeout=60)
    assert result.error is None
    assert result.parsed == json.loads(result.text)


def test_prompts_of_publishers_may_begin_with_start_tokens() -> None:
    """Nemotron-Parse's does; its folder has no template that would mark turns with them."""
    (prompt,) = next(
        publisher.prompts.values()
        for publisher in PUBLISHERS
        if "nemotronparse" in publisher.models
    )
    model, processor = load_model(default_checkpoint())
    words = ["<s>", "</s>", "<predict_bbox>", "<predict_classes>", "<output_markdown>"]
    processor.tokenizer.add_special_tokens(
        {"additional_special_tokens": words}, replace_extra_special_tokens=False
    )
    processor.chat_template = processor.tokenizer.chat_template = None
    processing = Processing(processor, model.config)
    ReservedWords(processing).check(prompt)
