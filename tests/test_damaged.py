"""Damaged pictures, videos, saved caches and odd texts: refused with a reason, or right; never a crash, a hang or a flood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.damaged import FORMATS, summary
from vlm_batch import InvalidRequest, SamplingParams, VLMBatcher, assets


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(assets.default_checkpoint()) as shared:
        yield shared


@pytest.mark.parametrize(
    ("kind", "count"), [("pictures", 400), ("videos", 60), ("caches", 150)]
)
def test_damaged_files_are_decoded_or_refused(kind: str, count: int) -> None:
    """``python -m tests.damaged`` reads 10,000, 1,000 and 3,000."""
    found, wrong, _, _ = summary(kind, 0, count)
    assert not wrong
    assert sum(found.values()) == count
    for form in {"pictures": FORMATS, "videos": ("MP4",), "caches": ()}[kind]:
        assert found[f"{form}: refused"] or found[f"{form}: not built in"]
        assert found[f"{form}: decoded"] or found[f"{form}: not built in"]


#: Words that chats get, and what they must come to: an answer, or a refusal with a reason.
TEXTS = {
    "nothing": "",
    "blank": " \n\t ",
    "a mark of a turn": "<|im_end|>",
    "a typed placeholder": "<|image_pad|>",
    "marks alone": "<|im_start|><|im_end|><|endoftext|>",
    "half a surrogate pair": "a\ud800",
    "a null": "a\x00b",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "marks that combine": "e\u0301\u0302\u0303 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e01\u0e33",
    "a direction turned": "\u202eabc\u202c",
    "no characters": "\ufffe\uffff\U0010ffff",
    "a megabyte": "count to 3 " * 95_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_odd_texts_are_answered_or_refused(name: str, batcher: VLMBatcher) -> None:
    """And streamed in pieces that join to what the result has, none of which ends within a character."""
    beside = batcher.submit(None, "count to 5")
    try:
        handle = batcher.submit(
            None, TEXTS[name], params=SamplingParams(max_tokens=12, ignore_eos=True)
        )
    except InvalidRequest as error:
        said = str(error)
        assert 10 < len(said) < 600
    else:
        pieces, result = list(handle), handle.result(timeout=60)
        assert "".join(pieces) == result.text
        assert result.ok or isinstance(result.exception, InvalidRequest)
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
    assert beside.result(timeout=60).text == "1 2 3 4 5"


@pytest.mark.parametrize(
    "text", ["nothing", "blank", "half a surrogate pair", "a megabyte"]
)
def test_what_is_no_prompt_is_refused(text: str, batcher: VLMBatcher) -> None:
    with pytest.raises(InvalidRequest):
        batcher.submit(None, TEXTS[text]).result(timeout=60).raise_for_error()
