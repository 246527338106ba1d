"""The sound of videos and of mp4 files: decoded as it was written, heard behind its video, and refused with a reason."""

from __future__ import annotations

import base64
import io
import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soxr
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor as Theirs,
)

from tests.harness import shared_adapter
from tests.hearing import PROCESSORS
from tests.serving import serving
from tests.test_audio import tone
from tests.test_video_processors import CASES
from tests.zoo import Inputs, family
from tests.zoo._qwen import VIDEO, VISION_END, VISION_START
from tests.zoo.qwen3_omni_moe import AUDIO, AUDIO_END, AUDIO_START, placed, positions
from vlm_batch import (
    InvalidAudio,
    InvalidParameters,
    InvalidPrompt,
    InvalidVideo,
    Limits,
    Result,
    SamplingParams,
    Video,
    VLMBatcher,
    assets,
)
from vlm_batch.inputs import audio as module
from vlm_batch.inputs.audio import Sound, as_audio, load_audio, own_audio
from vlm_batch.inputs.chats import Track, split_messages
from vlm_batch.inputs.fetch import USUAL, Cancelled, OperationCancelled
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import load_video

av: Any = pytest.importorskip(
    "av", reason="PyAV is not installed: pip install 'vlm-batch[sound]'"
)
RATE = 48_000
#: Families that see videos and hear.
BOTH = ("gemma4", "gemma4_unified", "qwen3_omni_moe")
POSITIONS = json.loads(
    (Path(__file__).parent / "references" / "omni_positions.json").read_text()
)
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")


