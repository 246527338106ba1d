"""The benchmarks on a tiny model: every engine gives the answers that one-after-another generation gives."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from benchmarks import exactness, pictures
from benchmarks.compare import __main__ as comparison
from benchmarks.compare import measure, probe, report, shapes
from benchmarks.compare.__main__ import parse
from benchmarks.compare.engines import ENGINES, WANTED, ThisLibrary
from benchmarks.compare.recall import Contexts
from benchmarks.compare.shapes import SHAPES, build
from benchmarks.compare.workloads import WORKLOADS, Workload, make_workload
from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.caches import Placement
from vlm_batch.cli import bench, load
from vlm_batch.cli import main as cli
from vlm_batch.engine.groups import DecodeGroups
from vlm_batch.engine.shapes import FreeShapes

TINY = SHAPES["tiny"]
CASES = [
    (name, engine) for name in WANTED for engine in WANTED[name] if engine != "vllm-mlx"
]


@pytest.fixture(scope="module")
def model() -> Any:
    return build(TINY)


@pytest.fixture(scope="module")
def answers(
    model: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, np.ndarray]]:
    """The answers one after another of every workload that has its own."""
    folder = tmp_path_factory.mktemp("answers")
    found = {}
    for name in WANTED:
        workload = make_workload(name, TINY)
        if workload.answers_of in ("", name):
            measure.reference(model, workload, folder / "answers.npz")
            with np.load(folder / "answers.npz") as arrays:
                found[name] = dict(arrays)
    return found


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_every_engine_gives_the_same_tokens(
    name: str, engine: str, model: Any, answers: dict[str, dict[str, np.ndarray]]
) -> None:
    workload = make_workload(name, TINY)
    contexts = Contexts(model, workload.asks) if workload.recalled else None
    trace = measure.measure(ENGINES[engine], model, workload, contexts)
    verdict = measure.compare(
        workload, trace.tokens, answers[workload.answers_of or name]
    )
    assert verdict.describe({}) == "same"
    figures = measure.figures(workload, trace)
    assert figures["tokens_per_s"] > 0 and figures["peak_mb"] > 0
    assert figures["ttft_p50"] <= figures["ttft_p95"] <= trace.seconds


#: Of each other family a shape as small as ``TINY``.
OTHERS = (
    shapes.gemma3_shape(
        "gemma3",
        shapes.sizes(
            64, 6, 96, 4, 2, 256, head_dim=16, sliding_window=16, mm_tokens_per_image=4
        ),
        shapes.tower_sizes(32, 2, 64, 2, 4, 16),
        "float32",
        1e-3,
        shapes.TINY_SCALE,
    ),
    shapes.qwen3_5_shape(
        "qwen3.5",
        shapes.sizes(64, 4, 96, 4, 2, 256, **shapes.linear_heads(4, 16, 32)),
        shapes.grid_tower_sizes(2, 32, 64, 2, 6),
        "float32",
        1e-3,
        shapes.TINY_SCALE,
    ),
    shapes.llava_shape(
        "llava",
        shapes.sizes(64, 2, 128, 4, 2, 256),
        shapes.tower_sizes(32, 2, 64, 2, 4, 16),
        "float32",
        1e-3,
        shapes.TINY_SCALE,
    ),
)


@pytest.mark.parametrize("shape", OTHERS, ids=[shape.name for shape in OTHERS])
def test_shapes_of_other_families_do_their_work(
    shape: shapes.Shape, tmp_path: Path
) -> None:
    """The same tokens, but where mlx-vlm's own loop is no measure."""
    model = build(shape)
    for name in ("captions", "chat-8"):
        workload = make_workload(name, shape, 7)
        assert any(ask.has_picture for ask in workload.asks)
        path = tmp_path / f"{name}.npz"
        measure.reference(model, workload, path)
        for engine in ("vlm_batch defaults", "mlx-vlm defaults", "mlx-vlm best"):
            if (shape.family, name, engine) == ("gemma3", "chat-8", "mlx-vlm defaults"):
                at_once = replace(
                    workload, asks=[replace(ask, arrival=0.0) for ask in workload.asks]
                )
                with pytest.raises(ValueError, match="concatenate"):
                    # Masks of prompts of several lengths (generate/ar.py), which the clock brings together or does not.
                    measure.measure(ENGINES[engine], model, at_once, None)
                continue
            trace = measure.measure(ENGINES[engine], model, workload, None)
            assert sum(map(len, trace.tokens.values())) == sum(
                ask.max_tokens for ask in workload.asks
            )
            with np.load(path) as answers:
                verdict = measure.compare(workload, trace.tokens, answers)
            assert shape.unchecked or verdict.describe({}) == "same", (name, engine)


