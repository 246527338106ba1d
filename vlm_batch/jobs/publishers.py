"""Prompts of document models' publishers, by task, with their settings.

Prompts and numbers are the publishers' own; ``source`` says where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vlm_batch.jobs.boxes import BOX_FORMS, BoxForm
from vlm_batch.jobs.pages import Enlarging

#: What a page can be asked for. A model without a prompt of its own for a task is asked the plain one.
TASKS = ("ocr", "markdown", "table", "formula", "layout")
#: Prompts for models whose publishers name none.
PLAIN_PROMPTS: Mapping[str, str] = MappingProxyType(
    {
        "markdown": "Convert this page to Markdown. Keep the reading order, write tables as tables and formulas in LaTeX, "
        "leave nothing out, and answer with the Markdown alone.",
        "ocr": "Read all of the text of this page, in reading order, and answer with the text alone.",
        "table": "Write the tables of this page as HTML, and answer with the HTML alone.",
        "formula": "Write the formulas of this page in LaTeX, and answer with the LaTeX alone.",
    }
)
#: A second attempt at a page that fell into a loop, where the publisher says nothing of loops. A sequence of so many
#: tokens is seldom repeated within a window of a page's text, but for tables' rules and empty cells.
AGAIN: Mapping[str, Any] = MappingProxyType(
    {"no_repeat_ngram_size": 20, "window_size": 400}
)

_DOTS_LAYOUT = """Please output the layout information from the PDF image, including each layout element's bbox, its category, \
and the corresponding text content within the bbox.

1. Bbox format: [x1, y1, x2, y2]

2. Layout Categories: The possible categories are ['Caption', 'Footnote', 'Formula', 'List-item', 'Page-footer', \
'Page-header', 'Picture', 'Section-header', 'Table', 'Text', 'Title'].

3. Text Extraction & Formatting Rules:
    - Picture: For the 'Picture' category, the text field should be omitted.
    - Formula: Format its text as LaTeX.
    - Table: Format its text as HTML.
    - All Others (Text, Title, etc.): Format their text as Markdown.

4. Constraints:
    - The output text must be the original text from the image, with no translation.
    - All layout elements must be sorted according to human reading order.

