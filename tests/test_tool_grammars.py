"""Forced tool calls: whatever a grammar lets through is read by mlx-vlm's parser as a call that fits the tool's schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_vlm.tools import load_tool_module, process_tool_calls
from mlx_vlm.tools.registry import SPECS
from tokenizers import AddedToken
from transformers import AutoTokenizer

from vlm_batch.assets import default_checkpoint
from vlm_batch.server.calls import _FORMS, INNER_MARKS, CallWriter, CannotForce

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "book_room",
            "parameters": {
                "type": "object",
                "properties": {
                    "guest": {"type": "string", "maxLength": 12},
                    "nights": {"type": "integer", "minimum": 1, "maximum": 30},
                    "kind": {"enum": ["single", "double"], "type": "string"},
                    "quiet": {"type": "boolean"},
                    "floors": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 99},
                        "maxItems": 3,
                    },
                },
                "required": ["guest", "kind"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "list_rooms"}},
]
NESTED = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 9},
        "place": {
            "type": "object",
            "properties": {
                "x": {"type": "number"},
                "y": {"type": "null"},
                "name": {"type": "string", "maxLength": 9},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["place"],
    "additionalProperties": False,
}
#: Tokenizers may hold a form's marks as special tokens, as plain ones, or not at all.
MARKED = ("special", "added", "spelled")


@cache
def tokenizer(parser: str, marked: str) -> tuple[Any, LLTokenizer]:
    made: Any = AutoTokenizer.from_pretrained(default_checkpoint())
    module = load_tool_module(parser)
    marks = [module.tool_call_start, module.tool_call_end, *INNER_MARKS.get(parser, ())]
    if marked != "spelled":
        made.add_tokens(
            [
                AddedToken(mark, special=marked == "special", normalized=False)
                for mark in marks
                if mark
            ]
        )
    return made, from_tokenizer(made)


def marks_of(made: Any) -> dict[str, int]:
    return {str(word): token for token, word in made.added_tokens_decoder.items()}


def drawn(grammar: str, words: LLTokenizer, made: Any, seed: int) -> str | None:
    """A random text of a grammar; None if it becomes too long."""
    matcher, draw = LLMatcher(words, grammar), random.Random(seed)
    assert not matcher.is_error(), matcher.get_error()
    bits = np.zeros(-(-words.vocab_size // 32), dtype=np.uint32)
    tokens: list[int] = []
    ends = {words.eos_token}
    while not matcher.is_stopped() and len(tokens) < 600:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), bitorder="little")
        ).tolist()
        if ends & set(allowed) and draw.random() < 0.4:
            break
        token = draw.choice([one for one in allowed if one not in ends] or allowed)
        assert matcher.consume_token(token)
        tokens.append(token)
    return (
        str(made.decode(tokens, skip_special_tokens=False))
        if len(tokens) < 600
        else None
    )


def read(text: str, parser: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    found = process_tool_calls(text, load_tool_module(parser), tools)
    assert not found.remaining_text.strip(), (
        f"beside the calls: {found.remaining_text!r} of {text!r}"
    )
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in found.calls
    ]


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("parser", _FORMS)
def test_whatever_is_let_through_is_a_call(parser: str, marked: str) -> None:
    made, words = tokenizer(parser, marked)
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", {})
        for tool in TOOLS
    }
    names, counts = set(), set()
    for template in ("[ARGS]", "") if parser == "mistral" else ("",):
        grammar = CallWriter(parser, marks_of(made), template).grammar(
            TOOLS, several=True
        )
        for seed in range(12):
            text = drawn(grammar, words, made, seed)
            if text is None:
                continue
            calls = read(text, parser, TOOLS)
            assert calls, text
            counts.add(len(calls))
            for name, arguments in calls:
                names.add(name)
                jsonschema.validate(arguments, schemas[name])
    assert names == set(schemas)
    if _FORMS[parser].repeats:
        assert max(counts) > 1


@pytest.mark.parametrize("parser", _FORMS)
def test_one_tool_by_name_and_what_is_within_it(parser: str) -> None:
    made, words = tokenizer(parser, "added")
    tools = [{"type": "function", "function": {"name": "put", "parameters": NESTED}}]
    writer = CallWriter(parser, marks_of(made))
    if parser == "pythonic":
        with pytest.raises(CannotForce, match="object"):
            writer.grammar(tools, several=False)
        return
    grammar = writer.grammar(tools, several=False)
    found = [
        text
        for seed in range(12)
        if (text := drawn(grammar, words, made, seed)) is not None
    ]
    assert found
    for text in found:
        ((name, arguments),) = read(text, parser, tools)
        assert name == "put"
        jsonschema.validate(arguments, NESTED)


@pytest.mark.parametrize("parser", _FORMS)
def test_free_answers_call_rightly_or_not_at_all(parser: str) -> None:
    """Text, and then perhaps a call: what is none of the tools' cannot be called."""
    made, words = tokenizer(parser, "special")
    writer = CallWriter(parser, marks_of(made))
    assert writer.is_marked
    assert not CallWriter(parser, {}).is_marked
    matcher = LLMatcher(words, writer.grammar(TOOLS[1:], several=False, is_free=True))
    assert matcher.try_consume_tokens(made.encode("well, ")) == len(
        made.encode("well, ")
    )
    assert matcher.is_accepting()
    start = load_tool_module(parser).tool_call_start
    (begin,) = made.encode(start)[:1]
    assert matcher.consume_token(begin)
    assert not matcher.is_accepting()
    bits = np.zeros(-(-words.vocab_size // 32), dtype=np.uint32)
    # a tool without arguments: nothing is left to choose but how it is spelled
    while not matcher.is_accepting():
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), bitorder="little")
        ).tolist()
        assert matcher.consume_token(
            max(allowed, key=lambda one: (len(made.decode([one])), one))
        )


