"""Batches: files of requests, answered by the doors' own exchanges while nobody else needs the batch.

The journal is what was answered: a row's line in the output or the error file, appended whole. What has none is asked
again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from vlm_batch.jobs.lines import CannotWrite, LineFile, read_answers
from vlm_batch.jobs.rows import Ids
from vlm_batch.server.batch_lines import (
    BatchRow,
    add_usage,
    check_lines,
    errors_of,
    no_usage,
    rows_in,
)
from vlm_batch.server.bodies import check_body
from vlm_batch.server.door import Core
from vlm_batch.server.edge import MAX_NESTED, MAX_VALUES, ByteQuota, Entry, NoRoom
from vlm_batch.server.errors import ApiError, json_bytes, refusing
from vlm_batch.server.exchange import Exchange
from vlm_batch.server.private import AGE, new_id
from vlm_batch.server.stored import Described, FileStore, Record
from vlm_batch.server.wire import Body

logger = logging.getLogger("vlm_batch.server")

#: Paths -> what their rows are read as, and what answers them.
Endpoints: TypeAlias = Mapping[str, tuple[type[Body], type[Exchange]]]

#: Statuses that say nothing about a row: it is asked again after so many seconds.
TRANSIENT, RETRY_SECONDS = (429, 503), 2.0
#: The part of the bytes of waiting requests that rows may have.
PART_OF_ROWS = 1 / 4
#: Most batches of one owner that have not ended.
MAX_OPEN_BATCHES = 64
#: Seconds between looks at what is over.
SWEEP_SECONDS = 60.0
ENDED = ("completed", "failed", "expired", "cancelled")


class Stopping(Exception):
    """The server stops; a later one goes on."""


class DescribedBatch(Described):
    status: str
    endpoint: str
    input_file_id: str
    request_counts: dict[str, int]
    usage: dict[str, Any] | None


class BatchRecord(Record):
    """Facts that a later process goes on with."""

    client: int
    shown: DescribedBatch
    output: str
    errors: str
    age: int
    ends_as: str


@dataclass(eq=False)
class BatchRun:
    """One batch.

    Attributes:
        owner: Whose it is.
        client: Its owner's number as a client.
        shown: OpenAI's description of it.
        output: The id of the file with answers, which is shown at the end; ``errors`` is that of the others.
        age: Seconds for which both are kept.
        ends_as: The state in which it will end.
        is_left: Set once it is to be cancelled.
    """

    owner: str
    client: int
    shown: dict[str, Any]
    output: str = field(default_factory=lambda: new_id("file").replace("_", "-"))
    errors: str = field(default_factory=lambda: new_id("file").replace("_", "-"))
    age: int = AGE
    ends_as: str = "completed"
    is_left: asyncio.Event = field(default_factory=asyncio.Event)
    done: Ids = field(default_factory=Ids)
    files: dict[str, LineFile] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.shown["id"])

    @property
    def status(self) -> str:
        return str(self.shown["status"])

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def record(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in BatchRecord.model_fields}

    def count(self, line: Mapping[str, Any]) -> None:
        """Count a row that was answered, or cannot be."""
        self.done.add(str(line["custom_id"]))
        response = line["response"]
        is_answered = response is not None and response["status_code"] == 200
        counts = self.shown["request_counts"]
        counts["completed" if is_answered else "failed"] += 1
        if is_answered:
            add_usage(self.shown["usage"], response["body"].get("usage") or {})

    def reset(self) -> None:
        self.done = Ids()
        self.shown["request_counts"] |= {"completed": 0, "failed": 0}
        self.shown["usage"] = no_usage()


class Batches:
    """All batches of the server. Each goes on until it ends, also in a later process."""

    def __init__(self, core: Core, store: FileStore, endpoints: Endpoints) -> None:
        # what rows answer is in their file, and is kept nowhere else
        self._core = replace(core, keeps=False)
        self._store = store
        self._endpoints = endpoints
        config = core.service.config
        most = int(config.max_held * PART_OF_ROWS)
        self._held = ByteQuota(most, config.max_body)
        self._runs: dict[str, BatchRun] = {}
        self._driving: dict[str, asyncio.Task[None]] = {}
        self._sweeping: list[asyncio.Task[None]] = []
        self._num_asked = 0
        self._has_ended = asyncio.Event()

    # Life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with what has not ended."""
        for record in self._store.records("batch_", BatchRecord):
            run = BatchRun(**record.model_dump())
            self._runs[run.id] = run
        left = [run for run in self._runs.values() if not run.has_ended]
        growing = [name for run in left for name in (run.output, run.errors)]
        self._store.clear(growing)
        for run in left:
            self._drive(run)
        if left:
            logger.info("going on with %d batches", len(left))
        self._sweeping.append(asyncio.create_task(self._sweep()))

    async def close(self) -> None:
        """End what runs; a later server goes on with it."""
        tasks = [*self._driving.values(), *self._sweeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            with suppress(OSError):
                self._store.sweep()
            for run in list(self._runs.values()):
                if run.has_ended and run.shown["created_at"] + AGE < time.time():
                    self._store.forget(run.id)
                    del self._runs[run.id]
            await asyncio.sleep(SWEEP_SECONDS)

    # What clients do -------------------------------------------------------------------------------------------------

    def create(self, run: BatchRun) -> None:
        """Begin a batch. Raises ApiError 429 if its owner has too many that have not ended."""
        mine = [one for one in self.of(run.owner) if not one.has_ended]
        if len(mine) >= MAX_OPEN_BATCHES:
            said = f"{len(mine)} batches have not ended; wait for one, or cancel it"
            raise ApiError(429, said, code="busy", headers={"Retry-After": "60"})
        self._save(run)
        self._runs[run.id] = run
        self._drive(run)

    def find(self, batch_id: str, owner: str) -> BatchRun:
        """Return an owner's batch. Raises ApiError 404; another's is not there."""
        run = self._runs.get(batch_id)
        if run is None or run.owner != owner:
            raise ApiError(404, f"there is no batch {batch_id[:100]!r}")
        return run

    def of(self, owner: str) -> list[BatchRun]:
        """Return an owner's batches, the oldest first."""
        mine = [run for run in self._runs.values() if run.owner == owner]
        return sorted(mine, key=lambda run: (run.shown["created_at"], run.id))

    def cancel(self, run: BatchRun) -> None:
        """End a batch; what was answered stays. Raises ApiError 409 if it has ended."""
        if run.has_ended or run.status == "finalizing":
            raise ApiError(409, f"this batch is {run.status}; it cannot be cancelled")
        if run.status != "cancelling":
            run.ends_as = "cancelled"
            self._become(run, "cancelling")
        run.is_left.set()

    # One batch -------------------------------------------------------------------------------------------------------

    def _drive(self, run: BatchRun) -> None:
        self._store.used_by[run.shown["input_file_id"]] = run.id
        self._driving[run.id] = asyncio.create_task(self._to_its_end(run))

    async def _to_its_end(self, run: BatchRun) -> None:
        try:
            await self._through_states(run)
        except Stopping:
            return
        except Exception as error:
            logger.exception("%s ended in its middle", run.id)
            said = "the server failed in the middle; its log has more"
            if isinstance(error, CannotWrite):
                said = "the disk of the server's files is full or cannot be written"
            run.shown["errors"] = errors_of([(None, "server_error", said)])
            run.ends_as = "failed"
            with suppress(CannotWrite):
                self._finish(run)
        finally:
            for file in run.files.values():
                file.close()
            run.files.clear()
            self._driving.pop(run.id, None)
        self._release(run)

    def _release(self, run: BatchRun) -> None:
        input_id = run.shown["input_file_id"]
        self._store.used_by.pop(input_id, None)
        for one in self._runs.values():
            if not one.has_ended and one.shown["input_file_id"] == input_id:
                self._store.used_by.setdefault(input_id, one.id)

    async def _through_states(self, run: BatchRun) -> None:
        path = self._store.path(run.shown["input_file_id"])
        if run.status == "validating":
            endpoint = run.shown["endpoint"]
            total, wrong = await asyncio.to_thread(check_lines, path, endpoint)
            run.shown["request_counts"]["total"] = total
            if wrong:
                run.shown["errors"] = errors_of(wrong)
                self._become(run, "failed")
                return
            # it may have been cancelled meanwhile
            if run.status == "validating":
                self._become(run, "in_progress")
        await asyncio.to_thread(self._read_journal, run)
        if run.status == "in_progress":
            await self._answer(run, path)
        self._finish(run)

    def _read_journal(self, run: BatchRun) -> None:
        """Count what was answered, also by an earlier process, and open both files for more."""
        run.reset()
        for name in (run.output, run.errors):
            path = self._store.path(name)
            path.touch(0o600)
            run.files[name] = LineFile(path)
            for line in read_answers(path):
                run.count(line)

    async def _answer(self, run: BatchRun, path: Path) -> None:
        """Ask all rows that are left, until it is cancelled or its time is over."""
        asking = asyncio.create_task(self._ask_all(run, path))
        leaving = asyncio.create_task(run.is_left.wait())
        seconds = max(0.0, run.shown["expires_at"] - time.time())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((asking, leaving), timeout=seconds, return_when=first)
            is_over = asking.done()
        finally:
            for task in (asking, leaving):
                task.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)
        if is_over:
            asking.result()
        elif not run.is_left.is_set():
            run.ends_as = "expired"
            await asyncio.to_thread(self._expire_rows, run, path)

    def _expire_rows(self, run: BatchRun, path: Path) -> None:
        said = "the batch's time was over before this request was answered"
        error = {"code": "batch_expired", "message": said}
        with open(path, "rb") as lines:
            for row in rows_in(lines):
                if row.custom_id not in run.done:
                    self._append(run, run.errors, row, None, error)

    async def _ask_all(self, run: BatchRun, path: Path) -> None:
        asked: set[asyncio.Task[None]] = set()
        try:
            with open(path, "rb") as lines:
                rows = rows_in(lines)
                while row := await asyncio.to_thread(next, rows, None):
                    if row.custom_id in run.done:
                        continue
                    await self._take_turn()
                    task = asyncio.create_task(self._ask(run, row))
                    task.add_done_callback(self._end_turn)
                    asked.add(task)
                    for one in [one for one in asked if one.done()]:
                        one.result()
                        asked.remove(one)
            await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _take_turn(self) -> None:
        """Wait until fewer rows are asked than the engine is to have at hand."""
        service = self._core.service
        if service.model is None:
            # a row says so where it cannot be loaded
            with suppress(ApiError):
                await service.loaded()
        while self._num_asked >= service.most_in_flight:
            self._has_ended.clear()
            await self._has_ended.wait()
        self._num_asked += 1

    def _end_turn(self, task: asyncio.Task[None]) -> None:
        self._num_asked -= 1
        self._has_ended.set()

    # One row ---------------------------------------------------------------------------------------------------------

    async def _ask(self, run: BatchRun, row: BatchRow) -> None:
        """Answer a row, and write its line."""
        path = run.shown["endpoint"]
        name = uuid.uuid4().hex
        entry = Entry(name, "POST", path, "batch", self._held)
        entry.number, entry.owner = ~run.client, run.owner
        entry.num_bytes, entry.num_values = row.num_bytes, row.num_values
        entry.num_nested, entry.said = row.num_nested, {"batch": run.id}
        body = await self._until_answered(entry, path, row.body)
        response = {"status_code": entry.status, "request_id": name, "body": body}
        file = run.output if entry.status == 200 else run.errors
        self._append(run, file, row, response, None)
        self._core.service.metrics.of_batch(entry.status)
        entry.close()

    async def _until_answered(
        self, entry: Entry, path: str, body: Any
    ) -> dict[str, Any]:
        """Return a row's answer or error. Raises Stopping."""
        while True:
            try:
                with refusing():
                    whole = await self._exchange(entry, path, body)
                entry.status = 200
                return whole
            except ApiError as error:
                answer = error
            except Exception:
                logger.exception("request %s failed", entry.request_id)
                said = f"the server failed; its log has more under {entry.request_id}"
                answer = ApiError(500, said)
            is_alone = isinstance(answer, NoRoom) and not self._held.size
            if is_alone or answer.status_code not in TRANSIENT:
                entry.status = answer.status_code
                entry.said["error"] = answer.reason
                answer.quote(json_bytes(body))
                return answer.body
            if self._core.service.state == "stopping":
                raise Stopping
            await asyncio.sleep(RETRY_SECONDS)

    async def _exchange(self, entry: Entry, path: str, given: Any) -> dict[str, Any]:
        """Return what the door answers. Raises ApiError."""
        core = self._core
        if entry.num_bytes > core.service.config.max_body:
            raise ApiError(413, "the line is larger than a request may be")
        if entry.num_values > MAX_VALUES or entry.num_nested > MAX_NESTED:
            raise ApiError(413, "the line holds too many values")
        kind, exchange = self._endpoints[path]
        entry.hold(entry.num_bytes)
        visit = entry.visit = await core.service.admit(entry.number)
        try:
            body = await core.bodies.read(entry, check_body, given, kind)
            core.check_model(body.model)
            _check_whole(given)
            one = await exchange.made(core, entry, body)
            return await one.whole()
        finally:
            core.service.dismiss(visit)
            entry.held.release(entry.num_held, entry.number)
            entry.num_held = 0

    # Ends ------------------------------------------------------------------------------------------------------------

    def _append(
        self,
        run: BatchRun,
        name: str,
        row: BatchRow,
        response: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None,
    ) -> None:
        line = {"id": new_id("batch_req"), "custom_id": row.custom_id}
        written = {**line, "response": response, "error": error}
        run.files[name].append(written)
        run.count(written)

    def _finish(self, run: BatchRun) -> None:
        """Show the files, and end. A killed process leaves this to the next one, which does the same."""
        self._become(run, "finalizing")
        named = {"output_file_id": run.output, "error_file_id": run.errors}
        for file in run.files.values():
            file.sync()
        for shown, name in named.items():
            path = self._store.path(name)
            if path.exists() and path.stat().st_size:
                title = f"{run.id}_{shown.partition('_')[0]}.jsonl"
                self._store.put(name, run.owner, title, "batch_output", run.age)
                run.shown[shown] = name
            else:
                path.unlink(missing_ok=True)
        self._become(run, run.ends_as)

    def _become(self, run: BatchRun, status: str) -> None:
        run.shown["status"] = status
        run.shown[f"{status}_at"] = int(time.time())
        self._save(run)
        if run.has_ended:
            counts = run.shown["request_counts"]
            logger.info("%s is %s: %s", run.id, status, counts)
            self._core.service.metrics.ended_batch(status)

    def _save(self, run: BatchRun) -> None:
        self._store.write_record(run.id, run.record())


def _check_whole(body: Mapping[str, Any]) -> None:
    """Raise ApiError for a body whose answer would not come whole."""
    for name in ("stream", "background"):
        if body.get(name):
            said = f"{name}: a batch's answers come whole, in its file"
            raise ApiError(400, said, param=name)
