"""Read recordings as mono samples. Every failure is an InvalidAudio."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO, IOBase
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlm_batch.errors import InvalidAudio, describe
from vlm_batch.inputs.fetch import (
    NEVER,
    USUAL,
    Cancelled,
    Fetched,
    fetch,
    is_data_uri,
    name_medium,
)
from vlm_batch.inputs.joined import parts_of
from vlm_batch.inputs.refusals import exceeds, refused_as, unread_as
from vlm_batch.inputs.tracks import (
    MAX_MISSING_SHARE,
    UNKNOWN_BYTES,
    container_of,
    opened_track,
)
from vlm_batch.types import Audio, AudioInput, FetchPolicy

#: Most seconds of recordings in one request: 115 MB of samples at 16 kHz, and as much again for the spectrogram.
DEFAULT_MAX_SECONDS = 1800.0
#: Most values decoded from one file, over all channels: an hour and a half of stereo at 48 kHz.
MAX_VALUES = 500_000_000
MAX_CHANNELS = 32
#: Lowest and highest sample rate that is read, in samples a second.
RATES = (1_000, 768_000)
#: Samples decoded at a time. A cancelled request stops between two blocks.
_BLOCK = 1 << 18
#: What a recording's file may be given as.
_FILES = (str, Path, bytes, bytearray, memoryview, BytesIO, IOBase, Fetched)
#: First bytes, and libsndfile's names, of the formats that are read. An MP3 begins with eleven bits of a frame's header.
_BEGINNING = re.compile(
    rb"RIFF|RIFX|RF64|fLaC|OggS|ID3|FORM|caff|\xff[\xe0-\xff]", re.DOTALL
)
_FORMATS = frozenset(
    {"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG", "AIFF", "CAF"}
)
FORMATS = (
    "wav, flac, mp3, ogg, aiff, caf or aac, nor a file of mp4, mov, mkv, webm or avi"
)
#: Largest float sample. Larger values mean another scale than -1..1; clipping overshoots by a few decibels only.
_LOUDEST = 16.0


@dataclass(frozen=True)
class Sound:
    """Mono float32 samples (N,), their seconds, and their video's number."""

    samples: np.ndarray
    seconds: float
    video: int | None = None


def as_audio(source: AudioInput) -> Audio:
    if isinstance(source, Mapping):
        source = _of_mapping(source)
    audio = source if isinstance(source, Audio) else Audio(source)
    if audio.rate is None and not isinstance(audio.source, _FILES):
        raise InvalidAudio(
            f"{describe_audio(audio)} has no rate; samples go as Audio(samples, rate=16000), and a file as its path or bytes"
        )
    return audio


def _of_mapping(given: Mapping[Any, Any]) -> Audio:
    """Convert Hugging Face's form: samples with rate, or a file."""
    if given.get("array") is not None:
        return Audio(given["array"], rate=given.get("sampling_rate"))
    for name in ("bytes", "path"):
        if given.get(name) is not None:
            return Audio(given[name])
    raise InvalidAudio(
        f"a recording's mapping needs array and sampling_rate, bytes or path; it has {', '.join(map(str, given))}"
    )


def own_audio(audio: Audio, policy: FetchPolicy) -> Audio:
    """Copy what the caller could still change."""
    source = audio.source
    if is_data_uri(source):
        return fetch_audio(audio, policy)
    if isinstance(source, (str, Path, bytes, Fetched)):
        return audio
    with refused_as(InvalidAudio, f"{describe_audio(audio)} cannot be read"):
        if isinstance(source, (bytearray, memoryview)):
            return replace(audio, source=bytes(source))
        if isinstance(source, IOBase):
            return replace(audio, source=bytes(source.read()))
        return replace(audio, source=_samples_of(np.array(source), audio))


def fetch_audio(
    audio: Audio, policy: FetchPolicy, cancelled: Cancelled = NEVER
) -> Audio:
    """Read the recording's path or URL into memory."""
    if not isinstance(audio.source, (str, Path)):
        return audio
    with unread_as(InvalidAudio):
        return replace(audio, source=fetch(audio.source, policy, cancelled))


def load_audio(
    audio: AudioInput,
    rate: int,
    max_seconds: float | None = DEFAULT_MAX_SECONDS,
    policy: FetchPolicy = USUAL,
    cancelled: Cancelled = NEVER,
) -> Sound:
    """Read a recording as mono samples at ``rate``: average channels, then resample.

    Buffers and open files go through ``own_audio`` before. ``max_seconds`` is checked on the header and while decoding.
    Raises InvalidAudio or OperationCancelled.
    """
    audio = fetch_audio(as_audio(audio), policy, cancelled)
    name = describe_audio(audio)
    parts: list[np.ndarray] = []
    count = 0
    with _blocks(audio, cancelled, is_whole=True) as (own_rate, announced, blocks):
        check_seconds(announced / own_rate, max_seconds, name)
        converted = _Resampled(own_rate, rate)
        for block in blocks:
            count += len(block)
            check_seconds(count / own_rate, max_seconds, name)
            parts.append(converted.next(block))
    if not count:
        raise InvalidAudio(f"{name} has no samples")
    _check_all_there(announced, count, name)
    length = math.ceil(count * rate / own_rate)
    samples = np.concatenate([*parts, converted.rest()])[:length]
    filled = np.pad(samples, (0, length - len(samples))).astype(np.float32, copy=False)
    return Sound(filled, count / own_rate)


