"""The families' own processors, from file to answer: letters for words, so that what a processor writes can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.harness import shared_adapter
from tests.zoo import family
from tests.zoo._types import PLAIN
from tests.zoo.llava_onevision import PINPOINTS
from vlm_batch import InvalidVideo, Result, SamplingParams, Video, VLMBatcher
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.videos import load_video
from vlm_batch.models import families

QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}!"
)
MINICPM = (
    "<image>",
    "</image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
)
MINICPM_47 = (
    *MINICPM[:3],
    "<slice>",
    "</slice>",
    "<newline>",
    "<|video_pad|>",
    "<image_id>",
    "</image_id>",
)
MINICPM_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type }}_pad|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}!"
)
GEMMA = ("<|image|>", "<|audio|>", "<|begin|>", "<|end|>", "<|video|>")
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}OPEN{{ part.type }}CLOSE{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}!"
)


def letters(markers: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are ASCII codes, and the markers after them as in the zoo."""
    core = Tokenizer(
        models.WordLevel({chr(code): code for code in range(PLAIN)}, unk_token="?")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="\0", eos_token="\4", unk_token="?"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    tokenizer.chat_template = template
    assert tokenizer.convert_tokens_to_ids(list(markers)) == list(
        range(PLAIN, PLAIN + len(markers))
    )
    return tokenizer


def qwen(kind: str) -> Any:
    from mlx_vlm.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from mlx_vlm.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 640}
    parts = {
        "image_processor": upstream.Qwen3VLImageProcessor(**sizes),
        "tokenizer": letters(QWEN, QWEN_TEMPLATE),
        "video_processor": upstream.Qwen3VLVideoProcessor(
            **{**sizes, "max_pixels": 640 if kind[:5] == "qwen2" else 2560}
        ),
    }
    made = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}.get(
        kind, upstream.Qwen3VLProcessor
    )
    return made(**parts)


def omni(kind: str) -> Any:
    from tests.hearing import qwen as made  # which imports this module

    return made(kind)


def gemma(kind: str) -> Any:
    from mlx_vlm.models.gemma4 import processing_gemma4 as upstream
    from mlx_vlm.models.gemma4_unified import processing_gemma4_unified as unified

    tokenizer = letters(
        GEMMA, PLAIN_TEMPLATE.replace("OPEN", "<|").replace("CLOSE", "|>")
    )
    names = ("image_token", "audio_token", "boi_token", "eoi_token", "video_token")
    for name, token in zip(names, GEMMA, strict=True):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    if kind == "gemma4":
        sizes: dict[str, Any] = {
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        }
        return upstream.Gemma4Processor(
            upstream.Gemma4ImageProcessor(**sizes),
            tokenizer,
            upstream.Gemma4VideoProcessor(**sizes),
        )
    sizes = {
        "patch_size": 4,
        "pooling_kernel_size": 1,
        "model_patch_size": 4,
        "max_soft_tokens": 70,
    }
    return unified.Gemma4UnifiedProcessor(
        unified.Gemma4UnifiedImageProcessor(**sizes),
        tokenizer,
        unified.Gemma4UnifiedVideoProcessor(**sizes),
    )


def llava_onevision(kind: str) -> Any:
    from mlx_vlm.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = letters(
        ("<image>", "<video>"),
        PLAIN_TEMPLATE.replace("OPEN", "<").replace("CLOSE", ">"),
    )
    pictures = LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS
    )
    return LlavaOnevisionProcessor(
        pictures,
        tokenizer,
        num_image_tokens=16,
        vision_aspect_ratio="anyres_max_2",
        video_size=(16, 16),
    )


def minicpm(kind: str) -> Any:
    from mlx_vlm.models.minicpmv4_6 import processing_minicpmv4_6 as upstream
    from mlx_vlm.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

    tokenizer = letters(
        MINICPM if kind == "minicpmv4_6" else MINICPM_47, MINICPM_TEMPLATE
    )
    sizes: dict[str, Any] = {
        "scale_resolution": 32,
        "patch_size": 4,
        "slice_mode": False,
        "use_image_id": False,
    }
    made = upstream.MiniCPMVProcessor if kind == "minicpmv4_6" else MiniCPMV4_7Processor
    return made(
        upstream.MiniCPMVImageProcessor(**sizes),
        tokenizer,
        video_processor=upstream.MiniCPMVVideoProcessor(**sizes),
        chat_template=MINICPM_TEMPLATE,
    )


@dataclass(frozen=True)
class Case:
    """A family's processor, and what it makes of two seconds of 32 x 24 pixels at five frames a second."""

    processor: Callable[[str], Any]
    text: str  # the prompt's text between the question's ends, placeholders as "#"
    frames: int


