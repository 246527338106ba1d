"""JSON schemas of answers: what is read of them, and what llguidance cannot follow."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from vlm_batch.checks import is_real, is_whole, parse_json
from vlm_batch.errors import InvalidParameters, describe, shown

#: Keywords whose values are no schemas and constrain nothing: what they hold is not looked at.
_SPOKEN = {"default", "example", "examples"}
#: Keywords whose mappings are no schemas: the keyword under which the mapping's values are looked at, "" for schemas.
_NO_SCHEMA = {
    "const": "const",
    "enum": "enum",
    "properties": "",
    "patternProperties": "",
    "$defs": "",
    "definitions": "",
    "dependentSchemas": "",
    "schemas": "",  # OpenAPI's components
}
_CONSTANTS = {"const", "enum"}
#: Keywords that a reference may not lead to: what is there is data.
_DATA = _SPOKEN | _CONSTANTS
#: Keywords whose schemas apply to the same value, and those that constrain nothing.
_SAME_VALUE = {"$ref", "allOf", "anyOf", "oneOf"}
_ASK_NOTHING = _SPOKEN | {
    "title", "description", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator", "x-guidance",
    "$defs", "definitions", "$schema", "$id", "$anchor", "$comment",
}  # fmt: skip
#: Formats that llguidance knows. By the standard, unknown ones constrain nothing.
_FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}
#: Limits of 64-bit integers (also as JavaScript writes them) and floats: such bounds name a type and constrain no value.
_FLOATS = {3.4028234663852886e38, 3.4028235e38, 1.7976931348623157e308}
_LEAST = {-(2**63), -9223372036854776000} | {-one for one in _FLOATS}
_MOST = {
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    9223372036854776000,
    18446744073709552000,
} | _FLOATS
#: Largest ``multipleOf``, in units of its last decimal place, and a larger one that is quick: others take llguidance seconds,
#: which its limits do not bound. It multiplies those of one value in 32 bits.
MOST_MULTIPLE, QUICK_MULTIPLE, MOST_OF_SEVERAL = 100_000, 1_000_000, 2**16 - 1
#: Most characters of a form's regular expressions: the cost of optional parts grows with the square of their number, and
#: llguidance joins expressions that follow each other.
MOST_OF_REGEX = 2**13
#: How far a schema is followed for a way to end: parts in all, and within each other.
MOST_STEPS, MOST_DEPTH = 20_000, 100

#: Keywords of JSON schemas. A mapping without any of them is probably no schema.
_KEYWORDS = frozenset({
    "$id", "$ref", "$schema", "$defs", "$comment", "definitions", "title", "description", "default", "examples", "nullable",
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "additionalProperties", "additionalItems",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems", "contains",
    "dependentRequired", "dependentSchemas", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf",
    "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
})  # fmt: skip


def json_schema_of(given: Any) -> Any:
    """Return a JSON schema from a mapping, JSON text or a pydantic class. Raises InvalidParameters."""
    if isinstance(given, type):
        given = _schema_of_class(given)
    schema = _parsed(given)
    if not isinstance(schema, dict):
        raise InvalidParameters(
            f"json_schema is {shown(given)}; it must be a mapping, JSON text of one, or a pydantic model's class"
        )
    if schema and _KEYWORDS.isdisjoint(schema):
        raise InvalidParameters(
            f"json_schema is {shown(schema)}, which says nothing of an answer's form: it is of the kind "
            '{"type": "object", "properties": {"total": {"type": "string"}}, "required": ["total"]}'
        )
    simplify_schema(schema)
    check_schema("json_schema", schema)
    return schema


def _schema_of_class(given: Any) -> Any:
    try:
        return given.model_json_schema()
    except Exception as error:
        said = f"json_schema is {shown(given)}, a class that gives no schema (pydantic's BaseModel does)"
        raise InvalidParameters(f"{said}: {describe(error)}") from error


def _parsed(given: Any) -> Any:
    """Return a schema's own copy, from JSON text or values."""
    try:
        return parse_json(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameters(f"json_schema is no JSON: {error}") from error


# ---- what is looked at ----


def _walk(schema: Any, begin: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield parts of a schema, all within them and all that they refer to, each with the keyword that it stands under.

    That of whole schemas is "". Values within a constant have its keyword. A reference that leads to nothing known may
    lead anywhere.
    """
    left = [("", part) for part in begin]
    seen: set[int] = set()
    while left:
        keyword, value = left.pop()
        if _is_schema(keyword, value):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if "$ref" in value:
                found = _referred(schema, value["$ref"])
                left.append(("", found if isinstance(found, Mapping) else schema))
        left += _within(keyword, value)
        yield keyword, value


def _is_schema(keyword: str, value: Any) -> bool:
    return isinstance(value, Mapping) and keyword not in _NO_SCHEMA


def _within(keyword: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values directly within a part of a schema, each with its keyword."""
    if isinstance(value, list):
        return [(keyword, one) for one in value]
    if not isinstance(value, Mapping):
        return []
    if keyword in _NO_SCHEMA:
        return [(_NO_SCHEMA[keyword], one) for one in value.values()]
    return [(key, value[key]) for key in value if key not in _SPOKEN]


def _referred(schema: Any, reference: Any) -> Any:
    """Return the schema that a reference names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if _points_to_no_schema(reference):
        return None
    found = schema
    try:
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
    except (LookupError, TypeError, ValueError):
        return None
    return found


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


# ---- what llguidance refuses although it constrains nothing ----


def simplify_schema(schema: Any) -> None:
    """Remove in place what llguidance refuses although it constrains nothing: see ``_NEEDLESS``."""
    for keyword, value in _walk(schema, [schema]):
        if _is_schema(keyword, value):
            _remove_needless(value)


def _remove_needless(schema: dict[str, Any]) -> None:
    """Remove a schema's own keywords that constrain nothing."""
    is_integer = schema.get("type") == "integer"
    for key in schema.keys() & _NEEDLESS.keys():
        value = schema[key]
        is_followed = is_integer and _is_int64(key, value)
        if _NEEDLESS[key](value) and not is_followed:
            del schema[key]


def _is_unknown_format(value: Any) -> bool:
    return isinstance(value, str) and value not in _FORMATS


def _is_least(value: Any) -> bool:
    return is_real(value) and value in _LEAST


def _is_most(value: Any) -> bool:
    return is_real(value) and value in _MOST


#: Keywords that may constrain nothing, and whether one does so by its value.
_NEEDLESS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SPOKEN, lambda value: True),
    "format": _is_unknown_format,
    "uniqueItems": lambda value: value is False,
    "minimum": _is_least,
    "exclusiveMinimum": _is_least,
    "maximum": _is_most,
    "exclusiveMaximum": _is_most,
}


