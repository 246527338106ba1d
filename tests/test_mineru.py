"""MinerU's client reads a page with boxes: its requests, a model that answers in its tags, and its own parser."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image, ImageDraw
from transformers import AutoTokenizer

from tests.serving import Running, serving
from tests.test_clients import REQUESTS, send
from vlm_batch import Request, VLMBatcher
from vlm_batch.assets import default_checkpoint

#: The tokens of MinerU 2.5 in which it answers (mineru-vl-utils 2.0.7, mineru_client.py).
TAGS = [
    "<|box_start|>", "<|box_end|>", "<|ref_start|>", "<|ref_end|>",
    "<|rotate_up|>", "<|rotate_right|>", "<|rotate_down|>", "<|rotate_left|>",
]  # fmt: skip
LAYOUT = (
    "<|box_start|>100 050 900 150<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|>\n"
    "<|box_start|>100 300 900 500<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>\n"
    "<|box_start|>700 600 900 950<|box_end|><|ref_start|>image<|ref_end|><|rotate_left|>"
)
#: What is asked -> what the model answers.
ANSWERS = {"Layout Detection:": LAYOUT, "Text Recognition:": "count to 9: 1 2 3"}


class Says:
    """A logits processor that says given tokens, and then the end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._begin: int | None = None

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        if self._begin is None:
            self._begin = tokens.shape[0]
        at = min(tokens.shape[0] - self._begin, len(self._tokens) - 1)
        is_wanted = mx.arange(logits.shape[-1]) == self._tokens[at]
        return mx.where(is_wanted, logits, -mx.inf)


def scripted(batcher: VLMBatcher) -> VLMBatcher:
    """Let a model's answers be those of ``ANSWERS``; all else is as it is."""
    tokenizer = batcher.processing.tokenizer
    submit = batcher.submit_request

    def said(request: Request) -> Any:
        asked = json.dumps(request.messages, default=str)
        (text,) = [ANSWERS[words] for words in ANSWERS if words in asked]
        ids = [*tokenizer.encode(text, add_special_tokens=False)]
        says = Says([*ids, tokenizer.eos_token_id])
        params = replace(request.params, logits_processors=[says])
        return submit(replace(request, params=params))

    batcher.submit_request = said  # type: ignore[method-assign]
    return batcher


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The embedded checkpoint with MinerU's tags among its special tokens."""
    folder = tmp_path_factory.mktemp("mineru") / "model"
    shutil.copytree(default_checkpoint(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(TAGS, special_tokens=True)
    tokenizer.save_pretrained(folder)
    with serving(
        lambda: scripted(VLMBatcher(folder)), served_names=("model",)
    ) as running:
        yield running


def test_tags_come_whole(server: Running) -> None:
    """Without the package: what its recorded requests are answered, which its parser needs to the letter."""
    layout = send(server, REQUESTS["mineru-1"], most=400)
    assert layout.json["choices"][0]["message"]["content"] == LAYOUT
    text = send(server, REQUESTS["mineru-2"])
    assert text.json["choices"][0]["message"]["content"] == "count to 9: 1 2 3"


def page() -> Image.Image:
    made = Image.new("RGB", (600, 800), "white")
    draw = ImageDraw.Draw(made)
    draw.text((80, 60), "A TITLE", fill="black")
    draw.text((80, 300), "count to 9", fill="black")
    draw.ellipse((430, 500, 530, 740), fill="red")
    return made


def test_the_client_reads_a_page_with_boxes(server: Running) -> None:
    mineru = pytest.importorskip(
        "mineru_vl_utils", reason="MinerU's client: pip install mineru-vl-utils"
    )
    client = mineru.MinerUClient(
        backend="http-client", server_url=server.url, model_name="model"
    )
    try:
        found = client.two_step_extract(page())
    finally:
        asyncio.run(client.client.aclose())
    assert [(one.type, one.bbox, one.angle) for one in found] == [
        ("title", [0.1, 0.05, 0.9, 0.15], 0),
        ("text", [0.1, 0.3, 0.9, 0.5], 0),
        ("image", [0.7, 0.6, 0.9, 0.95], 270),
    ]
    assert [one.content for one in found] == ["count to 9: 1 2 3"] * 2 + [None]
