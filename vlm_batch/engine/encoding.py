"""From a processor's output to an ``Encoded`` row with its caches: alone, or several rows' pictures in one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_batch.caches.quantisation import KVQuantisation
from vlm_batch.engine.logprobs import PromptScores
from vlm_batch.engine.port import ModelAdapter
from vlm_batch.engine.reuse import Reuse
from vlm_batch.engine.row import Facts, Row
from vlm_batch.engine.sampling import RowRules, reads_history
from vlm_batch.errors import InvalidParameters, PromptTooLong
from vlm_batch.policy import Policy
from vlm_batch.records import Call, Encoded


class Encoder:
    """Makes rows ready for prefill. ``kv`` has the settings of quantised caches, or is None; ``call`` goes to the adapter."""

    def __init__(
        self,
        adapter: ModelAdapter,
        reuse: Reuse,
        config: Policy,
        kv: KVQuantisation | None,
        call: Call = Call(),
    ) -> None:
        self.adapter = adapter
        self.reuse = reuse
        self._config = config
        self._kv = kv
        self.call = call

    def encode(self, row: Row) -> None:
        """Give a row its caches and its ``Encoded``. Raises PromptTooLong, and whatever the family raises for bad inputs."""
        prompt = row.prompt
        assert prompt is not None and prompt.inputs is not None
        begin = time.perf_counter()
        cached = self.reuse.begin(row, self.adapter.make_cache(self._kv))
        encoded = self.adapter.encode(prompt.inputs, self.call, cached)
        if row.params.prompt_logprobs is not None:
            row.answer.prompt_scores = self._scores(row.params.prompt_logprobs, prompt.inputs, encoded)
        context, asked = self.adapter.max_context, row.params.max_tokens
        check_length(encoded.length, context, self._config.max_prompt_tokens)
        exact = self.reuse.exact
        if exact is not None and row.answer.prompt_scores is None and encoded.is_plain:
            prompt.rows = exact.rows(encoded.length, encoded.atomic)
        mx.async_eval(encoded.inputs_embeds)
        prompt.inputs, prompt.encoded, prompt.prefilled = None, encoded, cached
        row.facts = Facts.of(encoded)
        row.answer.max_tokens = asked if context is None else min(asked, context - encoded.length)
        row.answer.rules = RowRules(row.answer.end_ids, row.answer.bad_words)
        if reads_history(row.params):
            known = [token for token in encoded.input_ids[0].tolist() if token >= 0]
            row.answer.history = mx.array(known, dtype=mx.int32)
        self.reuse.commit(row)
        if not row.clock.first_token:
            row.clock.encode_seconds = time.perf_counter() - begin

    def choose(self, rows: Sequence[Row], others: Sequence[Row], is_decoding: bool) -> list[Row]:
        """The first rows whose pictures may be encoded in one call.

        ``others`` are in prefill: a row whose beginning they will leave is not encoded yet.
        """
        most = self._config.encode_together
        chosen: list[Row] = []
        for row in rows[: -(-most // self._config.beside_decode) if is_decoding else most]:
            if not self.reuse.is_new(row) or self.reuse.waits_for(row, [*others, *chosen]):
                break  # its pictures may not have to be encoded at all
            chosen.append(row)
        return chosen

    def encode_together(self, rows: Sequence[Row]) -> int:
        """Encode the pictures of the first rows in one call, where that can be done; the number of these rows."""
        prompts = [row.prompt for row in rows if row.prompt is not None]
        given = [prompt.inputs or {} for prompt in prompts]
        try:
            found = self.adapter.encode_together(given, self.call)
        except Exception:
            return 1  # each of them is encoded alone and told its own error
        for prompt, inputs in zip(prompts, found, strict=True):
            prompt.inputs = inputs
        return max((index for index in range(len(given)) if found[index] is not given[index]), default=0) + 1

    def _scores(self, count: int, inputs: Mapping[str, Any], encoded: Encoded) -> PromptScores:
        """A record for the log-probabilities of a prompt's tokens. Raises InvalidParameters where the family has none."""
        if encoded.input_ids.shape[1] != encoded.length:
            raise InvalidParameters("prompt_logprobs: this family's prompts have more positions than tokens")
        if self.reuse.exact is not None and not self.adapter.scores_chunks:
            raise InvalidParameters(
                "prompt_logprobs: this family's take a forward a token, which reproducible=True excludes"
            )
        ids: Any = encoded.input_ids[0].tolist()
        scores = PromptScores(ids, self.adapter.text_positions(inputs), encoded.atomic, count, encoded.vocabulary)
        if len(ids) > 1 and not scores.says_any:
            raise InvalidParameters(
                "prompt_logprobs: this family sees its prompts as wholes, and tells none of their tokens"
            )
        return scores


def check_length(prompt: int, context: int | None, limit: int | None) -> None:
    """Raise PromptTooLong, with the numbers, for a prompt that can never be answered."""
    if limit is not None and prompt > limit:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens (pictures included); {limit} are taken", advice=" (Limits.prompt_tokens)"
        )
    if context is not None and prompt >= context:
        raise PromptTooLong(f"the prompt has {prompt} tokens (pictures included); the model's context holds {context}")
