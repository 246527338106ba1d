"""A burst beyond the queue is held and answered; sockets are shared by client, and who leaves frees a place."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving import Reply, Running, picture, serving, text, wait_until
from tests.test_server import ENDLESS, begin_stream, decoding, rows
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.server.burst import Burst
from vlm_batch.server.edge import ByteQuota
from vlm_batch.server.errors import ApiError

ASKED = [picture("red_circle.png"), text("describe the picture")]


class Sent(Exception):
    """Somebody was sent away."""


class Places:
    """Places that a test opens by hand."""

    def __init__(self, most: int = 100) -> None:
        self.free = 0
        self.given: Counter[int] = Counter()
        self.burst: Burst[int] = Burst(
            self.take, self.give_back, lambda: Counter(self.given), Sent
        )
        self.burst.most = most

    def take(self, client: int) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        self.given[client] += 1
        return client

    def give_back(self, client: int) -> None:
        self.free += 1
        self.given[client] -= 1

    async def come(self, *clients: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(self.burst.wait(client)) for client in clients]
        await asyncio.sleep(0)
        return tasks

    async def open(self, count: int) -> None:
        self.free += count
        self.burst.serve()
        await asyncio.sleep(0)


def test_places_go_to_who_has_fewest_then_in_order() -> None:
    async def run() -> None:
        places = Places()
        tasks = await places.come(1, 1, 1, 1, 2, 3)
        await places.open(3)
        assert [task.done() for task in tasks] == [
            True,
            False,
            False,
            False,
            True,
            True,
        ]
        await places.open(2)
        assert [task.done() for task in tasks] == [True, True, True, False, True, True]
        await places.open(1)
        assert places.burst.size == 0

    asyncio.run(run())


def test_sockets_are_shared_by_client() -> None:
    """The client that holds most gives up its latest; nobody is sent away for one that has as much."""

    async def run() -> None:
        places = Places(most=6)
        many = await places.come(*[1] * 7)
        await asyncio.sleep(0)
        assert isinstance(many[6].exception(), Sent), (
            "a client alone has all, and no more"
        )
        others = await places.come(2, 2, 2, 2)
        await asyncio.sleep(0)
        refused = [at for at, task in enumerate(many) if task.done()]
        assert refused == [3, 4, 5, 6], "its latest"
        assert [task.done() for task in others] == [False, False, False, True]
        places.burst.end(Sent)
        await asyncio.gather(*many, *others, return_exceptions=True)

    asyncio.run(run())


def test_who_leaves_frees_its_place() -> None:
    async def run() -> None:
        places = Places()
        first, second = await places.come(1, 1)
        first.cancel()
        await places.open(1)  # before it has noticed
        await asyncio.gather(first, return_exceptions=True)
        assert (await second, places.burst.size, places.free) == (1, 0, 0)
        (third,) = await places.come(1)
        places.free += 1
        places.burst.serve()
        third.cancel()  # a place has been given to it, and it has not run since
        await asyncio.gather(third, return_exceptions=True)
        assert places.free == 1

    asyncio.run(run())


def test_a_client_has_a_part_of_the_bytes() -> None:
    quota = ByteQuota(100, 10)
    quota.acquire(75, 1)
    with pytest.raises(ApiError, match="hold 75 bytes"):
        quota.acquire(1, 1)
    quota.acquire(25, 2)
    quota.release(75, 1)
    quota.acquire(70, 1)


@pytest.fixture
def narrow() -> Iterator[Running]:
    """A server with one row and two places."""
    with serving(
        lambda: VLMBatcher(default_checkpoint(), max_rows=1), max_queue=2
    ) as running:
        yield running


def fill(server: Running) -> list[socket.socket]:
    """Take the row and both places with answers that do not end."""
    streams: list[socket.socket] = []
    for count in (1, 2, 3):
        streams.append(begin_stream(server))
        wait_until(
            lambda count=count: rows(server) == count and decoding(server),  # type: ignore[misc]
            "the queue to fill",
        )
    return streams


def held(server: Running) -> int:
    return server.server.service.burst.size


def test_a_burst_is_answered_whole(narrow: Running) -> None:
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda _: narrow.chat(ASKED), range(40)))
    assert {reply.status for reply in replies} == {200}
    answers = {reply.json["choices"][0]["message"]["content"] for reply in replies}
    assert answers == {narrow.chat(ASKED).json["choices"][0]["message"]["content"]}
    wait_until(lambda: not narrow.server.service.num_open, "all places to be free")


def test_who_waits_is_held_until_there_is_a_place(narrow: Running) -> None:
    streams = fill(narrow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(narrow.chat, "count to 3")
        wait_until(lambda: held(narrow) == 1, "the fourth to be held")
        assert b"vlm_batch:requests_held" in narrow.ask("GET", "/metrics").body
        for stream in streams:
            stream.close()
        assert waiting.result(60).status == 200


def test_sockets_end(narrow: Running) -> None:
    streams = fill(narrow)
    narrow.server.service.burst.most = 3
    reply = narrow.chat("count to 3")
    assert reply.status == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.error["code"] == "busy"
    for stream in streams:
        stream.close()


def test_a_held_client_that_leaves_is_forgotten(narrow: Running) -> None:
    streams = fill(narrow)
    left = begin_stream(narrow)
    wait_until(lambda: held(narrow) == 1, "it to be held")
    left.close()
    wait_until(lambda: held(narrow) == 0, "it to be forgotten")
    for stream in streams:
        stream.close()
    wait_until(lambda: rows(narrow) == 0, "the queue to empty")
    assert narrow.chat("count to 3").status == 200


def test_who_waits_is_answered_when_the_server_stops() -> None:
    replies: list[Reply] = []
    with serving(
        lambda: VLMBatcher(default_checkpoint(), max_rows=1),
        max_queue=1,
        shutdown_seconds=5.0,
    ) as server:

        def begin(*given: Any, **named: Any) -> threading.Thread:
            said = threading.Thread(
                target=lambda: replies.append(server.chat(*given, **named)), daemon=True
            )
            said.start()
            return said

        begin("count to 12", **ENDLESS)
        wait_until(lambda: rows(server) == 1 and decoding(server), "the first to run")
        begin("count to 12", **ENDLESS)
        wait_until(lambda: rows(server) == 2, "the second to wait in the queue")
        waiting = begin("count to 3")
        wait_until(lambda: held(server) == 1, "the third to be held")
        server.server.should_exit = True
        waiting.join(4)
        assert [reply.status for reply in replies] == [503]
        assert replies[0].headers["retry-after"] == "5"