def test_every_shape_has_a_twin_for_the_other_device_and_its_own_targets() -> None:
    kinds = {
        shape.family: {
            one.dtype for one in SHAPES.values() if one.family == shape.family
        }
        for shape in OTHERS
    }
    assert set(kinds) == {"gemma3", "qwen3_5", "llava"}
    assert all(dtypes == {"float32", "bfloat16"} for dtypes in kinds.values())
    args = parse(["--shape", "gemma3-small"])
    assert args.unchecked and "churn-8" not in args.workloads
    assert (
        report.targets(True, "llava-1b")
        == report.OTHERS_TARGETS
        != report.targets(True, "3b")
    )


def test_what_is_known_is_written_down_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is ended before its last round leaves the rounds before."""
    written: list[int] = []
    keep = comparison.keep

    def keeping(folder: Path, result: Any) -> None:
        written.append(
            sum(
                len(runs)
                for entry in result["workloads"].values()
                for runs in entry["engines"].values()
            )
        )
        keep(folder, result)

    monkeypatch.setattr(comparison, "keep", keeping)
    words = [
        "--shape",
        "tiny",
        "--workloads",
        "captions",
        "--engines",
        "vlm_batch defaults",
        "--unchecked",
        "--no-probes",
    ]
    comparison.main([*words, "--rounds", "2", "--out", str(tmp_path)])
    assert written == [1, 2, 2]
    words = [
        "--shape",
        "tiny",
        "--workloads",
        "captions",
        "--unchecked",
        "--no-probes",
        "--rounds",
        "40",
        "--seconds",
        "15",
    ]
    late = comparison.main([*words, "--engines", "vlm_batch", "mlx-vlm best"])[
        "workloads"
    ]["captions"]["engines"]
    assert late["vlm_batch"], "no engine takes the others' time"
    found = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert [
        run["answers"]
        for run in found["workloads"]["captions"]["engines"]["vlm_batch defaults"]
    ] == ["not compared"] * 2


def test_engines_take_turns_until_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that would end later is begun for none of them."""
    now, asked = [0.0], list[str]()

    class Remote:
        ready: dict[str, str] = {}

        def __init__(self, engine: str) -> None:
            self.engine = engine

        def ask(self, **command: Any) -> dict[str, Any]:
            now[0] += 10.0
            asked.append(self.engine)
            return {"seconds": 10.0}

    words = [
        "--shape",
        "tiny",
        "--workloads",
        "captions",
        "--engines",
        "vlm_batch",
        "mlx-vlm best",
        "--unchecked",
    ]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    args = parse([*words, "--rounds", "5", "--seconds", "45"])
    run = comparison.Comparison(args, comparison.Console(quiet=True), tmp_path)
    monkeypatch.setattr(run.remotes, "start", lambda engine: Remote(engine))
    run.run()
    found = {
        engine: len(runs) for engine, runs in run.found["captions"].items() if runs
    }
    assert found == {"vlm_batch": 2, "mlx-vlm best": 2}
    assert asked == ["vlm_batch", "mlx-vlm best", "mlx-vlm best", "vlm_batch"]


def test_other_tokens_are_wrong_unless_nearly_as_likely(
    answers: dict[str, dict[str, np.ndarray]],
) -> None:
    workload = make_workload("captions", TINY)
    stored = dict(answers["captions"])
    right = {ask.name: stored[f"{ask.source}/tokens"].tolist() for ask in workload.asks}
    assert measure.compare(workload, right, stored).is_right({})

    first = workload.asks[0].source
    best, logprobs = stored[f"{first}/best"][0], stored[f"{first}/logprobs"][0].copy()
    second = int(best[np.argsort(-logprobs)[1]])
    other = right | {first: [second, *right[first][1:]]}
    verdict = measure.compare(workload, other, stored)
    limits = {first: 1e-3}
    assert not verdict.is_right(limits) and "WRONG: 1 of 4 rows" in verdict.describe(
        limits
    )

    logprobs[np.argsort(-logprobs)[1]] = logprobs.max() - 1e-4
    stored[f"{first}/logprobs"] = np.concatenate(
        [logprobs[None], stored[f"{first}/logprobs"][1:]]
    )
    near = measure.compare(workload, other, stored)
    assert near.is_right(limits) and near.describe(limits).startswith(
        "near-ties: 1 of 4 rows"
    )
    assert not near.is_right({}) and not near.is_right({workload.asks[1].source: 1e-3})

    short = right | {first: right[first][:-1]}
    assert measure.compare(workload, short, stored).gaps == {first: math.inf}


