"""Grammars that force tool calls, in the forms of ``mlx_vlm.tools.parsers``.

Marks that are tokens appear by id: llguidance reads added tokens' spelling as plain bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlx_vlm.tools import load_tool_module

from vlm_batch.errors import InvalidParameters
from vlm_batch.schemas import check_schema, simplify_schema

Schema: TypeAlias = Mapping[str, Any]

#: Special tokens inside calls that decoding omits.
INNER_MARKS: Mapping[str, tuple[str, ...]] = {
    "kimi_k2": (
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "mistral": ("[ARGS]",),
    "gemma4": ('<|"|>',),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minicpm5": ("<param", "</param>"),
}
#: JSON's whitespace as ``json.dumps`` writes it: a model that may choose could write whitespace for ever.
_GUIDANCE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
#: Kinds of few values.
_FEW: Mapping[str, Sequence[Any]] = {"boolean": (True, False), "null": (None,)}


#: Names for most forms, for programs, and for JSON.
_PLAIN_NAMES, _IDENTIFIERS, _ANY = r"[\w.:/$-]+", r"[^\W\d]\w*", r"(?s:.*)"
#: Names within a tag.
_IN_TAGS = r"[^<>\"\n]+"


class CannotForce(ValueError):
    """No grammar exists for a form of calls or a tool's schema."""


@dataclass(frozen=True)
class CallWriter:
    """One checkpoint's tool calls: mlx-vlm's ``parser``, and the ids of added tokens (``marks``)."""

    parser: str
    marks: Mapping[str, int]
    template: str = ""

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        several: bool,
        is_free: bool = False,
    ) -> str:
        """Return a grammar of one or ``several`` calls of OpenAI's ``tools``; ``is_free`` also allows text. Raises
        CannotForce."""
        form, grammar = self._form(), _Grammar(self.marks)
        calls = [form.call_of(grammar, tool["function"]) for tool in tools]
        one = grammar.rule(" | ".join(calls))
        more = ""
        if several and form.repeats:
            more = f"({grammar.text(form.between)} {one})*"
        whole = f"{grammar.text(form.begin)} {one} {more} {grammar.text(form.end)}"
        if is_free:
            words = grammar.rule("/(?s:.*)/")
            whole = f"{words} ({whole} {words})?"
        return "\n".join(["%llguidance {}", f"start: {whole}", *grammar.rules])

    @property
    def is_marked(self) -> bool:
        """Whether a token begins calls, so that text cannot look like one."""
        start = load_tool_module(self.parser).tool_call_start
        return any(start.startswith(mark) for mark in self.marks)

    def _form(self) -> _Form:
        # the older tokenizers'
        if self.parser == "mistral" and "[ARGS]" not in self.template:
            return _Form(
                _in_json('{"name": NAME, "arguments": ', "}"),
                begin="[TOOL_CALLS][",
                between=", ",
                end="]",
                keys=_ANY,
            )
        if self.parser not in _FORMS:
            raise CannotForce(
                f"calls in the form of {self.parser} are this model's own choice: no grammar is made of them"
            )
        return _FORMS[self.parser]


