"""Refuses settings of config.json that change answers and that mlx-vlm ignores.

For each setting of the file:

1. It matters if transformers' class derives something else without it that its model reads. 2. It is served if
mlx-vlm's class derives something else from another value that its model or the adapter reads. 3. What matters and is
not served is applied to the built model (``_applied``) or refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import mlx_vlm.utils
from transformers import CONFIG_MAPPING

from vlm_batch.errors import UnsupportedModel
from vlm_batch.models._applied import (
    apply_setting,
    apply_sliding_window,
    apply_tower_epsilon,
    is_activation,
    rope_scaling_of,
    scale_rope,
)
from vlm_batch.models._derived import (
    SettingPath,
    TransformersAttributes,
    decoder_config,
    known_parts,
    mlx_attributes,
    transformers_attributes,
    without_warnings,
)
from vlm_batch.models._layouts import corrected
from vlm_batch.models._reads import (
    ConfigReads,
    all_layers_slide,
    config_reads,
    read_by_transformers,
    warn_of_other_version,
)
from vlm_batch.models._rules import Config

logger = logging.getLogger(__name__)

#: Sizes: with another value, tensors would not fit.
SIZES = re.compile(
    r"(hidden|intermediate|projection|vocab|encoder_hidden|text_hidden|projection_hidden)_(size|dim)|projection_dim"
    r"|num_hidden_layers|vocab_size_per_layer_input|vision_use_head|pos_emb_(height|width)|cross_attention_frequency"
    r"|max_position_embeddings|ple_layer_ids|head_dim|image_size|.*bias"
)
#: Settings without an effect here: token ids, training, types of numbers, and those that other code handles.
NO_EFFECT = re.compile(
    r"_.*|.*(token_ids?|token_index|start_id|end_id|newline_id)|.*(drop|loss|noise|jitter|initializer|init_std).*"
    r"|(torch_)?dtype|architectures|transformers_version|model_type|use_cache|return_dict.*|quantization_config"
    r"|output_(attentions|hidden_states|router_logits)"
    r"|tie_word_embeddings|rope_(scaling|type|local_base_freq)|(use_)?sliding_window|max_window_layers|layer_types"
    r"|image_grid_pinpoints|pretraining_tp|chunk_size_feed_forward|problem_type|num_labels"
)
#: (model type, setting) -> values that mlx-vlm's class computes, at least in part, whatever config.json says.
HARD_CODED: dict[tuple[str, str], tuple[Any, ...]] = {
    # its resampler's norm (ernie4_5_moe_vl.py:63)
    ("ernie4_5_moe_vl", "text_config.rms_norm_eps"): (1e-5,),
    # its resampler's norms (ernie4_5_moe_vl.py:51)
    ("ernie4_5_moe_vl", "vision_config.rms_norm_eps"): (1e-6,),
    # queries' and keys' norms (gemma4/vision.py:74)
    ("gemma4", "vision_config.rms_norm_eps"): (1e-6,),
    ("glm5_next", "text_config.index_kpool_always_select_tail"): (True,),
    # that of the decoder (idefics2/idefics2.py:92)
    ("idefics2", "perceiver_config.rms_norm_eps"): (1e-5,),
    ("idefics2", "text_config.rms_norm_eps"): (1e-5,),  # it is the perceiver's, too
    ("kimi_k25", "text_config.rope_interleave"): (True,),
    # the mergers' norms (minicpmv4_6.py:109)
    ("minicpmv4_6", "vision_config.layer_norm_eps"): (1e-6,),
    ("minicpmv4_7", "vision_config.layer_norm_eps"): (1e-6,),
    ("mistral3", "vision_config.hidden_act"): ("silu",),
    ("mllama", "vision_config.norm_eps"): (1e-5,),
    ("multi_modality", "vision_config.hidden_act"): ("gelu",),
    ("multi_modality", "vision_config.layer_norm_eps"): (1e-6,),
    ("muse_glimmer", "vision_config.layer_norm_eps"): (1e-5,),
    ("muse_spark", "vision_config.layer_norm_eps"): (1e-5,),
    # as transformers' whatever is said
    ("paligemma", "text_config.use_bidirectional_attention"): (True,),
    # its blocks' norms; the last one's is read (nemotron_h_nano_omni.py:93)
    ("nemotron_h_nano_omni", "vision_config.layer_norm_eps"): (1e-6,),
    ("pixtral", "vision_config.hidden_act"): ("silu",),
    ("pixtral", "vision_feature_layer"): (-1,),
    # as transformers' whatever is said
    ("qwen3_vl_moe", "text_config.norm_topk_prob"): (True,),
}


def apply_settings(model: Any, config: Config) -> None:
    """Apply settings that matter and that neither mlx-vlm's class nor the adapter reads.

    Raises:
        UnsupportedModel: Such a setting cannot be applied.
    """
    model_type = str(mlx_vlm.utils.get_model_type(corrected(config)))
    _apply_positions(model, model_type, decoder_config(config))
    if epsilon := (config.get("vision_config") or {}).get("layer_norm_eps"):
        apply_tower_epsilon(model, epsilon)
    reads = config_reads(model_type)
    if reads is None:  # a model of another package, or of a later mlx-vlm
        logger.warning(
            "it is not known which settings of config.json the %s model reads: none is checked",
            model_type,
        )
        return
    warn_of_other_version()
    ignored = SettingsCheck(config, reads).ignored()
    written = dict(settings_of(config))
    hard_coded = hard_coded_settings(model_type)
    set_elsewhere = {path: written[path] for path in hard_coded if path in written}
    for path, value in (ignored | set_elsewhere).items():
        # transformers 4.52 to 4.56 write the decoder's settings twice; mlx-vlm reads one of the two.
        twin = path[1:] if path[0] == "text_config" else ("text_config", *path)
        if written.get(twin) == value and twin not in ignored:
            continue
        computed = hard_coded.get(path, ())
        if value in computed or apply_setting(model, path, value):
            continue
        does_not = "never reads"
        if computed:
            known = " or ".join(map(repr, computed))
            does_not = f"does not compute; it computes {known}"
        raise UnsupportedModel(
            f"config.json says {'.'.join(path)}: {json.dumps(value)}, which mlx-vlm's {model_type} {does_not}"
        )


def hard_coded_settings(model_type: str) -> dict[SettingPath, tuple[Any, ...]]:
    """Return a type's part of ``HARD_CODED``, path -> values."""
    return {
        tuple(name.split(".")): values
        for (kind, name), values in HARD_CODED.items()
        if kind == model_type
    }


