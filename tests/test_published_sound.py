"""Folders in the published layouts of families that hear and that transformers saves otherwise, or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from tests.checkpoints import names, write_checkpoint
from tests.harness import shared_adapter
from tests.hearing import PROCESSORS
from tests.test_audio import RATE, asked, tone
from tests.test_layouts import REFERENCES, STEPS, TOLERANCE, answers, loaded
from tests.zoo import PLAIN, apart, family, gemma3n, phi4mm, recorded_requests
from tests.zoo._build import weights_of
from vlm_batch import Audio, InvalidAudio, Request, SamplingParams, VLMBatcher
from vlm_batch.arrays import as_mlx
from vlm_batch.cli.main import main as cli
from vlm_batch.cli.verifying import verify
from vlm_batch.models import adapter_for

PHI4 = "model.embed_tokens_extend"
#: Of Gemma 4's 128 bands the lowest are narrower than a frequency, in the published extractor, too.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
#: Of a zoo's weight: the beginning of its name, and of the published one's.
PHI4_NAMES = (
    ("language_model.", ""),
    ("vision_tower.vision_tower.", f"{PHI4}.image_embed.img_processor."),
    ("mm_projector.", f"{PHI4}.image_embed.img_projection."),
    ("audio_encoder.", f"{PHI4}.audio_embed.encoder."),
    ("audio_projection.", f"{PHI4}.audio_embed.audio_projection."),
)
PARTS = (
    (".proj_", "."),
    (".conv_0.", ".conv.0."),
    *(
        (f".dw_pw_layers.{at}.{part}.", f".conv.{3 * at + 2 + (part == 'pw')}.")
        for at in (0, 1)
        for part in ("dw", "pw")
    ),
    (".net_0.", ".net.0."),
    (".net_2.", ".net.2."),
)
MINICPMO_NAMES = (
    ("language_model.", "llm."),
    ("vision_tower.", "vpm."),
    ("audio_tower.", "apm."),
    ("audio_projection_layer.", "audio_projection_layer."),
    ("resampler.", "resampler."),
)


def renamed(path: str, names: tuple[tuple[str, str], ...]) -> str:
    ours, theirs = next(pair for pair in names if path.startswith(pair[0]))
    return theirs + path.removeprefix(ours)


def as_torch_has_it(path: str, value: np.ndarray) -> np.ndarray:
    """Convolutions have their channels second, and those over one place are none in mlx-vlm."""
    if "ext_pw_conv_1d.weight" in path:
        return value[..., None]
    if path.endswith((".b1", ".b2")):
        return value[None, :, None]
    is_convolution = value.ndim == 4 or (value.ndim == 3 and "conv" in path)
    return np.moveaxis(value, -1, 1) if is_convolution else value


def phi4mm_weights(zoo: Any) -> dict[str, np.ndarray]:
    """The layers' own weights, and both adapters beside them."""
    found = {}
    for path, value in weights_of(zoo).items():
        name = renamed(path, PHI4_NAMES)
        for ours, theirs in PARTS if "audio" in path else ():
            name = name.replace(ours, theirs)
        if path not in zoo._base_weights:
            found[name] = as_torch_has_it(path, value)
            continue
        stem = name.removesuffix(".weight")
        found[f"{stem}.base_layer.weight"] = np.array(zoo._base_weights[path])
        for kind in ("vision", "speech"):
            found[f"{stem}.lora_A.{kind}.weight"] = np.array(
                getattr(zoo, f"_{kind}_lora_a")[path]
            )
            found[f"{stem}.lora_B.{kind}.weight"] = np.array(
                getattr(zoo, f"_{kind}_lora_b")[path]
            )
    return found


def phi4mm_config(zoo: Any) -> dict[str, Any]:
    ours = zoo.config
    names = (
        *(
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
            "num_attention_heads",
            "rope_theta",
        ),
        *(
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_scaling",
            "max_position_embeddings",
            "partial_rotary_factor",
        ),
        *(
            "original_max_position_embeddings",
            "tie_word_embeddings",
            "audio_processor",
            "mm_hidden_size",
        ),
    )
    adapters = {
        f"{kind}_lora": {"r": rank, "lora_alpha": int(rank * scale)}
        for kind, (rank, scale) in phi4mm.RANKS.items()
    }
    sizes = {"max_num_patches": phi4mm.MOST_PATCHES, "min_num_patches": 4}
    vision = {
        name: value
        for name, value in vars(ours.vision_config).items()
        if name != "model_type"
    }
    return {
        "model_type": "phi4mm",
        "eos_token_id": ours.eos_token_id,
        **{name: getattr(ours, name) for name in names},
        **adapters,
        **sizes,
        "vision_config": vision,
    }


