"""Parsing of request bodies."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from json import JSONDecodeError
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from vlm_batch.checks import parse_json
from vlm_batch.inputs.fetch import Cancelled
from vlm_batch.inputs.pool import Pool
from vlm_batch.server.edge import ENTRY, Entry
from vlm_batch.server.errors import ApiError, bounded
from vlm_batch.server.service import Service
from vlm_batch.server.streams import finished, unless_left
from vlm_batch.server.wire import Body, field_names, member_names

#: Estimated seconds up to which the event loop parses a body itself.
SMALL = 0.002
#: Seconds to read a byte, a value and a list or object, as measured: a picture is one value, and cheap.
_OF_BYTE, _OF_VALUE, _OF_NESTED = 2.5e-9, 4e-7, 1.5e-6
#: Most parts of a field's place in a message.
MAX_DEPTH_SHOWN = 12
#: How near a known field's name must be to be named in a refusal.
NEAR = 0.8

Value = TypeVar("Value")


class Bodies:
    """Runs calls whose time grows with the body; those of dear ones take turns on one thread.

    C parsers hold the GIL, so the thread pauses for as long as each call took, and the event loop runs.
    """

    def __init__(self) -> None:
        self._worker = Pool(1, "vlm-batch-bodies", rests=True)

    async def read(
        self, entry: Entry, call: Callable[..., Value], *given: Any
    ) -> Value:
        """Return ``call(*given)``, which reads the body of ``entry``."""
        cost = cost_of(entry.num_bytes, entry.num_values, entry.num_nested)
        if cost <= SMALL:
            return call(*given)
        cancelled = Cancelled()
        reading: Future[Value] = self._worker.submit(
            partial(call, *given), cancelled, client=entry.number, cost=cost
        )
        try:
            return await finished(reading)
        finally:
            cancelled.set()  # one that has not begun does not, if its client leaves

    def close(self) -> None:
        self._worker.close()


def cost_of(num_bytes: int, num_values: int, num_nested: int) -> float:
    """Return about how many seconds it takes to parse a body."""
    return num_bytes * _OF_BYTE + num_values * _OF_VALUE + num_nested * _OF_NESTED


class BodyRoute(APIRoute):
    """A route whose body ``state.bodies`` parses and checks."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_read(request: Request) -> Response:
            answer: Response = await handle(_Read(request.scope, request.receive))
            return answer

        return handle_read


class _Read(Request):
    async def json(self) -> Any:
        body = await self.body()
        bodies: Bodies = self.app.state.bodies
        entry: Entry = self.scope[ENTRY]
        entry.sent = body
        service: Service = self.app.state.service
        # Whoever must wait for a place or is sent away is told before the body is parsed.
        entry.visit = await unless_left(self, service.admit(entry.number))
        entry.at_end = partial(service.dismiss, entry.visit)
        door = self.app.state.doors.at(entry.path)
        return await bodies.read(entry, read_body, body, door.body)


def read_body(data: bytes, kind: type[Body]) -> Body:
    try:
        body = parse_json(data)
    except ValueError as error:
        raise _no_json(data, error) from error
    return check_body(body, kind)


def check_body(body: Any, kind: type[Body]) -> Body:
    """Return JSON as a door's body. Raises ApiError."""
    with _not_too_deep():
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            wrong = _wrong(error, body, kind)
    del body  # freed here, not with the error on the event loop
    raise wrong


@contextmanager
def _not_too_deep() -> Iterator[None]:
    """Raise ApiError for a body that Python has no stack for."""
    try:
        yield
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error


def _no_json(data: bytes, error: ValueError) -> ApiError:
    wrong, param = "the body is not JSON", None
    if not isinstance(error, (JSONDecodeError, UnicodeDecodeError)):  # Python reads it
        with suppress(ValueError, RecursionError):
            param = _place_of_infinity(json.loads(data))
        wrong = f"{param or 'the body'}: {str(error).partition(';')[0]}"
    return ApiError(400, wrong, param=param, code="json_invalid")


