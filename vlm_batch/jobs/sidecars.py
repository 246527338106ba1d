"""Text files beside the pictures that they are about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vlm_batch.assets import VIDEO_SUFFIXES
from vlm_batch.jobs import journal
from vlm_batch.jobs.files import picture_suffixes
from vlm_batch.jobs.lines import Record, replace_file
from vlm_batch.jobs.rows import Ids, InvalidJob
from vlm_batch.jobs.sinks import Sink


class Sidecars(Sink):
    """A text file beside each picture, with its answer: what captioning tools read. Failures write nothing.

    Where there is another sink, too, that one knows what is done; else the files themselves do.
    """

    def __init__(
        self, suffix: str, folder: str, paths: Callable[[], Iterable[tuple[str, str]]], sink: Sink | None
    ) -> None:
        self._suffix = suffix if suffix.startswith(".") else f".{suffix}"
        if self._suffix.lower() in picture_suffixes().union(VIDEO_SUFFIXES) or not self._suffix[1:].strip(". "):
            raise InvalidJob(f"--sidecar {suffix} is no suffix for text; .txt and .caption are")
        self._paths = paths
        self._sink = sink
        self.name = sink.name if sink is not None else f"*{self._suffix}"
        self._header = Path(folder or ".") / f".vlm-batch{self._suffix}"
        self._stamps = journal.Stamps(self._header)

    def path_of(self, picture: str) -> Path:
        """The file for a picture's answer."""
        return Path(picture).expanduser().with_suffix(self._suffix)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        journal.check_writable(self._header)
        return self._sink.locked() if self._sink is not None else journal.locked(self._header)

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool) -> None:
        taken: dict[Path, str] = {}
        there = 0
        for row_id, picture in self._paths():
            if not picture:
                raise InvalidJob(f"--sidecar needs one picture on disk for each row; {row_id} has none or several")
            path = self.path_of(picture)
            if path in taken:
                raise InvalidJob(f"{path} would hold the answers for {taken[path]} and {row_id}: ask them in two jobs")
            taken[path] = row_id
            there += path.exists()
        if self._sink is not None:
            self._sink.check(settings, resume=resume, overwrite=overwrite, force=force)
        if there and not resume and not overwrite:
            raise InvalidJob(
                f"{there} pictures have {self._suffix} files already: --resume keeps them and asks about the others, "
                "--overwrite replaces them"
            )
        if there and resume and not force:  # or files of another job would be replaced
            journal.check_same(self._header if self._sink is None else Path(self._sink.name), settings)

    def existing(self) -> tuple[Ids, Ids]:
        if self._sink is not None:
            return self._sink.existing()
        return Ids(row_id for row_id, picture in self._paths() if self.path_of(picture).exists()), Ids()

    def stamps(self) -> Mapping[int, int]:
        return self._sink.stamps() if self._sink is not None else self._stamps.read()

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool) -> None:
        if self._sink is not None:
            self._sink.begin(settings, overwrite=overwrite, drop_errors=drop_errors)
            return
        if overwrite:  # or a job that is killed and resumed would take old answers for its own
            for _, picture in self._paths():
                self.path_of(picture).unlink(missing_ok=True)
            self._stamps.clear()
        journal.write_header(self._header, settings)

    def stamp(self, row_id: str, stamps: list[journal.Stamp]) -> None:
        if self._sink is not None:
            self._sink.stamp(row_id, stamps)
        else:
            self._stamps.add(row_id, stamps)

    def append(self, record: Record) -> None:
        if not record.get("error"):
            pictures = record["images"] or record["videos"]
            text = str(record["text"]).strip() + "\n"
            replace_file(self.path_of(pictures[0]), text.encode("utf-8", "backslashreplace"))
        if self._sink is not None:
            self._sink.append(record)

    def finish(self) -> None:
        if self._sink is not None:
            self._sink.finish()

    def close(self) -> None:
        self._stamps.close()
        if self._sink is not None:
            self._sink.close()
