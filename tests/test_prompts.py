"""transformers is the oracle of prompts: ids, grids and pixels, for every kind of tokenizer and place of a template.

Folders have small tokenizers of the kinds that occur, and no weights: nothing runs. transformers is asked once for all of them,
in a process of its own.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import layout, names
from tests.serving import IMAGES
from tests.test_folders import PROCESSORS, Saved, write_processor
from vlm_batch import Request, SamplingParams, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli import main as cli
from vlm_batch.cli.prompts import CASES, Folder, ask_transformers, differences
from vlm_batch.inputs.chats import in_text, split_messages, with_parts
from vlm_batch.inputs.processing import Processing

BEGIN, END = "<s>", "</s>"
#: What a tokenizer adds of itself: the pattern of TemplateProcessing.
ADDS = {
    "nothing": None,
    "a beginning": f"{BEGIN} $A",
    "an end": f"$A {END}",
    "both": f"{BEGIN} $A {END}",
}
CHAT = (
    "BEGIN{% if tools %}[TOOLS]{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% for call in message.tool_calls or [] %}[CALL]{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    """As Llama 3's and Qwen's."""
    made = Tokenizer(BPE({char: at for at, char in enumerate(BYTES)}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return made


def _pieces() -> BPE:
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *(chr(code) for code in range(33, 127)),
    ]
    return BPE(
        {word: at for at, word in enumerate(words)},
        [],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )


def dummy_prefix() -> Tokenizer:
    """As Llama 2's: a space before every piece of text between special tokens."""
    made = Tokenizer(_pieces())
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def first_prefix() -> Tokenizer:
    """As Mistral's and later Llama 2's: a space before the first piece alone."""
    made = Tokenizer(_pieces())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return made


@dataclass(frozen=True)
class Kind:
    """A folder: its family, tokenizer and template. ``place`` is the file that has the template, ``named`` the class that
    tokenizer_config.json says."""

    family: str = "qwen3_vl"
    tokenizer: Any = byte_level
    adds: str = "nothing"
    writes_begin: bool = True
    place: str = "chat_template.jinja"
    bare: bool = False
    named: str | None = None


#: What transformers' processors ask of a tokenizer, and mlx-vlm's do not.
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
NAMES: dict[str, Mapping[str, str]] = {"internvl": INTERN, "internvl_chat": INTERN}

KINDS: dict[str, Kind] = {
    f"adds {adds}, template writes {'it' if writes else 'none'}": Kind(
        adds=adds, writes_begin=writes
    )
    for adds in ADDS
    for writes in (True, False)
}
KINDS |= {
    f"{make.__name__} adds {adds}, template writes {'it' if writes else 'none'}": Kind(
        tokenizer=make, adds=adds, writes_begin=writes
    )
    for make in (dummy_prefix, first_prefix)
    for adds in ("nothing", "a beginning")
    for writes in (True, False)
}
KINDS |= {
    f"template in {place}": Kind(adds="a beginning", place=place)
    for place in (
        "chat_template.json",
        "tokenizer_config.json",
        "chat_templates",
        "nowhere",
    )
}
KINDS |= {
    f"bare tokenizer adds {adds}, template writes {'it' if writes else 'none'}": Kind(
        "falcon_h1", adds=adds, writes_begin=writes, bare=True
    )
    for adds in ("nothing", "a beginning", "both")
    for writes in (True, False)
}
KINDS["bare tokenizer, named templates"] = Kind(
    "falcon_h1", adds="a beginning", place="named", bare=True
)
KINDS["bare tokenizer without template"] = Kind(
    "falcon_h1", adds="a beginning", place="nowhere", bare=True
)
KINDS["bare tokenizer of bytes, called Llama's as DeepSeek's are"] = Kind(
    "falcon_h1", adds="a beginning", bare=True, named="LlamaTokenizerFast"
)
CLIP = {
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "do_center_crop": True,
}
PIXTRAL_MARKS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
GEMMA_MARKS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
GEMMA3N_MARKS = {
    **GEMMA_MARKS,
    "audio_token": "<audio>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
#: By the zoo's names. All but those in tests/test_folders.py that transformers builds without torch.
MORE = {
    "llava": Saved(
        {"<image>": 128},
        "<image>",
        "LlavaProcessor",
        "CLIPImageProcessor",
        CLIP,
        {
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        {"image_token": "<image>"},
    ),
    "pixtral": Saved(
        dict.fromkeys(PIXTRAL_MARKS.values(), 0),
        "[IMG]",
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 32}},
        {"patch_size": 4, **PIXTRAL_MARKS},
        PIXTRAL_MARKS,
    ),
    "granite_vision": Saved(
        {"<image>": 128},
        "<image>",
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {**CLIP, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 48], [64, 16]]},
        {"patch_size": 4, "vision_feature_select_strategy": "full"},
        {"image_token": "<image>"},
    ),
    "llava_next": Saved(
        {"<image>": 128},
        "<image>",
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {**CLIP, "image_grid_pinpoints": [[16, 32], [32, 16]]},
        {
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        {"image_token": "<image>"},
    ),
    "gemma3": Saved(
        dict.fromkeys(GEMMA_MARKS.values(), 0),
        "<start_of_image>",
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": 16, "width": 16}},
        {"image_seq_length": 4},
        GEMMA_MARKS,
    ),
    "gemma3n": Saved(
        dict.fromkeys(GEMMA3N_MARKS.values(), 0),
        "<image_soft_token>",
        "Gemma3nProcessor",
        "SiglipImageProcessor",
        {"size": {"height": 16, "width": 16}},
        {
            "image_seq_length": 4,
            "feature_extractor": {
                "feature_extractor_type": "Gemma3nAudioFeatureExtractor"
            },
        },
        GEMMA3N_MARKS,
    ),
    "paligemma": Saved(
        {"<image>": 128},
        "<image>",
        "PaliGemmaProcessor",
        "SiglipImageProcessor",
        {"size": {"height": 16, "width": 16}, "image_seq_length": 4},
        {},
        {"image_token": "<image>"},
    ),
    "idefics2": Saved(
        {"<image>": 128, "<fake_token_around_image>": 129, "<end_of_utterance>": 131},
        "<image>",
        "Idefics2Processor",
        "Idefics2ImageProcessor",
        {
            "size": {"shortest_edge": 16, "longest_edge": 32},
            "do_image_splitting": False,
        },
        {"image_seq_len": 4},
        {"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
    ),
}
#: Configurations of families that have no layout: transformers' own.
BY_CLASS = {
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {},
        "vision_config": {},
        "audio_config": {},
    }
}
SAVED = {**PROCESSORS, **MORE}
KINDS |= {
    f"{name}, template writes {'it' if writes else 'none'}": Kind(
        name, adds="a beginning", writes_begin=writes
    )
    for name in SAVED
    for writes in (True, False)
}


