"""Recordings and videos are heard and seen whole, as FFmpeg has them, or refused with a reason; none loses a part."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.test_audio import tone, written
from tests.test_videos import grey, seen, write
from vlm_batch.errors import InvalidAudio, InvalidVideo
from vlm_batch.inputs import joined
from vlm_batch.inputs.audio import count_seconds, load_audio
from vlm_batch.inputs.captures import AvCapture
from vlm_batch.inputs.fetch import Cancelled, OperationCancelled
from vlm_batch.inputs.videos import Sampling, _Capture, load_video
from vlm_batch.jobs import Reading, open_sources
from vlm_batch.types import Audio, Video

RATE = 48_000
KINDS = [
    ("WAV", None),
    ("AIFF", None),
    ("CAF", None),
    ("FLAC", None),
    ("MP3", None),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
]
#: A tag whose title ends like the beginning of a frame.
ID3 = b"ID3\3\0\0\0\0\0\x16TIT2\0\0\0\x0c\0\0\0a title\xff\xfb\x90\x64"


def recording(
    kind: str, subtype: str | None, seconds: float, rate: int = RATE, channels: int = 1
) -> bytes:
    samples = tone(seconds, rate, 440.0 * seconds)
    return written(np.stack([samples] * channels, axis=1), kind, rate, subtype)


def heard(data: bytes) -> np.ndarray:
    """At the file's own rate, so that nothing is resampled."""
    return load_audio(data, RATE).samples


def without_contents(data: bytes) -> bytes:
    """An MP3 as some encoders write it: without the first frame, which lists how many there are."""
    (start,) = joined._starts(data, "it", Cancelled())
    frame = joined._frame(data[start : start + 4])
    assert frame is not None and joined._announced(data, start, frame)
    return data[start + frame.size :]


def seconds_by_ffmpeg(data: bytes, kind: str) -> float:
    av = pytest.importorskip(
        "av", reason="PyAV is not installed: pip install 'vlm-batch[sound]'"
    )
    with av.open(io.BytesIO(data), format=kind) as file:
        return sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))