def _apply_positions(model: Any, model_type: str, decoder: Any) -> None:
    if decoder is None:
        return
    scaling = rope_scaling_of(decoder)
    if scaling is not None and not scale_rope(
        model.language_model, scaling, decoder.max_position_embeddings
    ):
        raise UnsupportedModel(
            f"this {model_type} model has {scaling['rope_type']} positions, which mlx-vlm's class of it does not know"
        )
    apply_sliding_window(model, decoder, all_slide=all_layers_slide(type(decoder)))


class SettingsCheck:
    """Finds settings that matter and that a model ignores."""

    def __init__(self, config: Config, reads: ConfigReads) -> None:
        self._config, self._reads = config, reads
        self._attributes = mlx_attributes(config)

    def ignored(self) -> dict[SettingPath, Any]:
        """Return the settings, path -> value."""
        found = {}
        with without_warnings():
            for path, part in known_parts(self._config):
                kind = CONFIG_MAPPING[part["model_type"]]
                served = self._copied([path + inner for inner, _ in settings_of(part)])
                try:
                    attributes = transformers_attributes(kind, part)
                except Exception:
                    # transformers' class refuses the file, so nothing is known
                    continue
                for inner, value in settings_of(part):
                    whole_path = path + inner
                    if whole_path in served or not matters(
                        kind, part, inner, attributes
                    ):
                        continue
                    if not self._is_served(whole_path):
                        found[whole_path] = value
        return found

    def unread(self) -> dict[SettingPath, Any]:
        """Return the settings that the model ignores, whether they matter or not, path -> value."""
        written = dict(settings_of(self._config))
        with without_warnings():
            served = self._copied(list(written))
            return {
                path: value
                for path, value in written.items()
                if path not in served and not self._is_served(path)
            }

    def _is_served(self, path: SettingPath) -> bool:
        """Whether another value changes an attribute that mlx-vlm's model reads."""
        if not self._is_computed(path):
            return False
        try:
            moved = mlx_attributes(with_other_value(self._config, path))
        except Exception:  # mlx-vlm reads a setting whose values it refuses
            return True
        before = self._attributes
        return any(
            at in self._reads
            for at in before.keys() | moved.keys()
            if before.get(at) != moved.get(at)
        )

    def _is_computed(self, path: SettingPath) -> bool:
        """Whether the code names a chosen activation; some modules ignore arguments."""
        return (
            not is_activation(path[-1])
            or value_at(self._config, path) in self._reads.activations
        )

    def _copied(self, paths: Sequence[SettingPath]) -> set[SettingPath]:
        """Return served settings: mlx-vlm keeps their name, and its model reads them."""
        # To build few configurations, all change at once, and are halved if refused.
        attributes = {
            path: (".".join(path[:-1]), path[-1])
            for path in paths
            if self._is_computed(path)
        }
        asked = [
            path
            for path, at in attributes.items()
            if at in self._reads
            and self._attributes.get(at) == repr(value_at(self._config, path))
        ]
        if not asked:
            return set()
        try:
            moved = mlx_attributes(reduce(with_other_value, asked, self._config))
        except Exception:
            half = len(asked) // 2
            return (
                self._copied(asked[:half]) | self._copied(asked[half:])
                if half
                else set(asked)
            )
        return {
            path
            for path in asked
            if moved.get(attributes[path])
            == repr(other_value(value_at(self._config, path)))
        }


