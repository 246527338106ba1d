"""Boxes that models give are where the page's ink is: drawn on rendered pages, for five families and their scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from tests import read_page
from vlm_batch.cli import main as cli
from vlm_batch.inputs.documents import load_page
from vlm_batch.jobs.boxes import BOX_FORMS, Size
from vlm_batch.jobs.documents import PAGES
from vlm_batch.jobs.pages import EnlargedPages, Enlarging
from vlm_batch.jobs.publishers import PUBLISHERS
from vlm_batch.jobs.questions import Item
from vlm_batch.jobs.sources import Files
from vlm_batch.types import Request, Result

#: A page's blocks as parts of its width and height: a title, two columns, a footer at the very edge.
BLOCKS = (
    (0.10, 0.05, 0.90, 0.10),
    (0.10, 0.20, 0.45, 0.80),
    (0.55, 0.30, 0.90, 0.60),
    (0.00, 0.97, 0.30, 1.00),
)
#: What the processor makes of a page for dots.ocr: its sides are multiples of 28, and its proportions others.
SEEN = (588, 840)
#: The page as it is rendered: 10 by 14 inches at 120 dots.
PAGE = (1200, 1680)

Box = tuple[float, float, float, float]


def deepseek(boxes: list[Box]) -> str:
    lines = []
    for number, box in enumerate(boxes):
        four = [round(one * 999) for one in box]
        lines.append(f"<|ref|>text<|/ref|><|det|>[{four}]<|/det|>\nblock {number}\n")
    return "\n".join(lines)


def dots(boxes: list[Box]) -> str:
    cells = [
        {
            "bbox": [round(one * SEEN[at % 2]) for at, one in enumerate(box)],
            "category": "Text",
            "text": f"block {number}",
        }
        for number, box in enumerate(boxes)
    ]
    return f"```json\n{json.dumps(cells)}\n```"


def docling(boxes: list[Box]) -> str:
    tags = ""
    for number, box in enumerate(boxes):
        places = "".join(f"<loc_{round(one * 500)}>" for one in box)
        tags += f"<text>{places}block {number}</text>\n"
    return f"<doctag>{tags}</doctag>"


def mineru(boxes: list[Box]) -> str:
    lines = []
    for box in boxes:
        four = " ".join(f"{round(one * 1000):03d}" for one in box)
        lines.append(
            f"<|box_start|>{four}<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>"
        )
    return "\n".join(lines)


def florence(boxes: list[Box]) -> str:
    """Corners as its processor quantizes them: the bin in which a number lies."""
    lines = []
    for number, (left, top, right, bottom) in enumerate(boxes):
        corners = (left, top, right, top, right, bottom, left, bottom)
        bins = (min(999, int(one * 1000)) for one in corners)
        lines.append(f"block {number}" + "".join(f"<loc_{one}>" for one in bins))
    return "".join(lines)


def nemotron(boxes: list[Box]) -> str:
    """Parts of a canvas in whose middle the page is."""
    wide, high = ImageOps.contain(Image.new("1", PAGE), SEEN).size
    parts = []
    for number, box in enumerate(boxes):
        left, top, right, bottom = (
            (one * (wide, high)[at % 2] + (SEEN[at % 2] - (wide, high)[at % 2]) / 2)
            / SEEN[at % 2]
            for at, one in enumerate(box)
        )
        begin, end = f"<x_{left:.4f}><y_{top:.4f}>", f"<x_{right:.4f}><y_{bottom:.4f}>"
        parts.append(f"{begin}block {number}{end}<class_Text>")
    return "".join(parts)


def qwen2(boxes: list[Box]) -> str:
    lines = []
    for number, box in enumerate(boxes):
        left, top, right, bottom = (round(one * 1000) for one in box)
        lines.append(
            f"<|object_ref_start|>block {number}<|object_ref_end|>"
            f"<|box_start|>({left},{top}),({right},{bottom})<|box_end|>"
        )
    return "\n".join(lines)


def qwen25(boxes: list[Box]) -> str:
    return qwen(boxes, SEEN)


def qwen3(boxes: list[Box]) -> str:
    return qwen(boxes, (1000, 1000))


def qwen(boxes: list[Box], whole: tuple[int, int]) -> str:
    cells = [
        {
            "bbox_2d": [round(one * whole[at % 2]) for at, one in enumerate(box)],
            "text_content": f"block {number}",
        }
        for number, box in enumerate(boxes)
    ]
    return f"```json\n{json.dumps(cells)}\n```"


def paddle(boxes: list[Box]) -> str:
    """Corners from the lower right one on: the order is no matter."""
    lines = []
    for number, (left, top, right, bottom) in enumerate(boxes):
        corners = (right, bottom, left, bottom, left, top, right, top)
        places = "".join(f"<|LOC_{round(one * 1000)}|>" for one in corners)
        lines.append(f"block {number}{places}")
    return "\n".join(lines)


#: Each family's model, and how it answers.
FAMILIES: dict[str, tuple[str, Callable[[list[Box]], str]]] = {
    "deepseekocr": ("deepseek-ai/DeepSeek-OCR", deepseek),
    "dotsocr": ("rednote-hilab/dots.ocr", dots),
    "florence2": ("microsoft/Florence-2-large-ft", florence),
    "nemotronparse": ("nvidia/NVIDIA-Nemotron-Parse-2.0", nemotron),
    "qwen2vl": ("Qwen/Qwen2-VL-7B-Instruct", qwen2),
    "qwen25vl": ("mlx-community/Qwen2.5-VL-3B-Instruct-4bit", qwen25),
    "qwen3vl": ("Qwen/Qwen3-VL-8B-Instruct", qwen3),
    "granitedocling": ("ibm-granite/granite-docling-258M", docling),
    "mineru": ("opendatalab/MinerU2.5-2509-1.2B", mineru),
    "paddleocrvl": ("PaddlePaddle/PaddleOCR-VL-1.5", paddle),
}


class Boxes:
    """Sees the ink of a page, and answers with its boxes in a family's form."""

    def __init__(self, write: Callable[[list[Box]], str]) -> None:
        self.write = write
        self.pages: list[Image.Image] = []
        self.prompts: list[str | None] = []
        self.bounds: list[tuple[int | None, int | None]] = []

    def __call__(self, args: object) -> AbstractContextManager[Boxes]:
        return nullcontext(self)

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in requests:
            page = request.images[0]
            self.pages.append(page)
            self.prompts.append(request.prompt)
            self.bounds.append((request.min_pixels, request.max_pixels))
            yield Result(
                request_id=str(request.request_id),
                text=self.write(ink_boxes(page)),
                image_sizes=(page.size,),
                model_image_sizes=(SEEN,),
            )


