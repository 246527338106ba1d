"""From a request to what a model takes in: templates, placeholders, processors. Every adaptation to processors lives here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import prepare_inputs, resolve_eos_token_ids, should_add_special_tokens
from PIL import Image

from vlm_batch.errors import InvalidPrompt
from vlm_batch.types import ImageInput, Message

_IMAGE_PARTS = ("image", "image_url", "input_image")


class Processing:
    """One model's processor: renders prompts (any thread), makes inputs (one thread at a time), decodes text."""

    def __init__(self, processor: Any, config: Any) -> None:
        self.processor = processor
        self.config = config
        self.tokenizer = getattr(processor, "tokenizer", processor)
        # Answers are decoded while another thread encodes prompts, and a fast tokenizer serves one of them at a time.
        self._decoder = copy.deepcopy(self.tokenizer)

    # Text
    # ---------------------------------------------------------------------------------------------------------------

    def render(self, prompt: str | Sequence[Message], num_images: int) -> str:
        """Put a prompt or a chat through the model's chat template, with a placeholder for each picture.

        Raises InvalidPrompt.
        """
        if isinstance(prompt, str) and not prompt.strip():
            raise InvalidPrompt("the prompt is empty")
        try:
            rendered = apply_chat_template(
                self.processor, self.config, prompt if isinstance(prompt, str) else list(prompt), num_images=num_images
            )
        except Exception as error:
            raise InvalidPrompt(
                f"the chat template cannot render this prompt: {error}; a prompt that is final already goes with rendered=True"
            ) from error
        if isinstance(rendered, Mapping):  # families without a template get their last message back
            rendered = rendered.get("content", "")
        if not isinstance(rendered, str):
            raise InvalidPrompt(f"the chat template gave {type(rendered).__name__}, not text")
        return rendered

    def count_placeholders(self, rendered: str) -> int | None:
        """How many pictures a rendered prompt has room for; None if the processor does not name its placeholder."""
        token = getattr(self.processor, "image_token", None) or getattr(self.tokenizer, "image_token", None)
        return rendered.count(token) if isinstance(token, str) and token else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=True)) if len(token_ids) else ""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: the checkpoint's and the tokenizer's."""
        return tuple(resolve_eos_token_ids(getattr(self.config, "eos_token_id", None), self.tokenizer))

    # Inputs
    # -------------------------------------------------------------------------------------------------------------

    def inputs(self, rendered: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        """What the model takes: ``input_ids`` (1, L) and whatever its processor makes of the pictures."""
        try:
            found = prepare_inputs(
                self.processor,
                images=list(images) or None,
                prompts=rendered,
                image_token_index=getattr(self.config, "image_token_index", None),
                add_special_tokens=should_add_special_tokens(self.config.model_type, self.processor),
            )
        except Exception as error:
            raise InvalidPrompt(f"the processor refuses this request: {error}") from error
        return as_mlx(found)

    def inputs_of_ids(
        self, token_ids: Sequence[int], images: Sequence[Image.Image], image_ids: frozenset[int]
    ) -> dict[str, Any]:
        """The same for final token ids, whose pictures must have all their placeholder tokens already."""
        ids = mx.array([list(token_ids)], dtype=mx.int32)
        if not images:
            return {"input_ids": ids}
        found = self.inputs(self.render("?", len(images)), images)
        needed = _count(found["input_ids"], image_ids)
        given = _count(ids, image_ids)
        if needed != given:
            raise InvalidPrompt(f"the pictures need {needed} placeholder tokens; the token ids hold {given}")
        return {**found, "input_ids": ids}


def split_messages(messages: Sequence[Message], images: Sequence[ImageInput]) -> tuple[list[Message], list[ImageInput]]:
    """A chat without its pictures' payloads, and all of its pictures in order.

    A content part that carries a picture keeps it; bare ``{"type": "image"}`` parts take from ``images`` in order;
    what is left of ``images`` belongs to the last user turn. Raises InvalidPrompt.
    """
    if not messages:
        raise InvalidPrompt("the chat has no messages")
    spare = iter(images)
    ordered: list[ImageInput] = []
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidPrompt('every message must be a mapping with "role" and "content"')
        content = message.get("content", "")
        if isinstance(content, list):
            content = [_strip(part, spare, ordered) for part in content]
        turns.append({**message, "content": content})
    return turns, ordered + list(spare)


def _strip(part: Any, spare: Any, ordered: list[ImageInput]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGE_PARTS:
        return part
    payload = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if isinstance(payload, Mapping):
        payload = payload.get("url")
    if payload is None:
        payload = next(spare, None)
        if payload is None:
            raise InvalidPrompt("the chat has more picture parts than pictures")
    ordered.append(payload)
    return {"type": "image"}


def as_numpy(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as numpy, evaluated in the caller's thread: a lazy mlx array cannot be used from another."""
    return {name: _map_arrays(value, _to_numpy) for name, value in inputs.items()}


def as_mlx(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy arrays as mlx arrays; everything else as it is."""
    return {name: _map_arrays(value, _to_mlx) for name, value in inputs.items()}


def _map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (mx.array, np.ndarray)):
        return change(value)
    if isinstance(value, list):
        return [_map_arrays(item, change) for item in value]
    return value


def _to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return np.array(array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array)


def _to_mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)


def _count(ids: mx.array, wanted: frozenset[int]) -> int:
    return sum(token in wanted for token in np.array(ids).reshape(-1).tolist())
