"""``/v1/files``: OpenAI's files, for batches, and for pictures and documents that requests name by their ids."""

from __future__ import annotations

import asyncio
import re
from email.message import Message
from typing import Literal
from urllib.parse import urlsplit

from fastapi import FastAPI
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from vlm_batch.server.door import Core, entry_of
from vlm_batch.server.errors import ApiError, JsonResponse
from vlm_batch.server.lists import listed
from vlm_batch.server.private import AGE, new_id
from vlm_batch.server.stored import Coming, FileStore, StoredFile

PATH = "/v1/files"
PURPOSES = ("batch", "vision", "user_data")
#: Fields of an upload beside the file.
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
#: Most bytes of such a field; most parts of an upload; most characters of a file's name.
MAX_FIELD, MAX_UPLOAD_PARTS, MAX_NAME = 256, 8, 255
#: The ages that may be asked for, in seconds.
LEAST_AGE, MOST_AGE = 3600, AGE


#: What an upload is, in the API's description.
_FORM = {
    "type": "object",
    "additionalProperties": False,
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LEAST_AGE,
            "maximum": MOST_AGE,
        },
    },
}
_BODY = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}


def store_of(core: Core) -> FileStore:
    """Return the folder of files. Raises ApiError 404 if the server has none."""
    if core.files is None:
        said = "files and batches are not served: start the server with --files FOLDER"
        raise ApiError(404, f"{said}, or send pictures as data URIs")
    return core.files


def age_of(text: str | int, param: str) -> int:
    """Return seconds that a file is to be kept. Raises ApiError."""
    given = str(text)
    is_number = given.isdecimal() and len(given) < 10
    if not is_number or not LEAST_AGE <= int(given) <= MOST_AGE:
        said = f"{param} must be a whole number in {LEAST_AGE}..{MOST_AGE}"
        raise ApiError(400, said, param=param)
    return int(given)


# Uploads ---------------------------------------------------------------------------------------------------------------


class FileForm:
    """A multipart body as it comes: the file's bytes go on, and fields are kept."""

    def __init__(self, boundary: str, coming: Coming) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._coming = coming
        self._header = [b"", b""]
        self._name = ""
        self._is_file = False
        self._value = b""
        self._num_parts = 0
        self._parser = MultipartParser(
            boundary.encode("latin-1", "replace"),
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._begin_header,
                "on_header_field": lambda *told: self._add_header(0, *told),
                "on_header_value": lambda *told: self._add_header(1, *told),
                "on_header_end": self._end_header,
                "on_headers_finished": self._check_part,
                "on_part_data": self._add,
                "on_part_end": self._end,
                "on_end": self._end_all,
            },
        )

    def feed(self, data: bytes) -> None:
        """Take bytes. Raises ApiError."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _no_form() from error

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_UPLOAD_PARTS:
            said = f"an upload has {MAX_UPLOAD_PARTS} parts at most"
            raise ApiError(400, said)
        self._name, self._is_file, self._value = "", False, b""

    def _begin_header(self) -> None:
        self._header = [b"", b""]

    def _add_header(self, at: int, data: bytes, begin: int, end: int) -> None:
        self._header[at] += data[begin:end]

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() != b"content-disposition":
            return
        told = Message()
        told["content-disposition"] = value.decode("utf-8", "replace")
        self._name = str(told.get_param("name", "", "content-disposition"))
        filename = told.get_filename()
        self._is_file = self._name == "file"
        if self._is_file:
            self.filename = _clean(filename or "file")

    def _check_part(self) -> None:
        if self._is_file or self._name in FIELDS:
            return
        known = ", ".join(("file", *FIELDS))
        said = f"there is no field {self._name[:100]!r}; there are {known}"
        raise ApiError(400, said, code="extra_forbidden")

    def _add(self, data: bytes, begin: int, end: int) -> None:
        if self._is_file:
            self._coming.write(data[begin:end])
            return
        self._value += data[begin:end]
        if len(self._value) > MAX_FIELD:
            raise ApiError(400, f"{self._name} is too long", param=self._name)

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end_all(self) -> None:
        self.is_whole = True


def _clean(filename: str) -> str:
    """Return a file's name without its folder and what no line of text holds."""
    last = re.split(r"[/\\]", filename)[-1]
    return "".join(one for one in last if one.isprintable())[:MAX_NAME] or "file"