def test_forms_that_cannot_be_forced_say_so() -> None:
    left = {spec.name for spec in SPECS} - set(_FORMS)
    assert left == {"atem", "minimax_m3", "harmony"}
    for parser in left:
        with pytest.raises(CannotForce, match=parser):
            CallWriter(parser, {}).grammar(TOOLS, several=False)
    loose = [
        {
            "type": "function",
            "function": {
                "name": "a",
                "parameters": {"properties": {"b": {"anyOf": []}}},
            },
        }
    ]
    large = [
        {
            "function": {
                "name": "f",
                "parameters": {"properties": {"a": {"maximum": 2**53 + 1}}},
            }
        }
    ]
    with pytest.raises(
        CannotForce, match="parameters of 'f' has maximum 9007199254740993"
    ):
        CallWriter("json_tools", {}).grammar(large, several=False)
    slow = {"properties": {"example": {"type": "integer", "multipleOf": 2**31}}}
    named = [{"function": {"name": "f", "parameters": slow}}]
    with pytest.raises(
        CannotForce, match="parameters of 'f' has multipleOf 2147483648"
    ):
        CallWriter("json_tools", {}).grammar(named, several=False)
    with pytest.raises(CannotForce, match="single type"):
        CallWriter("qwen3_coder", {}).grammar(loose, several=False)


NAMES = (
    "get_weather",
    "get-weather",
    "a.b",
    "a:b",
    "a/b",
    "7a",
    "a b",
    "ü",
    'a"b',
    "a<b",
    "a{b",
    "class",
    "a|b",
    "a\nb",
)
KEYS = (
    "x",
    "my-key",
    "a.b",
    "a b",
    "ü",
    "7",
    "class",
    'q"k',
    "a>b",
    "$ref",
    "a:b",
    "x\ny",
)


@pytest.mark.parametrize("parser", _FORMS)
def test_odd_names_are_written_so_that_they_are_read_or_refused(parser: str) -> None:
    made, words = tokenizer(parser, "added")
    writer, taken = CallWriter(parser, marks_of(made)), set()
    number = {"type": "integer", "minimum": 1, "maximum": 9}
    for name, key in [
        *((name, "x") for name in NAMES),
        *(("put", key) for key in KEYS),
    ]:
        schema = {
            "type": "object",
            "properties": {key: number},
            "required": [key],
            "additionalProperties": False,
        }
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        odd = key if name == "put" else name
        try:
            grammar = writer.grammar(tools, several=False)
        except CannotForce as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert f"name {odd!r} cannot be written" in said
            continue
        text = drawn(grammar, words, made, 1)
        assert text is not None
        ((called, arguments),) = read(text, parser, tools)
        assert (called, list(arguments)) == (name, [key])
        taken.add((name, key))
    assert {("get_weather", "x"), ("ü", "x"), ("put", "class")} <= taken
    assert parser == "pythonic" or {("get-weather", "x"), ("put", "my-key")} <= taken


@pytest.mark.parametrize("parser", _FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": {"x": 5}},
        {"properties": {"x": {"enum": 3}}},
        {
            "properties": {
                "x": {"type": "array", "items": {"type": "integer"}, "minItems": "many"}
            }
        },
        {"properties": {"x": {"type": "integer"}}, "required": 7},
    ],
    ids=str,
)
def test_parameters_that_are_no_schema_are_refused_or_said_to_be_by_the_grammar(
    parser: str, schema: dict[str, Any]
) -> None:
    """What is wrong in the middle of a schema is met here, or by llguidance."""
    made, _ = tokenizer(parser, "added")
    tools = [
        {
            "type": "function",
            "function": {"name": "put", "parameters": {"type": "object", **schema}},
        }
    ]
    try:
        grammar = CallWriter(parser, marks_of(made)).grammar(tools, several=False)
    except CannotForce:
        return
    assert LLMatcher.validate_grammar(grammar)
