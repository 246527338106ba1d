"""Writes docs/read-documents.md's tables of publishers and of boxes: ``python -m tests.read_page``."""

from __future__ import annotations

import re
from pathlib import Path

from vlm_batch.jobs.boxes import BOX_FORMS
from vlm_batch.jobs.publishers import PUBLISHERS, Publisher

PAGE = Path(__file__).parent.parent / "docs" / "read-documents.md"
_PLACE = re.compile(r"(<!-- publishers -->\n).*?(<!-- /publishers -->)", re.DOTALL)
_HEAD = (
    "| models whose names hold | tasks, the default first | settings |\n|---|---|---|\n"
)


_BOXES = re.compile(r"(<!-- boxes -->\n).*?(<!-- /boxes -->)", re.DOTALL)
_BOXES_HEAD = "| models whose names hold | tasks | their scale |\n|---|---|---|\n"


def render(page: str) -> str:
    rows = "".join(map(_row, PUBLISHERS))
    page = _PLACE.sub(lambda match: f"{match[1]}{_HEAD}{rows}{match[2]}", page)
    forms = ""
    for name, form in BOX_FORMS.items():
        scale = "pixels of the picture that the model sees"
        if form.canvas is not None:
            scale = "parts of a canvas of {} x {}, centred on the page".format(
                *form.canvas
            )
        elif form.scale is not None:
            scale = f"0 to {form.scale}"
        forms += f"| {name} | {', '.join(form.tasks)} | {scale} |\n"
    return _BOXES.sub(lambda match: f"{match[1]}{_BOXES_HEAD}{forms}{match[2]}", page)


def _row(publisher: Publisher) -> str:
    settings = [f"{name} {value}" for name, value in publisher.params.items()]
    if publisher.longest is not None:
        settings.append(f"{publisher.longest} pixels on the longest side")
    settings += [f"{task}: {said}" for task, said in publisher.enlarging.items()]
    return f"| {', '.join(publisher.models)} | {', '.join(publisher.prompts)} | {', '.join(settings)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
