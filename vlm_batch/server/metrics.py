"""Prometheus metrics, under vLLM's names where these fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vlm_batch.types import Result

if TYPE_CHECKING:
    from vlm_batch.batcher import Stats

LABEL = "model_name"
SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
GAPS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
)

#: Gauges: name, description, and how to read them.
GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    (
        "vllm:num_requests_running",
        "Requests that are being prefilled or decode.",
        lambda s: s.prefilling + s.decoding,
    ),
    (
        "vllm:num_requests_waiting",
        "Requests that wait for a place.",
        lambda s: s.queued + s.waiting,
    ),
    (
        "vlm_batch:rows_prefilling",
        "Rows whose prompts are being prefilled.",
        lambda s: s.prefilling,
    ),
    ("vlm_batch:rows_decoding", "Rows in the decode batch.", lambda s: s.decoding),
    (
        "vlm_batch:stalled_seconds",
        "Seconds of a step that does not end; 0 where steps end in time.",
        lambda s: s.stalled,
    ),
    (
        "vlm_batch:memory_pressure_seconds",
        "Seconds since the system became short of memory; 0 while it is not.",
        lambda s: s.pressed,
    ),
    (
        "vlm_batch:kv_cache_bytes",
        "Bytes of the live rows' keys and values.",
        lambda s: s.kv_bytes,
    ),
    (
        "vlm_batch:prefix_cache_bytes",
        "Bytes kept for later requests.",
        lambda s: s.cache_bytes,
    ),
    (
        "vlm_batch:drafted_tokens",
        "Tokens that were computed because they would probably follow.",
        lambda s: s.drafted,
    ),
    ("vlm_batch:held_draft_tokens", "Those of them that did.", lambda s: s.drafts_held),
    (
        "vlm_batch:tokens_per_second",
        "Tokens generated a second, lately.",
        lambda s: s.tokens_per_second,
    ),
)


class Metrics:
    def __init__(
        self,
        model: str,
        stats: Callable[[], Stats | None],
        num_held: Callable[[], float],
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.registry.register(_Live(model, stats))
        held = Gauge(
            "vlm_batch:requests_held",
            "Requests beyond the queue.",
            (LABEL,),
            registry=self.registry,
        )
        held.labels(model).set_function(num_held)
        self._requests = self._counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._responses = self._counter(
            "vlm_batch:http_responses",
            "Responses by path and status.",
            "path",
            "status",
        )
        self._of_batches = self._counter(
            "vlm_batch:batch_requests",
            "Requests of batches that ended, by status.",
            "status",
        )
        self._batches = self._counter(
            "vlm_batch:batches", "Batches that ended, by state.", "state"
        )
        self._prompt = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that ended."
        )
        self._generated = self._counter(
            "vllm:generation_tokens", "Tokens of answers that ended."
        )
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache."
        )
        self._pictures = self._counter(
            "vlm_batch:pictures", "Pictures of requests that ended."
        )
        self._encoder = self._counter(
            "vlm_batch:encoder_seconds", "Seconds that requests were being encoded."
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Submit to first token.", SECONDS
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", GAPS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Submit to end.", SECONDS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Waiting for a place.", SECONDS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Encoded to first token.", SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last.", SECONDS
        )
        self._prompt_size = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS
        )
        self._answer_size = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", TOKENS
        )

    def gap(self, seconds: float) -> None:
        self._gap.labels(self._model).observe(seconds)

    def ended(self, result: Result, *, shares_prompt: bool = False) -> None:
        """Record an answer; with ``shares_prompt``, another counts the prompt."""
        usage, timings = result.usage, result.timings
        reason = {"cancelled": "abort"}.get(result.finish_reason, result.finish_reason)
        self._requests.labels(self._model, reason).inc()
        self._generated.labels(self._model).inc(usage.completion_tokens)
        if not shares_prompt:
            self._prompt.labels(self._model).inc(usage.prompt_tokens)
            self._queries.labels(self._model).inc(usage.prompt_tokens)
            self._hits.labels(self._model).inc(usage.cached_tokens)
            self._pictures.labels(self._model).inc(len(result.image_sizes))
            self._encoder.labels(self._model).inc(timings.encode)
        if usage.completion_tokens:
            self._ttft.labels(self._model).observe(timings.ttft)
            for histogram, seconds in (
                (self._whole, timings.total),
                (self._queue, timings.queue),
                (self._prefill, timings.prefill),
                (self._decode, timings.decode),
                (self._prompt_size, usage.prompt_tokens),
                (self._answer_size, usage.completion_tokens),
            ):
                histogram.labels(self._model).observe(seconds)

    def aborted(self, count: int) -> None:
        if count:
            self._requests.labels(self._model, "abort").inc(count)

    def of_batch(self, status: int) -> None:
        """Record a request of a batch."""
        self._of_batches.labels(self._model, str(status)).inc()

    def ended_batch(self, status: str) -> None:
        self._batches.labels(self._model, status).inc()

    def watch_files(self, size: Callable[[], float]) -> None:
        """Show the bytes of stored files."""
        gauge = Gauge(
            "vlm_batch:files_bytes",
            "Bytes of files that are kept.",
            (LABEL,),
            registry=self.registry,
        )
        gauge.labels(self._model).set_function(size)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(self._model, path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, (LABEL, *labels), registry=self.registry)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(name, about, (LABEL,), buckets=buckets, registry=self.registry)


class _Live(Collector):
    def __init__(self, model: str, stats: Callable[[], Stats | None]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self._stats()
        for name, about, read in GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=(LABEL,))
            if now is not None:
                gauge.add_metric((self._model,), read(now))
            yield gauge
