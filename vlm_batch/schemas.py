"""JSON schemas of answers: what is read of them, and what llguidance cannot follow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from vlm_batch.checks import is_real, is_whole, parse_json
from vlm_batch.errors import InvalidParameters, describe, shown

#: Keywords of a JSON schema that are annotations, those with constants, and those that map names to schemas.
_SPOKEN, _CONSTANTS = {"default", "example", "examples"}, {"const", "enum"}
_OF_NAMES = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
}
#: Keywords whose mappings are no schemas themselves.
_NO_SCHEMA = _CONSTANTS | _OF_NAMES
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
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
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
#: An index of a list, as references spell it.
_INDEX = re.compile(r"\d{1,7}")
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
        # the latter of values that are nested too deeply to be written
        raise InvalidParameters(f"json_schema is no JSON: {error}") from error


def check_regexes(name: str, regexes: Iterable[str]) -> None:
    """Raise InvalidParameters for overlong regular expressions."""
    length = sum(map(len, set(regexes)))
    if length > MOST_OF_REGEX:
        inside = "" if name == "regex" else "regular expressions of "
        raise InvalidParameters(
            f"{name} has {inside}{length:,} characters; at most {MOST_OF_REGEX:,} are compiled"
        )


def simplify_schema(schema: Any) -> None:
    """Remove in place what llguidance refuses although it constrains nothing.

    These are unknown formats, ``uniqueItems: false``, limits of number types, defaults and examples. A schema with a
    reference into a constant, an example or a mapping of names is left as it is.
    """
    if _is_odd(schema):
        return
    left = [("", schema)]
    while left:
        keyword, value = left.pop()
        left += _parts(keyword, value)
        if keyword in _NO_SCHEMA or not isinstance(value, dict):
            continue
        _remove_needless(value)


def _remove_needless(schema: dict[str, Any]) -> None:
    """Remove a schema's own keywords that constrain nothing."""
    is_integer = schema.get("type") == "integer"
    for key, value in list(schema.items()):
        is_followed = is_integer and _is_int64(key, value)
        is_needless = _is_limit_of_type(key, value) or _asks_nothing(key, value)
        if is_needless and not is_followed:
            del schema[key]


def _is_limit_of_type(key: str, value: Any) -> bool:
    """Return whether a bound is the least or largest number of a type."""
    if not is_real(value):
        return False
    if key in _LOWER:
        return value in _LEAST
    return key in _UPPER and value in _MOST


def _asks_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    if key == "uniqueItems":
        return value is False
    return key in _SPOKEN


def check_schema(name: str, schema: Any) -> None:
    """Raise InvalidParameters for what llguidance cannot follow: long regular expressions, large or inexact numbers,
    slow multiples.

    These may give wrong answers, or end or hang the process.
    """
    regexes: list[str] = []
    is_odd = _is_odd(schema)
    left = [("", schema)]
    while left:
        keyword, value = left.pop()
        left += _parts(keyword, value, is_odd)
        regexes += _regexes_of(keyword, value)
        if is_real(value):
            _check_number(name, keyword, value)
    check_regexes(name, regexes)
    _check_multiples(name, schema, is_odd)
    if not _Ends(schema).can_end(schema, ()):
        raise InvalidParameters(
            f"{name} requires a value within itself without an end: no answer could fit it"
        )


def _regexes_of(keyword: str, value: Any) -> list[str]:
    """Return the regular expressions that a keyword's value holds itself."""
    if keyword == "patternProperties" and isinstance(value, Mapping):
        return list(map(str, value))
    if keyword == "pattern" and isinstance(value, str):
        return [value]
    return []


def _check_number(name: str, keyword: str, value: Any) -> None:
    if _is_int64(keyword, value):
        return
    if abs(value) >= 2**63:
        raise InvalidParameters(
            f"{name} has {keyword} {shown(value)}; numbers below 2**63 can be followed"
        )
    if float(value) != value:
        said = "cannot be followed exactly; integers up to 2**53 can"
        raise InvalidParameters(f"{name} has {keyword} {shown(value)}, which {said}")


def _is_int64(keyword: str, value: Any) -> bool:
    """Return whether a bound is the largest 64-bit integer, which llguidance follows."""
    return keyword == "maximum" and value == 2**63 - 1


def _parts(keyword: str, value: Any, is_odd: bool = False) -> list[tuple[str, Any]]:
    """Return the values within a schema's ``value``, each with its keyword.

    Values within a constant have its keyword, named ones "". Only odd schemas keep annotations.
    """
    if isinstance(value, list):
        return _each_of(keyword, value)
    if not isinstance(value, Mapping):
        return []
    if keyword in _CONSTANTS:
        return _each_of(keyword, value.values())
    if is_odd:
        return list(value.items())
    if keyword in _OF_NAMES:
        return _each_of("", value.values())
    spoken = _SPOKEN & value.keys()
    return [(key, value[key]) for key in value if key not in spoken]


def _each_of(keyword: str, values: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(keyword, value) for value in values]


