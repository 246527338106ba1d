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


@dataclass
class Found:
    """Paths in order, each file once, and what folders hold besides: files by suffix, folders met again through a link."""

    paths: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    num_folders_again: int = 0
    known: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def add(self, path: str) -> bool:
        """Add a file; False if it is there already, in whatever spelling."""
        key = identity(path)
        if key in self.known:
            return False
        self.known.add(key)
        self.paths.append(path)
        return True

    def look_for(self, path: str, *, suffixes: Collection[str], recursive: bool) -> list[str]:
        """The new files that a name stands for: a file, a URL and the name of nothing as they are, a folder by suffixes.

        Linked folders are looked through like others, but none twice. Files whose suffix says that they are text, archives or
        office documents are skipped.
        """
        begin = len(self.paths)
        if not os.path.isdir(path):
            suffix = "" if is_url(path) else os.path.splitext(path)[1].lower()
            if suffix in TEXT_SUFFIXES + ARCHIVE_SUFFIXES + OFFICE_SUFFIXES and os.path.lexists(path):
                self.skipped[suffix] += 1
            else:
                self.add(path)
            return self.paths[begin:]
        for file in _walk(path, self, recursive):
            suffix = os.path.splitext(file)[1].lower()
            if suffix in suffixes:
                self.add(file)
            else:
                self.skipped[suffix] += 1
        return self.paths[begin:]

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


def _walk(folder: str, found: Found, recursive: bool) -> Iterator[str]:
    """Files of a folder and of those in it, sorted, hidden ones left out; what cannot be read is noted in ``found``."""
    real = os.path.realpath(folder)
    if real in found.seen:
        found.num_folders_again += 1
        return
    found.seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        found.unreadable.append(folder)
        return
    inside = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = os.path.join(folder, entry.name)
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:  # a link that leads to itself
            is_folder = is_file = False
        if is_folder:
            inside.append(path)
        elif is_file:
            yield path
        else:
            found.unreadable.append(path)
    for path in inside if recursive else ():
        yield from _walk(path, found, recursive)
