"""Recordings: read as said from any source, heard in any company as alone, and each failure says what was wrong."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import soxr
from PIL import Image

from tests import hearing
from tests.harness import shared_adapter
from tests.hearing import PROCESSORS, gemma
from tests.serving import serving
from tests.zoo import PLAIN, family, to_mx
from vlm_batch import (
    Audio,
    FetchPolicy,
    InvalidAudio,
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    Limits,
    Request,
    Result,
    SamplingParams,
    VLMBatcher,
    assets,
)
from vlm_batch.inputs import audio as module
from vlm_batch.inputs.audio import Sound, as_audio, load_audio, own_audio
from vlm_batch.inputs.chats import split_messages
from vlm_batch.inputs.fetch import USUAL, Cancelled, OperationCancelled
from vlm_batch.inputs.processing import Processing
from vlm_batch.jobs import map_table
from vlm_batch.jobs.rows import InvalidJob
from vlm_batch.jobs.sources import Reading, open_sources
from vlm_batch.jobs.stamps import files_of
from vlm_batch.models import families

HEAR = tuple(PROCESSORS)
RATE = 44_100
#: Of Gemma 4's 128 bands the lowest are narrower than a frequency, in the published extractor, too.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")


def tone(seconds: float, rate: int = RATE, pitch: float = 440.0) -> np.ndarray:
    return (
        0.4 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)
    ).astype(np.float32)


def written(
    samples: np.ndarray, kind: str = "WAV", rate: int = RATE, subtype: str | None = None
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "subtype", "loss"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "FLOAT", 1e-6),
        ("FLAC", "PCM_24", 1e-6),
        ("AIFF", "PCM_16", 1e-4),
        ("CAF", "PCM_24", 1e-6),
        ("MP3", None, 0.06),
        ("OGG", "VORBIS", 0.06),
        ("OGG", "OPUS", 0.06),
    ],
)
def test_every_format_is_mono_at_the_rate_asked_for(
    kind: str, subtype: str | None, loss: float
) -> None:
    """As transformers' loader has it: the mean of the channels, resampled by soxr's high quality."""
    rate = 48_000
    stereo = np.stack([tone(1.5, rate), 0.5 * tone(1.5, rate, 880.0)], axis=1)
    found = load_audio(written(stereo, kind, rate, subtype), 16_000)
    wanted = soxr.resample(stereo.mean(axis=1), rate, 16_000, quality="HQ")
    assert found.samples.dtype == np.float32
    assert found.samples.shape == wanted.shape == (24_000,)
    assert found.seconds == 1.5
    assert np.abs(found.samples - wanted)[500:-500].max() < loss


def test_blocks_are_resampled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 20_011).astype(np.float32)
    whole = load_audio(written(samples, subtype="FLOAT"), 16_000)
    monkeypatch.setattr(module, "_BLOCK", 1_000)
    assert np.array_equal(
        load_audio(written(samples, subtype="FLOAT"), 16_000).samples, whole.samples
    )
    wanted = soxr.resample(samples, RATE, 16_000, quality="HQ")
    # librosa, too, fills up with silence to as many as the time says
    assert len(whole.samples) - len(wanted) in (0, 1)
    assert np.array_equal(wanted, whole.samples[: len(wanted)])


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    samples = tone(0.3)
    data = written(samples, subtype="FLOAT")
    path = tmp_path / "tone.wav"
    path.write_bytes(data)
    sources: list[Any] = [
        data,
        bytearray(data),
        str(path),
        path,
        f"data:audio/wav;base64,{base64.b64encode(data).decode()}",
        io.BytesIO(data),
        Audio(samples, rate=RATE),
        Audio(np.stack([samples, samples], axis=1).astype(np.float64), rate=RATE),
        {"array": samples, "sampling_rate": RATE},
        {"bytes": data, "path": "tone.wav"},
    ]
    found = [
        load_audio(own_audio(as_audio(source), USUAL), 16_000).samples
        for source in sources
    ]
    assert all(np.array_equal(one, found[0]) for one in found)
    whole = (samples * 32768).round().astype(np.int16)
    assert (
        np.abs(load_audio(Audio(whole, rate=RATE), 16_000).samples - found[0]).max()
        < 1e-4
    )


@pytest.mark.parametrize("count", [1, 2, 159, 160])
def test_the_shortest(count: int) -> None:
    assert len(
        load_audio(Audio(np.zeros(count, np.float32), rate=RATE), 16_000).samples
    ) == -(-count * 160 // 441)


def with_data_size(data: bytes, size: int) -> bytes:
    """A wav file whose data chunk says another number of bytes."""
    at = data.index(b"data") + 4
    return data[:at] + size.to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize("size", [0x7FFF_F000, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_a_wav_that_was_written_to_a_pipe_is_whole(size: int) -> None:
    """Its writer could not know the size, and left a mark for it."""
    data = written(tone(0.5))
    whole = load_audio(data, 16_000).samples
    assert np.array_equal(load_audio(with_data_size(data, size), 16_000).samples, whole)


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAVEX", "PCM_24"),
        ("RF64", "FLOAT"),
        ("FLAC", None),
        ("MP3", None),
        ("AIFF", None),
        ("CAF", None),
    ]
    + [("OGG", name) for name in ("VORBIS", "OPUS")],
)
def test_a_file_is_heard_whole_or_refused(kind: str, subtype: str | None) -> None:
    """Wherever it is cut, but for the last twentieth; what comes behind a file does no harm."""
    data = written(tone(2.0, 48_000), kind, 48_000, subtype)
    for share in range(1, 95, 3):
        with pytest.raises(InvalidAudio):
            load_audio(data[: len(data) * share // 100], 16_000)
    assert np.array_equal(
        load_audio(data + b"junk" * 9, 16_000).samples, load_audio(data, 16_000).samples
    )


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", None), ("FLAC", None), ("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")],
)
def test_one_sample_of_every_format(kind: str, subtype: str | None) -> None:
    assert (
        len(
            load_audio(
                written(np.zeros(1, np.float32), kind, 48_000, subtype), 48_000
            ).samples
        )
        == 1
    )


LOUD = np.full(100, 3000.0)
OGG = {
    name: written(tone(1.0, 48_000), "OGG", 48_000, name) for name in ("VORBIS", "OPUS")
}
BAD: tuple[tuple[Any, str], ...] = (
    (b"", "is empty"),
    (
        b"GIF89a" + b"\0" * 50,
        "is no recording of wav, flac, mp3, ogg, aiff, caf or aac",
    ),
    (b"RIFF" + b"\0" * 100, "cannot be opened"),
    (b"fLaC" + b"\1" * 100, "cannot be opened"),
    (written(tone(2.0), "FLAC")[:20_000], "cannot be decoded|is damaged"),
    (written(tone(2.0), "MP3")[:3_000], "is damaged: its header says"),
    (written(np.zeros(0, np.float32)), "has no samples"),
    (with_data_size(written(tone(1.0)), 0), "has no samples"),
    (
        with_data_size(written(tone(1.0)), 1 << 20),
        "is damaged: its header says 524,288 samples",
    ),
    (written(tone(1.0))[:50_000], "is damaged: its header says 44,100 samples"),
    (OGG["VORBIS"][:-10] + OGG["OPUS"], "a page of it belongs to no stream that began"),
    (
        OGG["VORBIS"][: OGG["VORBIS"].rindex(b"OggS")] + OGG["OPUS"],
        "ends before the last page of its stream",
    ),
    (
        OGG["OPUS"][: OGG["OPUS"].rindex(b"OggS")],
        "ends before the last page of its stream",
    ),
    (OGG["VORBIS"][:-10], "ends before the last page of its stream"),
    (b"ID3\4\0\0\0\0\0\x40" + b"\0" * 64, "cannot be opened"),
    (written(np.full(10, np.nan, np.float32), subtype="FLOAT"), "no numbers"),
    (written(LOUD, subtype="FLOAT"), "has a value of 3,000"),
    (written(np.zeros((10, 40), np.float32)), "has 40 channels; at most 32"),
    (Audio(np.zeros((4, 4, 4)), rate=RATE), "an array of shape"),
    (Audio(np.zeros(4, np.int64), rate=RATE), "an array of int64"),
    (Audio(np.zeros(4, bool), rate=RATE), "an array of bool"),
    (np.zeros(4), "has no rate; samples go as Audio"),
    ({"text": "a"}, "needs array and sampling_rate"),
    ("/nowhere/tone.wav", "does not exist"),
    ("data:audio/wav,abc", "the data URI is malformed"),
)


@pytest.mark.parametrize(
    ("source", "said"),
    BAD,
    ids=[f"{at} {said[:24]}" for at, (_, said) in enumerate(BAD)],
)
def test_what_cannot_be_read_says_why(source: Any, said: str) -> None:
    with pytest.raises(InvalidAudio, match=said) as error:
        load_audio(source, 16_000)
    assert "object at 0x" not in str(error.value)


def test_limits() -> None:
    data = written(tone(2.0))
    with pytest.raises(
        InvalidAudio,
        match=r"2.0 s of sound; at most 1 s are read \(Limits.audio_seconds\)",
    ):
        load_audio(data, 16_000, 1.0)
    with pytest.raises(InvalidAudio, match=r"2\.0 s of sound"):
        load_audio(Audio(tone(2.0), rate=RATE), 16_000, 1.0)
    with pytest.raises(InvalidAudio, match="is a local path, and none may be read"):
        load_audio("tone.wav", 16_000, policy=FetchPolicy(allow_files=False))
    source = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    with pytest.raises(InvalidAudio, match="holds more than 100 bytes"):
        load_audio(source, 16_000, policy=FetchPolicy(max_bytes=100))
    with pytest.raises(InvalidParameters, match="rate is 10; it must be an integer in"):
        Audio(tone(0.1), rate=10)
    for wrong in (0, -1, "long", float("nan")):
        with pytest.raises(ValueError, match="audio_seconds"):
            Limits(audio_seconds=wrong)  # type: ignore[arg-type]


def test_no_more_is_decoded_than_a_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUES", 1000)
    with pytest.raises(InvalidAudio, match="at most 1,000 values are decoded"):
        load_audio(written(tone(0.1)), 16_000)


def test_a_cancelled_request_is_not_decoded() -> None:
    cancelled = Cancelled()
    cancelled.set()
    with pytest.raises(OperationCancelled):
        load_audio(written(tone(0.1)), 16_000, cancelled=cancelled)


# Chats ----------------------------------------------------------------------------------------------------------------


def test_the_forms_of_messages() -> None:
    data = base64.b64encode(b"RIFF").decode()
    audio = Audio(tone(0.1), rate=RATE)
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "https://example.org/a.mp3"}},
        # as a client writes out what it leaves open
        {"type": "audio_url", "audio_url": {"url": "b.mp3", "data": None}},
        {"type": "audio_url", "audio_url": "a.mp3"},
        {"type": "audio", "audio": audio},
        {"type": "audio", "audio": {"array": [0.0], "sampling_rate": 8000}},
        {"type": "audio", "path": "b.ogg"},
        {"type": "image", "image": "c.png"},
        {"type": "audio"},
    ]
    turns, media = split_messages(
        [{"role": "user", "content": parts}], [], [], ["spare.wav", "left.wav"]
    )
    assert media[0] == ["c.png"] and media[1] == []
    wanted: list[Any] = [f"data:audio;base64,{data}", "https://example.org/a.mp3"]
    wanted += ["b.mp3", "a.mp3", audio]
    wanted += [
        {"array": [0.0], "sampling_rate": 8000},
        "b.ogg",
        "spare.wav",
        "left.wav",
    ]
    assert media[2] == wanted
    assert [part["type"] for part in turns[0]["content"]] == ["audio"] * 7 + [
        "image",
        "audio",
    ]
    with pytest.raises(InvalidPrompt, match="more recording parts than recordings"):
        split_messages([{"role": "user", "content": [{"type": "audio"}]}], [], [], [])
    with pytest.raises(
        InvalidPrompt, match="a recording part has the data 3; base64 is expected"
    ):
        split_messages(
            [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": 3}}],
                }
            ],
            [],
            [],
            [],
        )


# Processors and batches -----------------------------------------------------------------------------------------------

#: Samples at the processor's rate of a recording, and the placeholders that transformers' own processor writes for it (5.23).
PLACES: dict[str, dict[int, int]] = {
    "gemma3n": {4_000: 6, 12_345: 6},
    "gemma4": {4_000: 6, 12_345: 20, 12_900: 20, 12_961: 21, 641: 1, 800: 1, 801: 2},
    "gemma4_unified": {640: 1, 641: 2, 4_480: 7, 6_400: 10},
    "minicpmo": {
        1_281: 1,
        4_000: 2,
        12_345: 7,
        480_000: 300,
        480_001: 300,
        500_001: 312,
    },  # the published code's formula
    "phi4mm": {400: 1, 1_679: 1, 1_680: 2, 4_000: 3, 12_345: 10, 700_000: 547},
    "qwen3_omni_moe": {4_000: 4, 12_345: 10, 16_000: 13, 16_001: 13, 500_001: 407},
    **hearing.PLACES,
}


@cache
def processing(name: str) -> Processing:
    adapter = shared_adapter(name)
    return Processing(
        adapter.processor(PROCESSORS[name](name)),
        adapter.config,
        adapter.video_sampling,
    )


def test_every_family_that_hears_is_here() -> None:
    assert (
        set(HEAR)
        == set(PROCESSORS)
        == {spec.family for spec in families() if spec.audio}
    )


@pytest.mark.parametrize("name", HEAR)
def test_the_places_of_a_recording(name: str) -> None:
    made, adapter = processing(name), shared_adapter(name)
    rate = hearing.RATES.get(name, 16_000)
    assert made.audio_rate == rate
    for count, places in PLACES[name].items():
        samples = (
            np.random.default_rng(count).uniform(-0.1, 0.1, count).astype(np.float32)
        )
        inputs = made.inputs(
            made.render("what?", 0, 0, 1), [], [], [Sound(samples, count / rate)]
        )
        given = int(np.isin(np.array(inputs["input_ids"]), marks_of(name)).sum())
        assert given == places, count
        assert adapter.encode(inputs).image_tokens == places


def marks_of(name: str) -> list[int]:
    """The ids of a recording's placeholders; MiniCPM-o's processor says by position where they are."""
    return (
        [PLAIN] if name == "minicpmo" else list(shared_adapter(name)._audio_token_ids)
    )


def asked(name: str) -> list[dict[str, Any]]:
    """Recordings of a length that the tiny model takes; pictures where its tower is there."""
    picture = Image.fromarray(
        np.random.RandomState(3).randint(0, 255, (16, 16, 3), dtype=np.uint8)
    )
    short = tone(0.4)
    long = tone(0.7, pitch=900.0)
    silence = np.zeros(8_000, np.float32)
    data = base64.b64encode(written(long, "WAV", subtype="PCM_16")).decode()
    openai = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "hm"},
    ]
    return [
        {"prompt": "what?", "audios": written(short, "FLAC")},
        {
            "prompt": "which?",
            "audios": [Audio(short, rate=RATE), Audio(long, rate=RATE)],
        },
        {"prompt": "words only"},
        {"prompt": "silence", "audios": Audio(silence, rate=16_000)},
        {"messages": [{"role": "user", "content": openai}]},
        {"prompt": "none", "audios": b"RIFF"},
        {"prompt": "what?", "audios": written(short, "FLAC")},
        *(
            []
            if name == "gemma3n"
            else [
                {"prompt": "both", "audios": Audio(long, rate=RATE), "images": picture}
            ]
        ),
    ]


@pytest.mark.parametrize("name", HEAR)
def test_a_mixed_job_through_the_familys_own_processor(name: str) -> None:
    """Recordings, pictures and texts of one batch, each answered as if it were alone; and again, from what was kept."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)

    def answers(batcher: VLMBatcher) -> list[Result]:
        handles = [batcher.submit(**job, params=params) for job in asked(name)]
        return [handle.result(timeout=120) for handle in handles]

    with VLMBatcher(
        family(name).build(), PROCESSORS[name](name), max_rows=1, caches=None
    ) as batcher:
        alone = answers(batcher)
    with VLMBatcher(
        family(name).build(), PROCESSORS[name](name), max_rows=4
    ) as batcher:
        together, again = answers(batcher), answers(batcher)
        text = batcher.rendered(
            Request(prompt="what?", audios=asked(name)[0]["audios"])
        )
        assert text is not None
        assert (
            batcher.processing.count_placeholders(text, "audio") == 1
            or text == "<|audio_1|>what?!"
        )
    for one, other in zip(alone * 2, together + again, strict=True):
        assert (one.token_ids, one.error, one.audio_seconds) == (
            other.token_ids,
            other.error,
            other.audio_seconds,
        )
        for before, after in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(before.logprob - after.logprob) < 1e-4
    assert [result.ok for result in together] == [
        at != 5 for at in range(len(together))
    ]
    assert isinstance(together[5].exception, InvalidAudio)
    assert together[0].token_ids == together[6].token_ids
    assert len({result.token_ids for result in together if result.ok}) > 3
    # the recording was not heard again
    assert again[0].usage.cached_tokens > again[0].usage.image_tokens // 2 > 0


