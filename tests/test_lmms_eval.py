"""The model of lmms-eval: what it answers, and its own evaluator over made questions where lmms-eval is installed."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lmms_declared
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint, sample_images

lmms_declared.stand_in()
MODULE = "vlm_batch.integrations.lmms_eval"
ours: Any = importlib.import_module(MODULE)
Instance: Any = sys.modules["lmms_eval.api.instance"].Instance
NEEDED = pytest.mark.skipif(
    not lmms_declared.is_installed(),
    reason="lmms-eval is not installed (pip install lmms-eval 'filelock<4')",
)

PICTURES = [str(path) for path in sample_images()[2:6]]
CHOICES = ["a red circle", "a blue square", "no shapes", "a receipt"]
PROMPT = "describe the image"
TASK = """
task: made_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output}
doc_to_visual: !function made.pictures
doc_to_text: "{prompt}"
doc_to_target: {target}
{more}
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""
FUNCTIONS = """
from PIL import Image

def pictures(doc):
    return [Image.open(doc["path"]).convert("RGB")]
"""


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint()) as made:
        yield made


@pytest.fixture(scope="module")
def answers(batcher: VLMBatcher) -> list[str]:
    handles = [batcher.submit(path, PROMPT) for path in PICTURES]
    return [handle.result(timeout=60).text for handle in handles]


@pytest.fixture
def tasks(tmp_path: Path, answers: list[str]) -> Any:
    """A task that generates and one with choices, whose right answers are the model's own."""
    data = tmp_path / "made.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for path, answer in zip(PICTURES, answers, strict=True):
            # one that begins the answer would score no less
            others = [one for one in CHOICES if not answer.startswith(one)]
            choices = [answer, *others]
            line = {"path": path, "answer": answer, "choices": choices, "gold": 0}
            file.write(json.dumps(line) + "\n")
    (tmp_path / "made.py").write_text(FUNCTIONS, encoding="utf-8")
    kinds: dict[str, dict[str, str]] = {
        "generated": {
            "output": "generate_until",
            "target": "answer",
            "metric": "exact_match",
            "more": "generation_kwargs: {max_new_tokens: 24, do_sample: false}",
        },
        "chosen": {
            "output": "multiple_choice",
            "target": "gold",
            "metric": "acc",
            "more": 'doc_to_choice: choices\ntarget_delimiter: ""',
        },
    }
    for name, said in kinds.items():
        text = TASK.format(name=name, data=data, prompt=PROMPT, **said)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    manager = importlib.import_module("lmms_eval.tasks").TaskManager
    return manager(include_path=str(tmp_path), include_defaults=False)


def evaluated(model: Any, tasks: Any, task: str, **how: Any) -> dict[str, Any]:
    evaluate = importlib.import_module("lmms_eval.evaluator").simple_evaluate
    found: Any = evaluate(
        model=model,
        tasks=[task],
        task_manager=tasks,
        cli_args=SimpleNamespace(process_with_media=True, **how),
        **how,
    )
    assert found is not None
    results: dict[str, Any] = found["results"][task]
    return results


@NEEDED
@pytest.mark.parametrize("kind", ["VLMBatch", "VLMBatchChat"])
def test_its_evaluator_generates(kind: str, batcher: VLMBatcher, tasks: Any) -> None:
    found = evaluated(getattr(ours, kind)(batcher), tasks, "made_generated")
    assert found["exact_match,none"] == 1.0


@NEEDED
def test_its_evaluator_chooses(batcher: VLMBatcher, tasks: Any) -> None:
    found = evaluated(ours.VLMBatch(batcher), tasks, "made_chosen", force_simple=True)
    assert found["acc,none"] == 1.0


def test_losses_are_those_of_the_options(batcher: VLMBatcher) -> None:
    model = ours.VLMBatch(batcher)
    model.task_dict = {"made": {"test": [{"path": path} for path in PICTURES]}}
    instances = [
        Instance(
            request_type="loglikelihood",
            arguments=(
                f"<image>{PROMPT}",
                said,
                lambda doc: [[doc["path"]]],
                at,
                "made",
                "test",
            ),
            idx=0,
            metadata={"task": "made", "doc_id": at, "repeats": 1},
        )
        for said in ("a red circle", lambda doc: "a blue square", "")
        for at in range(2)
    ]
    found = model.loglikelihood(instances)
    for at in range(2):
        asked = {"images": PICTURES[at], "prompt": PROMPT}
        right = batcher.score(asked, ["a red circle", "a blue square"])
        mine = [found[at], found[2 + at]]
        assert [loss for loss, _ in mine] == pytest.approx(
            [-one.logprob for one in right], abs=1e-3
        )
        assert [greedy for _, greedy in mine] == [one.is_greedy for one in right]
        assert found[4 + at] == (math.inf, False)


