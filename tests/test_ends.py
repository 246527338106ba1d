"""What ends an answer: everything that mlx-vlm's loops read, and what becomes of it here."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_vlm
import pytest

from tests.checkpoints import write_checkpoint
from tests.test_folders import PROCESSORS, write_processor, write_tokenizer
from tests.zoo import END_OF_TEXT
from vlm_batch import SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading import load_model

#: Who an attribute belongs to, by the names that mlx-vlm's code gives it.
OWNERS = frozenset(
    {
        "processor",
        "tokenizer",
        "config",
        "model_config",
        "generation_config",
        "text_config",
    }
)
#: mlx-vlm's code between a loaded model and an answer.
LOOPS = (
    *(
        "generate/ar.py",
        "generate/common.py",
        "generate/dispatch.py",
        "generate/types.py",
        "generate/video.py",
    ),
    *(
        "server/generation.py",
        "server/openai.py",
        "server/anthropic.py",
        "server/app.py",
    ),
    *(
        "server/request_normalization.py",
        "utils.py",
        "prompt_utils.py",
        "sample_utils.py",
        "structured.py",
    ),
    "tokenizer_utils.py",
)
#: What these files read, and what is done with it here. A new version that reads more fails the test below.
HONOURED = {
    "config": {
        "Processing.eos_token_ids": "eos_token_id generation_config",
        "Processing.inputs": "image_token_index",
        "loading": "model_type model_file quantization quantization_config text_config vision_config llm_config",
        "loading, by architecture": "architectures auto_map dflash_config markov_rank speculators_model_type",
        "not read: names, types and sizes for printing and converting": "_name_or_path torch_dtype encoder_config __dict__",
        "not read: settings of mlx-vlm's own server, not of a model": "apply_changes current fingerprint image_pixel_limits "
        "max_kv_size reload_kinds token_queue_timeout",
        "methods of a dictionary": "get items pop setdefault to_dict",
    },
    "model_config": {"loading": "model_path text_config vision_config audio_config"},
    "text_config": {
        "Adapter.max_context": "max_position_embeddings",
        "loading": "quantization_config",
        "server.wire: a field of requests of this name": "format get",
    },
    "processor": {
        "Processing.eos_token_ids": "additional_eos_token_ids stopping_criteria",
        "Processing.inputs": "__class__ feature_extractor image_processor pad_token pad_token_id eos_token process "
        "supports_multiple_audio tokenizer video_processor config",
        "ChatTemplate": "apply_chat_template chat_template image_token video_token",
        "engine.text": "detokenizer",
        "not applied: generate() alone shortens answers by it; transformers' are whole": "clean_output",
        "logits processors of mlx-vlm's forms; ours are inputs.grammar": "clone process_last_token reset "
        "requires_immediate_decode_yield",
    },
    "tokenizer": {
        "Processing.eos_token_ids": "eos_token_id eos_token_ids stopping_criteria eos_token",
        "Processing.inputs": "encode pad_token",
        "ChatTemplate": "apply_chat_template chat_template image_token video_token",
        "Processing.decode": "all_special_ids decode vocab",
        "engine.constraints: a budget of thinking": "thinking_budget_criteria",
    },
    "generation_config": {},
}


def _name_of(node: ast.expr) -> str:
    found = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return str(found).lstrip("_")


def _read_by_call(call: ast.Call) -> tuple[str, Any]:
    """What ``getattr(owner, "name", ...)`` and ``owner.get("name", ...)`` read."""
    words = [
        argument.value if isinstance(argument, ast.Constant) else None
        for argument in call.args
    ]
    if (
        isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and len(words) > 1
    ):
        return _name_of(call.args[0]), words[1]
    if (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("get", "pop")
        and words
    ):
        return _name_of(call.func.value), words[0]
    return "", None


def reads(source: str) -> Iterator[tuple[str, str]]:
    """(owner, attribute) of every attribute that code reads of the owners, by name, ``getattr``, ``get`` or index."""

    for node in ast.walk(ast.parse(source)):
        owner = ""
        name: Any = None
        if isinstance(node, ast.Attribute):
            owner, name = _name_of(node.value), node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, name = _name_of(node.value), node.slice.value
        elif isinstance(node, ast.Call):
            owner, name = _read_by_call(node)
        if owner in OWNERS and isinstance(name, str):
            yield owner, name


def test_whatever_mlx_vlm_reads_is_known() -> None:
    root = Path(mlx_vlm.__file__).parent
    found = {
        pair
        for file in LOOPS
        for pair in reads((root / file).read_text(encoding="utf-8"))
    }
    known = {
        (owner, name)
        for owner, told in HONOURED.items()
        for names in told.values()
        for name in names.split()
    }
    assert not found - known, (
        "mlx-vlm reads more: honour it, or say in HONOURED why not"
    )
    assert not known - found, "mlx-vlm no longer reads this"


def test_reads_are_found_in_every_spelling() -> None:
    code = 'self.processor.a; getattr(tokenizer, "b", 0); config.get("c"); config["d"]; model.config.e; other.f'
    assert set(reads(code)) >= {
        ("processor", "a"),
        ("tokenizer", "b"),
        ("config", "c"),
        ("config", "d"),
        ("config", "e"),
    }
    assert not [name for _, name in reads(code) if name == "f"]


def saved(folder: Path, name: str) -> Path:
    """A family's folder with the processor of tests/test_folders.py."""
    write_checkpoint(folder, name)
    made = PROCESSORS[name]
    write_tokenizer(folder, made.markers, made.picture, **made.named)
    write_processor(
        folder,
        made.whole,
        {"image_processor_type": made.part, **made.pictures},
        **made.settings,
    )
    return folder


