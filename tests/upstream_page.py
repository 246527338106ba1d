"""docs/upstream.md from the reproductions in docs/upstream: ``python -m tests.upstream_page`` writes it."""

from __future__ import annotations

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
    "one_offset_for_all",
    "padding",
    "chunks",
    "masks",
    "several_pictures",
    "vision",
    "configured",
    "checkpoints",
    "mllama",
    "other_models",
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
    "falcon_ocr.py:17": "falcon_ocr takes prompts whole: a limit, not a defect",
}

HEAD = """# Defects of mlx-vlm 0.7.10

These are the defects of mlx-vlm that this library's adapters patch or avoid. Each has a reproduction that runs against
mlx-vlm alone, with tiny random models. It prints what mlx-vlm does, what is right, and the place of the cause:

```sh
python docs/upstream/merged_keywords.py
```

The files share [tiny.py](upstream/tiny.py), which builds the models of [configs.json](upstream/configs.json).
`tests/test_upstream.py` runs all of them. When mlx-vlm corrects one, its test fails, and the reproduction and the
adapter's patch can go. Each says what is right. Where it does not, the right answer is the one that mlx-vlm itself gives
to the same request alone. The evidence against transformers is in `tests/references`: recorded answers of the same
weights, which `tests/test_zoo.py` compares.

Places are file and line of 0.7.10. `python -m tests.upstream_page` writes this page from the files' docstrings.
"""


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


def render() -> str:
    """The page."""
    parts = [HEAD]
    for name, module in modules().items():
        title, _, rest = inspect.cleandoc(module.__doc__).partition("\n")
        parts += [f"## {title.rstrip('.')}", "", f"[{name}.py](upstream/{name}.py)", ""]
        parts += [rest.strip(), ""] if rest.strip() else []
        for one in cases():
            if one.run.__module__ == name:
                places = ", ".join(f"`{place.removeprefix('models/')}`" for place in one.places)
                words = " ".join(inspect.cleandoc(one.run.__doc__).split())
                parts.append(f"- `{one.name}` ({', '.join(one.families)}; {places}): {words}")
        parts.append("")
    parts += ["## Known, and not shown", ""]
    parts += [f"- {why} (`{place}`)." for place, why in NOT_SHOWN.items()]
    return re.sub(r"(?<!`)``(?!`)", "`", "\n".join(parts)) + "\n"


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
