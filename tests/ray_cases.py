"""What tests/test_ray.py has run in a process of its own: ``python -m tests.ray_cases FOLDER CASE ...``.

One Ray cluster of this machine, with two CPUs and little memory, serves all cases. A case that passed is a line of
``FOLDER/passed``: Ray prints to the standard output from threads of its own, in the middle of other lines.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from vlm_batch import Request, Result, SamplingParams, VLMBatcher, jobs
from vlm_batch.assets import default_checkpoint
from vlm_batch.jobs.ray import Cluster
from vlm_batch.jobs.ray_data import Predictor

PICTURES = sorted((Path(__file__).parent.parent / "fixtures/images").glob("*_*.png"))[
    :8
]
MODEL = str(default_checkpoint())
QUESTIONS = jobs.Questions(
    ("describe the {what}",), params=SamplingParams(max_tokens=6)
)


def join() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )


def worker_processes() -> list[int]:
    """The processes of this cluster's workers: children of its raylet, which is a child of this process."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [
        (int(pid), int(parent), args)
        for pid, parent, args in (line.split(None, 2) for line in listed.splitlines())
    ]
    raylets = {
        pid for pid, parent, args in rows if parent == os.getpid() and "raylet" in args
    }
    return [
        pid
        for pid, parent, args in rows
        if parent in raylets and args.startswith("ray::Worker")
    ]


def write_rows(folder: Path, count: int) -> Path:
    """A table of pictures by path: one in twenty is damaged, one is not there, one row is a text."""
    chosen = random.Random(5)
    (folder / "damaged.png").write_bytes(PICTURES[0].read_bytes()[:60])
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(count):
            picture = (
                str(folder / "damaged.png")
                if number % 20 == 7
                else str(chosen.choice(PICTURES))
            )
            row: dict[str, Any] = {
                "id": f"r{number}",
                "image": picture,
                "what": "picture",
            }
            if number == 5:
                row["image"] = "not/there.png"
            if number == 9:
                parts = [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "text", "text": "describe"},
                ]
                row = {
                    "id": "r9",
                    "messages": [{"role": "user", "content": parts}],
                    "what": "",
                }
            file.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def told(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Answers by id; every id must be there once."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row["id"]: (row["text"], row["error"], row["image_sizes"]) for row in rows}
    assert len(by_id) == len(rows), "an id came twice"
    return by_id


class KillsOne:
    """A cluster, one of whose workers is killed after so many answers."""

    def __init__(self, cluster: Cluster, after: int) -> None:
        self._cluster, self._after = cluster, after
        self.killed = 0

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Result]:
        for count, result in enumerate(self._cluster.as_completed(requests), 1):
            if count == self._after:
                self.killed = worker_processes()[0]
                os.kill(self.killed, signal.SIGKILL)
            yield result


class Kills:
    """A logits processor that ends its process."""

    def __call__(self, tokens: Any, logits: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return logits


def a_job_whose_workers_are_killed(folder: Path) -> None:
    """Two workers, one killed in the middle: every id once, with the answers of one machine. Then a row that kills."""
    source = jobs.open_sources([str(write_rows(folder, 160))])[0]
    said: list[str] = []
    with VLMBatcher(MODEL) as batcher:
        jobs.run(
            source,
            jobs.open_sink(str(folder / "alone.jsonl")),
            batcher,
            questions=QUESTIONS,
        )
    with Cluster(MODEL, workers=2, say=said.append) as cluster:
        killing = KillsOne(cluster, after=30)
        summary = jobs.run(
            source,
            jobs.open_sink(str(folder / "ray.jsonl")),
            killing,
            questions=QUESTIONS,
        )
        assert killing.killed
        assert any("is gone" in one and "asked again" in one for one in said), said
        assert summary.ended_rows == 160 and summary.failed == 9
        assert told(folder / "ray.jsonl") == told(folder / "alone.jsonl")
        check_a_row_that_kills(cluster)


def check_a_row_that_kills(cluster: Cluster) -> None:
    """It ends with an error after three workers; the rows beside it are answered."""
    killer = SamplingParams(max_tokens=4, logits_processors=(Kills(),))
    plain = SamplingParams(max_tokens=4)
    asked = [
        Request(
            images=[str(PICTURES[n % 8])],
            prompt="describe",
            request_id=f"r{n}",
            params=killer if n == 2 else plain,
        )
        for n in range(12)
    ]
    results = {result.request_id: result for result in cluster.as_completed(asked)}
    assert len(results) == 12
    assert [name for name, result in results.items() if result.error] == ["r2"]
    assert str(results["r2"].error).startswith(
        "WorkerDied: 3 workers died while they answered this row"
    )


def a_model_that_cannot_be_loaded(folder: Path) -> None:
    """Said at once, with the reason, and nothing is begun."""
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "no_such_model"}')
    for model, why in (
        (str(folder / "none"), "there is no such folder"),
        (str(folder / "broken"), "no_such_model"),
    ):
        with pytest.raises(jobs.InvalidJob, match=f"cannot load the model .*{why}"):
            Cluster(model, workers=1, say=lambda text: None).__enter__()
    deadline = time.monotonic() + 60
    # Ray ends them when it comes to it
    while worker_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worker_processes()


