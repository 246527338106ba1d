"""Documents that other programs made, and what ``read`` makes of them: ``python -m tests.mixed FOLDER``.

LibreOffice, TeX, Ghostscript, ImageMagick and qpdf (Debian's packages libreoffice-writer-nogui, libreoffice-calc-nogui,
texlive-latex-recommended, ghostscript, imagemagick, qpdf, poppler-utils) fill the folder, if it is not there. Then each page is
compared with poppler's or ImageMagick's: the number of pages, their sizes, and their ink. CI does without these programs.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vlm_batch.inputs.images import load_image
from vlm_batch.jobs.rows import JobRow
from vlm_batch.jobs.sources import Reading, open_sources

DPI = 150
#: Share of a page's ink by which two programs' pages may differ. PDFium draws TeX's thin letters 0.056 stronger.
INK = 0.07
WORDS = "the quick brown fox jumps over a lazy dog while rain falls on stones and nobody counts the days of June"
PREAMBLES = {
    "formulas": r"\documentclass{article}\usepackage{amsmath}",
    "columns": r"\documentclass[twocolumn]{article}",
    "landscape": r"\documentclass{article}\usepackage[landscape]{geometry}",
    "a5": r"\documentclass{article}\usepackage[a5paper]{geometry}",
    "empty": r"\documentclass{article}",
}
FORMULA = r"\[\int_0^1 x^{2}\,dx=\frac{1}{3}\sum_{k=1}^{n}\sqrt{k}\]"
PDF_VERSIONS = ("1.3", "1.4", "1.5", "1.6", "1.7")
SCANS = ("pdfimage8", "pdfimage24", "pdfimage32")
TIFFS = ("tiffg3", "tiffg4", "tifflzw", "tiffpack", "tiffgray", "tiff24nc", "tiff32nc")
PICTURES = {
    "png16m": "png",
    "pngmono": "png",
    "pnggray": "png",
    "pngalpha": "png",
    "jpeg": "jpg",
    "jpegcmyk": "jpg",
    "pcx24b": "pcx",
    "bmp16m": "bmp",
    "pnmraw": "ppm",
}
CONVERSIONS = {
    "turned.png": "-rotate 90",
    "skewed.jpg": "-background white -rotate 3",
    "deep.png": "-depth 16",
    "deep.tif": "-depth 16 -compress zip",
    "float.tif": "-define quantum:format=floating-point -depth 32",
    "palette.png": "-colors 16 -type Palette",
    "palette.gif": "-colors 16",
    "lossy.webp": "",
    "lossless.webp": "-define webp:lossless=true",
    "grey.jpg": "-colorspace Gray",
    "cmyk.tif": "-colorspace CMYK -compress lzw",
    "cmyk.jpg": "-colorspace CMYK",
    "bilevel.tif": "-monochrome -compress Group4",
    "alpha.png": "-transparent white",
    "upright.jpg": "-set orientation RightTop",
    "page.jp2": "",
}
QPDF = {
    "linear": "--linearize letter2.pdf",
    "objects": "--object-streams=generate letter2.pdf",
    "owner": "--encrypt '' owner 256 -- letter0.pdf",
    "bad-password": "--encrypt user owner 256 -- letter0.pdf",
    "merged": "--empty --pages letter0.pdf columns.pdf a5.pdf --",
    "quarter": "--rotate=+90:1 columns.pdf",
    "readable": "--qdf formulas.pdf",
    "first": "letter2.pdf --pages . 1 --",
}


# Making
# ---------------------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Fill a folder with documents."""
    folder.mkdir(parents=True)
    _office(folder)
    _tex(folder)
    _ghostscript(folder)
    _imagemagick(folder)
    for name, how in QPDF.items():
        _run(folder, f"qpdf {how} {name}.pdf")
    for source, share in (("letter2.pdf", 0.3), ("tiffg4.tif", 0.5), ("jpeg.jpg", 0.5)):
        whole = (folder / source).read_bytes()
        cut = folder / f"bad-cut{Path(source).suffix}"
        cut.write_bytes(whole[: int(share * len(whole))])
    (folder / "bad-empty.pdf").write_bytes(b"")
    (folder / "bad-text.pdf").write_text("no PDF")


def _run(folder: Path, command: str) -> None:
    """Run a program in a folder; what it makes is what counts."""
    home = {**os.environ, "HOME": tempfile.gettempdir()}
    subprocess.run(
        command, shell=True, cwd=folder, env=home, check=True, capture_output=True
    )


def _text(number: int, count: int) -> str:
    return " ".join(np.random.default_rng(number).choice(WORDS.split(), count))


def _office(folder: Path) -> None:
    """Letters, tables, and a letter as PDF/A."""
    for number in range(4):
        paragraphs = "".join(
            f"<p>{_text(part, 90)}</p>" for part in range(4 + 6 * number)
        )
        page = f"<html><body><h1>Letter {number}</h1>{paragraphs}</body></html>"
        (folder / f"letter{number}.html").write_text(page)
    for number in range(3):
        lines = [
            f"{_text(line, 2)},{line * 17},{line * 31}"
            for line in range(30 + 40 * number)
        ]
        (folder / f"table{number}.csv").write_text("\n".join(lines))
    _run(folder, "soffice --headless --convert-to odt letter*.html")
    archived = (
        """'pdf:writer_pdf_Export:{"SelectPdfVersion":{"type":"long","value":"2"}}'"""
    )
    _run(folder, f"soffice --headless --convert-to {archived} letter1.odt")
    _run(folder, "mv letter1.pdf archived.pdf")
    _run(folder, "soffice --headless --convert-to pdf letter*.odt")
    _run(folder, "soffice --headless --convert-to pdf table*.csv")
    _run(folder, "rm -f *.html *.odt *.csv")


