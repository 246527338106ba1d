"""Answers held to a form, and thinking that is to end: on the trained checkpoint, where words can be read."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pydantic
import pytest

from tests.harness import inputs_of, settings_for, shared_adapter
from tests.histories import Blind, Later
from tests.test_templates import with_template
from vlm_batch import Request, SamplingParams, Template, VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.caches import Placement
from vlm_batch.engine import telling
from vlm_batch.engine.constraints import Guide
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Prompt, new_row
from vlm_batch.engine.sampling import sample
from vlm_batch.errors import InvalidParameters
from vlm_batch.inputs import grammar
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.prefix import PrefixCache
from vlm_batch.store.saved import SavedRow
from vlm_batch.types import LogitsProcessor

CIRCLE = str(sample_images()[3])
DESCRIBE = "describe the image"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue", "black"]},
        "sides": {"type": "integer", "minimum": 0, "maximum": 9},
        "known": {"type": "boolean"},
    },
    "required": ["colour", "sides", "known"],
    "additionalProperties": False,
}
#: Ends its prompts within thinking, if it is told to.
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(default_checkpoint(), max_rows=12) as made:
        yield made


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLMBatcher]:
    with VLMBatcher(with_template(tmp_path_factory.mktemp("thinks"), THINKS)) as made:
        yield made


def has_the_schema(value: Any) -> bool:
    return (
        set(value) == {"colour", "sides", "known"}
        and value["colour"] in ("red", "blue", "black")
        and isinstance(value["sides"], int)
        and 0 <= value["sides"] <= 9
        and isinstance(value["known"], bool)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_parses_and_has_its_schema(
    batcher: VLMBatcher, temperature: float
) -> None:
    handles = [
        batcher.submit(
            CIRCLE,
            DESCRIBE,
            params=SamplingParams(
                json_schema=SCHEMA, temperature=temperature, seed=seed
            ),
        )
        for seed in range(6)
    ]
    for handle in handles:
        result = handle.result(timeout=60)
        assert (result.finish_reason, result.error) == ("stop", None)
        assert json.loads(result.text) == result.parsed
        assert has_the_schema(result.parsed), result.parsed


def test_a_choice_is_what_the_model_finds_likeliest(batcher: VLMBatcher) -> None:
    """The checkpoint sees the picture: among the colours that it knows it takes the right one."""
    params = SamplingParams(choice=["a blue circle", "a red circle", "a green circle"])
    result = batcher.submit(CIRCLE, DESCRIBE, params=params).result(timeout=60)
    assert result.parsed == result.text == "a red circle"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-f]{3}-[0-9]{2}"}, r"[a-f]{3}-[0-9]{2}"),
        ({"grammar": 'start: "<" word ">"\nword: /[xyz]{2,4}/'}, r"<[xyz]{2,4}>"),
        (
            {"choice": ['say "so"', "back\\slash", "naïve\n"]},
            r'say "so"|back\\slash|naïve\n',
        ),
    ],
    ids=["regex", "grammar", "choice"],
)
def test_other_forms(batcher: VLMBatcher, form: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        params = SamplingParams(**form, temperature=2.0, seed=seed)
        result = batcher.submit(prompt="count to 3", params=params).result(timeout=60)
        assert result.finish_reason == "stop", result
        assert re.fullmatch(pattern, result.text)
        assert result.parsed == result.text


def test_an_answer_that_is_cut_says_so(batcher: VLMBatcher) -> None:
    result = batcher.submit(
        prompt="a", params=SamplingParams(json_schema=SCHEMA, max_tokens=5)
    ).result(timeout=60)
    assert (result.finish_reason, result.parsed) == ("length", None)
    assert result.text


def test_in_company_as_alone(batcher: VLMBatcher) -> None:
    """Rows with and without forms, greedy and sampled, joining at different times: each has the answer that it has alone."""
    asked = [
        Request(
            prompt=DESCRIBE, images=CIRCLE, params=SamplingParams(json_schema=SCHEMA)
        ),
        Request(prompt="count to 9"),
        Request(
            prompt=DESCRIBE,
            images=CIRCLE,
            params=SamplingParams(
                json_schema=SCHEMA, temperature=1.0, seed=5, logprobs=2
            ),
        ),
        Request(
            prompt="count to 7",
            params=SamplingParams(temperature=1.0, seed=3, max_tokens=30),
        ),
        Request(
            prompt=DESCRIBE,
            images=CIRCLE,
            params=SamplingParams(regex="[a-z ]{20,40}", temperature=0.8, seed=9),
        ),
        Request(prompt=DESCRIBE, images=CIRCLE),
    ]
    alone = [batcher.submit_request(one).result(timeout=60) for one in asked]
    together = batcher.generate(asked * 3)
    for index, result in enumerate(together):
        expected = alone[index % len(asked)]
        assert (result.text, result.token_ids, result.parsed) == (
            expected.text,
            expected.token_ids,
            expected.parsed,
        )
        if expected.logprobs is not None:
            assert [one.logprob for one in result.logprobs or ()] == pytest.approx(
                [one.logprob for one in expected.logprobs], abs=1e-4
            )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"json_schema": {"type": "obect"}}, "json_schema: Invalid type: obect"),
        ({"json_schema": {"type": "object", "if": {}}}, "json_schema: .*if"),
        ({"regex": "([a"}, "regex: .*unclosed character class"),
        # took seconds to compile
        (
            {"regex": "a?" * 5000},
            "regex has 10,000 characters; at most 8,192 are compiled",
        ),
        (
            {
                "json_schema": {
                    "type": "array",
                    "items": {"type": "string", "pattern": "a?" * 5000},
                }
            },
            "json_schema has regular expressions of 10,000 characters; at most 8,192 are compiled",
        ),
        (
            {
                "json_schema": {
                    "type": "object",
                    "patternProperties": {"a?" * 5000: {"type": "string"}},
                }
            },
            "json_schema has regular expressions of 10,000 characters",
        ),
        (
            {
                "grammar": "start: A\nA: "
                + " ".join(f"/{'a?' * 1000}{n}/" for n in range(8))
            },
            "grammar has regular expressions of 16,024 characters",
        ),
        (
            {
                "grammar": 'start: %json {"type": "string", "pattern": "'
                + "a?" * 5000
                + '"}'
            },
            "grammar has regular expressions of 10,000 characters",
        ),
        ({"grammar": "start: nothing"}, "grammar: .*nothing"),
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused_at_submit(
    batcher: VLMBatcher, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidParameters, match=said):
        batcher.submit(prompt="a", params=SamplingParams(**wrong))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice exclude each other"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": [1]}, "json_schema is .*mapping"),
        ({"choice": []}, "choice is empty"),
        ({"choice": [3]}, "choice is .*non-empty texts"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": "a", "stop": "b"}, "stop would end the answer elsewhere"),
    ],
    ids=str,
)
def test_forms_are_checked_where_they_are_made(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidParameters, match=said):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": 2**53 + 1}, "const 9007199254740993"),
        ({"const": -(2**63)}, "const -9223372036854775808"),  # ended the process
        (
            {"properties": {"a": {"items": {"enum": [1, {"maximum": [2**63 - 1]}]}}}},
            "enum 9223372036854775807",
        ),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum 9007199254740993"),
        (
            {"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 1},
            "maximum 9007199254740993",
        ),
        # ended the process
        ({"type": "integer", "minimum": -1e19, "maximum": -1e19}, "m -1e"),
        ({"type": "integer", "multipleOf": 2**31}, "multipleOf"),  # did not come back
        (
            {"type": "number", "allOf": [{"multipleOf": 1000}, {"multipleOf": 0.001}]},
            "multipleOf",
        ),
        ('{"const": NaN}', "NaN is no number of JSON"),
        ('{"const": 1e400}', "'1e400' is larger than any number"),
        ({"const": float("-inf")}, "-Infinity is no number of JSON"),
    ],
    ids=str,
)
def test_numbers_that_would_be_others_are_refused(schema: Any, said: str) -> None:
    """llguidance reads every number of a schema as a 64-bit float, and bounds as 64-bit integers."""
    with pytest.raises(InvalidParameters, match=f"json_schema .*{said}"):
        SamplingParams(json_schema=schema)


LARGE: dict[str, Any] = {"const": 1234567890123456789}
SLOW = {"type": "integer", "multipleOf": 2**31}


@pytest.mark.parametrize("name", ["default", "example", "examples"])
@pytest.mark.parametrize("inner", [LARGE, SLOW], ids=["large", "slow"])
@pytest.mark.parametrize(
    "schema",
    [
        '{"properties": {"NAME": INNER}}',
        '{"patternProperties": {"NAME": INNER}}',
        '{"$ref": "#/$defs/NAME", "$defs": {"NAME": INNER}}',
        '{"$ref": "#/definitions/NAME", "definitions": {"NAME": INNER}}',
        '{"$ref": "#/components/schemas/NAME", "components": {"schemas": {"NAME": INNER}}}',
        '{"properties": {"x": {"$ref": "#/NAME/q"}}, "NAME": {"q": INNER}}',
        '{"properties": {"x": {"$ref": "#/NAME/0"}}, "NAME": [INNER]}',
        '{"$ref": "#/%64efault", "default": INNER}',
        '{"$ref": "#/x-own", "x-own": INNER}',
        '{"$ref": "#/x-own/NAME", "x-own": {"NAME": INNER}}',
        '{"$ref": "#/$defs", "$defs": {"properties": {"NAME": INNER}}}',
        '{"$ref": "http://own/a#/NAME", "$id": "http://own/a", "NAME": INNER}',
        '{"$ref": "#/const/NAME", "const": {"NAME": INNER}}',
        '{"allOf": [{"$ref": "#/properties/NAME"}], "properties": {"NAME": {"items": INNER}}}',
    ],
)
def test_what_a_schema_says_is_checked_wherever_it_stands(
    name: str, inner: dict[str, Any], schema: str
) -> None:
    """A property may have the name of a keyword, and a reference may lead anywhere but into data."""
    whole = schema.replace("NAME", name).replace("INNER", json.dumps(inner))
    said = r"const 1234567890123456789|multipleOf|refers to '.*', which is no schema"
    with pytest.raises(InvalidParameters, match=said):
        SamplingParams(json_schema=whole)


@pytest.mark.parametrize(
    "reference",
    [
        "#/default",
        "#/%64efault",
        "#/properties",
        "#/properties/a/examples/0",
        "#/$defs",
        "#/properties/b/enum/0",
        "http://own/a#/properties/a/const",
    ],
)
def test_references_to_what_is_no_schema_are_refused(reference: str) -> None:
    """The standard leaves open what they are; llguidance reads them as schemas."""
    string = {"type": "string"}
    schema = {"properties": {"a": {"$ref": reference}, "b": string}, "$defs": {}}
    with pytest.raises(InvalidParameters, match="which is no schema but"):
        SamplingParams(json_schema=schema)
    with pytest.raises(InvalidParameters, match="which is no schema but"):
        SamplingParams(json_schema={"anyOf": [string, {"$ref": reference}]})


def test_a_reference_into_openapis_components_is_followed() -> None:
    """Their names are the author's, those of keywords too, and a property ``default`` stays."""
    own = {"type": "object", "properties": {"default": {"type": "string"}}}
    schemas = {"default": own, "enum": {"type": "string"}}
    asked = {name: {"$ref": f"#/components/schemas/{name}"} for name in schemas}
    schema = {"properties": asked, "components": {"schemas": schemas}}
    form = SamplingParams(json_schema=schema).json_schema
    assert form == schema


