"""Table cells to rows: columns of media, ids and prompts."""

from __future__ import annotations

import base64
import difflib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, singledispatch
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.assets import VIDEO_SUFFIXES
from vlm_batch.inputs import heif
from vlm_batch.inputs.chats import says_media
from vlm_batch.inputs.fetch import is_address
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.jobs.files import kind_of, without_query
from vlm_batch.jobs.rows import InvalidJob, JobRow
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
#: Data URIs of pictures and videos.
DATA_MEDIA = re.compile(r"data:(?:image|video)/", re.I)
#: Names of tables in messages to users of Python functions, who have no command line options.
PYTHON_TABLES = THE_TABLE, THE_DATASET = "the table", "the dataset"
#: The longest text that may be a path or a URL, and the longest that a message shows.
LONGEST_PATH, MOST_SHOWN = 4096, 100


def closest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name probably meant."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if plain not in known:
        plain = OTHER_WORDS.get(plain, plain)
    near = difflib.get_close_matches(plain, known, 1, 0.8)
    return next(iter(near), None)


def did_you_mean(name: str, known: Collection[str]) -> str:
    likely = closest_name(name, known)
    if likely is None:
        return ""
    return f" ({likely!r} is probably meant)"


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
        self._check_named(names, table)
        images = self._likely_images(names, pictures)
        videos = _those_in(names, VIDEO_COLUMNS)
        audios = _those_in(names, AUDIO_COLUMNS)
        own_id = self.id
        if own_id is None:
            own_id = next(iter(_those_in(names, ID_COLUMNS)), None)
        return replace(
            self,
            image=_only("image", self.image, images, table),
            video=_only("video", self.video, videos, table),
            audio=_only("audio", self.audio, audios, table),
            id=own_id,
        )

    def _likely_images(
        self, names: Sequence[str], pictures: Sequence[str]
    ) -> Sequence[str]:
        """Return the columns that are probably of pictures: by type and name, by name, by type, or of files."""
        # columns of videos and recordings are mappings of bytes, as pictures are
        others = {*VIDEO_COLUMNS, *AUDIO_COLUMNS, self.video, self.audio}
        by_type = [name for name in pictures if name not in others]
        either = (
            _those_in(by_type, PICTURE_NAMES + FILE_NAMES),
            _those_in(names, PICTURE_NAMES),
            by_type,
            _those_in(names, FILE_NAMES),
        )
        return next(filter(None, either), [])

    def _check_named(self, names: Sequence[str], table: str) -> None:
        for option, name in vars(self).items():
            if name and name not in names:
                raise InvalidJob(
                    f"{table} has no column {name!r} ({_option(option, table)}); it has {', '.join(names)}"
                )

    @property
    def has_media(self) -> bool:
        """Whether a column of media is known, or pictures are said to be in none."""
        columns = (self.image, self.video, self.audio)
        return any(columns) or self.image == ""

    def check_overlooked(
        self, names: Collection[str], table: str, named: Collection[str], *, asks: bool
    ) -> None:
        """Raise InvalidJob if an unused column resembles missing pictures, chats or prompts."""
        used = {*named, *vars(self).values()}
        strange = [name for name in names if name not in used]
        lacks_prompt = self.prompt is None and not asks
        lacks_something = lacks_prompt or not self.has_media
        if "messages" in strange and lacks_something:
            raise InvalidJob(
                f"{table} has a column 'messages', and chats are read from JSON lines (.jsonl) alone; "
                f"{_something_else('image', table, 'messages')} says that it is something else"
            )
        found = self._resembling(strange, lacks_prompt=lacks_prompt)
        if found is None:
            return
        name, what = found
        raise InvalidJob(
            f"{table} has no column of {what}s, but {name!r}: {_naming(what, table, name)} takes it for that, "
            f"and {_something_else(what, table, name)} says that it is something else"
        )

    def _resembling(
        self, strange: Sequence[str], *, lacks_prompt: bool
    ) -> tuple[str, str] | None:
        """Return an unused column that is probably of pictures or prompts, and which of the two."""
        wanted: dict[str, str] = {}
        if not self.has_media:
            wanted |= dict.fromkeys(PICTURE_NAMES, "image")
            wanted |= dict.fromkeys(VIDEO_COLUMNS, "video")
            wanted |= dict.fromkeys(AUDIO_COLUMNS, "audio")
        if lacks_prompt:
            wanted["prompt"] = "prompt"
        for name in strange:
            likely = closest_name(name, wanted)
            if likely is not None and name not in wanted:
                return name, wanted[likely]
        if self.has_media:
            return None
        of_pictures = filter(says_media, sorted(strange, key=_is_fact))
        found = next(of_pictures, None)
        if found is None:
            return None
        return (found, "image")


