"""Record what transformers answers where config.json has settings of ``tests/settings.py``, one file for each.

    python tests/references/settings.py            # all
    python tests/references/settings.py longrope   # these
    python tests/references/settings.py swept      # the check over all families

Needs torch and transformers, as record.py does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.checkpoints import names
from tests.harness import inputs_of
from tests.references import record
from tests.settings import (
    APPLIED,
    KEYS,
    NOT_SWEPT,
    NUM_TOKENS,
    SETTINGS,
    merged,
    nested,
    swept,
)
from tests.zoo import FAMILIES


def with_settings(plain: Any, change: Mapping[str, Any]) -> Any:
    """A model of the same weights with other settings."""
    changed = (
        type(plain)(
            type(plain.config).from_dict(merged(plain.config.to_dict(), change))
        )
        .eval()
        .float()
    )
    changed.set_attn_implementation("eager")
    changed.load_state_dict(plain.state_dict())
    changed.tie_weights()
    return changed


def record_case(name: str) -> None:
    """Write tests/references/settings/<name>.npz."""
    case = APPLIED[name]
    tiny, recipe = FAMILIES[case.family], record.RECIPES[case.family]
    plain = record.load(tiny.build(), recipe)
    changed = with_settings(plain, case.change)
    stored: dict[str, Any] = {}
    for key in case.keys:
        inputs = inputs_of(case.family, key)
        tokens, logprobs = record.answer(changed, recipe, inputs)
        plain_tokens, plain_logprobs = record.answer(plain, recipe, inputs)
        print(
            f"{name:24} {key:12} moves the first token's log-probabilities by", end=" "
        )
        print(
            f"{np.abs(logprobs[0] - plain_logprobs[0]).max():.2g}, {(tokens == plain_tokens).sum()} tokens equal"
        )
        stored |= {f"{key}/tokens": tokens, f"{key}/logprobs": logprobs}
    np.savez_compressed(SETTINGS / f"{name}.npz", **stored)


def record_swept() -> None:
    """Write tests/references/settings/swept.npz: log-probabilities of the first token (requests, V) after each change."""
    record.STEPS = 1
    stored: dict[str, Any] = {}
    for name in names():
        if name in NOT_SWEPT:
            continue
        tiny, recipe = FAMILIES[name], record.RECIPES[name]
        plain = record.load(tiny.build(), recipe)
        before = first_logprobs(plain, name)
        for path, value in swept(plain.config.to_dict()):
            try:
                after = first_logprobs(with_settings(plain, nested(path, value)), name)
            except Exception as error:
                # transformers does not take it, or has other tensors then
                print(
                    f"{name:24} {'.'.join(path)}: {value!r} is not taken: {type(error).__name__}"
                )
                continue
            moved = float(np.abs(after - before).max())
            stored[json.dumps([name, path, value, round(moved, 6)])] = after.astype(
                np.float32
            )
        print(f"{name:24} {len(stored)} in all")
    np.savez_compressed(SETTINGS / "swept.npz", **stored)


def first_logprobs(model: Any, name: str) -> np.ndarray:
    recipe = record.RECIPES[name]
    return np.stack(
        [record.answer(model, recipe, inputs_of(name, key))[1][0] for key in KEYS]
    )


if __name__ == "__main__":
    SETTINGS.mkdir(exist_ok=True)
    for case_name in sys.argv[1:] or (*APPLIED, "swept"):
        record.STEPS = NUM_TOKENS
        record_swept() if case_name == "swept" else record_case(case_name)