def test_a_reference_to_names_removes_none_of_them() -> None:
    """As a schema, the mapping of names would lose the property ``default``."""
    properties = {"default": {"type": "object", "items": {"$ref": "#/properties"}}}
    with pytest.raises(InvalidParameters, match="which is no schema but"):
        SamplingParams(json_schema={"type": "object", "properties": properties})


@pytest.mark.parametrize("name", ["x", "default", "a/b", "properties"])
def test_references_to_properties_are_followed(name: str) -> None:
    pointer = name.replace("/", "~1")
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}, "y": {"$ref": f"#/properties/{pointer}"}},
        "required": ["y"],
    }  # fmt: skip
    params = SamplingParams(json_schema=schema)
    grammar.check_form(params)
    assert params.json_schema == schema


@pytest.mark.parametrize("reference", ["#/properties/default", "#/$defs/const", "#"])
def test_references_to_schemas_named_as_keywords_are_followed(reference: str) -> None:
    schema = {
        "properties": {"a": {"$ref": reference}, "default": {"type": "string"}},
        "$defs": {"const": {"type": "null"}},
        "const": {"$ref": "#/const"},  # data, and no reference
    }
    SamplingParams(json_schema=schema)


@pytest.mark.parametrize("name", ["default", "example", "examples"])
def test_what_is_only_spoken_of_may_be_any_number(name: str) -> None:
    """llguidance reads no integer that is larger than 64 bits, wherever it stands."""
    for schema in (
        {"type": "integer", name: 10**30},
        {"properties": {name: {"type": "integer", name: [10**400]}}},
    ):
        params = SamplingParams(json_schema={**schema})
        grammar.check_form(params)
        # a property of that name stays
        assert ("properties" in schema) == (name in str(params.json_schema))


