"""The engines under test behind one small interface: ``add`` a request, ``step``, read which tokens came.

Each is fed as its own front end feeds it, with the same processed inputs. Nothing is decoded to text and no token ends
an answer but its last, so that all do the same work.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from benchmarks.compare.recall import Contexts, RecallingAdapter, RecallingLanguageModel
from benchmarks.compare.workloads import Ask, Workload

Tokens = list[tuple[str, int]]  # (name of the ask, token), in the order of their coming


class Engine(Protocol):
    """A batcher with a workload's settings. It lives for one run."""

    def add(self, ask: Ask) -> None: ...
    def step(self) -> Tokens: ...
    def close(self) -> None: ...


def to_mlx(ask: Ask) -> dict[str, Any]:
    """An ask's arrays, as a processor returns them."""
    import mlx.core as mx

    return {name: mx.array(value) for name, value in ask.inputs.items()}


class OneAfterAnother:
    """mlx-vlm's ``generate_step``, a request at a time in order of arrival.

    ``see`` is shown every step's (ask, token, log-probabilities (V,)).
    """

    def __init__(
        self,
        model: Any,
        workload: Workload,
        contexts: Contexts | None = None,
        see: Callable[[Ask, int, Any], None] | None = None,
    ) -> None:
        self.model = model
        self.see = see
        self.waiting: deque[Ask] = deque()
        self.current: tuple[Ask, Iterator[tuple[int, Any]]] | None = None

    def add(self, ask: Ask) -> None:
        self.waiting.append(ask)

    def step(self) -> Tokens:
        if self.current is None:
            if not self.waiting:
                return []
            ask = self.waiting.popleft()
            self.current = (ask, alone(self.model, ask))
        ask, steps = self.current
        found = next(steps, None)
        if found is None:
            self.current = None
            return []
        if self.see is not None:
            self.see(ask, *found)
        return [(ask.name, found[0])]

    def close(self) -> None:
        pass


def alone(model: Any, ask: Ask) -> Iterator[tuple[int, Any]]:
    """mlx-vlm's single-request path: (token, log-probabilities (V,)) of one ask."""
    from mlx_vlm.generate.ar import generate_step

    inputs = to_mlx(ask)
    ids, pixels, mask = (
        inputs.pop(name, None)
        for name in ("input_ids", "pixel_values", "attention_mask")
    )
    steps = generate_step(
        ids, model, pixels, mask, max_tokens=ask.max_tokens, temperature=0.0, **inputs
    )
    for count, (token, logprobs) in enumerate(steps, start=1):
        yield int(token), logprobs
        if count == ask.max_tokens:  # it would run one step more
            return


class Driven:
    """A ``vlm_batch.engine.generator.BatchGenerator`` as an engine: ``generator`` is set by who inherits from this."""

    generator: Any

    def add(self, ask: Ask) -> None:
        from vlm_batch import SamplingParams

        params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
        self.generator.insert(ask.name, ask.inputs, params)

    def step(self) -> Tokens:
        events = self.generator.step()
        for event in events:
            if event.result is not None and event.result.error is not None:
                raise RuntimeError(event.result.error) from event.result.exception
        return [
            (event.request_id, event.token)
            for event in events
            if event.token is not None
        ]

    def warm_up(self) -> None:
        """Compute the shapes that requests will bring, as a server does while nothing is asked."""
        for _ in self.generator.warm_up():
            pass

    def close(self) -> None:
        self.generator.reset()


class ThisLibrary(Driven):
    """This library's engine with its defaults but for the rows."""

    reproducible = False
    says_rows = True

    def __init__(
        self, model: Any, workload: Workload, contexts: Contexts | None = None
    ) -> None:
        from vlm_batch.engine.generator import BatchGenerator
        from vlm_batch.loading import adapt
        from vlm_batch.policy import policy_of
        from vlm_batch.proofs.proving import fixed_shapes

        rows = workload.rows if self.says_rows else None
        said: dict[str, Any] = {"max_rows": rows}
        if workload.chunk is not None:
            chunk = workload.chunk
            said |= {
                "prefill_budget": chunk,
                "idle_budget": 8 * chunk,
                "max_chunk": chunk,
            }
        adapter: Any = adapt(model)
        if contexts is not None:
            adapter = RecallingAdapter(adapter, contexts)
        shapes = (
            fixed_shapes(adapter, max_rows=workload.rows) if self.reproducible else None
        )
        self.generator = BatchGenerator(adapter, policy=policy_of(said), shapes=shapes)


