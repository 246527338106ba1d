"""Checks of users' values, which return Python's own types or raise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, NoReturn
from urllib.parse import unquote

from vlm_batch.errors import InvalidImage, InvalidParameters, describe, shown

#: Largest 32-bit integer of MLX.
MOST = 2**31 - 1
#: Keywords of a JSON schema that are annotations, those with constants, and those that map names to schemas.
_SPOKEN, _CONSTANTS = {"default", "example", "examples"}, {"const", "enum"}
_OF_NAMES = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
}
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
#: Packages whose tables are known.
_TABLES = {"pandas", "polars", "pyarrow", "datasets"}


def is_table(value: Any) -> bool:
    """Return whether a value is another library's table, which may look like a list."""
    kind = type(value)
    is_one = kind.__name__.endswith(
        ("Frame", "Table", "Dataset", "DatasetDict", "Batch", "BatchReader")
    )
    return is_one and kind.__module__.partition(".")[0] in _TABLES


def set_pixel_bounds(holder: Any, least: Any, most: Any) -> None:
    """Check and set both pixel bounds. Raises InvalidImage."""
    for name, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and not (is_whole(value) and 1 <= value <= MOST):
            raise InvalidImage(
                f"{name} is {shown(value)}; it must be an integer of at least 1, or None"
            )
        object.__setattr__(holder, name, None if value is None else int(value))
    if least is not None and most is not None and least > most:
        raise InvalidImage(f"min_pixels is {least}, above max_pixels, which is {most}")


def whole_option(name: str, value: Any, *, least: int, or_none: bool = False) -> Any:
    """Return an integer option. Raises ValueError."""
    if value is None and or_none:
        return None
    if not (is_whole(value) and value >= least):
        raise ValueError(
            f"{name} is {shown(value)}; it must be an integer of at least {least}{' or None' * or_none}"
        )
    return int(value)


def seconds_option(name: str, value: Any) -> float:
    """Return a finite option above 0. Raises ValueError."""
    if not (is_real(value) and value > 0):
        raise ValueError(
            f"{name} is {shown(value)}; it must be a finite number of seconds above 0"
        )
    return float(value)


def non_empty_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one or more texts as a tuple. Raises InvalidParameters."""
    texts = (value,) if isinstance(value, str) else as_tuple(name, value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameters(f"{name} is {shown(value)}; it must be non-empty texts")
    return texts


def check_unicode(name: str, texts: Iterable[str]) -> None:
    """Raise InvalidParameters for lone surrogates, which UTF-8 lacks."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            said = f"{name} holds half of a surrogate pair, which is no Unicode text: {shown(text)}"
            raise InvalidParameters(said) from error


def check_within(name: str, ids: Iterable[int], size: int) -> None:
    """Raise InvalidParameters for the first id that is none of the model's ``size`` tokens."""
    for token in ids:
        if token >= size:
            raise InvalidParameters(
                f"{name} holds {token}; this model has {size:,} tokens"
            )