def ink(page: Image.Image) -> Any:
    return np.asarray(page.convert("L")) < 128


def ink_boxes(page: Image.Image) -> list[Box]:
    """The blocks' boxes as parts of the page, by its ink: near each place is one block and no other."""
    dark, boxes = ink(page), []
    width, height = page.size
    for left, top, right, bottom in BLOCKS:
        near = np.zeros_like(dark)
        high = slice(max(0, int((top - 0.02) * height)), int((bottom + 0.02) * height))
        wide = slice(max(0, int((left - 0.02) * width)), int((right + 0.02) * width))
        near[high, wide] = dark[high, wide]
        rows, columns = np.flatnonzero(near.any(1)), np.flatnonzero(near.any(0))
        boxes.append(
            (
                columns[0] / width,
                rows[0] / height,
                (columns[-1] + 1) / width,
                (rows[-1] + 1) / height,
            )
        )
    return boxes


@pytest.fixture
def pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    page = Image.new("L", (1000, 1400), 255)
    for left, top, right, bottom in BLOCKS:
        box = (left * 1000, top * 1400, right * 1000 - 1, bottom * 1400 - 1)
        ImageDraw.Draw(page).rectangle(box, fill=0)
    page.save("page.pdf", resolution=100)
    return "page.pdf"


def read(
    batcher: Boxes, model: str, *more: str, paths: tuple[str, ...] = ("page.pdf",)
) -> int:
    words = ["read", *paths, "--out", "out", "--model", model, "--quiet", *more]
    return cli.main(words, open_batcher=batcher)


def test_every_form_is_drawn_here() -> None:
    assert FAMILIES.keys() == BOX_FORMS.keys()
    named = {publisher.models[0] for publisher in PUBLISHERS if publisher.boxes}
    assert named == BOX_FORMS.keys()
    for publisher in PUBLISHERS:
        if publisher.boxes is not None:
            assert set(publisher.boxes.tasks) <= publisher.prompts.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_boxes_hold_the_ink_of_the_page(pdf: str, family: str) -> None:
    model, write = FAMILIES[family]
    batcher = Boxes(write)
    assert read(batcher, model, "--boxes", "--dpi", "120") == 0
    (page,) = batcher.pages
    assert page.size == PAGE
    (told,) = json.loads(Path("out/page.boxes.json").read_text())["pages"]
    assert (told["page"], told["size"]) == (1, list(PAGE))
    assert len(told["regions"]) == len(BLOCKS)

    dark = ink(page)
    drawn = Image.new("1", page.size)
    # half of a step of the coarsest scale, and rounding
    form = BOX_FORMS[family]
    steps = min(SEEN) if form.scale is None or form.canvas else form.scale
    off = 2 + int(max(page.size) / steps / 2)
    for number, region in enumerate(told["regions"]):
        left, top, right, bottom = region["box"]
        inside = dark[top:bottom, left:right]
        assert inside[off:-off, off:-off].all(), number  # nothing but ink within
        ImageDraw.Draw(drawn).rectangle(
            (left - off, top - off, right + off, bottom + off), fill=1
        )
        assert region["text"] == (None if family == "mineru" else f"block {number}")
    assert not (dark & ~np.asarray(drawn)).any()  # no ink outside of them
    assert (~dark & np.asarray(drawn)).mean() < 0.02


