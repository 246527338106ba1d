"""A request's media, copied where the caller could change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlm_batch.errors import InvalidAudio, InvalidImage, InvalidVideo
from vlm_batch.inputs.audio import as_audio, own_audio
from vlm_batch.inputs.chats import Track
from vlm_batch.inputs.fetch import is_data_uri
from vlm_batch.inputs.images import fetch_image, own_image
from vlm_batch.inputs.limits import (
    Limits,
    check_num_pictures,
    check_num_recordings,
)
from vlm_batch.inputs.recalled import own_uri
from vlm_batch.inputs.videos import as_video, own_video
from vlm_batch.registry import ModelSpec
from vlm_batch.store.pictures import PictureStore
from vlm_batch.types import Audio, FetchPolicy, ImageInput, Video


class MediaCopier:
    """Copies of one model's media; what its family does not take is refused."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        fetch: FetchPolicy,
        pictures: PictureStore | None,
    ) -> None:
        self._spec = spec
        self._limits = limits
        self._fetch = fetch
        self._pictures = pictures

    def copies(
        self, images: Sequence[ImageInput], videos: Sequence[Any], audios: Sequence[Any]
    ) -> tuple[tuple[ImageInput, ...], tuple[Video, ...], tuple[Audio | Track, ...]]:
        """Copy media, in the order in which the family's facts are asked. Raises InvalidRequest."""
        self._check_images(len(images))
        check_num_pictures(self._limits, len(images) + len(videos))
        owned = []
        for number, source in enumerate(images, 1):
            with naming_the_picture(source, number, len(images)):
                owned.append(self._picture(source))
        spec = self._spec
        if videos and not spec.video:
            raise InvalidVideo(f"{spec.family} takes no videos: {spec.no_video}")
        clips = [own_video(as_video(video), self._frame) for video in videos]
        if audios and not spec.audio:
            is_track = isinstance(audios[0], Track)
            what = "no video's sound" if is_track else "no recordings"
            raise InvalidAudio(f"{spec.family} takes {what}: {spec.no_audio}")
        check_num_recordings(self._limits, len(audios))
        return tuple(owned), tuple(clips), tuple(map(self._recording, audios))

    def _check_images(self, count: int) -> None:
        spec = self._spec
        if count and not spec.images:
            raise InvalidImage(
                f"{spec.family} takes no pictures: it is a language model"
            )
        if count > 1 and not spec.multi_image:
            raise InvalidImage(
                f"{spec.family} takes one picture a request; given: {count}"
            )

    def _picture(self, source: ImageInput) -> ImageInput:
        """Return a picture of a request: one that was decoded before, or the caller's."""
        if self._pictures is not None and is_data_uri(source):
            return own_uri(source, self._frame, self._pictures)
        return self._frame(source)

    def _frame(self, source: ImageInput) -> ImageInput:
        if is_data_uri(source):
            return fetch_image(source, self._fetch)
        return own_image(source)

    def _recording(self, audio: Any) -> Audio | Track:
        if isinstance(audio, Track):
            return audio
        return own_audio(as_audio(audio), self._fetch)


@contextmanager
def naming_the_picture(source: ImageInput, number: int, count: int) -> Iterator[None]:
    """Number the picture in errors, unless named."""
    try:
        yield
    except InvalidImage as error:
        has_name = isinstance(source, (str, Path)) and not is_data_uri(str(source))
        if count == 1 or has_name:
            raise
        raise InvalidImage(
            f"picture {number} of {count}: {error.reason}", advice=error.advice
        ) from error