@pytest.mark.parametrize("name", HEAR)
def test_reproducible(name: str) -> None:
    """Bit for bit what the request gets alone."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3)
    wanted = [job for job in asked(name) if job.get("audios") != b"RIFF"]
    settings: dict[str, Any] = {"reproducible": True, "max_rows": 4}
    with VLMBatcher(
        family(name).build(), PROCESSORS[name](name), caches=None, **settings
    ) as batcher:
        alone = [
            batcher.submit(**job, params=params).result(timeout=120).raise_for_error()
            for job in wanted
        ]
        handles = [batcher.submit(**job, params=params) for job in reversed(wanted)]
        together = [handle.result(timeout=120) for handle in handles][::-1]
    assert [result.logprobs for result in alone] == [
        result.logprobs for result in together
    ]


def test_one_sample_and_ten_minutes() -> None:
    """What is too short or too long for a family says so, and harms nobody."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    one, long = (
        Audio(np.zeros(count, np.float32), rate=16_000) for count in (1, 600 * 16_000)
    )
    with VLMBatcher(
        family("gemma4").build(), gemma("gemma4"), limits=Limits(audio_seconds=601)
    ) as batcher:
        asks: list[dict[str, Any]] = [
            {"audios": one},
            {"audios": long},
            {"audios": [long, long]},
            {},
        ]
        results = [
            handle.result(timeout=120)
            for handle in [
                batcher.submit(prompt="a", params=params, **ask)
                for ask in asks[:2] + asks[3:]
            ]
        ]
        with pytest.raises(
            InvalidAudio, match=r"1,200.0 s of sound; at most 601 s are read"
        ):
            batcher.submit(prompt="a", **asks[2])
        with pytest.raises(InvalidAudio, match="has 602 recordings; at most 601 are"):
            batcher.submit(prompt="a", audios=[one] * 602)
    assert (
        results[0].error is not None
        and "so short that the model's processor makes nothing of it"
        in results[0].error
    )
    assert (
        results[1].error is not None
        and "gemma4 hears 30 s of a recording: cut it into several" in results[1].error
    )
    assert results[2].ok
    count = 600 * 16_000
    inputs = processing("qwen3_omni_moe").inputs(
        processing("qwen3_omni_moe").render("what?", 0, 0, 1),
        [],
        [],
        [Sound(np.zeros(count, np.float32), 600.0)],
    )
    assert (
        int(
            (
                np.array(inputs["input_ids"])
                == shared_adapter("qwen3_omni_moe").config.audio_token_id
            ).sum()
        )
        == 7800
    )


