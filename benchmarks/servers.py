"""This library's server against mlx-vlm's, with the same model and the same load, in turn.

    python -m benchmarks.servers --rounds 3 --out build/servers

Every server is a process of its own on 127.0.0.1; the load comes from this one (``vlm_batch.cli.load``). Also measured:
mlx-vlm's server with this library's engine under it, and the batcher without a server. On a Linux CPU all of them multiply
by OpenBLAS on as many threads as ``vlm-batch serve`` gives it; ``--as-installed`` leaves mlx-vlm's server what MLX brings.
Wants a machine on which nothing else runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from vlm_batch import VLMBatcher
from vlm_batch.assets import default_checkpoint
from vlm_batch.cli.load import BenchedServer, Load, Local, Report, measure
from vlm_batch.runtime import blas

START_SECONDS = 300.0
#: BLAS threads of everything that is measured: what the command line gives itself.
THREADS = max(1, (os.cpu_count() or 1) // 2)
#: What ours must reach: requests/s and TTFT p95 against theirs, and requests/s against the batcher without a server.
MIN_REQUESTS, MAX_TTFT, MIN_SHARE = 3.0, 0.3, 0.9
#: The larger model: the embedded checkpoint's family and tokenizer, with random weights; 47 million parameters.
WIDE_TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11}
WIDE_TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 4}


#: Runs a module as ``python -m`` does, with our BLAS.
WITH_BLAS = """\
import runpy, sys
from vlm_batch.runtime import blas
blas.preload_openblas()
blas.limit_threads(int(sys.argv[1]))
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def servers(model: str, rows: int, as_installed: bool) -> dict[str, list[str]]:
    """The command of each server, less its port."""
    python = [sys.executable, "-m"]
    with_blas = [sys.executable, "-c", WITH_BLAS, str(THREADS)]
    ours = ["--host", "127.0.0.1", "--model", model, "--max-num-seqs", str(rows)]
    theirs = ["mlx_vlm.server", "--host", "127.0.0.1", "--model", model]
    return {
        "vlm-batch serve": [*python, "vlm_batch", "serve", *ours],
        "mlx_vlm.server": [*(python if as_installed else with_blas), *theirs],
        "mlx_vlm.server, our engine": [
            *with_blas,
            "vlm_batch.integrations.mlx_vlm",
            *ours,
        ],
    }


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[str]:
    """A server's URL, for as long as the block lasts. Raises RuntimeError if it does not come up."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=out
        )
        try:
            _wait_for(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            # theirs knows the second only, and answers it once its model is loaded
            for path in ("/ready", "/health"):
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
                if response.status != 404:
                    break
            if response.status == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"{' '.join(process.args)} did not come up; see {log}")  # type: ignore[arg-type]


def in_process(model: str, some: Load, rows: int) -> Report:
    """The same load on a batcher without a server: what the server's own cost is measured against."""
    with VLMBatcher(model, max_rows=rows) as batcher:
        return measure(Local(batcher), replace(some, check=0))


def tiny(folder: Path) -> Path:
    """The embedded checkpoint with float32 weights: MLX is slow at half precision on CPUs, and theirs would keep it."""
    import mlx.core as mx

    _copy_settings(
        folder, json.loads((default_checkpoint() / "config.json").read_text())
    )
    weights: Any = mx.load(str(default_checkpoint() / "model.safetensors"))
    _save(folder, {name: array.astype(mx.float32) for name, array in weights.items()})
    return folder


