"""Table cells to rows: columns of media, ids and prompts."""

from __future__ import annotations

import base64
import difflib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.assets import VIDEO_SUFFIXES
from vlm_batch.inputs import heif
from vlm_batch.inputs.chats import says_media
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.jobs.files import is_url, kind_of
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.types import Audio, ImageInput, Video

#: Usual column names, used where none is named.
PICTURE_NAMES = ("image", "images", "image_path", "image_url")
FILE_NAMES = ("file_name", "filename", "path", "file", "url")
#: Names that other columns have, too: their cells must look like pictures.
DOUBTFUL_NAMES = ("path", "file", "url")
VIDEO_COLUMNS = ("video", "videos", "video_path", "video_url")
AUDIO_COLUMNS = ("audio", "audios", "audio_path", "audio_url")
ID_COLUMNS = ("id", "custom_id", "request_id", "key", "__key__")
#: Synonyms that spelling does not show.
OTHER_WORDS = {
    **dict.fromkeys(
        (
            "img",
            "picture",
            "photo",
            "pic",
            "image_file",
            "image_name",
            "image_filename",
        ),
        "image",
    ),
    **dict.fromkeys(("imgs", "pictures", "photos", "pics"), "images"),
    **dict.fromkeys(("file_path", "filepath"), "image_path"),
    **dict.fromkeys(("question", "query", "instruction"), "prompt"),
    **dict.fromkeys(("chat", "conversation", "conversations", "msgs"), "messages"),
    **dict.fromkeys(("param", "parameters", "sampling", "sampling_params"), "params"),
}
#: Words of column names that mean a fact about a picture, not the picture.
FACTS = re.compile(
    r"(?:^|[_ -])(?:ids?|size|width|height|count|num|hash|date|type|format|quality)(?:$|[_ -])",
    re.I,
)
#: First bytes of picture files.
MAGIC = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM.{4}\0\0\0\0|II\*\0|MM\0\*|RIFF.{4}WEBP|.{4}ftyp",
    re.DOTALL,
)
#: The same in base64 (PNG, JPEG, GIF, WebP, TIFF, HEIC and AVIF); no path begins so.
BASE64 = re.compile(
    r"(?:iVBORw0KGgo|/9j/[24]|R0lGOD|UklGR|SUkqA|TU0AK|AAAA.GZ0eXB[hmo])[A-Za-z0-9+/\s]{64,}={0,2}\s*"
)
#: Names of tables in messages to users of Python functions, who have no command line options.
PYTHON_TABLES = THE_TABLE, THE_DATASET = "the table", "the dataset"
#: The longest text that may be a path or a URL.
LONGEST_PATH = 4096


def closest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name probably meant."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = plain if plain in known else OTHER_WORDS.get(plain, plain)
    return next(iter(difflib.get_close_matches(plain, known, 1, 0.8)), None)