@pytest.mark.parametrize(("name", "shortest"), [("minicpmo", 1_281), ("phi4mm", 400)])
def test_the_shortest_that_a_family_hears(name: str, shortest: int) -> None:
    made = processing(name)

    def inputs(*counts: int) -> Any:
        sounds = [
            Sound(np.zeros(count, np.float32), count / 16_000) for count in counts
        ]
        return made.inputs(made.render("what?", 0, 0, len(sounds)), [], [], sounds)

    assert shared_adapter(name).encode(inputs(shortest)).image_tokens == 1
    for counts in ((1,), (shortest - 1,), (8_000, 1)):
        with pytest.raises(
            InvalidPrompt,
            match="so short that the model's processor makes nothing of it",
        ):
            inputs(*counts)


@pytest.mark.parametrize("name", ["minicpmo", "phi4mm"])
def test_ten_minutes_are_heard_whole(name: str) -> None:
    made, count = processing(name), 600 * 16_000
    inputs = made.inputs(
        made.render("what?", 0, 0, 1),
        [],
        [],
        [Sound(np.zeros(count, np.float32), 600.0)],
    )
    given = int(np.isin(np.array(inputs["input_ids"]), marks_of(name)).sum())
    assert given == {"minicpmo": 6000, "phi4mm": 7500}[name]
    shared_adapter(name).check_inputs(inputs)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_a_gemmas_template_has_media_where_the_chat_has_them(name: str) -> None:
    """With a template of the processor's own, as from a folder: mlx-vlm's processor makes the messages anew."""
    processor = PROCESSORS[name](name)
    processor.chat_template = processor.tokenizer.chat_template
    adapter = shared_adapter(name)
    made = Processing(
        adapter.processor(processor), adapter.config, adapter.video_sampling
    )
    words: list[Any] = [{"type": "text", "text": word} for word in "abc"]
    first: dict[str, Any] = {
        "role": "user",
        "content": [{"type": "audio"}, words[0], {"type": "video"}],
    }
    second: dict[str, Any] = {
        "role": "user",
        "content": [words[1], {"type": "audio"}, {"type": "image"}, words[2]],
    }
    chat = [first, {"role": "assistant", "content": "x"}, second]
    assert made.render(chat, 1, 1, 2) == "<|audio|>a<|video|>xb<|audio|><|image|>c!"
    assert made.render("a", 1, 1, 1) == "<|image|><|video|><|audio|>a!"
    assert made.render("a", 0, 0, 0) == "a!"