@pytest.mark.parametrize("name", ["default", "example", "examples"])
def test_constants_have_no_annotations(name: str) -> None:
    for schema in ({"const": {name: 2**53 + 1}}, {"enum": [[{name: 2**53 + 1}]]}):
        with pytest.raises(InvalidParameters, match="9007199254740993"):
            SamplingParams(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        # were followed as 14,100
        {"allOf": [{"multipleOf": 50000}, {"multipleOf": 100000}]},
        {
            "multipleOf": 50000,
            "$ref": "#/$defs/a",
            "$defs": {"a": {"multipleOf": 100000}},
        },
        {
            "multipleOf": 50000,
            "$ref": "#own",
            "$defs": {"a": {"$anchor": "own", "multipleOf": 100000}},
        },
        {
            "properties": {"a": {"multipleOf": 5}},
            "patternProperties": {"a": {"multipleOf": 70001}},
        },
        {
            "allOf": [
                {"properties": {"a": {"multipleOf": 50000}}},
                {"properties": {"a": {"multipleOf": 100000}}},
            ]
        },
        {"multipleOf": 999983},
        {"multipleOf": 86_400_000},
        {"multipleOf": 0.100003},
    ],
    ids=str,
)
def test_multiples_that_are_slow_or_become_others_are_refused(
    schema: dict[str, Any],
) -> None:
    """llguidance follows some number by number, and multiplies those of one value in 32 bits."""
    with pytest.raises(InvalidParameters, match="multipleOf"):
        SamplingParams(json_schema={"type": "number", **schema})


@pytest.mark.parametrize(
    "multiples",
    [(0.01, 3600), (1e-6, 15), (1e-8, 1), (1_000_000, 7), (100_000, 99_991)],
    ids=str,
)
def test_multiples_of_unrelated_values_are_each_their_own(
    multiples: tuple[float, float],
) -> None:
    one, other = ({"type": "number", "multipleOf": number} for number in multiples)
    money = {"description": "money", "$ref": "#/$defs/money"}
    for schema in (
        {"properties": {"x": one, "y": other}},
        {"anyOf": [one, other], "title": "either"},
        {"properties": {"x": money, "y": {"items": other}}, "$defs": {"money": one}},
    ):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"minimum": -9223372036854776000, "maximum": 9223372036854776000},
        {
            "exclusiveMinimum": -1.7976931348623157e308,
            "maximum": 1.7976931348623157e308,
        },
        {"minimum": -3.4028234663852886e38, "exclusiveMaximum": 3.4028234663852886e38},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_the_limits_of_number_types_are_no_bounds(
    batcher: VLMBatcher, bounds: dict[str, Any], kind: str
) -> None:
    schema = {
        "properties": {"minimum": {"type": kind, **bounds}},
        "required": ["minimum"],
    }
    shape = {"type": "object", "additionalProperties": False, **schema}
    params = SamplingParams(
        json_schema=shape,
        max_tokens=40,
        logits_processors=[forced(batcher, '{"minimum": 7}')],
    )
    result = batcher.submit(prompt="a", params=params).result(timeout=60)
    assert result.parsed == {"minimum": 7}, result.error
    with pytest.raises(InvalidParameters, match="numbers below 2"):
        SamplingParams(
            json_schema={"type": kind, "minimum": 2**63 - 1, "maximum": -(2**63)}
        )


@pytest.mark.parametrize(
    "name", ["int64", "decimal", "password", "byte", "uri-reference", "url"]
)
def test_formats_that_nobody_knows_ask_nothing(batcher: VLMBatcher, name: str) -> None:
    schema = {"enum": [{"format": name}]}
    text = {"type": "string", "format": name, "maxLength": 5}
    shape = {
        "type": "object",
        "properties": {"format": text, "const": text, "own": schema},
        "required": ["own"],
    }
    result = batcher.submit(
        prompt="a", params=SamplingParams(json_schema=shape, max_tokens=1)
    ).result(timeout=60)
    assert result.error is None
    settled = SamplingParams(json_schema=shape).json_schema
    assert isinstance(settled, dict)
    plain = {"type": "string", "maxLength": 5}
    assert settled["properties"] == {"format": plain, "const": plain, "own": schema}
    dated = {"type": "string", "format": "date"}
    assert SamplingParams(json_schema=dated).json_schema == dated
    listed = {"type": "array", "uniqueItems": False}
    assert SamplingParams(json_schema=listed).json_schema == {"type": "array"}