@cache
def film(
    container: str = "mov",
    codec: str = "pcm_s16le",
    *,
    seconds: float = 1.0,
    pitch: float = 440.0,
    sees: bool = True,
    hears: bool = True,
    of_sound: float | None = None,
    silence: float = 0.0,
    tracks: int = 1,
) -> bytes:
    """A file with ten grey frames a second, and a tone in two channels of which the second is half as loud.

    The tone lasts ``of_sound`` seconds, else as long as the frames, and comes after ``silence``. Every further track's lasts
    a second more.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container) as made:
        pictures: Any = (
            made.add_stream("libvpx" if container == "webm" else "mpeg4", rate=10)
            if sees
            else None
        )
        if sees:
            pictures.width, pictures.height, pictures.pix_fmt = 32, 32, "yuv420p"
        sounds: Any = (
            [made.add_stream(codec, rate=RATE, layout="stereo") for _ in range(tracks)]
            if hears
            else []
        )
        for at in range(int(seconds * 10) if sees else 0):
            grey = np.full((32, 32, 3), 20 * (at % 12), np.uint8)
            made.mux(pictures.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        for track, sound in enumerate(sounds):
            mono = tone((of_sound or seconds) + track, RATE, pitch)
            size = sound.codec_context.frame_size or 1024
            for begin in range(0, len(mono), size):
                block = mono[begin : begin + size]
                frame = av.AudioFrame.from_ndarray(
                    np.stack([block, 0.5 * block]), format="fltp", layout="stereo"
                )
                frame.sample_rate, frame.pts = RATE, begin + round(silence * RATE)
                made.mux(sound.encode(frame))
        for stream in filter(None, (pictures, *sounds)):
            made.mux(stream.encode(None))
    return file.getvalue()


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "codec", "sees", "loss"),
    [
        ("mov", "pcm_s16le", True, 1e-4),
        ("mov", "pcm_s16le", False, 1e-4),
        ("avi", "pcm_s16le", True, 1e-4),
        ("matroska", "flac", True, 1e-4),
        ("webm", "libopus", True, 0.01),
        ("mp4", "aac", True, 0.05),
        ("mp4", "aac", False, 0.05),
    ],
)
def test_every_container_is_mono_at_the_rate_asked_for(
    container: str, codec: str, sees: bool, loss: float
) -> None:
    found = load_audio(film(container, codec, sees=sees), 16_000)
    wanted = soxr.resample(0.75 * tone(1.0, RATE), RATE, 16_000, quality="HQ")
    assert found.samples.dtype == np.float32
    assert 0 <= len(found.samples) - len(wanted) < 1024  # AAC's last frame is filled up
    assert abs(found.seconds - 1.0) < 0.03
    wrong = (found.samples[: len(wanted)] - wanted)[800:-800]
    assert np.sqrt(np.mean(wrong**2)) < loss


CONTAINERS = [
    ("mov", "pcm_s16le"),
    ("mp4", "aac"),
    ("avi", "pcm_s16le"),
    ("avi", "mp3"),
    ("matroska", "flac"),
    ("matroska", "pcm_s16le"),
    ("webm", "libopus"),
]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_a_sound_track_may_be_shorter_than_its_video(
    container: str, codec: str
) -> None:
    """It ends before it, comes late, is longer, or stands beside a longer one; the first track is heard, all of it."""
    for more in (
        {"seconds": 3.0, "of_sound": 1.0},
        {"seconds": 3.0, "of_sound": 1.0, "silence": 1.5},
        {"seconds": 1.0, "of_sound": 2.0},
        {"seconds": 3.0, "of_sound": 1.0, "tracks": 2},
    ):
        found = load_audio(film(container, codec, **more), 16_000, 2.1)  # type: ignore[arg-type]
        assert abs(found.seconds - more["of_sound"]) < 0.05, more


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
@pytest.mark.parametrize("of_sound", [3.0, 1.0])
def test_a_cut_file_is_refused(container: str, codec: str, of_sound: float) -> None:
    data = film(container, codec, seconds=3.0, of_sound=of_sound)
    for share in (0.2, 0.4, 0.6, 0.8):
        with pytest.raises(InvalidAudio, match=r"cannot be opened|is damaged"):
            load_audio(data[: int(len(data) * share)], 16_000)


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    data = film()
    path = tmp_path / "talk.mov"
    path.write_bytes(data)
    uri = f"data:video/quicktime;base64,{base64.b64encode(data).decode()}"
    found = [
        load_audio(own_audio(as_audio(source), USUAL), 16_000).samples
        for source in (data, path, uri, io.BytesIO(data))
    ]
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (film(hears=False), "has no sound"),
        (film()[:60_000], "cannot be opened|is damaged"),
        (film("matroska", "flac")[:15_000], "is damaged: its header says"),
        (b"\0\0\0\x20ftypM4A " + b"\0" * 50, "cannot be opened|has no sound"),
        (b"\x1aE\xdf\xa3" + b"\1" * 60, "cannot be opened"),
        (
            b"#EXTM3U\nfile:///etc/hostname\n",
            "is no recording of wav, flac, mp3, ogg, aiff, caf or aac, nor a file of mp4",
        ),
    ],
    ids=["silent", "cut mov", "cut mkv", "no boxes", "no mkv", "playlist"],
)
def test_what_cannot_be_read_says_why(data: bytes, said: str) -> None:
    with pytest.raises(InvalidAudio, match=said):
        load_audio(data, 16_000)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidAudio,
        match=r"1.0 s of sound; at most 0.5 s are read \(Limits.audio_seconds\)",
    ):
        load_audio(film(), 16_000, 0.5)
    cancelled = Cancelled()
    cancelled.set()
    with pytest.raises(OperationCancelled):
        load_audio(film(), 16_000, cancelled=cancelled)
    monkeypatch.setattr(module, "MAX_VALUES", 1000)
    with pytest.raises(InvalidAudio, match="at most 1,000 values are decoded"):
        load_audio(film(), 16_000)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_CHANNELS", 1)
    with pytest.raises(InvalidAudio, match="has 2 channels; at most 1 are read"):
        load_audio(film(), 16_000)


# Requests -------------------------------------------------------------------------------------------------------------


def test_the_forms_of_messages() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "video", "video": "a.mp4", "sound": True},
        {"type": "audio", "audio": "b.wav"},
        {"type": "video_url", "video_url": "c.mp4"},
        {"type": "video"},
        {"type": "text", "text": "?"},
    ]
    spare = [Video("d.mp4", sound=True), Video("e.mp4", sound=True), "f.mp4"]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    turns, media = split_messages(chat, ["g.png"], spare, ["h.wav"])
    assert media[0] == ["g.png"]
    assert media[1] == [Video("a.mp4", sound=True), "c.mp4", *spare]
    assert media[2] == [Track(0), "b.wav", Track(2), Track(3), "h.wav"]
    kinds = [
        [part["type"] for part in turn["content"]] for turn in (turns[0], turns[2])
    ]
    assert kinds[0] == ["video", "audio", "audio", "video", "video", "audio", "text"]
    assert kinds[1] == ["image", "video", "audio", "video", "audio", "text"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, found = tmp_path_factory.mktemp("films"), []
    for at, pitch in enumerate((440.0, 900.0)):
        found.append(folder / f"{at}.mov")
        found[-1].write_bytes(film(seconds=0.6 + 0.2 * at, pitch=pitch))
    (folder / "silent.mov").write_bytes(film(hears=False))
    return [*found, folder / "silent.mov"]


def jobs(paths: list[Path]) -> list[dict[str, Any]]:
    first, second, silent = paths
    heard = [
        {"type": "video", "video": str(first), "sound": True},
        {"type": "text", "text": "hm"},
    ]
    return [
        {"prompt": "what?", "videos": Video(first, sound=True)},
        {"prompt": "what?", "videos": first},
        {
            "prompt": "which?",
            "videos": [Video(first, sound=True), Video(second, sound=True)],
            "audios": film(pitch=300.0),
        },
        {"messages": [{"role": "user", "content": heard}]},
        {"prompt": "nothing", "videos": Video(silent, sound=True)},
        {"prompt": "bytes", "videos": Video(film(), sound=True, num_frames=2)},
        {"prompt": "words only"},
    ]


@pytest.mark.parametrize("name", BOTH)
def test_a_videos_sound_is_a_recording_behind_it(name: str, paths: list[Path]) -> None:
    """As transformers wants it in a chat (``load_audio_from_video``): a part of its own behind each video.

    Qwen3-Omni's processor puts it between the frames then.
    """
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)

    def answers(batcher: VLMBatcher, asked: list[dict[str, Any]]) -> list[Result]:
        handles = [batcher.submit(**job, params=params) for job in asked]
        return [handle.result(timeout=120) for handle in handles]

    def apart(prompt: str, *media: tuple[str, Any]) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [
            {"type": kind, kind: source} for kind, source in media
        ]
        return {
            "messages": [
                {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
            ]
        }

    first, second = paths[:2]
    by_hand = [
        apart("what?", ("video", first), ("audio", first)),
        apart(
            "which?",
            ("video", first),
            ("audio", first),
            ("video", second),
            ("audio", second),
            ("audio", film(pitch=300.0)),
        ),
    ]
    with VLMBatcher(
        family(name).build(), PROCESSORS[name](name), max_rows=1, caches=None
    ) as batcher:
        alone, wanted = answers(batcher, jobs(paths)), answers(batcher, by_hand)
    with VLMBatcher(
        family(name).build(), PROCESSORS[name](name), max_rows=4
    ) as batcher:
        together, again = answers(batcher, jobs(paths)), answers(batcher, jobs(paths))
    for one, other in zip(alone * 2, together + again, strict=True):
        assert (one.token_ids, one.error, one.audio_seconds) == (
            other.token_ids,
            other.error,
            other.audio_seconds,
        )
        for before, after in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(before.logprob - after.logprob) < 1e-4
    assert [result.ok for result in together] == [at != 4 for at in range(7)]
    assert (
        together[4].error is not None and "silent.mov has no sound" in together[4].error
    )
    assert isinstance(together[4].exception, InvalidAudio)
    assert together[2].audio_seconds == pytest.approx((0.6, 0.8, 1.0))
    for mine, theirs in zip((alone[0], alone[2]), wanted, strict=True):
        if name == "qwen3_omni_moe":
            assert mine.logprobs != theirs.logprobs
            continue
        assert mine.token_ids == theirs.token_ids
        for one_step, other_step in zip(
            mine.logprobs or (), theirs.logprobs or (), strict=True
        ):
            assert abs(one_step.logprob - other_step.logprob) < 1e-4
    assert alone[0].logprobs != alone[1].logprobs  # the sound is heard


def test_without_pyav_a_request_fails_alone(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with VLMBatcher(
        family("gemma4").build(), PROCESSORS["gemma4"]("gemma4")
    ) as batcher:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        video = batcher.submit(
            prompt="a", videos=Video(paths[0], sound=True), params=params
        )
        recording = batcher.submit(prompt="a", audios=film(), params=params)
        text = batcher.submit(prompt="a", params=params)
        for handle in (video, recording):
            result = handle.result(timeout=60)
            assert (
                result.error is not None
                and 'not installed: pip install "vlm-batch[sound]"' in result.error
            )
        assert text.result(timeout=60).ok


def test_what_has_no_sound_of_its_own_is_refused(paths: list[Path]) -> None:
    with pytest.raises(InvalidParameters, match="sound is 1; it must be True or False"):
        Video("a.mp4", sound=1)  # type: ignore[arg-type]
    video = Video(paths[0], sound=True)
    with VLMBatcher(
        family("gemma4").build(),
        PROCESSORS["gemma4"]("gemma4"),
        limits=Limits(audio_seconds=0.5),
    ) as batcher:
        with pytest.raises(
            InvalidVideo, match="has no sound; give its recording as audios="
        ):
            batcher.submit(
                prompt="a", videos=Video(np.zeros((2, 8, 8, 3), np.uint8), sound=True)
            )
        for final in (
            {"token_ids": [5, 6]},
            {"prompt": "<|video|><|audio|>", "template": None},
        ):
            with pytest.raises(InvalidVideo, match="audios= takes the video's file"):
                batcher.submit(**final, videos=video)  # type: ignore[arg-type]
        result = batcher.submit(prompt="a", videos=video).result(timeout=60)
        assert result.error is not None and "at most 0.5 s are read" in result.error
    said = "qwen2_vl takes no video's sound: its model has no part that hears"
    with (
        VLMBatcher(assets.default_checkpoint()) as batcher,
        pytest.raises(InvalidAudio, match=said),
    ):
        batcher.submit(prompt="what?", videos=video)
    blind = VLMBatcher(family("gemma3n").build(), PROCESSORS["gemma3n"]("gemma3n"))
    with (
        blind as batcher,
        pytest.raises(InvalidVideo, match="gemma3n takes no videos: "),
    ):
        batcher.submit(prompt="what?", videos=video)


# Qwen3-Omni -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    list(zip(placed(), POSITIONS["cases"], strict=True)),
    ids=range(7),
)
def test_positions_by_seconds_are_transformers(
    inputs: Inputs, wanted: dict[str, Any]
) -> None:
    ids = mx.array(inputs["input_ids"])
    extra = {name: value for name, value in inputs.items() if name != "input_ids"}
    found = shared_adapter("qwen3_omni_moe").positions(ids, extra, {})
    np.testing.assert_array_equal(np.array(found.prompt)[:, 0], wanted["positions"])
    assert found.delta == wanted["delta"]
    np.testing.assert_array_equal(positions(inputs), wanted["positions"])


def test_sound_stands_between_the_frames_of_its_video() -> None:
    """As transformers' processor writes it, with ``load_audio_from_video``; each video at its own rate, or silent."""
    adapter = shared_adapter("qwen3_omni_moe")
    made = Processing(
        adapter.processor(PROCESSORS["qwen3_omni_moe"]("qwen3_omni_moe")),
        adapter.config,
    )
    frames = np.zeros((4, 64, 128, 3), np.uint8)  # 128 placeholders a step
    clips = [load_video(Video(frames, fps=fps)) for fps in (2, 1)]
    sounds = [
        Sound(np.zeros(count, np.float32), count / 16_000, at)
        for count, at in ((20_000, 0), (8_000, None))
    ]
    parts = [{"type": kind} for kind in ("video", "audio", "audio", "video")]
    inputs = made.inputs(
        made.render([{"role": "user", "content": parts}], 0, 2, 2), [], clips, sounds
    )
    names = {
        VIDEO: "v",
        AUDIO: "a",
        AUDIO_START: "<",
        AUDIO_END: ">",
        VISION_START: "[",
        VISION_END: "]",
    }
    text = "".join(
        names.get(token, "") for token in np.array(inputs["input_ids"])[0].tolist()
    )
    theirs = Theirs.replace_video_with_audio_token(
        SimpleNamespace(  # type: ignore[arg-type]
            video_processor=SimpleNamespace(merge_size=2),
            **{
                "video_token": "v",
                "audio_token": "a",
                "audio_bos_token": "<",
                "audio_eos_token": ">",
            },
        ),
        {
            "video_grid_thw": np.array(inputs["video_grid_thw"]),
            "video_second_per_grid": [1.0],
        },
        0,
        {"num_audio_tokens": [17]},
        0,
        position_id_per_seconds=13.0,
    )
    assert theirs == "<" + "v" * 128 + "a" * 13 + "v" * 128 + "a" * 4 + ">"
    assert text == f"[{theirs}]<{'a' * 7}>[{'v' * 256}]"
    assert np.array(inputs["video_second_per_grid"]).tolist() == [1.0, 2.0]
    adapter.check_inputs(inputs)
    with pytest.raises(
        InvalidPrompt, match=r"6\.5 positions, and whole ones alone are taken"
    ):
        made.inputs(
            made.render("?", 0, 1, 0), [], [load_video(Video(frames, fps=4))], []
        )
    for wrong in (
        [parts[1], *parts[:2], parts[0]],
        [parts[3], parts[0], parts[1], parts[1]],
    ):
        with pytest.raises(InvalidPrompt, match="does not stand right behind it"):
            made.inputs(
                made.render([{"role": "user", "content": wrong}], 0, 2, 2),
                [],
                clips,
                sounds,
            )


def test_every_family_that_sees_videos_and_hears_is_here() -> None:
    assert set(BOTH) == set(CASES) & set(PROCESSORS)


def test_the_server_takes_it(paths: list[Path]) -> None:
    data = base64.b64encode(film()).decode()
    words = {"type": "text", "text": "what?"}
    part = {
        "type": "video_url",
        "video_url": {"url": f"data:video/quicktime;base64,{data}"},
    }
    with serving(
        lambda: VLMBatcher(family("gemma4").build(), PROCESSORS["gemma4"]("gemma4"))
    ) as running:
        sizes = [
            running.chat([{**part, **more}, words], max_tokens=2).json["usage"][
                "prompt_tokens"
            ]
            for more in ({}, {"sound": True}, {"sound": False})
        ]
    assert sizes[0] == sizes[2] < sizes[1]