def minicpmo_weights(zoo: Any) -> dict[str, np.ndarray]:
    found = {
        renamed(path, MINICPMO_NAMES): as_torch_has_it(path, value)
        for path, value in weights_of(zoo).items()
    }
    for kind in ("weight", "bias"):
        parts = [found.pop(f"resampler.attn.{name}_proj.{kind}") for name in "qkv"]
        found[f"resampler.attn.in_proj_{kind}"] = np.concatenate(parts)
    path = "vpm.embeddings.patch_embedding.weight"
    return found | {
        path: np.moveaxis(
            weights_of(zoo)["vision_tower.embeddings.patch_embedding.weight"], -1, 1
        )
    }


def minicpmo_config(zoo: Any) -> dict[str, Any]:
    ours = zoo.config
    names = (
        "query_num",
        "image_size",
        "patch_size",
        "audio_pool_step",
        "audio_chunk_length",
        "eos_token_id",
    )
    text = {
        name: value
        for name, value in vars(ours.text_config).items()
        if name != "model_type"
    }
    parts = {
        f"{kind}_config": vars(getattr(ours, f"{kind}_config"))
        for kind in ("vision", "audio")
    }
    same = {name: getattr(ours, name) for name in names}
    return {
        "model_type": "minicpmo",
        "init_tts": False,
        "tie_word_embeddings": False,
        **text,
        **same,
        **parts,
    }


WRITTEN: dict[str, Any] = {
    "phi4mm": (phi4mm_weights, phi4mm_config),
    "minicpmo": (minicpmo_weights, minicpmo_config),
}


def write(folder: Path, name: str, **changed: Any) -> Path:
    """A family's folder with its processor's files, whose tokenizer is that of the tests of processors."""
    zoo, processor = family(name).build(), PROCESSORS[name](name)
    if name in WRITTEN:
        weights, config = WRITTEN[name]
        write_model(folder, weights(zoo), config(zoo) | changed, "pt")
    elif name == "gemma3n":  # as mlx-vlm saves it
        write_model(folder, weights_of(zoo), gemma3n_config(zoo), "mlx")
    else:
        write_checkpoint(folder, name)
    # whose mark has a number far beyond the others: mlx-vlm has no detokeniser of bytes for that
    if name == "phi4mm":
        processor.tokenizer.save_pretrained(folder)
    else:
        write_tokenizer(folder, processor)
    write_processor(folder, name, processor)
    return folder


def write_model(
    folder: Path, weights: dict[str, np.ndarray], config: dict[str, Any], form: str
) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arrays = {key: mx.array(value) for key, value in weights.items()}
    mx.save_safetensors(
        str(folder / "model.safetensors"), arrays, metadata={"format": form}
    )


def gemma3n_config(zoo: Any) -> dict[str, Any]:
    """With the published number of features of a recording, and without what mlx-vlm never reads."""
    found = asdict(zoo.config) | {"audio_soft_tokens_per_image": 188}
    del found["vision_soft_tokens_per_image"]
    seen = ("model_type", "hidden_size", "vocab_size", "vocab_offset")
    return found | {
        "vision_config": {name: found["vision_config"][name] for name in seen}
    }


def write_processor(folder: Path, name: str, processor: Any) -> None:
    """The settings of what makes pictures and recordings arrays, in the files where the public loader looks for them."""
    pictures: dict[str, dict[str, Any]] = {
        "qwen3_omni_moe": {"patch_size": 4, "min_pixels": 64, "max_pixels": 640}
    }
    pictures["gemma3n"] = {"image_processor_type": "SiglipImageProcessor"}
    whole: dict[str, dict[str, Any]] = {
        "gemma3n": {"audio_seq_length": 188, "image_seq_length": 6}
    }
    sizes = {"patch_size": 4, "max_soft_tokens": 70}
    whole["gemma4"] = {"image_processor": {**sizes, "pooling_kernel_size": 2}}
    whole["gemma4_unified"] = {
        "image_processor": {**sizes, "pooling_kernel_size": 1, "model_patch_size": 4}
    }
    grey = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    pictures["nemotron_h_nano_omni"] = {
        **grey,
        "patch_size": 4,
        "min_num_patches": 4,
        "max_num_patches": 36,
    }
    if name == "minicpmo":
        WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
        part = processor.image_processor
        names = ("patch_size", "scale_resolution", "image_feature_size")
        pictures[name] = {one: getattr(part, one) for one in names}
    elif name in ("gemma3n", "qwen3_omni_moe"):
        processor.feature_extractor.save_pretrained(folder)
    if name in pictures:
        path = folder / "preprocessor_config.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | pictures[name]), encoding="utf-8")
    if name in whole:
        (folder / "processor_config.json").write_text(
            json.dumps(whole[name]), encoding="utf-8"
        )


