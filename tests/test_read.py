"""``vlm-batch read``: documents page by page, one text each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pytest
from PIL import Image

from tests import documents, read_page
from vlm_batch.cli import main as cli
from vlm_batch.jobs.documents import PAGES, is_loop, names_of
from vlm_batch.jobs.pages import PageRange
from vlm_batch.jobs.publishers import PUBLISHERS, TASKS, Publisher, publisher_of
from vlm_batch.jobs.rows import InvalidJob, JobRow
from vlm_batch.jobs.sources import Pdf
from vlm_batch.types import Request, Result, SamplingParams

LOOP = (
    "A hive in June holds some forty thousand bees, and no two of them do the same work. "
    * 20
)


class Pages:
    """Answers a page with its name and what it was asked; some fail, some fall into a loop."""

    def __init__(
        self, *, bad: str = "", loops: int = 0, stop_after: int | None = None
    ) -> None:
        self.bad = bad
        self.loops = loops
        self.stop_after = stop_after
        self.asked: list[Request] = []

    def __call__(self, args: object) -> AbstractContextManager[Pages]:
        return nullcontext(self)

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in reversed(list(requests)):  # pages end in any order
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(request)
            yield self.answer(request)

    def answer(self, request: Request) -> Result:
        name = str(request.request_id)
        if self.bad and name.endswith(self.bad):
            return Result(
                request_id=name, finish_reason="error", error="InvalidImage: no ink"
            )
        if self.loops:
            self.loops -= 1
            return Result(request_id=name, text=LOOP, finish_reason="length")
        size = (
            request.images[0].size
            if isinstance(request.images[0], Image.Image)
            else None
        )
        return Result(
            request_id=name,
            text=f"text of {Path(name).name} {size or ''}".strip(),
            finish_reason="stop",
        )


def make_pdf(
    path: Path, num_pages: int, width: float = 200, height: float = 100
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = pypdfium2.PdfDocument.new()
    for _ in range(num_pages):
        document.new_page(width, height)
    document.save(path)


def make_tiff(path: Path, num_pages: int) -> None:
    first, *others = [
        Image.new("RGB", (20 + number, 10), "white") for number in range(num_pages)
    ]
    first.save(path, save_all=True, append_images=others, compression="tiff_deflate")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_pdf(tmp_path / "in/letters/book.pdf", 3)
    make_tiff(tmp_path / "in/scan.tif", 2)
    Image.new("RGB", (8, 8)).save(tmp_path / "in/letters/book.png")
    return tmp_path


def read(batcher: Pages, *more: str) -> int:
    return cli.main(
        ["read", "in", "--out", "out", "--model", "some-model", "--quiet", *more],
        open_batcher=batcher,
    )


def test_each_document_becomes_one_text(folder: Path) -> None:
    assert read(Pages()) == 0
    files = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.md"))
    assert files == ["letters/book.pdf.md", "letters/book.png.md", "scan.md"]
    whole = Path("out/letters/book.pdf.md").read_text()
    assert [line for line in whole.splitlines() if line] == [
        # 200 x 100 points at 150 dots an inch
        *("<!-- page 1 -->", "text of book.pdf#1 (417, 209)"),
        *("<!-- page 2 -->", "text of book.pdf#2 (417, 209)"),
        *("<!-- page 3 -->", "text of book.pdf#3 (417, 209)"),
    ]
    assert Path("out/letters/book.png.md").read_text() == "text of book.png\n"
    assert "text of scan.tif#2 (21, 10)" in Path("out/scan.md").read_text()


def test_a_documents_name_stays_on_its_line_and_a_file_that_fails_asks_no_other_question(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of a name reach no terminal; one prompt needs no column."""
    Path("in/odd\n\x1b[2Jname.pdf").write_bytes(b"none")
    assert read(Pages()) == 1
    said = capsys.readouterr().out
    assert "in/odd \\x1b[2Jname.pdf lacks its text\n" in said and "\x1b" not in said
    assert "answer" in said and "question" not in said


def test_marks_can_be_left_out_and_plain_text_has_its_own(folder: Path) -> None:
    assert read(Pages(), "--no-marks", "--format", "txt") == 0
    assert (
        Path("out/scan.txt").read_text()
        == "text of scan.tif#1 (20, 10)\n\ntext of scan.tif#2 (21, 10)\n"
    )
    assert read(Pages(), "--format", "txt", "--overwrite") == 0
    assert Path("out/scan.txt").read_text().startswith("----- page 1 -----\n\ntext of")