def _those_in(names: Collection[str], usual: Sequence[str]) -> list[str]:
    return [name for name in usual if name in names]


def _only(
    what: str, named: str | None, likely: Sequence[str], table: str
) -> str | None:
    if named is not None:
        return named
    if len(likely) > 1:
        raise InvalidJob(
            f"{likely[0]} and {likely[1]} exclude each other in {table}: {_option(what, table)} says which one holds the "
            f"{what}s"
        )
    return next(iter(likely), None)


def _option(what: str, table: str) -> str:
    """Return the option for a column, on the command line or in Python."""
    if table in PYTHON_TABLES:
        return f"{what}="
    return f"--{what}-column"


def _naming(what: str, table: str, name: str) -> str:
    """Return the option that names a column."""
    if table in PYTHON_TABLES:
        return f"{_option(what, table)}{name!r}"
    return f"{_option(what, table)} {name or repr(name)}"


def _something_else(what: str, table: str, name: str) -> str:
    """Return the option that says that a column is something else."""
    if table in PYTHON_TABLES:
        return f"{what}=''"
    return f"--columns {name}"


def _is_fact(name: str) -> bool:
    return FACTS.search(name) is not None


def flag_overlooked_media(row: JobRow, table: str, folder: str = "") -> JobRow:
    """Add an error if a row without pictures names one."""
    if row.error is not None:
        return row
    for name, value in row.columns.items():
        if _is_overlooked(name, value, folder):
            return _in_doubt(row, name, table, "of images", "looks like one")
    return row


def _in_doubt(row: JobRow, name: str, table: str, what: str, like: str) -> JobRow:
    """Add an error that says how a column is taken for pictures, and how rows are asked without."""
    value = row.columns[name]
    said = ""
    if isinstance(value, str) and len(value) <= MOST_SHOWN:
        said = f" ({value} {like})"
    takes, without = _naming("image", table, name), _naming("image", table, "")
    error = (
        f"{table} has no column {what}, but {name!r}: {takes} takes it for that{said}, and {without} says that rows are "
        "asked without"
    )
    return replace(row, error=error)


def _is_overlooked(name: str, value: Any, folder: str) -> bool:
    if names_media(value, folder):
        return True
    return says_media(name) and is_address(value)


def flag_doubtful_media(
    row: JobRow, own: Columns, table: str, folder: str = ""
) -> JobRow:
    """Add an error if a row's doubtful column holds no picture."""
    if own.image is not None or row.error is not None or not row.images:
        return row
    for name in DOUBTFUL_NAMES:
        value = row.columns.get(name)
        if _is_mistaken(value, row, folder):
            what = "that surely holds images"
            return _in_doubt(row, name, table, what, "does not look like one")
    return row


def _is_mistaken(value: Any, row: JobRow, folder: str) -> bool:
    """Whether a row's pictures are a text that names none."""
    if not isinstance(value, str) or names_media(value, folder):
        return False
    return row.images == media_of(value, folder)


@singledispatch
def names_media(value: Any, folder: str) -> bool:
    """Whether a cell is a picture or a video, or names one."""
    return False


@names_media.register
def _is_picture(value: Image.Image, folder: str) -> bool:
    return True