def a_dataset(folder: Path) -> None:
    """``Predictor`` in ``map_batches``: every row in its place, failures as rows, columns as ray.data.llm names them."""
    rows = [
        {"id": n, "image": PICTURES[n % 8].read_bytes(), "what": "picture"}
        for n in range(40)
    ]
    rows[7]["image"] = b"no picture"
    dataset = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        Predictor,
        fn_constructor_kwargs={
            "model": MODEL,
            "prompt": "describe the {what}",
            "params": SamplingParams(max_tokens=6),
        },
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2),
        batch_size=8,
    )
    answers = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in answers] == list(range(40))
    with VLMBatcher(MODEL) as batcher:
        asked = [
            Request(
                images=[row["image"]],
                prompt="describe the picture",
                params=QUESTIONS.params,
            )
            for row in rows
        ]
        alone = batcher.generate(asked)
    for row, result in zip(answers, alone, strict=True):
        assert row["generated_text"] == result.text and row["__inference_error__"] == (
            result.error or ""
        )
        assert (
            row["num_generated_tokens"]
            == len(row["generated_tokens"])
            == result.usage.completion_tokens
        )
        assert (
            row["num_input_tokens"] == result.usage.prompt_tokens
            and row["finish_reason"] == result.finish_reason
        )
    assert (
        "InvalidImage" in answers[7]["__inference_error__"]
        and answers[7]["time_taken_llm"] == -1
    )


def a_dataset_of_chats(folder: Path) -> None:
    """Messages and sampling_params of rows, as ray.data.llm takes them; what is wrong with them is their row's."""

    def row(number: int) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": str(PICTURES[number % 8])}}
        content = [image, {"type": "text", "text": "describe the picture"}]
        return {
            "id": number,
            "messages": [{"role": "user", "content": content}],
            "sampling_params": {"max_tokens": 3},
        }

    rows = [row(number) for number in range(6)]
    rows[1]["sampling_params"] = {"max_tokens": 0}
    rows[2]["messages"][0]["role"] = "nobody"
    dataset = ray.data.from_items(rows, override_num_blocks=1).map_batches(
        Predictor,
        fn_constructor_args=(MODEL,),
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=4,
    )
    answers = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [bool(row["__inference_error__"]) for row in answers] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ], answers
    assert all(row["num_generated_tokens"] <= 3 for row in answers)
    assert "max_tokens is 0" in answers[1]["__inference_error__"]


def a_dataset_whose_model_cannot_be_loaded(folder: Path) -> None:
    dataset = ray.data.range(8).map_batches(
        Predictor,
        fn_constructor_kwargs={"model": str(folder / "none"), "prompt": "describe"},
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    with pytest.raises(Exception, match="there is no such folder"):
        dataset.take_all()


if __name__ == "__main__":
    signal.alarm(900)  # ends this process, and the cluster with it, if nobody else does
    join()
    try:
        for name in sys.argv[2:]:
            globals()[name](Path(sys.argv[1]))
            with open(Path(sys.argv[1]) / "passed", "a") as file:
                file.write(f"{name}\n")
    finally:
        ray.shutdown()