def json_schema_of(given: Any) -> Any:
    """Return a JSON schema from a mapping, JSON text or a pydantic class. Raises InvalidParameters."""
    if isinstance(given, type):
        try:
            given = given.model_json_schema()  # type: ignore[attr-defined]
        except Exception as error:
            said = f"json_schema is {shown(given)}, a class that gives no schema (pydantic's BaseModel does)"
            raise InvalidParameters(f"{said}: {describe(error)}") from error
    try:
        schema = parse_json(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameters(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidParameters(
            f"json_schema is {shown(given)}; it must be a mapping, JSON text of one, or a pydantic model's class"
        )
    if schema and not _KEYWORDS & schema.keys():
        raise InvalidParameters(
            f"json_schema is {shown(schema)}, which says nothing of an answer's form: it is of the kind "
            '{"type": "object", "properties": {"total": {"type": "string"}}, "required": ["total"]}'
        )
    simplify_schema(schema)
    check_schema("json_schema", schema)
    return schema


def parse_json(text: str | bytes) -> Any:
    """Parse standard JSON. Raises ValueError, also for NaN, Infinity and 1e400."""

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    def number(digits: str) -> float:
        found = float(digits)
        if math.isinf(found):
            raise ValueError(
                f"{shown(digits)} is larger than any number that can be held"
            )
        return found

    return json.loads(text, parse_constant=constant, parse_float=number)


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
        if isinstance(value, dict) and keyword not in _CONSTANTS | _OF_NAMES:
            is_integer = value.get("type") == "integer"
            for key, one in list(value.items()):
                is_type = is_real(one) and (
                    (key in _LOWER and one in _LEAST)
                    or (key in _UPPER and one in _MOST)
                )
                is_format = (
                    key == "format" and isinstance(one, str) and one not in _FORMATS
                )
                asks_nothing = (
                    is_format
                    or key in _SPOKEN
                    or (key == "uniqueItems" and one is False)
                )
                if asks_nothing or (
                    is_type and not (is_integer and _is_int64(key, one))
                ):
                    del value[key]


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
        if isinstance(value, Mapping) and keyword == "patternProperties":
            regexes += map(str, value)
        elif isinstance(value, str) and keyword == "pattern":
            regexes.append(value)
        elif _is_int64(keyword, value):
            continue
        elif is_real(value) and abs(value) >= 2**63:
            raise InvalidParameters(
                f"{name} has {keyword} {shown(value)}; numbers below 2**63 can be followed"
            )
        elif is_real(value) and float(value) != value:
            said = "cannot be followed exactly; integers up to 2**53 can"
            raise InvalidParameters(
                f"{name} has {keyword} {shown(value)}, which {said}"
            )
    check_regexes(name, regexes)
    _check_multiples(name, schema, is_odd)
    if not _has_an_end(schema):
        raise InvalidParameters(
            f"{name} requires a value within itself without an end: no answer could fit it"
        )


def _is_int64(keyword: str, value: Any) -> bool:
    """Return whether a bound is the largest 64-bit integer, which llguidance follows."""
    return keyword == "maximum" and value == 2**63 - 1


def _parts(keyword: str, value: Any, is_odd: bool = False) -> list[tuple[str, Any]]:
    """Return the values within a schema's ``value``, each with its keyword.

    Values within a constant have its keyword, named ones "". Only odd schemas keep annotations.
    """
    if isinstance(value, list):
        return [(keyword, one) for one in value]
    if not isinstance(value, Mapping):
        return []
    if keyword in _CONSTANTS:
        return [(keyword, one) for one in value.values()]
    if is_odd:
        return list(value.items())
    if keyword in _OF_NAMES:
        return [("", one) for one in value.values()]
    return [(key, one) for key, one in value.items() if key not in _SPOKEN]


def _is_odd(schema: Any) -> bool:
    """Return whether a schema refers to a constant, an example or a mapping of names."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, Mapping):
            left += value.values()
            if isinstance(ref := value.get("$ref"), str) and _points_to_no_schema(ref):
                return True
    return False


def _points_to_no_schema(ref: str) -> bool:
    is_name = False
    for step in unquote(ref.partition("#")[2]).split("/"):
        if not is_name and step in _SPOKEN | _CONSTANTS:
            return True
        is_name = not is_name and step in _OF_NAMES
    return is_name


def _check_multiples(name: str, schema: Any, is_odd: bool) -> None:
    """Raise InvalidParameters for a ``multipleOf`` too slow to follow."""
    alone, several = list[Decimal](), list[Decimal]()
    seen: set[tuple[int, str, bool]] = set()
    left = [("", schema, is_odd)]
    while left:
        keyword, value, is_several = left.pop()
        if keyword == "multipleOf" and is_real(value) and value:
            (several if is_several else alone).append(Decimal(repr(value)))
        if isinstance(value, Mapping) and keyword not in _CONSTANTS | _OF_NAMES:
            if (id(value), keyword, is_several) in seen:
                continue
            seen.add((id(value), keyword, is_several))
            is_several = is_several or _are_several(value)
            if isinstance(ref := value.get("$ref"), str):
                found = _referred(schema, ref)
                is_known = isinstance(found, Mapping)
                left.append(
                    ("", found if is_known else schema, is_several or not is_known)
                )
        left += [(key, one, is_several) for key, one in _parts(keyword, value, is_odd)]
    for one in alone:
        if (units := _in_units([one])) > MOST_MULTIPLE and units != QUICK_MULTIPLE:
            said = f"{MOST_MULTIPLE:,} can be followed, counted in units of its last decimal place"
            raise InvalidParameters(f"{name} has multipleOf {one}; at most {said}")
    if several and _in_units(several) > MOST_OF_SEVERAL:
        said = f"a least common multiple above {MOST_OF_SEVERAL:,}, counted in units of their last decimal place"
        raise InvalidParameters(
            f"{name} has numbers for multipleOf, beside $ref, allOf, anyOf or oneOf, that have {said}"
        )


def _has_an_end(schema: Any) -> bool:
    """Return whether a finite value may fit a schema: False where what it requires always leads back to itself."""
    left = MOST_STEPS

    def ends(part: Any, within: tuple[int, ...]) -> bool:
        nonlocal left
        left -= 1
        if left < 0 or len(within) > MOST_DEPTH or not isinstance(part, Mapping):
            return True  # not looked at further
        if id(part) in within:
            return False
        within = (*within, id(part))
        if "enum" in part or "const" in part:
            return True
        needed: list[Any] = list(_listed(part.get("allOf")))
        if isinstance(ref := part.get("$ref"), str):
            needed.append(_referred(schema, ref))
        properties = part.get("properties")
        if part.get("type") == "object" and isinstance(properties, Mapping):
            needed += [
                properties.get(name)
                for name in _listed(part.get("required"))
                if isinstance(name, str)
            ]
        if part.get("type") == "array" and is_whole(least := part.get("minItems", 0)):
            first = _listed(part.get("prefixItems"))
            needed += (
                [*first, part.get("items")][: max(0, least)]
                if least <= len(first)
                else [*first, part.get("items")]
            )
        if not all(ends(one, within) for one in needed):
            return False
        choices = [_listed(part.get(word)) for word in ("anyOf", "oneOf")]
        return all(
            any(ends(one, within) for one in several) for several in choices if several
        )

    return ends(schema, ())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _are_several(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas may apply to one value."""
    asking = schema.keys() - _ASK_NOTHING
    several = schema.get("allOf")
    is_one = len(asking) == 1 and not (isinstance(several, list) and len(several) > 1)
    return "patternProperties" in asking or bool(asking & _SAME_VALUE and not is_one)


def _in_units(multiples: list[Decimal]) -> int:
    """Return the least common multiple, in units of the last decimal place."""
    places = max(0, *(-int(one.normalize().as_tuple().exponent) for one in multiples))
    return math.lcm(*(int(abs(Fraction(one)) * 10**places) for one in multiples))


def _referred(schema: Any, ref: str) -> Any:
    """Return the part that a reference names, or None."""
    if not ref.startswith("#"):
        return None
    for step in unquote(ref[1:]).split("/")[1:] if ref != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if (
            isinstance(schema, list)
            and step.isdecimal()
            and len(step) < 8
            and int(step) < len(schema)
        ):
            schema = schema[int(step)]
        elif isinstance(schema, Mapping):
            schema = schema.get(step)
        else:
            return None
    return schema


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, empty for None. Raises InvalidParameters."""
    try:
        if isinstance(value, Mapping):
            raise TypeError
        return () if value is None else tuple(value)
    except TypeError:
        raise InvalidParameters(
            f"{name} is {shown(value)}; it must be a sequence, or None for none"
        ) from None


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number of Python or numpy."""
    try:
        return (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    except OverflowError:  # an integer beyond what a float holds
        return False
