"""Phi-4-multimodal's low-rank adapters by rows, and its processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vlm_batch.adapters.hooks import current
from vlm_batch.adapters.modules import part_of
from vlm_batch.adapters.sound import PartsAsText
from vlm_batch.errors import InvalidPrompt

#: Names of a checkpoint's low-rank adapters.
ADAPTERS = ("vision", "speech")


class AdaptedLinear(nn.Module):
    """A linear layer with unmerged LoRA (arXiv:2106.09685), weighted by ``Call.adapters``."""

    def __init__(
        self, base: nn.Linear, parts: Mapping[str, tuple[mx.array, mx.array]]
    ) -> None:
        super().__init__()
        self.base = base
        self.down = {name: _linear(down) for name, (down, _) in parts.items()}
        self.up = {name: _linear(up) for name, (_, up) in parts.items()}

    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = self.base(x)
        for name, weight in current().adapters.items():
            if name in self.down:
                weight = (
                    weight.astype(found.dtype)
                    if isinstance(weight, mx.array)
                    else weight
                )
                found = found + self.up[name](self.down[name](x)) * weight
        return found


def _linear(weight: mx.array) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    made.weight = weight
    return made


def unmerge_adapters(model: Any) -> dict[str, float]:
    """Restore published weights, which mlx-vlm merges with an adapter; return the adapters' scales."""
    bases = dict(model.pop("_base_weights", {}))
    parts = {
        name: [model.pop(f"_{name}_lora_{half}", {}) for half in "ab"]
        for name in ADAPTERS
    }
    found: set[str] = set()
    for path, weight in bases.items():
        owner, name = path.removesuffix(".weight").rpartition(".")[::2]
        own = {
            kind: (down[path], up[path])
            for kind, (down, up) in parts.items()
            if path in down and path in up
        }
        setattr(part_of_lists(model, owner), name, AdaptedLinear(_linear(weight), own))
        found |= own.keys()
    return {
        name: float(getattr(model, f"_{name}_lora_scale"))
        for name in ADAPTERS
        if name in found
    }


def part_of_lists(model: Any, path: str) -> Any:
    """Return the module at a dotted path with list indices."""
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else part_of(model, name)
    return model


class NumberedPlaceholders(PartsAsText):
    audio_processor: Any
    #: Samples of the first frame.
    shortest = 400

    def mark(self, kind: str, number: int) -> str:
        return f"<|{kind}_{number}|>"

    def __call__(
        self, images: Any = None, text: Any = None, audio: Any = None, **said: Any
    ) -> Any:
        """Raise InvalidPrompt for too short recordings."""
        recordings = audio or ()
        if recordings and self.audio_processor is None:
            raise InvalidPrompt("this checkpoint's config.json has no audio_processor")
        if any(len(one) < self.shortest for one in recordings):
            raise InvalidPrompt(
                "a recording is so short that the model's processor makes nothing of it"
            )
        theirs: Any = super()
        return theirs.__call__(images=images, text=text, audio=audio, **said)
