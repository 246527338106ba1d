"""docs/upstream.md from the reproductions in docs/upstream: ``python -m tests.upstream_page`` writes it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "upstream"
#: In the order of the page: what a batch does first, then what one request alone shows.
FILES = (
    "merged_keywords",
    "state_on_the_model",
    "shared_tables",
    "one_offset_for_all",
    "padding",
    "chunks",
    "masks",
    "several_pictures",
    "sound",
    "vision",
    "configured",
    "checkpoints",
    "prompts",
    "mllama",
    "other_models",
    "turboquant",
)

#: Places that notes of families name and no reproduction shows -> why.
NOT_SHOWN = {
    "deepseek_vl_v2/deepseek_vl_v2.py:333": "deepseek_vl_v2 reads as many tile counts as there are tiles, past the array's "
    "end: what it finds there is chance",
    "falcon_perception/language.py:458": "falcon_perception makes no mask for a text without a picture, so that a prompt "
    "sees its own future: the published model is not run on such prompts",
    "granite4_vision.py:279": "granite4_vision keeps on the model which layers take features; all requests of one model "
    "agree on it",
    "cohere_compass/language.py:129": "cohere_compass projects row by row: slow, not wrong",
    "moondream3/language.py:116": "moondream3 reads offsets back at every step: slow, not wrong",
    "phi4_siglip/language.py:66": "phi4_siglip calls MLX's attention directly, which fails for a quantised cache",
    "processing_gemma4.py:441": "gemma4 stamps a video's frames with evenly spaced times; transformers with each frame's own, "
    "another whole second where a file's frame rate is no whole number: read in both, and too rare to be worth a file here",
    "processing_llava_onevision.py:79": "llava_onevision refuses several videos of unequally many frames in one prompt: a "
    "limit, and nothing is answered wrongly",
    "nemotron_h_nano_omni/audio.py:230": "nemotron_h_nano_omni's encoder gives zeros where nothing may be attended to, as NeMo "
    "does: it is transformers that takes a mean there, of padding, too",
    "idefics2.py:66": "idefics2's resampler attends to padding as its tower does, which is shown",
    "idefics2.py:243": "idefics2 counts a patch of which a part is padding: tests/references holds transformers' answers to "
    "pictures of unequal size",
    "inkling/language.py:476": "inkling scales long contexts by the batch's common length: read, and held against in the "
    "matrix; too little at this size to move a token of mlx-vlm's batch",
    "mlx_vlm/models/kernels.py:165": "kimi_k25's positions are resized with zeros beyond an edge where there is no Metal "
    "kernel, with the edge where there is one",
    "processing_qwen2_5_vl.py:87": "qwen2_5_vl's processor drops second_per_grid_ts: it takes a "
    "published processor to show",
    "qwen3_next/language.py:239": "qwen3_next adds an epsilon to a mean that belongs to a sum: 1.8e-4 in a tiny model's "
    "log-probabilities against transformers",
    "plamo2vl/language.py:262": "plamo2vl calls MLX's attention directly, which fails for a quantised cache",
    "aya_vision.py:107": "Command A Vision's projector takes the last layer's output without the tower's norm, against "
    "transformers (modeling_cohere2_vision.py:163): tests/references holds transformers' answers",
    "muse_spark/language.py:291": "muse_spark rounds activations to bfloat16 whatever the weights are: the same for a "
    "published checkpoint on a GPU",
    "muse_spark/language.py:429": "muse_spark, the same after the last norm",
    "qwen3_omni_moe/language.py:330": "qwen3_omni_moe's positions in time, against transformers: tests/references holds them",
    "falcon_ocr.py:17": "falcon_ocr takes prompts whole: a limit, not a defect",
}

HEAD = """# Defects of mlx-vlm 0.7.10

{cases} defects of mlx-vlm in {families} families. The adapters mend or avoid each: a row gets what is "right" here.
Where an entry does not say, right is mlx-vlm's own answer to the same request alone. Each has a reproduction that runs
against mlx-vlm alone, with tiny random models, and prints what mlx-vlm does, what is right, and the place:

```sh
python docs/upstream/merged_keywords.py
```

