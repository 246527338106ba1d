"""Pages of documents show what another program shows of them, and a bad page says what is wrong with it."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.documents import PAGES, page, pdf_of
from vlm_batch.errors import InvalidImage
from vlm_batch.inputs.documents import count_pages, load_page
from vlm_batch.inputs.images import load_image, own_image
from vlm_batch.jobs import Reading, open_sources

DATA = Path(__file__).parent / "data"
COLOURS = ("red", "lime", "blue")
RGB = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


def dark(picture: Image.Image) -> int:
    return int((np.asarray(picture.convert("L")) < 128).sum())


# PDF ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", PAGES)
def test_a_page_has_the_ink_that_poppler_sees(what: str, tmp_path: Path) -> None:
    """PDFium's strokes are somewhat wider; a choice has its arrow."""
    data, ink = PAGES[what]
    path = tmp_path / "one.pdf"
    path.write_bytes(data)
    assert 0.95 * ink <= dark(load_page(str(path), 0, dpi=72)) <= 1.45 * ink


def test_a_form_that_adobe_alone_draws_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its page says "Please wait", which a model would read out."""
    path = tmp_path / "form.pdf"
    words = "BT /Helv 18 Tf 20 100 Td (Please wait...) Tj ET"
    form = "/NeedsRendering true/AcroForm<</Fields[]/XFA[(template) 9 0 R]>>"
    path.write_bytes(page(content=words, catalogue=form))
    assert count_pages(str(path)) == 1
    with pytest.raises(
        InvalidImage,
        match=r"form\.pdf#1 cannot be rendered: it is a form of Adobe's kind XFA",
    ):
        load_page(str(path), 0)
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]


def document_of(*boxes: str) -> bytes:
    """Empty pages with these boxes."""
    kids = " ".join(f"{3 + number} 0 R" for number in range(len(boxes)))
    pages = [f"<</Type/Page/Parent 2 0 R/MediaBox[{box}]>>" for box in boxes]
    return pdf_of(
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(boxes)}>>",
        *pages,
    )


@pytest.mark.parametrize(
    ("box", "said"),
    [
        ("0 0 20000 20000", "it would have 41667 x 41667 pixels at 150 dots an inch"),
        ("0 0 40000 10", "it would have 83333 x 21 pixels"),
        ("0 0 300 0.1", r"it has no area \(625 x 0 pixels"),
    ],
)
def test_pages_that_nobody_can_see(tmp_path: Path, box: str, said: str) -> None:
    path = tmp_path / "bad.pdf"
    path.write_bytes(document_of("0 0 100 100", box))
    assert load_page(str(path), 0, dpi=72).size == (100, 100)
    with pytest.raises(InvalidImage, match=rf"bad\.pdf#2 cannot be rendered: {said}"):
        load_page(str(path), 1)


def test_a_document_without_pages_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.pdf"
    path.write_bytes(document_of())
    with pytest.raises(
        InvalidImage, match=r"empty\.pdf cannot be read as a PDF: it has no pages"
    ):
        count_pages(str(path))


def test_a_document_with_a_password_says_so() -> None:
    """The file is of qpdf."""
    with pytest.raises(
        InvalidImage,
        match=r"Incorrect password.* It opens with a password alone; save a copy without one",
    ):
        count_pages(str(DATA / "locked.pdf"))


def test_ten_thousand_pages(tmp_path: Path) -> None:
    count, path = 10_000, tmp_path / "long.pdf"
    path.write_bytes(
        document_of(*(f"0 0 {100 + number} 50" for number in range(count)))
    )
    assert count_pages(str(path)) == count
    assert load_page(str(path), count - 1, dpi=72).size == (10_099, 50)


# TIFF -----------------------------------------------------------------------------------------------------------------


def tiff(*kinds: int) -> bytes:
    """A TIFF with a frame for each NewSubfileType: 0 is a page, 1 a reduced copy."""
    frames = [Image.new("RGB", (8, 6), colour) for colour in COLOURS[: len(kinds)]]
    for frame, kind in zip(frames, kinds, strict=True):
        frame.encoderinfo = {"tiffinfo": {254: kind}}
    out = io.BytesIO()
    frames[0].save(
        out,
        format="TIFF",
        save_all=True,
        append_images=frames[1:],
        tiffinfo={254: kinds[0]},
    )
    return out.getvalue()


def test_a_tiff_with_pages_is_as_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fax.tif").write_bytes(tiff(0, 0, 0))
    (tmp_path / "one.tiff").write_bytes(tiff(0, 1))
    (tmp_path / "bad.tif").write_bytes(b"II*\0 no")
    sources, _ = open_sources(["."], Reading())
    rows = [row for source in sources for row in source.rows()]
    assert [row.id for row in rows] == [
        "./bad.tif",
        "./fax.tif#1",
        "./fax.tif#2",
        "./fax.tif#3",
        "./one.tiff",
    ]
    assert (rows[2].columns["page"], rows[2].columns["pages"]) == (2, 3)
    colours = [
        load_image(row.load()[0]).getpixel((1, 1))
        for row in rows
        if row.load is not None
    ]
    assert colours == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_whole_pages_of_a_cut_tiff_are_read_wherever_it_ends(tmp_path: Path) -> None:
    """It was taken for a picture with several pages, and its first page was lost."""
    whole = tiff(0, 0, 0)
    path = tmp_path / "cut.tif"
    counts = set()
    for length in range(8, len(whole)):
        path.write_bytes(whole[:length])
        try:
            num_pages = count_pages(str(path))
        except InvalidImage:  # not even the first page's size is there
            continue
        counts.add(num_pages)
        reads = [is_read(path, number) for number in range(num_pages)]
        assert reads == sorted(reads, reverse=True), length
        (source,), _ = open_sources([str(path)], Reading())
        assert len(list(source.rows())) == num_pages
    assert counts == {2, 3}


def is_read(path: Path, number: int) -> bool:
    """Read a page, which has one colour, or fail as a page does."""
    try:
        page = load_page(str(path), number)
    except InvalidImage:
        return False
    assert page.getcolors() == [(page.width * page.height, RGB[number])]
    return True


def test_a_tiff_is_no_picture_if_it_has_pages(tmp_path: Path) -> None:
    """Its first page alone would be seen, whatever the others say."""
    with pytest.raises(
        InvalidImage,
        match="the picture given as bytes has several pages, and a picture is one of them",
    ):
        load_image(tiff(0, 0))
    assert load_image(tiff(0, 1)).getpixel((1, 1)) == (255, 0, 0)
    path = tmp_path / "fax.tif"
    path.write_bytes(tiff(0, 0))
    with Image.open(path) as opened:  # the caller has chosen a page
        assert load_image(own_image(opened)).getpixel((1, 1)) == (255, 0, 0)
        opened.seek(1)
        assert load_image(own_image(opened)).getpixel((1, 1)) == (0, 255, 0)
