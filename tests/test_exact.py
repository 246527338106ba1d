"""Reproducible answers, bit for bit: alone and in company, in any order, however cut, kept and placed, in served precision."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import exact_cases, exact_table
from tests.exact_cases import (
    JOINED,
    KEYS,
    PRECISIONS,
    SCENARIOS,
    Arrival,
    NotServed,
    Way,
    adapter_of,
    alone,
    differences,
    engine_of,
    exact_of,
    inputs_of,
    is_same,
    joined,
    play,
)
from tests.exact_table import DATA, Record
from tests.zoo import FAMILIES
from vlm_batch import Caches, Request, SamplingParams, VLMBatcher
from vlm_batch.adapters import operations
from vlm_batch.adapters.cuda import plans
from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.products import (
    float32_products,
    hold_products,
    in_numbers,
    products_of,
    recorded,
)
from vlm_batch.arrays import as_mlx, map_arrays
from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.caches import Placement
from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.cli import main as cli
from vlm_batch.engine.compiled import CompiledDecode
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.shapes import NO_PROOF, FixedShapes
from vlm_batch.engine.trial import Trial
from vlm_batch.errors import OutOfMemory
from vlm_batch.loading import load_model
from vlm_batch.models import _kimi_k3, _minimax_m3_vl
from vlm_batch.policy import POLICIES, Policy
from vlm_batch.proofs import device as proof_device
from vlm_batch.proofs.bits import moving_product, step_bits
from vlm_batch.proofs.classes import best_class, classes_of, numbers_apart
from vlm_batch.proofs.proving import fixed_shapes, prove
from vlm_batch.proofs.shared import SharedCallProofs
from vlm_batch.records import Call, DecodeStep, Graphs, PromptKey
from vlm_batch.runtime import blas
from vlm_batch.runtime.device import Device
from vlm_batch.store.proofs import FOLDER, read_proof, write_proof

#: What the suite runs of ``scripts/exact_table``, which runs every family in every precision: one family of each kind. What a
#: row's bits can leak through is the batch's state, so kinds are told apart by the caches that a family has and the steps
#: that its adapter does its own way; families of a kind differ in their weights' shapes. Experts run on a CPU in few
#: bits and in float32 only. ``test_the_record_is_whole`` keeps the others from being forgotten.
KINDS = {
    "qwen3_vl": "bfloat16",  # keys and values alone, as in half of the families
    # the same with experts in groups, and latent attention
    "kimi_k25_groups": "4 bits",
    "qwen2_5_vl": "4 bits",  # prompts and pictures that could be taken together
    "hunyuan_vl": "bfloat16",
    "cohere_compass": "4 bits",  # windows
    "gemma3n": "bfloat16",
    "gemma3": "4 bits",  # windows, and pictures that see themselves whole
    "paligemma": "bfloat16",
    "falcon_ocr": "4 bits",
    "qwen3_5": "bfloat16",  # recurrent states
    "falcon_h1": "4 bits",  # recurrent states beside keys and values in a layer
    "inkling": "4 bits",
    "mllama": "bfloat16",  # cross-attention
    "florence2": "4 bits",
    "nemotron_parse": "bfloat16",
    # rows whose logits have widths of their own, and pictures of another type
    "molmo_point": "float16",
    "falcon_perception": "bfloat16",
    "deepseek_v4_text": "4 bits",  # several caches a layer
    "deepseek_v41": "4 bits",
    "glm5_next": "4 bits",
    "minimax_m3_vl": "4 bits",
    "unlimited_ocr": "4 bits",
    "llama4": "float32",  # blocks
    "qwen4_exp": "float32",  # an index beside the keys
}
#: These take seconds for each scenario: one is run that has company and kept beginnings.
SLOW = ("deepseek_v41", "glm5_next", "qwen4_exp", "minimax_m3_vl")
ALL_PRECISIONS = ("qwen2_vl", "lfm2_vl")
#: One family of each kind with keys that TurboQuant takes.
TURNED = (
    "qwen3_vl",
    "qwen2_5_vl",
    "hunyuan_vl",
    "cohere_compass",
    "gemma3n",
    "falcon_ocr",
    "qwen3_5",
    "falcon_h1",
    "mllama",
    "qwen4_exp",
)
#: What MLX says of products with experts in another precision on a CPU.
FLOAT32_ALONE = "only supports float32"
IN_SUITE = ("company", "backwards, joining late", "kept beginnings and features")


@pytest.fixture(scope="module", autouse=True)
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Proofs are measured here, and kept for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("proofs")))
        yield


def check(name: str, precision: str, scenario: str, **how: Any) -> None:
    try:
        found = differences(name, precision, scenario, **how)
    except NotServed as error:
        if FLOAT32_ALONE not in str(error):
            raise
        pytest.skip(
            f"{name} cannot be run in {precision} on this device, alone either: {error}"
        )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_in_a_served_precision(name: str) -> None:
    for scenario in IN_SUITE[-1:] if name in SLOW else IN_SUITE:
        check(name, KINDS[name], scenario)


@pytest.mark.parametrize("far", [_minimax_m3_vl.FAR, 4])
@pytest.mark.parametrize("layout", Placement, ids=lambda layout: layout.value)
def test_rows_that_choose_nothing_beside_rows_that_do(
    layout: Placement, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a row attends goes by its own length, or by a slab's columns, and by no neighbour's."""
    monkeypatch.setattr(_minimax_m3_vl, "FAR", far)
    lengths = [
        Arrival(f"text:{seed}:{length}", at=seed)
        for seed, length in enumerate((3, 40, 20, 100, 2))
    ]
    monkeypatch.setitem(
        SCENARIOS, "uneven lengths", (lambda name: lengths, Way(max_rows=4))
    )
    check("minimax_m3_vl", "float32", "uneven lengths", layout=layout)


