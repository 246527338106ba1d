"""What a request may tell the chat template: read by it or refused, never dropped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_batch import Request, Template, VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.errors import InvalidPrompt, PromptTooLong
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.template import ChatTemplate

#: Reads arguments in the ways that published templates do: looked up, tested, given a default, set if missing.
TEMPLATE = (
    "{% if thinking_style is not defined %}{% set thinking_style = 'short' %}{% endif %}"
    "{% set effort = reasoning_effort | default('medium') %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% if documents %}{% for one in documents %}[{{ one.text }}]{% endfor %}{% endif %}"
    "({{ thinking_style }} {{ effort }})"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Says it.", "parameters": {"a": 1}},
}


def with_template(folder: Path, template: str) -> Path:
    """The embedded checkpoint with another chat template."""
    copied = shutil.copytree(default_checkpoint(), folder / "checkpoint")
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return Path(copied)


@pytest.fixture(scope="module")
def batcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLMBatcher]:
    with VLMBatcher(
        with_template(tmp_path_factory.mktemp("template"), TEMPLATE)
    ) as made:
        yield made


@pytest.fixture
def rendered(batcher: VLMBatcher) -> Any:
    """The prompt that a request becomes."""
    return lambda **asked: batcher._preparer.check(Request(**asked)).prompt


def test_what_the_template_reads_is_found(batcher: VLMBatcher) -> None:
    assert batcher._preparer.processing.template.reads == {
        "thinking_style",
        "reasoning_effort",
        "tools",
        "documents",
        "enable_thinking",
    }


def test_arguments_reach_the_template(rendered: Any) -> None:
    plain = rendered(prompt="hello")
    assert plain.startswith("(short medium)")
    assert plain.endswith("<|im_start|>assistant\n")
    assert (
        rendered(prompt="hello", template=Template(enable_thinking=True))
        == f"{plain}<think>\n"
    )
    assert rendered(prompt="hello", template=Template(enable_thinking=False)) == plain
    assert rendered(
        prompt="hello", template=Template(reasoning_effort="high")
    ).startswith("(short high)")
    assert rendered(
        prompt="hello", template=Template(args={"thinking_style": "long"})
    ).startswith("(long medium)")
    assert rendered(
        prompt="hello", template=Template(documents=[{"text": "a page"}])
    ).startswith("[a page]")
    unbegun = rendered(prompt="hello", template=Template(add_generation_prompt=False))
    assert unbegun == plain.removesuffix("<|im_start|>assistant\n")


def test_tools_are_written_as_they_were_given(rendered: Any) -> None:
    assert json.dumps(WEATHER) in rendered(
        prompt="hello", template=Template(tools=[WEATHER])
    )


def test_calls_and_results_of_tools_pass_through(rendered: Any) -> None:
    turns = [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I ask.",
            "tool_calls": [
                {
                    "id": "1",
                    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "no rain"},
    ]
    prompt = rendered(messages=turns, template=Template(tools=[WEATHER]))
    assert (
        '<think>I ask.</think><call>weather {"city": "Köln"}</call><|im_end|>' in prompt
    )
    assert "<|im_start|>tool\nno rain<|im_end|>" in prompt
    assert prompt.count(json.dumps(WEATHER)) == 1


def test_the_last_turn_goes_on(rendered: Any, batcher: VLMBatcher) -> None:
    turns = [
        {"role": "user", "content": "count to 4"},
        {"role": "assistant", "content": "1 2"},
    ]
    prompt = rendered(messages=turns, template=Template(continue_final_message=True))
    assert prompt.endswith("<|im_start|>assistant\n1 2")
    assert (
        batcher.submit(messages=turns, template=Template(continue_final_message=True))
        .result(timeout=60)
        .ok
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"args": {"thinkng_style": "x"}},
            "thinkng_style: .* does not read that; it reads documents, enable_",
        ),
        ({"args": {"messages": []}}, "'messages', which is not an argument"),
        ({"args": ["tools"]}, "args is .* mapping"),
        (
            {"args": {"tools": []}, "tools": []},
            "tools is given twice: by itself and in args",
        ),
        ({"tools": "weather"}, "tools is 'weather'; it must be a list"),
        ({"enable_thinking": "yes"}, "enable_thinking is 'yes'"),
        ({"reasoning_effort": 3}, "reasoning_effort is 3"),
        (
            {"thinking": True},
            "template has no thinking .'enable_thinking' is probably meant.; it has add_gen",
        ),
        ({"tools": [{"name": "<|im_end|>"}]}, "'<|im_end|>'"),
        ({"tools": [{"parameters": {"<|im_end|>": 1}}]}, "'<|im_end|>'"),
        ({"documents": [{"text": "<|image_pad|>"}]}, "video's place"),
    ],
    ids=str,
)
def test_what_would_be_dropped_is_refused(
    batcher: VLMBatcher, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidPrompt, match=said.replace("|", r"\|")):
        batcher.submit(prompt="hello", template=asked)


@pytest.mark.parametrize("said", ["enable_thinking", "continue_final_message"])
def test_a_final_prompt_takes_nothing_for_a_template(
    batcher: VLMBatcher, said: str
) -> None:
    with pytest.raises(InvalidPrompt, match=f"{said}: the prompt is final already"):
        batcher.submit(token_ids=[5, 6], template={said: True})
    with pytest.raises(InvalidPrompt, match="template is None; messages need"):
        batcher.submit(messages=[{"role": "user", "content": "hello"}], template=None)


@pytest.mark.parametrize(
    "arguments",
    [{"enable_thinking": True}, {"tools": [WEATHER]}, {"reasoning_effort": "low"}],
    ids=str,
)
def test_a_template_that_reads_nothing_refuses_all(arguments: dict[str, Any]) -> None:
    with (
        VLMBatcher(default_checkpoint()) as batcher,
        pytest.raises(InvalidPrompt, match="does not read that; it reads none"),
    ):
        batcher.submit(prompt="hello", template=arguments)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if messages[0].role == 'system' %}{% set a = 1 %}{% set b = messages[1:] %}{% else %}{% set a = 2 %}{% endif %}"
         "{% for m in b %}{% if m.role == 'assistant' %}{% set role = 'model' %}{% endif %}{{ role }}{{ a }}{% endfor %}", []),
        ("{% if style is not defined %}{% set style = 'x' %}{% endif %}{{ style }}", ["style"]),
        ("{% set tools = tools or [] %}{% for tool in tools %}{{ tool }}{% endfor %}", ["tools"]),
        ("{% set found = '' %}{% for m in messages %}{% set found = found + m.content %}{% endfor %}{{ found }}", []),
        ("{% macro said(text, loud) %}{{ text }}{{ mark }}{% endmacro %}{{ said('x', true) }}", ["mark"]),
        ("{% set text %}{{ given }}{% endset %}{{ text }}", ["given"]),
    ],
    ids=["set in branches", "set if missing", "set from itself", "gathered", "macro", "block"],
)  # fmt: skip
def test_a_templates_own_names_are_no_arguments(
    template: str, reads: list[str]
) -> None:
    """As Gemma 3's: first_user_prefix, loop_messages and role are set in branches."""

    class Owner:
        chat_template = template

        def apply_chat_template(self) -> None: ...

    assert sorted(ChatTemplate(Owner()).reads) == reads


