"""Processors of families that hear, with letters for words: for the tests of recordings."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.test_video_processors import GEMMA, PLAIN_TEMPLATE, letters
from tests.test_video_processors import gemma as silent_gemma
from tests.zoo import PLAIN
from tests.zoo.mimo_v2 import CHANNELS, CODES

QWEN = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_pad|>",
    "<|a|>",
    "<|/a|>",
)
GEMMA3N = (
    "<|eoi|>",
    "<|image|>",
    *(f"<|v{at}|>" for at in range(14)),
    "<|eoa|>",
    "<|audio|>",
)
QWEN_TEMPLATE = PLAIN_TEMPLATE.replace(
    "OPEN{{ part.type }}CLOSE",
    "{% if part.type == 'audio' %}<|a|><|audio_pad|><|/a|>{% else %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}",
)


#: Of a template that takes texts alone.
TEXTS_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}!"
MINICPMO = (
    *(
        "<unk>",
        "<image>",
        "</image>",
        "<|audio_start|>",
        "<|audio_end|>",
        "<slice>",
        "</slice>",
    ),
    *("<|spk_bos|>", "<|spk_eos|>", "<|tts_bos|>", "<|tts_eos|>", "<|listen|>"),
)
PHI4 = "<|endoftext11|>"


def gemma3n(kind: str, bands: int = 16, places: int = 6) -> Any:
    from mlx_vlm.models.gemma3n.processing_gemma3n import Gemma3nProcessor
    from transformers import Gemma3nAudioFeatureExtractor

    tokenizer = letters(
        GEMMA3N, PLAIN_TEMPLATE.replace("OPEN", "<|").replace("CLOSE", "|>")
    )
    named = {
        "image": "<|image|>",
        "audio": "<|audio|>",
        "boa": "[",
        "eoa": "<|eoa|>",
        "boi": "(",
        "eoi": "<|eoi|>",
    }
    for name, token in named.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    part = Gemma3nAudioFeatureExtractor(feature_size=bands)
    made = Gemma3nProcessor(
        None, None, tokenizer, audio_seq_length=places, image_seq_length=6
    )
    made.feature_extractor, made.chat_template = part, tokenizer.chat_template
    return made


def gemma(kind: str) -> Any:
    from mlx_vlm.models.gemma4.audio_feature_extractor import (
        Gemma4AudioFeatureExtractor,
    )
    from mlx_vlm.models.gemma4_unified.processing_gemma4_unified import (
        Gemma4UnifiedAudioFeatureExtractor,
    )

    made = silent_gemma(kind)
    is_unified = kind == "gemma4_unified"
    made.feature_extractor = (
        Gemma4UnifiedAudioFeatureExtractor()
        if is_unified
        else Gemma4AudioFeatureExtractor()
    )
    made.boa_token, made.eoa_token = GEMMA[2:4]
    return made


def qwen(kind: str, bands: int = 16) -> Any:
    from mlx_vlm.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        Qwen3OmniMoeProcessor,
    )
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream
    from transformers import WhisperFeatureExtractor

    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 640}
    tokenizer = letters(QWEN, QWEN_TEMPLATE)
    names = (
        "vision_bos",
        "vision_eos",
        "image",
        "video",
        "audio",
        "audio_bos",
        "audio_eos",
    )
    for name, token in zip(names, QWEN, strict=True):
        setattr(tokenizer, f"{name}_token", token)
    return Qwen3OmniMoeProcessor(
        image_processor=upstream.Qwen3VLImageProcessor(**sizes),
        video_processor=upstream.Qwen3VLVideoProcessor(**sizes),
        feature_extractor=WhisperFeatureExtractor(feature_size=bands),
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE,
    )


def minicpmo(kind: str) -> Any:
    from mlx_vlm.models.minicpmo.processing_minicpmo import (
        MiniCPMOImageProcessor,
        MiniCPMOProcessor,
    )
    from transformers import WhisperFeatureExtractor

    pictures = MiniCPMOImageProcessor(
        patch_size=4, scale_resolution=16, image_feature_size=4
    )
    return MiniCPMOProcessor(
        pictures,
        WhisperFeatureExtractor(feature_size=80),
        letters(MINICPMO, TEXTS_TEMPLATE),
    )


def phi4mm(kind: str) -> Any:
    from mlx_vlm.models.phi4mm import processing_phi4mm as upstream

    core = Tokenizer(
        models.WordLevel(
            {chr(code): code for code in range(PLAIN)} | {PHI4: 200_011}, unk_token="?"
        )
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="\0", eos_token="\4", unk_token="?"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [PHI4]})
    tokenizer.chat_template = TEXTS_TEMPLATE
    pictures = upstream.Phi4MMImageProcessor(
        patch_size=4, max_num_patches=12, min_num_patches=4
    )
    return upstream.Phi4MMProcessor(
        pictures,
        tokenizer,
        TEXTS_TEMPLATE,
        audio_processor=upstream.Phi4MMAudioFeatureExtractor(),
    )


def template(**marks: str) -> str:
    """A chat template that writes these words for media."""
    chosen = "".join(
        f"{{% if part.type == '{kind}' %}}{mark}{{% endif %}}"
        for kind, mark in marks.items()
    )
    return PLAIN_TEMPLATE.replace("OPEN{{ part.type }}CLOSE", chosen)


def inkling(kind: str) -> Any:
    from mlx_vlm.models.inkling.processing_inkling import (
        InklingImageProcessor,
        InklingProcessor,
    )

    image, audio = "<|image|>", "<|audio|>"
    tokenizer = letters(
        (image, audio, "<|begin|>"), template(image=image, audio=f"<|begin|>{audio}")
    )
    pictures = InklingImageProcessor(patch_size=4)
    return InklingProcessor(
        pictures,
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_token=image,
        audio_token=audio,
    )


def mimo_v2(kind: str) -> Any:
    from mlx_vlm.models.mimo_v2.processing import MiMoV2Processor
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 640}
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    audio = "<|a|><|audio_pad|><|/a|>"
    return MiMoV2Processor(
        upstream.Qwen3VLImageProcessor(**sizes),
        letters(QWEN, template(image=image, audio=audio)),
        upstream.Qwen3VLVideoProcessor(**sizes),
        audio_tokenizer_path=Path(codec_folder().name) / "audio_tokenizer",
    )


@cache
def codec_folder() -> TemporaryDirectory[str]:
    """A folder with a codec like those that checkpoints of MiMo-V2 bring, with random weights, for as long as the tests run."""
    from mlx_audio.codec.models.mimo_audio_tokenizer import (
        MiMoAudioTokenizer,
        ModelConfig,
    )

    small: dict[str, Any] = {
        f"{part}_layers": 1 for part in ("encoder", "decoder", "vocoder_num")
    }
    small |= {
        f"{part}_attention_heads": 2 for part in ("encoder", "decoder", "vocoder")
    }
    small |= {
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "vocoder_dim": 8,
        "vocoder_intermediate_dim": 8,
    }
    config = ModelConfig(
        d_model=8,
        n_mels=16,
        encoder_skip_layer_id=1,
        codebook_size=[CODES] * CHANNELS,
        weights_format="mlx",
        **small,
    )
    mx.random.seed(5)
    flat = cast(
        "list[tuple[str, mx.array]]",
        tree_flatten(MiMoAudioTokenizer(config).parameters()),
    )
    weights = {
        path: mx.random.normal(value.shape) * (1.0 if ".quantizer." in path else 0.5)
        for path, value in flat
    }
    folder = TemporaryDirectory()
    into = Path(folder.name) / "audio_tokenizer"
    into.mkdir()
    (into / "config.json").write_text(json.dumps(asdict(config)))
    mx.save_safetensors(str(into / "model.safetensors"), weights)
    return folder


def muse_spark(kind: str) -> Any:
    from mlx_vlm.models.muse_spark.image_processing import ImageProcessor
    from mlx_vlm.models.muse_spark.processing_muse_spark import (
        MuseSparkFeatureExtractor,
        MuseSparkProcessor,
    )

    marks = (
        "<|patch|>",
        "<|video|>",
        "<|audio|>",
        "<|soft_audio_start|>",
        "<|soft_audio_end|>",
    )
    tokenizer = letters(marks, template(image="<|patch|>", audio="<|audio|>"))
    pictures = ImageProcessor(patch_size=4, downsample_factor=2)
    return MuseSparkProcessor(
        pictures,
        tokenizer,
        MuseSparkFeatureExtractor(),
        chat_template=tokenizer.chat_template,
    )


def nemotron(kind: str) -> Any:
    from mlx_vlm.models.nemotron_h_nano_omni.image_processing_nemotron_h_nano_omni import (
        NemotronHNanoOmniImageProcessor,
    )
    from mlx_vlm.models.nemotron_h_nano_omni.processing_nemotron_h_nano_omni import (
        NemotronHNanoOmniProcessor,
    )

    marks = ("<image>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>")
    tokenizer = letters(marks, template(image="<image>", audio="<so_embedding>"))
    grey: dict[str, Any] = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    pictures = NemotronHNanoOmniImageProcessor(
        patch_size=4, min_num_patches=4, max_num_patches=36, **grey
    )
    return NemotronHNanoOmniProcessor(
        pictures, tokenizer, chat_template=tokenizer.chat_template
    )


PROCESSORS: dict[str, Any] = {
    "gemma3n": gemma3n,
    "gemma4": gemma,
    "gemma4_unified": gemma,
    "minicpmo": minicpmo,
    "phi4mm": phi4mm,
    "qwen3_omni_moe": qwen,
    "inkling": inkling,
    "mimo_v2": mimo_v2,
    "muse_spark": muse_spark,
    "nemotron_h_nano_omni": nemotron,
}
RATES = {"mimo_v2": 24_000, "muse_spark": 24_000}
#: As in ``test_audio``; MiMo-V2's by the lengths that its published processor reckons with (a minute is a segment).
PLACES: dict[str, dict[int, int]] = {
    "inkling": {1: 1, 800: 1, 801: 2, 12_345: 16},
    "mimo_v2": {4_000: 2, 24_000: 7, 1_680_000: 438},
    "muse_spark": {1: 1, 1_920: 1, 1_921: 2, 24_000: 13},
    "nemotron_h_nano_omni": {1: 1, 4_000: 4, 12_345: 10, 12_800: 11, 160_000: 126},
}
