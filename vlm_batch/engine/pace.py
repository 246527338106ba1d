"""Prompt tokens and options' tokens beside a decode step, by measured times."""

from __future__ import annotations

from vlm_batch.policy import Policy


class Pace:
    """Chooses a step's prompt tokens: decoding rows get a token every ``token_gap`` seconds.

    Steps save up for a ``smallest_chunk``, since a forward has a fixed cost. A row that waits w seconds for its first
    token may delay others by w / ``PATIENCE``, up to ``stretch`` gaps. Options share the decode forward, and save up for
    nothing; what they take of a step is not left for prompts.
    """

    PATIENCE = 5
    FIRST_CHUNK = 256
    # of a step without decoding: new requests and cancellations wait for its end
    IDLE_SECONDS = 2.0
    SMOOTHING = 0.3
    LONGEST_RUN = 4  # steps
    LONGEST_SAVING = 4  # steps
    # options have this part of a smallest chunk, however slow decoding is
    LEAST_PART = 16

    def __init__(self, config: Policy) -> None:
        self._config = config
        self._decode_seconds = 0.0
        # of runs of steps beside which prompts were computed; each weighs less than the next
        self._prompt_seconds = self._prompt_tokens = 0.0
        self._saved_steps = 0
        self._run_steps, self._run_seconds, self._run_tokens = 0, 0.0, 0
        # options' tokens: of this step's forward, and since prompts had a chunk
        self._ahead = self._ahead_while_saving = 0

    @property
    def _tokens_per_second(self) -> float:
        """Measured prompt tokens; 0 if unknown. A short run, whose time is mostly chance, weighs little."""
        if self._prompt_seconds <= 0:  # none, or a few that were quick by chance
            return 0.0
        return self._prompt_tokens / self._prompt_seconds

    @property
    def longest_rest(self) -> float:
        """Seconds for which decoding rows may rest: what a step may take, or what their last ones took."""
        gap = self._config.stretch * self._config.token_gap
        return max(gap, self._decode_seconds)

    def beside_resting(self) -> int:
        """Return the prompt tokens of a step in which decoding rows rest."""
        config = self._config
        fits = int(self.longest_rest * self._tokens_per_second)
        return min(max(fits, config.smallest_chunk), config.idle_budget)

    def room_ahead(self, *, is_decoding: bool) -> int:
        """Return how many tokens options may have in a forward, beside rows whose next tokens somebody awaits or not."""
        config, rate = self._config, self._tokens_per_second
        if not is_decoding:
            return config.idle_budget
        fits = int((config.token_gap - self._decode_seconds) * rate)
        room = max(fits, config.smallest_chunk // self.LEAST_PART)
        if not rate:
            room = self.FIRST_CHUNK
        if config.prefill_budget is not None:
            room = config.prefill_budget // 2  # a prompt does not wait for all options
        return max(room - self._ahead, 0)

    def note_ahead(self, tokens: int) -> None:
        """Note options' tokens in the step's forwards."""
        self._ahead += tokens
        self._ahead_while_saving += tokens

    def budget(
        self,
        is_decoding: bool,
        pending: int,
        waited: float = 0.0,
        encoding: float = 0.0,
    ) -> int:
        """Return the prompt tokens of a step.

        Args:
            pending: prompt tokens left in rows with places.
            waited: their longest wait, seconds.
            encoding: seconds spent on pictures.
        """
        config, rate, most = (
            self._config,
            self._tokens_per_second,
            self._config.idle_budget,
        )
        if not is_decoding:
            self._begin_saving()
            if not rate:
                return most
            return min(most, max(self.FIRST_CHUNK, int(self.IDLE_SECONDS * rate)))
        if config.prefill_budget is not None:
            return max(config.prefill_budget - self._ahead, 0)
        if not rate:
            return min(self.FIRST_CHUNK, most)
        self._saved_steps += 1
        gap = min(
            max(config.token_gap, waited / self.PATIENCE),
            config.stretch * config.token_gap,
        )
        room = self._saved_steps * max(gap - self._decode_seconds, 0.0)
        if not config.encode_seconds:
            room = max(room - encoding, 0.0)
        fits = int(room * rate) - self._ahead_while_saving
        enough = min(pending, config.smallest_chunk)
        if fits < enough and self._saved_steps < self.LONGEST_SAVING:
            return 0
        self._begin_saving()
        return min(max(fits, enough), most)

    def _begin_saving(self) -> None:
        self._saved_steps = self._ahead_while_saving = 0

    def end_step(self) -> int:
        """Return the options' tokens of this step, and begin the next."""
        ahead, self._ahead = self._ahead, 0
        return ahead

    def record(self, seconds: float, tokens: int) -> None:
        """Record a step. One with prompts is timed with the next, which waits for a GPU's work."""
        if not tokens and not self._run_steps:
            old = self._decode_seconds or seconds
            self._decode_seconds = old + self.SMOOTHING * (seconds - old)
            return
        self._run_steps += 1
        self._run_seconds += seconds
        self._run_tokens += tokens
        if not tokens or self._run_steps >= self.LONGEST_RUN:
            spent = self._run_seconds - self._run_steps * self._decode_seconds
            kept = 1 - self.SMOOTHING
            self._prompt_seconds = kept * self._prompt_seconds + spent
            self._prompt_tokens = kept * self._prompt_tokens + self._run_tokens
            self._run_steps, self._run_seconds, self._run_tokens = 0, 0.0, 0
