"""Videos: decoded and sampled as said, in any company, and each failure says what was wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLVideoProcessor
from mlx_vlm.utils import load_video as mlx_vlm_load_video
from mlx_vlm.utils import prepare_inputs
from PIL import Image

from tests.harness import (
    TOLERANCE,
    Ask,
    difference,
    inputs_of,
    oracle,
    run,
    run_family,
    shared_adapter,
)
from tests.zoo import Inputs, family
from vlm_batch import (
    InvalidImage,
    InvalidParameters,
    InvalidPrompt,
    InvalidVideo,
    Limits,
    Request,
    RequestFailed,
    SamplingParams,
    Video,
    VLMBatcher,
    assets,
)
from vlm_batch.inputs.images import load_image, own_image
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import Clip, Sampling, load_video, own_video
from vlm_batch.models._qwen2_vl import each_frame_bounded

CHECKPOINT = assets.default_checkpoint()
PICTURES = Path(__file__).parent.parent / "fixtures" / "images"
REFERENCES = Path(__file__).parent / "references"
LEVELS = 8
"""Between one frame's grey and the next's."""


def grey(index: int, width: int = 96, height: int = 64) -> np.ndarray:
    return np.full((height, width, 3), index * LEVELS % 256, np.uint8)


def write(
    path: Path,
    count: int = 30,
    fps: float = 10.0,
    codec: str = "mp4v",
    width: int = 96,
    height: int = 64,
) -> Path:
    """A video whose frames can be told by their grey."""
    writer = cv2.VideoWriter(
        str(path),
        cv2.CAP_FFMPEG,
        cv2.VideoWriter_fourcc(*codec),  # type: ignore[attr-defined]
        fps,
        (width, height),
    )
    assert writer.isOpened()
    for index in range(count):
        writer.write(grey(index, width, height))
    writer.release()
    return path


def seen(clip: Clip) -> list[int]:
    """Which frames a clip holds, by their grey."""
    return (clip.frames.mean(axis=(1, 2, 3)) / LEVELS).round().astype(int).tolist()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("videos") / "film.mp4")


@pytest.fixture(scope="module")
def batcher() -> Iterator[VLMBatcher]:
    with VLMBatcher(CHECKPOINT) as shared:
        yield shared


# Decoding and sampling
# -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [(".mp4", "mp4v"), (".avi", "MJPG"), (".mkv", "FFV1"), (".webm", "VP90")],
)
def test_the_frames_are_those_that_were_asked_for(
    tmp_path: Path, suffix: str, codec: str
) -> None:
    clip = load_video(write(tmp_path / f"film{suffix}", codec=codec))
    assert clip.size == (6, 96, 64)
    assert (clip.total, clip.fps, clip.sampled_fps) == (30, 10.0, 2.0)
    assert list(clip.indices) == seen(clip) == [0, 6, 12, 17, 23, 29]


def test_frames_are_mlx_vlms(film: Path) -> None:
    frames, metadata = mlx_vlm_load_video(str(film))
    clip = load_video(film)
    assert metadata.frames_indices == list(clip.indices)
    np.testing.assert_array_equal(frames.transpose(0, 2, 3, 1), clip.frames)


def test_sources_of_every_kind_give_the_same_frames(film: Path) -> None:
    data = film.read_bytes()
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    sources: list[Any] = [
        str(film),
        film,
        Video(film),
        data,
        bytearray(data),
        uri,
        film.as_uri(),
    ]
    for source in sources:
        np.testing.assert_array_equal(
            load_video(source).frames, load_video(film).frames
        )


@pytest.mark.parametrize(
    ("video", "expected"),
    [
        ({"fps": 1}, [0, 29]),  # 3 frames, in twos
        ({"fps": 1, "max_frames": 100}, [0, 29]),
        ({"fps": 10, "max_frames": 5}, [0, 10, 19, 29]),
        ({"num_frames": 4}, [0, 10, 19, 29]),
        ({"num_frames": 1000}, list(range(30))),
        ({"num_frames": -1}, list(range(30))),
        ({"max_frames": 1}, [0]),
    ],
    ids=str,
)
def test_what_a_video_says_of_its_sampling_goes_first(
    film: Path, video: dict[str, Any], expected: list[int]
) -> None:
    assert seen(load_video(Video(film, **video), Sampling(min_frames=2))) == expected


@pytest.mark.parametrize(
    ("total", "fps", "sampling", "count"),
    [
        (3000, 25.0, Sampling(), 240),
        (90000, 25.0, Sampling(), 768),
        (7, 30.0, Sampling(), 4),
        (3, 10.0, Sampling(), 2),
        (1, 10.0, Sampling(), 1),
        (31, 10.0, Sampling(frame_factor=1, fps=1.5), 4),
        (3000, 25.0, Sampling(num_frames=32), 32),
        (20, 25.0, Sampling(num_frames=32), 20),
    ],
)
def test_sampling_habits(
    total: int, fps: float, sampling: Sampling, count: int
) -> None:
    indices = sampling.indices(total, fps, Video("film.mp4"))
    assert len(indices) == count
    assert indices[0] == 0
    assert indices[-1] == (total - 1 if count > 1 else 0)
    assert (np.diff(indices) > 0).all()


@pytest.mark.parametrize(
    ("total", "fps", "count", "head"),
    [
        (100, 10.0, 10, [0, 10, 20]),
        (299, 29.97, 10, [0, 29, 59]),
        (3, 10.0, 1, [0]),
        (4000, 25.0, 128, [0, 30, 62]),
        (90000, 29.97, 128, [0, 707, 1414]),
    ],
)
def test_minicpm_looks_at_each_second(
    total: int, fps: float, count: int, head: list[int]
) -> None:
    """As transformers 5.23's MiniCPMV4_6VideoProcessor.sample_frames, which was asked."""
    sampling = type(shared_adapter("minicpmv4_6")).video_sampling
    found = sampling.indices(total, fps, Video("film.mp4"))
    assert (len(found), found[: len(head)].tolist()) == (count, head)
    assert len(sampling.indices(total, fps, Video("film.mp4", num_frames=3))) == 3


