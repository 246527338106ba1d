"""Tiny random models of mlx-vlm's own classes, and the two ways in which mlx-vlm answers: one request alone, and a batch.

What the reproductions beside this file share. It needs mlx-vlm and nothing of this project.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.generate.ar import BatchGenerator, generate_step
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import StoppingCriteria, update_module_configs

CONFIGS: dict[str, dict] = json.loads(
    Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
)
# the first id after those of plain text; families that count positions have START, END, PATCH
IMAGE = 128

Request = dict[str, Any]
PASSED_BY_POSITION = ("input_ids", "pixel_values", "attention_mask")


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of one of ``configs.json``'s models, read by the functions that mlx-vlm's loader calls."""
    config = {**CONFIGS[name], **changes}
    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    return update_module_configs(
        module.ModelConfig.from_dict(dict(config)), module, config, parts
    )


def tiny(name: str, **changes: Any) -> Any:
    """A fresh model with random weights, the same at each call."""
    module = importlib.import_module(f"mlx_vlm.models.{CONFIGS[name]['model_type']}")
    mx.random.seed(0)  # of what a class draws and does not list among its parameters
    return filled(module.Model(config_of(name, **changes)))


def filled(module: nn.Module, head: float = 3.0) -> Any:
    """The module with random parameters that keep the scale of what goes through, and logits far from flat."""
    weights = []
    for path, value in tree_flatten(module.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        random = np.random.RandomState(zlib.crc32(path.encode()))
        # three axes are experts
        fan_in = value.shape[-1] if value.ndim == 3 else np.prod(value.shape[1:])
        scale = (
            0.2
            if value.ndim < 2
            else (head if "lm_head" in path else 1.3) / np.sqrt(fan_in)
        )
        mean = 1.0 if value.ndim == 1 and path.endswith("weight") else 0.0
        weights.append(
            (
                path,
                mx.array(
                    (mean + scale * random.standard_normal(value.shape)).astype(
                        np.float32
                    )
                ),
            )
        )
    module.load_weights(weights, strict=False)
    module.eval()
    mx.eval(module.parameters())
    return module


def noise(seed: int, *shape: int) -> mx.array:
    """Normal values of a shape, the same for the same seed."""
    return mx.array(
        np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    )


def text(seed: int, length: int) -> Request:
    """A request of plain text."""
    return {
        "input_ids": mx.array(
            np.random.RandomState(seed).randint(1, 128, size=(1, length))
        )
    }


def prompt(seed: int, *parts: Sequence[int]) -> mx.array:
    """(1, L) ids: three words, then each part followed by three words."""
    words = iter(
        np.random.RandomState(seed).randint(1, 128, size=3 * len(parts) + 3).tolist()
    )
    ids = [next(words) for _ in range(3)]
    for part in parts:
        ids += [*part, *[next(words) for _ in range(3)]]
    return mx.array([ids])


def pictures(
    seed: int,
    *grids: tuple[int, int],
    length: int = 96,
    frame: tuple[int, ...] = (128, 130, 129),
) -> Request:
    """A request with pictures of (high, wide) patches as Qwen's processor lays them out, four patches to a placeholder.

    ``length`` is a patch's; ``frame`` holds the ids of a picture's start, of its placeholders and of its end.
    """
    start, inside, end = frame
    return {
        "input_ids": prompt(
            seed,
            *[[start, *[inside] * (high * wide // 4), end] for high, wide in grids],
        ),
        "pixel_values": noise(seed, sum(high * wide for high, wide in grids), length),
        "image_grid_thw": mx.array([[1, high, wide] for high, wide in grids]),
    }


def alone(
    model: Any, request: Request, num_tokens: int = 4, **settings: Any
) -> list[int]:
    """The greedy tokens of ``mlx_vlm.generate``'s loop."""
    rest = {**request, **settings}
    ids, pixels, mask = (rest.pop(name, None) for name in PASSED_BY_POSITION)
    steps = generate_step(
        ids, model, pixels, mask, max_tokens=num_tokens, temperature=0.0, **rest
    )
    return [int(token) for token, _ in steps]


def logits_in_chunks(language: Any, ids: mx.array, chunk: int) -> mx.array:
    """(V,) logits after (1, L) ids that a language model with its own cache takes ``chunk`` at a time."""
    cache = make_prompt_cache(language)
    for start in range(0, ids.shape[1], chunk):
        logits = language(ids[:, start : start + chunk], cache=cache).logits
    return logits[0, -1]


def first_logprobs(model: Any, request: Request, **settings: Any) -> np.ndarray:
    """(V,) log-probabilities of the first token of ``mlx_vlm.generate``'s loop."""
    rest = {**request, **settings}
    ids, pixels, mask = (rest.pop(name, None) for name in PASSED_BY_POSITION)
    return np.array(
        next(
            iter(
                generate_step(
                    ids, model, pixels, mask, max_tokens=1, temperature=0.0, **rest
                )
            )
        )[1]
    )


def batched(
    model: Any,
    *requests: Request,
    at: Sequence[int] = (),
    num_tokens: int = 4,
    **settings: Any,
) -> list:
    """Each request's greedy tokens in one ``BatchGenerator``, fed as the server feeds it (server/generation.py).

    ``at`` holds the step at which each arrives, one after another; without it, all come at once.
    """
    tokenizer = SimpleNamespace(stopping_criteria=StoppingCriteria([-1]))  # never
    if at:
        settings["prefill_batch_size"] = 1
    generator = BatchGenerator(model.language_model, tokenizer, **settings)
    answers: dict[int, list[int]] = {}
    for step in range(30):
        for request, arrival in zip(requests, at or [0] * len(requests), strict=True):
            if arrival == step:
                rest = dict(request)
                ids, pixels, mask = (
                    rest.pop(name, None) for name in PASSED_BY_POSITION
                )
                embedded = model.get_input_embeddings(
                    ids, pixels, mask=mask, **rest
                ).to_dict()
                rest |= {
                    name: value for name, value in embedded.items() if value is not None
                }
                (uid,) = generator.insert(
                    [ids[0].tolist()], max_tokens=num_tokens, prompt_kwargs=[rest]
                )
                answers[uid] = []
        for response in generator.next()[1]:
            answers[response.uid].append(response.token)
    return [answers[uid] for uid in sorted(answers)]


# ---- a case: what mlx-vlm does, and what is right ----


@dataclass(frozen=True)
class Case:
    """One defect of one family, or of several for one cause: ``run`` returns what mlx-vlm does and what is right."""

    families: tuple[str, ...]
    places: tuple[str, ...]  # "file:line", in mlx_vlm
    run: Callable[[], tuple[Any, Any]]

    @property
    def name(self) -> str:
        return self.run.__name__


CASES: list[Case] = []


def case(
    *families: str, at: str
) -> Callable[[Callable[[], tuple[Any, Any]]], Callable[[], tuple[Any, Any]]]:
    """Marks a function as a case of these families, whose cause is ``at`` places "file:line file:line" of mlx_vlm."""

    def add(run: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        CASES.append(Case(families, tuple(at.split()), run))
        return run

    return add


def attempt(what: Callable[[], Any]) -> Any:
    """What a call returns, or the exception that it ends in, in words."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def together_and_alone(
    name: str, *requests: Request, num_tokens: int = 4, **settings: Any
) -> tuple[Any, Any]:
    """The tokens of requests that share a batch, and of each alone, every time in a fresh model."""
    right = [alone(tiny(name), request, num_tokens) for request in requests]
    return attempt(
        lambda: batched(tiny(name), *requests, num_tokens=num_tokens, **settings)
    ), right


def shows(found: Any, right: Any) -> bool:
    """Whether what mlx-vlm does is not what is right: other words or shapes, or numbers more than 1e-4 apart."""
    if isinstance(found, str) or isinstance(right, str):
        return str(found) != str(right)
    try:
        one, other = np.array(found, dtype=float), np.array(right, dtype=float)
    except ValueError:  # lists of different lengths
        return bool(found != right)
    return one.shape != other.shape or not bool(
        np.allclose(one, other, rtol=0, atol=1e-4)
    )


def report() -> None:
    """Runs every case of the file and prints what it shows."""
    for one in CASES:
        try:
            found, right = one.run()
        except Exception as error:
            found = f"the reproduction itself fails: {type(error).__name__}: {error}"
            right = ""
        print(
            f"{one.name} ({', '.join(one.families) or 'every family'})\n  mlx-vlm: {_short(found)}\n  right:   {_short(right)}"
        )
        print(
            f"  at       {', '.join(one.places)}" if shows(found, right) else "  mended"
        )


def _short(value: Any) -> str:
    if isinstance(value, (mx.array, np.ndarray)):
        with np.printoptions(precision=4, suppress=True, threshold=8, edgeitems=3):
            return str(np.array(value)).replace("\n", " ")
    return str(value)[:300]