@pytest.mark.parametrize("name", ["minicpmo", "phi4mm"])
def test_media_are_where_a_chat_has_them(name: str) -> None:
    """Of families whose templates take texts alone."""
    parts = [{"type": kind} for kind in ("audio", "image", "audio")]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [parts[0], {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [*parts[1:], {"type": "text", "text": "c"}]},
    ]
    wanted = {
        "minicpmo": "<audio>./</audio>\nab<image>./</image>\n<audio>./</audio>\nc!",
        "phi4mm": "<|audio_1|>ab<|image_1|><|audio_2|>c!",
    }
    assert processing(name).render(chat, 1, 0, 2) == wanted[name]


@pytest.mark.parametrize("name", HEAR)
def test_places_that_do_not_fit_are_refused(name: str) -> None:
    """mlx-vlm takes features from the beginning again, leaves some out, or makes some up."""
    adapter, inputs = shared_adapter(name), family(name).audio(3, 1)  # type: ignore[misc]
    (marker,) = marks_of(name)
    ids = inputs["input_ids"]
    first = int(np.flatnonzero(ids[0] == marker)[0])

    def encode(ids: np.ndarray, **changed: Any) -> None:
        given = {**inputs, **changed, "input_ids": ids}
        adapter.encode(
            to_mx({key: value for key, value in given.items() if value is not None})
        )

    encode(ids)
    for wrong in (np.delete(ids, first, axis=1), np.insert(ids, first, marker, axis=1)):
        with pytest.raises(InvalidRequest, match="placeholder tokens"):
            encode(wrong)
    with pytest.raises(
        InvalidPrompt,
        match=r"need .*placeholder tokens; the prompt has 0|belong to position",
    ):
        encode(ids[:, ids[0] != marker])
    # the same id stands for a slice's features: without media it is text
    if name == "minicpmo":
        return
    silent = {key: None for key in inputs if key != "input_ids"}
    with pytest.raises(
        InvalidPrompt,
        match=r"for recordings, and there is no recording|is beyond the model",
    ):
        encode(ids, **silent)


