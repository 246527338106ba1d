"""Kinds of media: names in content parts, errors, readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlm_batch.errors import InvalidAudio, InvalidImage, InvalidRequest, InvalidVideo
from vlm_batch.inputs.audio import describe_audio, fetch_audio
from vlm_batch.inputs.images import describe_source, fetch_image
from vlm_batch.inputs.videos import describe_video, fetch_video
from vlm_batch.types import Audio, Video


@dataclass(frozen=True)
class Kind:
    """One kind of media.

    ``marker`` is its part type in templates, ``parts`` those in chats, ``keys`` the keys that hold one.
    """

    marker: str
    noun: str
    parts: tuple[str, ...]
    keys: tuple[str, ...]
    error: type[InvalidRequest]
    describe: Callable[[Any], str]
    fetch: Callable[..., Any]

    @classmethod
    def of(cls, medium: Any) -> Kind:
        if isinstance(medium, Audio):
            return _AUDIO
        if isinstance(medium, Video):
            return _VIDEO
        return _IMAGE


def _kind(
    marker: str, noun: str, error: type[InvalidRequest], describe: Any, fetch: Any
) -> Kind:
    parts = (marker, f"{marker}_url", f"input_{marker}")
    # OpenAI's input_image has its picture in image_url
    keys = parts if marker == "audio" else parts[:2]
    return Kind(marker, noun, parts, (*keys, "url", "path"), error, describe, fetch)


_IMAGE = _kind("image", "picture", InvalidImage, describe_source, fetch_image)
_VIDEO = _kind("video", "video", InvalidVideo, describe_video, fetch_video)
_AUDIO = _kind("audio", "recording", InvalidAudio, describe_audio, fetch_audio)
#: In the order in which media are given, counted and placed.
KINDS = (_IMAGE, _VIDEO, _AUDIO)
