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
        canvas: Width and height on which the processor centres a page, after it has made a larger one smaller. Numbers are
            parts of the canvas then. None: the processor adds nothing around a page.
        found: Finds them in an answer.
        source: Where this is published.
    """

    tasks: tuple[str, ...]
    scale: int | None
    canvas: Size | None = None
    found: Callable[[str], Iterator[_Found]]
    source: str

    def regions(self, answer: str, page: Size, seen: Size | None) -> list[Region]:
        """Return an answer's regions, in its order. What is no box, or has no area, is left out.

        Args:
            answer: The model's text.
            page: Width and height of the page in pixels.
            seen: Those of the picture after the model's processor; None if nobody knows.
        """
        across, down = self._sides(page, seen)
        regions = []
        for one in self.found(answer):
            box = _in_pixels(one.numbers, across, down, page)
            if box is not None:
                regions.append(Region(box, one.label, one.text))
        return regions

    def _sides(self, page: Size, seen: Size | None) -> tuple[_Side, _Side]:
        """Return where a page's width and height are among the model's numbers."""
        if self.canvas is not None:
            return _on_canvas(page, seen or self.canvas)
        if self.scale is not None:
            return _Side(0, self.scale), _Side(0, self.scale)
        width, height = seen or page
        return _Side(0, width), _Side(0, height)


@dataclass(frozen=True)
class _Side:
    """A page's side among a model's numbers: where it begins, and its length."""

    begin: float
    length: float


def _on_canvas(page: Size, canvas: Size) -> tuple[_Side, _Side]:
    """Return a page's sides as parts of the canvas on which it is centred, in its own proportions."""
    width, height = page
    if height > canvas[1]:
        width, height = int(canvas[1] * page[0] / page[1]), canvas[1]
    if width > canvas[0]:
        width, height = canvas[0], int(canvas[0] * page[1] / page[0])
    across = _Side((canvas[0] - width) // 2 / canvas[0], width / canvas[0])
    down = _Side((canvas[1] - height) // 2 / canvas[1], height / canvas[1])
    return across, down


def _in_pixels(
    numbers: Sequence[float], across: _Side, down: _Side, page: Size
) -> tuple[int, int, int, int] | None:
    """Return the upright box around points, within the page; None without an area."""
    left, right = _extent(numbers[0::2], across, page[0])
    top, bottom = _extent(numbers[1::2], down, page[1])
    if left >= right or top >= bottom:
        return None
    return left, top, right, bottom


def _extent(numbers: Sequence[float], side: _Side, length: int) -> tuple[int, int]:
    pixels = [round((one - side.begin) * length / side.length) for one in numbers]
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


#: What models call a cell's box, its kind and its text.
_BOX_NAMES = ("bbox", "bbox_2d")
_LABEL_NAMES = ("category", "label")
_TEXT_NAMES = ("text", "text_content")


def _cells(answer: str) -> Iterator[_Found]:
    """A list of ``{"bbox": [x1, y1, x2, y2], "category": ..., "text": ...}``, which may be cut."""
    decoder = json.JSONDecoder()
    begin = answer.find("{")
    while begin != -1:
        try:
            cell, end = decoder.raw_decode(answer, begin)
        except (ValueError, RecursionError):  # the answer ended by its length
            return
        box = _first(cell, _BOX_NAMES)
        if _is_box(box):
            yield _Found(box, _first(cell, _LABEL_NAMES), _first(cell, _TEXT_NAMES))
        begin = answer.find("{", end)


def _first(cell: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((cell[name] for name in names if name in cell), None)


def _is_box(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(map(_is_place, value))


def _is_place(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and abs(value) < 1e9


_TAG = re.compile(r"<(\w+)><loc_(\d+)><loc_(\d+)><loc_(\d+)><loc_(\d+)>")


def _doctags(answer: str) -> Iterator[_Found]:
    """``<text><loc_58><loc_44><loc_426><loc_91>Dear Ada,</text>``; regions may be within others."""
    for match in _TAG.finditer(answer):
        text, _, _ = answer[match.end() :].partition(f"</{match[1]}>")
        yield _Found(_numbers(match.groups()[1:]), match[1], _or_none(text))


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Marked:
    """A region a match: its groups are ``box``, whose numbers are x and y in turn, and perhaps ``label`` and ``text``.

    ``offset`` is added to the numbers.
    """

    pattern: re.Pattern[str]
    offset: float = 0

    def __call__(self, answer: str) -> Iterator[_Found]:
        for match in self.pattern.finditer(answer):
            groups = match.groupdict()
            numbers = _numbers(_NUMBER.findall(groups["box"]))
            yield _Found(
                [one + self.offset for one in numbers],
                groups.get("label"),
                _or_none(groups.get("text") or ""),
            )


#: ``<|box_start|>045 120 955 180<|box_end|><|ref_start|>title<|ref_end|>``, a line a region.
_BOXED = _Marked(
    re.compile(
        r"<\|box_start\|>\s*(?P<box>\d+\s+\d+\s+\d+\s+\d+)\s*<\|box_end\|>"
        r"(?:<\|ref_start\|>(?P<label>.*?)<\|ref_end\|>)?"
    )
)
#: A line's text, and four corners: ``Hello<|LOC_100|><|LOC_200|>...``.
_SPOTTED = _Marked(
    re.compile(
        r"(?P<text>[^<]*)(?:<\|TEXT_END\|>)?(?:<\|LOC_BEGIN\|>)?(?P<box>(?:<\|LOC_\d+\|>){8})"
    )
)
#: A line's text, and four corners in bins: ``Hello<loc_100><loc_200>...``. A number is its bin's middle.
_QUADS = _Marked(re.compile(r"(?P<text>[^<]*)(?P<box>(?:<loc_\d+>){8})"), offset=0.5)
#: ``<|object_ref_start|>a title<|object_ref_end|><|box_start|>(176,106),(232,160)<|box_end|>``.
_REFERENTS = _Marked(
    re.compile(
        r"(?:<\|object_ref_start\|>(?P<text>[^<]*)<\|object_ref_end\|>)?\s*"
        r"<\|box_start\|>\s*(?P<box>\(\d+,\s*\d+\),\s*\(\d+,\s*\d+\))\s*<\|box_end\|>"
    )
)


_CLASSED = re.compile(
    r"<x_(\d+(?:\.\d+)?)><y_(\d+(?:\.\d+)?)>((?:(?!<x_\d).)*)<x_(\d+(?:\.\d+)?)><y_(\d+(?:\.\d+)?)><class_([^>]+)>",
    re.DOTALL,
)


def _classed(answer: str) -> Iterator[_Found]:
    """``<x_0.1><y_0.05># Title<x_0.9><y_0.1><class_Title>``: parts of the picture that the model saw."""
    for match in _CLASSED.finditer(answer):
        left, top, text, right, bottom, label = match.groups()
        numbers = [float(one[:20]) for one in (left, top, right, bottom)]
        yield _Found(numbers, label, _or_none(text))


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
        "florence2": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_QUADS,
            source="Florence2PostProcessor.dequantize in transformers: the middles of 1,000 bins",
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
            found=_BOXED,
            source="parse_layout_output in mineru_client.py of mineru-vl-utils",
        ),
        "nemotronparse": BoxForm(
            tasks=("markdown",),
            scale=1,
            canvas=(1664, 2048),
            found=_classed,
            source="docling 2.143: transform_nemotron_bbox in nemotron_parse_utils.py",
        ),
        "paddleocrvl": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_SPOTTED,
            source="post_process_for_spotting in paddlex: inference/pipelines/paddleocr_vl/uilts.py",
        ),
        "qwen2vl": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_REFERENTS,
            source="Qwen2-VL's report, arXiv:2409.12191, section 2.2; the prompt is ours",
        ),
        "qwen25vl": BoxForm(
            tasks=("layout",),
            scale=None,
            found=_cells,
            source="plot_text_bounding_boxes in the cookbooks of QwenLM/Qwen2.5-VL",
        ),
        "qwen3vl": BoxForm(
            tasks=("layout",),
            scale=1000,
            found=_cells,
            source="plot_bounding_boxes in the cookbooks of QwenLM/Qwen3-VL",
        ),
    }
)
