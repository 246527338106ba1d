"""Finds settings of config.json that no code reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_vlm.utils

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._applied import is_activation
from vlm_batch.models._layouts import corrected
from vlm_batch.models._reads import config_reads
from vlm_batch.models._settings import SettingsCheck, hard_coded_settings

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
    """Return the settings of a folder's config.json that nobody reads. No model is built.

    Token ids, sizes of tensors and settings of training are left out: the first are read by processors, the second are held
    to the tensors' shapes, and the third change no answer. Nothing is known of a type that is no package of mlx-vlm.

    Raises:
        UnsupportedModel: No model can be built by this config.json.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    reads = config_reads(model_type)
    if reads is None:
        return ()
    try:
        check = SettingsCheck(config, reads)
    except Exception as error:
        # whatever mlx-vlm's classes raise for settings that they cannot take
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"{folder}: no {model_type} can be built by config.json: {said}"
        ) from error
    hard_coded = hard_coded_settings(model_type)
    by_transformers = check.ignored().keys()
    found = []
    for path, value in check.unread().items():
        # Activations are written in mlx-vlm's code, and put right on the built model (models/_applied.py).
        if path in hard_coded or path[-1] in NO_EFFECT or is_activation(path[-1]):
            continue
        found.append(UnreadSetting(".".join(path), value, path in by_transformers))
    return tuple(found)