def _is_int64(keyword: str, value: Any) -> bool:
    """Return whether a bound is the largest 64-bit integer, which llguidance follows."""
    return keyword == "maximum" and value == 2**63 - 1


# ---- what llguidance cannot follow ----


def check_schema(name: str, schema: Any) -> None:
    """Raise InvalidParameters for what llguidance cannot follow: it may give wrong answers, or end or hang the process."""
    regexes: list[str] = []
    multiples: list[Decimal] = []
    of_several: list[Any] = []
    for keyword, value in _walk(schema, [schema]):
        regexes += _regexes_of(keyword, value)
        multiples += _multiples_of(keyword, value)
        _check_number(name, keyword, value)
        if _is_schema(keyword, value):
            _check_reference(name, value.get("$ref"))
            if _are_several(value):
                of_several.append(value)
    check_regexes(name, regexes)
    for one in multiples:
        _check_multiple(name, one)
    _check_several(name, schema, of_several)
    if not _Ends(schema).can_end(schema, ()):
        raise InvalidParameters(
            f"{name} requires a value within itself without an end: no answer could fit it"
        )


def check_regexes(name: str, regexes: Iterable[str]) -> None:
    """Raise InvalidParameters for overlong regular expressions."""
    length = sum(map(len, set(regexes)))
    if length > MOST_OF_REGEX:
        inside = "" if name == "regex" else "regular expressions of "
        raise InvalidParameters(
            f"{name} has {inside}{length:,} characters; at most {MOST_OF_REGEX:,} are compiled"
        )


def _regexes_of(keyword: str, value: Any) -> list[str]:
    """Return the regular expressions that a keyword's value holds itself."""
    if keyword == "patternProperties" and isinstance(value, Mapping):
        return list(map(str, value))
    if keyword == "pattern" and isinstance(value, str):
        return [value]
    return []


def _check_number(name: str, keyword: str, value: Any) -> None:
    if not is_real(value) or _is_int64(keyword, value):
        return
    if abs(value) >= 2**63:
        raise InvalidParameters(
            f"{name} has {keyword} {shown(value)}; numbers below 2**63 can be followed"
        )
    if float(value) != value:
        said = "cannot be followed exactly; integers up to 2**53 can"
        raise InvalidParameters(f"{name} has {keyword} {shown(value)}, which {said}")


