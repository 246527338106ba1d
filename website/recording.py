"""Record a run of the command as a picture for the README: ``python -m website.recording`` writes docs/images/demo.svg."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 160
#: What is typed. Two of the pictures are broken on purpose.
TYPED = "vlm-batch run fixtures/images/*.{jpg,png} fixtures/images/awkward/{cmyk.jpg,truncated.jpg,empty.png,exif_turned.jpg}"
#: The last line that is shown; the histogram, the phases and the failures again come after it.
LAST = re.compile(r"\d+ requests, ")


def record() -> str:
    """The command's own output, in its colours, as SVG that loads nothing from elsewhere."""
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "COLUMNS": str(COLUMNS),
        "PYTHONPATH": str(ROOT),
    }
    arguments = TYPED.removeprefix("vlm-batch ")
    shell = (
        f"{shlex.quote(sys.executable)} -m vlm_batch {arguments} --max-errors 2 --quiet"
    )
    run = subprocess.run(
        ["bash", "-c", shell],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = run.stdout.strip("\n").splitlines()
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


if __name__ == "__main__":
    (ROOT / "docs/images/demo.svg").write_text(record(), encoding="utf-8")