def did_you_mean(name: str, known: Collection[str]) -> str:
    likely = closest_name(name, known)
    return "" if likely is None else f" ({likely!r} is probably meant)"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of a table's columns; None uses a usual name, "" means none.

    ``prompt`` is read only if named.
    """

    image: str | None = None
    video: str | None = None
    audio: str | None = None
    id: str | None = None
    prompt: str | None = None

    def resolve(
        self, names: Sequence[str], table: str, pictures: Sequence[str] = ()
    ) -> Columns:
        """Resolve the names in a table; ``pictures`` are picture columns by type."""
        for option, name in vars(self).items():
            if name and name not in names:
                raise InvalidJob(
                    f"{table} has no column {name!r} ({_option(option, table)}); it has {', '.join(names)}"
                )
        # mappings of bytes, as pictures are
        others = {*VIDEO_COLUMNS, *AUDIO_COLUMNS, self.video, self.audio}
        pictures = [name for name in pictures if name not in others]
        likely = (
            [name for name in PICTURE_NAMES + FILE_NAMES if name in pictures],
            [name for name in PICTURE_NAMES if name in names],
            pictures,
            [name for name in FILE_NAMES if name in names],
        )
        return replace(
            self,
            image=_only("image", self.image, next(filter(None, likely), ()), table),
            video=_only(
                "video",
                self.video,
                [name for name in VIDEO_COLUMNS if name in names],
                table,
            ),
            audio=_only(
                "audio",
                self.audio,
                [name for name in AUDIO_COLUMNS if name in names],
                table,
            ),
            id=next((name for name in ID_COLUMNS if name in names), None)
            if self.id is None
            else self.id,
        )

    @property
    def has_media(self) -> bool:
        return bool(self.image or self.video or self.audio) or self.image == ""

    def check_overlooked(
        self, names: Collection[str], table: str, named: Collection[str], *, asks: bool
    ) -> None:
        """Raise InvalidJob if an unused column resembles missing pictures, chats or prompts."""
        strange = [
            name
            for name in names
            if name not in named and name not in vars(self).values()
        ]
        wanted = {} if self.has_media else dict.fromkeys(PICTURE_NAMES, "image")
        if wanted:
            wanted |= {
                **dict.fromkeys(VIDEO_COLUMNS, "video"),
                **dict.fromkeys(AUDIO_COLUMNS, "audio"),
            }
        wanted |= {"prompt": "prompt"} if self.prompt is None and not asks else {}
        found = [
            (name, wanted[likely])
            for name in strange
            if (likely := closest_name(name, wanted)) and name not in wanted
        ]
        if "messages" in strange and (
            not self.has_media or (self.prompt is None and not asks)
        ):
            raise InvalidJob(
                f"{table} has a column 'messages', and chats are read from JSON lines (.jsonl) alone; "
                f"{_something_else('image', table, 'messages')} says that it is something else"
            )
        if not self.has_media:
            found += [
                (name, "image")
                for name in sorted(strange, key=_is_fact)
                if says_media(name)
            ]
        for name, what in found[:1]:
            raise InvalidJob(
                f"{table} has no column of {what}s, but {name!r}: {_option(what, table, name)} takes it for that, "
                f"and {_something_else(what, table, name)} says that it is something else"
            )


def _only(
    what: str, named: str | None, likely: Sequence[str], table: str
) -> str | None:
    if named is None and len(likely) > 1:
        raise InvalidJob(
            f"{likely[0]} and {likely[1]} exclude each other in {table}: {_option(what, table)} says which one holds the "
            f"{what}s"
        )
    return next(iter(likely), None) if named is None else named


def _option(what: str, table: str, name: str | None = None) -> str:
    """Return the option for a column, on the command line or in Python."""
    if table in PYTHON_TABLES:
        return f"{what}=" if name is None else f"{what}={name!r}"
    return (
        f"--{what}-column" if name is None else f"--{what}-column {name or repr(name)}"
    )


def _something_else(what: str, table: str, name: str) -> str:
    return f"{what}=''" if table in PYTHON_TABLES else f"--columns {name}"


def _is_fact(name: str) -> bool:
    return FACTS.search(name) is not None


def flag_overlooked_media(row: Row, table: str, folder: str = "") -> Row:
    """Add an error if a row without pictures names one."""
    for name, value in row.columns.items() if row.error is None else ():
        if names_media(value, folder) or (
            says_media(name) and isinstance(value, str) and is_url(value)
        ):
            like = (
                f" ({value} looks like one)"
                if isinstance(value, str) and len(value) <= 100
                else ""
            )
            error = (
                f"{table} has no column of images, but {name!r}: {_option('image', table, name)} takes it for that{like}, and "
                f"{_option('image', table, '')} says that rows are asked without"
            )
            return replace(row, error=error)
    return row


def flag_doubtful_media(row: Row, own: Columns, table: str, folder: str = "") -> Row:
    """Add an error if a row's doubtful column holds no picture."""
    for name in (
        DOUBTFUL_NAMES if own.image is None and row.images and row.error is None else ()
    ):
        value = row.columns.get(name)
        if (
            isinstance(value, str)
            and value
            and row.images == media_of(value, folder)
            and not names_media(value, folder)
        ):
            like = f" ({value} does not look like one)" if len(value) <= 100 else ""
            error = (
                f"{table} has no column that surely holds images, but {name!r}: {_option('image', table, name)} takes it for "
                f"that{like}, and {_option('image', table, '')} says that rows are asked without"
            )
            return replace(row, error=error)
    return row


def names_media(value: Any, folder: str) -> bool:
    if isinstance(value, str):
        if BASE64.match(value):
            return True
        if len(value) > LONGEST_PATH or "\n" in value:
            return value.startswith(("data:image/", "data:video/"))
        path = value.partition("?")[0] if is_url(value) else value
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in _media_suffixes():
            return value.startswith(("data:image/", "data:video/"))
        return not re.search(r"\s", value.strip()) or os.path.isfile(
            located(value, folder)
        )
    if isinstance(value, (bytes, bytearray)):
        return MAGIC.match(value) is not None
    if isinstance(value, Mapping):
        return any(
            names_media(value.get(name), folder) for name in ("bytes", "path", "url")
        )
    if isinstance(value, (list, tuple)):
        return any(names_media(one, folder) for one in value)
    return isinstance(value, Image.Image)


