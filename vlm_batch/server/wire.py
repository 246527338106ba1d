"""Request bodies: the rule of fields, and what the bodies of all doors are made of.

The rule of fields: what changes an answer is honoured, or refused by name. What asks for nothing, or is a client's own
bookkeeping, is accepted at every depth: each object's table ``nothing`` says which values these are. A field that nobody
knows is refused, with the nearest name.

Pydantic makes an error of each wrong value while the event loop waits. So a list ends at its first wrong item, and an
object with too many names is refused unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

#: Limits on one request's contents.
MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_METADATA = 16
#: Most names of an object with known names.
MAX_FIELDS = 128
#: Most values of a free JSON object: template arguments, a document, a tool's parameters.
MAX_JSON = 16_384


class _Any:
    """Stands for every value, in tables of what asks for nothing: a client's own bookkeeping."""

    def __contains__(self, value: object) -> bool:
        return True


ANY = _Any()
Nothing: TypeAlias = Mapping[str, "tuple[Any, ...] | _Any"]

Number: TypeAlias = StrictFloat | StrictInt
Item = TypeVar("Item")


def at_most(most: int) -> Callable[[Any], Any]:
    """Return a check that an object has no more than ``most`` names."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long",
                "the object has {size} names; at most {most} are taken",
                {"size": len(value), "most": most},
            )
        return value

    return check


def _is_small(value: Any) -> Any:
    """Refuse a value that holds more than ``MAX_JSON`` others."""
    num_values = 0
    left = [value]
    while left:
        one = left.pop()
        num_values += 1
        if num_values + len(left) > MAX_JSON:
            said = "it holds more than {most} values"
            raise PydanticCustomError("too_long", said, {"most": MAX_JSON})
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return value


#: An object with any names.
Json: TypeAlias = Annotated[dict[str, JsonValue], BeforeValidator(_is_small)]
#: A list that ends at its first wrong item.
Many: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
#: A list of a message's parts, or of what else has a bound.
Parts: TypeAlias = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_PARTS)]
Tools: TypeAlias = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_TOOLS)]
Turns: TypeAlias = Annotated[
    list[Item], Field(min_length=1, fail_fast=True, max_length=MAX_MESSAGES)
]
Stops: TypeAlias = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
#: A client's own facts about a request, which are not kept.
Metadata: TypeAlias = Annotated[dict[str, str], BeforeValidator(at_most(MAX_METADATA))]


class Wire(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)
    #: Fields that are not served -> values beside null that ask for nothing.
    nothing: ClassVar[Nothing] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Drop fields that ask for nothing; refuse an object of too many."""
        value = at_most(MAX_FIELDS)(value)
        if not isinstance(value, dict) or cls.nothing.keys().isdisjoint(value):
            return value
        return {
            name: given
            for name, given in value.items()
            if not _is_nothing(cls.nothing.get(name), given)
        }


def _is_nothing(values: tuple[Any, ...] | _Any | None, given: Any) -> bool:
    """Return whether a field asks for nothing; JSON's true is not 1."""
    if values is None:
        return False
    if isinstance(values, _Any) or given is None:
        return True
    is_flag = isinstance(given, bool)
    return any(given == one and is_flag == isinstance(one, bool) for one in values)


class Member(Wire):
    """One of the objects that may stand in a place, told apart by its ``type`` or ``role``."""


class Body(Wire):
    """The body of a door's request."""

    #: Fields of the door's that are refused -> why.
    refused: ClassVar[Mapping[str, str]] = {}
    model: str | None = None
    stream: bool | None = None


def _kinds() -> Iterator[type[Wire]]:
    left: list[type[Wire]] = [Wire]
    while left:
        kind = left.pop()
        yield kind
        left += kind.__subclasses__()


@cache
def field_names() -> frozenset[str]:
    """Return the names of all fields, at every depth; called once all doors are there."""
    found: set[str] = set()
    for kind in _kinds():
        if issubclass(kind, Body):
            found |= kind.nothing.keys()
        found |= {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(found)


@cache
def member_names() -> frozenset[str]:
    """Return the types and roles of members; pydantic's places of errors have them beside keys."""
    found: set[str] = set()
    for kind in _kinds():
        fields = kind.model_fields.keys() & {"type", "role"}
        for name in fields if issubclass(kind, Member) else ():
            found |= set(get_args(kind.model_fields[name].annotation))
    return frozenset(found)
