"""Files named by arguments (files, folders, globs, URLs), each once."""

from __future__ import annotations

import glob
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from PIL import Image

from vlm_batch.assets import AUDIO_SUFFIXES, VIDEO_SUFFIXES
from vlm_batch.inputs import heif
from vlm_batch.inputs.fetch import is_address
from vlm_batch.jobs.rows import InvalidJob, count_of

#: Files that are skipped when a pattern names them among pictures.
TEXT_SUFFIXES = (
    ".txt",
    ".caption",
    ".md",
    ".log",
    ".html",
    ".xml",
    ".yaml",
    ".yml",
    ".json",
)
ARCHIVE_SUFFIXES = (".zip", ".7z", ".rar", ".gz", ".zst")
OFFICE_SUFFIXES = (".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".pptx")
NO_PICTURES = TEXT_SUFFIXES + ARCHIVE_SUFFIXES + OFFICE_SUFFIXES


@dataclass
class Found:
    """Files found so far, and those skipped."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    num_folders_again: int = 0
    num_links: int = 0

    def add(self, path: str) -> bool:
        """Add a file; return False for another spelling or link."""
        key = identity(path)
        is_new = key not in self.files
        self.files.add(key)
        return is_new

    def look_for(
        self, path: str, *, suffixes: Collection[str], recursive: bool
    ) -> Iterator[str]:
        """Yield a path's new files, a folder's by suffix."""
        if os.path.isdir(path):
            for file in self._walk(path, recursive):
                suffix = _suffix_of(file)
                yield from self._new(file, is_wanted=suffix in suffixes)
            return
        is_no_picture = _suffix_of(path) in NO_PICTURES and os.path.lexists(path)
        yield from self._new(path, is_wanted=not is_no_picture)

    def _new(self, file: str, *, is_wanted: bool) -> Iterator[str]:
        """Yield a file that is wanted and new, and count others."""
        if not is_wanted:
            self.skipped[_suffix_of(file)] += 1
        elif self.add(file):
            yield file
        else:
            self.num_links += os.path.islink(file)

    def _walk(self, folder: str, recursive: bool) -> Iterator[str]:
        """Yield a folder's files, sorted, links last, each folder's once."""
        walk = os.walk(folder, onerror=self._add_unreadable, followlinks=True)
        for where, folders, names in walk:
            shown = sorted(itertools.filterfalse(_is_hidden, folders))
            folders[:] = shown if recursive else []
            real = os.path.realpath(where)
            if real in self.folders:
                self.num_folders_again += 1
                folders.clear()
                continue
            self.folders.add(real)
            visible = sorted(itertools.filterfalse(_is_hidden, names))
            paths = [os.path.join(where, name) for name in visible]
            for path in sorted(paths, key=os.path.islink):
                if os.path.isfile(path):
                    yield path
                else:  # a link that leads nowhere, a pipe
                    self.unreadable.append(path)

    def _add_unreadable(self, error: OSError) -> None:
        self.unreadable.append(str(error.filename))

    def said(self) -> str:
        """Describe skipped files in one line."""
        said = []
        for suffix, count in self.skipped.most_common(6):
            said.append(f"{count} {suffix or 'without a suffix'}{_hint(suffix)}")
        others = self.skipped.most_common()[6:]
        if others:
            said.append(f"{sum(dict(others).values())} others")
        if self.num_folders_again:
            folders = count_of(self.num_folders_again, "folder")
            said.append(f"{folders} that links lead to again")
        if self.num_links:
            links = count_of(self.num_links, "link")
            said.append(f"{links} to files that are there already")
        said += [f"{folder} (cannot be read)" for folder in self.unreadable]
        return f"skipped: {', '.join(said)}" if said else ""


def _suffix_of(file: str) -> str:
    if is_address(file):
        return ""
    return os.path.splitext(file)[1].lower()


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _hint(suffix: str) -> str:
    """Say how files of a suffix are read, in brackets."""
    hints: tuple[tuple[tuple[str, ...], str], ...] = (
        (VIDEO_SUFFIXES, "--videos takes them"),
        (AUDIO_SUFFIXES, "--audios takes them"),
        ((".pdf",), "--pdf takes them"),
        ((".parquet", ".jsonl", ".tar"), f"a pattern takes them: '*{suffix}'"),
        ((".json",), "tables are read as JSON lines: .jsonl"),
        ((".txt",), "a list of paths is read from standard input: run - < FILE"),
        (ARCHIVE_SUFFIXES, "to be unpacked first"),
        (OFFICE_SUFFIXES, "to be saved as PDF or CSV first"),
        (heif.SUFFIXES, f"{heif.REMEDY} reads them"),
    )
    for suffixes, hint in hints:
        if suffix in suffixes:
            return f" ({hint})"
    kind = Image.EXTENSION.get(suffix)  # of pictures, but not one of FORMATS
    if kind is None:
        return ""
    return f" ({kind} is not read here: to be saved as PNG first)"


def expanded(argument: str) -> list[str]:
    """Return a pattern's matches, or the normalised argument: jobs resume by names."""
    if is_address(argument):
        return [argument]
    argument = _normalised(argument)
    if os.path.lexists(argument):
        return [argument]
    matches = glob.glob(argument, recursive=True)
    return sorted(matches) or [argument]


def _normalised(path: str) -> str:
    if not path:
        return path
    path = os.path.expanduser(path)
    if os.pardir in path.split(os.sep):  # which a link may lead elsewhere
        return path
    return os.path.normpath(path)


def check_there(arguments: Sequence[str]) -> None:
    """Raise InvalidJob for a missing folder or pattern, or if no named file exists."""
    missing = list(filter(is_missing, arguments))
    must_be_there = list(itertools.filterfalse(_is_named_file, missing))
    if must_be_there:
        raise _nothing_at(must_be_there[0])
    if missing and len(missing) == len(arguments):
        raise _nothing_at(missing[0])


def is_missing(argument: str) -> bool:
    """Whether no file or folder has this name, and none fits this pattern."""
    if argument == "-" or is_address(argument):
        return False
    return not any(map(os.path.lexists, expanded(argument)))


def _is_named_file(argument: str) -> bool:
    """Whether an argument is one file's name: among others, a missing one is a failed row."""
    return not glob.has_magic(argument) and bool(os.path.splitext(argument)[1])


def _nothing_at(argument: str) -> InvalidJob:
    if glob.has_magic(argument):
        return InvalidJob(f"nothing matches {argument}")
    return InvalidJob(f"{argument} does not exist")


def without_query(path: str) -> str:
    """Return a path as it is, and a URL without what follows its path."""
    if is_address(path):
        return path.partition("?")[0]
    return path


def kind_of(path: str) -> str:
    """Return "image", "video" or "audio" by the suffix."""
    name = path.partition("?")[0].lower()
    if name.endswith(VIDEO_SUFFIXES):
        return "video"
    if name.endswith(AUDIO_SUFFIXES):
        return "audio"
    return "image"


def common_folder(paths: Sequence[str]) -> str:
    """Return the deepest folder that paths share, with a separator at its end; "" if one names no folder."""
    parents = set(map(os.path.dirname, paths))
    if "" in parents:
        return ""
    folders = [os.path.join(parent, "") for parent in parents]
    shared = os.path.commonprefix(folders)  # noqa: RUF071  (cut to whole folders below)
    return shared[: shared.rfind(os.sep) + 1]


def identity(path: str) -> str:
    """Return one key for a path's spellings."""
    if is_address(path):
        return path
    return os.path.realpath(os.path.expanduser(path))


def stat_of(path: str) -> os.stat_result | None:
    """Return a file's facts; None if there is none."""
    if is_address(path):
        return None
    try:
        return os.stat(os.path.expanduser(path))
    except (OSError, ValueError):
        return None


def is_file_of(path: str, there: os.stat_result | None) -> bool:
    """Whether a path leads to a file, by links of either kind."""
    if there is None:
        return False
    here = stat_of(path)
    return here is not None and os.path.samestat(here, there)


def is_same_file(path: str, other: str) -> bool:
    """Whether two paths lead to one file, which need not exist."""
    return identity(path) == identity(other) or is_file_of(path, stat_of(other))