def test_a_family_that_does_not_hear_says_why() -> None:
    with VLMBatcher(assets.default_checkpoint()) as batcher:
        with pytest.raises(
            InvalidAudio,
            match="qwen2_vl takes no recordings: its model has no part that hears",
        ):
            batcher.submit(prompt="what?", audios=written(tone(0.1)))
        assert batcher.submit(prompt="count to 3").result(timeout=60).ok
    said = "gemma4 takes no recordings: this checkpoint has no part that hears"
    silent = VLMBatcher(family("gemma4_experts").build(), gemma("gemma4"))
    with silent, pytest.raises(InvalidAudio, match=said):
        silent.submit(prompt="what?", audios=written(tone(0.1)))


# Jobs and the server -------------------------------------------------------------------------------------------------


def test_folders_and_tables_of_recordings(tmp_path: Path) -> None:
    for name in ("b.flac", "a.wav", "c.mp3"):
        (tmp_path / name).write_bytes(written(tone(0.1), Path(name).suffix[1:].upper()))
    (tmp_path / "notes.txt").write_text("x")
    sources, found = open_sources([str(tmp_path)], Reading(audios=True))
    rows = [row for source in sources for row in source.rows()]
    assert [Path(row.id).name for row in rows] == ["a.wav", "b.flac", "c.mp3"]
    assert [row.audios for row in rows] == [(Audio(row.id),) for row in rows]
    assert found.skipped == {".txt": 1}
    assert all(files_of(row) == [row.id] for row in rows)
    with pytest.raises(InvalidJob, match="audios takes them"):
        open_sources([str(tmp_path)], Reading())
    table = tmp_path / "table.jsonl"
    lines: list[dict[str, Any]] = [
        {"audio": "a.wav", "prompt": "what?"},
        {"audios": ["a.wav", "b.flac"], "prompt": "which?"},
        {"path": "c.mp3", "prompt": "and this?"},
        {"audio": {"array": [0.0] * 9, "sampling_rate": 8000}, "prompt": "samples"},
    ]
    table.write_text("\n".join(map(json.dumps, lines)))
    (source,), _ = open_sources([str(table)], Reading())
    given = [row.audios for row in source.rows()]
    assert [row.error for row in source.rows()] == [None] * 4
    assert [len(audios) for audios in given] == [1, 2, 1, 1]
    assert given[0] == (Audio(str(tmp_path / "a.wav")),) == given[1][:1]
    assert given[3][0].rate == 8000