def test_small_pages_are_doubled_for_paddleocr_and_boxes_are_in_their_own_pixels(
    pdf: str,
) -> None:
    """As ``pre_process_for_spotting`` of PaddleX: both sides below 1,500 pixels, Lanczos."""
    load_page("page.pdf", 0, dpi=20).save("page.png")
    batcher = Boxes(paddle)
    model = FAMILIES["paddleocrvl"][0]
    both = ("page.pdf", "page.png")
    assert read(batcher, model, "--boxes", "--dpi", "96", paths=both) == 0
    page, tiny = batcher.pages
    assert (page.size, tiny.size) == ((1920, 2688), (400, 560))
    own = Image.open("page.png").convert("RGB")
    right = own.resize((400, 560), Image.Resampling.LANCZOS)
    assert tiny.tobytes() == right.tobytes()
    # more than 1.5's processor lets through, where a page has so many
    assert batcher.bounds == [(1003521, 1605632), (None, None)]

    (told,) = json.loads(Path("out/page.pdf.boxes.json").read_text())["pages"]
    assert told["size"] == [960, 1344]
    dark = ink(load_page("page.pdf", 0, dpi=96))
    assert dark.shape == (1344, 960)
    drawn = Image.new("1", (960, 1344))
    for region in told["regions"]:
        left, top, right, bottom = region["box"]
        assert dark[top + 3 : bottom - 3, left + 3 : right - 3].all()
        ImageDraw.Draw(drawn).rectangle((left - 3, top - 3, right + 3, bottom + 3), 1)
    assert len(told["regions"]) == len(BLOCKS)
    assert not (dark & ~np.asarray(drawn)).any()

    # from the pages' answers, without asking
    Path("out/page.pdf.boxes.json").unlink()
    more = ("--boxes", "--dpi", "96", "--resume")
    assert read(batcher, model, *more, paths=both) == 0
    assert len(batcher.pages) == 2
    (twice,) = json.loads(Path("out/page.pdf.boxes.json").read_text())["pages"]
    assert twice == told


def test_pages_are_doubled_for_spotting_alone_and_large_ones_stay(pdf: str) -> None:
    batcher = Boxes(paddle)
    model = FAMILIES["paddleocrvl"][0]
    assert read(batcher, model, "--dpi", "72") == 0  # ocr
    assert read(batcher, model, "--dpi", "120", "--boxes", "--overwrite") == 0
    say = ("--dpi", "72", "--boxes", "--overwrite", "--max-pixels", "1M")
    assert read(batcher, model, *say) == 0
    sizes = [page.size for page in batcher.pages]
    assert sizes == [(720, 1008), PAGE, (1440, 2016)]
    bounds = [(None, None), (1003521, 1605632), (None, None)]
    assert batcher.bounds == bounds  # the command line's are the batcher's
    # a run with other sizes is not gone on with
    assert read(batcher, model, "--dpi", "72", "--boxes", "--resume") == 2


def test_a_page_over_the_command_lines_limit_fails_and_what_is_no_picture_stays(
    pdf: str,
) -> None:
    batcher, model = Boxes(paddle), FAMILIES["paddleocrvl"][0]
    load_page("page.pdf", 0, dpi=20).save("page.png")
    say = ("--boxes", "--overwrite", "--max-image-pixels")
    assert read(batcher, model, *say, "10k", paths=("page.png",)) == 1
    (line,) = Path("out", PAGES).read_text().splitlines()
    assert "200 x 280 = 56,000 pixels; at most 10,000" in json.loads(line)["error"]
    assert read(batcher, model, *say, "none", paths=("page.png",)) == 0
    film = EnlargedPages(Files(("film.mp4",)), Enlarging(1500, None))
    (row,) = film.rows()
    request = Item(row.id, row, prompt="Spotting:").request()
    assert [video.source for video in request.videos] == ["film.mp4"]


