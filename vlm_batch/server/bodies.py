"""Parsing of request bodies."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from json import JSONDecodeError
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from vlm_batch.checks import parse_json
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.inputs.pool import Pool
from vlm_batch.server.edge import ENTRY, Entry
from vlm_batch.server.errors import ApiError, bounded
from vlm_batch.server.openai import REFUSED
from vlm_batch.server.service import Service
from vlm_batch.server.streams import unless_left
from vlm_batch.server.wire import (
    UNIONS,
    ChatRequest,
    Common,
    CompletionRequest,
    field_names,
)

#: Estimated seconds up to which the event loop parses a body itself.
SMALL = 0.002
#: Seconds to read a byte, a value and a list or object, as measured: a picture is one value, and cheap.
_OF_BYTE, _OF_VALUE, _OF_NESTED = 2.5e-9, 4e-7, 1.5e-6
#: Most parts of a field's place in a message.
MAX_DEPTH_SHOWN = 12
KINDS: Mapping[str, type[Common]] = {
    "/chat/completions": ChatRequest,
    "/completions": CompletionRequest,
}

Value = TypeVar("Value")


#: How near a known field's name must be to be named in a refusal.
NEAR = 0.8
_KNOWN = sorted(field_names())


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
            return await asyncio.shield(asyncio.wrap_future(reading))
        except OperationCancelled:  # the server stops
            raise asyncio.CancelledError from None
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
        return await bodies.read(
            entry, read_body, body, KINDS[entry.path.removeprefix("/v1")]
        )


def read_body(data: bytes, kind: type[Common]) -> Common:
    try:
        body = parse_json(data)
        return kind.model_validate(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValidationError as error:
        wrong = _wrong(error, body, kind)
    except ValueError as error:
        raise _no_json(data, error) from error
    del body  # freed here, not with the error on the event loop
    raise wrong


def _no_json(data: bytes, error: ValueError) -> ApiError:
    wrong, param = "the body is not JSON", None
    if not isinstance(error, (JSONDecodeError, UnicodeDecodeError)):  # Python reads it
        with suppress(ValueError, RecursionError):
            param = _place_of_infinity(json.loads(data))
        wrong = f"{param or wrong}: {str(error).partition(';')[0]}"
    return ApiError(400, wrong, param=param, code="json_invalid")


def _place_of_infinity(body: Any) -> str | None:
    left: list[tuple[tuple[int | str, ...], Any]] = [((), body)]
    while left:
        parts, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return _written(parts)[:200]
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left += [((*parts, part), inner) for part, inner in items]
    return None


def _wrong(error: ValidationError, body: Any, kind: type[Common]) -> ApiError:
    """Return a body's first error, placed in the client's terms."""
    found = error.errors(include_url=False)
    # of a value's forms, the nearest
    first = max(found, key=lambda one: len(one["loc"]))
    lacking = {
        str(one["loc"][-1]): one["loc"][:-1]
        for one in found
        if one["type"] == "missing"
    }
    misspelt = {
        meant: one
        for one in found
        if one["type"] == "extra_forbidden"
        for meant in difflib.get_close_matches(str(one["loc"][-1]), lacking, 1)
        if lacking[meant] == one["loc"][:-1]
    }
    first = next(iter(misspelt.values()), first)
    where = _place(first["loc"], body, is_missing=first["type"] == "missing")
    name = str(first["loc"][-1]) if first["loc"] else ""
    message = str(first["msg"])
    param = where[:200] or None
    if first["type"] == "extra_forbidden":
        near = [*misspelt, *difflib.get_close_matches(name, _KNOWN, 1, NEAR)]
        unknown = f"there is no field {name}" + "".join(
            f" ({meant} is probably meant)" for meant in near[:1]
        )
        message = (
            f"{name} is not supported: {REFUSED[name]}" if name in REFUSED else unknown
        )
        if (
            name not in REFUSED
            and len(first["loc"]) == 1
            and isinstance(taken := kind.nothing.get(name), tuple)
        ):
            values = " or ".join([*map(json.dumps, taken), "null"])
            message = f"it has no effect here, so it may only be {values}"
    elif first["type"] == "union_tag_invalid":
        given = first["ctx"]
        message = f"{given['discriminator']} is {given['tag'][:100]!r}; it must be one of {given['expected_tags']}"
    elif first["type"] in ("model_type", "dict_type"):
        message = "an object with fields is expected"
    elif first["type"] == "too_short" and first["ctx"]["actual_length"] == 0:
        message = "it is empty"
    return ApiError(
        400,
        bounded(f"{param or 'the body'}: {message}"),
        param=param,
        code=first["type"],
    )


def _place(parts: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """Return the place of pydantic's ``parts`` in a body."""
    return _written(
        [*_keys(parts, body), *parts[-1:]] if is_missing else _keys(parts, body)
    )


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
        is_name = (
            part in UNIONS
            and isinstance(body, dict)
            and part in (body.get("type"), body.get("role"))
        )
        if is_name and body is not named:
            named = body
        elif _has(body, part):
            found.append(part)
            body = body[part]
    return found


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)
