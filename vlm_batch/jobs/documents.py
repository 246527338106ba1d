"""One text a document, made of its pages' answers.

The pages' answers are an output of a job by itself (``pages.jsonl``), from which interrupted jobs go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from vlm_batch.checks import is_whole
from vlm_batch.inputs.fetch import is_address, is_data_uri
from vlm_batch.jobs.answers import result_of
from vlm_batch.jobs.boxes import BoxForm, Region
from vlm_batch.jobs.lines import CannotWrite, Record, replace_file
from vlm_batch.jobs.plan import Job
from vlm_batch.jobs.rows import Ids, InvalidJob, count_of, spelled
from vlm_batch.jobs.sinks import AnswerFile, Sink, whole
from vlm_batch.jobs.stamps import Stamp

#: The pages' answers, in the folder of the documents.
PAGES = "pages.jsonl"
DOCUMENT_FORMS = ("md", "txt", "json")
#: Most and fewest characters of an answer's end that are looked for in what came before, in pieces of so many, and the
#: share of pieces found there that makes a loop. In prose the share is 0.02 to 0.06; a long table's rows may have 0.8, but
#: whole answers are not asked about.
LOOP_TAIL, LOOP_LEAST, PIECE, LOOP_SHARE = 400, 100, 10, 0.6
#: Most bytes of a file's name; file systems take 255.
MOST_NAME_BYTES = 200


@dataclass(frozen=True)
class PageText:
    """One page's answer; ``page`` is None where the document has no pages that could be counted: a picture, a failure."""

    page: int | None
    text: str
    error: str | None = None
    finish_reason: str | None = None
    attempts: int = 1
    size: tuple[int, int] | None = None
    regions: tuple[Region, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether the answer was cut in a loop."""
        if self.error is not None or self.finish_reason != "length":
            return False
        return is_loop(self.text)


@dataclass
class _Document:
    """A document's answered pages, and how many are to come."""

    num_left: int
    pages: list[PageText] = field(default_factory=list)


@dataclass(frozen=True)
class Lacking:
    """The pages that a written document lacks, and those that loop."""

    document: str
    failed: tuple[int | None, ...]
    repeating: tuple[int | None, ...]

    def said(self) -> str:
        parts = []
        if self.failed:
            parts.append(f"lacks {_named(self.failed)}")
        if self.repeating:
            parts.append(f"repeats itself to the end of {_named(self.repeating)}")
        return f"{self.document} {' and '.join(parts)}"


def _named(pages: tuple[int | None, ...]) -> str:
    if None in pages:
        return "its text"
    noun = "page" if len(pages) == 1 else "pages"
    more = ", ..." if len(pages) > 8 else ""
    return f"{noun} {', '.join(map(str, pages[:8]))}{more}"


def is_loop(text: str) -> bool:
    """Whether the end of a text has been there before, as of OCR models that have lost their place.

    They seldom repeat themselves to the letter, so pieces are compared, by characters: not all scripts have words.
    """
    num_last = min(LOOP_TAIL, len(text) // 2)
    if num_last < LOOP_LEAST:
        return False
    earlier = set(_pieces(text[:-num_last]))
    last = list(_pieces(text[-num_last:]))
    num_again = sum(map(earlier.__contains__, last))
    return num_again >= LOOP_SHARE * len(last)


def _pieces(text: str) -> Iterator[str]:
    for begin in range(len(text) - PIECE + 1):
        yield text[begin : begin + PIECE]


class Documents(Sink):
    """Files with the text of whole documents, beside ``pages.jsonl``.

    Args:
        folder: Where the files go; made if it is not there.
        job: The pages to come, for how many each document has.
        form: One of ``DOCUMENT_FORMS``.
        has_marks: Whether each page begins with a mark of its number.
        facts: The model's name and what was asked, for JSON.
        boxes: How the model writes boxes: each document has a file of its pages' regions then. None without.
    """

    def __init__(
        self,
        folder: Path,
        job: Callable[[], Job],
        *,
        form: str,
        has_marks: bool,
        facts: Mapping[str, Any],
        boxes: BoxForm | None,
    ) -> None:
        self.folder = folder
        self._job = job
        self._form = form
        self._has_marks = has_marks
        self._facts = facts
        self._boxes = boxes
        self._answers = AnswerFile(folder / PAGES, whole)
        self._open: dict[str, _Document] = {}
        self._names: dict[str, Path] = {}
        self.num_written = 0
        self.lacking: list[Lacking] = []
        self.name = self._answers.name

    @property
    def num_incomplete(self) -> int:
        return len(self._open)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidJob(
                f"--out {self.folder} is a file; name a folder for the documents' texts"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidJob(
                f"cannot make the folder {self.folder}: {error.strerror}"
            ) from error
        return self._answers.locked()

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        self._answers.check(settings, resume=resume, overwrite=overwrite, force=force)
        counts = self._count_pages()
        self._open = {name: _Document(count) for name, count in counts.items()}
        kept = {} if overwrite else self._kept_names()
        self._names = names_of(counts, f".{self._form}", kept)
        if resume or overwrite:
            return
        there = list(filter(Path.exists, self._paths()))
        if there:
            raise InvalidJob(
                f"{count_of(len(there), 'file')} would be replaced, {there[0]} first: --resume goes on with an earlier "
                "run's, --overwrite replaces them"
            )

    def _kept_names(self) -> dict[str, PurePosixPath]:
        """Return the files of earlier runs, without suffixes: a text keeps its name when a namesake joins later."""
        kept = {}
        for record in self._answers.records():
            file = PurePosixPath(str(record.get("file") or ""))
            if file.name and _is_below(file):
                kept[str(record.get("document"))] = file
        return kept

    def _count_pages(self) -> Counter[str]:
        counts = Counter[str]()
        for item in self._job().items(scan=True):
            counts[_document_of(item.row.columns, item.id)] += 1
        return counts

    def _paths(self) -> Iterator[Path]:
        """Yield every file that is written."""
        for name in self._names:
            yield from self._paths_of(name)

    def _paths_of(self, name: str) -> list[Path]:
        """Return a document's files: its text, and its regions if they are asked for."""
        text = self.folder / self._names[name]
        if self._boxes is None:
            return [text]
        return [text, boxes_path(text)]

    def existing(self) -> tuple[Ids, Ids]:
        return self._answers.existing()

    def stamps(self) -> Mapping[int, Stamp]:
        return self._answers.stamps()

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        if overwrite:
            for path in self._paths():
                path.unlink(missing_ok=True)
        self._answers.begin(settings, overwrite=overwrite, drop_errors=drop_errors)
        for record in self._answers.records():  # of earlier runs
            self._take(record, is_new=False)

    def stamp(self, line: Record) -> None:
        self._answers.stamp(line)

    def append(self, record: Record) -> None:
        columns = record["columns"]
        name = _document_of(columns, str(record["id"]))
        record = {**record, "document": name, "page": columns.get("page")}
        if name in self._names:  # else its source broke off after it was counted
            record["file"] = self._names[name].with_suffix("").as_posix()
        if "page_size" in columns:  # before its publisher enlarged it
            record["image_sizes"] = [columns["page_size"]]
        self._answers.append(record)
        self._take(record, is_new=True)

    def _take(self, record: Record, *, is_new: bool) -> None:
        name = str(record.get("document"))
        document = self._open.get(name)
        if document is None:  # of another job's rows
            return
        document.pages.append(_page_of(record, self._boxes))
        document.num_left -= 1
        if document.num_left > 0:
            return
        del self._open[name]
        document.pages.sort(key=lambda page: page.page or 0)
        self._write_files(name, document.pages, is_new=is_new)
        failed, repeating = _failed(document.pages), _repeating(document.pages)
        if failed or repeating:
            self.lacking.append(Lacking(name, failed, repeating))

    def _write_files(self, name: str, pages: list[PageText], *, is_new: bool) -> None:
        """Write a document's files; of an earlier run's pages, only those that are not there."""
        text, *boxes = self._paths_of(name)
        if is_new or not text.exists():
            _write(text, self._text(name, pages))
            self.num_written += 1
        for path in boxes:
            if is_new or not path.exists():
                _write(path, boxes_json(name, pages, self._facts))

    def _text(self, name: str, pages: list[PageText]) -> str:
        if self._form == "json":
            return as_json(name, pages, self._facts)
        return as_text(pages, self._form, has_marks=self._has_marks)

    def finish(self) -> None:
        self._answers.finish()

    def close(self) -> None:
        self._answers.close()


def _is_below(file: PurePosixPath) -> bool:
    """Whether a path leads to no other folder than those below."""
    return not file.is_absolute() and ".." not in file.parts


def _failed(pages: Iterable[PageText]) -> tuple[int | None, ...]:
    return tuple(page.page for page in pages if page.error is not None)


def _repeating(pages: Iterable[PageText]) -> tuple[int | None, ...]:
    return tuple(page.page for page in pages if page.repeats)


def _write(path: Path, text: str) -> None:
    """Write a file in a folder that is made if it is not there. Raises CannotWrite."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(
            f"cannot make the folder {path.parent}: {error.strerror}"
        ) from error
    replace_file(path, spelled(text).encode())


def _document_of(columns: Mapping[str, Any], row_id: str) -> str:
    """Return the document of a page; one that cannot be read at all is its own row."""
    return str(columns.get("path") or row_id)


def _page_of(record: Record, boxes: BoxForm | None) -> PageText:
    result = result_of(record)
    text = result.text.strip()
    size = _first_size(record.get("image_sizes"))
    regions: list[Region] = []
    if boxes is not None and size is not None and result.error is None:
        seen = _first_size(record.get("model_image_sizes"))
        regions = boxes.regions(text, size, seen)
    page = record.get("page")
    return PageText(
        page=page if is_whole(page) else None,
        text=text,
        error=result.error,
        finish_reason=result.finish_reason,
        attempts=record.get("attempts", 1),
        size=size,
        regions=tuple(regions),
    )


def _first_size(sizes: Any) -> tuple[int, int] | None:
    """Return the first of an answer's sizes; None if there is none."""
    try:
        (width, height), *_ = sizes
        size = int(width), int(height)
    except (TypeError, ValueError, OverflowError):
        return None
    return size if min(size) > 0 else None


# ---- what is written ----


def as_text(pages: list[PageText], form: str, *, has_marks: bool) -> str:
    """Join pages to Markdown ("md") or plain text ("txt")."""
    marks = has_marks and len(pages) > 1
    parts = [_part(page, form, has_mark=marks) for page in pages]
    return "\n\n".join(parts) + "\n"


def _part(page: PageText, form: str, *, has_mark: bool) -> str:
    name = "the document" if page.page is None else f"page {page.page}"
    lines = []
    if has_mark:
        lines.append(_mark(name, form))
    if page.error is not None:
        lines.append(f"[{name} could not be read: {_one_line(page.error)}]")
        return "\n\n".join(lines)
    if page.repeats:
        lines.append(_mark(f"{name} repeats itself to its end", form))
    if page.text:
        lines.append(page.text)
    return "\n\n".join(lines)


def _mark(said: str, form: str) -> str:
    if form == "md":
        return f"<!-- {said} -->"
    return f"----- {said} -----"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def as_json(name: str, pages: list[PageText], facts: Mapping[str, Any]) -> str:
    """Spell a document as JSON: its pages, and those it lacks."""
    whole = {
        "document": name,
        **facts,
        "missing": _failed(pages),
        "pages": list(map(_facts_of_page, pages)),
    }
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


def _facts_of_page(page: PageText) -> dict[str, Any]:
    return {
        "page": page.page,
        "text": page.text if page.error is None else None,
        "error": page.error,
        "finish_reason": page.finish_reason,
        "repeats": page.repeats,
        "attempts": page.attempts,
        "size": page.size,
    }


def boxes_json(name: str, pages: list[PageText], facts: Mapping[str, Any]) -> str:
    """Spell a document's regions as JSON, page by page."""
    told = []
    for page in pages:
        regions = [vars(region) for region in page.regions]
        told.append(
            {
                "page": page.page,
                "size": page.size,
                "error": page.error,
                "regions": regions,
            }
        )
    whole = {"document": name, **facts, "pages": told}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


# ---- where it is written ----


def boxes_path(text: Path) -> Path:
    """Return the file of a document's regions, beside its text."""
    return text.with_suffix(".boxes.json")


def names_of(
    documents: Iterable[str],
    suffix: str,
    kept: Mapping[str, PurePosixPath] = MappingProxyType({}),
) -> dict[str, Path]:
    """Choose a file for each document: below one folder, as the documents lie to each other, no two the same.

    ``a/x.pdf`` becomes ``a/x.md``; beside an ``a/x.png`` it becomes ``a/x.pdf.md``. Documents of earlier runs have the
    names that are ``kept``, without suffixes.
    """
    documents = list(documents)
    places = dict(zip(documents, _places(documents), strict=True))
    stems = Counter(_key(place.with_suffix("")) for place in places.values())
    chosen: dict[str, PurePosixPath] = {}
    for name, place in places.items():
        is_alone = stems[_key(place.with_suffix(""))] == 1
        chosen[name] = place.with_name(place.stem) if is_alone else place
    chosen |= kept
    taken: set[str] = set()
    files: dict[str, Path] = {}
    # those of earlier runs first
    for name in sorted(places, key=lambda name: name not in kept):
        place = chosen[name]
        files[name] = _free_name(place.parent, place.name, suffix, taken)
    return {name: files[name] for name in documents}


def _free_name(folder: PurePosixPath, base: str, suffix: str, taken: set[str]) -> Path:
    base = _short(base)
    names = itertools.chain(
        [base], (f"{base}-{number}" for number in itertools.count(2))
    )
    for name in names:
        place = folder / f"{name}{suffix}"
        keys = {_key(place), _key(place.with_suffix(".boxes.json"))}
        # the pages' answers, and the files beside them
        is_ours = _key(place).startswith(f"{PAGES}.")
        if taken.isdisjoint(keys) and not is_ours:
            break
    taken |= keys
    return Path(place)


def _key(place: PurePosixPath) -> str:
    """Return one key for the names that a file system without cases takes for one."""
    return str(place).casefold()


def _short(base: str) -> str:
    data = base.encode("utf-8", "surrogateescape")
    if len(data) <= MOST_NAME_BYTES:
        return base
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    return f"{data[:MOST_NAME_BYTES].decode('utf-8', 'ignore')}-{digest}"


def _places(documents: list[str]) -> Iterator[PurePosixPath]:
    """Yield each document's relative place; what is no file has one at the top."""
    files = itertools.filterfalse(is_address, documents)
    folders = {name: _folder_of(name) for name in files}
    top = os.path.commonpath(folders.values()) if folders else ""
    for name in documents:
        if name in folders:
            below = os.path.relpath(folders[name], top)
            yield PurePosixPath(below) / os.path.basename(name)
        else:
            yield PurePosixPath(_name_of_url(name))


def _folder_of(file: str) -> str:
    return os.path.realpath(os.path.dirname(os.path.expanduser(file)) or ".")


def _name_of_url(url: str) -> str:
    if is_data_uri(url):
        return "document"
    last = url.partition("?")[0].partition("#")[0].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "_", last).strip(".") or "document"
