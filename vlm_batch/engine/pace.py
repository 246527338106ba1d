"""How many prompt tokens go beside a decode step, from measured times. Integers and seconds only."""

from __future__ import annotations

from vlm_batch.engine.scheduler import SchedulerConfig


class Pace:
    """How many prompt tokens a step can take beside decoding rows: from measured step times, smoothed.

    A chunk has a price of its own (a forward's launches, the weights read or packed once more), so none is smaller than the
    config's ``smallest_chunk``, and a step without one may come before it; the first ones, before anything is measured, are
    ``FIRST_CHUNK``.

    A row that has waited w seconds for its first token may keep the others waiting w / ``PATIENCE`` for their next, up to
    ``LONGEST_STRETCH`` times the config's ``token_gap``: steps in which few rows decode are what prompts wait for.
    """

    PATIENCE = 5
    LONGEST_STRETCH = 2
    SMALLEST_CHUNK = 64  # where the config leaves it open
    FIRST_CHUNK = 256
    IDLE_BUDGET = 2048  # where the config leaves it open
    SMOOTHING = 0.3
    LONGEST_RUN = 4  # steps
    LONGEST_SAVING = 4  # steps

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.idle_budget = config.idle_budget or self.IDLE_BUDGET
        self._decode_seconds = 0.0
        self._tokens_per_second = 0.0
        self._saved_steps = 0
        self._run_steps, self._run_seconds, self._run_tokens = 0, 0.0, 0

    def budget(self, is_decoding: bool, pending: int, waited: float = 0.0) -> int:
        """Prompt tokens for the next step, of ``pending`` that have places and have ``waited`` so many seconds at most.

        What fits between two tokens of a decoding row is saved up, for at most ``LONGEST_SAVING`` steps, until it holds the
        smallest chunk or all that is pending.
        """
        config = self._config
        if not is_decoding:
            self._saved_steps = 0
            return self.idle_budget
        if config.prefill_budget is not None:
            return config.prefill_budget
        if not self._tokens_per_second:
            return min(self.FIRST_CHUNK, self.idle_budget)
        self._saved_steps += 1
        gap = min(max(config.token_gap, waited / self.PATIENCE), self.LONGEST_STRETCH * config.token_gap)
        fits = int(self._saved_steps * max(gap - self._decode_seconds, 0.0) * self._tokens_per_second)
        enough = min(pending, config.smallest_chunk or self.SMALLEST_CHUNK)
        if fits < enough and self._saved_steps < self.LONGEST_SAVING:
            return 0
        self._saved_steps = 0
        return min(max(fits, enough), self.idle_budget)

    def record(self, seconds: float, tokens: int) -> None:
        """What a step took as a whole, and how many tokens of prompt it launched.

        Where the time is spent differs: a CPU works while a step is launched, a GPU while the next one waits for it. So
        prompt tokens are timed over runs of steps, the first step after them included.
        """
        if not tokens and not self._run_steps:
            self._decode_seconds = self._smooth(self._decode_seconds, seconds)
            return
        self._run_steps += 1
        self._run_seconds += seconds
        self._run_tokens += tokens
        if not tokens or self._run_steps >= self.LONGEST_RUN:
            spent = max(self._run_seconds - self._run_steps * self._decode_seconds, 1e-6)
            self._tokens_per_second = self._smooth(self._tokens_per_second, self._run_tokens / spent)
            self._run_steps, self._run_seconds, self._run_tokens = 0, 0.0, 0

    def _smooth(self, old: float, new: float) -> float:
        return old + self.SMOOTHING * (new - old) if old else new