def _tex(folder: Path) -> None:
    bodies = {
        "formulas": "".join(FORMULA + _text(part, 40) for part in range(12)),
        "columns": "\n\n".join(_text(part, 120) for part in range(16)),
        "landscape": _text(0, 300),
        "a5": _text(1, 500),
        "empty": r"one\newpage\thispagestyle{empty}\mbox{}\newpage three",
    }
    for name, preamble in PREAMBLES.items():
        whole = rf"{preamble}\begin{{document}}{bodies[name]}\end{{document}}"
        (folder / f"{name}.tex").write_text(whole)
        _run(folder, f"pdflatex -interaction=batchmode {name}")
    _run(folder, "rm -f *.tex *.aux *.log")


def _ghostscript(folder: Path) -> None:
    def draw(device: str, file: str, source: str, more: str = "") -> None:
        what = f"-sDEVICE={device} -sOutputFile={file} {more} {source}"
        _run(folder, f"gs -q -dBATCH -dNOPAUSE {what}")

    for version in PDF_VERSIONS:
        more = f"-dCompatibilityLevel={version}"
        draw("pdfwrite", f"version{version}.pdf", "columns.pdf", more)
    cmyk = "-sColorConversionStrategy=CMYK -dProcessColorModel=/DeviceCMYK"
    draw("pdfwrite", "cmyk.pdf", "letter0.pdf", cmyk)
    for device in SCANS:
        draw(device, f"{device}.pdf", "columns.pdf", "-r100")
    for device in TIFFS:
        draw(device, f"{device}.tif", "columns.pdf", "-r100")
    for device, suffix in PICTURES.items():
        more = "-r80 -dFirstPage=1 -dLastPage=1"
        draw(device, f"{device}.{suffix}", "letter0.pdf", more)


def _imagemagick(folder: Path) -> None:
    for file, how in CONVERSIONS.items():
        _run(folder, f"convert png16m.png {how} {file}")
    _run(folder, "convert png16m.png turned.png pnggray.png -compress jpeg sizes.tif")
    _run(folder, "convert -delay 10 png16m.png turned.png moving.gif")


# Comparing
# ---------------------------------------------------------------------------------------------------------------------

#: Size and ink of a page: the share of its area that is black, as if all of its grey were black and white.
Drawn = tuple[tuple[int, int], float]


def _drawn(picture: Image.Image) -> Drawn:
    ink = 1 - np.asarray(picture.convert("L"), dtype=np.float64).mean() / 255
    return picture.size, float(ink)


def pages_of(path: Path) -> Iterator[Drawn | str]:
    """Yield what ``read`` makes of a document's pages; of one that fails, why."""
    sources, _ = open_sources([str(path)], Reading(pdfs=True, dpi=DPI))
    for source in sources:
        yield from map(_page, source.rows())


def _page(row: JobRow) -> Drawn | str:
    if row.error is not None:
        return row.error
    try:
        (picture,) = row.images if row.load is None else row.load()
        return _drawn(load_image(picture))
    except Exception as error:
        return str(error)


def others_pages(path: Path) -> list[Drawn]:
    """Return what poppler or ImageMagick makes of them; nothing of a document that it cannot read."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "page"
        command: list[str] = ["pdftoppm", "-r", str(DPI), "-gray", "-cropbox"]
        command += [str(path), str(place)]
        if path.suffix != ".pdf":
            white = "-auto-orient -background white -alpha remove -colorspace Gray"
            command = ["convert", str(path), *white.split(), "-depth", "8"]
            command.append(f"{place}-%04d.pgm")
        subprocess.run(command, capture_output=True, check=False)
        files = sorted(Path(folder).iterdir(), key=_number)
        return [_drawn(Image.open(io.BytesIO(file.read_bytes()))) for file in files]


def _number(file: Path) -> int:
    return int(re.findall(r"\d+", file.stem)[-1])


def differences(ours: Sequence[Drawn | str], others: Sequence[Drawn]) -> list[str]:
    """Say where two programs differ about a document."""
    said = []
    if len(ours) != len(others):
        said.append(f"{len(ours)} pages, the other has {len(others)}")
    for number, page in enumerate(ours, 1):
        if isinstance(page, str):
            said.append(f"page {number}: {page}")
        elif number <= len(others):
            said += _differs(number, page, others[number - 1])
    return said


def _differs(number: int, page: Drawn, other: Drawn) -> Iterator[str]:
    (size, ink), (other_size, other_ink) = page, other
    if max(abs(one - two) for one, two in zip(size, other_size, strict=True)) > 1:
        yield f"page {number}: {size}, the other has {other_size}"
    if abs(ink - other_ink) > INK * other_ink + 1e-4:
        yield f"page {number}: ink {ink:.4f}, the other has {other_ink:.4f}"


def main() -> None:
    folder = Path(sys.argv[1])
    if not folder.exists():
        make(folder)
    files, num_pages = sorted(folder.iterdir()), 0
    for path in files:
        ours = list(pages_of(path))
        num_pages += sum(not isinstance(page, str) for page in ours)
        for said in differences(ours, others_pages(path)):
            print(f"{path.name}: {said}")
    print(f"{len(files)} documents, {num_pages} pages read")


if __name__ == "__main__":
    main()