def test_a_question_that_fails_fails_alone(
    batcher: VLMBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    model = ours.VLMBatch(batcher)
    docs = [{"path": PICTURES[0]}, {"path": "gone.png"}]
    model.task_dict = {"made": {"test": docs}}
    given = {"max_new_tokens": 8, "until": ["\n\n"], "beam": 3}
    instances = [
        Instance(
            request_type="generate_until",
            arguments=(PROMPT, given, lambda doc: doc["path"], at, "made", "test"),
            idx=0,
            metadata={"task": "made", "doc_id": at, "repeats": 1},
        )
        for at in range(2)
    ]
    first, second = model.generate_until(instances)
    assert first.text and first.token_counts.output_tokens
    assert second.text == ""
    assert "gone.png does not exist" in caplog.text
    assert "beam is not read" in caplog.text


def test_chats_have_their_media_in_order(batcher: VLMBatcher) -> None:
    """The words of a chat's turns, and pictures where they stand."""
    model = ours.VLMBatchChat(batcher)
    model.task_dict = {"made": {"test": [{}]}}
    parts = [
        {"type": "image", "url": PICTURES[1]},
        {"type": "image", "url": PICTURES[2]},
        {"type": "text", "text": "what is in the second picture?"},
    ]
    chat = [{"role": "user", "content": parts}]
    arguments = ("", lambda doc: chat, {"max_new_tokens": 16}, 0, "made", "test")
    metadata = {"task": "made", "doc_id": 0, "repeats": 1}
    instance = Instance("generate_until", arguments, 0, metadata)
    handle = batcher.submit(PICTURES[1:3], parts[2]["text"], params={"max_tokens": 16})
    assert model.generate_until([instance])[0].text == handle.result(timeout=60).text


def test_what_it_made_it_closes(batcher: VLMBatcher) -> None:
    ours.VLMBatch(batcher).clean()
    assert batcher.submit(prompt="count to 3").result(timeout=60).ok
    made = ours.VLMBatch(pretrained=str(default_checkpoint()), max_rows=2)
    made.clean()
    assert made.batcher._loop.is_gone
    with pytest.raises(ValueError, match="model=PATH"):
        ours.VLMBatch()


def test_media_of_every_kind() -> None:
    media = ours._Media()
    sound = {"array": [0.0] * 160, "sampling_rate": 16000}
    given = ["a.PNG", "b.mp4", "c.wav", sound, object()]
    kinds = [media.add(one) for one in given]
    assert kinds == ["image", "video", "audio", "audio", "image"]
    assert [len(line) for line in media.fields.values()] == [2, 1, 2]


def test_it_is_found() -> None:
    made = ours.manifest()
    assert made.simple_class_path == f"{MODULE}.VLMBatch"
    assert made.chat_class_path == f"{MODULE}.VLMBatchChat"
    assert (ours.VLMBatch.is_simple, ours.VLMBatchChat.is_simple) == (True, False)


@NEEDED
def test_its_registry_finds_it() -> None:
    registry = sys.modules["lmms_eval.models.registry_v2"].ModelRegistryV2()
    registry.register_manifest(ours.manifest())
    assert registry.get_model_class("vlm_batch") is ours.VLMBatchChat
    simple = registry.get_model_class("vlm_batch", force_simple=True)
    assert simple is ours.VLMBatch
    points = entry_points(group="lmms_eval.models")
    if f"{MODULE}:manifest" in [point.value for point in points]:  # of this version
        models = importlib.import_module("lmms_eval.models")
        assert models.get_model("vlm_batch") is ours.VLMBatchChat


@NEEDED
def test_what_is_declared_is_what_lmms_eval_has() -> None:
    for name, declared in lmms_declared.DECLARED.items():
        theirs_all = importlib.import_module(name)
        for one in declared:
            theirs = getattr(theirs_all, one.__name__)
            if not is_dataclass(one):
                assert theirs.is_simple is one.is_simple
                continue
            needed = [made.name for made in fields(one)]
            assert [made.name for made in fields(theirs)][: len(needed)] == needed
