"""Typed text is never a picture's place nor a turn's end: in prompts, messages, tools and their results, for each processor."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_vlm
import pytest
from PIL import Image

from vlm_batch import Template
from vlm_batch.assets import CHECKOUT
from vlm_batch.errors import InvalidPrompt
from vlm_batch.inputs.processing import ESCAPE, Processing
from vlm_batch.inputs.reserved import ReservedWords, _marks_of
from vlm_batch.models import adapter_for, families

CHECKPOINTS = ["qwen2_vl", "qwen3_vl", "qwen3_5", "falcon_ocr", "aya_vision", "mllama"]


@cache
def of(name: str) -> tuple[Processing, ReservedWords, frozenset[int]]:
    model, processor = mlx_vlm.load(str(CHECKOUT / "checkpoints" / name))
    adapter = adapter_for(str(model.config.model_type))(model)
    processing = Processing(
        adapter.processor(processor), model.config, adapter.video_sampling
    )
    ids = adapter.image_token_ids
    return processing, ReservedWords(processing, ids), ids


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_control_token_of_a_prompt_with_a_picture_is_reserved(name: str) -> None:
    """Ground truth from the tokenizer: the special tokens that the template's own text becomes, and the picture's."""
    processing, reserved, ids = of(name)
    text = processing.render("x", 1)
    special = {
        token: str(word)
        for token, word in processing.tokenizer.added_tokens_decoder.items()
        if word.special
    }
    written = {
        special[token]
        for token in processing.tokenizer.encode(text)
        if token in special
    }
    written |= {special[token] for token in ids if token in special}
    written -= {processing.tokenizer.bos_token}
    assert written
    words = reserved.words.placeholders | reserved.words.turns
    assert not written - words, f"{name}: {written - words} can be typed"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_reserved_word_is_refused_wherever_it_is_typed(name: str) -> None:
    _, reserved, _ = of(name)
    for word in reserved.words.placeholders | reserved.words.turns:
        text = f"before {word} after"
        half = len(word) // 2
        pieces = [
            {"type": "text", "text": word[:half]},
            {"type": "text", "text": word[half:]},
        ]
        chats: list[dict[str, Any]] = [
            {"role": "user", "content": text},
            {"role": "user", "content": pieces},
            {"role": "user", "content": "x", "name": text},
            {"role": "tool", "content": text},
            {"role": "tool", "content": [{"type": "text", "text": text}]},
        ]
        with pytest.raises(InvalidPrompt):
            reserved.check(text)
        for message in chats:
            with pytest.raises(InvalidPrompt):
                reserved.check([message])
        for arguments in (
            {"tools": [{"function": {"description": text}}]},
            {"documents": [{text: "x"}]},
        ):
            with pytest.raises(InvalidPrompt):
                reserved.check("", arguments)
    for word in reserved.words.placeholders:
        with pytest.raises(InvalidPrompt):
            reserved.check(
                [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"arguments": {"a": word}}}],
                    }
                ]
            )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_not_refused_becomes_no_control_token(name: str) -> None:
    """Words that look like marks of other families are plain text here, and stay what was typed."""
    processing, reserved, ids = of(name)
    strange = [
        "<image>",
        "<|image_pad|>",
        "<|im_end|>",
        "[IMG]",
        "<|image_1|>",
        "</s>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<img>",
    ]
    words = reserved.words.placeholders | reserved.words.turns
    special = {
        *ids,
        *(
            id
            for id, word in processing.tokenizer.added_tokens_decoder.items()
            if str(word) in words
        ),
    }
    for word in strange:
        try:
            reserved.check(f"a {word} b")
        except InvalidPrompt:
            continue
        plain = (
            processing.inputs(processing.render("a b", 0), [])["input_ids"]
            .flatten()
            .tolist()
        )
        typed = (
            processing.inputs(processing.render(f"a {word} b", 0), [])["input_ids"]
            .flatten()
            .tolist()
        )
        count = [sum(token in special for token in tokens) for tokens in (plain, typed)]
        assert count[0] == count[1], f"{name}: a typed {word} became a control token"


@pytest.mark.parametrize("family", ["paligemma", "florence2", "falcon_ocr"])
def test_families_that_take_the_last_message_alone_get_it_whole(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processors take its text; nothing is put around it, and there is nothing that could read an argument.

    A PaliGemma with a template, which this processor has, would be asked by it (tests/test_prompts.py).
    """
    processing, _, _ = of("falcon_ocr")
    monkeypatch.setattr(Processing, "_has_own_template", False)
    bare = Processing(processing.processor, SimpleNamespace(model_type=family))
    assert "a b" in bare.render("a b", 0)
    assert len(bare.render("a b", 0)) < 20
    assert "said" in bare.render(
        [{"role": "user", "content": "x"}, {"role": "user", "content": "said"}], 0
    )
    with pytest.raises(InvalidPrompt, match="takes the last message alone"):
        bare.render("a b", 0, options=Template(add_generation_prompt=False))


