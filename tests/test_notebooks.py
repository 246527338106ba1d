"""Every notebook runs from its first cell to its last on the embedded checkpoint, and is kept with what it shows."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest

from website import notebooks

PATHS = notebooks.paths()
#: A real model instead of the embedded one is a change of this line.
ONE_LINE = (
    "MODEL = default_checkpoint()",
    "MODEL = sample_model()",
    'MODEL = "../fixtures/hearing"',
)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
# of the kernel's own machinery
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_runs(path: Path) -> None:
    notebook = notebooks.tidied(notebooks.run(path))
    kept = nbformat.read(path, as_version=4)
    for cell, before in zip(notebook.cells, kept.cells, strict=True):
        kinds, kinds_before = (
            [
                sorted(output.get("data", {"text": 0}))
                for output in one.get("outputs", [])
            ]
            for one in (cell, before)
        )
        assert kinds == kinds_before, (
            f"it shows other things than are kept: run scripts/notebooks {path.stem}"
        )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_is_kept_with_what_it_shows(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run scripts/notebooks"
    )
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), (
        "a notebook has a picture"
    )
    assert path.stat().st_size < 400_000
    assert not re.search(
        r"/(?:home|root|Users|work|tmp)/", path.read_text(encoding="utf-8")
    ), "a path of the machine"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_another_model_is_one_line(path: Path) -> None:
    lines = [
        line
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for line in cell.source.splitlines()
        if "default_checkpoint(" in line
        or "sample_model(" in line
        or "fixtures/" in line
    ]
    if path.stem == "04_alone_and_in_company":  # its subject is several models
        assert [line for line in lines if line.startswith("checkpoints = ")] == lines
    else:
        assert len(lines) == 1 and lines[0].startswith(ONE_LINE)


def test_tidying_keeps_what_a_reader_sees() -> None:
    picture = base64.b64encode(b"a picture").decode()
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "code",
                metadata={"execution": {"iopub.execute_input": "a moment"}},
                outputs=[
                    nbformat.v4.new_output(
                        "stream",
                        name="stdout",
                        text=f"\x1b[31mred\x1b[0m {notebooks.ROOT}/a",
                    ),
                    nbformat.v4.new_output(
                        "stream", name="stdout", text=".png <x at 0x7f00aa11bb22>"
                    ),
                    nbformat.v4.new_output(
                        "display_data",
                        data={"application/vnd.jupyter.widget-view+json": {}},
                    ),
                    nbformat.v4.new_output("display_data", data={"image/png": picture}),
                ],
            )
        ]
    )
    (cell,) = notebooks.tidied(notebook).cells
    assert (cell.metadata, cell.execution_count, len(cell.outputs)) == ({}, 1, 2)
    assert cell.outputs[0].text == "red a.png <x at 0x...>"
    assert notebooks.first_picture(notebook) == b"a picture"


@pytest.mark.parametrize(("name", "picture"), notebooks.SHOWN.items())
def test_pages_show_the_notebooks_own_pictures(name: str, picture: str) -> None:
    kept = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)
    assert (
        notebooks.first_picture(kept)
        == (notebooks.ROOT / "docs/images" / picture).read_bytes()
    ), f"run scripts/notebooks {name}"