def _no_form() -> ApiError:
    said = "the body must be a form with file and purpose (multipart/form-data)"
    return ApiError(400, said)


def _boundary(request: HttpRequest) -> str:
    told = Message()
    told["content-type"] = request.headers.get("content-type", "")
    boundary = told.get_boundary()
    if told.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(415, str(_no_form().detail))
    return boundary


def _check_origin(request: HttpRequest) -> None:
    """Raise ApiError 403 for a form that a page of another site sends: browsers do so without asking back."""
    origin = request.headers.get("origin")
    if origin is None:
        return
    if urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise ApiError(403, "files are not taken from pages of other sites")


async def _taken_in(store: FileStore, owner: str, request: HttpRequest) -> StoredFile:
    """Write an upload to the disk, and take it once it is whole. Raises ApiError."""
    boundary = _boundary(request)
    with store.coming(owner) as coming:
        form = FileForm(boundary, coming)
        async for data in request.stream():
            form.feed(data)
        if not form.is_whole:
            raise _no_form()
        if form.filename is None:
            raise ApiError(400, "the form has no file", param="file", code="missing")
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            said = f"purpose must be one of {', '.join(PURPOSES)}"
            raise ApiError(400, said, param="purpose")
        anchor, seconds = FIELDS[1:]
        if form.fields.get(anchor, "created_at") != "created_at":
            raise ApiError(400, f"{anchor} must be created_at", param=anchor)
        age = age_of(form.fields.get(seconds, AGE), seconds)
        name = new_id("file").replace("_", "-")
        await asyncio.to_thread(coming.keep, store.path(name))
        return store.put(name, owner, form.filename, purpose, age)


def add_routes(app: FastAPI, core: Core) -> None:
    """Add the paths of files."""

    @app.post(PATH, openapi_extra={"requestBody": _BODY})
    async def upload(request: HttpRequest) -> Response:
        """Take a file: a form with file, purpose (batch, vision or user_data), and expires_after."""
        store, entry = store_of(core), entry_of(request)
        _check_origin(request)
        stored = await _taken_in(store, entry.owner, request)
        entry.said |= {"file": stored.id, "bytes": stored.size}
        return JsonResponse(stored.shown)

    @app.get(PATH)
    async def files(
        request: HttpRequest,
        purpose: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List files, the newest first."""
        mine = store_of(core).of(entry_of(request).owner)
        shown = [one.shown for one in mine if purpose in (None, one.shown["purpose"])]
        return listed(shown, order, after, max(1, min(10_000, limit)))

    @app.get(f"{PATH}/{{file_id}}")
    async def file(file_id: str, request: HttpRequest) -> Response:
        """Describe a file."""
        return JsonResponse(store_of(core).find(file_id, entry_of(request).owner).shown)

    @app.get(f"{PATH}/{{file_id}}/content")
    async def content(file_id: str, request: HttpRequest) -> Response:
        """Return what a file holds."""
        store = store_of(core)
        found = store.find(file_id, entry_of(request).owner)
        name = str(found.shown["filename"])
        kind = "application/octet-stream"
        return FileResponse(store.path(found.id), media_type=kind, filename=name)

    @app.delete(f"{PATH}/{{file_id}}")
    async def delete(file_id: str, request: HttpRequest) -> Response:
        """Delete a file."""
        store_of(core).delete(file_id, entry_of(request).owner)
        gone = {"id": file_id, "object": "file", "deleted": True}
        return JsonResponse(gone)
