"""From a table's cells to a row: the columns of pictures, videos, ids and prompts, and what may stand in them."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from vlm_batch.jobs.files import is_url, is_video, prepare_for
from vlm_batch.jobs.rows import InvalidJob, Row
from vlm_batch.types import ImageInput, Video

#: Columns that are taken for what they say, where none is named.
PICTURE_NAMES = ("image", "images", "image_path", "image_url")
FILE_NAMES = ("file_name", "filename", "path", "file", "url")
VIDEO_COLUMNS = ("video", "videos", "video_path", "video_url")
ID_COLUMNS = ("id", "custom_id", "request_id", "key", "__key__")
#: What people call them otherwise, where spelling does not show it.
OTHER_WORDS = {
    **dict.fromkeys(("img", "picture", "photo", "pic", "image_file", "image_name", "image_filename"), "image"),
    **dict.fromkeys(("imgs", "pictures", "photos", "pics"), "images"),
    **dict.fromkeys(("file_path", "filepath"), "image_path"),
    **dict.fromkeys(("question", "query", "instruction"), "prompt"),
    **dict.fromkeys(("chat", "conversation", "conversations", "msgs"), "messages"),
    **dict.fromkeys(("param", "parameters", "sampling", "sampling_params"), "params"),
}


def meant(name: str, known: Collection[str]) -> str | None:
    """The known name that another one probably stands for; None if none is like it."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = plain if plain in known else OTHER_WORDS.get(plain, plain)
    return next(iter(difflib.get_close_matches(plain, known, 1, 0.8)), None)


def hint(name: str, known: Collection[str]) -> str:
    """What is said of a name that is unknown: the one that is probably meant."""
    likely = meant(name, known)
    return "" if likely is None else f" ({likely!r} is probably meant)"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of pictures, videos, ids and prompts.

    None takes the first known name that is there; ``prompt`` is read only where it is named.
    """

    image: str | None = None
    video: str | None = None
    id: str | None = None
    prompt: str | None = None

    def among(self, names: Sequence[str], table: str, pictures: Sequence[str] = ()) -> Columns:
        """The columns of a table with these names; ``pictures`` are known by their type. Raises InvalidJob."""
        for option, name in vars(self).items():
            if name is not None and name not in names:
                raise InvalidJob(f"{table} has no column {name!r} (--{option}-column); it has {', '.join(names)}")
        likely = (
            *(name for name in PICTURE_NAMES + FILE_NAMES if name in pictures),
            *(name for name in PICTURE_NAMES if name in names),
            *pictures,
            *(name for name in FILE_NAMES if name in names),
        )
        return replace(
            self,
            image=self.image or next(iter(likely), None),
            video=self.video or next((name for name in VIDEO_COLUMNS if name in names), None),
            id=self.id or next((name for name in ID_COLUMNS if name in names), None),
        )

    def check_meant(self, names: Collection[str], table: str, named: Collection[str], *, asks: bool) -> None:
        """Raise InvalidJob for a column that probably holds the pictures, or the prompts, that none was found for.

        ``self`` is what was found, ``named`` what the job uses otherwise, ``asks`` whether it has a prompt of its own.
        """
        wanted = {} if self.image or self.video else dict.fromkeys(PICTURE_NAMES, "image")
        wanted |= dict.fromkeys(VIDEO_COLUMNS if wanted else (), "video")
        wanted |= {"prompt": "prompt"} if self.prompt is None and not asks else {}
        for name in names:
            likely = meant(name, wanted) if name not in named else None
            if likely is not None:
                what = wanted[likely]
                raise InvalidJob(
                    f"{table} has no column of {what}s, but {name!r}: --{what}-column {name} takes it for that, "
                    f"and --columns {name} says that it is something else"
                )


def row_of_cells(cells: Mapping[str, Any], columns: Columns, *, place: str, folder: str) -> Row:
    """A table's row. ``place`` stands in where it has no id, and ``folder`` is where relative paths begin."""
    row_id = place if columns.id is None or cells.get(columns.id) in (None, "") else str(cells[columns.id])
    shown = {name: value for name, value in cells.items() if name != columns.image or isinstance(value, str)}
    row = Row(id=row_id, columns=shown)
    try:
        images = () if columns.image is None else pictures_of(cells.get(columns.image), folder)
        videos = () if columns.video is None else videos_of(cells.get(columns.video), folder)
    except InvalidJob as error:
        return replace(row, error=f"{place}: {error}")
    if columns.image is not None and not images and not videos:
        return replace(row, error=f"{place}: column {columns.image!r} is empty")
    prompt = None if columns.prompt is None else cells.get(columns.prompt)
    if columns.prompt is not None and not isinstance(prompt, str):
        return replace(row, error=f"{place}: column {columns.prompt!r} holds no text")
    clips = tuple(Video(image) for image in images if isinstance(image, str) and is_video(image))
    return replace(
        row,
        images=tuple(image for image in images if not (isinstance(image, str) and is_video(image))),
        videos=clips + tuple(Video(video) for video in videos),
        prompt=prompt,
    )


def pictures_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """The pictures of a cell: a path or URL, bytes, a mapping of either (as Hugging Face writes them), or a list of these.

    Raises InvalidJob for anything else.
    """
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return ()
    if isinstance(value, float) and math.isnan(value):  # how pandas holds an empty cell
        return ()
    if isinstance(value, str):
        prepare_for(value)
        return (located(value, folder),)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return (bytes(value),)
    if isinstance(value, (Image.Image, np.ndarray, os.PathLike)):
        return (value if not isinstance(value, os.PathLike) else located(os.fspath(value), folder),)
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path") or value.get("url")
        if data is None and path is None:
            raise InvalidJob(f"a picture's mapping needs bytes, path or url; it has {', '.join(map(str, value))}")
        return pictures_of(data if data is not None else path, folder)
    if isinstance(value, (list, tuple)):
        return tuple(picture for one in value for picture in pictures_of(one, folder))
    raise InvalidJob(f"a picture is a path, URL, bytes or a list of these, not {type(value).__name__}")


def videos_of(value: Any, folder: str) -> tuple[ImageInput, ...]:
    """The videos of a cell, as ``pictures_of``."""
    return pictures_of(value, folder)


def located(path: str, folder: str) -> str:
    """A path of a table: beside the table if it is there, else from where the process runs."""
    if is_url(path) or os.path.isabs(path) or path.startswith("~") or not folder:
        return path
    beside = os.path.join(folder, path)
    return beside if os.path.exists(beside) or not os.path.exists(path) else path