5. Final Output: The entire output must be a single JSON object.
"""
_OLMOCR = (
    "Attached is one page of a document that you must process. Just return the plain text representation of this "
    "document as if you were reading it naturally. Convert equations to LateX and tables to HTML.\n"
    "If there are any figures or charts, label them with the following markdown syntax ![Alt text describing the "
    "contents of the figure](page_startx_starty_width_height.png)\n"
    "Return your output as markdown, with a front matter section on top specifying values for the primary_language, "
    "is_rotation_valid, rotation_correction, is_table, and is_diagram parameters."
)
_NANONETS = (
    "Extract the text from the above document as if you were reading it naturally. Return the tables in html format. "
    "Return the equations in LaTeX representation. If there is an image in the document and image caption is not "
    "present, add a small description of the image inside the <img></img> tag; otherwise, add the image caption inside "
    "<img></img>. Watermarks should be wrapped in brackets. Ex: <watermark>OFFICIAL COPY</watermark>. Page numbers "
    "should be wrapped in brackets. Ex: <page_number>14</page_number> or <page_number>9/22</page_number>. Prefer using "
    "☐ and ☑ for check boxes."
)
#: vLLM's recipe: no 30 tokens twice among 90, but for the two that end and begin a cell.
_DEEPSEEK = MappingProxyType(
    {
        "max_tokens": 8192,
        "no_repeat_ngram_size": 30,
        "window_size": 90,
        "whitelist_token_ids": (128821, 128822),
        "skip_special_tokens": False,
    }
)
#: Qwen's cookbook; Qwen2-VL has the same asked in its report's form.
_SPOTTING = (
    "Spotting all the text in the image with line-level, and output in JSON format."
)
_GROUNDING = "Find all lines of text on this page, and give each with its bounding box."
_DEEPSEEK_PROMPTS = MappingProxyType(
    {
        "markdown": "<|grounding|>Convert the document to markdown.",
        "ocr": "Free OCR.",
        "layout": "<|grounding|>OCR this image.",
    }
)


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """A publisher's way to ask its models about pages.

    Attributes:
        models: What its models' names hold, in lower case, letters and digits alone.
        model_types: Model types that only its models have.
        prompts: By task; the first is the default. An empty one means the page alone.
        params: Sampling parameters for every page.
        again: Further ones for a page that fell into a loop.
        longest: Pixels of the longest side of a rendered page; None leaves it to ``--dpi``.
        enlarging: By task, how small pages are enlarged.
        source: Where all of this is published.
    """

    models: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    prompts: Mapping[str, str]
    params: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, Any] = field(default_factory=lambda: AGAIN)
    longest: int | None = None
    enlarging: Mapping[str, Enlarging] = field(default_factory=dict)
    source: str

    @property
    def boxes(self) -> BoxForm | None:
        """The form of boxes that its models write; None if they write none."""
        if self.models:
            return BOX_FORMS.get(self.models[0])
        return None

    def has_named(self, name: str) -> bool:
        """Whether a name, in lower case, letters and digits alone, is of one of its models."""
        return any(one in name for one in self.models)


PUBLISHERS = (
    Publisher(
        models=("deepseekocr", "unlimitedocr"),
        model_types=("deepseekocr", "deepseekocr_2", "unlimited_ocr"),
        prompts=_DEEPSEEK_PROMPTS,
        params=_DEEPSEEK,
        source="https://recipes.vllm.ai/deepseek-ai/DeepSeek-OCR, config.py of deepseek-ai/DeepSeek-OCR",
    ),
    Publisher(
        models=("dotsocr", "dotsmocr"),
        model_types=("dots_ocr",),
        prompts={
            "ocr": "Extract the text content from this image.",
            "layout": _DOTS_LAYOUT,
        },
        params={"max_tokens": 16384},
        source="dots_ocr/utils/prompts.py of rednote-hilab/dots.ocr",
    ),
    Publisher(
        models=("olmocr",),
        prompts={"markdown": _OLMOCR},
        params={"max_tokens": 8000},
        again={"temperature": 0.1},
        longest=1288,
        source="olmocr 0.4.27: olmocr/prompts/prompts.py, olmocr/pipeline.py (each attempt is hotter than the last)",
    ),
    Publisher(
        models=("granitedocling", "smoldocling"),
        prompts={
            "markdown": "Convert this page to docling.",
            "table": "Convert table to OTSL.",
            "formula": "Convert formula to LaTeX.",
        },
        params={"max_tokens": 8192, "skip_special_tokens": False},
        source="model card of ibm-granite/granite-docling-258M; docling 2.143: vlm_model_specs.py",
    ),
    Publisher(
        models=("paddleocrvl",),
        model_types=("paddleocr_vl",),
        prompts={
            "ocr": "OCR:",
            "table": "Table Recognition:",
            "formula": "Formula Recognition:",
            "layout": "Spotting:",
        },
        params={"max_tokens": 4096},
        # 1.5's own processor has at most 1280 * 28 * 28
        enlarging={"layout": Enlarging(1500, (1280 * 28 * 28 + 1, 2048 * 28 * 28))},
        source="paddlex 3.7.2: inference/pipelines/paddleocr_vl/pipeline.py, uilts.py (layout: from PaddleOCR-VL-1.5 on, "
        "as its model card)",
    ),
    Publisher(
        models=("nanonetsocr",),
        prompts={"markdown": _NANONETS},
        params={"max_tokens": 15000},
        source="model cards of nanonets/Nanonets-OCR-s and Nanonets-OCR2-3B",
    ),
    Publisher(
        models=("glmocr",),
        model_types=("glm_ocr",),
        prompts={
            "ocr": "Text Recognition:",
            "table": "Table Recognition:",
            "formula": "Formula Recognition:",
        },
        params={"max_tokens": 8192},
        source="docling 2.143: stage_model_specs.py; model card of zai-org/GLM-OCR",
    ),
    Publisher(
        models=("falconocr",),
        model_types=("falcon_ocr",),
        prompts={"ocr": "Extract the text content from this image."},
        params={"max_tokens": 4096},
        source="README of tiiuae/Falcon-Perception",
    ),
    Publisher(
        models=("lightonocr",),
        prompts={"markdown": ""},
        params={"max_tokens": 4096, "temperature": 0.2, "top_p": 0.9},
        longest=1540,
        source="model card of lightonai/LightOnOCR-2-1B: the page alone, no text beside it",
    ),
    Publisher(
        models=("florence2",),
        model_types=("florence2",),
        prompts={"ocr": "<OCR>", "layout": "<OCR_WITH_REGION>"},
        params={"max_tokens": 1000, "skip_special_tokens": False},
        source="model card of microsoft/Florence-2-large",
    ),
    Publisher(
        models=("nemotronparse",),
        model_types=("nemotron_parse",),
        prompts={
            "markdown": "</s><s><predict_bbox><predict_classes><output_markdown><predict_no_text_in_pic>"
        },
        params={
            "max_tokens": 9000,
            "repetition_penalty": 1.1,
            "skip_special_tokens": False,
        },
        source="docling 2.143: stage_model_specs.py",
    ),
    Publisher(
        models=("mineru",),
        prompts={
            "ocr": "\nText Recognition:",
            "table": "\nTable Recognition:",
            "formula": "\nFormula Recognition:",
            "layout": "\nLayout Detection:",
        },
        params={
            "no_repeat_ngram_size": 100,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.05,
            "skip_special_tokens": False,
        },
        source="mineru-vl-utils 2.0.7: mineru_client.py",
    ),
    Publisher(
        models=("qwen2vl",),
        prompts={**PLAIN_PROMPTS, "layout": _GROUNDING},
        params={"skip_special_tokens": False},
        source="our own words",
    ),
    Publisher(
        models=("qwen25vl",),
        prompts={**PLAIN_PROMPTS, "layout": _SPOTTING},
        source="our own words; layout: the cookbooks of QwenLM/Qwen2.5-VL",
    ),
    Publisher(
        models=("qwen3vl",),
        prompts={**PLAIN_PROMPTS, "layout": _SPOTTING},
        source="our own words; layout: the cookbooks of QwenLM/Qwen3-VL",
    ),
)


#: The embedded sample.
SAMPLE = Publisher(
    models=(),
    prompts={"ocr": "Read the page.", "table": "Read the table."},
    params={"max_tokens": 512},
    source="fixtures/reader/README.md",
)


_BY_TYPE = {kind: one for one in PUBLISHERS for kind in one.model_types}
#: Whoever is not known.
UNKNOWN = Publisher(models=(), prompts=PLAIN_PROMPTS, source="our own words")


def publisher_of(model: str, model_type: str | None) -> Publisher:
    """Find who published a model, by its name or, where only one publisher has it, its model type; else ``UNKNOWN``.

    Args:
        model: A hub id or a path. The hub's own cache has the name in the middle of the path.
        model_type: What config.json says, if there is one.
    """
    for part in reversed(re.split(r"[/\\]", model)):
        name = re.sub(r"[^a-z0-9]", "", part.lower())
        for publisher in PUBLISHERS:
            if publisher.has_named(name):
                return publisher
    return _BY_TYPE.get(model_type or "", UNKNOWN)