@pytest.mark.parametrize(("kind", "subtype"), KINDS)
def test_all_of_a_file_is_heard(kind: str, subtype: str | None) -> None:
    parts = [recording(kind, subtype, seconds) for seconds in (1.3, 0.7, 0.4)]
    whole = heard(b"".join(parts))
    assert np.array_equal(whole, np.concatenate([heard(part) for part in parts]))
    assert len(whole) == 2.4 * RATE
    with pytest.raises(
        InvalidAudio, match=r"is damaged|cannot be opened|cannot be decoded"
    ):
        heard(parts[0] + parts[1][: len(parts[1]) // 2])


@pytest.mark.parametrize(
    ("kind", "subtype", "name"),
    [("FLAC", None, "flac"), ("MP3", None, "mp3"), ("OGG", "VORBIS", "ogg")],
)
def test_ffmpeg_hears_as_much(kind: str, subtype: str | None, name: str) -> None:
    """Up to the silence that an MP3 has before and behind, which its list of contents says is none of it."""
    data = recording(kind, subtype, 1.3) + recording(kind, subtype, 0.7)
    assert load_audio(data, RATE).seconds == pytest.approx(
        seconds_by_ffmpeg(data, name), abs=0.1
    )


@pytest.mark.parametrize(
    "between",
    [b"", ID3, b"TAG" + bytes(125), ID3 * 2, b"\0" * 300],
    ids=["nothing", "ID3", "ID3v1", "two tags", "zeros"],
)
def test_mp3_without_a_list_of_contents_and_with_tags_between(between: bytes) -> None:
    first, second = (recording("MP3", None, seconds) for seconds in (1.3, 0.7))
    for one in (first, without_contents(first)):
        for other in (second, without_contents(second)):
            data = ID3 + one + between + other
            assert load_audio(data, RATE).seconds == pytest.approx(2.0, abs=0.11)
    assert np.array_equal(heard(ID3 + first + between), heard(first))


@pytest.mark.parametrize("first", ["WAV", "AIFF", "CAF", "FLAC", "MP3", "OGG"])
@pytest.mark.parametrize("second", ["WAV", "AIFF", "CAF", "FLAC", "MP3", "OGG"])
def test_files_of_two_kinds_are_refused(first: str, second: str) -> None:
    """Of which the first alone was heard."""
    one = recording(first, None, 0.3, 16_000)
    other = recording(second, None, 0.2, 16_000)
    tagged = ID3 + one if first in ("FLAC", "MP3") else one
    assert load_audio(tagged, 16_000).seconds == 0.3
    assert load_audio(one + b"behind it " * 300, 16_000).seconds == 0.3
    if first == second:
        return
    with pytest.raises(
        InvalidAudio,
        match=rf"{first.lower()} with a file of {second.lower()} joined to it; split it",
    ):
        load_audio(one + other, 16_000)
    with pytest.raises(InvalidAudio, match=rf"a file of {second.lower()} joined"):
        load_audio(tagged + one + other, 16_000)


def test_channels_may_change_and_rates_may_not() -> None:
    first = recording("MP3", None, 1.0)
    assert (
        load_audio(first + recording("MP3", None, 0.5, channels=2), RATE).seconds == 1.5
    )
    for second in (
        recording("MP3", None, 0.5, 22_050),
        without_contents(recording("MP3", None, 0.5, 22_050)),
    ):
        with pytest.raises(
            InvalidAudio, match="changes its sample rate on the way; convert it first"
        ):
            heard(first + second)


def test_what_is_heard_goes_by_no_single_frame() -> None:
    """Lists of contents are off by a frame or two in files of some encoders."""
    data = bytearray(recording("MP3", None, 1.0))
    at = data.index(b"Xing") + 8
    listed = int.from_bytes(data[at : at + 4], "big")
    for off in (1, joined._FEW):
        data[at : at + 4] = (listed - off).to_bytes(4, "big")
        assert len(joined.parts_of(bytes(data), "it", Cancelled())) == 1
    data[at : at + 4] = (listed // 2).to_bytes(4, "big")
    assert load_audio(bytes(data), RATE).seconds == pytest.approx(1.0, abs=0.08)


def test_a_long_walk_can_be_cancelled_and_is_not_the_submitters() -> None:
    """Its pages are empty, which libsndfile passes over."""
    data = recording("OGG", "VORBIS", 0.1)
    at = data.index(b"OggS", 4)
    empty = b"OggS\0\0" + bytes(8) + data[14:18] + bytes(9)
    data = data[:at] + empty * 5_000 + data[at:]
    cancelled = Cancelled()
    cancelled.set()
    with pytest.raises(OperationCancelled):
        joined.parts_of(data, "it", cancelled)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vlm_batch.inputs.audio.parts_of", lambda *given: 1 / 0)
        assert count_seconds(Audio(data)) == 0.1
    assert load_audio(data, RATE).seconds == 0.1


def test_there_are_not_as_many_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MAX_RECORDINGS", 3)
    data = recording("WAV", None, 0.1)
    assert load_audio(data * 3, RATE).seconds == pytest.approx(0.3)
    with pytest.raises(
        InvalidAudio, match="is more than 3 recordings, joined to one file"
    ):
        heard(data * 4)


# Files that PyAV reads --------------------------------------------------------------------------------------------------


def encoded(container: str, codec: str = "aac") -> bytes:
    av = pytest.importorskip(
        "av", reason="PyAV is not installed: pip install 'vlm-batch[sound]'"
    )
    out: Any = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            tone(1.0, RATE)[None], format="fltp", layout="mono"
        )
        frame.sample_rate = RATE
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    return bytes(out.getvalue())


def test_raw_aac_is_heard() -> None:
    data = encoded("adts")
    assert load_audio(data, 16_000).seconds == pytest.approx(1.0, abs=0.05)
    assert load_audio(data * 2, 16_000).seconds == pytest.approx(2.0, abs=0.1)
    with pytest.raises(
        InvalidAudio, match=r"cannot be opened|has no samples|cannot be decoded"
    ):
        load_audio(data[:20], 16_000)


def test_raw_aac_without_pyav_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encoded("adts")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        InvalidAudio,
        match=r'an aac file, and PyAV.* is not installed: pip install "vlm-batch\[sound\]"',
    ):
        load_audio(data, 16_000)


@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_joined_mp4_files_are_refused(container: str) -> None:
    """FFmpeg reads the first."""
    data = encoded(container)
    assert load_audio(data, 16_000).seconds == pytest.approx(1.0, abs=0.05)
    with pytest.raises(
        InvalidAudio,
        match="is several files joined, of which FFmpeg reads the first; convert it first",
    ):
        load_audio(data * 2, 16_000)


def test_joined_mkv_files_are_heard() -> None:
    assert load_audio(encoded("matroska") * 2, 16_000).seconds == pytest.approx(
        2.0, abs=0.1
    )


def test_folders_are_searched_for_what_is_read(tmp_path: Path) -> None:
    names = ["a.m4a", "b.aac", "c.aiff", "d.caf", "e.mp3"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    sources, _ = open_sources([str(tmp_path)], Reading(audios=True))
    rows = [row for source in sources for row in source.rows()]
    assert [Path(row.id).name for row in rows] == names and all(
        row.audios for row in rows
    )


# Videos -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["film.mkv", "film.avi"])
def test_joined_videos_are_seen_to_their_end(name: str, tmp_path: Path) -> None:
    """Their headers speak of the first."""
    film = write(tmp_path / name, codec="MJPG" if name.endswith("avi") else "mp4v")
    both = tmp_path / f"both_{name}"
    both.write_bytes(film.read_bytes() * 2)
    assert load_video(film).total == 30
    clip = load_video(both)
    assert clip.total == 60 and seen(clip)[-1] == 29
    assert (
        len(
            [
                frame
                for frame in seen(load_video(Video(both, num_frames=60)))
                if frame == 0
            ]
        )
        == 2
    )


def test_joined_mp4_videos_are_refused(tmp_path: Path) -> None:
    film = write(tmp_path / "film.mp4")
    film.write_bytes(film.read_bytes() * 2)
    with pytest.raises(
        InvalidVideo,
        match="is several files joined, of which FFmpeg reads the first; convert it first",
    ):
        load_video(film)


def av1(path: Path) -> Path:
    """Frames that can be told by their grey, as phones and browsers code them now."""
    av = pytest.importorskip(
        "av", reason="PyAV is not installed: pip install 'vlm-batch[sound]'"
    )
    with av.open(path, "w") as file:
        stream = file.add_stream(
            "libsvtav1",
            rate=10,
            width=96,
            height=64,
            pix_fmt="yuv420p",
            options={"preset": "12"},
        )
        for index in range(10):
            for packet in stream.encode(
                av.VideoFrame.from_ndarray(grey(index), format="rgb24")
            ):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return path


@pytest.mark.parametrize("name", ["film.mp4", "film.webm"])
def test_av1_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = av1(tmp_path / name)
    clip = load_video(Video(film, num_frames=10))
    assert (clip.size, clip.total, clip.fps) == ((10, 96, 64), 10, 10.0)
    assert seen(clip) == list(range(10))
    assert seen(load_video(film.read_bytes(), Sampling(min_frames=2))) == seen(
        load_video(film, Sampling(min_frames=2))
    )
    cancelled = Cancelled()
    cancelled.set()
    with pytest.raises(OperationCancelled):
        load_video(film, cancelled=cancelled)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        InvalidVideo,
        match=r'coded as AV1, and PyAV.* is not installed: pip install "vlm-batch\[sound\]"',
    ):
        load_video(film)


def test_both_readers_turn_a_video_upright(tmp_path: Path) -> None:
    """A quarter turn, written into the header of a film whose right half is white."""
    film = tmp_path / "film.mp4"
    writer = cv2.VideoWriter(
        str(film),
        cv2.CAP_FFMPEG,
        cv2.VideoWriter_fourcc(*"mp4v"),  # type: ignore[attr-defined]
        10.0,
        (96, 64),
    )
    for _ in range(5):
        writer.write(
            np.repeat(np.uint8([[[0], [255]]]), 48, axis=1)  # type: ignore[arg-type]
            .repeat(64, axis=0)
            .repeat(3, axis=2)
        )
    writer.release()
    data = bytearray(film.read_bytes())
    at = data.index(b"tkhd") + 44  # the track's matrix
    data[at : at + 36] = np.array(
        [0, 1 << 16, 0, -1 << 16, 0, 0, 64 << 16, 0, 1 << 30], ">i4"
    ).tobytes()
    film.write_bytes(data)
    capture = _Capture(film, "it")
    other = AvCapture(film, "it", capture.announced, capture.fps, capture.size)
    with closing(capture), closing(other):
        pairs = zip(
            *(one.read(np.array([0, 4]), Cancelled()) for one in (capture, other)),
            strict=True,
        )
        for one, same in pairs:
            assert one.shape == same.shape == (96, 64, 3)
            assert np.array_equal(one, same)
            assert one[:40].mean() < 20 and one[56:].mean() > 235