#: As transformers' own processors write it (5.23, given the same frames with their metadata; Qwen's time steps hold two of
#: them). Qwen3-VL's as 4.57 wrote it, with which the model came out: from 5.10 on, an empty pair of markers stays around.
CASES = {
    "qwen2_vl": Case(qwen, "<|vision_start|>" + "#" * 12 + "<|vision_end|>", 4),
    "qwen2_5_vl": Case(qwen, "<|vision_start|>" + "#" * 12 + "<|vision_end|>", 4),
    **{
        name: Case(
            qwen,
            f"<0.3 seconds><|vision_start|>{'#' * 6}<|vision_end|><1.5 seconds><|vision_start|>{'#' * 6}<|vision_end|>",
            4,
        )
        for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
    },
    "gemma4": Case(
        gemma,
        " ".join(f"00:0{i // 5} <|begin|>{'#' * 63}<|end|>" for i in range(10)),
        10,
    ),
    "gemma4_unified": Case(
        gemma,
        " ".join(f"00:0{i // 5} <|begin|>{'#' * 63}<|end|>" for i in range(10)),
        10,
    ),
    "qwen3_omni_moe": Case(omni, "<|vision_start|>" + "#" * 280 + "<|vision_end|>", 4),
    **dict.fromkeys(
        ("minicpmv4_6", "minicpmv4_7"),
        Case(minicpm, f"<image>{'#' * 4}</image>" * 2, 2),
    ),
    "llava_onevision": Case(llava_onevision, "#" * (10 * 4 + 1), 10),
}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "film.avi"
    writer = cv2.VideoWriter(
        str(path),
        cv2.CAP_FFMPEG,
        cv2.VideoWriter_fourcc(*"FFV1"),  # type: ignore[attr-defined]
        5.0,
        (32, 24),
    )
    for index in range(10):
        frame = np.full((24, 32, 3), 20 * index, np.uint8)
        frame[index : index + 6, 2 * index : 2 * index + 6] = (0, 0, 255)
        writer.write(frame)
    writer.release()
    return path


@cache
def processing(name: str) -> Processing:
    adapter = shared_adapter(name)
    return Processing(
        adapter.processor(CASES[name].processor(name)),
        adapter.config,
        adapter.video_sampling,
    )


def test_every_family_with_videos_has_a_case() -> None:
    assert set(CASES) == {spec.family for spec in families() if spec.video}


@pytest.mark.parametrize("name", CASES)
def test_what_a_processor_makes_of_a_video(name: str, film: Path) -> None:
    made, case = processing(name), CASES[name]
    clip = load_video(film, made.sampling)
    assert len(clip.indices) == case.frames
    inputs = made.inputs(made.render("what?", 0, 1), [], [clip])
    video_id = made.tokenizer.convert_tokens_to_ids(made.processor.video_token)
    ids = np.array(inputs["input_ids"])[0].tolist()
    text = "".join(
        "#" if token == video_id else made.tokenizer.convert_ids_to_tokens(token)
        for token in ids
    )
    assert text in (f"{case.text}what?!", f"{case.text}what?!<|im_start|>assistant\n")
    encoded = shared_adapter(name).encode(inputs)
    assert encoded.length == len(ids)
    assert encoded.image_tokens == text.count("#")


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_job_through_the_familys_own_processor(
    name: str, film: Path, tmp_path: Path
) -> None:
    """Videos, pictures and texts of one batch, each answered as if it were alone."""
    picture = Image.fromarray(
        np.random.RandomState(3).randint(0, 255, (16, 16, 3), dtype=np.uint8)
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    jobs: list[dict[str, Any]] = [
        {"prompt": "what?", "videos": film},
        {"prompt": "a picture", "images": picture},
        {"prompt": "words only"},
        {"prompt": "both", "videos": Video(film, num_frames=4), "images": picture},
        {"prompt": "none", "videos": tmp_path / "nowhere.mp4"},
        {"prompt": "frames", "videos": Video([picture] * 3, fps=1)},
    ]

    def answers(batcher: VLMBatcher) -> list[Result]:
        return [
            handle.result(timeout=120)
            for handle in [batcher.submit(**job, params=params) for job in jobs]
        ]

    with VLMBatcher(
        family(name).build(), CASES[name].processor(name), max_rows=1, caches=None
    ) as batcher:
        alone = answers(batcher)
    with VLMBatcher(
        family(name).build(), CASES[name].processor(name), max_rows=4
    ) as batcher:
        together, again = answers(batcher), answers(batcher)
    for one, other in zip(alone * 2, together + again, strict=True):
        assert (one.token_ids, one.error, one.video_sizes) == (
            other.token_ids,
            other.error,
            other.video_sizes,
        )
        for before, after in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(before.logprob - after.logprob) < 1e-4
    assert [result.ok for result in together] == [True, True, True, True, False, True]
    assert isinstance(together[4].exception, InvalidVideo)
    assert together[3].video_sizes == ((4, 32, 24),)
    assert together[0].token_ids != together[5].token_ids
    if shared_adapter(name).spec.no_prefix_reuse is None:
        # the video was not seen again
        assert again[0].usage.cached_tokens > again[0].usage.image_tokens // 2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma4"])
def test_the_same_frames_at_another_rate_are_another_video(
    name: str, film: Path
) -> None:
    """Nothing that was kept of the one is taken for the other."""
    frames = load_video(film).frames
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    asked: list[dict[str, Any]] = [
        {"prompt": "what?", "videos": Video(frames, fps=fps), "params": params}
        for fps in (4, 0.5, 4)
    ]

    def answers(**settings: Any) -> list[Result]:
        with VLMBatcher(
            family(name).build(), CASES[name].processor(name), **settings
        ) as batcher:
            return [
                batcher.submit(**ask).result(timeout=120).raise_for_error()
                for ask in asked
            ]

    cold, warm = answers(caches=None), answers()
    assert [result.token_ids for result in cold] == [
        result.token_ids for result in warm
    ]
    first, other = (result.logprobs for result in cold[:2])
    assert first and other and abs(first[0].logprob - other[0].logprob) > 1e-3
    assert warm[2].usage.cached_tokens > warm[1].usage.cached_tokens
