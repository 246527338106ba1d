"""A scheduler's config with the settings that it leaves open filled in from a device's policy (``vlm_batch.policy``)."""

from __future__ import annotations

from dataclasses import replace

from vlm_batch.engine.scheduler import SchedulerConfig
from vlm_batch.policy import Policy

#: Settings that have the same name in both, and are taken over where the config leaves them open.
_SAME = (
    "max_chunk",
    "smallest_chunk",
    "idle_budget",
    "stretch",
    "encode_together",
    "beside_decode",
    "encode_seconds",
    "prefill_together",
    "together_tokens",
    "pad_to",
    "encode_ahead",
)


def for_policy(config: SchedulerConfig, policy: Policy) -> SchedulerConfig:
    """A config without open settings. Where it leaves ``max_rows`` open, ``first_rows`` says where their number begins."""
    said = vars(config)
    filled = {name: vars(policy)[name] for name in _SAME if said[name] is None}
    if config.max_rows is None:
        first = min(policy.first_rows if config.first_rows is None else config.first_rows, policy.most_rows)
        filled |= {"max_rows": policy.most_rows, "first_rows": first}
    if config.prefill_budget is None and not config.slack:  # whoever counts tokens wants no more of them
        filled["slack"] = policy.slack
    return replace(config, **filled)