class Written:
    """A processing whose template writes a placeholder that is no token, as several families' processors look for."""

    def __init__(self, placeholder: str) -> None:
        self.processor = SimpleNamespace()
        self.tokenizer = SimpleNamespace(added_tokens_decoder={})
        self.placeholder = placeholder

    def render(self, prompt: Any, num_images: int = 0, *others: int) -> str:
        if any(others):
            raise InvalidPrompt("no videos")
        marks = "".join(
            self.placeholder.format(index + 1) + "\n" for index in range(num_images)
        )
        words = (
            prompt
            if isinstance(prompt, str)
            else "".join(turn["content"] for turn in prompt)
        )
        return f"USER: {marks}{words} ASSISTANT:"


@pytest.mark.parametrize(
    ("placeholder", "typed"),
    [
        ("<image>", "what is <image>?"),
        ("<|image_{}|>", "see <|image_12|>"),
        ("(<image>./</image>)", "(<image>./</image>)"),
    ],
)
def test_placeholders_that_are_no_tokens(placeholder: str, typed: str) -> None:
    """llava's, phi's with numbers, minicpm's: found in what the template writes for a picture."""
    reserved = ReservedWords(Written(placeholder))  # type: ignore[arg-type]
    with pytest.raises(InvalidPrompt, match="video's place"):
        reserved.check(typed)
    reserved.check("an <im age> of |image_1| (x)")


@pytest.mark.parametrize(
    "model_type", [None, "llava", "phi3_v", "internvl_chat", "gemma3", "unknown_type"]
)
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "falcon_ocr"])
def test_what_says_nothing_is_rendered_as_transformers_does(
    name: str, model_type: str | None
) -> None:
    """Whatever the type's name, by which mlx-vlm chooses a form: the template takes parts, pictures before the text."""
    processing, _, _ = of(name)
    own = Processing(
        processing.processor,
        SimpleNamespace(model_type=model_type or processing.config.model_type),
    )
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    for prompt in ("a b", chat):
        for num_images in (0, 1):
            turns: list[dict[str, Any]] = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else list(prompt)
            )
            words = {"type": "text", "text": turns[-1]["content"]}
            turns[-1] = {
                "role": "user",
                "content": [*[{"type": "image"}] * num_images, words],
            }
            owner = (
                processing.processor
                if processing.processor.chat_template
                else processing.tokenizer
            )
            theirs = owner.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
            assert own.render(prompt, num_images) == theirs