def matters(
    kind: type, config: Config, path: SettingPath, attributes: TransformersAttributes
) -> bool:
    """Whether transformers' model reads something that changes without a setting; ``attributes`` are those with it."""
    try:
        without = transformers_attributes(
            kind, changed(config, path, lambda part: _dropped(part, path[-1]))
        )
    except Exception:  # a setting that cannot be left out agrees with others
        return False
    moved = [
        at
        for at in attributes.keys() | without.keys()
        if attributes.get(at) != without.get(at)
    ]
    return any(
        name in read_by_transformers(owner) | read_by_transformers(kind)
        for owner, _, name in moved
    )


# Settings of a configuration
# ---------------------------------------------------------------------------------------------------------------------


def settings_of(
    config: Config, path: SettingPath = ()
) -> Iterator[tuple[SettingPath, Any]]:
    """Yield (path, value) of settings that may matter."""
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            if name not in ("quantization_config", "generation_config"):
                yield from settings_of(dict(value), (*path, name))
        elif name == "rope_parameters" and isinstance(value, Mapping):
            yield from _rotations(value, (*path, name))
        elif (
            not NO_EFFECT.fullmatch(name)
            and not SIZES.fullmatch(name)
            and value is not None
        ):
            yield (*path, name), value


def _rotations(
    rope: Mapping[str, Any], path: SettingPath
) -> Iterator[tuple[SettingPath, Any]]:
    """Yield bases and rotated shares, by kind of layers."""
    for name, value in rope.items():
        if isinstance(value, Mapping):
            yield from _rotations(value, (*path, name))
        elif name in ("rope_theta", "partial_rotary_factor"):
            yield (*path, name), value


def value_at(config: Config, path: SettingPath) -> Any:
    return value_at(config[path[0]], path[1:]) if path else config


def changed(
    config: Config, path: SettingPath, change: Callable[[Config], Config]
) -> Config:
    """Return the configuration with a setting's part changed."""
    if len(path) == 1:
        return change(config)
    return config | {path[0]: changed(config[path[0]], path[1:], change)}


def with_other_value(config: Config, path: SettingPath) -> Config:
    return changed(
        config, path, lambda part: part | {path[-1]: other_value(part[path[-1]])}
    )


def other_value(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [other_value(one) for one in value] or [0]
    return {} if value else {"": 0}


def _dropped(part: Config, name: str) -> Config:
    return {key: value for key, value in part.items() if key != name}
