"""Doors: the APIs by which requests come in. Each is one file of ``doors``; what they share is here and in ``exchange``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vlm_batch.server.bodies import Bodies
from vlm_batch.server.edge import ENTRY, Entry
from vlm_batch.server.errors import ApiError, Envelope, openai_envelope
from vlm_batch.server.kept import KeptResponses
from vlm_batch.server.media import MediaReader
from vlm_batch.server.service import Service
from vlm_batch.server.stored import FileStore
from vlm_batch.server.wire import Body

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class Core:
    """The common part of all doors: the model and its queue, the reading of bodies, that of media, what is kept, and files.

    Attributes:
        keeps: Whether responses are kept; those before them are found either way.
    """

    service: Service
    bodies: Bodies
    media: MediaReader
    kept: KeptResponses = field(default_factory=KeptResponses)
    keeps: bool = True
    files: FileStore | None = None

    def stored(self, owner: str, file_id: str) -> bytes:
        """Return the content of an owner's file. Raises ApiError."""
        if self.files is None:
            said = "this server keeps no files (vlm-batch serve --files FOLDER)"
            raise ApiError(400, said, param="messages", code="file")
        return self.files.read(file_id, owner)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model than the server's."""
        config = self.service.config
        if name is None or name in config.names or config.any_model:
            return
        own = f"this server's is {config.name!r} (or leave model out)"
        said = f"there is no model {name[:100]!r} here; {own}"
        raise ApiError(404, said, param="model", code="model_not_found")


#: Answers a body that was read and has a place in the queue.
Answer: TypeAlias = Callable[[Core, Any, HttpRequest], Awaitable[Response]]


def _no_routes(app: FastAPI, core: Core) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Door:
    """One endpoint that takes JSON.

    Attributes:
        path: Where it is; other paths of the same are ``others``.
        body: The type of what comes in.
        answer: What goes out.
        about: A sentence for the API's description.
        envelope: The form of errors, also of those before the body is read.
        routes: Adds routes without a body, such as those that show or delete what is kept.
        root: The path under which all of these routes are, for the form of their errors.
    """

    path: str
    body: type[Body]
    answer: Answer
    about: str
    others: Sequence[str] = ()
    envelope: Envelope = openai_envelope
    routes: Callable[[FastAPI, Core], None] = _no_routes
    root: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.others)


class Doors:
    """All doors, by their paths."""

    def __init__(self, doors: Sequence[Door]) -> None:
        self.all = tuple(doors)
        self._by_path = {path: door for door in doors for path in door.paths}

    def at(self, path: str) -> Door | None:
        """Return the door that takes bodies at a path."""
        return self._by_path.get(path)

    def envelope(self, path: str) -> Envelope:
        """Return the form of a path's errors."""
        door = self.at(path)
        if door is not None:
            return door.envelope
        for one in self.all:
            if one.root and path.startswith(f"{one.root}/"):
                return one.envelope
        return openai_envelope


def entry_of(request: HttpRequest) -> Entry:
    """Return a request's line of the access log, with its client and its place in the queue."""
    entry: Entry = request.scope[ENTRY]
    return entry
