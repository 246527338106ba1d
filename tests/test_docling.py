"""docling's pipeline with this library's engine: texts, ends and metadata are those of docling's engine for MLX.

These run on what docling declares (``tests/docling_declared.py``); ``tests/test_docling_itself.py`` runs docling.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests import docling_declared as declared

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ("red_circle", "yellow_triangle_left_of_green_cross")
ANSWERS = ("a red circle", "a yellow triangle left of a green cross")
PROMPT = "describe the picture"
PLUG_IN = "vlm_batch.integrations.docling"


@pytest.fixture(scope="module")
def plug() -> Iterator[Any]:
    """The plug-in, on what docling declares."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [one for one in sys.modules if one.split(".")[0] == "docling"]:
            patch.delitem(sys.modules, name)
        for name, module in declared.modules().items():
            patch.setitem(sys.modules, name, module)
        sys.modules.pop(PLUG_IN, None)
        yield importlib.import_module(PLUG_IN)
    del sys.modules[PLUG_IN]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models as docling keeps them."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny--qwen2_vl").symlink_to(FIXTURES / "checkpoints" / "qwen2_vl")
    return folder


@pytest.fixture(scope="module")
def engine(plug: Any, models: Path) -> Iterator[Any]:
    config = declared.EngineModelConfig(repo_id="tiny/qwen2_vl")
    made = plug.BatchedVlmEngine(declared.MlxVlmEngineOptions(), models, config)
    yield made
    made.cleanup()


def pictures() -> list[Image.Image]:
    files = [FIXTURES / "images" / f"{name}.png" for name in NAMES]
    return [Image.open(file).convert("RGB") for file in files]


def asked(**options: Any) -> list[declared.VlmEngineInput]:
    return [declared.VlmEngineInput(one, PROMPT, **options) for one in pictures()]


class AtSecondSpace(declared.GenerationStopper):
    def should_stop(self, s: str) -> bool:
        return s.count(" ") == 2


class AtTag(AtSecondSpace):
    def is_valid_end(self) -> bool:
        return True


class Raises(declared.GenerationStopper):
    def should_stop(self, s: str) -> bool:
        raise ZeroDivisionError


class LooksBack(declared.GenerationStopper):
    """Ends at "left" if no more than four characters are shown."""

    def lookback_tokens(self) -> int:
        return 4

    def should_stop(self, s: str) -> bool:
        return s == "left"


def test_answers_ends_and_metadata(engine: Any) -> None:
    outputs = engine.predict_batch(asked())
    assert [one.text for one in outputs] == list(ANSWERS)
    for one in outputs:
        assert one.stop_reason == "unspecified"
        assert one.metadata["model"] == "tiny/qwen2_vl"
        assert one.metadata["generation_time"] > 0
        assert one.metadata["num_tokens"] == len(one.text.split()) + 1


def test_a_cut_page_says_so_where_docling_keeps_silent(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (_, cut) = engine.predict_batch(asked(max_new_tokens=3))
    assert (cut.text, cut.stop_reason) == ("a yellow triangle", "unspecified")
    assert cut.metadata["finish_reason"] == "length"
    assert "cut after 3 tokens" in caplog.text


def test_a_stop_string_stays_in_the_text_with_its_token(engine: Any) -> None:
    outputs = engine.predict_batch(asked(stop_strings=["tri", "zebra"]))
    assert [(one.text, one.stop_reason) for one in outputs] == [
        (ANSWERS[0], "unspecified"),
        ("a yellow triangle", "stop_string"),
    ]


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [(AtSecondSpace, "stop_sequence"), (AtTag(), "end_of_sequence")],
)
def test_a_criterion_ends_its_page(engine: Any, criterion: Any, reason: str) -> None:
    given = {"custom_stopping_criteria": [Raises(), criterion]}
    outputs = engine.predict_batch(asked(extra_generation_config=given))
    assert [one.text for one in outputs] == ["a red circle", "a yellow triangle"]
    assert [one.stop_reason for one in outputs] == [reason, reason]
    assert outputs[1].metadata["num_tokens"] == 3


def test_a_criterion_sees_as_much_as_it_asks_for(engine: Any) -> None:
    given = {"custom_stopping_criteria": [LooksBack()]}
    outputs = engine.predict_batch(asked(extra_generation_config=given))
    assert [one.text for one in outputs] == [ANSWERS[0], "a yellow triangle left"]


