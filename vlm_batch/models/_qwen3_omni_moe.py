"""Qwen3-Omni's processor of videos and their sound (transformers, processing_qwen3_omni_moe.py)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mlx_vlm.models.base import to_mlx
from mlx_vlm.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths,
)
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    _resize_video_frames,
    _smart_resize_image,
)
from transformers.feature_extraction_utils import BatchFeature

from vlm_batch.adapters.pictures import with_mixin, with_part
from vlm_batch.models.qwen3_omni_moe import spacing_of

#: Fewest and most placeholders of a pair of frames: Qwen3OmniMoeProcessor.videos_kwargs, in units of a placeholder's pixels.
LEAST_FRAME, MOST_FRAME = 128, 768
#: Positions a second of sound, as that processor counts them (position_id_per_seconds).
POSITIONS_A_SECOND = 13.0


def with_videos(processor: Any) -> Any:
    """Make a processor size and place videos and any sound as transformers' does."""
    bounded = with_part(
        processor, "video_processor", lambda part: with_mixin(part, FrameBounded)
    )
    return with_mixin(bounded, InOrderOfTime)


class FrameBounded:
    """Mixin that bounds frames; mlx-vlm bounds whole videos, by the numbers for pictures."""

    patch_size: int
    merge_size: int

    def _process_one(self, video: np.ndarray) -> Any:
        """(T, 3, H, W) -> patches and (t, h, w)."""
        frames, _, height, width = video.shape
        side = self.patch_size * self.merge_size
        high, wide = _smart_resize_image(
            height, width, side, LEAST_FRAME * side**2, MOST_FRAME * side**2
        )
        whole: Any = copy.copy(self)
        whole.min_pixels, whole.max_pixels = 0, 2 * frames * high * wide
        parent: Any = super(FrameBounded, whole)
        return parent._process_one(_resize_video_frames(video, high, wide))


class InOrderOfTime:
    """Mixin of processors; mlx-vlm's takes one rate, and sound in all videos or none.

    ``rates`` are each video's requested frames a second; ``sound_of`` is each recording's video, or None.
    """

    image_processor: Any
    video_processor: Any
    feature_extractor: Any
    tokenizer: Any
    takes_rates = True

    def __call__(
        self,
        text: Any = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        padding_side: str = "left",
        rates: Sequence[float] = (),
        sound_of: Sequence[int | None] = (),
        **options: Any,
    ) -> BatchFeature:
        if videos is None:
            theirs: Any = super()
            return theirs.__call__(
                text=text,
                images=images,
                videos=None,
                audio=audio,
                padding_side=padding_side,
                **options,
            )
        found: dict[str, Any] = dict(self.video_processor(videos=videos))
        seconds = [self.video_processor.temporal_patch_size / rate for rate in rates]
        spacing = [spacing_of(one, POSITIONS_A_SECOND) for one in seconds]
        found["video_second_per_grid"] = np.array(seconds, np.float32)
        lengths = np.zeros(0, int)
        if images is not None:
            found |= self.image_processor(images=images)
        if audio is not None:
            heard = self.feature_extractor(audio)
            mask = heard["attention_mask"]
            found |= {
                "input_features": heard["input_features"],
                "feature_attention_mask": mask,
            }
            lengths = _get_feat_extract_output_lengths(np.asarray(mask).sum(-1))
        shapes = self._shapes("video", found), self._shapes("image", found)
        texts = [
            self._expanded(one, *shapes, spacing, lengths.tolist(), sound_of)
            for one in _listed(text)
        ]
        options.pop("return_tensors", None)
        return BatchFeature(
            data=to_mlx(
                {**self.tokenizer(texts, padding_side=padding_side, **options), **found}
            )
        )

    def _shapes(self, kind: str, found: dict[str, Any]) -> list[tuple[int, int]]:
        """Return each medium's time steps, and placeholders in one."""
        side = getattr(self, f"{kind}_processor").merge_size
        grids = np.asarray(
            found.get(f"{kind}_grid_thw", np.zeros((0, 3), int))
        ).tolist()
        return [(t, h * w // side**2) for t, h, w in grids]

    def _expanded(
        self,
        text: str,
        videos: list[tuple[int, int]],
        images: list[tuple[int, int]],
        spacing: list[int],
        lengths: list[int],
        sound_of: Sequence[int | None],
    ) -> str:
        """Repeat each medium's placeholder; put a video's sound between its frames."""
        token = {
            name: getattr(self.tokenizer, f"{name}_token")
            for name in ("image", "video", "audio")
        }
        begin, end, hear, heard = (
            getattr(self.tokenizer, f"{name}_token")
            for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos")
        )
        pair = f"{begin}{token['video']}{end}{hear}{token['audio']}{heard}"
        counts = {"image": 0, "video": 0, "audio": 0}

        def next_of(kind: str, *, of: int | None = None) -> int:
            at = counts[kind]
            counts[kind] += 1
            if kind == "audio" and sound_of and sound_of[at] not in (None, of):
                raise ValueError("the sound of a video does not stand right behind it")
            return at

        def expand(match: re.Match[str]) -> str:
            if match[0] == token["image"]:
                steps, each = images[next_of("image")]
                return token["image"] * (steps * each)
            if match[0] == token["audio"]:
                return token["audio"] * lengths[next_of("audio")]
            at = next_of("video")
            steps, each = videos[at]
            if match[0] == token["video"]:
                return token["video"] * (steps * each)
            heard_at = next_of("audio", of=at)
            # a recording of its own behind a video
            if not sound_of or sound_of[heard_at] is None:
                return f"{begin}{token['video'] * (steps * each)}{end}{hear}{token['audio'] * lengths[heard_at]}{heard}"
            mixed = merged(steps, each, spacing[at], lengths[heard_at])
            return begin + hear + "".join(token[kind] for kind in mixed) + heard + end

        return re.sub("|".join(map(re.escape, (pair, *token.values()))), expand, text)


def merged(steps: int, each: int, spacing: int, length: int) -> Iterator[str]:
    """Yield the kinds of placeholders by time: frames before the sound that begins with them."""
    at = 0
    for step in range(steps):
        until = min(step * spacing, length)
        yield from ["audio"] * (until - at)
        at = until
        yield from ["video"] * each
    yield from ["audio"] * (length - at)


def _listed(text: Any) -> list[str]:
    return text if isinstance(text, list) else [text]