def _place_of_infinity(body: Any) -> str | None:
    left: list[tuple[tuple[int | str, ...], Any]] = [((), body)]
    while left:
        parts, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return _written(parts)[:200]
        left += [((*parts, part), inner) for part, inner in _items(value)]
    return None


def _items(value: Any) -> Iterable[tuple[int | str, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _wrong(error: ValidationError, body: Any, kind: type[Body]) -> ApiError:
    """Return a body's first error, placed in the client's terms."""
    found = error.errors(include_url=False)
    misspelt = _misspelt(found)
    # of a value's forms, the nearest
    first = max(found, key=lambda one: len(one["loc"]))
    first = next(iter(misspelt.values()), first)
    where = _place(first["loc"], body, is_missing=first["type"] == "missing")
    param = where[:200] or None
    if first["type"] == "extra_forbidden":
        message = _of_unknown(first["loc"], kind, next(iter(misspelt), None))
    else:
        message = _in_words(first)
    said = bounded(f"{param or 'the body'}: {message}")
    return ApiError(400, said, param=param, code=first["type"])


def _misspelt(found: Sequence[ErrorDetails]) -> dict[str, ErrorDetails]:
    """Return the names of missing fields -> errors of unknown ones beside them that are spelled nearly so."""
    lacking = {}
    for one in found:
        if one["type"] == "missing":
            lacking[str(one["loc"][-1])] = one["loc"][:-1]
    misspelt = {}
    for one in found:
        if one["type"] != "extra_forbidden":
            continue
        near = difflib.get_close_matches(str(one["loc"][-1]), lacking, 1)
        if near and lacking[near[0]] == one["loc"][:-1]:
            misspelt[near[0]] = one
    return misspelt


def _of_unknown(
    parts: tuple[int | str, ...], kind: type[Body], meant: str | None
) -> str:
    """Say why a field is not taken."""
    name = str(parts[-1])
    if name in kind.refused:
        return f"{name} is not supported: {kind.refused[name]}"
    taken = kind.nothing.get(name) if len(parts) == 1 else None
    if isinstance(taken, tuple):
        values = " or ".join([*map(json.dumps, taken), "null"])
        return f"it has no effect here, so it may only be {values}"
    if meant is None:
        others = sorted(field_names() - {name})
        near = difflib.get_close_matches(name, others, 1, NEAR)
        meant = next(iter(near), None)
    probably = "" if meant is None else f" ({meant} is probably meant)"
    return f"there is no field {name}{probably}"


def _in_words(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "union_tag_invalid":
        given = error["ctx"]
        what = f"{given['discriminator']} is {given['tag'][:100]!r}"
        return f"{what}; it must be one of {given['expected_tags']}"
    if kind in ("model_type", "dict_type"):
        return "an object with fields is expected"
    if kind == "too_short" and error["ctx"]["actual_length"] == 0:
        return "it is empty"
    return str(error["msg"])


def _place(parts: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """Return the place of pydantic's ``parts`` in a body."""
    keys = _keys(parts, body)
    return _written([*keys, *parts[-1:]] if is_missing else keys)


def _written(keys: Sequence[int | str]) -> str:
    """Return a place like ``messages[0].content``."""
    found = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys]
    if len(found) > MAX_DEPTH_SHOWN:
        found = [*found[: MAX_DEPTH_SHOWN - 1], "..."]
    return "".join(found).lstrip(".")


def _keys(parts: tuple[int | str, ...], body: Any) -> list[int | str]:
    """Return those of pydantic's ``parts`` that are keys of the body; others name types and members of unions.

    A member of a union is named by its own ``type`` or ``role``, before the keys in it, and some are spelled like one.
    """
    found: list[int | str] = []
    named = None  # the object whose name was met last
    for part in parts:
        if body is not named and _is_name_of(part, body):
            named = body
        elif _has(body, part):
            found.append(part)
            body = body[part]
    return found


def _is_name_of(part: int | str, value: Any) -> bool:
    if not isinstance(value, dict) or part not in member_names():
        return False
    return part in (value.get("type"), value.get("role"))


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)