def test_a_schema_within_a_grammar_is_a_schema(batcher: VLMBatcher) -> None:
    with pytest.raises(InvalidParameters, match="grammar has const 9007199254740993"):
        batcher.submit(
            prompt="a",
            params=SamplingParams(
                grammar='start: "n" %json {"const": 9007199254740993}'
            ),
        )
    schema = json.dumps({"type": "object", "properties": {"example": SLOW}})
    with pytest.raises(InvalidParameters, match="grammar has multipleOf 2147483648"):
        batcher.submit(
            prompt="a", params=SamplingParams(grammar=f"start: %json {schema}")
        )


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, 0.1, 5])
def test_other_numbers_are_written_as_they_are(
    batcher: VLMBatcher, number: float
) -> None:
    schema = {"const": number, "default": 2**53 + 1}
    result = batcher.submit(
        prompt="a", params=SamplingParams(json_schema=schema, max_tokens=40)
    ).result(timeout=60)
    assert result.parsed == number, result.error
    SamplingParams(
        json_schema={
            "type": "integer",
            "minimum": 0,
            "maximum": 2**63 - 1,
            "multipleOf": 60,
        }
    )


DEEP = 1200
CHAIN = {"properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"$defs": {str(at): json.loads(json.dumps(CHAIN).replace("NEXT", f"#/$defs/{at + 1}"))
                                   for at in range(DEEP)} | {str(DEEP): {"const": 1}}, "$ref": "#/$defs/0"}},
        {"grammar": "start: r0\n" + "".join(f"r{at}: ((((r{at + 1}))))\n" for at in range(DEEP)) + f'r{DEEP}: "a"'},
    ],
    ids=["schema", "grammar"],
)  # fmt: skip
def test_a_form_that_goes_deep_does_not_end_the_process(
    batcher: VLMBatcher, form: dict[str, Any]
) -> None:
    """A thread's usual stack ends before llguidance has gone from one to the last."""
    result = batcher.submit(
        prompt="a", params=SamplingParams(max_tokens=3, **form)
    ).result(timeout=60)
    assert result.ok or isinstance(result.exception, InvalidParameters), result.error


def test_submitting_waits_for_no_form_that_is_being_compiled(
    batcher: VLMBatcher,
) -> None:
    """Which can take seconds, and is the loaders' to wait for."""
    forms = batcher._preparer._forms
    with forms._vocabulary_lock:
        handles = [
            batcher.submit(CIRCLE, DESCRIBE, params=SamplingParams(choice=[word]))
            for word in ("a", "the")
        ]
    assert [handle.result(timeout=60).text for handle in handles] == ["a", "the"]


MANY = [f"colour {number}" for number in range(3000)]


def test_a_choice_of_thousands_and_one_that_begins_another(batcher: VLMBatcher) -> None:
    """One lexeme: llguidance follows at most 2,000 alternatives of a rule."""
    result = batcher.submit(
        CIRCLE, DESCRIBE, params=SamplingParams(choice=MANY)
    ).result(timeout=60)
    assert result.error is None
    assert result.parsed in MANY
    for last in (2, 3, 4):
        params = SamplingParams(choice=["1 2", "1 2 3", "1 2 3 4"])
        said = batcher.submit(prompt=f"count to {last}", params=params).result(
            timeout=60
        )
        assert said.parsed == " ".join(map(str, range(1, last + 1)))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (
            {"choice": [f"{number:0100}" for number in range(2000)]},
            "at most 131,072 are compiled",
        ),
        ({"json_schema": {"description": "x" * 2**17}}, "at most 131,072 are compiled"),
        (
            {
                "grammar": "start: "
                + " | ".join(f'"a{number}"' for number in range(3000))
            },
            "Current row has 3001 items",
        ),
        ({"regex": "(a?){500}a{500}"}, "too many expressions"),
    ],
    ids=["many-choices", "a-large-schema", "many-alternatives", "a-wide-regex"],
)
def test_a_form_that_costs_too_much_is_the_requests_fault(
    batcher: VLMBatcher, form: dict[str, Any], said: str
) -> None:
    """Refused when it is submitted, prepared, or met on the way, and always as what was asked."""
    try:
        error = (
            batcher.submit(prompt="count to 3", params=SamplingParams(**form))
            .result(timeout=60)
            .exception
        )
    except InvalidParameters as raised:
        error = raised
    assert isinstance(error, InvalidParameters)
    assert said in str(error)
    assert "<state>" not in str(error)


class Receipt(pydantic.BaseModel, extra="forbid"):
    """The form of an answer, as users of pydantic write it."""

    colour: Literal["red", "blue"]
    sides: int = pydantic.Field(ge=0, le=9)


def test_a_pydantic_models_class_is_a_schema(batcher: VLMBatcher) -> None:
    """The same answer as by its schema; ``parsed`` is what the JSON says, and the class validates it."""
    by_class, by_schema = (
        batcher.submit(CIRCLE, DESCRIBE, params={"json_schema": schema}).result(
            timeout=60
        )
        for schema in (Receipt, Receipt.model_json_schema())
    )
    assert by_class.error is None and by_class.token_ids == by_schema.token_ids
    assert Receipt.model_validate(by_class.parsed).model_dump() == by_class.parsed
    with pytest.raises(
        InvalidParameters, match=r"json_schema is .*a class that gives no schema"
    ):
        SamplingParams(json_schema=dict)