def write(folder: Path, kind: Kind) -> Path:
    """A folder without weights."""
    folder.mkdir()
    config = (
        layout(kind.family)["files"]["config.json"]
        if kind.family in names()
        else BY_CLASS[kind.family]
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    saved = None if kind.bare else SAVED[kind.family]
    made = kind.tokenizer()
    marks = [] if saved is None else list(saved.markers)
    ids = {word: made.get_vocab_size() + at for at, word in enumerate((BEGIN, END))}
    made.add_special_tokens([BEGIN, END])
    made.add_special_tokens(marks)
    if (pattern := ADDS[kind.adds]) is not None:
        made.post_processor = TemplateProcessing(
            single=pattern, special_tokens=list(ids.items())
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        extra_special_tokens={
            **(saved.named if saved else {}),
            **NAMES.get(kind.family, {}),
        },
    )
    tokenizer.save_pretrained(folder)
    if saved is not None:
        write_processor(
            folder,
            saved.whole,
            {"image_processor_type": saved.part, **saved.pictures},
            **saved.settings,
        )
    write_template(folder, kind, "" if saved is None else saved.picture)
    return folder


def write_template(folder: Path, kind: Kind, picture: str) -> None:
    text = CHAT.replace(
        "BEGIN", "{{ bos_token }}" if kind.writes_begin else ""
    ).replace("PICTURE", picture)
    config = folder / "tokenizer_config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    if kind.named is not None:
        config.write_text(
            json.dumps({**said, "tokenizer_class": kind.named}), encoding="utf-8"
        )
    if kind.place in ("tokenizer_config.json", "named"):
        named = [
            {"name": "default", "template": text},
            {"name": "rag", "template": "{{ documents }}"},
        ]
        said["chat_template"] = named if kind.place == "named" else text
        config.write_text(json.dumps(said), encoding="utf-8")
    elif kind.place == "chat_templates":
        (folder / "chat_templates").mkdir()
        (folder / "chat_templates" / "rag.jinja").write_text(
            "{{ documents }}", encoding="utf-8"
        )
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    elif kind.place == "chat_template.json":
        (folder / kind.place).write_text(
            json.dumps({"chat_template": text}), encoding="utf-8"
        )
    elif kind.place != "nowhere":
        (folder / kind.place).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def oracle(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each kind's folder, and transformers' answers to its cases."""
    root = tmp_path_factory.mktemp("prompts")
    folders = [write(root / str(at), kind) for at, kind in enumerate(KINDS.values())]
    (root / "pixels").mkdir()
    answers = ask_transformers(folders, CASES, root / "pixels")
    return dict(zip(KINDS, zip(folders, answers, strict=True), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_transformers(
    name: str, oracle: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    path, answers = oracle[name]
    if "num2words" in answers.get("error", ""):
        pytest.skip(
            "transformers' SmolVLMProcessor needs num2words; idefics3's is the same but for videos"
        )
    assert "error" not in answers, answers
    folder = Folder(path)
    compared = 0
    for case, theirs in zip(CASES, answers["cases"], strict=True):
        if "error" in theirs or (case.images and KINDS[name].bare):
            continue
        made = folder.make(case)
        assert not list(differences(made, theirs, folder.processing)), case.name
        compared += 1
    # transformers' processor of it takes no text alone
    least = 3 if KINDS[name].family == "paligemma" else 4
    assert compared >= (1 if KINDS[name].place == "nowhere" else least)


def test_the_command_says_who_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template that writes the beginning, and a tokenizer that adds one: mlx-vlm's prompt has two, and a faulty one."""
    folder = str(write(tmp_path / "folder", Kind(adds="a beginning")))
    found = tmp_path / "found.json"
    assert (
        cli.main(["verify", "--prompts", "--model", folder, "--json", str(found)]) == 0
    )
    said = json.loads(found.read_text(encoding="utf-8"))["models"][0]
    assert said["ok"]
    assert all(
        not one["differs"] and (one["upstream"] or one["name"] == "plain text")
        for one in said["cases"]
    )
    assert "others from 1: '<s><s>" in capsys.readouterr().out
    monkeypatch.setattr(Processing, "adds_special_tokens", lambda *_, **__: True)
    assert cli.main(["verify", "--prompts", "--model", folder]) == 1
    assert "NOT as transformers makes them" in capsys.readouterr().out
    assert cli.main(["verify", "--prompts", "--model", str(tmp_path / "nowhere")]) == 2


def test_the_command_says_what_else_the_folder_has_and_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As loading finds it: a setting that nobody reads, sampling, a shard without a tensor of the index."""
    folder = write(tmp_path / "folder", Kind())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "of_no_model": 7}), encoding="utf-8"
    )
    said = {"do_sample": True, "temperature": 0.7, "num_beams": 3}
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    save_file({"there": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(("there", "away"), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )
    assert cli.main(["verify", "--prompts", "--model", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "- config.json has what nobody reads: of_no_model 7" in printed
    assert "recommends temperature 0.7, top_k 50; not taken: num_beams 3 " in printed
    assert "- 1 tensors of the index are not in the folder: away" in printed


def test_texts_of_parts_are_alike_however_they_are_spelled() -> None:
    """A part that had its text as content was left out by templates, or failed."""
    parts: list[Any] = ["a", {"type": "input_text", "text": "b"}]
    parts.append({"type": "text", "content": "c"})
    turns, _ = split_messages([{"role": "user", "content": parts}], [], [], [])
    (turn,) = with_parts(turns)
    assert [part["text"] for part in turn["content"]] == ["a", "b", "c"]
    assert in_text(turn, "<image>")["content"] == "abc"


def test_parts_for_a_template_of_text_alone_become_text(tmp_path: Path) -> None:
    """As Llama 3.1's: a list would be written out as Python writes it."""
    folder = write(tmp_path / "folder", Kind())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image"},
        {"type": "text", "text": " this?"},
    ]
    processing = Folder(folder).processing
    assert (
        processing.render([{"role": "user", "content": parts}], 1)
        == "[user]What is<|image_pad|> this?"
    )
    assert processing.render("What?", 1) == "[user]<|image_pad|>What?"
    assert processing.render(
        [{"role": "system", "content": parts[:1]}, {"role": "user", "content": "x"}]
    ) == ("[system]What is[user]x")


def test_long_prompts_bring_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tokenizer that says a smaller length than the model's context; the engine checks that."""
    folder = tmp_path / "qwen2_vl"
    shutil.copytree(default_checkpoint(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "model_max_length": 16})
    )
    warnings: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(
        handler, "emit", lambda record: warnings.append(record.getMessage())
    )
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    words = "please " * 40
    one = SamplingParams(max_tokens=1)
    plain = Request(prompt=words, template=None, params=one, return_prompt_ids=True)
    picture = Request(
        prompt=words,
        images=[IMAGES / "red_circle.png"],
        params=SamplingParams(max_tokens=1, bad_words=["please please"]),
        return_prompt_ids=True,
    )
    try:
        with VLMBatcher(str(folder)) as batcher:
            results = batcher.generate([plain, picture])
    finally:
        logger.removeHandler(handler)
    assert all(len(result.prompt_token_ids or ()) > 40 for result in results)
    assert [one for one in warnings if "sequence length" in one] == []