def widened(folder: Path) -> Path:
    """A checkpoint of the same family with 47 million random parameters. Returns ``folder``."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_vlm.utils import get_model_and_args

    config = json.loads((default_checkpoint() / "config.json").read_text()) | WIDE_TEXT
    config["vision_config"] = config["vision_config"] | {
        "hidden_size": WIDE_TEXT["hidden_size"]
    }
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [8, 12, 12]}
    _copy_settings(folder, config)
    module, _ = get_model_and_args(config=dict(config))
    model_config = module.ModelConfig.from_dict(config)
    model_config.text_config = module.TextConfig.from_dict(config)
    model_config.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    mx.random.seed(0)
    model = module.Model(model_config)
    model.update(
        tree_map(lambda array: mx.random.normal(array.shape) * 0.05, model.parameters())
    )
    _save(folder, dict(tree_flatten(model.parameters(), destination={})))
    return folder


def _copy_settings(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in default_checkpoint().glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))


def _save(folder: Path, weights: dict[str, Any]) -> None:
    import mlx.core as mx

    mx.save_safetensors(
        str(folder / "model.safetensors"), weights, metadata={"format": "mlx"}
    )


def compare(
    model: str,
    some: Load,
    rows: int,
    rounds: int,
    log: Path,
    as_installed: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Figures of every server and of none, round by round, in turn."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name, command in servers(model, rows, as_installed).items():
            with running(command, log) as url:
                report = measure(BenchedServer(url, model), some)
            found.setdefault(name, []).append(report.figures())
            _say(number, name, found[name][-1])
        found.setdefault("in process", []).append(
            in_process(model, some, rows).figures()
        )
        _say(number, "in process", found["in process"][-1])
    return found


def _say(number: int, name: str, one: dict[str, Any]) -> None:
    equal = (
        f"{one['equal_to_alone']} of {one['checked']} as alone"
        if one["checked"]
        else ""
    )
    print(
        f"round {number + 1}  {name:28} {one['requests_per_s']:7.2f} requests/s  TTFT p95 {one['ttft']['p95']:6.3f} s  "
        f"{one['failed']} failed  {equal}",
        flush=True,
    )


def verdict(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of medians, and whether they reach what was set."""

    def rate(name: str) -> float:
        return statistics.median(one["requests_per_s"] for one in found[name])

    def ttft(name: str) -> float:
        return statistics.median(one["ttft"]["p95"] for one in found[name])

    ours, theirs = found["vlm-batch serve"], found["mlx_vlm.server"]
    ratios = {
        "requests_per_s": rate("vlm-batch serve") / max(1e-9, rate("mlx_vlm.server")),
        "ttft_p95": ttft("vlm-batch serve") / max(1e-9, ttft("mlx_vlm.server")),
        "of_the_batcher": rate("vlm-batch serve") / max(1e-9, rate("in process")),
    }
    reached = {
        "requests_per_s": ratios["requests_per_s"] >= MIN_REQUESTS,
        "ttft_p95": ratios["ttft_p95"] <= MAX_TTFT,
        "of_the_batcher": ratios["of_the_batcher"] >= MIN_SHARE,
        "equal_to_alone": all(
            one["equal_to_alone"] == one["checked"] and not one["failed"]
            for one in ours
        ),
    }
    equal = [f"{one['equal_to_alone']}/{one['checked']}" for one in theirs]
    return {"ratios": ratios, "reached": reached, "theirs_equal_to_alone": equal}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and write ``OUT/servers.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=("tiny", "47m"), default=["tiny", "47m"]
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[16, 64])
    parser.add_argument(
        "--rows",
        type=int,
        default=16,
        help="of our batch; theirs has no bound unless it is given one",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="for each stream")
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument(
        "--as-installed",
        action="store_true",
        help="leave mlx-vlm's server the BLAS that MLX's wheel for Linux CPUs brings",
    )
    parser.add_argument("--out", type=Path, default=Path("build/servers"))
    args = parser.parse_args(arguments)
    blas.limit_threads(THREADS)  # of the batcher without a server
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    everything: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            model = str({"tiny": tiny, "47m": widened}[name](Path(scratch) / name))
            for streams in args.streams:
                some = Load(
                    requests=args.requests * streams,
                    concurrency=streams,
                    sizes=((224, 168), (112, 112)),
                    prompt_words=(24, 24),
                    answer_tokens=(args.answer_tokens, args.answer_tokens),
                    ignore_eos=False,
                    check=16,
                )
                print(f"\n{name}, {streams} streams", flush=True)
                found = compare(
                    model,
                    some,
                    args.rows,
                    args.rounds,
                    args.out / "servers.log",
                    args.as_installed,
                )
                everything[f"{name}-{streams}"] = {"figures": found, **verdict(found)}
                print(json.dumps(verdict(found)), flush=True)
    (args.out / "servers.json").write_text(json.dumps(everything, indent=1))
    print(json.dumps({name: one["ratios"] for name, one in everything.items()}))
    return everything


if __name__ == "__main__":
    main()