def forced(batcher: VLMBatcher, text: str) -> LogitsProcessor:
    """A logits processor that has the answer say a text, as far as the form goes along."""
    tokens = batcher.processing.tokenizer.encode(text)
    steps = iter([*tokens, *batcher.processing.eos_token_ids[:1] * 100])
    return lambda _, logits: mx.where(
        mx.arange(logits.shape[-1]) == next(steps), 0.0, -100.0
    )[None]


def test_a_finished_answer_that_python_cannot_read_is_finished(
    batcher: VLMBatcher,
) -> None:
    """Integers have 4,300 digits at most there (640 here), and values a thousand levels, of which writers need several each."""
    whole = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    inner = {
        "anyOf": [
            {
                "type": "array",
                "items": {"$ref": "#/$defs/a"},
                "minItems": 1,
                "maxItems": 1,
            },
            {"type": "null"},
        ]
    }
    deep = {"$ref": "#/$defs/a", "$defs": {"a": inner}}
    texts: dict[str, Any] = {
        '{"x": ' + "1" * 700 + "}": whole,
        "[" * 500 + "null" + "]" * 500: deep,
        "[" * 99 + "null" + "]" * 99: deep,
    }
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        asked = [
            SamplingParams(
                json_schema=schema,
                max_tokens=1500,
                logits_processors=[forced(batcher, text)],
            )
            for text, schema in texts.items()
        ]
        results = batcher.generate(
            [Request(prompt="a", params=params) for params in asked]
        )
    finally:
        sys.set_int_max_str_digits(most)
    assert [
        (result.finish_reason, result.error, result.text) for result in results
    ] == [("stop", None, text) for text in texts]
    assert [result.parsed is None for result in results] == [True, True, False]
    assert json.dumps(asdict(results[2]))
    assert grammar.read_json("[" * 5000 + "]" * 5000) is None


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"choice": ["yes", "no"], "min_tokens": 10},
            "min_tokens is 10, and the answer has its choice after ",
        ),
        (
            {"choice": ["yes", "no"], "allowed_token_ids": [5, 6]},
            "choice and allowed_token_ids leave no token to choose",
        ),
        (
            {"regex": "a+", "bad_words": ["a", "aa", "aaa", "aaaa"]},
            "regex and bad_words leave no token to choose",
        ),
        (
            {"allowed_token_ids": [64], "bad_words": ["a"]},
            "allowed_token_ids and bad_words leave no token to choose",
        ),
        (
            {"grammar": "start: a\na: start"},
            "grammar: no text has this form: it refers to itself, or contradicts itself",
        ),
    ],
    ids=[
        "min_tokens",
        "allowed_token_ids",
        "bad_words",
        "no form",
        "a grammar of itself",
    ],
)
def test_what_contradicts_a_form_is_named_and_fails_alone(
    batcher: VLMBatcher, params: dict[str, Any], said: str
) -> None:
    other = batcher.submit(prompt="count to 7")
    error = batcher.submit(prompt="a", params=params).result(timeout=60).exception
    assert isinstance(error, InvalidParameters)
    assert said in str(error)
    assert other.result(timeout=60).text == "1 2 3 4 5 6 7"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    ],
)
def test_a_schema_that_requires_itself_is_refused_at_once(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(
        InvalidParameters, match="requires a value within itself without an end"
    ):
        SamplingParams(json_schema=schema)


def test_min_tokens_hold_for_a_form_that_can_go_on(batcher: VLMBatcher) -> None:
    plain, longer = (
        batcher.submit(
            prompt="a", params={"regex": "a*", "min_tokens": least, "max_tokens": 40}
        ).result(timeout=60)
        for least in (0, 9)
    )
    assert len(plain.token_ids) < 9 <= len(longer.token_ids) < 40
    assert longer.finish_reason == "stop" and longer.parsed == longer.text


def test_a_large_form_is_compiled_beside_the_others(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiling may take seconds: plain requests and small forms are loaded and answered meanwhile."""
    compiles, is_done = grammar.Forms._compile, threading.Event()

    def slowly(self: grammar.Forms, name: str, text: str) -> grammar.Form:
        if len(text) >= grammar.LARGE:
            assert is_done.wait(60)
        return compiles(self, name, text)

    monkeypatch.setattr(grammar.Forms, "_compile", slowly)
    words = [f"word {number}" for number in range(2500)]
    large = [
        batcher.submit(prompt="count to 3", params={"choice": [*words, str(index)]})
        for index in range(9)
    ]
    try:
        assert batcher.submit(prompt="count to 3").result(timeout=60).text == "1 2 3"
        assert (
            batcher.submit(prompt="count to 3", params={"choice": ["small", "form"]})
            .result(timeout=60)
            .error
            is None
        )
        assert not any(handle.done() for handle in large)
    finally:
        is_done.set()
    assert {handle.result(timeout=60).error for handle in large} == {None}


def test_kept_forms_are_bounded_by_what_they_took_and_hold_nobody(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of compiling stand for llguidance's memory; the last form is kept whatever it took."""
    forms = batcher._preparer._forms

    def ask(words: Sequence[str]) -> None:
        for word in words:
            batcher.submit(prompt="count to 3", params={"choice": [word]}).result(
                timeout=60
            )

    ask(["kept", "kept too"])
    assert sum("kept" in text for _, text in forms._compiled) == 2
    monkeypatch.setattr(grammar, "MOST_SECONDS_KEPT", 0.0)
    ask(["first", "second", "third"])
    done = [
        text
        for (_, text), form in forms._compiled.items()
        if form.done() and not form.exception()
    ]
    assert len(done) == 1 and "third" in done[0]
    assert not any(vars(form)["_done_callbacks"] for form in forms._compiled.values())


def test_forms_are_compiled_beside_everything_else(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain requests, and those whose forms are known, wait for nobody's; the same form is compiled once, refused or not."""
    known = {"choice": ["yes", "no"]}
    batcher.submit(prompt="count to 3", params=known).result(timeout=60)
    compiles, is_done, names = grammar.Forms._compile, threading.Event(), list[str]()

    def slowly(self: grammar.Forms, name: str, text: str) -> grammar.Form:
        assert is_done.wait(60)
        names.append(text)
        return compiles(self, name, text)

    monkeypatch.setattr(grammar.Forms, "_compile", slowly)
    wrong, right = {"regex": "(.*a){9}(.*b){9}[^a]{9999}x{9999}"}, {"regex": "a{1,20}"}
    slow = [
        batcher.submit(prompt="count to 3", params=params)
        for params in [wrong, right] * 12
    ]
    try:
        assert batcher.submit(prompt="count to 3").result(timeout=60).text == "1 2 3"
        assert batcher.submit(prompt="count to 3", params=known).result(
            timeout=60
        ).parsed in ("yes", "no")
        assert not any(handle.done() for handle in slow)
        slow[1].cancel()  # the first who waits for a form: the others ask again
    finally:
        is_done.set()
    ends = [handle.result(timeout=60) for handle in slow]
    assert {end.finish_reason for end in ends[3::2]} == {"stop"}
    assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize("depth", ["a", "xa"], ids=["at-once", "later"])
def test_nested_repetition_costs_little(batcher: VLMBatcher, depth: str) -> None:
    """A hundred characters that would have llguidance work for seconds: they are refused before."""
    begin = time.process_time()
    params = SamplingParams(regex=f"{depth[:-1]}(((a{{100}}){{100}}){{100}}){{100}}")
    result = batcher.submit(prompt="count to 3", params=params).result(timeout=60)
    assert isinstance(
        result.exception, InvalidParameters
    ) and "too many expressions" in str(result.error)
    assert time.process_time() - begin < 1.0


def test_a_slow_token_is_the_requests_fault(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MOST_SECONDS", 0.0)
    result = batcher.submit(
        prompt="count to 3", params=SamplingParams(regex="[a-z ]{9}")
    ).result(timeout=60)
    assert isinstance(
        result.exception, InvalidParameters
    ) and "a token took over" in str(result.error)
    assert batcher.submit(prompt="count to 3").result(timeout=60).text == "1 2 3"


LOOP: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#"}},
    "required": ["a"],
}


@pytest.mark.parametrize(
    ("schema", "has_an_end"),
    [
        (LOOP, False),
        ({**LOOP, "required": []}, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}]}}, "required": ["a"]}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"allOf": [{"$ref": "#"}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": LOOP["properties"]["a"] | {"$ref": "#/$defs/b"}, "b": {"type": "string"}}}, True),
        (
            {
                "$ref": "#/$defs/tree",
                "$defs": {
                    "tree": {
                        "type": "object",
                        "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/leaf"}},
                        "required": ["right"],
                    },
                    "leaf": {"type": "integer"},
                },
            },
            True,
        ),
    ],
    ids=lambda one: str(one)[:60],
)  # fmt: skip
def test_what_requires_itself_without_an_end_is_refused_at_once(
    schema: dict[str, Any], has_an_end: bool
) -> None:
    if has_an_end:
        SamplingParams(json_schema=schema)
        return
    with pytest.raises(InvalidParameters, match="without an end"):
        SamplingParams(json_schema=schema)