An entry names families, the requests if it takes special ones ("Two texts:"), the defect, the reproduction, and the
file and line in `mlx_vlm/models` or `mlx_vlm`. The files share [tiny.py](upstream/tiny.py), which builds the models of
[configs.json](upstream/configs.json). Transformers' answers to the same weights are in `tests/references`.
`tests/test_upstream.py` fails when mlx-vlm corrects a defect: then its reproduction and the adapter's patch can go.

"""
#: Lines between a note's place and a reproduction's that are of one part of a file.
NEAR = 30
ALIKE = re.compile(r"As (\w+)(?: \(.*\))?\.")


@cache
def modules() -> dict[str, Any]:
    """The files of reproductions, imported as they are when they are run: from their own folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: importlib.import_module(name) for name in FILES}
    finally:
        sys.path.remove(str(FOLDER))


def cases() -> list[Any]:
    """Every case of every file, in order."""
    found = list(modules().values()) and sys.modules["tiny"].CASES
    return sorted(found, key=lambda one: FILES.index(one.run.__module__))


def shows(found: Any, right: Any) -> bool:
    """Whether a case's outcome is the defect."""
    return bool(sys.modules["tiny"].shows(found, right))


def is_shown(place: str) -> bool:
    """Whether a reproduction names that part of the file "file.py:line"."""
    file, _, line = place.rpartition(":")
    lines = [
        int(other)
        for name, _, other in _shown_places()
        if f"/{name}".endswith("/" + file)
    ]
    return any(abs(int(line) - other) <= NEAR for other in lines)


def _shown_places() -> list[tuple[str, str, str]]:
    return [place.rpartition(":") for one in cases() for place in one.places]


def render() -> str:
    """Return the page."""
    families = {family for one in cases() for family in one.families}
    head = HEAD.format(cases=len(cases()), families=len(families))
    parts = [head.rstrip(), ""]
    for name, module in modules().items():
        title, _, rest = inspect.cleandoc(module.__doc__).partition("\n")
        parts += [f"## {title.rstrip('.')}", "", f"[{name}.py](upstream/{name}.py)", ""]
        parts += [rest.strip(), ""] if rest.strip() else []
        parts += [*_entries(_cases_of(name)), ""]
    parts += ["## Of MLX itself", "", *_of_mlx()]
    return re.sub(r"(?<!`)``(?!`)", "`", "\n".join(parts)) + "\n"


def _of_mlx() -> list[str]:
    """Return what a file says of MLX, which is slow, not wrong: nothing in it is a case."""
    path = FOLDER / "exponentials.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [f"[{path.name}](upstream/{path.name})", "", said.strip()]


def _cases_of(file: str) -> list[Any]:
    return [one for one in cases() if one.run.__module__ == file]


def _entries(found: list[Any]) -> list[str]:
    """Return a file's list: families, words, then names and places. Cases with the same words stand together."""
    groups: list[list[Any]] = []
    for one in found:
        alike = ALIKE.fullmatch(_words(one))
        same = (group for group in groups if _words(group[0]) == _words(one))
        like = (
            group for group in groups if alike and group[0].name.startswith(alike[1])
        )
        first = next(same, None) or next(like, None)
        if first is None:
            groups.append([one])
        else:
            first.append(one)
    return [_entry(group) for group in groups]


def _entry(group: list[Any]) -> str:
    families = dict.fromkeys(family for one in group for family in one.families)
    shown = [
        f"`{one.name}` ({', '.join(f'`{_short(place)}`' for place in one.places)})"
        for one in group
    ]
    named = ", ".join(families) or "every family"
    return f"- **{named}**: {_words(group[0])}\n  {', '.join(shown)}"


def _words(one: Any) -> str:
    """Return what a case says, on one line."""
    return " ".join(inspect.cleandoc(one.run.__doc__).split())


def _short(place: str) -> str:
    found: str = place.removeprefix("models/")
    return found


def places_of_notes(notes: tuple[str, ...]) -> list[str]:
    """The places "file.py:line" that notes name; ":line" alone continues the file before it."""
    found, file = [], ""
    for note in notes:
        for name, line in re.findall(r"([\w./]+\.py)?:(\d+)", note):
            file = name or file
            if "modeling_" not in file:
                found.append(f"{file}:{line}")
    return found


if __name__ == "__main__":
    (DOCS / "upstream.md").write_text(render(), encoding="utf-8")