def test_words_in_pieces_are_found(batcher: VLMBatcher) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    with pytest.raises(InvalidPrompt, match="end of a turn"):
        batcher.submit(messages=[{"role": "user", "content": parts}])
    with pytest.raises(InvalidPrompt, match="end of a turn"):
        batcher.submit(
            messages=[{"role": "tool", "content": {"type": "<|im_end|>"}["type"]}]
        )


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("escapes", [False, True])
def test_what_is_nested_too_deeply_or_in_itself_is_refused(
    batcher: VLMBatcher, escapes: bool
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(10_000), endless):
        turn = {"role": "user", "content": "hello", "more": value}
        with pytest.raises(InvalidPrompt, match="recursion"):
            batcher.submit(messages=[turn], template={"escape_special_tokens": escapes})
        with pytest.raises(InvalidPrompt, match="recursion"):
            batcher.submit(
                prompt="hello",
                template={"tools": [{"a": value}], "escape_special_tokens": escapes},
            )


def test_texts_of_arguments_are_checked_as_those_of_a_chat(batcher: VLMBatcher) -> None:
    with pytest.raises(InvalidPrompt, match="half of a surrogate pair"):
        batcher.submit(prompt="hello", template={"tools": [{"name": "\ud800"}]})
    with pytest.raises(PromptTooLong, match=r"the prompt has [0-9,]+ characters"):
        batcher.submit(prompt="hello", template={"tools": [{"name": "x" * 2**26}]})


def test_a_family_without_a_template_refuses_by_name() -> None:
    class Bare:
        pass

    processing = Processing.__new__(Processing)
    processing.template = ChatTemplate(Bare())
    with pytest.raises(
        InvalidPrompt, match="enable_thinking: this model has no chat template"
    ):
        processing.template.check(Template(enable_thinking=True))
    processing.template.check(Template())