def test_a_stop_string_comes_before_a_criterion(engine: Any) -> None:
    given = {"custom_stopping_criteria": [AtSecondSpace]}
    inputs = asked(extra_generation_config=given, stop_strings=["circle"])
    assert engine.predict_batch(inputs)[0].stop_reason == "stop_string"


def test_a_page_that_fails_leaves_the_others(engine: Any) -> None:
    good, bad = asked()
    bad.max_new_tokens = 0
    large = declared.VlmEngineInput(Image.new("RGB", (1, 4000)), PROMPT)
    outputs = engine.predict_batch([good, bad, large])
    assert [one.text for one in outputs] == [ANSWERS[0], "", ""]
    assert [one.stop_reason for one in outputs[1:]] == ["inference_error"] * 2
    assert "max_tokens" in outputs[1].metadata["error"]
    assert outputs[2].metadata["error"]


def test_penalties_are_docling_s_options(plug: Any, models: Path) -> None:
    config = declared.EngineModelConfig(repo_id="tiny/qwen2_vl")
    options = declared.MlxVlmEngineOptions(
        repetition_penalty=900.0, repetition_context_size=50
    )
    engine = plug.BatchedVlmEngine(options, models, config)
    (_, changed) = engine.predict_batch(asked(max_new_tokens=9))
    engine.cleanup()
    assert changed.text != ANSWERS[1], "every token of it comes once more"


def test_threads_share_the_batch(plug: Any) -> None:
    """Two documents' pages are submitted before any is answered."""
    both = threading.Barrier(2, timeout=30)

    class Handle:
        def result(self) -> Any:
            both.wait()  # a batch of one document alone would wait for ever
            usage = SimpleNamespace(completion_tokens=1)
            timings = SimpleNamespace(encode=0.1, prefill=0.1, decode=0.1)
            return SimpleNamespace(
                text="page",
                error=None,
                finish_reason="stop",
                stop_reason=None,
                usage=usage,
                timings=timings,
            )

    batcher = SimpleNamespace(
        recommended_sampling=SimpleNamespace(params={}),
        submit_request=lambda request: Handle(),
        close=lambda: pytest.fail("a batcher that was given stays open"),
    )
    engine = plug.BatchedVlmEngine(declared.MlxVlmEngineOptions(), batcher=batcher)
    texts: list[str] = []

    def read() -> None:
        texts.extend(one.text for one in engine.predict_batch(asked()[:1]))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    engine.cleanup()
    assert texts == ["page", "page"]


def pipeline_options(engine_options: Any, models: Path) -> declared.VlmPipelineOptions:
    def config_of(kind: declared.VlmEngineType) -> declared.EngineModelConfig:
        assert kind == declared.VlmEngineType.MLX
        return declared.EngineModelConfig(repo_id="tiny/qwen2_vl")

    spec = SimpleNamespace(
        response_format=declared.ResponseFormat.DOCTAGS,
        get_engine_config=config_of,
        trust_remote_code=False,
    )
    options = declared.VlmConvertOptions(engine_options, spec, force_backend_text=True)
    return declared.VlmPipelineOptions(options, models, generate_page_images=True)


def test_the_pipeline_has_one_stage_of_ours(plug: Any, models: Path) -> None:
    class Small(plug.BatchedVlmPipeline):  # type: ignore[misc,name-defined]
        batcher_options = {"max_rows": 3}

    pipeline = Small(pipeline_options(declared.AutoInlineVlmEngineOptions(), models))
    (stage,) = pipeline.build_pipe
    assert pipeline.keep_images and pipeline.force_backend_text
    assert stage.enabled and stage.repo_id == "tiny/qwen2_vl"
    assert stage.engine.batcher._policy.max_rows == 3
    stage.engine.cleanup()


def test_other_engines_are_refused(plug: Any, models: Path) -> None:
    with pytest.raises(ValueError, match="takes MlxVlmEngineOptions or Auto"):
        plug.BatchedVlmPipeline(
            pipeline_options(declared.BaseVlmEngineOptions(), models)
        )
    with pytest.raises(ValueError, match="takes VlmConvertOptions"):
        plug.BatchedVlmPipeline(declared.VlmPipelineOptions(object()))


def test_an_engine_without_a_model_says_so(plug: Any) -> None:
    engine = plug.BatchedVlmEngine(declared.MlxVlmEngineOptions())
    with pytest.raises(RuntimeError, match="no model is named"):
        engine.predict_batch(asked())
