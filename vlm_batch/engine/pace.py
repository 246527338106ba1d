"""The number of prompt tokens beside a decode step, from measured times. Integers and seconds only."""

from __future__ import annotations

from vlm_batch.policy import Policy


class Pace:
    """Chooses the prompt tokens that a step takes beside decoding rows, from step times, measured and smoothed.

    Every chunk has a fixed cost: the launches of a forward, and reading the weights once more. So no chunk is smaller than
    the config's ``smallest_chunk``, and a step may do without one to save up for it. Before anything is measured, chunks
    have ``FIRST_CHUNK`` tokens.

    A row that has waited w seconds for its first token may keep the others waiting w / ``PATIENCE`` seconds for their next
    one, up to ``stretch`` times the config's ``token_gap``.
    """

    PATIENCE = 5
    FIRST_CHUNK = 256
    IDLE_SECONDS = 2.0  # of a step in which nothing decodes: whoever comes or goes meanwhile waits for its end
    SMOOTHING = 0.3
    LONGEST_RUN = 4  # steps
    LONGEST_SAVING = 4  # steps

    def __init__(self, config: Policy) -> None:
        self._config = config
        self.idle_budget = config.idle_budget
        self._decode_seconds = 0.0
        self._tokens_per_second = 0.0
        self._saved_steps = 0
        self._run_steps, self._run_seconds, self._run_tokens = 0, 0.0, 0

    def budget(self, is_decoding: bool, pending: int, waited: float = 0.0, encoding: float = 0.0) -> int:
        """Prompt tokens for a step, of ``pending`` that have places and have ``waited`` so many seconds at most. ``encoding``
        seconds of it have gone to pictures; they count where the config has no ``encode_seconds`` for them.

        What fits between two tokens of a decoding row is saved up, for at most ``LONGEST_SAVING`` steps, until it holds the
        smallest chunk or all that is pending.
        """
        config = self._config
        if not is_decoding:
            self._saved_steps = 0
            rate = self._tokens_per_second
            return (
                min(self.idle_budget, max(self.FIRST_CHUNK, int(self.IDLE_SECONDS * rate)))
                if rate
                else self.idle_budget
            )
        if config.prefill_budget is not None:
            return config.prefill_budget
        if not self._tokens_per_second:
            return min(self.FIRST_CHUNK, self.idle_budget)
        self._saved_steps += 1
        gap = min(max(config.token_gap, waited / self.PATIENCE), config.stretch * config.token_gap)
        room = self._saved_steps * max(gap - self._decode_seconds, 0.0)
        if not config.encode_seconds:
            room = max(room - encoding, 0.0)
        fits = int(room * self._tokens_per_second)
        enough = min(pending, config.smallest_chunk)
        if fits < enough and self._saved_steps < self.LONGEST_SAVING:
            return 0
        self._saved_steps = 0
        return min(max(fits, enough), self.idle_budget)

    def record(self, seconds: float, tokens: int) -> None:
        """Take note of a step's seconds and of the prompt tokens that it launched.

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