@cache
def _media_suffixes() -> frozenset[str]:
    return picture_suffixes().union(VIDEO_SUFFIXES, heif.SUFFIXES)


def row_of_cells(
    cells: Mapping[str, Any], columns: Columns, *, place: str, folder: str
) -> Row:
    """Return a table's row, with ``place`` as its default id."""
    row_id = id_of(cells.get(columns.id) if columns.id else None, place)
    shown = {
        name: value
        for name, value in cells.items()
        if name != columns.image or isinstance(value, str)
    }

    def wrong(error: str) -> Row:
        return Row(id=row_id, columns=shown, error=f"{place}: {error}")

    try:
        images = media_of(cells.get(columns.image), folder) if columns.image else ()
        videos = media_of(cells.get(columns.video), folder) if columns.video else ()
        audios = audios_of(cells.get(columns.audio), folder) if columns.audio else ()
    except InvalidJob as error:
        return wrong(str(error))
    if not images and not videos and not audios:
        given = {
            name: cells.get(name)
            for name in (columns.image, columns.video, columns.audio)
            if name
        }
        if given and not any(
            isinstance(value, (list, tuple)) and not value for value in given.values()
        ):
            return wrong(f"column {next(iter(given))!r} is empty; leave the row out")
    prompt = cells.get(columns.prompt) if columns.prompt else None
    if columns.prompt and not isinstance(prompt, str):
        return wrong(f"column {columns.prompt!r} holds no text to ask")
    kinds = [kind_of(image) if isinstance(image, str) else "image" for image in images]
    named = {
        kind: tuple(
            image for image, own in zip(images, kinds, strict=True) if own == kind
        )
        for kind in set(kinds)
    }
    return Row(
        id=row_id,
        columns=shown,
        images=named.get("image", ()),
        videos=tuple(map(Video, (*named.get("video", ()), *videos))),
        audios=(*map(Audio, named.get("audio", ())), *audios),
        prompt=prompt,
    )


def id_of(value: Any, place: str) -> str:
    """Return the cell, or ``place`` if empty, blank or NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return place if value is None or is_nan or not str(value).strip() else str(value)


def media_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """Return a cell's media: paths, URLs, bytes or mappings of these."""
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return ()
    if isinstance(value, float) and math.isnan(value):  # how pandas holds an empty cell
        return ()
    if isinstance(value, str):
        return (_of_text(value, folder),)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return (bytes(value),)
    if isinstance(value, (Image.Image, np.ndarray, os.PathLike)):
        return (
            value
            if not isinstance(value, os.PathLike)
            else located(os.fspath(value), folder),
        )
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path") or value.get("url")
        if data is None and path is None:
            raise InvalidJob(
                f"a picture's mapping needs bytes, path or url; it has {', '.join(map(str, value))}"
            )
        return media_of(data if data is not None else path, folder)
    if isinstance(value, (list, tuple)):
        found = [media_of(one, folder) for one in value]
        if not all(found):
            raise InvalidJob(
                f"number {found.index(()) + 1} of the list is empty; leave it out"
            )
        return tuple(picture for pictures in found for picture in pictures)
    raise InvalidJob(
        f"a picture is a path, URL, bytes or a list of these, not {type(value).__name__}"
    )


def audios_of(value: Any, folder: str) -> tuple[Audio, ...]:
    if isinstance(value, Mapping) and value.get("array") is not None:
        return (Audio(value["array"], rate=value.get("sampling_rate")),)
    if isinstance(value, (list, tuple)):
        return tuple(audio for one in value for audio in audios_of(one, folder))
    return tuple(map(Audio, media_of(value, folder)))


def _of_text(value: str, folder: str) -> ImageInput:
    if BASE64.match(value):
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except ValueError as error:
            raise InvalidJob(
                f"a picture in base64 of {len(value):,} characters is cut or damaged: {error}"
            ) from error
    path = located(value, folder)
    return (
        path if os.path.exists(path) or is_url(path) else located(value.strip(), folder)
    )


def located(path: str, folder: str) -> str:
    """Return a path beside the table if it exists there or nowhere, else unchanged."""
    if is_url(path) or os.path.isabs(path) or path.startswith("~") or not folder:
        return path
    beside = os.path.join(folder, path)
    return beside if os.path.exists(beside) or not os.path.exists(path) else path
