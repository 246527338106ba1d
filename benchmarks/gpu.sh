#!/usr/bin/env bash
# The CUDA twin of scripts/bench: a model of Qwen2.5-VL-3B's sizes in bfloat16, random weights. About 12 minutes, no network.
# Runs from a source checkout with any interpreter that has mlx (CUDA), mlx-vlm and rich; matplotlib for the pictures.
#   PYTHON=python3   that interpreter
#   OUT=folder       where compare.json, compare.png, limits.json and limits.png go (default: build/bench)
#   VLLM_PYTHON=...  an interpreter with vllm-mlx 0.6.0, if there is one
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
out=${OUT:-build/bench}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv || true
timeout 180 "$python" -m benchmarks.limits --shape 3b --contexts 256 2048 4096 --rounds 1 --out "$out" || echo "limits failed: $?"
timeout 1200 "$python" -m benchmarks.compare --shape 3b --rounds 3 --draws 3 --seconds 480 --out "$out" \
    ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"} "$@"
