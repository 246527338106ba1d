"""Text files beside the pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_batch.assets import AUDIO_SUFFIXES, VIDEO_SUFFIXES
from vlm_batch.inputs.images import picture_suffixes
from vlm_batch.jobs import journal
from vlm_batch.jobs.lines import Record, replace_file
from vlm_batch.jobs.rows import Ids, InvalidJob
from vlm_batch.jobs.sinks import Sink
from vlm_batch.jobs.stamps import Stamp, Stamps

#: Each row's id, and the medium on disk that it is about; "" where there is none, or several.
Pictures = Callable[[], Iterable[tuple[str, str]]]


class Sidecars(Sink):
    """Text files with answers beside pictures, as captioning tools read them.

    ``sink`` records answered rows; without one, existing files do.
    """

    def __init__(
        self, suffix: str, folder: str, pictures: Pictures, sink: Sink | None
    ) -> None:
        self._suffix = f".{suffix.removeprefix('.')}"
        if not _is_of_text(self._suffix):
            raise InvalidJob(
                f"--sidecar {suffix} is no suffix for text; .txt and .caption are"
            )
        self._pictures = pictures
        self._beside = Path(folder or ".") / f".vlm-batch{self._suffix}"
        self._header = self._beside if sink is None else Path(sink.name)
        self._sink = sink or _TextFiles(self._suffix, self._beside, self._texts)
        self.name = self._sink.name

    def path_of(self, picture: str) -> Path:
        return Path(picture).expanduser().with_suffix(self._suffix)

    def _texts(self) -> Iterable[tuple[str, Path]]:
        for row_id, picture in self._pictures():
            yield row_id, self.path_of(picture)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        journal.check_writable(self._beside)
        # jobs with outputs of their own may share these files
        with journal.locked(self._beside), self._sink.locked():
            yield

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None:
        num_there = sum(map(Path.exists, self._checked_paths()))
        self._sink.check(settings, resume=resume, overwrite=overwrite, force=force)
        if not num_there:
            return
        if resume and not force:  # or files of another job would be replaced
            journal.check_same(self._header, settings)
        if not resume and not overwrite:
            raise InvalidJob(
                f"{num_there} pictures have {self._suffix} files already: --resume keeps them and asks about the others, "
                "--overwrite replaces them"
            )

    def _checked_paths(self) -> Iterator[Path]:
        """Yield each row's file. Raises InvalidJob if a row has none, or two have the same."""
        taken: dict[Path, str] = {}
        for row_id, picture in self._pictures():
            if not picture:
                raise InvalidJob(
                    f"--sidecar needs one picture on disk for each row; {row_id} has none or several"
                )
            path = self.path_of(picture)
            if path in taken:
                raise InvalidJob(
                    f"{path} would hold the answers for {taken[path]} and {row_id}: ask them in two jobs"
                )
            taken[path] = row_id
            yield path

    def existing(self) -> tuple[Ids, Ids]:
        return self._sink.existing()

    def stamps(self) -> Mapping[int, Stamp]:
        return self._sink.stamps()

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        self._sink.begin(settings, overwrite=overwrite, drop_errors=drop_errors)

    def stamp(self, line: Record) -> None:
        self._sink.stamp(line)

    def append(self, record: Record) -> None:
        if not record.get("error"):
            pictures = record["images"] or record["videos"] or record["audios"]
            text = str(record["text"]).strip() + "\n"
            replace_file(
                self.path_of(pictures[0]), text.encode("utf-8", "backslashreplace")
            )
        self._sink.append(record)

    def finish(self) -> None:
        self._sink.finish()

    def close(self) -> None:
        self._sink.close()


def _is_of_text(suffix: str) -> bool:
    """Whether a suffix, with its dot, may be one of texts beside media."""
    of_media = picture_suffixes().union(VIDEO_SUFFIXES, AUDIO_SUFFIXES)
    says_something = bool(suffix[1:].strip(". "))
    return says_something and suffix.lower() not in of_media


class _TextFiles(Sink):
    def __init__(
        self, suffix: str, header: Path, texts: Callable[[], Iterable[tuple[str, Path]]]
    ) -> None:
        self.name = f"*{suffix}"
        self._header = header
        self._texts = texts
        self._stamps = Stamps(header)

    def check(
        self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, force: bool
    ) -> None: ...

    def existing(self) -> tuple[Ids, Ids]:
        return Ids(row_id for row_id, path in self._texts() if path.exists()), Ids()

    def stamps(self) -> Mapping[int, Stamp]:
        return self._stamps.read()

    def begin(
        self, settings: Mapping[str, Any], *, overwrite: bool, drop_errors: bool
    ) -> None:
        # or a job that is killed and resumed would take old answers for its own
        if overwrite:
            for _, path in self._texts():
                path.unlink(missing_ok=True)
            self._stamps.clear()
        journal.write_header(self._header, settings)

    def stamp(self, line: Record) -> None:
        self._stamps.add(line)

    def close(self) -> None:
        self._stamps.close()