def test_a_table_is_answered(tmp_path: Path) -> None:
    import pyarrow

    data = written(tone(0.3))
    table = pyarrow.table(
        {
            "audio": [
                {"bytes": data, "path": "a.wav"},
                {"bytes": b"RIFF", "path": "b.wav"},
            ]
        }
    )
    with VLMBatcher(family("gemma4").build(), gemma("gemma4")) as batcher:
        answered = map_table(
            batcher, table, "what?", params={"max_tokens": 3, "ignore_eos": True}
        )
        one = batcher.submit(
            prompt="what?", audios=data, params={"max_tokens": 3, "ignore_eos": True}
        )
        assert answered["answer"][0].as_py() == one.result(timeout=60).text
    assert answered["answer_tokens"].to_pylist() == [3, 0]
    assert "cannot be opened" in answered["answer_error"][1].as_py()


@pytest.mark.parametrize("name", ["gemma4", "minicpmo", "phi4mm"])
def test_the_server_hears_what_openais_client_sends(name: str) -> None:
    data = base64.b64encode(written(tone(0.3))).decode()
    words = {"type": "text", "text": "what?"}
    heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    with serving(
        lambda: VLMBatcher(family(name).build(), PROCESSORS[name](name))
    ) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        assert client.models.list().data[0].model_dump()["audio"] is True
        content: Any = [heard, words]
        answer = client.chat.completions.create(
            model="qwen2_vl",
            messages=[{"role": "user", "content": content}],
            max_tokens=4,
            logprobs=True,
        )
        other = running.chat(
            [
                {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{data}"},
                words,
            ],
            max_tokens=4,
        )
        assert (
            other.json["choices"][0]["message"]["content"]
            == answer.choices[0].message.content
        )
        silent = running.chat([words], max_tokens=4)
        assert (
            silent.json["usage"]["prompt_tokens"] < other.json["usage"]["prompt_tokens"]
        )
        bad = running.chat(
            [{**heard, "input_audio": {"data": "AAAA", "format": "wav"}}, words]
        )
        assert (bad.status, bad.error["param"]) == (400, "messages")
        assert (
            "no recording of wav, flac, mp3, ogg, aiff, caf or aac"
            in bad.error["message"]
        )
        many = running.chat([heard] * 5)
        assert (many.status, many.error["message"]) == (
            400,
            "5 recordings; at most 4 go into one request",
        )


@pytest.mark.parametrize(
    "spec",
    [spec for spec in families() if not spec.audio],
    ids=lambda spec: spec.family,
)
def test_every_other_family_has_a_reason(spec: Any) -> None:
    assert spec.no_audio
