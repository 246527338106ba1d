"""How long ``vlm-batch run`` takes until its first token, and where: python -m benchmarks.first_answer [MODEL ...]

Every round is a process of its own, one after another over all models: the command with one sample picture and three tokens.
Processor time of the whole process, which other work on the machine disturbs less than wall time, by what it did; medians. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vlm_batch.assets import default_checkpoint, sample_images

#: Runs in a process of its own: the command, with notes of the time at which each of its parts ended.
CHILD = """
import json, sys, time
ends = {}
def note(name):
    ends.setdefault(name, time.process_time())
from vlm_batch.cli import main as command
note("imports of the command")
from vlm_batch.cli.model import UNUSED
from vlm_batch.runtime.imports import without_gc, deferred_import
with without_gc(), deferred_import(*UNUSED):  # as the command does
    import vlm_batch.batcher
note("imports of the engine")
import vlm_batch.loading as loading
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.row import Row
def watch(owner, name, said):
    call = vars(owner)[name]
    def watched(*args, **options):
        try:
            return call(*args, **options)
        finally:
            note(said)
    setattr(owner, name, watched)
watch(loading, "read_model", "weights, configuration and its check")
watch(loading, "load_model", "processor")
watch(loading, "make_engine", "adapter and engine")
watch(Row, "take", "first token")
command.main(["run", sys.argv[1], "--model", sys.argv[2], "--prompt", "describe the image", "--max-tokens", "3",
              "--out", sys.argv[3], "--quiet", "--overwrite"])
print(json.dumps(ends))
"""


def run_once(model: str) -> dict[str, float]:
    """Seconds of each part of one run, and until the first token."""
    with tempfile.TemporaryDirectory() as folder:
        args = [
            sys.executable,
            "-c",
            CHILD,
            str(sample_images()[0]),
            model,
            str(Path(folder) / "answers.jsonl"),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE"
        }
        done = subprocess.run(
            args, capture_output=True, text=True, check=True, env=environment
        )
    ends: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    parts, before = {}, 0.0
    for name, end in ends.items():
        parts[name], before = end - before, end
    return {**parts, "until the first token": ends["first token"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[str(default_checkpoint())])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {model: [] for model in args.models}
    for model in args.models:
        run_once(model)  # writes byte code
    for _ in range(args.rounds):
        for model, taken in rounds.items():
            taken.append(run_once(model))
    found = {
        model: {
            name: round(statistics.median(one[name] for one in taken), 3)
            for name in taken[0]
        }
        for model, taken in rounds.items()
    }
    for model, parts in found.items():
        print(
            model,
            *(f"{name}: {seconds:.2f} s" for name, seconds in parts.items()),
            sep="\n    ",
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