class _Grammar:
    """Collects rules; methods return references for other rules."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._marks = marks
        words = map(re.escape, sorted(marks, key=len, reverse=True))
        # the last matches nothing: there may be no marks
        self._cut = re.compile(f"({'|'.join([*words, '(?!)'])})")

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def text(self, words: str) -> str:
        parts = filter(None, self._cut.split(words))
        return " ".join(map(self._part, parts))

    def _part(self, words: str) -> str:
        token = self._marks.get(words)
        return _quoted(words) if token is None else f"<[{token}]>"

    def json(self, schema: Schema, root: Schema) -> str:
        """Return a schema's value; ``root`` holds its definitions."""
        kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self.rule(
            "%json " + json.dumps({**kept, **schema, "x-guidance": _GUIDANCE})
        )

    def until(self, end: str, schema: Schema, forbidden: str = "") -> str:
        """Return text of a schema and its ending words."""
        if unknown := {"pattern", "format"} & schema.keys():
            raise CannotForce(
                f"the {unknown.pop()} of a text cannot be forced in this model's form"
            )
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        inner = f"[^{forbidden}]{length}" if forbidden else f"(?s:.{length})"
        if self._cut.match(end):
            return f"{self.rule(f'/{inner}/')} {self.text(end)}"
        return self.rule(f"/{inner}/", f"[suffix={_quoted(end)}]")

    def one_of(self, words: Sequence[str], end: str) -> str:
        return f"({' | '.join(self.text(word) for word in words)}) {self.text(end)}"

    def items(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return items in order; optional ones may be missing."""
        comma = self.text(separator)
        # what follows, by whether an item has come before
        after = {True: "", False: ""}
        for item, is_needed in reversed(items):
            rest: dict[bool, str] = {}
            for has_begun in (True, False):
                taken = f"{comma if has_begun else ''} {item} {after[True]}"
                rest[has_begun] = self.rule(
                    taken
                    if is_needed
                    else f"({taken}) | ({after[has_begun] or _quoted('')})"
                )
            after = rest
        return after[False] or _quoted("")


@dataclass(frozen=True)
class _Form:
    """A form of calls; ``names`` and ``keys`` match texts that parse back unchanged."""

    call: Callable[[_Grammar, str, Schema], str]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    repeats: bool = True
    names: str = _PLAIN_NAMES
    keys: str = _PLAIN_NAMES

    def call_of(self, grammar: _Grammar, function: Mapping[str, Any]) -> str:
        name, schema = function["name"], function.get("parameters") or {}
        if not re.fullmatch(self.names, name):
            raise CannotForce(
                f"the tool's name {name[:100]!r} cannot be written in this model's form of calls"
            )
        try:
            schema = deepcopy(schema)
            simplify_schema(schema)
            check_schema(f"the parameters of {name[:100]!r}", schema)
            for key in _names_in(schema):
                if not re.fullmatch(self.keys, key):
                    raise CannotForce(
                        f"the parameter's name {key[:100]!r} cannot be written in this model's form of calls"
                    )
            return self.call(grammar, name, schema)
        except CannotForce:
            raise
        except InvalidParameters as error:
            raise CannotForce(error.reason) from error
        except Exception as error:
            # wherever it is no schema: a list for an object, a number for a list, too deep
            raise CannotForce(
                f"the parameters of {name[:100]!r} are no JSON schema that can be followed"
            ) from error


def _in_json(before: str, after: str) -> Callable[[_Grammar, str, Schema], str]:
    """Calls with JSON arguments; NAME is the tool's name in quotes, BARE without."""

    def call(grammar: _Grammar, name: str, schema: Schema) -> str:
        begin = before.replace("NAME", json.dumps(name)).replace("BARE", name)
        whole = {"type": "object", **schema}
        if "properties" not in whole and "additionalProperties" not in whole:
            whole["additionalProperties"] = False
        return (
            f"{grammar.text(begin)} {grammar.json(whole, schema)} {grammar.text(after)}"
        )

    return call


def _in_tags(
    before: str, tag: str, end: str, after: str, forbidden: str = ""
) -> Callable[[_Grammar, str, Schema], str]:
    """Calls with a tag per argument: ``tag`` with KEY, its value, ``end``."""

    def call(grammar: _Grammar, name: str, schema: Schema) -> str:
        parts = [grammar.text(before.replace("BARE", name))]
        for key, value, is_needed in _properties(schema):
            content = _tagged(grammar, value, schema, end, forbidden)
            one = grammar.rule(f"{grammar.text(tag.replace('KEY', key))} {content}")
            parts.append(one if is_needed else f"{one}?")
        return " ".join([*parts, grammar.text(after)])

    return call


def _tagged(
    grammar: _Grammar, value: Schema, root: Schema, end: str, forbidden: str
) -> str:
    words = _constants(value)
    if words is not None and all(isinstance(word, str) for word in words):
        return grammar.one_of(words, end)
    kind = _kind(value)
    if kind == "string":
        return grammar.until(end, value, forbidden)
    wraps = forbidden and kind in ("array", "object")  # they may have texts in them
    before, behind = ("<![CDATA[", "]]>") if wraps else ("", "")
    return f"{grammar.text(before)} {grammar.json(value, root)} {grammar.text(behind + end)}"


@dataclass(frozen=True)
class _Braces:
    """Program-like calls: ``key`` with KEY and a value; ``words`` are constants, ``quote`` is around texts if not JSON's."""

    before: str
    key: str
    after: str
    quote: str
    words: Mapping[str, str]

    def __call__(self, grammar: _Grammar, name: str, schema: Schema) -> str:
        begin = grammar.text(self.before.replace("BARE", name))
        members = self._members(grammar, schema, schema)
        return f"{begin} {members} {grammar.text(self.after)}"

    @property
    def _comma(self) -> str:
        return "," if self.quote else ", "

    def _members(self, grammar: _Grammar, schema: Schema, root: Schema) -> str:
        items = []
        for name, part, is_needed in _properties(schema):
            key = grammar.text(self.key.replace("KEY", name))
            member = grammar.rule(f"{key} {self._value(grammar, part, root)}")
            items.append((member, is_needed))
        return grammar.items(items, self._comma)

    def _value(self, grammar: _Grammar, schema: Schema, root: Schema) -> str:
        values = _constants(schema)
        if values is not None:
            return self._one_of(grammar, values)
        kind = _kind(schema)
        if kind in _FEW:
            return self._one_of(grammar, _FEW[kind])
        writers = {"string": self._text, "array": self._array, "object": self._object}
        write = writers.get(kind, _Grammar.json)
        return write(grammar, schema, root)

    def _one_of(self, grammar: _Grammar, values: Sequence[Any]) -> str:
        choices = " | ".join(self._constant(grammar, value) for value in values)
        return f"({choices})"

    def _constant(self, grammar: _Grammar, value: Any) -> str:
        word = json.dumps(value)
        if isinstance(value, str):
            word = f"{self.quote}{value}{self.quote}" if self.quote else word
            return grammar.text(word)
        return grammar.text(self.words.get(word, word))

    def _text(self, grammar: _Grammar, schema: Schema, root: Schema) -> str:
        if not self.quote:
            return grammar.json(schema, root)
        return f"{grammar.text(self.quote)} {grammar.until(self.quote, schema)}"

    def _array(self, grammar: _Grammar, schema: Schema, root: Schema) -> str:
        if "uniqueItems" in schema:
            said = "uniqueItems of an array cannot be forced in this model's form"
            raise CannotForce(said)
        one = grammar.rule(self._value(grammar, schema.get("items", {}), root))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        fewest = max(0, least - 1)
        more = f"{{{fewest},}}" if most is None else f"{{{fewest},{most - 1}}}"
        optional = "" if least else "?"
        comma = grammar.text(self._comma)
        return f'"[" ({one} ({comma} {one}){more}){optional} "]"'

    def _object(self, grammar: _Grammar, schema: Schema, root: Schema) -> str:
        if not self.quote:
            raise CannotForce("an object within a call of this form cannot be forced")
        return f'"{{" {self._members(grammar, schema, root)} "}}"'


def _properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    needed = schema.get("required", ())
    return [
        (name, part, name in needed)
        for name, part in (schema.get("properties") or {}).items()
    ]


def _constants(schema: Schema) -> Sequence[Any] | None:
    """Return the values that a schema allows, if they are few."""
    if "const" in schema:
        return schema.get("enum", [schema["const"]])
    return schema.get("enum")


def _names_in(schema: Schema) -> Iterator[str]:
    for name, part, _ in _properties(schema):
        yield name
        yield from _names_in(part)
    if isinstance(items := schema.get("items"), Mapping):
        yield from _names_in(items)


def _kind(schema: Schema) -> str:
    kind = schema.get("type")
    if kind not in _KINDS:
        raise CannotForce(
            f"a parameter without a single type cannot be forced in this model's form: {json.dumps(schema)[:200]}"
        )
    return str(kind)


def _quoted(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)


_FORMS: Mapping[str, _Form] = {
    "json_tools": _Form(
        _in_json('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
        keys=_ANY,
    ),
    "longcat": _Form(
        _in_json(
            '<longcat_tool_call>{"name": NAME, "arguments": ', "}</longcat_tool_call>"
        ),
        keys=_ANY,
    ),
    "mistral": _Form(_in_json("[TOOL_CALLS]BARE[ARGS]", ""), repeats=False, keys=_ANY),
    "cohere2_moe": _Form(
        _in_json('{"tool_call_id": "0", "tool_name": NAME, "parameters": ', "}"),
        keys=_ANY,
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
    ),
    "kimi_k2": _Form(
        _in_json(
            "<|tool_call_begin|>functions.BARE:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        begin="<|tool_calls_section_begin|>",
        between="",
        end="<|tool_calls_section_end|>",
        repeats=False,
        keys=_ANY,
    ),
    "qwen3_coder": _Form(
        _in_tags(
            "<tool_call>\n<function=BARE>\n",
            "<parameter=KEY>\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        keys=_IN_TAGS,
    ),
    "glm47": _Form(
        _in_tags(
            "<tool_call>BARE\n",
            "<arg_key>KEY</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
        ),
        keys=_IN_TAGS,
    ),
    "minimax_m2": _Form(
        _in_tags(
            '<minimax:tool_call>\n<invoke name="BARE">\n',
            '<parameter name="KEY">',
            "</parameter>\n",
            "</invoke>\n</minimax:tool_call>",
        ),
        keys=_IN_TAGS,
    ),
    "minicpm5": _Form(
        _in_tags(
            '<function name="BARE">',
            '<param name="KEY">',
            "</param>",
            "</function>",
            "<&\\x00-\\x1f\\ufffe\\uffff",
        ),
        keys=_IN_TAGS,
    ),
    "gemma4": _Form(
        _Braces(
            "<|tool_call>call:BARE{",
            "KEY:",
            "}<tool_call|>",
            '<|"|>',
            {"true": "true", "false": "false", "null": "null"},
        ),
        between="",
        names=r"[\w.:$-]+",
        keys=r"[\w./$-]+",
    ),
    "pythonic": _Form(
        _Braces(
            "BARE(", "KEY=", ")", "", {"true": "True", "false": "False", "null": "None"}
        ),
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        names=_IDENTIFIERS,
        keys=_IDENTIFIERS,
    ),
}