def test_boxes_of_a_run_without_them_are_written_by_resume(pdf: str) -> None:
    """From the pages' answers, without asking; the text stays."""
    batcher, model = Boxes(docling), FAMILIES["granitedocling"][0]
    assert read(batcher, model) == 0 and not Path("out/page.boxes.json").exists()
    text = Path("out/page.md").read_text()
    assert read(batcher, model, "--boxes", "--resume") == 0
    assert len(batcher.pages) == 1 and Path("out/page.md").read_text() == text
    assert len(json.loads(Path("out/page.boxes.json").read_text())["pages"]) == 1
    assert read(batcher, model, "--overwrite") == 0


def test_the_task_that_gives_boxes_is_asked(
    pdf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batcher = Boxes(mineru)
    assert read(batcher, "MinerU2.5", "--boxes") == 0
    assert batcher.prompts == ["\nLayout Detection:"]
    assert read(batcher, "MinerU2.5", "--boxes", "--task", "table") == 2
    assert "writes none for --task table, but for layout" in capsys.readouterr().err
    assert read(batcher, "some-model", "--boxes") == 2
    assert "nobody says how some-model writes boxes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "answer", "boxes"),
    [
        # cut by its length, in the middle of a box
        ("dotsocr", '[{"bbox": [1, 2, 3, 4], "category": "Text"}, {"bbox": [5,', 1),
        ("dotsocr", '[{"bbox": [1, 2]}, {"bbox": "1"}, {"category": 1}, 3]', 0),
        ("dotsocr", "[" * 100_000 + "{" * 100_000, 0),
        ("deepseekocr", "<|ref|>a<|/ref|><|det|>[[1, 2, 3, 4], [5, 6, 7", 0),
        ("deepseekocr", "<|ref|>a<|/ref|><|det|>[[1,2,9,9],[3,4,8,9]]<|/det|>", 2),
        ("granitedocling", "<text><loc_9><loc_9><loc_1><loc_1>upside down</text>", 1),
        ("granitedocling", "<text><loc_9><loc_9><loc_9><loc_40>no area</text>", 0),
        ("mineru", f"<|box_start|>1 2 {'9' * 5000} 4<|box_end|>", 1),
        ("paddleocrvl", "a<|LOC_1|><|LOC_2|>", 0),
        ("florence2", "a<loc_1><loc_2><loc_3>", 0),
        ("nemotronparse", "<x_0.1><y_0.1>a<x_0.2><y_0.2>", 0),
        ("nemotronparse", "<x_0.1><y_0.1>" * 9999 + "a<x_0.2><y_0.2><class_Text>", 1),
        ("qwen2vl", "<|box_start|>(1,2),(3,4", 0),
        ("qwen25vl", '{"bbox_2d": [1, 2, 3, 4], "label": "a sign"}', 1),
    ],
)
def test_what_is_no_box_is_left_out(family: str, answer: str, boxes: int) -> None:
    found = BOX_FORMS[family].regions(answer, (1000, 1000), (1000, 1000))
    assert len(found) == boxes
    for region in found:
        left, top, right, bottom = region.box
        assert 0 <= left < right <= 1000 and 0 <= top < bottom <= 1000


NEMOTRON = "<x_0.2><y_0.4375>a line<x_0.75><y_0.5><class_Text>"
FLORENCE = (
    "a line<loc_100><loc_200><loc_500><loc_200><loc_500><loc_300><loc_100><loc_300>"
)
QWEN = '[{"bbox_2d": [%d, %d, %d, %d], "text_content": "a line"}]'


@pytest.mark.parametrize(
    ("family", "answer", "page", "seen", "box"),
    [
        # computed by docling 2.143: transform_nemotron_bbox, for canvases of 1664 x 2048
        ("nemotronparse", NEMOTRON, (1240, 1754), None, (121, 749, 1036, 877)),
        ("nemotronparse", NEMOTRON, (2480, 3508), None, (385, 1535, 1954, 1754)),
        ("nemotronparse", NEMOTRON, (3000, 1000), None, (600, 269, 2250, 500)),
        # by transformers: Florence2PostProcessor.dequantize
        ("florence2", FLORENCE, (1000, 2000), None, (100, 401, 500, 601)),
        # by Qwen's cookbooks: int(number / input_width * width), and int(number / 1000 * width)
        ("qwen25vl", QWEN % (147, 210, 294, 420), PAGE, SEEN, (300, 420, 600, 840)),
        ("qwen3vl", QWEN % (250, 250, 500, 500), PAGE, SEEN, (300, 420, 600, 840)),
    ],
)
def test_numbers_of_the_publishers_own_code(
    family: str, answer: str, page: Size, seen: Size | None, box: tuple[int, ...]
) -> None:
    (region,) = BOX_FORMS[family].regions(answer, page, seen)
    assert region.box == box


def test_the_page_lists_the_scales() -> None:
    page = read_page.PAGE.read_text(encoding="utf-8")
    assert page == read_page.render(page), "python -m tests.read_page"