@pytest.mark.parametrize(
    "strange",
    [
        {"page": "1"},
        {"page": [1], "attempts": {}},
        {"text": {"a": 1}, "finish_reason": 3},
        {"error": {"a": 1}},
        {"image_sizes": 3},
        {"image_sizes": [[0, 0]], "model_image_sizes": [[0, -1]]},
        {"image_sizes": [[1, 2, 3]], "model_image_sizes": "ab"},
        {"image_sizes": [[float("inf"), "a"]]},
        {"document": ["in/scan.tif"], "file": "../../etc/x"},
        {"file": "/etc/x"},
    ],
    ids=str,
)
def test_any_answers_of_earlier_runs_make_documents(
    folder: Path, strange: dict[str, Any]
) -> None:
    """A folder may come from somebody else."""
    assert read(Pages(stop_after=4)) == 130
    path = Path("out/pages.jsonl")
    rows = [json.loads(line) | strange for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(Pages(), "--resume") in (0, 1)
    there = set(folder.rglob("*.md")) | set(folder.parent.glob("*.md"))
    assert all((folder / "out") in file.parents for file in there)


def test_a_page_that_fails_says_so_in_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in/broken.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    assert read(Pages(bad="book.pdf#2")) == 1
    whole = Path("out/letters/book.pdf.md").read_text()
    assert (
        "<!-- page 2 -->\n\n[page 2 could not be read: InvalidImage: no ink]\n\n<!-- page 3 -->"
        in whole
    )
    assert "text of book.pdf#1" in whole
    assert (
        Path("out/broken.md")
        .read_text()
        .startswith("[the document could not be read: in/broken.pdf cannot be read as")
    )
    said = capsys.readouterr().out
    assert "4 documents written to out" in said
    assert "in/letters/book.pdf lacks page 2" in said


def test_failed_pages_are_asked_again_and_the_document_is_whole_then(
    folder: Path,
) -> None:
    read(Pages(bad="book.pdf#2"))
    again = Pages()
    assert read(again, "--retry-errors") == 0
    assert [request.request_id for request in again.asked] == ["in/letters/book.pdf#2"]
    assert "could not be read" not in Path("out/letters/book.pdf.md").read_text()


@pytest.mark.parametrize("done", [1, 2, 4])
def test_an_interrupted_run_goes_on_page_by_page(folder: Path, done: int) -> None:
    assert read(Pages(stop_after=done)) == 130
    rest = Pages()
    assert read(rest, "--resume") == 0
    assert len(rest.asked) == 6 - done
    assert "text of book.pdf#1" in Path("out/letters/book.pdf.md").read_text()
    assert "text of scan.tif#1" in Path("out/scan.md").read_text()


def test_a_text_that_was_lost_is_written_from_the_pages_answers(folder: Path) -> None:
    read(Pages())
    Path("out/scan.md").unlink()
    before = Path("out/letters/book.pdf.md").stat().st_mtime_ns
    assert read(Pages(), "--resume") == 0
    assert "text of scan.tif#1" in Path("out/scan.md").read_text()
    assert Path("out/letters/book.pdf.md").stat().st_mtime_ns == before


def test_nothing_is_replaced_unasked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/scan.md").write_text("mine")
    assert read(Pages()) == 2
    assert "1 file would be replaced, out/scan.md first" in capsys.readouterr().err
    assert Path("out/scan.md").read_text() == "mine"
    assert read(Pages(), "--overwrite") == 0
    assert "text of" in Path("out/scan.md").read_text()


def test_a_page_in_a_loop_is_asked_once_more_and_marked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healed = Pages(loops=1)
    assert read(healed) == 0
    assert len(healed.asked) == 7
    first, second = healed.asked[0], healed.asked[-1]
    assert first.request_id == second.request_id
    assert (first.params.no_repeat_ngram_size, second.params.no_repeat_ngram_size) == (
        0,
        20,
    )
    records = [json.loads(line) for line in Path("out", PAGES).read_text().splitlines()]
    assert [
        record.get("attempts") for record in records if record["id"] == first.request_id
    ] == [2]
    assert len(records) == 6
    assert read(Pages(loops=12), "--overwrite", "--format", "json") == 0
    pages = json.loads(Path("out/scan.json").read_text())["pages"]
    assert [page["repeats"] for page in pages] == [True, True]
    assert (
        "in/scan.tif repeats itself to the end of pages 1, 2" in capsys.readouterr().out
    )


def test_json_has_each_page_and_what_is_missing(folder: Path) -> None:
    read(Pages(bad="scan.tif#2"), "--format", "json", "--task", "ocr")
    whole = json.loads(Path("out/scan.json").read_text())
    assert (whole["document"], whole["model"], whole["task"]) == (
        "in/scan.tif",
        "some-model",
        "ocr",
    )
    assert whole["missing"] == [2]
    assert [(page["page"], page["text"]) for page in whole["pages"]] == [
        (1, "text of scan.tif#1 (20, 10)"),
        (2, None),
    ]


def test_pages_are_chosen(folder: Path) -> None:
    few = Pages()
    assert read(few, "--pages", "2-,9") == 0
    asked = sorted(str(request.request_id) for request in few.asked)
    assert asked == [
        "in/letters/book.pdf#2",
        "in/letters/book.pdf#3",
        "in/letters/book.png",
        "in/scan.tif#2",
    ]
    assert read(Pages(), "--pages", "3", "--overwrite") == 1
    assert (
        "in/scan.tif has 2 pages, and none of --pages 3"
        in Path("out/scan.md").read_text()
    )


def test_ranges_of_pages() -> None:
    chosen = PageRange.parse("1-3, 7,10-")
    assert [page for page in range(1, 13) if chosen.has(page)] == [
        1,
        2,
        3,
        7,
        10,
        11,
        12,
    ]
    assert PageRange.parse("-2").has(1)
    for wrong in ("", "0", "3-1", "a", "1--2", "-"):
        with pytest.raises(InvalidJob, match="--pages has"):
            PageRange.parse(wrong)


def test_the_page_lists_what_publishers_ask() -> None:
    page = read_page.PAGE.read_text(encoding="utf-8")
    assert page == read_page.render(page), "run python -m tests.read_page"


def test_publishers_are_found_by_names_paths_and_types() -> None:
    def named(model: str, model_type: str | None = None) -> str:
        return next(iter(publisher_of(model, model_type).models), "")

    assert named("mlx-community/DeepSeek-OCR-8bit") == "deepseekocr"
    assert named("/x/hub/models--allenai--olmOCR-2-7B-1025/snapshots/9f3a") == "olmocr"
    assert named("my-finetune", "paddleocr_vl") == "paddleocrvl"
    assert named("opendatalab/MinerU2.5-2509-1.2B") == "mineru"
    assert named("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl") == "qwen25vl"
    assert named("my-finetune", "qwen2_5_vl") == ""


@pytest.mark.parametrize("publisher", PUBLISHERS, ids=lambda one: one.models[0])
def test_publishers_settings_are_ours(publisher: Publisher) -> None:
    params = SamplingParams(**publisher.params)
    SamplingParams(**{**vars(params), **publisher.again})
    assert set(publisher.prompts) <= set(TASKS)
    assert publisher.source


def test_a_publishers_page_is_asked_alone_and_in_its_size(folder: Path) -> None:
    alone = Pages()
    read(alone, "--model", "lightonai/LightOnOCR-2-1B")
    request = next(
        one for one in alone.asked if str(one.request_id).endswith("book.pdf#1")
    )
    assert request.messages == ({"role": "user", "content": [{"type": "image"}]},)
    assert isinstance(request.images[0], Image.Image)
    assert request.images[0].size == (1540, 770)
    assert request.params.temperature == 0.2


def test_the_command_line_overrules_a_publishers_settings(folder: Path) -> None:
    """Without repeated sequences to look for, their window and exceptions go, too: they are an error alone."""
    pages = Pages()
    more = ("--model", "org/DeepSeek-OCR", "--overwrite")
    assert read(pages, *more, "--no-repeat-ngram-size", "0", "--top-p", "0.5") == 0
    params = pages.asked[-1].params
    assert (params.no_repeat_ngram_size, params.window_size, params.top_p) == (
        *(0, None),
        0.5,
    )
    assert (params.max_tokens, params.skip_special_tokens) == (8192, False)
    assert read(pages, *more, "--window-size", "200", "--max-tokens", "9") == 0
    params = pages.asked[-1].params
    assert (params.no_repeat_ngram_size, params.window_size, params.max_tokens) == (
        *(30, 200),
        9,
    )


def test_a_report_is_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of ``run``: another name is refused at once, and a run that has nothing to tell says so."""
    pages = Pages()
    assert read(pages, "--report", "answers.txt") == 2 and not pages.asked
    assert "give it a name that ends in .html" in capsys.readouterr().err
    assert read(pages, "--report", "page.html") == 0
    assert "text of book.pdf#1" in Path("page.html").read_text()
    assert read(pages, "--resume", "--report", "page.html") == 0
    said = capsys.readouterr().err
    assert "vlm-batch report out/pages.jsonl makes one about all runs" in said
    assert cli.main(["report", "out/pages.jsonl", "--out", "all.html"]) == 0
    assert "text of book.pdf#1" in Path("all.html").read_text()


def test_a_task_that_a_publisher_lacks_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(Pages(), "--model", "olmOCR-7B", "--task", "formula") == 2
    assert (
        "nobody says how to ask olmOCR-7B for that; it knows markdown"
        in capsys.readouterr().err
    )


def test_rows_of_tables_are_no_pages(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in/rows.csv").write_text("id,image\n1,a.png\n")
    command = ["read", "in/rows.csv", "--out", "out", "--model", "some-model"]
    assert cli.main(command, open_batcher=Pages()) == 2
    assert "in/rows.csv holds rows, not pages" in capsys.readouterr().err


def test_names_stay_in_the_folder_and_apart() -> None:
    documents = [
        "/a/b/x.pdf",
        "/a/b/x.png",
        "/a/b/X.tif",
        "/a/c/x.pdf",
        "http://h/../../etc/p%20w.pdf?q",
        "data:image/png;base64,",
    ]
    names = [str(path) for path in names_of(documents, ".md").values()]
    assert names == [
        "b/x.pdf.md",
        "b/x.png.md",
        "b/X.tif.md",
        "c/x.md",
        "p_20w.md",
        "document.md",
    ]
    assert [str(path) for path in names_of(["pages.jsonl.pdf"], ".md").values()] == [
        "pages.jsonl-2.md"
    ]
    twice = [
        str(path)
        for path in names_of(["http://a/x.pdf", "http://b/x.pdf"], ".md").values()
    ]
    assert twice == ["x.pdf.md", "x.pdf-2.md"]
    long = next(iter(names_of([f"/a/{'é' * 120}.pdf"], ".md").values()))
    assert len(str(long).encode()) < 255


def test_a_text_keeps_its_name_when_a_namesake_joins_later(folder: Path) -> None:
    """Under a new name, the old file would stay beside it, and look like the namesake's."""
    make_tiff(Path("in/bill.tif"), 2)
    assert read(Pages()) == 0
    written = Path("out/bill.md").read_text()
    make_pdf(Path("in/bill.pdf"), 1)
    assert read(Pages(), "--resume") == 0
    assert Path("out/bill.md").read_text() == written
    assert Path("out/bill.pdf.md").read_text().startswith("text of bill.pdf#1")
    assert not Path("out/bill.tif.md").exists()
    assert read(Pages(), "--resume", "--format", "txt") == 0  # names are of documents
    assert "bill.tif#2" in Path("out/bill.txt").read_text()
    assert read(Pages(), "--overwrite") == 0  # anew, by both names
    assert Path("out/bill.tif.md").read_text() == written
    # a file that says another place is not followed
    lines = Path("out", PAGES).read_text().replace('"file": "', '"file": "../')
    Path("out", PAGES).write_text(lines)
    assert read(Pages(), "--resume") == 0
    assert not list(Path().glob("*.md"))


def test_a_document_that_breaks_off_after_it_was_counted_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Pdf.rows

    def broken(self: Pdf) -> Iterator[JobRow]:
        yield next(whole(self))
        raise OSError("the disk is gone")

    monkeypatch.setattr(Pdf, "scan", whole)
    monkeypatch.setattr(Pdf, "rows", broken)
    assert read(Pages()) == 1
    lines = map(json.loads, Path("out", PAGES).read_text().splitlines())
    errors = {line["id"]: line["error"] for line in lines if line["error"]}
    assert errors.keys() == {"in/letters/book.pdf:damaged"}
    assert "text of scan.tif#2" in Path("out/scan.md").read_text()


#: 5 m on each side, in points.
HUGE = 5 / 0.0254 * 72


def test_bad_documents_fail_with_a_reason_and_the_rest_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Encrypted, damaged, cut, empty, too large, without a page; blank pages and missing fonts are pages."""
    place = Path("in/bad")
    place.mkdir()
    data = Path(__file__).parent / "data"
    (place / "locked.pdf").write_bytes((data / "locked.pdf").read_bytes())
    whole = Path("in/letters/book.pdf").read_bytes()
    (place / "cut.pdf").write_bytes(whole[: len(whole) // 4])
    (place / "nothing.pdf").write_bytes(b"")
    (place / "text.pdf").write_text("no PDF")
    (place / "cut.png").write_bytes(Path("in/letters/book.png").read_bytes()[:40])
    catalogue, no_pages = (
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[]/Count 0>>",
    )
    # behind one with a password, whose error PDFium still holds
    (place / "none.pdf").write_bytes(documents.pdf_of(catalogue, no_pages))
    make_pdf(place / "huge.pdf", 1, HUGE, HUGE)
    make_pdf(place / "blank.pdf", 1)
    words = documents.page(content="BT /Helv 18 Tf 20 100 Td (No such font) Tj ET")
    unknown = words.replace(b"BaseFont/Helvetica", b"BaseFont/NoSuchFnt")
    (place / "fonts.pdf").write_bytes(unknown)

    pages = Pages()
    assert read(pages, "--max-errors", "7") == 0
    said = capsys.readouterr().out
    reasons = {
        "locked": "It opens with a password alone",
        "cut.pdf": "cannot be read as a PDF",
        "nothing": "cannot be read as a PDF",
        "text": "cannot be read as a PDF",
        "none": "it has no pages",
        "huge": "pixels at 150 dots an inch; --dpi makes it smaller",
    }
    for name, reason in reasons.items():
        (file,) = Path("out/bad").glob(f"{name}*.md")
        assert reason in file.read_text(), name
        assert f"in/bad/{name}" in said
    assert "text of blank.pdf#1" in Path("out/bad/blank.md").read_text()
    assert "text of fonts.pdf#1" in Path("out/bad/fonts.md").read_text()
    asked = {str(request.request_id): request for request in pages.asked}
    drawn = asked["in/bad/fonts.pdf#1"].images[0]
    assert np.asarray(drawn.convert("L")).min() < 128  # another font draws them
    assert "text of book.pdf#3" in Path("out/letters/book.pdf.md").read_text()


def test_a_page_over_memory_fails_and_its_neighbours_are_read(tmp_path: Path) -> None:
    """The embedded sample sees 16 tokens of a small page and 1,575 of a large one, for which 8 MB are not enough."""
    small, large = (Image.new("RGB", size, "white") for size in ((60, 60), (700, 900)))
    path = tmp_path / "pages.tif"
    small.save(path, save_all=True, append_images=[large, small])
    out = str(tmp_path / "out")
    words = ["read", str(path), "--out", out, "--max-bytes", "8M", "--max-tokens", "2"]
    assert cli.main([*words, "--quiet", "--format", "json"]) == 1
    whole = json.loads((tmp_path / "out" / "pages.json").read_text())
    assert whole["missing"] == [2]
    first, second, third = whole["pages"]
    assert first["error"] is None and third["text"] == first["text"]
    assert second["error"].startswith("DoesNotFit: ")


def test_a_document_of_ten_thousand_pages_is_read_page_by_page(
    folder: Path,
) -> None:
    """No more pages are rendered than a batch asks for, and chosen ones alone."""
    make_pdf(Path("in/long.pdf"), 10_000)
    rendered: list[str] = []

    class Reading(Pages):
        def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
            for request in requests:
                rendered.append(str(request.request_id))
                if len(rendered) == 3:
                    raise KeyboardInterrupt
                yield self.answer(request)

    assert read(Reading(), "--pages", "9990-", "--overwrite") == 130
    assert rendered == [f"in/long.pdf#{page}" for page in (9990, 9991, 9992)]
    assert not Path("out/long.md").exists()
    assert read(Pages(), "--pages", "9990-", "--resume", "--retry-errors") == 1
    assert Path("out/long.md").read_text().count("text of long.pdf#") == 11


def test_loops_are_told_from_texts() -> None:
    assert is_loop(LOOP)
    assert is_loop("the same page " * 40)
    assert is_loop("一二三四五六七八九十甲乙丙丁" * 40)
    prose = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    assert not any(
        is_loop(prose[begin : begin + 6000])
        for begin in range(0, len(prose) - 6000, 2000)
    )
    assert not is_loop("short short")
