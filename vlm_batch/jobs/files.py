"""Pictures, videos and documents named by arguments: files, folders, globs and URLs, each once."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from PIL import Image

from vlm_batch.assets import VIDEO_SUFFIXES
from vlm_batch.inputs import images
from vlm_batch.jobs.rows import InvalidJob

HEIC_SUFFIXES = (".heic", ".heif", ".hif")
#: Files that are neither pictures nor read in another way: skipped where a shell's pattern names them among pictures.
TEXT_SUFFIXES = (".txt", ".caption", ".md", ".log", ".html", ".xml", ".yaml", ".yml", ".json")
ARCHIVE_SUFFIXES = (".zip", ".7z", ".rar", ".gz", ".zst")
OFFICE_SUFFIXES = (".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".pptx")
NO_PICTURES = TEXT_SUFFIXES + ARCHIVE_SUFFIXES + OFFICE_SUFFIXES


@dataclass
class Found:
    """The files that arguments lead to, each once, and what is left out: files by suffix, folders met again through a link."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    num_folders_again: int = 0

    def add(self, path: str) -> bool:
        """Add a file; False if it is there already, in whatever spelling."""
        key = identity(path)
        is_new = key not in self.files
        self.files.add(key)
        return is_new

    def look_for(self, path: str, *, suffixes: Collection[str], recursive: bool) -> Iterator[str]:
        """The new files that a name stands for: a file, a URL and the name of nothing as they are, a folder by suffixes.

        Files whose suffix says that they are text, archives or office documents are skipped.
        """
        is_folder = os.path.isdir(path)
        for file in self._walk(path, recursive) if is_folder else (path,):
            suffix = "" if is_url(file) else os.path.splitext(file)[1].lower()
            if suffix not in suffixes if is_folder else suffix in NO_PICTURES and os.path.lexists(file):
                self.skipped[suffix] += 1
            elif self.add(file):
                yield file

    def _walk(self, folder: str, recursive: bool) -> Iterator[str]:
        """Files of a folder and then of those in it, sorted, hidden ones left out. Links are followed, but none twice."""

        def unreadable(error: OSError) -> None:
            self.unreadable.append(str(error.filename))

        for where, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
            real = os.path.realpath(where)
            is_again = real in self.folders
            self.num_folders_again += is_again
            self.folders.add(real)
            folders[:] = sorted(one for one in folders if not one.startswith(".")) if recursive and not is_again else []
            for name in sorted(names) if not is_again else ():
                path = os.path.join(where, name)
                if not name.startswith(".") and os.path.isfile(path):
                    yield path
                elif not name.startswith("."):  # a link that leads nowhere, a pipe
                    self.unreadable.append(path)

    def said(self) -> str:
        """One line about what was left out; "" if nothing was."""
        kinds = [
            f"{count} {suffix or 'without a suffix'}{_hint(suffix)}" for suffix, count in self.skipped.most_common(6)
        ]
        if len(self.skipped) > 6:
            kinds.append(f"{sum(self.skipped.values()) - sum(n for _, n in self.skipped.most_common(6))} others")
        if self.num_folders_again:
            folders = "1 folder" if self.num_folders_again == 1 else f"{self.num_folders_again} folders"
            kinds.append(f"{folders} that links lead to again")
        kinds += [f"{folder} (cannot be read)" for folder in self.unreadable]
        return f"skipped: {', '.join(kinds)}" if kinds else ""


def _hint(suffix: str) -> str:
    hints: tuple[tuple[tuple[str, ...], str], ...] = (
        (VIDEO_SUFFIXES, "--videos takes them"),
        ((".pdf",), "--pdf takes them"),
        ((".parquet", ".jsonl", ".tar"), f"a pattern takes them: '*{suffix}'"),
        ((".json",), "tables are read as JSON lines: .jsonl"),
        (ARCHIVE_SUFFIXES, "to be unpacked first"),
        (OFFICE_SUFFIXES, "to be saved as PDF or CSV first"),
        (HEIC_SUFFIXES, "pip install 'vlm-batch[heic]' reads them"),
    )
    if suffix in Image.EXTENSION:  # pictures of another kind than those of FORMATS
        hints += (((suffix,), f"{Image.EXTENSION[suffix]} is not read here: to be saved as PNG first"),)
    return next((f" ({hint})" for suffixes, hint in hints if suffix in suffixes), "")


def expanded(argument: str) -> list[str]:
    """The names that match a pattern, in order; the argument itself if it is no pattern, or nothing matches.

    ``./photos/`` is ``photos``: names are ids, and a job is resumed by them.
    """
    if argument and not is_url(argument):
        argument = os.path.expanduser(argument)
        argument = argument if os.pardir in argument.split(os.sep) else os.path.normpath(argument)
    if is_url(argument) or os.path.lexists(argument) or not glob.has_magic(argument):
        return [argument]
    return sorted(glob.glob(argument, recursive=True)) or [argument]


def check_there(arguments: Sequence[str]) -> None:
    """Raise InvalidJob for a folder or pattern that leads to nothing, and where none of the files that are named is there.

    One picture of many that is missing is that row's error alone. A name without a suffix is a folder's.
    """
    named = (one for one in arguments if one != "-" and not is_url(one))
    missing = [one for one in named if not any(map(os.path.lexists, expanded(one)))]
    folders = [one for one in missing if glob.has_magic(one) or not os.path.splitext(one)[1]]
    if folders or (missing and len(missing) == len(arguments)):
        first = (folders or missing)[0]
        raise InvalidJob(f"nothing matches {first}" if glob.has_magic(first) else f"{first} does not exist")


def picture_suffixes() -> frozenset[str]:
    """The suffixes of pictures that can be read here: with pillow-heif, those of HEIC, too."""
    with_heif = "pillow_heif" in sys.modules or find_spec("pillow_heif")
    return images.picture_suffixes().union(HEIC_SUFFIXES if with_heif else ())


def prepare_for(path: str) -> None:
    """Have Pillow read HEIC pictures, where there are any and pillow-heif is installed."""
    if path.lower().endswith(HEIC_SUFFIXES):
        with contextlib.suppress(ImportError):
            import pillow_heif

            pillow_heif.register_heif_opener()


def is_url(path: str) -> bool:
    """True for a source that is fetched from elsewhere, or carries its data itself."""
    return path.startswith(("http://", "https://", "data:"))


def is_video(path: str) -> bool:
    """True for a path or URL of a video, by its suffix."""
    return path.partition("?")[0].lower().endswith(VIDEO_SUFFIXES)


def common_folder(paths: Sequence[str]) -> str:
    """The folders that all paths begin with, to be left out where they are shown; "" if there are none."""
    parents = {os.path.dirname(path) for path in paths}
    if "" in parents:
        return ""
    folder = os.path.commonprefix([os.path.join(parent, "") for parent in parents])  # noqa: RUF071  (cut to whole folders below)
    return folder[: folder.rfind(os.sep) + 1]


def identity(path: str) -> str:
    """One key for all spellings of a path. A link to a file counts as a file of its own."""
    if is_url(path):
        return path
    folder, name = os.path.split(os.path.expanduser(path))
    return os.path.join(os.path.realpath(folder), name)