#: The words that each family's processor in mlx-vlm looks for or writes for pictures, videos and sounds, by its folder.
WRITTEN: dict[str, tuple[str, ...]] = {
    "aya_vision": ("<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    "cohere_compass": ("<|IMAGE_PAD|>", "<|VISION_START|>"),
    "deepseek_v4": ("<\uff5cdeepseek_image\uff5c>",),
    "deepseek_v41": ("<\uff5cdeepseek_image\uff5c>",),
    "deepseek_vl_v2": ("<image>",),
    "deepseekocr": ("<image>",),
    "deepseekocr_2": ("<image>",),
    "dots_ocr": ("<|imgpad|>", "<|video_pad|>"),
    "ernie4_5_moe_vl": (
        "<|IMAGE_PLACEHOLDER|>",
        "<|IMAGE_START|>",
        "<|image@placeholder|>",
    ),
    "falcon_ocr": ("<|image|>",),
    "fastvlm": ("<image>",),
    "gemma4": ("<|video|>",),
    "gemma4_unified": ("<|video|>",),
    "glm4v": ("<|image|>", "<|video|>"),
    "glm4v_moe": ("<|image|>", "<|video|>"),
    "glm5_next": ("<|image|>", "<|begin_of_image|>"),
    "glm_ocr": ("<|image|>", "<|video|>"),
    "got": ("<img>", "</img>", "<imgpad>", "<image>"),
    "granite4_vision": ("<image>",),
    "granite_vision": ("<image>",),
    "hunyuan_vl": ("<image>",),
    "idefics2": ("<image>", "<fake_token_around_image>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>"),
    "inkling": ("<|content_image|>", "<|audio_placeholder|>"),
    "internvl": ("<image>",),
    "internvl_chat": ("<image>", "<IMG_CONTEXT>", "<img>"),
    "jina_vlm": ("<|image|>",),
    "kimi_k25": ("<|media_pad|>",),
    "kimi_k3": ("<|media_pad|>", "<|kimi_image_placeholder|>"),
    "kimi_vl": ("<|media_pad|>",),
    "llama4": ("<|image|>", "<|patch|>", "<|image_start|>"),
    "llava": ("<image>",),
    "llava_next": ("<image>",),
    "llava_onevision": ("<image>", "<video>"),
    "locateanything": ("<IMG_CONTEXT>", "<image-7>"),
    "mage_vl": ("<|image_pad|>", "<|vision_start|>"),
    "mimo_v2": ("<|audio_pad|>",),
    "minicpmo": ("<image>", "</image>", "<audio>"),
    "minicpmv4_6": ("<image>", "<|image_pad|>", "<video>"),
    "minicpmv4_7": ("<image>", "<|image_pad|>", "<video>"),
    "minimax_m3_vl": ("<|minimax_m3_image_placeholder|>",),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "mllama": ("<|image|>",),
    "molmo": ("<im_patch>",),
    "molmo2": ("<|image|>", "<im_patch>"),
    "molmo_point": ("<|image|>", "<im_patch>"),
    "multi_modality": ("<image>",),
    "muse_glimmer": ("<|image_placeholder|>", "<|patch|>"),
    "muse_spark": ("<|image_start|>", "<|patch|>"),
    "nemotron_h_nano_omni": ("<image>", "<img>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>",),
    "paligemma": ("<image>",),
    "phi3_v": ("<|image_1|>", "<|image_23|>"),
    "phi4_siglip": ("<image>",),
    "phi4mm": ("<|image_2|>", "<|audio_1|>", "<image>"),
    "pixtral": ("[IMG]", "[IMG_END]"),
    "plamo2vl": ("<plamo:image>", "<siglip2:img>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>"),
    "qwen2_vl": ("<|image_pad|>", "<|video_pad|>"),
    "qwen3_omni_moe": ("<|image_placeholder|>",),
    "qwen3_vl": ("<|image_pad|>", "<|vision_start|>"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<video>"),
    "step3p7": ("<im_patch>", "<patch_start>"),
    "unlimited_ocr": ("<image>",),
    "zaya1_vl": ("<image>",),
}


#: The classes that read text; the others take pictures, films and sounds alone.
_PROCESSOR = re.compile(r"(?!.*(Image|Video|Audio)Processor)\w+Processor")


def processors_of(folder: str) -> list[type]:
    """The classes of mlx-vlm's that make a family's inputs."""
    root = Path(mlx_vlm.__file__).parent / "models" / folder
    found: list[type] = []
    for file in sorted(root.glob("*process*.py")):
        module = import_module(f"mlx_vlm.models.{folder}.{file.stem}")
        found += [
            kind
            for name, kind in vars(module).items()
            if inspect.isclass(kind)
            and _PROCESSOR.fullmatch(name)
            and kind.__module__ == module.__name__
        ]
    return found


def _nothing(_: object, name: str) -> Any:
    raise AttributeError(name)


class Unmade:
    """A processing whose processor was never given its parts, and whose template writes nothing of pictures."""

    def __init__(self, kind: type) -> None:
        bare = type(
            kind.__name__,
            (kind,),
            {"__getattr__": _nothing, "__module__": kind.__module__},
        )
        self.processor: Any = object.__new__(bare)
        self.tokenizer = SimpleNamespace(added_tokens_decoder={})

    def render(self, prompt: Any, *counts: int) -> str:
        return (
            prompt
            if isinstance(prompt, str)
            else "".join(turn["content"] for turn in prompt)
        )


@pytest.mark.parametrize("folder", WRITTEN)
def test_what_a_familys_processor_looks_for_cannot_be_typed(folder: str) -> None:
    kinds = processors_of(folder)
    assert kinds
    reserved = [ReservedWords(Unmade(kind)) for kind in kinds]  # type: ignore[arg-type]
    call = {"function": {"name": "a", "arguments": {"text": "%s"}}}
    for word in WRITTEN[folder]:
        text = f"before {word} after"
        refused = 0
        for one in reserved:
            try:
                one.check(text)
            except InvalidPrompt:
                refused += 1
                for chat in (
                    [{"role": "user", "content": text}],
                    [{"role": "user", "content": [{"type": "text", "text": text}]}],
                    [{"role": "tool", "content": text, "tool_call_id": "1"}],
                    [
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [{**call, "id": text}],
                        }
                    ],
                ):
                    with pytest.raises(InvalidPrompt, match="place"):
                        one.check(chat)
        assert refused == len(reserved), f"{folder}: {word} can be typed"
    for one in reserved:
        one.check(
            "an image of <b>bold</b> [text] (see the video), x < image > y, <|grounding|> <OD>"
        )


def test_every_familys_processor_with_such_words_is_there() -> None:
    for spec in families():
        for folder in {spec.family, *spec.model_types}:
            if (Path(mlx_vlm.__file__).parent / "models" / folder).is_dir():
                marks = {
                    word for kind in processors_of(folder) for word in _marks_of(kind)
                }
                named = {word for word in marks if "\\" not in word or r"\d+" in word}
                assert not named or folder in WRITTEN, f"{folder}: {sorted(named)}"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5", "aya_vision"])
def test_an_escaped_spelling_is_plain_text(name: str) -> None:
    """The tokens say the same text and none of them is special; pictures, and text without spellings, are as without it."""
    processing, reserved, image_ids = of(name)
    special = [
        *sorted(reserved.words.turns | reserved.words.placeholders),
        "<|image_1|>",
        "<|im_<|im_end|>end|>",
    ]
    typed = "so " + " ".join(special) + " end"
    escaped = reserved.escaped([{"role": "user", "content": typed}])
    reserved.check(escaped)  # nothing is left to be refused
    assert escaped[0]["role"] == "user"
    assert escaped[0]["content"].replace(ESCAPE, "") == typed
    picture = Image.new("RGB", (40, 40))
    copy = processing.copy()
    plain, held = (
        made(processing.render([{"role": "user", "content": said}], 1), [picture])
        for made, said in (
            (processing.inputs, "so end"),
            (copy.escaped_inputs, escaped[0]["content"]),
        )
    )
    ids, without = held["input_ids"][0].tolist(), plain["input_ids"][0].tolist()
    of_special = {
        token
        for token, word in processing.tokenizer.added_tokens_decoder.items()
        if word.special
    }
    assert [token for token in ids if token in of_special | image_ids] == [
        token for token in without if token in of_special | image_ids
    ]
    said = processing.tokenizer.decode(ids, skip_special_tokens=False)
    assert all(word in said for word in special)
    assert ESCAPE not in said
    assert {
        key: value.shape for key, value in held.items() if key == "pixel_values"
    } == {key: value.shape for key, value in plain.items() if key == "pixel_values"}