def _check_reference(name: str, reference: Any) -> None:
    """Raise InvalidParameters for a reference into a constant, an example or a mapping of names."""
    if isinstance(reference, str) and _points_to_no_schema(reference):
        raise InvalidParameters(
            f"{name} refers to {shown(reference)}, which is no schema but a constant, an example or a list of names"
        )


def _points_to_no_schema(reference: str) -> bool:
    is_name = False  # of a step: whether it is a name that the schema's author chose
    for step in unquote(reference.partition("#")[2]).split("/"):
        if is_name:
            is_name = False
        elif step in _DATA:
            return True
        else:
            is_name = step in _NO_SCHEMA
    return is_name


# ---- multiples ----


def _multiples_of(keyword: str, value: Any) -> list[Decimal]:
    if keyword == "multipleOf" and is_real(value) and value:
        return [Decimal(repr(value))]
    return []


def _check_multiple(name: str, one: Decimal) -> None:
    """Raise InvalidParameters for a ``multipleOf`` too slow to follow."""
    units = _in_units([one])
    if units > MOST_MULTIPLE and units != QUICK_MULTIPLE:
        said = f"{MOST_MULTIPLE:,} can be followed, counted in units of its last decimal place"
        raise InvalidParameters(f"{name} has multipleOf {one}; at most {said}")


def _check_several(name: str, schema: Any, of_several: Sequence[Any]) -> None:
    """Raise InvalidParameters for a ``multipleOf`` too large in those schemas of which several apply to one value."""
    multiples: list[Decimal] = []
    for keyword, value in _walk(schema, of_several):
        multiples += _multiples_of(keyword, value)
    if multiples and _in_units(multiples) > MOST_OF_SEVERAL:
        said = f"a least common multiple above {MOST_OF_SEVERAL:,}, counted in units of their last decimal place"
        raise InvalidParameters(
            f"{name} has numbers for multipleOf, beside $ref, allOf, anyOf or oneOf, that have {said}"
        )


def _are_several(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas may apply to one value."""
    asking = schema.keys() - _ASK_NOTHING
    if "patternProperties" in asking:
        return True
    if _SAME_VALUE.isdisjoint(asking):
        return False
    return len(asking) > 1 or len(_listed(schema.get("allOf"))) > 1


def _in_units(multiples: list[Decimal]) -> int:
    """Return the least common multiple, in units of the last decimal place."""
    places = max(0, *(-int(one.normalize().as_tuple().exponent) for one in multiples))
    return math.lcm(*(int(abs(Fraction(one)) * 10**places) for one in multiples))


# ---- whether an answer may end ----


class _Ends:
    """Looks for a finite value that may fit a schema: none does where what it requires always leads back to itself."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._left = MOST_STEPS  # parts that are looked at

    def can_end(self, part: Any, within: tuple[int, ...]) -> bool:
        """Look at a part within others, given by their ids."""
        self._left -= 1
        is_far = self._left < 0 or len(within) > MOST_DEPTH
        if is_far or not isinstance(part, Mapping):
            return True  # not looked at further
        if id(part) in within:
            return False
        within = (*within, id(part))
        return all(
            any(self.can_end(one, within) for one in either)
            for either in self._needed(part)
        )

    def _needed(self, part: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
        """Yield what every value of a part has, or fits: parts, of each of which one is enough.

        One by one: a part may need thousands, and fail at the first.
        """
        if "const" in part or "enum" in part:
            return
        yield [_referred(self._schema, part.get("$ref"))]
        yield from zip(_listed(part.get("allOf")))
        if part.get("type") == "object":
            yield from zip(_required_properties(part))
        if part.get("type") == "array":
            yield from zip(_required_items(part))
        choices = map(_listed, (part.get("anyOf"), part.get("oneOf")))
        yield from filter(None, choices)


def _required_properties(part: Mapping[str, Any]) -> Iterator[Any]:
    properties = part.get("properties")
    required = _listed(part.get("required"))
    if isinstance(properties, Mapping):
        yield from map(properties.get, map(str, required))


def _required_items(part: Mapping[str, Any]) -> Iterator[Any]:
    least = part.get("minItems", 0)
    if is_whole(least):
        first = _listed(part.get("prefixItems"))
        items = itertools.chain(first, [part.get("items")])
        yield from itertools.islice(items, max(0, min(least, MOST_STEPS)))