class Reproducible(ThisLibrary):
    """The same with answers that are functions of their requests, to the last bit."""

    reproducible = True


class Defaults(ThisLibrary):
    """The same with nothing said, as mlx-vlm's defaults know nothing of a workload's rows."""

    says_rows = False


class MlxVlm:
    """mlx-vlm's ``BatchGenerator``, fed as its server feeds it: embeddings at once for each arrival, then ``insert``."""

    def __init__(
        self,
        model: Any,
        workload: Workload,
        contexts: Contexts | None = None,
        *,
        prefill_rows: int,
        rows: int,
        step_size: int,
    ) -> None:
        import mlx.core as mx
        from mlx_vlm.generate.ar import BatchGenerator

        self.model = model
        self.names: dict[int, str] = {}
        self.generator = BatchGenerator(
            model.language_model
            if contexts is None
            else RecallingLanguageModel(model.language_model, contexts),
            Processor(),
            sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
            completion_batch_size=rows,
            prefill_batch_size=prefill_rows,
            prefill_step_size=step_size if workload.chunk is None else workload.chunk,
            compute_logprobs=False,
            stream=mx.default_stream(mx.default_device()),
            greedy_sampling=True,
        )

    def add(self, ask: Ask) -> None:
        inputs = to_mlx(ask)
        ids, pixels, mask = (
            inputs.pop(name, None)
            for name in ("input_ids", "pixel_values", "attention_mask")
        )
        features = self.model.get_input_embeddings(ids, pixels, mask=mask, **inputs)
        keywords = {
            **inputs,
            **{
                name: value
                for name, value in features.to_dict().items()
                if value is not None
            },
        }
        (uid,) = self.generator.insert(
            [ids[0].tolist()], max_tokens=ask.max_tokens, prompt_kwargs=[keywords]
        )
        self.names[uid] = ask.name

    def step(self) -> Tokens:
        _, responses = self.generator.next()
        return [
            (self.names[response.uid], int(response.token)) for response in responses
        ]

    def close(self) -> None:
        self.generator.close()


def mlx_vlm_defaults(
    model: Any, workload: Workload, contexts: Contexts | None = None
) -> MlxVlm:
    """The server's defaults: 8 prompts together, 32 rows, chunks of 2,048. They know nothing of a workload's rows."""
    return MlxVlm(model, workload, contexts, prefill_rows=8, rows=32, step_size=2048)


def mlx_vlm_capped(
    model: Any, workload: Workload, contexts: Contexts | None = None
) -> MlxVlm:
    """The defaults with the workload's rows."""
    return MlxVlm(
        model,
        workload,
        contexts,
        prefill_rows=min(8, workload.rows),
        rows=workload.rows,
        step_size=2048,
    )


def mlx_vlm_best(
    model: Any, workload: Workload, contexts: Contexts | None = None
) -> MlxVlm:
    """What serves a mixed load best: one prompt at a time, in chunks of 256, so that a free row is filled at once."""
    return MlxVlm(
        model, workload, contexts, prefill_rows=1, rows=workload.rows, step_size=256
    )


class BatchGenerate:
    """``mlx_vlm.batch_generate``: all requests in one call, tokens at its end.

    It wants pictures and text, and a processor: pictures here are blank ones of the right size, and the processor
    returns the recorded inputs of the request that the text names, so preprocessing costs it nothing.
    """

    def __init__(
        self, model: Any, workload: Workload, contexts: Contexts | None = None
    ) -> None:
        self.model = model
        self.asks: list[Ask] = []

    def add(self, ask: Ask) -> None:
        self.asks.append(ask)

    def step(self) -> Tokens:
        from mlx_vlm import batch_generate
        from PIL import Image

        if not self.asks:
            return []
        asks, self.asks = self.asks, []
        processor = Processor({ask.name: ask for ask in asks})
        # grouped by size, never read
        pictures = [Image.new("RGB", (wide, high)) for high, wide in map(_size, asks)]
        batch_generate(
            self.model,
            processor,
            images=pictures,
            prompts=[ask.name for ask in asks],
            max_tokens=max(ask.max_tokens for ask in asks),
        )
        # It answers with texts alone; the tokens are what its detokenizer was given, a reset for each request.
        order = [name for group in processor.groups for name in group]
        return [
            (name, token)
            for name, tokens in zip(order, processor.answers, strict=True)
            for token in tokens
        ]

    def close(self) -> None:
        pass


