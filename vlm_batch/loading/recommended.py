"""Sampling that a checkpoint's publisher recommends in generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_batch.errors import InvalidParameters
from vlm_batch.types import SamplingParams

#: What transformers fills in where a file says ``do_sample`` (generation/configuration_utils.py,
#: ``_get_default_generation_params``).
TRANSFORMERS_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
#: transformers' penalty counts every token of prompt and answer.
WHOLE_CONTEXT = 2**31 - 1
#: Settings of generation_config.json that change which tokens are chosen, and that ``SamplingParams`` has not under the same
#: meaning -> the value that changes nothing.
NOT_TAKEN: Mapping[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class RecommendedSampling:
    """The recommendation of a generation_config.json.

    Attributes:
        params: Fields of ``SamplingParams`` that differ from the greedy default; empty if it recommends that.
        not_taken: Further settings of the file that would change tokens, and that are not taken.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    not_taken: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        params = dict(self.params)
        params.pop(_IMPLIED, None)
        text = _listed(params) or "greedy"
        if not self.not_taken:
            return text
        return f"{text}; not taken: {_listed(self.not_taken)}"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())


#: The parameter that a penalty brings with it.
_IMPLIED = "repetition_context_size"


def read_recommended(folder: str | Path) -> RecommendedSampling:
    """Return a folder's recommendation. A missing or broken file recommends nothing."""
    return recommended_sampling(json_object(Path(folder) / "generation_config.json"))


def json_object(file: Path) -> dict[str, Any]:
    """Return a file's object; empty if there is none, or it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def recommended_sampling(written: Mapping[str, Any]) -> RecommendedSampling:
    """Return what generation_config.json recommends, as transformers reads it.

    transformers samples only where the file says ``do_sample: true``: a temperature alone is no recommendation.
    """
    params: dict[str, Any] = {}
    if written.get("do_sample") is True:
        params |= TRANSFORMERS_DEFAULTS | _said(written, TRANSFORMERS_DEFAULTS)
    penalty = written.get("repetition_penalty")
    if penalty not in (None, 1, 1.0):
        params["repetition_penalty"] = penalty
        params["repetition_context_size"] = WHOLE_CONTEXT
    params = _changed(params, vars(SamplingParams()))
    not_taken = _changed(_said(written, NOT_TAKEN), NOT_TAKEN)
    try:
        SamplingParams(**params)
    except InvalidParameters:  # settings out of range, which transformers refuses, too
        return RecommendedSampling({}, params | not_taken)
    return RecommendedSampling(params, not_taken)


def _said(written: Mapping[str, Any], neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of these names that are there and not null."""
    return {name: written[name] for name in neutral if written.get(name) is not None}


def _changed(settings: Mapping[str, Any], neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not neutral."""
    return {name: value for name, value in settings.items() if value != neutral[name]}