@names_media.register(bytes)
@names_media.register(bytearray)
def _has_magic(value: bytes, folder: str) -> bool:
    return MAGIC.match(value) is not None


@names_media.register
def _mapping_names_media(value: Mapping, folder: str) -> bool:  # type: ignore[type-arg]
    held = [value.get(name) for name in ("bytes", "path", "url")]
    return names_media(held, folder)


@names_media.register(list)
@names_media.register(tuple)
def _one_names_media(value: Sequence[Any], folder: str) -> bool:
    return any(names_media(one, folder) for one in value)


@names_media.register
def _text_names_media(value: str, folder: str) -> bool:
    if BASE64.match(value) or DATA_MEDIA.match(value):
        return True
    if len(value) > LONGEST_PATH or "\n" in value:
        return False
    suffix = os.path.splitext(without_query(value))[1].lower()
    if suffix not in _media_suffixes():
        return False
    words = value.split()
    return len(words) == 1 or os.path.isfile(located(value, folder))


@cache
def _media_suffixes() -> frozenset[str]:
    return picture_suffixes().union(VIDEO_SUFFIXES, heif.SUFFIXES)


@dataclass(frozen=True)
class _CellMedia:
    """A row's media, by the columns that hold them."""

    images: tuple[ImageInput, ...]
    videos: tuple[ImageInput, ...]
    audios: tuple[Audio, ...]

    @classmethod
    def of(cls, cells: Mapping[str, Any], columns: Columns, folder: str) -> _CellMedia:
        """Read a row's cells. Raises InvalidJob."""
        return cls(
            images=media_of(_cell(cells, columns.image), folder),
            videos=media_of(_cell(cells, columns.video), folder),
            audios=audios_of(_cell(cells, columns.audio), folder),
        )

    def __bool__(self) -> bool:
        return bool(self.images or self.videos or self.audios)

    def named(self, kind: str) -> tuple[ImageInput, ...]:
        """Return what the column of images holds of a kind: a file's suffix says which."""
        return tuple(one for one in self.images if _kind_of_medium(one) == kind)


def _cell(cells: Mapping[str, Any], name: str | None) -> Any:
    if name:
        return cells.get(name)
    return None


def _kind_of_medium(medium: ImageInput) -> str:
    if isinstance(medium, str):
        return kind_of(medium)
    return "image"


def row_of_cells(
    cells: Mapping[str, Any], columns: Columns, *, place: str, folder: str
) -> JobRow:
    """Return a table's row, with ``place`` as its default id."""
    row_id = id_of(_cell(cells, columns.id), place)
    shown = dict(cells)
    if columns.image in shown and not isinstance(shown[columns.image], str):
        del shown[columns.image]  # a picture is shown in no text

    def wrong(error: str) -> JobRow:
        return JobRow(id=row_id, columns=shown, error=f"{place}: {error}")

    try:
        media = _CellMedia.of(cells, columns, folder)
    except InvalidJob as error:
        return wrong(str(error))
    empty = _empty_column(cells, columns)
    if not media and empty is not None:
        return wrong(f"column {empty!r} is empty; leave the row out")
    prompt = _cell(cells, columns.prompt)
    if columns.prompt and not isinstance(prompt, str):
        return wrong(f"column {columns.prompt!r} holds no text to ask")
    return JobRow(
        id=row_id,
        columns=shown,
        images=media.named("image"),
        videos=tuple(map(Video, (*media.named("video"), *media.videos))),
        audios=(*map(Audio, media.named("audio")), *media.audios),
        prompt=prompt,
    )


def checked_row(
    cells: Mapping[str, Any], columns: Columns, own: Columns, *, table: str, place: str
) -> JobRow:
    """Return the row of a table in memory, with an error if its media are doubtful or overlooked; ``own`` were named."""
    row = row_of_cells(cells, columns, place=place, folder="")
    row = flag_doubtful_media(row, own, table)
    if columns.has_media:
        return row
    return flag_overlooked_media(row, table)