THOUSANDS = [f"p{number}" for number in range(5000)]
#: A part that needs itself first, and then thousands of others.
WIDE: dict[str, dict[str, Any]] = {
    "object": {"type": "object", "required": ["a", *THOUSANDS], "properties": {"a": {"$ref": "#/$defs/a"}}},
    "array": {"type": "array", "minItems": 10**9, "prefixItems": [{"$ref": "#/$defs/a"}, *[{}] * 5000]},
    "keys": {"allOf": [{"$ref": "#/$defs/a"}], **dict.fromkeys(THOUSANDS, 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_what_is_wide_is_looked_at_quickly(name: str) -> None:
    choices = [{"$ref": "#/$defs/a", "title": name} for name in THOUSANDS]
    begin = time.process_time()
    SamplingParams(json_schema={"anyOf": choices, "$defs": {"a": WIDE[name]}})
    SamplingParams(
        json_schema={name: {"$ref": "#"} for name in THOUSANDS} | {"title": ""}
    )
    assert time.process_time() - begin < 1.5


def test_a_schema_may_be_changed_after_submit(batcher: VLMBatcher) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = SamplingParams(json_schema=schema)
    schema.clear()
    assert set(batcher.submit(prompt="a", params=params).result(timeout=60).parsed) == {
        "a"
    }


def test_thinking_ends_when_its_budget_is_spent(thinker: VLMBatcher) -> None:
    end = thinker._preparer.processing.ids_of("</think>")
    for budget in (0, 1, 4):
        params = SamplingParams(thinking_budget=budget, max_tokens=30)
        result = thinker.submit(
            prompt="count to 9", template=Template(enable_thinking=True), params=params
        ).result(timeout=60)
        assert result.token_ids[budget : budget + len(end)] == end
        assert result.text.count("</think>") == 1


def test_a_budget_of_thinking_counts_drafted_tokens(thinker: VLMBatcher) -> None:
    """Answers that repeat earlier ones have drafts, some of which hold; they end thinking where answers without do."""
    params = SamplingParams(thinking_budget=9, max_tokens=40, ignore_eos=True)
    ask: dict[str, Any] = {
        "prompt": "count to 9",
        "template": Template(enable_thinking=True),
        "params": params,
    }
    right = thinker.submit_request(Request(**ask, draft="off")).result(timeout=60)
    before = thinker.stats()
    found = [
        thinker.submit_request(Request(**ask)).result(timeout=60) for _ in range(4)
    ]
    assert thinker.stats().drafts_held > before.drafts_held
    assert [one.token_ids for one in found] == [right.token_ids] * 4


def test_a_form_begins_after_thinking(thinker: VLMBatcher) -> None:
    params = SamplingParams(json_schema=SCHEMA, thinking_budget=3, ignore_eos=False)
    result = thinker.submit(
        CIRCLE, DESCRIBE, template=Template(enable_thinking=True), params=params
    ).result(timeout=60)
    _, after = result.text.split("</think>")
    assert result.finish_reason == "stop"
    assert json.loads(after) == result.parsed
    assert has_the_schema(result.parsed)
    plain = thinker.submit(
        CIRCLE, DESCRIBE, params=SamplingParams(json_schema=SCHEMA)
    ).result(timeout=60)
    assert json.loads(plain.text) == plain.parsed


def test_thinking_that_does_not_end_has_no_value(thinker: VLMBatcher) -> None:
    """End tokens may not come before the answer has its form."""
    params = SamplingParams(json_schema=SCHEMA, max_tokens=20)
    result = thinker.submit(
        prompt="count to 2", template=Template(enable_thinking=True), params=params
    ).result(timeout=60)
    assert (result.finish_reason, result.parsed) == ("length", None)
    assert result.usage.completion_tokens == 20


def test_a_template_without_thinking_has_no_budget_for_it(batcher: VLMBatcher) -> None:
    with pytest.raises(InvalidParameters, match="does not mark thinking"):
        batcher.submit(prompt="a", params=SamplingParams(thinking_budget=3))


class AnyForm(Blind):
    """Lets everything through, and notes when it is asked."""

    is_whole = may_end = False

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def fill(self, bits: np.ndarray) -> None:
        self.noted.append("mask")
        bits[:] = 0xFFFFFFFF

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]:
        self.noted.append("token")
        return Later(0)

    def copy(self) -> AnyForm:
        return self

    def read(self, text: str) -> str:
        return text


def test_nobody_waits_for_a_mask() -> None:
    """In each step the plain row's token is launched before the held row's last token is read and its mask made."""
    noted: list[str] = []

    def recording(logits: Any, rows: Any) -> Any:
        noted.append("plain" if rows[0].seed == 1 else "held")
        return sample(logits, rows)

    generator = BatchGenerator(shared_adapter("qwen2_vl"), sampler=recording)
    for index in (1, 2):
        params = SamplingParams(max_tokens=6, seed=index)
        row = new_row(
            str(index),
            Prompt(inputs=as_mlx(inputs_of("qwen2_vl", f"text:{index}:6"))),
            params,
        )
        row.answer.guide = Guide.of(
            params, AnyForm(noted) if index == 2 else None, None, ()
        )
        generator.rows.add(row)
    while generator.has_work:
        generator.step()
    steady = noted[noted.index("plain", 2) :]
    assert steady[:8] == ["plain", "token", "mask", "held"] * 2, noted


class Stuck(AnyForm):
    """Gets through three tokens, and then only when it is told to."""

    def __init__(self) -> None:
        super().__init__([])
        self.held: list[Future[None]] = []

    def follow(self, token: int, most_ahead: int = 0) -> Future[None]:
        super().follow(token)
        if len(self.noted) < 5:
            return Later(0)
        self.held.append(Future())
        return self.held[-1]


@pytest.mark.parametrize("placement", Placement)
def test_a_form_that_takes_long_holds_up_its_own_row_alone(
    placement: Placement,
) -> None:
    """The others have all their tokens while it is at one of its own; then it goes on, to the same answer."""
    texts: dict[str, tuple[int, ...]] = {}
    for names in (["stuck"], ["stuck", "plain", "other"]):
        generator = BatchGenerator(
            shared_adapter("qwen2_vl"), policy=settings_for(placement, max_rows=3)
        )
        form = Stuck()
        for name in names:
            params = SamplingParams(max_tokens=12, seed=len(name), temperature=1.0)
            row = new_row(
                name,
                Prompt(inputs=as_mlx(inputs_of("qwen2_vl", f"text:{len(name)}:6"))),
                params,
            )
            own = form if name == "stuck" else None
            row.answer.guide = Guide.of(params, own, None, ())
            generator.rows.add(row)
        order = []
        while generator.has_work:
            ends = [event for event in generator.step() if event.result is not None]
            order += [event.request_id for event in ends]
            for event in ends:
                assert event.result is not None
                assert (
                    texts.setdefault(event.request_id, event.result.token_ids)
                    == event.result.token_ids
                )
            if form.held and len(order) == len(names) - 1:
                form.held.pop().set_result(None)
        assert order[-1] == "stuck" and len(texts["stuck"]) == 12


@pytest.mark.parametrize("placement", Placement)
def test_the_caches_of_a_cancelled_row_are_kept_with_the_token_that_its_form_has(
    placement: Placement,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = shared_adapter("qwen2_vl")
    reuse, stored = Reuse(adapter, PrefixCache(ByteBudget(2**28))), list[SavedRow]()
    monkeypatch.setattr(reuse, "store", stored.append)
    generator = BatchGenerator(
        adapter, policy=settings_for(placement, max_rows=2), reuse=reuse
    )
    row = new_row(
        "stuck",
        Prompt(inputs=as_mlx(inputs_of("qwen2_vl", "text:3:40"))),
        SamplingParams(max_tokens=12),
    )
    row.answer.guide = Guide.of(row.params, form := Stuck(), None, ())
    answer = row.answer
    generator.rows.add(row)
    while not form.held:
        generator.step()
    assert answer.guide.untold is not None
    stored.clear()  # its prompt
    assert generator.cancel("stuck")
    generator.step()
    assert [saved.length for saved in stored] == [40 + answer.num_fed], caplog.text
    assert answer.num_fed == len(answer.token_ids) + 1  # or the case is another one


def test_whoever_asks_for_a_form_that_was_just_cancelled_has_it_compiled(
    batcher: VLMBatcher,
) -> None:
    """Also before its callbacks have run: a loading that got it again would ask again at once, and again."""
    forms, params = batcher._preparer._forms, SamplingParams(regex="(ab|cd)e+")
    key = (str(params.form), grammar._grammar(params))
    gone: Future[grammar.Form] = Future()
    gone.set_exception(OperationCancelled())
    forms._compiled[key] = gone
    assert forms.compiled(params, Cancelled()).result(30).copy() is not None


def test_looking_ahead_leaves_the_beginning_to_all(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that looked along tokens before its first one has changed nothing of what other copies begin with."""
    monkeypatch.setattr(grammar, "AHEAD_SECONDS", 1.0)
    params = SamplingParams(regex="(ab|cd)e*")
    start = batcher._preparer._forms.compiled(params, Cancelled()).result()
    words = -(-batcher._preparer._forms._words().vocab_size // 32)
    before, after = (np.zeros(words, dtype=np.uint32) for _ in range(2))
    start.fill(before)
    (first, second) = (batcher._preparer.processing.ids_of(text)[0] for text in "ab")
    one = start.copy()
    one.look_ahead([first, second]).result()
    assert one.ahead == (first, second)
    one.follow(first, 4).result()
    # forgotten; what follows may be one token with what comes then
    assert one.ahead in ((), (second,))
    start.copy().fill(after)
    assert (before == after).all() and before.any()


def test_looking_ahead_along_a_token_beyond_the_limits_leaves_the_form_as_it_was(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance keeps the error of a step that grew too large, which no rollback clears."""
    monkeypatch.setattr(grammar, "AHEAD_SECONDS", 1.0)
    letters = "ABCDEFGHIJKLMNOPQRST"
    words = " | ".join(
        f"n {one} {two} {three}"
        for one in letters
        for two in letters
        for three in letters
    )
    rules = "\n".join(f'{letter}: "{letter.lower()}"' for letter in letters)
    text = f'start: s\ns: "z" | s "z" | s "!" t\nn: | "-"\nt: {words}\n{rules}\n'
    form = (
        batcher._preparer._forms.compiled(SamplingParams(grammar=text), Cancelled())
        .result()
        .copy()
    )
    z, mark = (batcher._preparer.processing.ids_of(one)[0] for one in "z!")
    form.follow(z).result()
    form.look_ahead([mark]).result()
    assert form.ahead == ()
    form.follow(z).result()


def test_a_late_check_of_a_draft_does_not_end_its_row(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails after the answer's last token came, and what it found is not taken for what follows another."""
    form = (
        batcher._preparer._forms.compiled(
            SamplingParams(regex="(ab|cd)e*"), Cancelled()
        )
        .result()
        .copy()
    )
    (first, second), end = (
        (batcher._preparer.processing.ids_of(text)[0] for text in "ab"),
        1000,
    )
    guide, may_go = Guide(form, None, None, (end,)), threading.Event()
    look_ahead = grammar.Form._look_ahead

    def late(self: grammar.Form, tokens: Sequence[int]) -> None:
        may_go.wait(30)
        look_ahead(self, tokens)
        raise ValueError("looked too far")

    monkeypatch.setattr(grammar.Form, "_look_ahead", late)
    guide.look_ahead([first, second], 0.0)
    assert guide.ahead == ()
    guide.feed(first)
    guide.finish()
    guide.look_ahead([second], 0.0)
    guide.feed(end)
    may_go.set()
    guide.finish()
    bits = guide.allowed(first + second + 32)
    assert bits is not None and bits[second // 32] >> (second % 32) & 1


def test_a_look_ahead_that_fails_loses_the_draft_alone(
    batcher: VLMBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = (
        batcher._preparer._forms.compiled(
            SamplingParams(regex="(ab|cd)e*"), Cancelled()
        )
        .result()
        .copy()
    )
    guide = Guide(form, None, None)
    first = batcher._preparer.processing.ids_of("a")[0]

    def fails(self: grammar.Form, tokens: Sequence[int]) -> None:
        raise ValueError("looked too far")

    monkeypatch.setattr(grammar.Form, "_look_ahead", fails)
    with pytest.raises(ValueError, match="too far"):
        guide.look_ahead([first], 30)
    assert guide.ahead == ()
    guide.feed(first)
    guide.finish()


class Late:
    """A guide whose form needs a while; ``asked``: the seconds that somebody would wait for it, which pass by the clock."""

    def __init__(self, clock: list[float]) -> None:
        self.asked: list[float] = []
        self._clock = clock

    def is_ready(self, seconds: float = 0.0) -> bool:
        if seconds:
            self.asked.append(seconds)
            self._clock[0] += seconds / 2
        return False


@pytest.mark.parametrize(
    ("beside_others", "most"), [(True, 0.002), (False, telling.FORM_SECONDS)]
)
def test_a_step_waits_for_forms_as_long_as_its_own_work_takes(
    beside_others: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen late masks, and drafts that are looked at, share what one step may wait; its waits are no work of its own."""
    clock = [0.0]
    monkeypatch.setattr(telling, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    patience, guide = telling.Patience(), Late(clock)
    patience.begin(beside_others=True)
    patience.end(0.002)
    for _ in range(3):
        begin, guide.asked[:] = clock[0], []
        patience.begin(beside_others=beside_others)
        assert not any(patience.is_ready(guide) for _ in range(16))  # type: ignore[arg-type]
        waited = clock[0] - begin
        assert guide.asked[0] == pytest.approx(most) and most / 2 < waited <= most
        patience.end(waited + 0.002)
