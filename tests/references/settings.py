"""Record what transformers answers where config.json has settings of ``tests/settings.py``, one file for each.

    python tests/references/settings.py            # all
    python tests/references/settings.py longrope   # these

Needs torch and transformers, as record.py does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import inputs_of
from tests.references import record
from tests.settings import APPLIED, NUM_TOKENS, SETTINGS, merged
from tests.zoo import FAMILIES


def record_case(name: str) -> None:
    """Write tests/references/settings/<name>.npz."""
    case = APPLIED[name]
    tiny, recipe = FAMILIES[case.family], record.RECIPES[case.family]
    plain = record.load(tiny.build(), recipe)
    changed = type(plain)(type(plain.config).from_dict(merged(plain.config.to_dict(), case.change))).eval().float()
    changed.set_attn_implementation("eager")
    changed.load_state_dict(plain.state_dict())
    changed.tie_weights()
    stored: dict[str, Any] = {}
    for key in case.keys:
        inputs = inputs_of(case.family, key)
        tokens, logprobs = record.answer(changed, recipe, inputs)
        plain_tokens, plain_logprobs = record.answer(plain, recipe, inputs)
        print(f"{name:24} {key:12} moves the first token's log-probabilities by", end=" ")
        print(f"{np.abs(logprobs[0] - plain_logprobs[0]).max():.2g}, {(tokens == plain_tokens).sum()} tokens equal")
        stored |= {f"{key}/tokens": tokens, f"{key}/logprobs": logprobs}
    np.savez_compressed(SETTINGS / f"{name}.npz", **stored)


if __name__ == "__main__":
    record.STEPS = NUM_TOKENS
    SETTINGS.mkdir(exist_ok=True)
    for case_name in sys.argv[1:] or APPLIED:
        record_case(case_name)