def _check_all_there(announced: int, count: int, name: str) -> None:
    if announced - count > MAX_MISSING_SHARE * announced:
        raise InvalidAudio(
            f"{name} is damaged: its header says {announced:,} samples, and it ends after {count:,}"
        )


def check_seconds(seconds: float, most: float | None, name: str) -> None:
    if exceeds(seconds, most):
        raise InvalidAudio(
            f"{name}: {seconds:,.1f} s of sound; at most {most:,g} s are read",
            advice=" (Limits.audio_seconds)",
        )


def count_seconds(audio: Audio) -> float:
    """Return the seconds in the first header of a recording in memory, else 0."""
    if isinstance(audio.source, (str, Path)):
        return 0.0
    try:
        with _blocks(audio, NEVER) as (rate, announced, _):
            return announced / rate
    except Exception:  # whoever decodes it will say what is wrong
        return 0.0


def describe_audio(audio: Audio) -> str:
    return name_medium(audio.source, "recording")


@contextmanager
def _blocks(
    audio: Audio, cancelled: Cancelled, *, is_whole: bool = False
) -> Iterator[tuple[int, int, Iterator[np.ndarray]]]:
    """Yield rate, announced samples, and blocks (n,) of mono float32, of the first recording or of all in the file."""
    source, name = audio.source, describe_audio(audio)
    if isinstance(source, np.ndarray):
        yield int(audio.rate or 0), len(source), _mono(iter((source,)), audio)
        return
    data = source
    if isinstance(source, Fetched):
        data = source.path or source.data  # a video is a file
    container = container_of(data)
    if container is not None:
        with opened_track(data, container, name, _check_header, cancelled) as track:
            rate, announced, blocks = track
            yield rate, announced, _mono(blocks, audio)
        return
    if isinstance(data, Path):
        raise InvalidAudio(
            f"the sound of {name} cannot be read: that of mp4, mov, mkv, webm and avi files can"
        )
    _check_kind(data, name)
    parts = parts_of(data, name, cancelled) if is_whole else [data]
    with _opened(parts[0], name) as file:
        rate, announced = file.samplerate, 0
        if len(parts) == 1:
            blocks = _decoded(file, name, cancelled)
            announced = _announced(parts[0], file.frames)
        else:
            blocks = _of_parts(parts, rate, name, cancelled)
        yield rate, announced, _mono(blocks, audio)


def _of_parts(
    parts: list[bytes], rate: int, name: str, cancelled: Cancelled
) -> Iterator[np.ndarray]:
    """Decode recordings that were joined, one after another."""
    for part in parts:
        with _opened(part, name) as file:
            if file.samplerate != rate:
                raise InvalidAudio(
                    f"{name} changes its sample rate on the way; convert it first"
                )
            count = 0
            for block in _decoded(file, name, cancelled):
                count += len(block)
                yield block
            _check_all_there(_announced(part, file.frames), count, name)


def _check_kind(data: bytes, name: str) -> None:
    if not data:
        raise InvalidAudio(f"{name} is empty (0 bytes)")
    if not _BEGINNING.match(data):
        raise InvalidAudio(f"{name} is no recording of {FORMATS}; convert it first")


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Any]:
    import soundfile  # here: only recordings need it

    with refused_as(InvalidAudio, f"{name} cannot be opened", _said):
        file = soundfile.SoundFile(BytesIO(data))
    with file:
        if file.format not in _FORMATS:
            raise InvalidAudio(
                f"{name} is no recording of wav, flac, mp3, ogg, aiff or caf, but of {file.format}; convert it first"
            )
        _check_header(name, file.frames, file.samplerate, file.channels)
        yield file


def _announced(data: bytes, frames: int) -> int:
    """Return the samples that a wav or aiff file's header says; ``frames`` are those that libsndfile finds."""
    if data.startswith(b"FORM"):
        return _announced_by_aiff(data, frames)
    if data.startswith(b"RIFX"):
        return _announced_by_wav(data, frames, "big")
    if data.startswith((b"RIFF", b"RF64")):
        return _announced_by_wav(data, frames, "little")
    return frames


