"""vllm-mlx's multimodal batch generator, as its scheduler drives it. Runs in an environment where vllm-mlx is installed."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from benchmarks.compare.engines import Processor, Tokens, to_mlx
from benchmarks.compare.workloads import Ask, Workload


class VllmMlx:
    """At most ``rows`` requests are handed over at once, as its ``max_num_seqs`` does.

    Its own input stage, which wants files and a tokenizer, is replaced by recorded inputs; the vision and prefix caches
    are off, because no picture and no prefix comes twice.
    """

    def __init__(self, model: Any, workload: Workload) -> None:
        from vllm_mlx.mllm_batch_generator import MLLMBatchGenerator, MLLMBatchRequest

        logging.getLogger("vllm_mlx").setLevel(logging.ERROR)
        self.make_request = MLLMBatchRequest
        self.generator = MLLMBatchGenerator(
            model,
            Processor(),
            prefill_batch_size=workload.rows,
            completion_batch_size=workload.rows,
            enable_vision_cache=False,
        )
        self.generator._preprocess_request = self._prepare  # type: ignore[method-assign]
        self.rows = workload.rows
        self.asks: dict[str, Ask] = {}
        self.waiting: deque[Ask] = deque()
        self.running: set[str] = set()

    def add(self, ask: Ask) -> None:
        self.asks[ask.name] = ask
        self.waiting.append(ask)

    def step(self) -> Tokens:
        while self.waiting and len(self.running) < self.rows:
            ask = self.waiting.popleft()
            self.running.add(ask.name)
            pictures = ["recorded"] if ask.has_picture else None
            request = self.make_request(
                0, ask.name, "", pictures, max_tokens=ask.max_tokens, temperature=0.0
            )
            self.generator.insert([request])
        tokens = []
        for response in self.generator.next():
            if response.finish_reason == "error":
                raise RuntimeError(
                    f"vllm-mlx failed {response.request_id}; run it with logging to see why"
                )
            if response.finish_reason is not None:
                self.running.discard(response.request_id)
            tokens.append((response.request_id, int(response.token)))
        return tokens

    def close(self) -> None:
        self.generator.close()

    def _prepare(self, request: Any) -> None:
        import mlx.core as mx

        ask = self.asks[request.request_id]
        inputs = to_mlx(ask)
        request.is_text_only = not ask.has_picture
        request.input_ids = inputs["input_ids"]
        request.attention_mask = mx.ones_like(request.input_ids)
        request.pixel_values = inputs.get("pixel_values")
        request.image_grid_thw = inputs.get("image_grid_thw")
