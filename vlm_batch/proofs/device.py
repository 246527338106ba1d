"""The conditions of a proof: versions, sources, device, model and settings."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from vlm_batch._version import __version__
from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.products import shapes_of
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.runtime import blas, exponentials
from vlm_batch.runtime.device import rounds_float32
from vlm_batch.store.digest import digest

#: Version of the measurements; a new one discards kept proofs.
PROOF = 12


def model_key(adapter: Adapter, kv: KVQuantisation | None) -> dict[str, Any]:
    """Return what a model's proofs are kept under."""
    return {
        "versions": versions(),
        "sources": _sources(),
        "device": device_facts(),
        "model": digest([shapes_of(adapter.model), adapter.spec.family]).hex(),
        "kv": settings_of(kv),
        "proof": PROOF,
    }


@cache
def _sources() -> str:
    """Return the digest of what computes answers: a checkout's kernels change without its version."""
    package = Path(__file__).parents[1]
    texts: list[list[str]] = []
    try:
        for room in ("adapters", "caches", "engine", "models", "proofs", "runtime"):
            for path in sorted((package / room).rglob("*")):
                if path.suffix in (".cu", ".py"):
                    texts.append([path.name, path.read_text("utf-8")])
    except OSError:  # a package in an archive has no folders; its version says enough
        return ""
    return digest(texts).hex()


def versions() -> dict[str, str]:
    return {
        "vlm-batch": __version__,
        "mlx": version("mlx"),
        "mlx-vlm": version("mlx-vlm"),
    }


def device_facts() -> dict[str, Any]:
    """Return what decides the device's kernels."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info: dict[str, Any] = dict(mx.device_info())
        names = (
            "device_name",
            "architecture",
            "compute_capability_major",
            "compute_capability_minor",
        )
        named = {name: str(info[name]) for name in names if name in info}
        return {
            "device": "gpu",
            **named,
            "float32 products": "TF32" if rounds_float32() else "float32",
        }
    system = {
        "device": "cpu",
        "machine": platform.machine(),
        "system": platform.system(),
    }
    return system | blas.facts() | exponentials.facts()
