"""Regions of a page: boxes that models for documents give in their answers, in the page's pixels.

Each family has its own form and its own scale. ``BOX_FORMS`` has what their publishers say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Size = tuple[int, int]


@dataclass(frozen=True)
class Region:
    """A part of a page.

    Attributes:
        box: Left, top, right and bottom, in pixels of the page as it was rendered.
        label: What the model takes it for; None where it says nothing.
        text: What it read there, as it wrote it; None likewise.
    """

    box: tuple[int, int, int, int]
    label: str | None
    text: str | None


@dataclass(frozen=True)
class _Found:
    """A region as the model wrote it: x and y in turn, of two corners or of a polygon."""

    numbers: Sequence[float]
    label: str | None = None
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class BoxForm:
    """A family's way to write boxes.

    Attributes:
        tasks: Tasks of its publisher whose answers have boxes, the best first.
        scale: The number that stands for a page's whole width, and for its whole height. None: boxes are in pixels of the
            picture that the model saw, which its processor may have scaled.
        found: Finds them in an answer.
        source: Where this is published.
    """

    tasks: tuple[str, ...]
    scale: int | None
    found: Callable[[str], Iterator[_Found]]
    source: str

    def regions(self, answer: str, page: Size, seen: Size | None) -> list[Region]:
        """Return an answer's regions, in its order. What is no box, or has no area, is left out.

        Args:
            answer: The model's text.
            page: Width and height of the page in pixels.
            seen: Those of the picture after the model's processor; None if nobody knows.
        """
        whole = seen or page
        if self.scale is not None:
            whole = (self.scale, self.scale)
        regions = []
        for one in self.found(answer):
            box = _in_pixels(one.numbers, whole, page)
            if box is not None:
                regions.append(Region(box, one.label, one.text))
        return regions


def _in_pixels(
    numbers: Sequence[float], whole: Size, page: Size
) -> tuple[int, int, int, int] | None:
    """Return the upright box around points, within the page; None without an area."""
    left, right = _extent(numbers[0::2], whole[0], page[0])
    top, bottom = _extent(numbers[1::2], whole[1], page[1])
    has_area = left < right and top < bottom
    if has_area:
        return (left, top, right, bottom)
    return None


def _extent(numbers: Sequence[float], whole: int, length: int) -> tuple[int, int]:
    pixels = [round(number * length / whole) for number in numbers]
    return max(0, min(pixels)), min(length, max(pixels))


# ---- what the families write ----

_REFERRED = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>(.*?)<\|/det\|>", re.DOTALL)
_FOUR = re.compile(r"\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]")


def _grounded(answer: str) -> Iterator[_Found]:
    """``<|ref|>title<|/ref|><|det|>[[127, 81, 870, 110]]<|/det|>``, and behind it the region's text."""
    for match, text in _with_what_follows(_REFERRED, answer):
        label = _or_none(match[1])
        for four in _FOUR.findall(match[2]):
            yield _Found(_numbers(four), label, text)


def _or_none(text: str) -> str | None:
    """Return a text without the space around it; None if nothing is left."""
    return text.strip() or None


def _cells(answer: str) -> Iterator[_Found]:
    """A list of ``{"bbox": [x1, y1, x2, y2], "category": ..., "text": ...}``, which may be cut."""
    decoder = json.JSONDecoder()
    begin = answer.find("{")
    while begin != -1:
        try:
            cell, end = decoder.raw_decode(answer, begin)
        except (ValueError, RecursionError):  # the answer ended by its length
            return
        box = cell.get("bbox")
        if _is_box(box):
            yield _Found(box, cell.get("category"), cell.get("text"))
        begin = answer.find("{", end)


def _is_box(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(map(_is_place, value))


def _is_place(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and abs(value) < 1e9


_TAG = re.compile(r"<(\w+)><loc_(\d+)><loc_(\d+)><loc_(\d+)><loc_(\d+)>")


def _doctags(answer: str) -> Iterator[_Found]:
    """``<text><loc_58><loc_44><loc_426><loc_91>Dear Ada,</text>``."""
    for match in _TAG.finditer(answer):
        text, _, _ = answer[match.end() :].partition(f"</{match[1]}>")
        yield _Found(_numbers(match.groups()[1:]), match[1], _or_none(text))


_BOXED = re.compile(
    r"<\|box_start\|>\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s*<\|box_end\|>(?:<\|ref_start\|>(.*?)<\|ref_end\|>)?"
)


def _boxed(answer: str) -> Iterator[_Found]:
    """``<|box_start|>045 120 955 180<|box_end|><|ref_start|>title<|ref_end|>``, a line a region."""
    for match in _BOXED.finditer(answer):
        yield _Found(_numbers(match.groups()[:4]), match[5])


_SPOTTED = re.compile(
    r"([^<]*)(?:<\|TEXT_END\|>)?(?:<\|LOC_BEGIN\|>)?((?:<\|LOC_\d+\|>){8})"
)
_NUMBER = re.compile(r"\d+")


def _spotted(answer: str) -> Iterator[_Found]:
    """A line's text, and four corners: ``Hello<|LOC_100|><|LOC_200|>...``."""
    for match in _SPOTTED.finditer(answer):
        corners = _numbers(_NUMBER.findall(match[2]))
        yield _Found(corners, None, _or_none(match[1]))


def _numbers(texts: Sequence[str]) -> list[int]:
    return [int(text[:9]) for text in texts]  # a loop may write longer ones


def _with_what_follows(
    pattern: re.Pattern[str], answer: str
) -> Iterator[tuple[re.Match[str], str | None]]:
    """Yield matches, each with the text between it and the next."""
    matches = list(pattern.finditer(answer))
    ends = [match.start() for match in matches[1:]]
    for match, end in zip(matches, [*ends, len(answer)], strict=False):
        yield match, _or_none(answer[match.end() : end])


#: By publisher's first name in ``publishers.PUBLISHERS``.
BOX_FORMS: Mapping[str, BoxForm] = MappingProxyType(
    {
        "deepseekocr": BoxForm(
            tasks=("markdown", "layout"),
            scale=999,
            found=_grounded,
            source="draw_bounding_boxes in modeling_deepseekocr.py of deepseek-ai/DeepSeek-OCR",
        ),
        "dotsocr": BoxForm(
            tasks=("layout",),
            scale=None,
            found=_cells,
            source="post_process_cells in dots_ocr/utils/layout_utils.py of rednote-hilab/dots.ocr",
        ),
        "granitedocling": BoxForm(
            tasks=("markdown",),
            scale=500,
            found=_doctags,
            source="docling-core: DocTags locations are in 0..500",
        ),
        "mineru": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_boxed,
            source="parse_layout_output in mineru_client.py of mineru-vl-utils",
        ),
        "paddleocrvl": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_spotted,
            source="post_process_for_spotting in paddlex: inference/pipelines/paddleocr_vl/uilts.py",
        ),
    }
)
