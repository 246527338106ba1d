"""Names of arguments that people bring from other libraries, and what to write here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

Called = TypeVar("Called", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

#: Names of media.
MEDIA = {
    "image": "images=",
    "audio": "audios=",
    "video": "videos=",
    "resize_shape": "max_pixels=",
}
#: Names of sampling, for ``SamplingParams``.
SAMPLING = {
    "do_sample": "temperature=",
    "eos_tokens": "stop= or stop_token_ids=",
    "max_completion_tokens": "max_tokens=",
    "max_new_tokens": "max_tokens=",
    "num_return_sequences": "n=",
    "response_format": "json_schema=",
    "temp": "temperature=",
    "top_logprobs": "logprobs=",
}
#: Names of a prompt's making.
PROMPTS = {
    "enable_thinking": 'template={"enable_thinking": ...}',
    "prompts": "one request a prompt: generate([Request(prompt=...), ...])",
    "stream": "nothing: iterate over the handle, or wait for handle.result()",
    "system": 'messages=[{"role": "system", "content": ...}, ...]',
    "system_prompt": 'messages=[{"role": "system", "content": ...}, ...]',
    "tools": 'template={"tools": ...}',
}
#: Names of a batcher's settings.
ENGINES = {
    "adapter_path": "VLMBatcher(*mlx_vlm.load(path, adapter_path=...))",
    "batch_size": "max_rows=",
    "completion_batch_size": "max_rows=",
    "max_batch_size": "max_rows=",
    "max_num_seqs": "max_rows=",
    "model_path": "model=",
    "tokenizer": "processor=",
}


def advises(instead: Mapping[str, str]) -> Callable[[Called], Called]:
    """Decorate a function: an unknown argument's TypeError says the right one.

    Args:
        instead: name -> what to write.
    """

    def decorate(called: Called) -> Called:
        known = frozenset(inspect.signature(called).parameters)

        @functools.wraps(called)
        def checked(*args: Any, **named: Any) -> Any:
            if not known.issuperset(named):
                name = next(name for name in named if name not in known)
                raise TypeError(_message(called, name, known, instead))
            return called(*args, **named)

        return cast(Called, checked)

    return decorate


def advises_of_fields(instead: Mapping[str, str]) -> Callable[[Class], Class]:
    """Decorate a dataclass, as ``advises``."""

    def decorate(cls: Class) -> Class:
        made = advises(instead)(cls.__init__)  # type: ignore[misc]
        cls.__init__ = made  # type: ignore[misc]
        return cls

    return decorate


def of_params(names: Mapping[str, str], fields: frozenset[str]) -> dict[str, str]:
    """Return names of sampling for a call that takes it as ``params``.

    Args:
        names: name -> what to write in ``SamplingParams``.
        fields: the fields of ``SamplingParams``.
    """
    meant = {name: written.split("=")[0] for name, written in names.items()}
    meant |= {name: name for name in fields}
    return {name: f'params={{"{right}": ...}}' for name, right in meant.items()}


def meant(name: str, known: Iterable[str], instead: Mapping[str, str]) -> str:
    """Return what to write for an unknown name, in brackets; empty if nothing is near."""
    if name in instead:
        return f" (write {instead[name]})"
    near = get_close_matches(name, known, 1)
    if near:
        return f" ({near[0]!r} is probably meant)"
    return ""


def _message(
    called: Callable[..., Any],
    name: str,
    known: frozenset[str],
    instead: Mapping[str, str],
) -> str:
    where = called.__qualname__.removesuffix(".__init__")
    return f"{where}() has no argument {name!r}{meant(name, known - {'self'}, instead)}"