class Processor:
    """What mlx-vlm asks of a processor, with recorded inputs: no text goes in or out, and no token ends an answer."""

    pad_token = eos_token = ""
    chat_template = None

    def __init__(self, asks: dict[str, Ask] | None = None) -> None:
        self.asks = asks or {}
        self.groups: list[list[str]] = []
        self.answers: list[list[int]] = []
        self.text = ""

    @property
    def tokenizer(self) -> Processor:
        return self

    @property
    def stopping_criteria(self) -> Processor:
        return self

    @property
    def detokenizer(self) -> Processor:
        return self

    def add_eos_token_ids(self, ids: Any) -> None:
        """None of them ends an answer."""

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> str:
        content = messages[0]["content"]
        parts = (
            [content]
            if isinstance(content, str)
            else [part.get("text", "") for part in content]
        )
        return "".join(parts)

    def reset(self) -> None:
        if self.groups:
            self.answers.append([])

    def add_token(self, token: int) -> None:
        self.answers[-1].append(int(token))

    def finalize(self) -> None:
        """There is no text to finish."""

    def __call__(self, *args: Any, text: Any = None, **kwargs: Any) -> Any:
        """As stopping criterion: no token stops. As processor: a group's inputs, left-padded."""
        if text is None:
            return False
        rendered = [text] if isinstance(text, str) else list(text)
        # beside markers of pictures
        names = [re.sub("<[^>]*>", " ", prompt).split()[-1] for prompt in rendered]
        self.groups.append(names)
        return _stack([self.asks[name] for name in names])


def _size(ask: Ask) -> tuple[int, ...]:
    """A picture's (high, wide): patches of a grid, or pixels."""
    grid = ask.inputs.get("image_grid_thw")
    return (
        ask.inputs["pixel_values"].shape[-2:]
        if grid is None
        else tuple(int(n) for n in grid[0, 1:])
    )


def _stack(asks: Sequence[Ask]) -> dict[str, Any]:
    import numpy as np

    width = max(ask.length for ask in asks)
    ids = np.zeros((len(asks), width), dtype=np.int32)
    mask = np.zeros((len(asks), width), dtype=np.int32)
    for row, ask in enumerate(asks):
        ids[row, width - ask.length :] = ask.inputs["input_ids"][0]
        mask[row, width - ask.length :] = 1
    pictures = {
        name: np.concatenate([ask.inputs[name] for ask in asks])
        for name in asks[0].inputs
        if name != "input_ids"
    }
    return {"input_ids": ids, "attention_mask": mask, **pictures}


def vllm_mlx(
    model: Any, workload: Workload, contexts: Contexts | None = None
) -> Engine:
    """Imported when asked for: it lives in an environment of its own."""
    from benchmarks.compare.vllm import VllmMlx

    return VllmMlx(model, workload)


MakeEngine = Callable[[Any, Workload, Contexts | None], Engine]

#: In the order of the tables. The first is what the others are compared with.
ENGINES: dict[str, MakeEngine] = {
    "vlm_batch": ThisLibrary,
    "vlm_batch defaults": Defaults,
    "reproducible": Reproducible,
    "mlx-vlm defaults": mlx_vlm_defaults,
    "mlx-vlm capped": mlx_vlm_capped,
    "mlx-vlm best": mlx_vlm_best,
    "mlx-vlm batch_generate": BatchGenerate,
    "vllm-mlx": vllm_mlx,
    "one after another": OneAfterAnother,
}

#: Which engines can do a workload, or have something to show in it. One after another answers each once, for reference.
_OFFLINE = (
    "vlm_batch",
    "vlm_batch defaults",
    "reproducible",
    "mlx-vlm defaults",
    "mlx-vlm best",
    "mlx-vlm batch_generate",
    "vllm-mlx",
)
WANTED: dict[str, tuple[str, ...]] = {
    "chat-8": (
        "vlm_batch",
        "vlm_batch defaults",
        "reproducible",
        "mlx-vlm defaults",
        "mlx-vlm capped",
        "mlx-vlm best",
        "vllm-mlx",
    ),
    "churn-2": ("vlm_batch", "vlm_batch defaults", "mlx-vlm best"),
    "churn-8": ("vlm_batch", "vlm_batch defaults", "mlx-vlm best"),
    "captions": _OFFLINE,
    "documents": _OFFLINE,
    "chat-32": (
        "vlm_batch",
        "vlm_batch defaults",
        "reproducible",
        "mlx-vlm defaults",
        "mlx-vlm best",
        "vllm-mlx",
    ),
    "single": (
        "vlm_batch",
        "vlm_batch defaults",
        "reproducible",
        "mlx-vlm best",
        "one after another",
    ),
}
