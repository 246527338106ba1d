"""Jobs at their edges: inputs that change under them, names that lead to one file, streams and signals of a shell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_job_runs import RUN, Echo, answers, folder, told
from vlm_batch.cli import main as cli
from vlm_batch.types import Request, Result

__all__ = ["folder"]  # the fixture


class Growing(Echo):
    """Its input has ``lines`` appended once some rows are answered."""

    def __init__(self, path: Path, lines: str, after: int = 5, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.path, self.lines, self.after = path, lines, after

    def answer(self, request: Request) -> Result:
        if len(self.asked) == self.after:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(self.lines)
        return super().answer(request)


def line(row_id: str, image: str = "new.png") -> str:
    return json.dumps({"id": row_id, "image": image, "kind": "k"}) + "\n"


@pytest.mark.parametrize("again", ["r0", "r19"], ids=["answered", "in flight or waiting"])
def test_ids_that_are_appended_while_a_job_runs_are_skipped(
    folder: Path, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``r19`` is in flight, or to be asked, when a row with its id comes."""
    asked = Growing(folder / "rows.jsonl", line(again) * 3 + line("r20"))
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=asked) == cli.FAILED  # two pictures are bad
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(21)}
    assert told("out.jsonl")[again][0].endswith(f"p{again[1:]}.png")  # the first row's, and not the appended one's
    said = capsys.readouterr().out
    assert f"3 rows skipped whose id had come before: '{again}'" in said and "21 requests" in said


def test_a_job_whose_input_was_given_ids_again_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was stopped, after its input had grown by ids that it knew, is not refused for them."""
    stopped = Growing(folder / "rows.jsonl", line("r0") + line("r18") + line("r20"), stop_after=8)
    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=stopped) == cli.INTERRUPTED
    assert len(answers("out.jsonl")) == 8
    on = Echo()
    assert cli.main([*RUN, "--out", "out.jsonl", "--resume"], open_batcher=on) == cli.FAILED
    assert set(told("out.jsonl")) == {f"r{number}" for number in range(21)} and len(on.asked) == 13
    assert "2 rows skipped" in capsys.readouterr().out
    assert cli.main([*RUN, "--out", "new.jsonl"], open_batcher=Echo()) == cli.USAGE  # of a new job it is a mistake


def test_rows_that_cannot_be_read_on_end_a_job_with_what_was_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(Echo):
        def as_completed(self, requests: object) -> Iterator[Result]:
            yield Result(request_id="refused-0", finish_reason="error", error="OSError: gone")

    assert cli.main([*RUN, "--out", "out.jsonl"], open_batcher=Ended()) == cli.USAGE
    assert "OSError: gone" in capsys.readouterr().err