def _announced_by_wav(data: bytes, frames: int, order: Literal["big", "little"]) -> int:
    long = 0  # what a file of more than 4 GB says
    for at, kind, size in _chunks(data, order):
        if kind == b"ds64":
            long = int.from_bytes(data[at + 16 : at + 24], order)
        if kind == b"data":
            said = size if size < UNKNOWN_BYTES else 0
            return _in_proportion(frames, long or said, len(data) - at - 8)
    return frames


def _in_proportion(frames: int, said: int, held: int) -> int:
    """Return how many samples were in ``said`` bytes, if fewer are left that hold ``frames``."""
    if 0 < held < said:
        return frames * said // held
    return frames


def _chunks(
    data: bytes, order: Literal["big", "little"]
) -> Iterator[tuple[int, bytes, int]]:
    """Yield where each chunk begins, its name and its bytes."""
    at = 12
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 8], order)
        yield at, data[at : at + 4], size
        at += 8 + size + size % 2


def _announced_by_aiff(data: bytes, frames: int) -> int:
    for at, kind, _ in _chunks(data, "big"):
        if kind == b"COMM" and at + 14 <= len(data):
            return int.from_bytes(data[at + 10 : at + 14], "big")
    return frames


def _check_header(name: str, frames: int, rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise InvalidAudio(
            f"{name} has {rate:,} samples a second; {RATES[0]:,} to {RATES[1]:,} are read"
        )
    if channels > MAX_CHANNELS:
        raise InvalidAudio(
            f"{name} has {channels} channels; at most {MAX_CHANNELS} are read"
        )
    if frames * channels > MAX_VALUES:
        raise InvalidAudio(
            f"{name} has {frames:,} samples of {channels} channels; at most {MAX_VALUES:,} values are decoded"
        )


def _decoded(file: Any, name: str, cancelled: Cancelled) -> Iterator[np.ndarray]:
    num_frames = max(1, _BLOCK // file.channels)
    while True:
        cancelled.check()
        with refused_as(InvalidAudio, f"{name} cannot be decoded", _said):
            block = file.read(num_frames, dtype="float32", always_2d=True)
        if not len(block):
            return
        yield block


def _mono(blocks: Iterator[np.ndarray], audio: Audio) -> Iterator[np.ndarray]:
    """Average the channels of blocks (n, channels), within ``MAX_VALUES``."""
    count = 0
    for block in blocks:
        count += block.size
        if count > MAX_VALUES:
            raise InvalidAudio(
                f"{describe_audio(audio)} has more than {MAX_VALUES:,} values; no more are decoded"
            )
        yield _samples_of(block, audio)


def _samples_of(array: np.ndarray, audio: Audio) -> np.ndarray:
    """Convert (N,) or (N, channels), floats or integers, to mono float32 (N,)."""
    if array.ndim == 2 and 1 <= array.shape[1] <= MAX_CHANNELS:
        return _checked(_as_floats(array).mean(axis=1), describe_audio(audio))
    if array.ndim != 1:
        raise InvalidAudio(
            f"an array of shape {array.shape} is no recording: (samples,) or (samples, channels) is expected"
        )
    return _checked(_as_floats(array), describe_audio(audio))


def _as_floats(array: np.ndarray) -> np.ndarray:
    """Return samples as float32 in -1..1."""
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype in (np.int16, np.int32):
        scaled = array / np.float32(-float(np.iinfo(array.dtype).min))
        return scaled.astype(np.float32)
    if array.dtype == np.uint8:
        return (array.astype(np.float32) - 128) / 128
    raise InvalidAudio(
        f"an array of {array.dtype} is no recording: floats in -1..1, or int16, int32 or uint8 are expected"
    )


def _checked(samples: np.ndarray, name: str) -> np.ndarray:
    loudest = np.abs(samples).max(initial=0.0)
    if not np.isfinite(loudest):
        raise InvalidAudio(f"{name} has values that are no numbers (NaN or infinity)")
    if loudest > _LOUDEST:
        raise InvalidAudio(
            f"{name} has a value of {loudest:,.4g}; floats in -1..1 are expected"
        )
    return samples


class _Resampled:
    """Resampler at soxr's HQ quality, as in transformers (librosa's ``soxr_hq``)."""

    def __init__(self, own_rate: int, rate: int) -> None:
        self._stream: Any = None
        if own_rate != rate:
            import soxr

            self._stream = soxr.ResampleStream(
                own_rate, rate, 1, dtype="float32", quality="HQ"
            )

    def next(self, block: np.ndarray) -> np.ndarray:
        """Return the samples that are ready."""
        if self._stream is None:
            return block
        return self._stream.resample_chunk(block)

    def rest(self) -> np.ndarray:
        nothing = np.zeros(0, np.float32)
        if self._stream is None:
            return nothing
        return self._stream.resample_chunk(nothing, last=True)  # type: ignore[no-any-return]


def _said(error: BaseException) -> str:
    from soundfile import LibsndfileError  # here: only recordings need it

    if isinstance(error, LibsndfileError):
        return str(error.error_string)
    return describe(error)
