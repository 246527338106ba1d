"""Run the notebooks and keep what they show: ``python -m website.notebooks [NAME ...]``; all without names.

A notebook's file has its outputs and pictures, so that whoever reads it sees them. What a run leaves that says nothing to a
reader (how long cells took, widgets that live no longer) is not kept, and neither are this machine's paths.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
SECONDS = 300  # for one cell, on a machine with other work
#: Pictures that pages show, too: the first one of a notebook, and its name in docs/images.
SHOWN = {"03_a_batch_watched": "timeline.png"}
_KEPT_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def paths() -> list[Path]:
    """Every notebook, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a fresh run. Raises CellExecutionError for a cell that raises."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # two that wait for each other say more of the machine's other work
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
    ).execute()
    return notebook


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is kept."""
    notebook.metadata = nbformat.from_dict(_KEPT_METADATA)
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [
            _tidied(output, count)
            for output in _joined(cell.outputs)
            if _says_something(output)
        ]
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs with neighbouring pieces of one stream put together: how it was cut is chance."""
    joined: list[Any] = []
    for output in outputs:
        if (
            joined
            and output.output_type == "stream"
            and joined[-1].get("name") == output.name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _says_something(output: Any) -> bool:
    data = output.get("data", {})
    return "application/vnd.jupyter.widget-view+json" not in data and bool(
        data or output.get("text", "").strip()
    )


def _tidied(output: Any, count: int) -> Any:
    if "execution_count" in output:
        output.execution_count = count
    if "text" in output:
        output.text = _without_paths(output.text)
    data = output.get("data", {})
    for kind, value in data.items():
        if kind.startswith("text/") and isinstance(value, str):
            data[kind] = _without_paths(value)
    return output


def _without_paths(text: str) -> str:
    """Text without this machine's folders and without the codes of a terminal's colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace(str(ROOT) + "/", "")
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)


def first_picture(notebook: nbformat.NotebookNode) -> bytes:
    """The first picture that a notebook shows, as PNG."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    data = next(
        output.data for output in outputs if "image/png" in output.get("data", {})
    )
    return base64.b64decode(data["image/png"])


def main(names: list[str]) -> None:
    known = {path.stem: path for path in paths()}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no notebook {unknown[0]}; there are {', '.join(known)}")
    for name in names or known:
        begin = time.perf_counter()
        notebook = tidied(run(known[name]))
        nbformat.write(notebook, known[name])
        if name in SHOWN:
            (ROOT / "docs/images" / SHOWN[name]).write_bytes(first_picture(notebook))
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
