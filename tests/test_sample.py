"""The embedded sample reads what the guides ask of it, in one batch and by a schema."""

from __future__ import annotations

import json
from pathlib import Path

from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.assets import sample_images, sample_model

SHORT = SamplingParams(max_tokens=24)
TRUTH = {
    ("receipt", "What is the total?"): "17.80",
    ("receipt", "Which shop is this?"): "CORNER STORE",
    ("receipt", "How much was the bread?"): "2.40",
    ("receipt", "describe the picture"): "a receipt of CORNER STORE, total 17.80",
    (
        "red_circle_above_blue_triangle",
        "describe the picture",
    ): "a red circle above a blue triangle",
    (
        "yellow_triangle_left_of_green_cross",
        "what is left of the cross?",
    ): "a yellow triangle",
    ("digits_728", "read the digits"): "728",
}
PRICES = ["2.40", "1.15", "3.36", "5.90", "1.79", "3.20"]


def test_the_sample_reads_a_receipt_and_knows_shapes() -> None:
    pictures = {path.stem: path for path in sample_images()}
    amount = {"type": "string", "pattern": r"^[0-9]{1,5}\.[0-9]{2}$"}
    total = {
        "type": "object",
        "properties": {"total": amount},
        "required": ["total"],
        "additionalProperties": False,
    }
    with VLMBatcher(sample_model()) as batcher:
        asked = {
            one: batcher.submit(pictures[one[0]], one[1], params=SHORT) for one in TRUTH
        }
        whole = batcher.submit(
            pictures["receipt"],
            "Read this receipt.",
            params=SamplingParams(max_tokens=300),
        )
        held = batcher.submit(
            pictures["receipt"],
            "Read this receipt.",
            params=SamplingParams(json_schema=total),
        )
        assert {
            one: handle.result(timeout=120).text for one, handle in asked.items()
        } == TRUTH
        receipt = json.loads(whole.result(timeout=120).text)
        assert held.result(timeout=120).parsed == {"total": "17.80"}
    assert ([item["price"] for item in receipt["items"]], receipt["total"]) == (
        PRICES,
        "17.80",
    )


IMAGES = Path(__file__).parent.parent / "fixtures" / "images"
SAID = {
    (
        "short_letter.png",
        "Read the text.",
    ): "Dear Vera,\nthe parcel left on Monday. It should\nbe with you before the end of the week.\n"
    "Please keep the box: we take it back.\nThe invoice is number 4471.\nPaula Berg, Lisbon",
    ("supermarket_receipt.jpg", "What is the date?"): "2024-03-09",
    ("supermarket_receipt.jpg", "What is the total?"): "16.45",
    ("sales_by_city.png", "Which bar is the highest?"): "Rome",
    ("sales_by_city.png", "Read the chart."): "Oslo: 42\nRome: 88\nLima: 61\nCairo: 27",
    ("table_of_prices.png", "What is the Price of Desk?"): "129.00",
}


def test_the_sample_reads_a_letter_a_chart_and_a_table() -> None:
    with VLMBatcher(sample_model()) as batcher:
        params = SamplingParams(max_tokens=120)
        asked = {
            one: batcher.submit(IMAGES / one[0], one[1], params=params) for one in SAID
        }
        assert {
            one: handle.result(timeout=120).text for one, handle in asked.items()
        } == SAID
