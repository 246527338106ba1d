"""Finds settings of config.json that no code reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_vlm.utils

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models import package_of, spec_for
from vlm_batch.models._applied import is_activation
from vlm_batch.models._derived import readable
from vlm_batch.models._layouts import corrected
from vlm_batch.models._reads import ConfigReads, ConfigWatch
from vlm_batch.models._rules import Config, Tensors
from vlm_batch.models._settings import HARD_CODED, SettingsCheck
from vlm_batch.models._tensors import TENSORS

#: Settings without an effect on any answer, beside those that ``SettingsCheck`` leaves out.
NO_EFFECT = frozenset(
    {
        "auto_map",
        "gradient_checkpointing",
        "id2label",
        "ignore_index",
        "label2id",
        "quantization",
    }
)
#: Parts of a model that have a configuration of their own in mlx-vlm (utils.py, load_model).
_PARTS = ["text", "vision", "perceiver", "projector", "audio"]


@dataclass(frozen=True)
class UnreadSetting:
    """A setting of config.json that neither mlx-vlm's model nor its adapter reads.

    Attributes:
        path: Its place, as "text_config.rope_theta".
        value: What the file says.
        read_by_transformers: transformers' model of this type reads it. Such a folder is refused when it is loaded, unless
            the value is what mlx-vlm computes anyway.
    """

    path: str
    value: Any
    read_by_transformers: bool


def unread_settings(folder: str | Path) -> tuple[UnreadSetting, ...]:
    """Return the settings of a folder's config.json that nobody reads. Builds the model without weights, in seconds.

    Token ids, sizes of tensors and settings of training are left out: the first are read by processors, the second are held
    to the tensors' shapes, and the third change no answer.

    Raises:
        UnsupportedModel: No model can be built by this config.json.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    try:
        reads = _reads(config, model_type)
    except Exception as error:
        # whatever mlx-vlm's classes raise for settings that they cannot take
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"{folder}: no {model_type} can be built by config.json: {said}"
        ) from error
    check = SettingsCheck(config, reads)
    hard_coded = {
        tuple(name.split(".")) for kind, name in HARD_CODED if kind == model_type
    }
    by_transformers = check.ignored().keys()
    found = []
    for path, value in check.unread().items():
        # Activations are written in mlx-vlm's code, and put right on the built model (models/_applied.py).
        if path in hard_coded or path[-1] in NO_EFFECT or is_activation(path[-1]):
            continue
        found.append(UnreadSetting(".".join(path), value, path in by_transformers))
    return tuple(found)


def _reads(config: Mapping[str, Any], model_type: str) -> ConfigReads:
    """Build a model as mlx-vlm's loader does, without weights, and note what it reads."""
    read: Config = readable(copy.deepcopy(dict(config)))
    package = package_of(model_type) or mlx_vlm.utils.get_model_and_args(read)[0]
    read.setdefault("text_config", read.pop("llm_config", {}))
    for name in ("vision_config", "audio_config"):
        read.setdefault(name, {})
    built = mlx_vlm.utils.update_module_configs(
        package.ModelConfig.from_dict(read), package, read, _PARTS
    )
    watch = ConfigWatch()
    watch.start(mlx_vlm.utils.apply_generation_config_defaults, built, read)
    model = package.Model(built)
    watch.end()
    spec, tensors = spec_for(model_type), TENSORS.get(model_type, Tensors())
    adapter = object if spec is None or spec.adapter is None else spec.adapter
    return watch.reads(model, adapter, (tensors.change, tensors.finish))