def test_the_record_is_whole() -> None:
    """``scripts/exact_table`` has run every family in every precision on a CPU, and nothing differed."""
    recorded = json.loads(DATA.read_text(encoding="utf-8"))["cpu"]["cells"]
    missing = [
        (name, one)
        for name in FAMILIES
        for one in PRECISIONS
        if one not in recorded.get(name, {})
    ]
    assert not missing, (
        f"run scripts/exact_table {' '.join(sorted({name for name, _ in missing}))}"
    )
    assert not {
        name
        for name, cells in recorded.items()
        if any("left out" in cell for cell in cells.values())
    }
    unlike = {
        name: cells
        for name, cells in recorded.items()
        if not all(map(_is_right, cells.values()))
    }
    assert not unlike


def _is_right(cell: dict[str, Any]) -> bool:
    return bool(cell["same"]) or FLOAT32_ALONE in cell["said"].get("not served", "")


def test_a_process_that_dies_takes_its_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a device ends the process that met it: said of that cell, and the family's other cells run in another."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    plain = subprocess.Popen
    monkeypatch.setattr(
        exact_table.subprocess,
        "Popen",
        lambda command, **how: plain([sys.executable, str(script)], **how),
    )
    args = Namespace(
        precisions=["a", "b", "c"],
        scenarios=["x"],
        processes=1,
        seconds=60.0,
        grace=1.0,
        verbose=False,
    )
    record = Record(tmp_path / "record.json", ["x"])
    exact_table.run(args, ["one", "two"], record)
    kept = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["gpu"][
        "cells"
    ]
    same = {
        (name, one)
        for name, cells in kept.items()
        for one, cell in cells.items()
        if cell["same"]
    }
    assert same == {("one", "a"), ("one", "c"), ("two", "a"), ("two", "c")}
    assert kept["two"]["b"]["said"] == {"raised": "its process ended with 3"}
    assert len(record.found) == 6


WORKER = """
import json, os, sys
print(json.dumps({"device": {"device": "gpu"}, "versions": {}}), flush=True)
for line in sys.stdin:
    name, precisions = json.loads(line)
    for one in precisions:
        if one == "b":
            os._exit(3)
        print(json.dumps({"family": name, "precision": one, "counts": [2], "found": {"x": "same"}, "seconds": 0}), flush=True)
"""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ALL_PRECISIONS)
def test_every_precision_and_scenario(name: str, precision: str, scenario: str) -> None:
    check(name, precision, scenario)


@pytest.mark.parametrize("name", ["gemma3", "mimo_v2"])
def test_slabs(name: str) -> None:
    """Slabs keep their own promise on a CPU, too: the tests' rows fit one width."""
    for scenario in ("company", "backwards, joining late"):
        check(
            name,
            "4 bits" if name == "mimo_v2" else "bfloat16",
            scenario,
            layout=Placement.SLAB,
        )


@pytest.mark.parametrize(
    "kv",
    [
        KVQuantisation(8, 32),
        KVQuantisation(4, 32, start=13),
        KVQuantisation(3.5, 32, "turboquant"),
    ],
    ids=str,
)
def test_quantised_keys_and_values(kv: KVQuantisation) -> None:
    for scenario in IN_SUITE:
        check("qwen2_vl", "bfloat16", scenario, kv=kv)


@pytest.mark.parametrize("name", TURNED)
def test_turboquant(name: str) -> None:
    """Ten kinds, in the scenario that has company and kept beginnings."""
    kv = KVQuantisation(3.5, scheme="turboquant")
    check(name, KINDS[name], IN_SUITE[-1], kv=kv)


def test_beginnings_are_taken_over() -> None:
    """The scenario of kept beginnings is one: rows do go on from others' chunks, and from a whole equal prompt."""
    name, exact = "qwen2_vl", exact_of("qwen2_vl", "bfloat16")
    make, way = SCENARIOS["kept beginnings and features"]
    answers = play(
        name, engine_of(adapter_of(name, "bfloat16"), exact, way), make(name)
    )
    taken = [answer.cached for answer in answers]
    assert any(count and count % exact.grid == 0 for count in taken)
    assert any(count % exact.grid for count in taken)


