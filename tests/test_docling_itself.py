"""docling itself with this library's engine. Skipped where docling is not installed."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import docling_declared as declared
from tests.test_docling import ANSWERS, FIXTURES, PROMPT, AtSecondSpace, pictures

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NEEDED = "docling is not installed (pip install vlm-batch[docling])"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models as docling keeps them."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen2_vl", "qwen3_vl", "aya_vision"):
        (folder / f"tiny--{name}").symlink_to(FIXTURES / "checkpoints" / name)
    return folder


@pytest.mark.parametrize("module", declared.DECLARED)
def test_what_is_declared_is_what_docling_has(module: str) -> None:
    pytest.importorskip("docling.document_converter", reason=NEEDED)
    theirs_all = importlib.import_module(module)
    ours: Any
    for ours in declared.DECLARED[module]:
        theirs = getattr(theirs_all, ours.__name__)
        if isinstance(ours, type) and issubclass(ours, declared.Enum):
            assert {one.name: one.value for one in ours}.items() <= {
                one.name: one.value for one in theirs
            }.items()
        elif is_dataclass(ours):
            needed = {one.name for one in fields(ours)}
            assert needed <= set(theirs.model_fields), ours
        else:
            wanted = list(inspect.signature(ours).parameters)
            assert list(inspect.signature(theirs).parameters) == wanted, ours.__name__


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "aya_vision"])
def test_pages_have_the_answers_of_docling_s_engine(family: str, models: Path) -> None:
    pytest.importorskip("docling.document_converter", reason=NEEDED)
    from docling.datamodel.stage_model_specs import EngineModelConfig
    from docling.datamodel.vlm_engine_options import MlxVlmEngineOptions
    from docling.models.inference_engines.vlm.base import VlmEngineInput
    from docling.models.inference_engines.vlm.mlx_engine import MlxVlmEngine
    from docling.models.utils.generation_utils import GenerationStopper

    from vlm_batch.integrations.docling import BatchedVlmEngine

    class SecondSpace(AtSecondSpace, GenerationStopper):
        pass

    config = EngineModelConfig(repo_id=f"tiny/{family}", revision="main")
    options = MlxVlmEngineOptions()
    theirs = MlxVlmEngine(options, artifacts_path=models, model_config=config)
    ours = BatchedVlmEngine(options, artifacts_path=models, model_config=config)
    stopper = {"custom_stopping_criteria": [SecondSpace]}
    for stop in ([], ["circle"], ["e"], ["le", " cross"]):
        for most in (1, 6, 40):
            for extra in ({}, stopper):
                inputs = [
                    VlmEngineInput(
                        image=one,
                        prompt=PROMPT,
                        max_new_tokens=most,
                        stop_strings=stop,
                        extra_generation_config=extra,
                    )
                    for one in pictures()
                ]
                right = theirs.predict_batch(inputs)
                for one, two in zip(right, ours.predict_batch(inputs), strict=True):
                    assert (two.text, two.stop_reason) == (one.text, one.stop_reason)
                    assert set(one.metadata) <= set(two.metadata)
                    counted = one.metadata["num_tokens"] - two.metadata["num_tokens"]
                    assert counted in (0, 1)  # an empty last piece of theirs
    ours.cleanup()


def test_documents_go_through_docling_s_converter(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of several documents meet in one batch, in docling's own order and Markdown."""
    pytest.importorskip("docling.document_converter", reason=NEEDED)
    from docling.datamodel.base_models import InputFormat
    from docling.datamodel.pipeline_options import VlmConvertOptions, VlmPipelineOptions
    from docling.datamodel.pipeline_options_vlm_model import ResponseFormat
    from docling.datamodel.settings import settings
    from docling.datamodel.stage_model_specs import VlmModelSpec
    from docling.datamodel.vlm_engine_options import MlxVlmEngineOptions
    from docling.document_converter import DocumentConverter, PdfFormatOption

    from vlm_batch.integrations.docling import BatchedVlmPipeline, VLMBatcher

    spec = VlmModelSpec(
        name="tiny",
        default_repo_id="tiny/qwen2_vl",
        prompt=PROMPT,
        response_format=ResponseFormat.MARKDOWN,
        max_new_tokens=40,
    )
    options = VlmPipelineOptions(
        artifacts_path=models,
        vlm_options=VlmConvertOptions(
            model_spec=spec, engine_options=MlxVlmEngineOptions(), scale=1.0
        ),
    )
    files = [tmp_path / f"{number}.pdf" for number in range(3)]
    for file in files:
        first, *others = [one.convert("RGB") for one in pictures()]
        first.save(file, save_all=True, append_images=others, resolution=72)
    monkeypatch.setattr(settings.perf, "doc_batch_size", 3)
    monkeypatch.setattr(settings.perf, "doc_batch_concurrency", 3)
    alive: list[int] = []
    submit = VLMBatcher.submit_request

    def counted(self: Any, request: Any) -> Any:
        handle = submit(self, request)
        now = self.stats()
        alive.append(now.queued + now.waiting + now.prefilling + now.decoding)
        return handle

    monkeypatch.setattr(VLMBatcher, "submit_request", counted)
    pdf = PdfFormatOption(pipeline_cls=BatchedVlmPipeline, pipeline_options=options)
    converter = DocumentConverter(format_options={InputFormat.PDF: pdf})
    converted = list(converter.convert_all(files))
    assert [one.status.value for one in converted] == ["success"] * 3
    for one in converted:
        assert one.document.export_to_markdown() == "\n\n".join(ANSWERS)
    assert len(alive) == 6 and max(alive) > 2, "pages of one document alone"
