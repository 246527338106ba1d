"""Values that mlx-vlm's and transformers' configuration classes derive from config.json."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import mlx_vlm.utils
from transformers import CONFIG_MAPPING, PreTrainedConfig

from vlm_batch.models._applied import SCALED, with_plain_rope
from vlm_batch.models._layouts import corrected
from vlm_batch.models._reads import Attribute, config_objects, is_part
from vlm_batch.models._rules import Config

#: Where a setting or a part is in config.json: ("text_config", "rope_parameters", "rope_theta").
SettingPath = tuple[str, ...]
#: Attributes of mlx-vlm's configuration objects, and their values as text.
MlxAttributes = dict[Attribute, str]
#: (class, path, name) of attributes of transformers' configuration objects, and their values as text.
TransformersAttributes = dict[tuple[type, str, str], str]


# mlx-vlm
# ---------------------------------------------------------------------------------------------------------------------


def readable(config: Config) -> Config:
    """Return a corrected configuration; positions that mlx-vlm refuses are plain until the model is built."""
    return _readable(config)[0]


def mlx_attributes(config: Config) -> MlxAttributes:
    """Return what mlx-vlm derives from config.json."""
    read, found = _readable(config)
    return _mlx_attributes(read) if found is None else found


def _readable(config: Config) -> tuple[Config, MlxAttributes | None]:
    """Return the readable configuration and mlx-vlm's attributes, if known."""
    read, found = corrected(config), None
    with suppress(ValueError):
        found = _mlx_attributes(read)
    if found is not None and "dynamic" not in json.dumps(config, default=str):
        return read, found
    rope = getattr(decoder_config(config), "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    is_refused = found is None or (kind == "dynamic" and "alpha" not in rope)
    if not is_refused or kind not in SCALED | {"dynamic"}:
        return read, found
    parts = {
        name: with_plain_rope(read[name])
        for name in ("text_config", "llm_config")
        if read.get(name)
    }
    return with_plain_rope(read) | parts, None


def _mlx_attributes(read: Config) -> MlxAttributes:
    read = copy.deepcopy(read)
    package, _ = mlx_vlm.utils.get_model_and_args(config=read)
    read.setdefault("text_config", read.pop("llm_config", {}))
    for name in ("vision_config", "audio_config"):
        read.setdefault(name, {})
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    config = mlx_vlm.utils.update_module_configs(
        package.ModelConfig.from_dict(read), package, read, parts
    )
    return {
        (path, name): repr(value)
        for path, part in config_objects(config)
        for name, value in vars(part).items()
        if not is_part(name, value)
    }


# transformers
# ---------------------------------------------------------------------------------------------------------------------


def known_parts(
    config: Config, path: SettingPath = ()
) -> Iterator[tuple[SettingPath, Config]]:
    """Yield (path, part) of parts with a transformers class."""
    if config.get("model_type") in CONFIG_MAPPING:
        yield path, config
        return
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from known_parts(dict(value), (*path, name))


def decoder_config(config: Config) -> Any:
    """Return transformers' configuration of the decoder, or None."""
    for _, part in known_parts(config):
        try:
            with without_warnings():
                return _transformers_config(
                    CONFIG_MAPPING[part["model_type"]], part
                ).get_text_config(decoder=True)
        except Exception:  # transformers' class refuses the file
            return None
    return None


def transformers_attributes(kind: type, config: Config) -> TransformersAttributes:
    """Return what transformers' class derives from config.json."""
    todo: list[tuple[str, Any]] = [("", _transformers_config(kind, config))]
    found = {}
    while todo:
        path, part = todo.pop()
        for name, value in vars(part).items():
            if isinstance(value, PreTrainedConfig):
                todo.append((f"{path}.{name}", value))
            elif not name.startswith("_"):
                found[type(part), path, name] = repr(value)
    return found


def _transformers_config(kind: Any, config: Config) -> Any:
    # infinity is a mapping in the file
    read = kind._decode_special_floats(copy.deepcopy(config))
    # PreTrainedConfig.from_dict also writes a log, which takes most of its time (configuration_utils.py:1108).
    has_own = kind.from_dict.__func__ is not PreTrainedConfig.from_dict.__func__  # type: ignore[attr-defined]
    return kind.from_dict(read) if has_own else kind(**read)


@contextmanager
def without_warnings() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
