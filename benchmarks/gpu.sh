#!/usr/bin/env bash
# The CUDA twin of scripts/bench: a model of Qwen2.5-VL-3B's sizes in bfloat16, random weights, no network. In pieces, each of
# which ends within ten minutes; without names all of them, one after another.
#   benchmarks/gpu.sh                     all
#   benchmarks/gpu.sh tune chat           some
# Runs from a source checkout with any interpreter that has mlx (CUDA), mlx-vlm, rich, blake3 and llguidance; matplotlib for the pictures.
#   PYTHON=python3   that interpreter
#   OUT=folder       where JSON, logs and pictures go (default: build/bench); compare.md there has all comparisons so far
#   SHAPE=3b         the model: 3b, gemma3-4b, qwen3.5-2b or llava-1b (chat-8, chat-32, captions and documents alone)
#   SEED=1 DRAWS=3   the draws of the comparisons: 0 is what the engine was tuned on
#   UNCHECKED=1      times alone: the answers one after another, to compare with, take longest
#   VLLM_PYTHON=...  an interpreter with vllm-mlx 0.6.0, if there is one
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3} out=${OUT:-build/bench} shape=${SHAPE:-3b} seed=${SEED:-1} draws=${DRAWS:-3} failed=0
mkdir -p "$out"

compare() { # NAME ARGUMENTS...: our defaults and the workload's rows against the others
    local name=$1
    shift
    "$python" -m benchmarks.compare --shape "$shape" --draws "$draws" --seed "$seed" --seconds 420 --markdown --out "$out/$name" \
        ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} ${UNCHECKED:+--unchecked --no-probes} "$@"
}

piece() {
    case $1 in
    limits) "$python" -m benchmarks.limits --shape 3b --contexts 256 2048 4096 --rounds 1 --out "$out" ;;
    tune) "$python" -m benchmarks.tune --shape 3b ;;
    tune-kv) "$python" -m benchmarks.tune --shape 3b --kv-bits 8 ;;
    chat-8 | chat-32 | captions | documents | single) compare "$1" --workloads "$1" ;;
    churn) compare churn --workloads churn-2 churn-8 ;;
    reproducible) compare reproducible --reproducible --workloads chat-8 chat-32 captions single --no-probes ;;
    fused) "$python" -m benchmarks.fused ;;
    one-query) "$python" -m benchmarks.one_query ;;
    exactness) "$python" -m benchmarks.exactness --shape 3b ;;
    caches) "$python" -m benchmarks.caches --contexts 1024 4096 16384 --turbo-up-to 0 ;;
    *) echo "no piece is called $1" >&2; return 2 ;;
    esac
}
export -f piece compare
export python out shape seed draws

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv || true
[ $# -gt 0 ] || set -- tune limits chat-8 chat-32 captions documents churn single reproducible exactness caches tune-kv
for name in "$@"; do
    echo "== $name"
    timeout 580 bash -c 'piece "$1"' piece "$name" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || { echo "$name failed: $status"; failed=1; }
done
found=$(find "$out" -name compare.json | sort)
# shellcheck disable=SC2086 # one file a word
[ -z "$found" ] || "$python" -m benchmarks.compare.report $found | tee "$out/compare.md"
exit "$failed"