def write_tokenizer(folder: Path, processor: Any) -> None:
    """The same ids by bytes, and no merges: what the published folders' class of tokenizers reads. With the marks by name."""
    letters: PreTrainedTokenizerFast = processor.tokenizer
    marks = sorted(
        (at, str(token))
        for at, token in letters.added_tokens_decoder.items()
        if at >= PLAIN
    )
    bytes_as = {
        code: chr(code) if 33 <= code < 127 else chr(256 + code - 94 * (code >= 127))
        for code in range(PLAIN)
    }
    core = Tokenizer(
        BPE(
            {letter: code for code, letter in bytes_as.items()}
            | {word: at for at, word in marks},
            [],
        )
    )
    core.pre_tokenizer, core.decoder = (
        ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    named = {"pad_token": bytes_as[0], "eos_token": bytes_as[4], "unk_token": "?"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    made.add_special_tokens({"additional_special_tokens": [word for _, word in marks]})
    made.chat_template = letters.chat_template
    made.save_pretrained(folder)
    by_name = {
        name: mark
        for name, mark in vars(letters).items()
        if name.endswith("_token") and name[0] != "_"
    }
    by_name |= {
        name: vars(processor)[name]
        for name in ("boa_token", "eoa_token")
        if name in vars(processor)
    }
    if by_name:
        path = folder / "tokenizer_config.json"
        path.write_text(
            json.dumps(
                {**json.loads(path.read_text()), "extra_special_tokens": by_name}
            ),
            encoding="utf-8",
        )


@pytest.mark.parametrize("name", WRITTEN)
def test_a_published_folder_answers_as_transformers(name: str, tmp_path: Path) -> None:
    found = answers(name, loaded(write(tmp_path / "model", name)))
    with np.load(REFERENCES / f"{name}.npz") as recorded:
        assert found.keys() == recorded_requests(family(name)).keys()
        for key, trace in found.items():
            assert trace.tokens == recorded[f"{key}/tokens"].tolist(), key
            assert apart(trace.logprobs, recorded[f"{key}/logprobs"]) < TOLERANCE, key


# the folder is made for its sound
@pytest.mark.filterwarnings("ignore:.* has neither preprocessor_config.json")
@pytest.mark.parametrize(
    "name", [*WRITTEN, *(name for name in PROCESSORS if name in names())]
)
def test_a_published_folder_hears(name: str, tmp_path: Path) -> None:
    """Processor and all, by its path: what the tiny model answers with a processor that was given to it."""
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    jobs = [job for job in asked(name) if job.get("audios") != b"RIFF"]

    def told(batcher: VLMBatcher) -> list[tuple[int, ...]]:
        handles = [batcher.submit(**job, params=params) for job in jobs]
        return [
            handle.result(timeout=120).raise_for_error().token_ids for handle in handles
        ]

    with VLMBatcher(family(name).build(), PROCESSORS[name](name)) as batcher:
        wanted = told(batcher)
    with VLMBatcher(write(tmp_path / "model", name)) as batcher:
        assert batcher.spec.audio
        assert told(batcher) == wanted


@pytest.mark.parametrize("name", ["gemma3n", "qwen3_omni_moe"])
def test_verify_with_recordings(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a user runs on a folder. mlx-vlm's own answers are others where something of it is corrected, which is said."""
    if name == "gemma3n":  # whose tower cannot be made tiny
        for module in ("mlx_vlm.models.gemma3n", "mlx_vlm.models.gemma3n.gemma3n"):
            monkeypatch.setattr(f"{module}.VisionModel", gemma3n._Nothing)
        monkeypatch.setattr("vlm_batch.cli.verify.sample_images", list)
    folder = write(tmp_path / "model", name)
    sounds = tmp_path / "sounds"
    said = tmp_path / "found.json"
    sounds.mkdir()
    for at, kind in enumerate(("flac", "ogg", "wav")):
        soundfile.write(
            sounds / f"{at}.{kind}", tone(0.4 + 0.15 * at, pitch=300.0 + 200 * at), RATE
        )
    command = [
        "verify",
        "--model",
        str(folder),
        "--audios",
        str(sounds),
        "--max-tokens",
        "12",
        "--json",
        str(said),
    ]
    assert cli(command) == 0, capsys.readouterr()
    (found,) = json.loads(said.read_text())["models"]
    rows = {one["name"]: one for one in found["comparisons"]}
    assert all(
        one["requests"] == (5 if name == "gemma3n" else 11) for one in rows.values()
    )
    is_right = name == "qwen3_omni_moe"
    assert rows["mlx-vlm alone : alone"]["verdict"] == (
        "same tokens" if is_right else "other answers"
    )
    table = capsys.readouterr().out
    assert ("mlx-vlm answers otherwise. What is corrected in" in table) == (
        not is_right
    )
    rows = {said: one for said, one in rows.items() if one["promised"]}
    assert len(rows) == 4 and all(
        one["identical"] == one["requests"] for one in rows.values()
    )


@pytest.mark.parametrize(
    "name", sorted(PROCESSORS.keys() - {"gemma3n", "qwen3_omni_moe"})
)
def test_what_verify_finds_in_the_other_families(name: str) -> None:
    """The models at hand, by what the command calls. muse_spark asks for Metal in mlx-vlm, which the table says."""
    sounds = [
        Request(prompt="what?", audios=[Audio(tone(0.4, pitch=300.0 * at), rate=RATE)])
        for at in (1, 2)
    ]
    found = verify(
        family(name).build(),
        PROCESSORS[name](name),
        [*sounds, Request(prompt="words")],
        name=name,
        max_tokens=6,
    )
    assert found.ok, found.text()
    promised = [one for one in found.comparisons if one.promised]
    assert len(promised) == 4 and all(
        one.identical == one.requests == 3 for one in promised
    )


def test_a_conversion_that_lost_its_speech_adapter_says_so(tmp_path: Path) -> None:
    """As mlx-vlm saves a loaded model without making it of few bits: with one adapter merged in, and no other."""
    folder = write(tmp_path / "model", "phi4mm")
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {
            path: mx.array(value)
            for path, value in weights_of(family("phi4mm").build()).items()
        },
        metadata={"format": "mlx"},
    )
    with VLMBatcher(folder) as batcher:
        assert batcher.submit(prompt="words").result(timeout=60).ok
        with pytest.raises(
            InvalidAudio, match=r"takes no recordings: .* its speech adapter is lost"
        ):
            batcher.submit(**asked("phi4mm")[0])


def test_prompts_of_other_adapters_share_no_keys() -> None:
    """The same words have other keys and values beside a picture, beside a recording, and by themselves."""
    adapter, tiny = shared_adapter("phi4mm"), family("phi4mm")
    assert tiny.audio is not None
    keys = [
        adapter.prompt_key(
            as_mlx(
                {**inputs, "input_ids": np.insert(inputs["input_ids"], 0, 5, axis=1)}
            )
        ).positions[0]
        for inputs in (
            tiny.text(1, 9),
            tiny.image(2, 1),
            tiny.audio(3, 1),
            tiny.text(4, 9),
            tiny.audio(5, 2),
        )
    ]
    assert [[bool((one == other).all()) for other in keys] for one in keys] == [
        [True, False, False, True, False],
        [False, True, False, False, False],
        [False, False, True, False, True],
        [True, False, False, True, False],
        [False, False, True, False, True],
    ]


def test_without_adapters_a_recording_is_another_beside_a_picture() -> None:
    """It goes through the other projection, so a prompt that begins with it shares nothing with one without a picture."""
    model, tiny = family("phi4mm").build(), family("phi4mm")
    model.pop("_base_weights", None)
    adapter = adapter_for("phi4mm")(model)
    assert not vars(adapter)["_scales"] and adapter.spec.audio
    assert tiny.audio is not None
    heard, seen = tiny.audio(3, 1), tiny.image(2, 1)
    ids = np.concatenate([heard["input_ids"], seen["input_ids"]], axis=1)
    alone, beside = as_mlx(heard), as_mlx({**seen, **heard, "input_ids": ids})
    length = heard["input_ids"].shape[1]
    embeds = [adapter.encode(one).inputs_embeds[:, :length] for one in (alone, beside)]
    assert np.abs(np.array(embeds[0] - embeds[1])).max() > 0.01
    keys = [adapter.prompt_key(one).positions for one in (alone, beside)]
    assert not (keys[0][:length] == keys[1][:length]).all(axis=1).any()


def test_the_callers_model_keeps_its_weights() -> None:
    model = family("phi4mm").build()
    before = weights_of(model)
    with VLMBatcher(model, PROCESSORS["phi4mm"]("phi4mm")) as batcher:
        for job in (*asked("phi4mm")[:3], asked("phi4mm")[-1]):
            assert (
                batcher.submit(**job, params=SamplingParams(max_tokens=2))
                .result(timeout=60)
                .ok
            )
    assert model._active_lora == "vision"
    assert all(
        np.array_equal(value, before[path]) for path, value in weights_of(model).items()
    )
