"""The pictures of README and docs, from today's code and sample: ``python -m website.pictures`` writes them into docs/images.

``demo.svg`` is a run of the command, ``report.png`` its report, ``server-page.png`` the server's page in Chromium. None is
written unless the answers in it are right. ``VLM_BATCH_BROWSER=1 scripts/setup`` installs Chromium where it can.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from tests import chromium
from tests.serving import data_uri, serving
from vlm_batch import VLMBatcher
from vlm_batch.assets import sample_model

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
COLUMNS = 120
#: What is typed. Two of the pictures are broken on purpose.
TYPED = (
    "vlm-batch run fixtures/images/*.jpg fixtures/images/[r-ty]*.png \\\n"
    "    fixtures/images/awkward/{{cmyk,exif_turned,truncated}.jpg,empty.png}"
)
NUM_BROKEN = 2
#: The last line that is shown; the histogram and the phases come after it.
LAST = re.compile(r"\d+ requests, ")
#: What the sample answers to "describe the picture", by the picture's name.
RIGHT = {
    "receipt.jpg": "a receipt of CORNER STORE, total 17.80",
    "supermarket_receipt.jpg": "a receipt of MARKET HALL, total 16.45",
    "red_circle.png": "a red circle",
    "red_circle_above_blue_triangle.png": "a red circle above a blue triangle",
    "sales_by_city.png": "a bar chart: Oslo, Rome, Lima, Cairo",
    "short_letter.png": "a page of text: Dear Vera,",
    "table_of_prices.png": "a table of 4 rows: Item, Price, Stock",
    "yellow_cross.png": "a yellow cross",
    "yellow_triangle_left_of_green_cross.png": "a yellow triangle left of a green cross",
    "cmyk.jpg": "a purple circle",
    "exif_turned.jpg": "a yellow triangle above a blue square",
}
#: A conversation with the page: picture or none, question, what the answer has.
TALK = (
    ("supermarket_receipt.jpg", "What is the total?", "16.45"),
    (None, "Read this receipt.", '"total": "16.45"'),
)


class WrongAnswer(Exception):
    """A picture would show what is not so."""


def main() -> None:
    """Write all of them, or none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        demo = record(report)
        with browser() as page:
            pictures = {
                "report.png": report_picture(page, report),
                "server-page.png": page_picture(page),
            }
    (IMAGES / "demo.svg").write_text(demo, encoding="utf-8")
    for name, data in pictures.items():
        (IMAGES / name).write_bytes(smaller(data))


# The command --------------------------------------------------------------------------------------------------------


def record(report: Path) -> str:
    """Return the command's own output, in its colours, as SVG that loads nothing from elsewhere; write its report.

    Raises:
        WrongAnswer: The sample answers otherwise than it should.
    """
    answers = report.with_suffix(".jsonl")
    lines = run_typed(["--max-errors", str(NUM_BROKEN), "--quiet"]).splitlines()
    kept = [f"--report={report}", f"--out={answers}"]
    run_typed([*kept, "--max-errors", str(NUM_BROKEN), "--quiet"])
    check_answers(answers.read_text(encoding="utf-8"))
    upto = next(
        number
        for number, line in enumerate(lines)
        if LAST.search(Text.from_ansi(line).plain)
    )
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(f"$ {TYPED}", style="bold", highlight=False, markup=False)
        console.print(Text.from_ansi("\n".join(lines[: upto + 1])))
        svg = console.export_svg(title="vlm-batch")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def run_typed(options: list[str]) -> str:
    """Return what the typed command prints, with further options."""
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "COLUMNS": str(COLUMNS),
        "PYTHONPATH": str(ROOT),
    }
    command = TYPED.replace("vlm-batch", f"{shlex.quote(sys.executable)} -m vlm_batch")
    run = subprocess.run(
        ["bash", "-c", f"{command} {shlex.join(options)}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return run.stdout.strip("\n")


def check_answers(lines: str) -> None:
    found = {}
    for line in lines.splitlines():
        record = json.loads(line)
        if record["error"] is None:
            found[Path(record["id"]).name] = record["text"]
    if found != RIGHT:
        raise WrongAnswer(f"the sample answers {found}")


# Pages --------------------------------------------------------------------------------------------------------------


@contextmanager
def browser() -> Iterator[chromium.Browser]:
    binary = chromium.find()
    if binary is None:
        raise SystemExit("no Chromium here: VLM_BATCH_BROWSER=1 scripts/setup")
    with chromium.browser(binary) as page:
        yield page


def report_picture(page: chromium.Browser, report: Path) -> bytes:
    page.size(800, 1150)
    page.open(report.as_uri())
    return page.picture()


def page_picture(page: chromium.Browser) -> bytes:
    """Return the server's page after a conversation with the sample."""
    with serving(
        lambda: VLMBatcher(str(sample_model())), served_names=("reader",)
    ) as running:
        page.size(960, 1000)
        page.open(running.url)
        for number, (name, question, right) in enumerate(TALK, 1):
            talk(page, name, question)
            page.wait(f"document.querySelectorAll('.answer.done').length === {number}")
            answer = page.run(
                "[...document.querySelectorAll('.answer .text')].at(-1).textContent"
            )
            if right not in answer:
                raise WrongAnswer(f"{question} {answer}")
        # the charts have seen the batch end
        page.wait("document.getElementById('rows-now').textContent === '0 + 0 + 0'")
        page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
        return page.picture()


def talk(page: chromium.Browser, name: str | None, question: str) -> None:
    """Ask a question, about a picture if it has a name."""
    if name is not None:
        picture = json.dumps({"name": name, "url": data_uri(name)})
        page.run(f"pictures.push({picture}); showPictures()")
    page.run(f"document.getElementById('question').value = {json.dumps(question)}")
    page.run("document.getElementById('send').click()")


def smaller(png: bytes) -> bytes:
    """Return a screenshot in 128 colours, which takes a third of the bytes."""
    out = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
    picture.save(out, format="PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
