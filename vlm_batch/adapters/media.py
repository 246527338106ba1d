"""Pictures and recordings in a processor's output, and the placeholders that a prompt must have for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vlm_batch.adapters.prompts import are_any
from vlm_batch.errors import InvalidPrompt

#: Prefixes of the processor outputs that hold pictures, videos or their features.
PICTURE_INPUTS = (
    "pixel_values",
    "patch_pixel_values",
    "cached_image_features",
    "image_embeds",
    "encoder_outputs",
)

#: Prefixes of the processor outputs that hold recordings or their features.
AUDIO_INPUTS = (
    "input_features",
    "input_audio",
    "input_values",
    "audio_",
    "feature_attention_mask",
    "sound_",
)


def has_pictures(extra: Mapping[str, Any]) -> bool:
    """Whether the inputs hold pictures, videos or features."""
    return any(name.startswith(PICTURE_INPUTS) for name in extra)


def has_media(extra: Mapping[str, Any]) -> bool:
    return any(name.startswith(PICTURE_INPUTS + AUDIO_INPUTS) for name in extra)


def has_sound(extra: Mapping[str, Any]) -> bool:
    return any(name.startswith(AUDIO_INPUTS) for name in extra)


def sound_apart(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of recordings, and the others."""
    sound: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in extra.items():
        own = sound if name.startswith(AUDIO_INPUTS) else others
        own[name] = value
    return sound, others


def check_pictures(
    ids: Any,
    extra: Mapping[str, Any],
    marks: Collection[int],
    count: Callable[[Mapping[str, Any]], int | None],
) -> None:
    """Raise InvalidPrompt unless ids (1, L) have the pictures' placeholders.

    Args:
        marks: Ids of placeholders; none if the processor names the pictures' positions.
        count: Counts the placeholders that pictures need; None where shapes do not tell.
    """
    given = _count_marks(ids, marks)
    if not has_pictures(extra):
        if given:
            raise InvalidPrompt(
                f"the prompt has {given} placeholder tokens for pictures, and there is no picture"
            )
        return
    needed = count(extra)
    if not marks:
        if needed:
            raise InvalidPrompt(
                f"the pictures need {needed} placeholder tokens; the prompt has 0: config.json names no image_token_id"
            )
        return
    if needed is None:
        if not given:
            raise InvalidPrompt(
                "the pictures need placeholder tokens; the prompt has 0"
            )
        return
    if given != needed:
        raise InvalidPrompt(
            f"the pictures need {needed} placeholder tokens; the prompt has {given}"
        )


def check_sound(ids: Any, extra: Mapping[str, Any], marks: Collection[int]) -> None:
    """Raise InvalidPrompt unless ids (1, L) have placeholders of recordings, if any, and each recording has a length."""
    sound, _ = sound_apart(extra)
    for value in sound.values():
        _check_lengths(value if isinstance(value, list) else [value])
    if not marks:
        return
    given = _count_marks(ids, marks)
    if bool(given) == bool(sound):
        return
    if sound:
        raise InvalidPrompt("the recordings need placeholder tokens; the prompt has 0")
    raise InvalidPrompt(
        f"the prompt has {given} placeholder tokens for recordings, and there is no recording"
    )


def _check_lengths(recordings: Sequence[Any]) -> None:
    for one in recordings:
        if 0 in np.shape(one):
            raise InvalidPrompt(
                "a recording is so short that the model's processor makes nothing of it"
            )


def _count_marks(ids: Any, marks: Collection[int]) -> int:
    return int(are_any(np.array(ids)[0], marks).sum())