@pytest.mark.parametrize("placement", list(Placement))
def test_a_join_copies_at_most_one_row_and_a_leave_nothing(
    placement: Placement, model: Any
) -> None:
    """Rows that join one by one, in caches of their own or in slabs."""
    workload = make_workload("churn-2", TINY)

    def make(
        model: Any, workload: Workload, contexts: Contexts | None = None
    ) -> ThisLibrary:
        engine = ThisLibrary(model, workload, contexts)
        engine.generator.rows.batch = DecodeGroups(FreeShapes(placement), workload.rows)
        return engine

    found = probe.copied_bytes(make, model, workload, Contexts(model, workload.asks))
    assert found["join_mb"] <= found["row_mb"] * 1.001
    assert found["leave_mb"] == 0


def test_the_engines_own_share_is_counted(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Clock(probe.Clock):
        def wrap(self, call: Any) -> Any:
            def counted(*args: Any, **keywords: Any) -> Any:
                calls.append(call.__name__)
                return call(*args, **keywords)

            return super().wrap(counted)

    monkeypatch.setattr(probe, "Clock", Clock)
    found = probe.own_share(ThisLibrary, model, make_workload("steady", TINY), None)
    assert 0 < found["own_share"] < 1
    assert {"encode", "prefill", "decode"} <= set(calls), (
        "a model's call was counted as the engine's own work"
    )


def test_ratios_leave_wrong_runs_out() -> None:
    right, wrong = {"seconds": 1.0, "right": True}, {"seconds": 0.1, "right": False}
    found = {
        "captions": {
            "vlm_batch": [right, wrong, right],
            "other": [{"seconds": 4.0, "right": True}] * 3,
        }
    }
    assert report.ratios(found, "captions", "other", "seconds") == [0.25, 0.25]
    assert (
        report.ratios(
            {"captions": {"vlm_batch": [wrong], "other": [right]}},
            "captions",
            "other",
            "seconds",
        )
        == []
    )
    assert report.spread([0.2, 0.5, 0.3]) == {"ratio": 0.3, "least": 0.2, "most": 0.5}


def test_tables_for_the_docs_have_medians_and_their_spread() -> None:
    def run(seconds: float, **more: Any) -> dict[str, Any]:
        said = {
            "ttft_p50": 0.5,
            "ttft_p95": 1.0,
            "itl_p50": 0.02,
            "itl_max": 0.2,
            "peak_mb": 100.0,
        }
        return {"seconds": seconds, **said, "right": True, "answers": "same", **more}

    engines = {
        "vlm_batch": [run(2.0), run(3.0), run(2.5)],
        "vlm_batch defaults": [run(1.9)],
        "reproducible": [run(2.2), run(3.3), run(2.5)],
        "mlx-vlm best": [
            run(4.0),
            run(4.0),
            run(4.0, right=False, answers="WRONG: 1 of 4 rows"),
        ],
    }
    kind = {
        "shape": "small",
        "device": "Device(cpu, 0)",
        "clock": "wall",
        "launches": "own",
    }
    first = {
        **kind,
        "workloads": {
            "chat-8": {"engines": {name: runs[:1] for name, runs in engines.items()}}
        },
    }
    rest = {
        **kind,
        "workloads": {
            "chat-8": {"engines": {name: runs[1:] for name, runs in engines.items()}}
        },
    }
    found, wanted = report.merged([first, rest])
    assert found == {"chat-8": engines} and wanted == report.targets(False, "tiny")
    text = report.markdown(found, wanted)
    assert (
        "| chat-8 | vlm_batch | 2.50 (2.00-3.00) | 0.50 / 1.00 | 20 / 200 |  | 100 (100-100) | same |"
        in text
    )
    assert (
        "| chat-8 | mlx-vlm best | 4.00 (4.00-4.00) |" in text
        and "WRONG: 1 of 4 rows" in text
    )
    assert (
        "| chat-8 | seconds | mlx-vlm best | 0.62 | 0.50 to 0.75, 2 rounds | 0.80: met |"
        in text
    )
    assert (
        "| chat-8 | seconds | mlx-vlm best, with our defaults | 0.47 | 0.47 to 0.47, 1 rounds | 0.80: met |"
        in text
    )
    assert (
        "| chat-8 | seconds | reproducible over vlm_batch | 1.10 | 1.00 to 1.10, 3 rounds | |"
        in text
    )
    with pytest.raises(ValueError, match="several kinds"):
        report.merged([first, {**rest, "clock": "work"}])


def test_every_draw_has_a_round_and_the_cost_of_reproducible_answers_is_one_word() -> (
    None
):
    for arguments, rounds in (
        ([], 2),
        (["--draws", "5"], 5),
        (["--draws", "2", "--rounds", "4"], 4),
    ):
        assert parse(arguments).rounds == rounds
    args = parse(["--reproducible"])
    assert args.engines == ["vlm_batch", "reproducible"]
    assert set(args.workloads) == {
        "chat-8",
        "chat-32",
        "captions",
        "documents",
        "single",
    }
    assert parse(
        ["--reproducible", "--workloads", "captions", "churn-2"]
    ).workloads == ["captions"]


def test_workloads_are_the_same_each_time() -> None:
    for name in WORKLOADS:
        once, again = make_workload(name, TINY), make_workload(name, TINY)
        for ask, other in zip(once.asks, again.asks, strict=True):
            assert (ask.name, ask.max_tokens, ask.arrival) == (
                other.name,
                other.max_tokens,
                other.arrival,
            )
            assert all(
                np.array_equal(value, other.inputs[key])
                for key, value in ask.inputs.items()
            )


def test_another_draw_has_other_arrivals_and_words() -> None:
    for name in WORKLOADS:
        first, other = make_workload(name, TINY), make_workload(name, TINY, draw=1)
        assert not np.array_equal(
            first.asks[0].inputs["input_ids"], other.asks[0].inputs["input_ids"]
        )
    arrivals = [
        [ask.arrival for ask in make_workload("chat-8", TINY, draw).asks]
        for draw in (0, 1, 2)
    ]
    assert len(set(map(tuple, arrivals))) == 3


def test_a_near_tie_is_what_the_precision_cannot_tell_apart(
    model: Any, tmp_path: Path
) -> None:
    rounded = build(TINY)
    rounded.update(
        tree_map(lambda array: array.astype(mx.bfloat16), rounded.parameters())
    )
    workload = make_workload("captions", TINY)
    measure.reference(rounded, workload, tmp_path / "answers.npz")
    with np.load(tmp_path / "answers.npz") as arrays:
        answers = dict(arrays)
    ask = workload.asks[0]
    found = [measure.rounding(rounded, ask, answers, step) for step in (0, 1)]
    assert all(1e-4 < value < 1 for value in found)
    assert rounded.language_model.model.norm.weight.dtype == mx.bfloat16  # as it was
    with pytest.raises(ValueError, match="nothing here is more exact"):
        measure.rounding(model, ask, answers, 0)


def test_compare_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--shape",
        "tiny",
        "--workloads",
        "captions",
        "--engines",
        "vlm_batch",
        "--rounds",
        "2",
        "--draws",
        "2",
    ]
    result = comparison.main(
        [
            *arguments,
            "--no-probes",
            "--apart",
            "--clock",
            "work",
            "--out",
            str(tmp_path),
        ]
    )
    runs = result["workloads"]["captions"]["engines"]["vlm_batch"]
    assert [run["answers"] for run in runs] == ["same", "same"] and all(
        run["right"] for run in runs
    )
    assert result["draws"] == [0, 1] and result["apart"]
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert (
        json.loads(last)
        == json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
        == result
    )