def ends_of(folder: Path) -> tuple[set[int], set[int]]:
    """The ids that end an answer here and in mlx-vlm's loops."""
    model, processor = load_model(folder)
    theirs = getattr(processor, "tokenizer", processor).stopping_criteria.eos_token_ids
    return set(Processing(processor, model.config).eos_token_ids), set(theirs)


def test_a_processors_own_ends(tmp_path: Path) -> None:
    ours, theirs = ends_of(saved(tmp_path / "idefics3", "idefics3"))
    assert ours == theirs
    assert 131 in ours  # <end_of_utterance>


@pytest.mark.parametrize(
    ("file", "change", "ends"),
    [
        ("generation_config.json", {"eos_token_id": [7, 9]}, {7, 9, END_OF_TEXT}),
        ("generation_config.json", {"eos_token_id": 7}, {7, END_OF_TEXT}),
        ("config.json", {"eos_token_id": 8}, {8, END_OF_TEXT}),
        (
            "config.json",
            {"eos_token_id": None, "text_config": {"eos_token_id": 6}},
            {6, END_OF_TEXT},
        ),
        (
            "config.json",
            {"eos_token_id": 8, "text_config": {"eos_token_id": 6}},
            {8, END_OF_TEXT},
        ),
        ("tokenizer_config.json", {"eos_token": "w12"}, {12}),
    ],
    ids=[
        "generation_config",
        "one of it",
        "config",
        "decoder",
        "the whole before its decoder",
        "tokenizer",
    ],
)
def test_every_place_that_names_an_end(
    file: str, change: dict[str, Any], ends: set[int], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "qwen3_vl", "qwen3_vl")
    for path in folder.glob("*config.json"):  # so that one place alone names one
        said = json.loads(path.read_text(encoding="utf-8"))
        for part in (said, said.get("text_config", {})):
            part.pop("eos_token_id", None)
        if path.name == file:
            part = change.get("text_config", {})
            said |= {
                name: value for name, value in change.items() if name != "text_config"
            }
            said.setdefault("text_config", {}).update(part) if part else None
        path.write_text(json.dumps(said), encoding="utf-8")
    if not (folder / file).exists():
        (folder / file).write_text(json.dumps(change), encoding="utf-8")
    assert ends_of(folder)[0] == ends


def test_an_answer_ends_where_the_processor_says() -> None:
    """The id of "3" in "count to 5"."""
    model, processor = load_model(default_checkpoint())
    three = processor.tokenizer.encode("3", add_special_tokens=False)[-1]
    with VLMBatcher(model, processor) as batcher:
        whole = batcher.submit(
            prompt="count to 5", params=SamplingParams(max_tokens=16)
        ).result(timeout=60)
    kind = type(processor)
    named = type(
        kind.__name__,
        (kind,),
        {"additional_eos_token_ids": (three,), "__module__": kind.__module__},
    )
    processor.__class__ = named
    with VLMBatcher(model, processor) as batcher:
        cut = batcher.submit(
            prompt="count to 5", params=SamplingParams(max_tokens=16)
        ).result(timeout=60)
    assert (whole.text, whole.finish_reason) == ("1 2 3 4 5", "stop")
    assert (cut.text.strip(), cut.finish_reason) == ("1 2", "stop")
