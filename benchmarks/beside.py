"""What a chat waits beside another client's bulk work, against the same chats alone, and what the bulk work loses.

    python -m benchmarks.beside --by burst --out build/beside

``burst``: another client has as many pictures under way as it may. ``batch``: a file of them over /v1/batches. Chats come one
after another, at random times. The server is a process of its own; ``--in-process`` takes the batcher without it. Wants a
machine on which nothing else runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.servers import running, servers, widened
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli.load import BenchedServer, Load, Local, TimedAnswer
from vlm_batch.types import Request

#: Clients of the batcher, and keys of the server's: the chat's and the bulk's.
CHAT, BULK = "chat-key", "bulk-key"
NUMBERS = {("burst", CHAT): 1, ("burst", BULK): 2, ("batch", CHAT): 1}
NUMBERS |= {("batch", BULK): -1}
#: Different requests of the bulk's: more than are answered meanwhile.
BULK_REQUESTS = 1500
#: Seconds until the bulk's rows fill all places, and of its throughput beside nobody.
FILL_SECONDS = 3.0


@dataclass(frozen=True)
class Client(Local):
    """One client of a batcher."""

    number: int = 0

    def prepare(self, request: Request) -> Request:
        return replace(request, client=self.number)


@dataclass(frozen=True)
class ChatClient(BenchedServer):
    """A client that is told of each token, also of those without text."""

    def prepare(self, request: Request) -> bytes:
        body = json.loads(super().prepare(request))
        return json.dumps({**body, "logprobs": True}).encode()

    def ask(self, prepared: Any) -> TimedAnswer:
        connection, path = self.connect()
        headers = {"Authorization": f"Bearer {self.key}"}
        headers["Content-Type"] = "application/json"
        times: list[float] = []
        begin = time.perf_counter()
        connection.request("POST", path, prepared, headers)
        response = connection.getresponse()
        for line in response:
            is_event = line.startswith(b"data: {")
            choices = json.loads(line[6:])["choices"] if is_event else []
            if choices and choices[0].get("logprobs"):
                times.append(time.perf_counter() - begin)
        connection.close()
        error = None if times else f"HTTP {response.status}, no tokens"
        seconds = time.perf_counter() - begin
        return TimedAnswer(pieces=tuple(times), seconds=seconds, error=error)


@dataclass
class Bulk:
    """Pictures, ``width`` at a time, until the block ends."""

    ask: Callable[[int], TimedAnswer]
    width: int
    ended: Any = field(default_factory=lambda: multiprocessing.Value("i", 0))
    errors: list[str] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def count(self) -> int:
        return int(self.ended.value)

    @contextmanager
    def going(self) -> Iterator[Bulk]:
        with ThreadPoolExecutor(self.width) as pool:
            for first in range(self.width):
                pool.submit(self._go_on, first)
            try:
                yield self
            finally:
                self.has_ended.set()

    def _go_on(self, index: int) -> None:
        while not self.has_ended.is_set():
            answer = self.ask(index)
            if answer.error is not None:
                self.errors.append(answer.error)
            with self.ended.get_lock():
                self.ended.value += 1
            index += self.width


@dataclass
class Burst:
    """A client of a server that is a process of its own, and has ``width`` pictures under way."""

    target: BenchedServer
    bodies: Sequence[bytes]
    width: int
    ended: Any = field(default_factory=lambda: multiprocessing.Value("i", 0))
    errors: list[str] = field(default_factory=list)

    def count(self) -> int:
        return int(self.ended.value)

    @contextmanager
    def going(self) -> Iterator[Burst]:
        process = multiprocessing.Process(target=self._run, daemon=True)
        process.start()
        try:
            yield self
            if not process.is_alive():
                raise RuntimeError("the bulk's client has failed")
        finally:
            process.kill()
            process.join()

    def _run(self) -> None:
        bulk = Bulk(self._ask, self.width, self.ended)
        with bulk.going():
            while not bulk.errors:
                time.sleep(0.2)
            raise RuntimeError(bulk.errors[0])

    def _ask(self, index: int) -> TimedAnswer:
        return self.target.ask(self.bodies[index % len(self.bodies)])


@dataclass
class FileBatch:
    """A batch over /v1/batches, cancelled at the end."""

    target: BenchedServer
    bodies: Sequence[dict[str, Any]]
    errors: list[str] = field(default_factory=list)
    id: str = ""

    def count(self) -> int:
        counts = self._call("GET", f"/v1/batches/{self.id}")["request_counts"]
        return int(counts["completed"] + counts["failed"])

    @contextmanager
    def going(self) -> Iterator[FileBatch]:
        rows = [
            {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions"}
            | {"body": body}
            for at, body in enumerate(self.bodies)
        ]
        lines = "\n".join(map(json.dumps, rows))
        parts = [("purpose", "batch"), ('file"; filename="a.jsonl', lines)]
        form = "".join(
            f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in parts
        )
        kind = "multipart/form-data; boundary=X"
        file = self._call("POST", "/v1/files", f"{form}--X--\r\n".encode(), kind)
        asked = {"input_file_id": file["id"], "completion_window": "24h"}
        asked["endpoint"] = "/v1/chat/completions"
        batch = self._call("POST", "/v1/batches", json.dumps(asked).encode())
        self.id = batch["id"]
        try:
            yield self
        finally:
            self._call("POST", f"/v1/batches/{self.id}/cancel", b"")

    def _call(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> Any:
        connection, _ = self.target.connect()
        headers = {"Authorization": f"Bearer {self.target.key}", "Content-Type": kind}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        said = json.loads(response.read())
        connection.close()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {said}")
        return said


def chats(
    target: Any, load: Load, *, pause: float, count: int | None = None
) -> list[TimedAnswer]:
    """Ask chats one after another, with random pauses of ``pause`` seconds on average."""
    chance = random.Random(load.seed)
    found: list[TimedAnswer] = []
    for index in range(load.requests if count is None else count):
        prepared = target.prepare(load.request(index))
        time.sleep(chance.uniform(0, 2 * pause))
        answer = target.ask(prepared)
        if answer.error is not None:
            raise RuntimeError(answer.error)
        found.append(answer)
    return found


def times(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, float]]:
    """Return milliseconds to first tokens and ends, and between pieces."""
    gaps = [b - a for one in answers for a, b in pairwise(one.pieces)]
    found = {
        "first": [one.ttft or one.seconds for one in answers],
        "whole": [one.seconds for one in answers],
        "gap": gaps or [0.0],
    }
    return {name: _spread(values) for name, values in found.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"p50": 1000 * statistics.median(ordered), "p90": 1000 * p90}


def compare(
    target: Any, bulk: Bulk | Burst | FileBatch, load: Load, pause: float
) -> dict[str, Any]:
    """Chats alone, then beside the bulk work, which runs by itself before."""
    chats(target, replace(load, seed=load.seed + 2), pause=0, count=3)
    alone = chats(target, load, pause=pause / 10)
    with bulk.going():
        time.sleep(FILL_SECONDS)
        _, by_itself = _rate(bulk, lambda: time.sleep(4 * FILL_SECONDS))
        beside: list[TimedAnswer] = []
        other = replace(load, seed=load.seed + 1)
        _, with_chats = _rate(
            bulk, lambda: beside.extend(chats(target, other, pause=pause))
        )
    if bulk.errors:
        raise RuntimeError(bulk.errors[0])
    found = {"alone": times(alone), "beside": times(beside)}
    found["ratio"] = {
        name: {p: found["beside"][name][p] / one for p, one in of.items() if one}
        for name, of in found["alone"].items()
    }
    bulk_found = {"by_itself": by_itself, "with_chats": with_chats}
    return {**found, "bulk_per_second": bulk_found}


def _rate(
    bulk: Bulk | Burst | FileBatch, work: Callable[[], None]
) -> tuple[float, float]:
    """Return how long something takes, and the bulk's answers a second meanwhile."""
    begin, before = time.perf_counter(), bulk.count()
    work()
    seconds = time.perf_counter() - begin
    return seconds, (bulk.count() - before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--by", choices=["burst", "batch"], default="burst")
    parser.add_argument("--wide", action="store_true", help="47 million parameters")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--pictures", type=float, default=0.0, help="of the chats")
    parser.add_argument("--words", type=int, default=48)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds, on average")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="bulk requests at once")
    parser.add_argument("--side", type=int, default=448, help="of a bulk's picture")
    parser.add_argument("--out", type=Path, default=Path("build/beside"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = str(default_checkpoint())
    if options.wide:
        model = str(widened(options.out / "wide"))
    words = (options.words, options.words)
    load = Load(
        requests=options.chats,
        picture_share=options.pictures,
        prompt_words=words,
        answer_tokens=(24, 24),
        sizes=((336, 336),),
    )
    side = options.side
    pages = Load(
        requests=BULK_REQUESTS,
        picture_share=1.0,
        prompt_words=(24, 24),
        answer_tokens=(32, 128),
        sizes=((side, side), (side, side * 3 // 4)),
        seed=9,
    )
    if options.in_process:
        with VLMBatcher(model, max_rows=options.rows) as batcher:
            chat = Client(batcher, number=NUMBERS[options.by, CHAT])
            busy = Client(batcher, number=NUMBERS[options.by, BULK])

            def ask(at: int) -> Any:
                return busy.ask(busy.prepare(pages.request(at)))

            found = compare(chat, Bulk(ask, options.width), load, options.pause)
    else:
        found = _served(model, options, load, pages)
    for name, one in found.items():
        print(name, json.dumps(one))
    print(json.dumps(found))


def _served(
    model: str, options: argparse.Namespace, load: Load, pages: Load
) -> dict[str, Any]:
    keys = options.out / "keys"
    keys.write_text(f"{CHAT}\n{BULK}\n")
    command = servers(model, options.rows, False)["vlm-batch serve"]
    command += ["--keys", str(keys), "--files", str(options.out / "files")]
    with running(command, options.out / "log") as url:
        chat, busy = ChatClient(url, model, CHAT), BenchedServer(url, model, BULK)
        bodies = [busy.prepare(pages.request(at)) for at in range(pages.requests)]
        bulk: Burst | FileBatch
        if options.by == "burst":
            bulk = Burst(busy, bodies, options.width)
        else:
            whole = [json.loads(body) for body in bodies]
            for body in whole:
                del body["stream"], body["stream_options"]
            bulk = FileBatch(busy, whole)
        return compare(chat, bulk, load, options.pause)


if __name__ == "__main__":
    main()