def _empty_column(cells: Mapping[str, Any], columns: Columns) -> str | None:
    """Return the first column of media; None without one, and where an empty list says that there are none."""
    known = (columns.image, columns.video, columns.audio)
    names = list(filter(None, known))
    if not names:
        return None
    says_none = any(_is_empty_list(cells.get(name)) for name in names)
    if says_none:
        return None
    return names[0]


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value


def id_of(value: Any, place: str) -> str:
    """Return the cell, or ``place`` if empty, blank or NaN."""
    if value is None or _is_nan(value):
        return place
    text = str(value)
    is_blank = not text.strip()
    return place if is_blank else text


def _is_nan(value: Any) -> bool:
    """Whether a cell is empty as pandas holds it."""
    return isinstance(value, float) and math.isnan(value)


@singledispatch
def media_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """Return a cell's media: paths, URLs, bytes or mappings of these. An empty cell has none. Raises InvalidJob."""
    if _is_nan(value):
        return ()
    raise InvalidJob(
        f"a picture is a path, URL, bytes or a list of these, not {type(value).__name__}"
    )


@media_of.register
def _of_nothing(value: None, folder: str) -> tuple[ImageInput, ...]:
    return ()


@media_of.register
def _of_text(value: str, folder: str) -> tuple[ImageInput, ...]:
    if not value:
        return ()
    if BASE64.match(value):
        return (_of_base64(value),)
    path = located(value, folder)
    if is_address(path) or os.path.exists(path):
        return (path,)
    return (located(value.strip(), folder),)


@media_of.register(bytes)
@media_of.register(bytearray)
@media_of.register(memoryview)
def _of_bytes(value: bytes, folder: str) -> tuple[ImageInput, ...]:
    return (bytes(value),) if len(value) else ()


@media_of.register(os.PathLike)
def _of_path(value: os.PathLike[str], folder: str) -> tuple[ImageInput, ...]:
    return (located(os.fspath(value), folder),)


@media_of.register(Image.Image)
@media_of.register(np.ndarray)
def _of_picture(value: ImageInput, folder: str) -> tuple[ImageInput, ...]:
    return (value,)


@media_of.register(Mapping)
def _of_mapping(value: Mapping[str, Any], folder: str) -> tuple[ImageInput, ...]:
    """Return the picture of a mapping, as the datasets library has it."""
    data = value.get("bytes")
    if data is None:
        data = value.get("path") or value.get("url")
    if data is None:
        raise InvalidJob(
            f"a picture's mapping needs bytes, path or url; it has {', '.join(map(str, value))}"
        )
    return media_of(data, folder)


@media_of.register(list)
@media_of.register(tuple)
def _of_list(several: Sequence[Any], folder: str) -> tuple[ImageInput, ...]:
    found: list[ImageInput] = []
    for number, one in enumerate(several, 1):
        media = media_of(one, folder)
        if not media:
            raise InvalidJob(f"number {number} of the list is empty; leave it out")
        found += media
    return tuple(found)


def audios_of(value: Any, folder: str) -> tuple[Audio, ...]:
    """Return a cell's recordings, as ``media_of``, or arrays as the datasets library has them."""
    if isinstance(value, (list, tuple)):
        found: list[Audio] = []
        for one in value:
            found += audios_of(one, folder)
        return tuple(found)
    if isinstance(value, Mapping) and value.get("array") is not None:
        return (Audio(value["array"], rate=value.get("sampling_rate")),)
    return tuple(map(Audio, media_of(value, folder)))


def _of_base64(value: str) -> bytes:
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except ValueError as error:
        raise InvalidJob(
            f"a picture in base64 of {len(value):,} characters is cut or damaged: {error}"
        ) from error


def located(path: str, folder: str) -> str:
    """Return a path beside the table if it exists there or nowhere, else unchanged."""
    if is_address(path) or path.startswith("~"):
        return path
    beside = os.path.join(folder, path)  # the path itself, if it is absolute
    if os.path.exists(path) and not os.path.exists(beside):
        return path
    return beside