@pytest.mark.parametrize("counts", [(1,), (2,), (3, 5), (8,)])
def test_groups_and_idle_places(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in groups of whatever numbers, with idle places, are the rows alone: on this CPU in bfloat16 all numbers agree.

    No step has another number, also once rows have left.
    """
    name, precision = "lfm2_vl", "bfloat16"
    proven = exact_of(name, precision)
    if proven.counts[:3] != (1, 2, 3):
        pytest.skip(f"on this CPU only {proven.counts} agree")
    exact, adapter = replace(proven, counts=counts), adapter_of(name, precision)
    decode, decoded = adapter.decode, set[int]()

    def counted(step: Any, call: Any) -> mx.array:
        decoded.add(len(step.tokens))
        return decode(step, call)

    monkeypatch.setattr(adapter, "decode", counted)
    engine = engine_of(adapter, exact, Way(max_rows=7))
    answers = play(
        name, engine, [Arrival(key, at=index) for index, key in enumerate(KEYS)]
    )
    assert decoded == set(counts)
    monkeypatch.undo()
    for key, answer in zip(KEYS, answers, strict=True):
        assert answer.bits == alone(name, precision, key, proven).bits


#: Two rows by which a slab grows twice, beside short ones, of which one is decoding when they come.
#: Long answers, so that all decode beside each other, also where loaders take longer than steps.
GROWING = [
    Arrival("text:4:9", tokens=48),
    *(Arrival(f"text:{key}", 2, 24) for key in ("6:300", "5:26", "7:560")),
]


def decode_by_columns(patch: pytest.MonkeyPatch, least: int) -> None:
    """Make up kernels such as CUDA has for float32: attention of one query has other bits over fewer columns than ``least``."""
    attend = operations.attend

    def moved(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any = None,
    ) -> mx.array:
        found = attend(queries, keys, values, scale, mask)
        is_moved = queries.shape[2] == 1 and isinstance(mask, mx.array)
        return found * (1 + min(keys.shape[2], least) / 2**13) if is_moved else found

    patch.setattr(operations, "attend", moved)


@pytest.mark.parametrize(
    ("least", "widths"),
    [(256, (256, 512, 1024, 2048)), (512, (512, 1024, 2048)), (4096, (2048,))],
)
def test_columns_are_a_shape(
    least: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slab that grows changes no bit of the rows in it, whatever attention's kernels go by."""
    name, precision = "qwen2_vl", "bfloat16"
    adapter = adapter_of(name, precision)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    decode_by_columns(monkeypatch, least)
    proven = exact_of(name, precision, Placement.SLAB)
    assert proven.widths == widths and len(proven.counts) > 1
    assert grown(name, adapter, proven) == (True, 1)
    assert grown(name, adapter, replace(proven, widths=(256,))) == (True, 3), (
        "a forward for each number of columns"
    )
    claimed = replace(proven, widths=(256, 512, 1024))
    assert grown(name, adapter, claimed) == (least == 256, 1), (
        "what is not asked for moves bits"
    )


def round_as_tf32(patch: pytest.MonkeyPatch) -> None:
    """Let layers round their rows to ten bits behind the point, as CUDA's do by default."""
    plain: Any = nn.Linear.__call__

    def rounded(layer: Any, rows: mx.array) -> mx.array:
        bits = (rows.view(mx.uint32) + 2**12) & (2**32 - 2**13)
        answer: mx.array = plain(layer, bits.view(mx.float32))
        return answer

    patch.setattr(nn.Linear, "__call__", rounded)


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_products_round_away_is_seen(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In TF32 a step's logits hardly show that attention goes by columns: what the layers' products get does.

    Nine requests whose slab grows twice have other bits than alone if logits are all that is compared, as on an H100.
    """
    name, precision = "gemma3", "float32"
    monkeypatch.setenv(FOLDER, str(tmp_path))
    round_as_tf32(monkeypatch)
    if not is_watched:
        monkeypatch.setattr(
            adapter_of(name, precision), "watched", lambda: nullcontext([])
        )
    for remembered in (exact_cases.served, exact_cases.alone):
        remembered.cache_clear()
    try:
        differ = differences(name, precision, "slabs that grow twice")
    finally:
        for remembered in (exact_cases.served, exact_cases.alone):
            remembered.cache_clear()
    assert bool(differ) is not is_watched, differ


def grown(name: str, adapter: Any, exact: FixedShapes) -> tuple[bool, int]:
    """(whether rows have the bits that each has alone, the most forwards of a step)"""
    right = [
        play(name, engine_of(adapter, exact, Way(max_rows=1)), [replace(one, at=0)])[0]
        for one in GROWING
    ]
    engine = engine_of(adapter, exact, Way(max_rows=8))
    groups = groups_of(engine)
    return all(map(is_same, play(name, engine, GROWING), right)), max(map(len, groups))


def groups_of(engine: BatchGenerator) -> list[list[int]]:
    """The rows of each group of an engine, after each of its steps from now on."""
    found: list[list[int]] = []
    step = engine.step

    def watched() -> Any:
        events = step()
        found.append([len(group) for group in engine.rows.batch.groups])
        return events

    engine.step = watched  # type: ignore[method-assign]
    return found


def test_a_row_that_outgrows_its_columns_joins_those_that_have_as_many() -> None:
    """Rows of 250 and 300 tokens: the first decodes apart until it has 256, and beside the other then."""
    name, precision = "qwen2_vl", "bfloat16"
    exact = replace(exact_of(name, precision, Placement.SLAB), widths=(256,))
    engine = engine_of(adapter_of(name, precision), exact, Way(max_rows=4))
    found = groups_of(engine)
    arrivals = [Arrival("text:5:250", tokens=16), Arrival("text:6:300", tokens=16)]
    answers = play(name, engine, arrivals)
    assert [1, 1] in found and [2] in found
    for arrival, answer in zip(arrivals, answers, strict=True):
        assert is_same(
            answer, alone(name, precision, arrival.key, exact, arrival.tokens)
        )


def joined_of(name: str, precision: str) -> FixedShapes:
    """What was proven of a model in slabs, with calls that hold several prompts or pictures."""
    return joined(exact_of(name, precision, Placement.SLAB), name, precision)


class Calls:
    """The shapes (R, L) of arrays of prompts, and the patches in calls of a tower. ``moves``: what comes of a call goes by how
    many there are in it."""

    def __init__(self, adapter: Any, patch: pytest.MonkeyPatch, *, moves: bool) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.patches: list[int] = []
        forward, fresh = adapter.forward, adapter.tower_class.fresh

        def by_rows(
            ids: mx.array, embeds: mx.array | None, cache: Any, extra: Any
        ) -> mx.array:
            if embeds is not None:
                self.prompts.append(embeds.shape[:2])
                embeds = embeds * (1 + embeds.shape[0] / 64) if moves else embeds
            return forward(ids, embeds, cache, extra)  # type: ignore[no-any-return]

        def by_patches(tower: Any, args: Any, kwargs: Any) -> Any:
            self.patches.append(args[0].shape[0])
            found, share = fresh(tower, args, kwargs), args[0].shape[0] / 1024
            return (
                map_arrays(found, lambda array: array * (1 + share)) if moves else found
            )

        patch.setattr(adapter, "forward", by_rows)
        patch.setattr(adapter.tower_class, "fresh", by_patches)


#: Two that share prompts and pictures, one that shares pictures with features for several layers, and one that shares neither.
SHARING = {
    "qwen2_vl": "bfloat16",
    "qwen2_5_vl": "float32",
    "qwen3_vl": "bfloat16",
    "internvl_chat": "float32",
}


@pytest.mark.parametrize("name", SHARING)
def test_a_call_has_one_shape_whoever_is_in_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in company, late, after one was cancelled, from kept beginnings: idle prompts and pictures make up the number.

    Kernels that go by the shape of a call are made up: what ran in another shape would have other bits.
    """
    adapter, exact = adapter_of(name, SHARING[name]), joined_of(name, SHARING[name])
    calls = Calls(adapter, monkeypatch, moves=True)
    found: dict[str, Any] = {}
    for key in (*KEYS, "two:7"):
        engine = engine_of(adapter, exact, Way(max_rows=1))
        (found[key],) = play(name, engine, [Arrival(key)])
    del calls.patches[:]  # of proofs, too
    for make, way in SCENARIOS.values():
        engine = engine_of(adapter, exact, way)
        engine.insert("99", as_mlx(inputs_of(name, "text:5:26")))
        engine.step()
        engine.cancel("99")
        arrivals = [*make(name), *(Arrival(key, at=1) for key in KEYS)]
        for arrival, answer in zip(arrivals, play(name, engine, arrivals), strict=True):
            assert is_same(answer, found[arrival.key]), arrival
    if name.startswith("qwen2"):
        assert {(8, 16), (4, 32), (1, 32)} <= set(calls.prompts)
    if name.startswith("qwen"):
        assert min(calls.patches) > JOINED["call_patches"] // 2


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_prompts_and_pictures_share_calls(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few calls as hold them, and the answers that they get alone."""
    name = "qwen2_vl"
    adapter, exact = adapter_of(name, precision), joined_of(name, precision)
    texts = [f"text:{seed}:{length}" for seed in (5, 6, 7, 8, 9) for length in (9, 21)]
    way = Way(max_rows=16)
    for keys in (texts, [f"image:{seed}:0" for seed in range(1, 7)]):
        right = [
            play(
                name,
                engine_of(adapter, exact, replace(way, max_rows=1)),
                [Arrival(key)],
            )[0]
            for key in keys
        ]
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(adapter, patch, moves=False)
            answers = play(
                name, engine_of(adapter, exact, way), [Arrival(key) for key in keys]
            )
        assert all(map(is_same, answers, right))
        if keys is texts:
            # five of each length
            assert sorted(calls.prompts) == [(4, 32), (4, 32), (8, 16)]
        else:
            # six of 16 patches, four to a call
            assert (calls.patches, calls.prompts) == ([64, 64], [(8, 16)])


class Sums:
    """A product whose sums run in another order in places from ``turn`` on."""

    is_head = False

    def __init__(self, turn: int) -> None:
        self.turn, self.width = turn, 64

    def rows(self, count: int) -> mx.array:
        return mx.array(
            np.random.RandomState(0)
            .standard_normal((count, 1, self.width))
            .astype(np.float32)
        )

    @property
    def call(self) -> Any:
        def call(x: mx.array) -> mx.array:
            halves = x.reshape(*x.shape[:-1], 2, self.width // 2)
            turned = halves.sum(axis=-1).sum(axis=-1, keepdims=True)
            return mx.concatenate(
                [mx.cumsum(x, axis=-1)[: self.turn, ..., -1:], turned[self.turn :]]
            )

        return call


def test_a_product_that_goes_by_the_place_is_found() -> None:
    sums: Any = Sums
    assert not moving_product([sums(4)], 4, 100)
    assert not moving_product([sums(0)], 4, 100)
    for turn in (1, 2, 3):
        found = moving_product([sums(4), sums(turn)], 4, 100)
        assert "of 400 rows go by the place" in found


@pytest.mark.parametrize("is_attention", [True, False])
def test_prompts_are_alone_where_their_place_matters(
    is_attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In attention alone: it is done prompt by prompt. Elsewhere: each prompt has a call of its own. Both is kept."""
    name = "qwen2_vl"
    adapter, exact = adapter_of(name, "bfloat16"), joined_of(name, "bfloat16")
    forward = adapter.forward

    def by_place(
        ids: mx.array, embeds: mx.array | None, cache: Any, extra: Any
    ) -> mx.array:
        if embeds is not None and not (is_attention and current().attends_apart):
            embeds = embeds * (
                1 + mx.arange(embeds.shape[0])[:, None, None] / 64
            ).astype(embeds.dtype)
        return forward(ids, embeds, cache, extra)

    monkeypatch.setattr(adapter, "forward", by_place)
    monkeypatch.setenv(
        FOLDER, str(Path(os.environ[FOLDER]) / f"by place {is_attention}")
    )
    assert exact.prompts(9) == (8 if is_attention else 1)
    assert exact.joint.attends_apart(8, 16) is is_attention
    assert "goes by the place" in next(iter(exact.joint.found.values()))
    keys = [f"text:{seed}:9" for seed in (5, 6, 7)]
    right = [
        play(name, engine_of(adapter, exact, Way(max_rows=1)), [Arrival(key)])[0]
        for key in keys
    ]
    answers = play(
        name, engine_of(adapter, exact, Way(max_rows=4)), [Arrival(key) for key in keys]
    )
    assert all(map(is_same, answers, right))
    monkeypatch.setattr(adapter, "forward", forward)
    kept = joined_of(name, "bfloat16")
    assert kept.prompts(9) == exact.prompts(9)
    assert kept.joint.attends_apart(8, 16) is is_attention


def test_nothing_is_decided_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go by chance: a request waits, and is tried again, with the bits that it always has."""
    name = "qwen2_vl"
    adapter = adapter_of(name, "bfloat16")
    right = [
        play(
            name, engine_of(adapter, joined_of(name, "bfloat16"), Way()), [Arrival(key)]
        )[0]
        for key in KEYS
    ]
    monkeypatch.setenv(FOLDER, str(Path(os.environ[FOLDER]) / "without memory"))
    failures = 4

    def fails(*given: Any) -> str:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")
        return moving_product(*given)

    monkeypatch.setattr("vlm_batch.proofs.shared.moving_product", fails)
    exact = joined_of(name, "bfloat16")
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        exact.prompts(9)
    assert exact.joint.tries and not exact.joint.found
    answers = play(
        name, engine_of(adapter, exact, Way(max_rows=4)), [Arrival(key) for key in KEYS]
    )
    assert failures < 0
    assert all(map(is_same, answers, right))


def test_a_proof_without_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **how: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")

    monkeypatch.setenv(FOLDER, str(Path(os.environ[FOLDER]) / "not kept"))
    monkeypatch.setattr("vlm_batch.proofs.proving.step_bits", fails)
    adapter = adapter_of("lfm2_vl", "bfloat16")
    with pytest.raises(OutOfMemory, match="too little memory to try numbers of rows"):
        fixed_shapes(adapter)
    monkeypatch.undo()
    assert len(fixed_shapes(adapter).counts) > 1


class Always(SharedCallProofs):
    """A proof of everything."""

    def __init__(self) -> None:
        pass

    def prompts(self, most: int, length: int) -> int:
        return most


def test_prompts_fill_a_call_up_to_its_tokens() -> None:
    exact = FixedShapes(
        (2, 4, 8),
        Placement.SLAB,
        grid=1024,
        pad_to=64,
        call_tokens=1280,
        joint=Always(),
    )
    assert [
        exact.prompts(length) for length in (1, 64, 65, 300, 320, 321, 640, 641, 2000)
    ] == [
        16,
        16,
        8,
        4,
        4,
        2,
        2,
        1,
        1,
    ]
    assert (
        replace(exact, pad_to=0).prompts(64)
        == replace(exact, joint=NO_PROOF).prompts(64)
        == 1
    )
    assert replace(exact, stops=(32,)).prompts(64) == 1, "two chunks"
    config = Policy(encode_together=16)
    with_pictures = replace(exact, call_patches=64)
    assert exact.limited(config).encode_together == 1
    assert with_pictures.limited(config).encode_together == 16
    apart = replace(with_pictures, joint=NO_PROOF)
    assert apart.limited(config).encode_together == 1
    assert (
        exact.settings
        != replace(exact, call_tokens=640).settings
        != replace(exact, joint=NO_PROOF).settings
    )


HASWELL = """
from vlm_batch.runtime import blas
blas.preload_openblas()
blas.limit_threads(1)
from dataclasses import replace
import json
from tests.exact_cases import *
name = "qwen2_vl"
exact = exact_of(name, "float32")
found = [one for scenario in SCENARIOS for one in differences(name, "float32", scenario)]
loose = replace(exact, counts=(1, 2, 4, 8))
engine = engine_of(adapter_of(name, "float32"), loose, Way(max_rows=8))
answers = play(name, engine, company(name))
moved = sum(a.bits != alone(name, "float32", arrival.key, exact).bits for a, arrival in zip(answers, company(name)))
mixed = exact_of("deepseek_v4_text", "4 bits").counts
found += differences("deepseek_v4_text", "4 bits", "company")
print(json.dumps([exact.counts, found, moved, mixed, blas.facts()["blas"]]))
"""


@pytest.mark.skipif(
    not blas.facts()["core"] or not blas.facts()["blas"],
    reason="MLX's products do not go through OpenBLAS",
)
def test_where_products_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    """OpenBLAS 0.3.15's kernels for Haswell sum four rows otherwise than three: held to one class nothing moves, and else it
    does. Those of 0.3.3, which older OpenCV brings, sum them alike. A model in 4 bits mixes its streams in float32, outside
    layers."""
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        blas.CORE_TYPE: "Haswell",
        FOLDER: str(tmp_path),
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HASWELL],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts, found, moved, mixed, library = json.loads(done.stdout.splitlines()[-1])
    assert not found
    assert ({3, 8} <= set(counts)) == ({3, 8} <= set(mixed)) == (moved == 0)
    assert moved > 0 or "0.3.15" not in library


# The parts


def test_chunks_end_by_the_prompt_alone() -> None:
    exact = FixedShapes(grid=8, stops=(13,))
    assert exact.ends(30) == (8, 13, 16, 24, 30)
    assert FixedShapes(grid=8).ends(17) == (8, 17)  # no chunk of one token
    assert FixedShapes(grid=8).ends(1) == (1,)
    assert FixedShapes(grid=8).ends(30, ((5, 12),)) == (5, 12, 16, 24, 30)
    assert FixedShapes(grid=8).ends(30, ((0, 2**31),)) == (30,)
    longer, shorter = FixedShapes(grid=8).ends(40), FixedShapes(grid=8).ends(21)
    assert longer[:2] == shorter[:2]


def test_equal_keys_mean_equal_chunks() -> None:
    def key(length: int) -> PromptKey:
        rows = np.zeros((length, 3), dtype=np.int64)
        rows[:, 0] = np.arange(length)
        return PromptKey(rows)

    exact = FixedShapes(grid=8)
    one, other = exact.key(key(20)), exact.key(key(30))
    same = (one.positions == other.positions[:20]).all(axis=1)
    assert same[:16].all()
    assert not same[16:].any()  # their chunks end elsewhere
    assert one.before_span(11) == 8
    assert (np.asarray(one.answer) != 0).all()
    joined = FixedShapes(
        grid=64, stops=(16,), pad_to=16, call_tokens=64, joint=Always()
    )
    # alone in its array, and beside others
    whole, first = joined.key(key(16)), joined.key(key(30))
    assert not (whole.positions == first.positions[:16]).all(axis=1).any()


def test_a_class_is_chosen_by_what_it_costs() -> None:
    slab, rows = Placement.SLAB, Placement.ROWS
    assert best_class(((1,), (2, 4, 8, 16, 32)), slab) == (2, 4, 8, 16, 32)
    assert best_class(((1, 2, 4), (8, 16, 32)), slab) == (8, 16, 32)
    assert best_class(((1, 2, 3), (4, 8)), rows) == (1, 2, 3)
    assert best_class((), rows) == (1,)
    assert best_class(((2, 4, 8, 16, 32, 64),), slab) == (2, 4, 8, 16, 32, 64)
    # whatever else is tried
    assert (
        best_class(((16, 64), (32,)), slab) == best_class(((16,), (32,)), slab) == (32,)
    )
    assert classes_of({1: "a", 2: "b", 4: "b"}) == ((1,), (2, 4))


def test_few_products_that_disagree_have_numbers_of_their_own() -> None:
    slab, all_agree = Placement.SLAB, dict.fromkeys((2, 4, 8, 16, 32, 64), (b"",))
    odd = dict.fromkeys((2, 4, 8, 16), (b"a",)) | dict.fromkeys((32, 64), (b"b",))
    # filled up, not in parts
    assert numbers_apart({"one": all_agree, "two": odd}, slab) == {"two": (32, 64)}
    del odd[64]
    # whatever else is tried
    assert numbers_apart({"one": all_agree, "two": odd}, slab) == {"two": (32,)}
    assert numbers_apart({"one": dict.fromkeys((2, 4, 8, 32), (b"",))}, slab) == {
        "one": (2, 4, 8, 32)
    }
    assert numbers_apart({"one": all_agree}, slab) == {}
    # there is no number for one of them
    assert numbers_apart({"one": {}, "two": odd}, slab) == {}
    assert (
        numbers_apart({"one": {64: (b"still",)}}, slab) == {}
    )  # nor for less rows than are tried by those alone who have many
    assert numbers_apart(dict.fromkeys(("one", "two", "three"), odd), slab) == {}
    assert numbers_apart({"one": all_agree, "two": odd}, Placement.ROWS) == {}


@pytest.mark.parametrize("numbers", [(32,), (2, 4), (3,), (2, 8, 16)], ids=str)
def test_a_product_is_computed_in_its_numbers_alone(numbers: tuple[int, ...]) -> None:
    seen: list[int] = []

    def double(rows: mx.array) -> mx.array:
        seen.append(len(rows))
        return rows * 2

    for count in (1, 2, 3, 5, 8, 33, 64):
        rows = mx.arange(count * 4).reshape(count, 1, 4)
        assert in_numbers(double, rows, numbers).tolist() == (rows * 2).tolist()
    assert set(seen) <= set(numbers)
    # chunks of prompts, not rows of a step
    in_numbers(double, mx.zeros((5, 7, 4)), numbers)
    assert seen[-1] == 5
    in_numbers(double, mx.zeros((300, 4)), numbers)  # or a chunk's positions as rows
    assert seen[-1] == 300


class Layers(nn.Module):
    """Two products of each kind of layer, of which one kind's are held."""

    def __init__(self) -> None:
        super().__init__()
        plain = [
            nn.Linear(64, 32),
            nn.Linear(64, 96),
            nn.Embedding(48, 64),
            nn.Embedding(80, 64),
        ]
        self.layers = [
            *plain,
            *(type(layer).to_quantized(layer, 32, 4) for layer in plain),  # type: ignore[attr-defined]
        ]


@pytest.mark.parametrize("at", range(8))
def test_any_kind_of_layer_can_be_held(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = Layers(), mx.random.normal((3, 1, 64))

    def answers() -> list[Any]:
        return [
            getattr(layer, "as_linear", layer)(rows).shape for layer in model.layers
        ]

    def product() -> Any:
        return next(one for one in products_of(model) if one.layer is model.layers[at])

    shapes = answers()
    kinds = [type(layer) for layer in model.layers]
    held = str(product())
    computed: list[int] = []
    plain = kinds[at]
    name = "as_linear" if "as_linear" in vars(plain) else "__call__"
    call: Any = vars(plain)[name]

    def counted(self: Any, x: mx.array) -> Any:
        computed.append(len(x))
        return call(self, x)

    monkeypatch.setattr(plain, name, counted)
    hold_products(model, {held: (8,)})
    assert answers() == shapes and sorted(computed) == [3, 8]
    assert [str(product) for product in products_of(model)].count(held) == 1
    # tried as it is
    assert product().call(rows).shape == shapes[at] and computed[-1] == 3
    hold_products(model, {})
    assert [type(layer) for layer in model.layers] == kinds


def test_a_step_holds_odd_products_to_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on an H200: one product of the 3B shape has other bits from more than 16 rows on."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    precision, slab = "bfloat16", Placement.SLAB
    adapter = adapter_of("qwen2_vl", precision)
    odd = next(layer.mlp.down_proj for layer in adapter.language.model.layers)
    kind, shape = (type(odd), odd.weight.shape)
    call: Any = kind.__call__

    def other(self: Any, x: mx.array) -> mx.array:
        out: mx.array = call(self, x)
        return (
            out * (1 + 2**-6)
            if self.weight.shape == shape and x.size > 16 * x.shape[-1]
            else out
        )

    monkeypatch.setattr(kind, "__call__", other)
    proof = prove(adapter, None, slab)
    assert (
        proof.best(slab) == (2, 4, 8, 16, 32)
        and "numbers of rows of their own" in proof.how
    )
    ((name, numbers),) = proof.products
    assert numbers == (32,) and prove(adapter, None, slab) == proof  # from its file
    # a request's bits do not go by who else may be there
    more = prove(adapter, None, slab, max_rows=64)
    assert more.best(slab) == (2, 4, 8, 16, 32, 64) and more.products == (
        (name, (32, 64)),
    )
    few, many = (
        FixedShapes(one.best(slab), slab, products=one.products)
        for one in (proof, more)
    )
    assert few.settings == many.settings
    held = step_bits(Trial(few.adapter(adapter), None, few), (2, 64))
    assert held[256][2] == held[256][64]
    loose = step_bits(Trial(adapter, None, few), (2, 32))
    assert loose[256][2] != loose[256][32]
    assert (
        products_of(adapter.with_products(dict(proof.products)).language)
        and prove(adapter, None, slab, max_rows=64) == more
    )
    assert not differences("qwen2_vl", precision, "company", layout=slab)


def test_products_in_float32_are_recorded_by_whatever_computes_them() -> None:
    half = mx.random.normal((2, 1, 64)).astype(mx.bfloat16)
    rows = half.astype(mx.float32)
    weight = mx.random.normal((64, 8)).astype(mx.bfloat16)
    plain = nn.Linear(64, 24)
    packed = nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4)
    with recorded() as found:
        for one in (
            half @ weight,
            rows @ weight,
            mx.matmul(rows, weight.astype(mx.float32)),
            rows @ rows.swapaxes(1, 2),
        ):
            mx.eval(one)
        mx.eval(plain(rows), packed(rows))
    assert found == [
        (64, 8, ()),
        (64, 8, ()),
        (64, 24, ()),
        (64, 32, (32, 4, "affine")),
    ]
    products = float32_products(found)
    assert [product.call(product.rows(3)).shape for product in products] == [
        (3, 1, 8),
        (3, 1, 24),
        (3, 1, 32),
    ]
    with recorded() as found:
        pass
    mx.eval(rows @ weight)
    assert not found


@pytest.mark.parametrize("precision", ["float32", "4 bits"])
def test_made_up_weights_lie_as_the_models_do(precision: str) -> None:
    """A product is tried by the kernels that the model's own meets: these go by how weights lie, and by the rows' shape."""
    for product in products_of(adapter_of("qwen2_vl", precision).language):
        call: Any = product.call
        weight = getattr(call, "__self__", call).weight
        array = np.array(
            weight.view(mx.uint16) if weight.dtype == mx.bfloat16 else weight,
            copy=False,
        )
        assert array.strides == (array.shape[1] * array.itemsize, array.itemsize)
        assert product.rows(3).shape == (3, 1, product.width)


def test_proofs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "new"))
    key = {"device": {"name": "x"}, "counts": (1, 2)}
    assert read_proof(key, dict) is None
    write_proof(key, {"classes": [[1, 2]]})
    assert read_proof(key, dict) == {"classes": [[1, 2]]}
    assert read_proof({**key, "counts": (1, 4)}, dict) is None
    (kept,) = (tmp_path / "new" / "classes").iterdir()
    kept.write_text("{", encoding="utf-8")
    assert read_proof(key, dict) is None
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    write_proof(key, {"classes": []})  # no folder can be made there
    assert read_proof(key, dict) is None


def test_a_changed_kernel_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, sources = adapter_of("qwen2_vl", "bfloat16"), Path.read_text
    key = proof_device.model_key(adapter, None)
    proof_device._sources.cache_clear()
    assert proof_device.model_key(adapter, None) == key

    def changed(path: Path, *how: Any, **named: Any) -> str:
        return sources(path, *how, **named) + "//" * (path.name == "delta.cu")

    monkeypatch.setattr(Path, "read_text", changed)
    proof_device._sources.cache_clear()
    assert proof_device.model_key(adapter, None) != key
    proof_device._sources.cache_clear()


def test_what_agrees_nowhere_runs_a_row_at_a_time_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapter_of("qwen2_vl", "bfloat16")
    monkeypatch.setattr(
        "vlm_batch.proofs.proving.read_proof",
        lambda key, parse: parse(
            {
                "classes": [[1]],
                "how": "it was compared",
                "graphs": False,
                "products": [],
                "widths": [],
            }
        ),
    )
    with pytest.warns(
        UserWarning,
        match="qwen2_vl decodes a row at a time on this device: it was compared",
    ):
        assert fixed_shapes(adapter).counts == (1,)


def test_kernels_go_by_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shape's attention is does not depend on how often it came before, where an adapter goes by shapes."""
    spelled: list[tuple[int, ...]] = []
    monkeypatch.setattr(operations, "counts_launches", lambda: True)
    monkeypatch.setattr(plans, "takes_plans", lambda queries: True)
    monkeypatch.setattr(plans, "USES_BEFORE_PLAN", 0)

    def spell(queries: mx.array, *rest: Any) -> mx.array:
        spelled.append(queries.shape)
        return queries

    monkeypatch.setattr(plans, "attend_unfused", spell)
    queries, keys = mx.zeros((1, 2, 5, 16)), mx.zeros((1, 2, 9, 16))
    operations.attend(queries, keys, keys, 1.0, None)
    assert not spelled
    monkeypatch.setattr(plans, "current", lambda: Call(is_fixed=True))
    operations.attend(queries, keys, keys, 1.0, None)
    # a lone query without a mask, too
    operations.attend(queries[:, :, :1], keys, keys, 1.0, None)
    assert spelled == [(1, 2, 5, 16), (1, 2, 1, 16)]


def test_kimi_k3_weighs_earlier_layers_along_the_last_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Along the first one a softmax of 2 and 3 rows has other bits than one of 4 on CUDA, too seldom for a proof to see it."""
    file = vars(sys.modules[type(adapter_of("kimi_k3", "float32").language).__module__])
    assert file["_attn_res_combine"] is _kimi_k3.HOOKS["_attn_res_combine"].either
    axes, softmax = [], mx.softmax

    def watched(scores: mx.array, axis: int | None = None, **options: Any) -> mx.array:
        axes.append((axis, scores.shape))
        return softmax(scores, axis=axis, **options)

    raw, own = mx.random.normal((3, 2, 1, 16)), mx.random.normal((2, 1, 16))
    given = raw, mx.random.uniform(shape=(3, 2, 1)), own, mx.random.normal((16,)), 1e-5
    right = _kimi_k3.COMBINE(*given)
    monkeypatch.setattr(mx, "softmax", watched)
    assert mx.allclose(_kimi_k3.combine(*given), right, rtol=0, atol=1e-6)
    assert axes == [(-1, (2, 1, 4))]


def test_steps_are_compiled_where_graphs_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Graphs that round otherwise are seen by the proof, and not made."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    adapter = adapter_of("qwen2_vl", "bfloat16")
    monkeypatch.setattr(type(adapter), "graphs", Graphs.BY_DEFAULT)
    proof = prove(adapter, None, Placement.SLAB)
    # from its file
    assert proof.graphs and prove(adapter, None, Placement.SLAB) == proof
    compiled, calls = CompiledDecode.__call__, list[int]()

    def other(self: CompiledDecode, step: DecodeStep) -> mx.array:
        calls.append(len(step.tokens))
        return compiled(self, step) * (1 + 2**-7)

    monkeypatch.setenv(FOLDER, str(tmp_path / "other"))
    monkeypatch.setattr(CompiledDecode, "__call__", other)
    assert not prove(adapter, None, Placement.SLAB).graphs and set(calls) == set(
        proof.best(Placement.SLAB)
    )
    monkeypatch.setenv(FOLDER, str(tmp_path / "third"))
    monkeypatch.setattr(CompiledDecode, "__call__", lambda self, step: 1 / 0)
    # rows decode together all the same
    assert prove(adapter, None, Placement.SLAB).classes == proof.classes
    decoders = [
        BatchGenerator(adapter, shapes=FixedShapes(can_graph=graphs))._decoder
        for graphs in (False, True)
    ]
    assert [decoder._compiled is not None for decoder in decoders] == [False, True]


def test_graphs_and_exactness_exclude_each_other() -> None:
    adapter, exact = adapter_of("qwen2_vl", "bfloat16"), FixedShapes()
    with pytest.raises(ValueError, match="compile_decode"):
        BatchGenerator(adapter, compile_decode=True, shapes=exact)
    with pytest.raises(ValueError, match="need the same shapes"):
        BatchGenerator(adapter, reuse=Reuse(adapter), shapes=exact)


# The door


@pytest.fixture(scope="module")
def half() -> Any:
    return load_model(default_checkpoint(), dtype="bfloat16")


def ask(batcher: VLMBatcher, requests: list[Request]) -> list[tuple[Any, ...]]:
    return [
        (r.token_ids, r.text, r.logprobs, r.error) for r in batcher.generate(requests)
    ]


def requests() -> list[Request]:
    sampled = SamplingParams(
        max_tokens=10, temperature=0.8, top_p=0.9, seed=3, logprobs=4
    )
    greedy = SamplingParams(max_tokens=12, logprobs=7, repetition_penalty=1.1)
    pictures = [str(path) for path in sample_images()]
    made = [
        Request(prompt="describe the picture", images=(path,), params=greedy)
        for path in pictures
    ]
    made += [
        Request(
            prompt="describe both pictures", images=tuple(pictures[2:4]), params=sampled
        )
    ]
    return [
        *made,
        Request(prompt="count to 12", params=replace(sampled, logprobs=2)),
        made[2],
    ]


def test_a_reproducible_batcher(half: Any, tmp_path: Path) -> None:
    """Sampled and greedy, with log-probabilities: one by one, together, reversed, cold, kept, from files, after a restart."""
    asked = requests()
    with VLMBatcher(*half, reproducible=True, max_rows=1, caches=None) as batcher:
        right = [ask(batcher, [one])[0] for one in asked]
    assert all(one[-1] is None for one in right)
    folder = tmp_path / "rows"
    for _ in range(2):  # the second finds what the first has left in files
        with VLMBatcher(
            *half, reproducible=True, caches=Caches(directory=folder)
        ) as batcher:
            assert ask(batcher, asked) == right
            assert ask(batcher, asked[::-1]) == right[::-1]
            assert batcher.stats().cached_tokens > 0


def test_an_answer_that_is_no_switch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="reproducible is 'no'; it must be True or False"
    ):
        VLMBatcher(default_checkpoint(), reproducible="no")  # type: ignore[arg-type]


def test_groups_of_rows_with_logits_of_their_own_widths() -> None:
    """A step in several groups, of which some have rows with pictures, whose logits are wider in molmo_point."""
    name, precision = "molmo_point", "float32"
    exact = replace(exact_of(name, precision), counts=(2,))
    keys = ("image:1:0", "text:5:12", "text:4:9", "text:5:14")
    answers = play(
        name,
        engine_of(adapter_of(name, precision), exact, Way(max_rows=4)),
        [Arrival(key) for key in keys],
    )
    for key, answer in zip(keys, answers, strict=True):
        right = alone(name, precision, key, exact).bits
        assert all(
            one[: len(other)] == other
            for one, other in zip(answer.bits, right, strict=True)
        )


def test_a_prompt_cache_changes_nothing(half: Any) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3)
    chat: list[Any] = [{"role": "user", "content": "count to 12"}]
    with VLMBatcher(*half, reproducible=True) as batcher:
        first = batcher.submit(messages=chat, params=params, return_cache=True).result()
        chat += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "repeat: a a a a"},
        ]
        second = batcher.submit(
            messages=chat, params=params, cache=first.cache
        ).result()
    with VLMBatcher(*half, reproducible=True, caches=None) as batcher:
        cold = batcher.submit(messages=chat, params=params).result()
    assert second.error is None
    assert (second.token_ids, second.logprobs) == (cold.token_ids, cold.logprobs)


def test_the_types_that_weights_are_loaded_in() -> None:
    stored = mx.load(str(default_checkpoint() / "model.safetensors"))
    assert isinstance(stored, dict)
    own = stored["model.embed_tokens.weight"].dtype
    for dtype, weight in (
        ("auto", mx.float32),
        ("checkpoint", own),
        ("float16", mx.float16),
        ("bfloat16", mx.bfloat16),
    ):
        model, _ = load_model(default_checkpoint(), dtype=dtype)
        assert model.language_model.model.embed_tokens.weight.dtype == weight
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        load_model(default_checkpoint(), dtype="int4")


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, drawing = tmp_path / "found.json", tmp_path / "found.png"
    arguments = [
        "verify",
        "--model",
        str(default_checkpoint()),
        "--dtype",
        "bfloat16",
        "--max-tokens",
        "4",
    ]
    assert cli.main([*arguments, "--json", str(record), "--plot", str(drawing)]) == 0
    shown = capsys.readouterr().out
    assert "as promised" in shown
    assert "mlx 0." in shown
    found = json.loads(record.read_text(encoding="utf-8"))
    (model,) = found["models"]
    assert found["ok"]
    assert model["precision"] == "bfloat16"
    promised = [one for one in model["comparisons"] if one["promised"]]
    assert len(promised) == 4
    assert all(one["identical"] == one["requests"] == 8 for one in promised)
    assert drawing.exists() == (find_spec("matplotlib") is not None)


def test_verify_says_what_shares_calls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU: every way gives the same bits, and the calls are named that prompts and pictures shared."""
    policy = replace(POLICIES[Device.CUDA], pad_to=16, call_tokens=96, call_patches=256)
    monkeypatch.setattr(
        "vlm_batch.cli.verifying.fixed_shapes",
        lambda adapter: fixed_shapes(adapter, policy=policy),
    )
    arguments = [
        "verify",
        "--model",
        str(default_checkpoint()),
        "--dtype",
        "bfloat16",
        "--max-tokens",
        "2",
    ]
    assert cli.main(arguments) == 0
    said = re.search(
        r"calls of several prompts or pictures: (\d+) of (\d+) as proven",
        capsys.readouterr().out,
    )
    assert said is not None and said[1] == said[2] != "0"


def test_verify_says_which_pictures_it_cannot_ask_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--images", str(tmp_path)]) == 2
    assert "no picture there" in capsys.readouterr().err
    (tmp_path / "broken.png").write_bytes(b"no picture")
    assert (
        cli.main(
            ["verify", "--model", str(default_checkpoint()), "--images", str(tmp_path)]
        )
        == 2
    )
    assert "a request cannot be read: " in capsys.readouterr().err