def test_a_header_that_counts_a_frame_too_many(
    film: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers count by duration: the frames that are there are sampled, again from the first to the last."""
    monkeypatch.setattr("vlm_batch.inputs.videos._Capture.skip", _ends_at(29))
    assert seen(load_video(film)) == [0, 9, 19, 28]  # 2.9 s make 5.8 frames, in twos
    monkeypatch.setattr("vlm_batch.inputs.videos._Capture.skip", _ends_at(20))
    with pytest.raises(
        InvalidVideo, match="damaged: its header says 30 frames, and it ends after 20"
    ):
        load_video(film)


def _ends_at(last: int) -> Any:
    from vlm_batch.inputs.videos import _Capture

    right = _Capture.skip
    return lambda capture: capture.seen < last and right(capture)


def test_frames_given_one_by_one(tmp_path: Path) -> None:
    paths = []
    for index in range(5):
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(grey(index)).save(paths[-1])
    expected = np.stack([grey(index) for index in range(5)])
    for source in (
        paths,
        [load_image(path) for path in paths],
        tuple(map(str, paths)),
        list(expected),
        expected,
    ):
        clip = load_video(Video(source, fps=4))
        np.testing.assert_array_equal(clip.frames, expected)
        assert (clip.total, clip.fps, clip.indices) == (5, 4, (0, 1, 2, 3, 4))
    assert seen(load_video(Video(expected, max_frames=3))) == [0, 2, 4]
    assert load_video(expected, Sampling(fps=1.5)).fps == 1.5


def test_of_a_mapped_array_the_wanted_frames_are_copied() -> None:
    """The file may be larger than memory, and its owner may write to it."""
    frame = grey(3, 960, 640)
    mapped = np.broadcast_to(frame, (200_000, *frame.shape))
    owned = own_video(Video(mapped, num_frames=2), own_image)
    assert np.array_equal(load_video(owned).frames, [frame, frame])
    written = np.stack([grey(1), grey(2), grey(3)])
    owned = own_video(Video(written, max_frames=2), own_image)
    written[:] = 0
    assert load_video(owned).frames[:, 0, 0, 0].tolist() == [LEVELS, 3 * LEVELS]


def test_frames_are_scaled_down_and_never_up(film: Path) -> None:
    assert load_video(Video(film, max_pixels=96 * 64 // 4)).size == (6, 48, 32)
    assert load_video(Video(film, max_pixels=10**6)).size == (6, 96, 64)
    assert load_video(Video([grey(0), grey(1)], max_pixels=1)).size == (2, 1, 1)


def damaged(folder: Path, kind: str) -> Any:
    if kind in ("cut in half", "header cut off"):
        suffix, codec = (".avi", "MJPG") if kind == "cut in half" else (".mp4", "mp4v")
        whole = write(folder / f"whole{suffix}", codec=codec).read_bytes()
        path = folder / f"cut{suffix}"
        path.write_bytes(whole[: len(whole) // 2])
        return path
    path = folder / "film.mp4"
    path.write_bytes(
        {"empty": b"", "text": b"these are words" * 99, "noise": np.random.bytes(4096)}[
            kind
        ]
    )
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut in half", "is damaged: its header says 30 frames, and it ends after"),
        ("header cut off", "cut.mp4 is not a video that FFmpeg can read"),
        ("empty", r"film.mp4 is empty \(0 bytes\)"),
        ("text", "film.mp4 is not a video that FFmpeg can read"),
        ("noise", "film.mp4 is not a video that FFmpeg can read"),
    ],
)
def test_a_damaged_file(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(InvalidVideo, match=message):
        load_video(damaged(tmp_path, kind))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.mp4", "nowhere.mp4 does not exist"),
        (PICTURES, "is not a file"),
        ([], "the video has no frames"),
        (b"", r"the video given as bytes is empty \(0 bytes\)"),
        ("data:video/mp4,abc", "the data URI is malformed"),
        (
            Image.new("RGB", (8, 8)),
            "the video given as Image is no video: a file, an array",
        ),
        (np.zeros((8, 8, 3), np.uint8), "the video given as ndarray is no video"),
        (7, "the video given as int is no video"),
        (
            [grey(0), grey(1, 32, 32)],
            "frames of 96 x 64 and of 32 x 32 pixels; all must be of one size",
        ),
        (
            [grey(0), "nowhere.png"],
            "frame 1 of the video given as list: nowhere.png does not exist",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_video(source: Any, message: str) -> None:
    with pytest.raises(InvalidVideo, match=message):
        load_video(source)


def test_all_frames_together_are_bounded_before_they_are_decoded(film: Path) -> None:
    with pytest.raises(
        InvalidVideo,
        match=r"6 frames of 96 x 64 are 36,864 pixels; at most 36,863 are read",
    ):
        load_video(film, max_pixels=36_863)
    assert load_video(film, max_pixels=36_864).size == (6, 96, 64)
    assert load_video(Video(film, max_frames=4), max_pixels=30_000).size == (4, 96, 64)
    assert load_video(film, max_pixels=None).size == (6, 96, 64)


def test_no_frame_is_decoded_of_a_video_that_is_too_large(
    film: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header says how large its frames are, and how many there will be."""
    monkeypatch.setattr(
        "vlm_batch.inputs.videos._Capture.skip",
        lambda capture: pytest.fail("a frame was decoded"),
    )
    with pytest.raises(InvalidVideo, match="36,864 pixels; at most 36,863 are read"):
        load_video(film, max_pixels=36_863)
    with pytest.raises(
        InvalidVideo,
        match=r"a frame of .* has 96 x 64 = 6,144 pixels; at most 6,143 are read",
    ):
        load_video(Video(film, max_pixels=100), max_image_pixels=6_143)


def test_the_frames_of_a_video_count_among_the_requests_pixels(film: Path) -> None:
    data, frame = film.read_bytes(), Image.new("RGB", (96, 64))
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    sources: list[Any] = [
        film,
        str(film),
        data,
        uri,
        [frame] * 6,
        np.zeros((6, 64, 96, 3), np.uint8),
    ]
    with VLMBatcher(CHECKPOINT, limits=Limits(request_pixels=80_000)) as small:
        for source in sources:
            with pytest.raises(
                (InvalidImage, RequestFailed), match="86,016 pixels together"
            ):
                small.submit(
                    Image.new("RGB", (192, 64)), ASK, videos=[Video(source)] * 2
                ).result().raise_for_error()
            assert small.submit(None, ASK, videos=[Video(source)] * 2).result().ok


def test_all_frames_are_bounded_as_others_are(film: Path) -> None:
    """By their pixels and by their number, of one video and of all, in memory and in files."""
    every = Video(film, num_frames=-1)
    with pytest.raises(InvalidVideo, match="30 frames of 96 x 64 are 184,320 pixels"):
        load_video(every, max_pixels=184_319)
    frames = np.zeros((30, 8, 8, 3), np.uint8)
    with VLMBatcher(CHECKPOINT, limits=Limits(request_pictures=30)) as small:
        assert small.submit(None, ASK, videos=every).result().video_sizes == (
            (30, 96, 64),
        )
        again = Video(frames, num_frames=-1)
        for several in ([every, again], [every, every], [again, again]):
            said = "the request has 60 pictures and frames; at most 30 are read"
            with pytest.raises((InvalidImage, RequestFailed), match=said):
                small.submit(None, ASK, videos=several).result().raise_for_error()


@pytest.mark.parametrize(
    "settings",
    [
        {"fps": 0},
        {"fps": float("nan")},
        {"num_frames": 0},
        {"num_frames": -2},
        {"max_frames": -1},
        {"max_frames": 1.5},
        {"max_pixels": -1},
        {"num_frames": 2, "max_frames": 2},
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameters, match=next(iter(settings))):
        Video("film.mp4", **settings)


# Processors
# -----------------------------------------------------------------------------------------------------------------------


#: (frames, height, width) -> (time, high, wide) of transformers 5.23's Qwen2VLVideoProcessor(cap_pixels_per_frame=True). Its
#: patches are at most two levels of 255 away from these, where torchvision's bicubic rounds otherwise than Pillow's.
QWEN2_GRIDS = {
    (4, 120, 200): (2, 18, 30),
    (6, 480, 640): (3, 34, 46),
    (9, 720, 1280): (5, 40, 72),
    (30, 360, 640): (15, 26, 46),
    (2, 60, 90): (1, 20, 28),
}


@pytest.mark.parametrize(("shape", "grid"), QWEN2_GRIDS.items(), ids=str)
def test_frames_of_qwen2_vl_are_bounded_one_by_one(
    shape: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    theirs = Qwen3VLVideoProcessor(
        patch_size=14, min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28
    )
    count, height, width = shape
    frames = np.zeros((count, 3, height, width), np.uint8)
    found = each_frame_bounded(theirs)(videos=[frames])
    assert tuple(found["video_grid_thw"][0]) == grid
    assert found["pixel_values_videos"].shape == (np.prod(grid), 3 * 2 * 14 * 14)
    assert type(theirs) is Qwen3VLVideoProcessor  # the caller's own is as it was
    if shape != (6, 480, 640):
        assert tuple(theirs(videos=[frames])["video_grid_thw"][0]) != grid


def test_a_checkpoints_own_habits_go_first() -> None:
    _, processor = mlx_vlm.load(str(CHECKPOINT), lazy=True)
    processor.video_processor.fps, processor.video_processor.max_frames = 3.0, 64
    adapter = type(shared_adapter("qwen2_vl"))
    found = Processing(
        processor, shared_adapter("qwen2_vl").config, adapter.video_sampling
    ).sampling
    assert (found.fps, found.min_frames, found.max_frames, found.frame_factor) == (
        3.0,
        4,
        64,
        2,
    )


# Positions
# -----------------------------------------------------------------------------------------------------------------------

POSITIONS = json.loads((REFERENCES / "video_positions.json").read_text())


@pytest.mark.parametrize(
    "case", POSITIONS, ids=lambda case: f"{case['family']}-{len(case['ids'])}"
)
def test_positions_are_those_of_the_release_that_brought_the_models(
    case: dict[str, Any],
) -> None:
    """transformers 4.49: tests/references/video_positions.py."""
    extra = {
        name: mx.array(case[name])
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if case[name]
    }
    found = shared_adapter(case["family"]).positions(mx.array([case["ids"]]), extra, {})
    np.testing.assert_array_equal(np.array(found.prompt)[:, 0], case["positions"])
    assert found.delta == case["delta"]


FAR = 100 * TOLERANCE
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_the_matrix_sees_swapped_videos(name: str) -> None:
    one, other = inputs_of(name, "video:1:1"), inputs_of(name, "video:9:1")

    def swapped(key: str) -> Inputs:
        mine, theirs = (one, other) if key == "video:1:1" else (other, one)
        return {**theirs, "input_ids": mine["input_ids"]}

    answers = run(shared_adapter(name), swapped, [Ask("video:1:1"), Ask("video:9:1")])
    assert (
        max(difference(answer, oracle(name, answer.ask.key)) for answer in answers)
        > FAR
    )


def test_the_matrix_sees_a_videos_seconds() -> None:
    def hasty(key: str) -> Inputs:
        return {
            **inputs_of("qwen2_5_vl", key),
            "second_per_grid_ts": np.array([0.5], np.float32),
        }

    (answer,) = run(shared_adapter("qwen2_5_vl"), hasty, [Ask("video:3:2")])
    assert difference(answer, oracle("qwen2_5_vl", "video:3:2")) > FAR
    (right,) = run_family("qwen2_5_vl", [Ask("video:3:2")])
    assert difference(right, oracle("qwen2_5_vl", "video:3:2")) <= TOLERANCE


def test_a_prompt_without_room_for_its_video() -> None:
    inputs = {
        name: mx.array(value) for name, value in inputs_of("qwen2_vl", "both:1").items()
    }
    video = family("qwen2_vl").build().config.video_token_id
    inputs["input_ids"] = mx.where(inputs["input_ids"] == video, 1, inputs["input_ids"])
    with pytest.raises(
        InvalidPrompt,
        match="the pictures need 40 placeholder tokens; the prompt has 10",
    ):
        shared_adapter("qwen2_vl").encode(inputs)


# End to end, with the processor of the embedded checkpoint
# -----------------------------------------------------------------------------------------------------------------------

ASK = "describe the video"
CROSS = PICTURES / "yellow_cross.png"


def still(count: int = 4) -> Video:
    """A picture that the checkpoint knows, for two seconds."""
    return Video([CROSS] * count, fps=2)


def test_every_way_to_ask_is_the_same_question(batcher: VLMBatcher, film: Path) -> None:
    text = {"type": "text", "text": ASK}
    part = {"type": "video", "video": str(film), "fps": 1.0, "max_frames": 4}
    openai = {
        "type": "video_url",
        "video_url": {"url": film.as_uri()},
        "fps": 1.0,
        "max_frames": 4,
    }
    video = Video(film, fps=1, max_frames=4)
    rendered = batcher._preparer.processing.render(ASK, 0, 1)
    handles = [
        batcher.submit(prompt=ASK, videos=video),
        batcher.submit(prompt=ASK, videos=[video]),
        batcher.submit(prompt=rendered, videos=video, template=None),
        batcher.submit(messages=[{"role": "user", "content": [part, text]}]),
        batcher.submit(messages=[{"role": "user", "content": [openai, text]}]),
        batcher.submit(
            messages=[{"role": "user", "content": [{"type": "video"}, text]}],
            videos=video,
        ),
        batcher.submit(messages=[{"role": "user", "content": ASK}], videos=video),
        batcher.submit_request(Request(inputs=_processed(batcher, video))),
    ]
    results = [handle.result(timeout=60).raise_for_error() for handle in handles]
    assert {result.token_ids for result in results} == {results[0].token_ids}
    assert results[0].video_sizes == ((4, 96, 64),)
    # 2 time steps of 56 x 84 pixels, 28 x 28 to a token
    assert results[0].usage.image_tokens == 12


def _processed(batcher: VLMBatcher, video: Video) -> dict[str, Any]:
    clip = load_video(video)
    return batcher._preparer.processing.inputs(
        batcher._preparer.processing.render(ASK, 0, 1), [], [clip]
    )


def test_token_ids_need_room_for_the_video(batcher: VLMBatcher, film: Path) -> None:
    ids = np.array(_processed(batcher, Video(film))["input_ids"])[0].tolist()
    whole = batcher.submit(prompt=ASK, videos=film).result(timeout=60)
    assert (
        batcher.submit(token_ids=ids, videos=film).result(timeout=60).token_ids
        == whole.token_ids
    )
    refused = batcher.submit(token_ids=ids[:9], videos=film).result(timeout=60)
    assert refused.error is not None
    assert "the pictures and videos need 18 placeholder tokens" in refused.error


def test_a_short_video_gets_mlx_vlms_own_answer(batcher: VLMBatcher) -> None:
    """Small enough that mlx-vlm's bound for the whole video leaves its frames as they are."""
    frames = [np.asarray(load_image(CROSS).resize((56, 56)))] * 4
    model, processor = mlx_vlm.load(str(CHECKPOINT))
    model.set_dtype(mx.float32)
    prompt = batcher._preparer.processing.render(ASK, 0, 1)
    inputs = prepare_inputs(
        processor, videos=[np.stack(frames).transpose(0, 3, 1, 2)], prompts=prompt
    )
    inputs.pop("attention_mask")
    ids = inputs.pop("input_ids")
    steps = generate_step(
        ids, model, None, None, max_tokens=12, temperature=0.0, **inputs
    )
    alone = [int(token) for token, _ in steps]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    result = (
        batcher.submit(prompt=ASK, videos=Video(frames), params=params)
        .result(timeout=60)
        .raise_for_error()
    )
    assert list(result.token_ids) == alone


def test_a_mixed_job(batcher: VLMBatcher, film: Path, tmp_path: Path) -> None:
    """Videos, pictures and texts together; what is broken fails alone, and nobody else notices."""
    jobs: list[dict[str, Any]] = [
        {"prompt": ASK, "videos": still()},
        {"prompt": "describe the picture", "images": CROSS},
        {"prompt": ASK, "videos": damaged(tmp_path, "cut in half")},
        {"prompt": "count to 5"},
        {"prompt": ASK, "videos": [film, still(2)], "images": CROSS},
        {"prompt": ASK, "videos": tmp_path / "nowhere.mp4"},
        {"prompt": ASK, "videos": Video(film, fps=8)},
    ]
    alone = [batcher.submit(**job).result(timeout=60) for job in jobs]
    together = [
        handle.result(timeout=60) for handle in [batcher.submit(**job) for job in jobs]
    ]
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.token_ids, one.finish_reason, one.error) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.error,
        )
    assert [result.ok for result in together] == [
        True,
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert isinstance(together[2].exception, InvalidVideo)
    assert "yellow cross" in together[0].text
    assert "yellow cross" in together[1].text
    assert together[4].video_sizes == ((6, 96, 64), (2, *load_image(CROSS).size))


def test_few_videos_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: a clip can be half a gigabyte. Those without a video are not held up by them."""
    decoded: list[int] = []

    def counted(*args: Any) -> Clip:
        decoded.append(sum(not handle.done() for handle in handles))
        return load_video(*args)

    monkeypatch.setattr("vlm_batch.inputs.prepare.load_video", counted)
    handles: list[Any] = []
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    with VLMBatcher(CHECKPOINT, max_rows=1, policy={"look_ahead": 64}) as batcher:
        handles += [
            batcher.submit(prompt=f"{ASK} {index}", videos=still(), params=long)
            for index in range(12)
        ]
        text = batcher.submit(prompt="count to 5", priority=1)
        results = [handle.result(timeout=120) for handle in handles]
    assert text.result(timeout=60).ok
    assert all(result.ok for result in results)
    # The first is decoded while 12 are open, the next when at most one decodes, two wait, and two are ready.
    assert all(index - (12 - alive) <= 5 for index, alive in enumerate(decoded)), (
        decoded
    )


def test_a_video_that_is_too_large_fails_alone(film: Path) -> None:
    with VLMBatcher(CHECKPOINT, limits=Limits(video_pixels=30_000)) as small:
        refused = small.submit(prompt=ASK, videos=film)
        taken = small.submit(prompt=ASK, videos=Video(film, max_frames=4))
        error = refused.result(timeout=60).error
        assert error is not None
        assert "Limits.video_pixels" in error
        assert taken.result(timeout=60).ok


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            {"prompt": ASK, "videos": [grey(0), grey(1)]},
            InvalidVideo,
            "frames together as Video",
        ),
        ({"prompt": ASK, "videos": Video([])}, InvalidVideo, "has no frames"),
        (
            {"prompt": "<|video_pad|>", "template": None},
            InvalidPrompt,
            "1 video placeholders for 0 videos",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            InvalidPrompt,
            "more video parts than videos",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "video", "video": "a.mp4", "speed": 2}],
                    }
                ]
            },
            InvalidPrompt,
            r"does not know \['speed'\]; it takes \['fps'",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_at_submit_is_raised_there(
    batcher: VLMBatcher, ask: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        batcher.submit(**ask)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aya_vision", "aya_vision takes no videos: "),
        ("falcon_h1", "takes no videos: "),
    ],
)
def test_a_family_without_videos_refuses_at_submit(
    batcher: VLMBatcher, name: str, reason: str, film: Path
) -> None:
    with (
        VLMBatcher(
            family(name).build(), batcher._preparer.processing.processor
        ) as other,
        pytest.raises(InvalidVideo, match=reason),
    ):
        other.submit(prompt=ASK, videos=film)