def test_bench_reports_every_request() -> None:
    some = load.Load(
        requests=5, rate=0.0, prompt_words=(2, 8), answer_tokens=(2, 6), check=2
    )
    with VLMBatcher(str(default_checkpoint())) as batcher:
        found = load.measure(load.Local(batcher), some)
    figures = found.figures()
    assert (
        figures["failed"] == 0 and figures["requests"] == 5 and figures["pictures"] == 2
    )
    assert figures["checked"] == figures["equal_to_alone"] == 2
    assert sum(stage["share"] for stage in figures["stages"].values()) == pytest.approx(
        1
    )
    out = io.StringIO()
    bench.show(found, out)
    assert "5 requests" in out.getvalue() and "decode" in out.getvalue()


def test_the_command_writes_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "--requests",
        "2",
        "--prompt-words",
        "2",
        "4",
        "--answer-tokens",
        "2",
        "3",
        "--json",
        "-",
    ]
    assert cli.main(arguments) == cli.ANSWERED
    printed = capsys.readouterr()
    assert json.loads(printed.out)["requests"] == 2
    assert "tokens/s" in printed.err
    assert cli.main(["bench", "--prompt-words", "9", "4"]) == cli.USAGE


def test_engines_are_watched_by_names_that_they_have() -> None:
    """Two benchmarks put clocks around the engine's methods; a renamed one would end them with an error."""
    watched = exactness.Engine(
        build(SHAPES["tiny"]),
        make_workload("single", SHAPES["tiny"]),
        exactness.WAYS["not"],
    )
    assert watched.spent.seconds == {}
    with VLMBatcher(default_checkpoint()) as batcher:
        assert pictures.watched(batcher).seconds == {}