def _is_odd(schema: Any) -> bool:
    """Return whether a schema refers to a constant, an example or a mapping of names."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, Mapping):
            continue
        left += value.values()
        reference = value.get("$ref")
        if isinstance(reference, str) and _points_to_no_schema(reference):
            return True
    return False


def _points_to_no_schema(ref: str) -> bool:
    is_name = False  # of a step: whether it is a name that the schema's author chose
    for step in unquote(ref.partition("#")[2]).split("/"):
        if is_name:
            is_name = False
        elif step in _SPOKEN | _CONSTANTS:
            return True
        else:
            is_name = step in _OF_NAMES
    return is_name


def _check_multiples(name: str, schema: Any, is_odd: bool) -> None:
    """Raise InvalidParameters for a ``multipleOf`` too slow to follow."""
    alone, several = _multiples(schema, is_odd)
    for one in alone:
        units = _in_units([one])
        if units > MOST_MULTIPLE and units != QUICK_MULTIPLE:
            said = f"{MOST_MULTIPLE:,} can be followed, counted in units of its last decimal place"
            raise InvalidParameters(f"{name} has multipleOf {one}; at most {said}")
    if several and _in_units(several) > MOST_OF_SEVERAL:
        said = f"a least common multiple above {MOST_OF_SEVERAL:,}, counted in units of their last decimal place"
        raise InvalidParameters(
            f"{name} has numbers for multipleOf, beside $ref, allOf, anyOf or oneOf, that have {said}"
        )


def _multiples(schema: Any, is_odd: bool) -> tuple[list[Decimal], list[Decimal]]:
    """Return the values of ``multipleOf``: of schemas that apply alone, and of those that apply beside others."""
    alone: list[Decimal] = []
    several: list[Decimal] = []
    seen: set[tuple[int, str, bool]] = set()
    left = [("", schema, is_odd)]
    while left:
        keyword, value, is_several = left.pop()
        if keyword == "multipleOf" and is_real(value) and value:
            found = several if is_several else alone
            found.append(Decimal(repr(value)))
        if isinstance(value, Mapping) and keyword not in _NO_SCHEMA:
            one = (id(value), keyword, is_several)
            if one in seen:
                continue
            seen.add(one)
            is_several = is_several or _are_several(value)
            left += _behind_reference(schema, value, is_several)
        for key, part in _parts(keyword, value, is_odd):
            left.append((key, part, is_several))
    return alone, several


def _behind_reference(
    schema: Any, part: Mapping[str, Any], is_several: bool
) -> list[tuple[str, Any, bool]]:
    """Return what a part's reference names; the whole schema if that cannot be found."""
    reference = part.get("$ref")
    if not isinstance(reference, str):
        return []
    found = _referred(schema, reference)
    if isinstance(found, Mapping):
        return [("", found, is_several)]
    return [("", schema, True)]


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
        if not _CONSTANTS.isdisjoint(part):
            return True
        within = (*within, id(part))
        for needed in self._needed(part):
            if not self.can_end(needed, within):
                return False
        of_any = self._has_choice(part, "anyOf", within)
        return of_any and self._has_choice(part, "oneOf", within)

    def _has_choice(
        self, part: Mapping[str, Any], word: str, within: tuple[int, ...]
    ) -> bool:
        choices = _listed(part.get(word))
        if not choices:
            return True
        return any(self.can_end(choice, within) for choice in choices)

    def _needed(self, part: Mapping[str, Any]) -> list[Any]:
        """Return the parts that every value of a part has, or fits."""
        needed = list(_listed(part.get("allOf")))
        reference = part.get("$ref")
        if isinstance(reference, str):
            needed.append(_referred(self._schema, reference))
        if part.get("type") == "object":
            needed += _required_properties(part)
        if part.get("type") == "array":
            needed += _required_items(part)
        return needed


def _required_properties(part: Mapping[str, Any]) -> list[Any]:
    properties = part.get("properties")
    if not isinstance(properties, Mapping):
        return []
    required = _listed(part.get("required"))
    return [properties.get(name) for name in required if isinstance(name, str)]


def _required_items(part: Mapping[str, Any]) -> list[Any]:
    least = part.get("minItems", 0)
    if not is_whole(least):
        return []
    first = _listed(part.get("prefixItems"))
    items = [*first, part.get("items")]
    if least <= len(first):
        return items[: max(0, least)]
    return items


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


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


def _referred(schema: Any, ref: str) -> Any:
    """Return the part that a reference names, or None."""
    if not ref.startswith("#"):
        return None
    found = schema
    for step in unquote(ref[1:]).split("/")[1:]:
        found = _step_into(found, step.replace("~1", "/").replace("~0", "~"))
    return found


def _step_into(part: Any, step: str) -> Any:
    """Return an entry of a schema's mapping or list, or None."""
    if isinstance(part, Mapping):
        return part.get(step)
    if not isinstance(part, list) or not _INDEX.fullmatch(step):
        return None
    found = part[int(step) : int(step) + 1]
    return found[0] if found else None
