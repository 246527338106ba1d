"""Recordings are cut, or their features get wrong places.

Right: a recording has one placeholder for each feature that its encoder makes of it, and is heard to its end (transformers'
processors and classes of these families).
"""

from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_vlm.models import gemma4
from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor
from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4Processor
from mlx_vlm.models.inkling.audio_feature_extractor import InklingAudioFeatureExtractor
from mlx_vlm.models.inkling.processing_inkling import extract_dmel_bins
from mlx_vlm.models.mimo_v2.processing import MiMoV2Processor
from mlx_vlm.models.minicpmo import AudioConfig, minicpmo
from mlx_vlm.models.minicpmo.audio import AudioModel
from mlx_vlm.models.minicpmo.processing_minicpmo import MiniCPMOProcessor
from mlx_vlm.models.phi4mm import phi4mm
from mlx_vlm.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
)
from mlx_vlm.models.qwen3_omni_moe.thinker import Thinker
from tiny import attempt, case, filled, noise, report
from transformers import WhisperFeatureExtractor


def bare(kind, **attributes):
    """An object of a processor's class with these attributes alone."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


@case("gemma4", at="models/gemma4/processing_gemma4.py:556")
def one_placeholder_too_many():
    """Placeholders are counted by milliseconds, features by frames. A quarter of all lengths gets one placeholder too many,
    which takes the first recording's first feature.
    """
    samples = np.zeros(641, np.float32)
    with mock.patch("warnings.warn"):  # the lowest bands are empty, as in transformers
        frames = Gemma4AudioFeatureExtractor()(samples, padding=False)[
            "input_features_mask"
        ][0].sum()
    processor = bare(Gemma4Processor, audio_seq_length=750, audio_ms_per_token=40)
    return int(processor._compute_audio_num_tokens(samples, 16_000)), int(
        -(-frames // 4)
    )


@case("gemma4", at="models/gemma4/processing_gemma4.py:877")
def behind_the_words():
    """The chat's messages are made anew for the template: recordings go behind all words, whatever was between them, and
    videos are gone."""
    said = []

    def fill(messages, **options):
        said.extend(messages)
        return ""

    tokenizer = SimpleNamespace(
        chat_template="{{ messages }}", apply_chat_template=fill
    )
    parts = [{"type": "video"}, {"type": "audio"}, {"type": "text", "text": "a"}]
    processor = bare(Gemma4Processor, tokenizer=tokenizer)
    processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    return [part["type"] for part in said[0]["content"]], ["video", "audio", "text"]


@case("gemma4", at="models/gemma4/gemma4.py:165")
def features_of_silence():
    """The encoder's mask is dropped, so that the features behind a shorter recording's end take the places of the next one."""
    with (
        mock.patch.object(gemma4.gemma4, "LanguageModel", language),
        mock.patch.object(gemma4.gemma4, "VisionModel", mock.Mock),
    ):
        sound = gemma4.AudioConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            subsampling_conv_channels=(8, 8),
            output_proj_dims=16,
        )
        sizes = SimpleNamespace(hidden_size=16, vocab_size=160)
        config = SimpleNamespace(
            model_type="gemma4",
            text_config=sizes,
            vision_config=SimpleNamespace(hidden_size=16, rms_norm_eps=1e-6),
            audio_config=sound,
            image_token_id=128,
            audio_token_id=129,
        )
        model = gemma4.Model(config)
    filled(model.audio_tower), filled(model.embed_audio)
    for layer in model.audio_tower.layers:
        for part in layer.modules():
            if "input_min" in part:  # no bounds
                part.input_min = part.output_min = mx.array(-np.inf)
                part.input_max = part.output_max = mx.array(np.inf)
    lengths = [8, 16]
    mask = mx.arange(16)[None] < mx.array(lengths)[:, None]
    sounds = noise(3, 2, 16, 128) * mask[..., None]
    ids = mx.array([[1, 129, 129, 2, 129, 129, 129, 129, 3]])
    found = model.get_input_embeddings(
        ids, input_features=sounds, input_features_mask=mask
    ).inputs_embeds
    states, _ = model.audio_tower(sounds, ~mask)
    return found[0, 4:8], model.embed_audio(states)[1]


def language(config):
    """A table of tokens, which is all of a language model that embedding a prompt takes."""
    table = SimpleNamespace(
        embed_tokens=lambda ids: mx.zeros((*ids.shape, 16)),
        embed_scale=1.0,
        hidden_size_per_layer_input=0,
    )
    return SimpleNamespace(model=table)


@case("qwen3_omni_moe", at="models/qwen3_omni_moe/processing_qwen3_omni_moe.py:108")
def half_a_minute():
    """The feature extractor is called with its own defaults, which cut after 30 s. Right (the published processor):
    ``truncation=False``. A second has 13 features.
    """
    said = []

    def tokenizer(text, **options):
        said.extend(text)
        return {"input_ids": [[1]]}

    parts = SimpleNamespace(merge_size=2)
    processor = bare(
        Qwen3OmniMoeProcessor,
        feature_extractor=WhisperFeatureExtractor(
            feature_size=16, return_attention_mask=True
        ),
        image_processor=parts,
        video_processor=parts,
        tokenizer=tokenizer,
        audio_token="<a>",
        image_token="<i>",
        video_token="<v>",
    )
    processor(text="<a>", audio=[np.zeros(40 * 16_000, np.float32)], padding=True)
    return said[0].count("<a>"), 40 * 13


@case("qwen3_omni_moe", at="models/qwen3_omni_moe/thinker.py:169")
def made_to_fit():
    """Features without a placeholder are dropped, and placeholders without a feature get zeros, instead of an error."""
    ids = mx.array([[1, 129, 129, 2]])
    thinker = SimpleNamespace(
        language_model=SimpleNamespace(
            model=SimpleNamespace(embed_tokens=lambda ids: mx.ones((*ids.shape, 4))),
            get_rope_index=lambda ids, *rest: (
                mx.zeros((3, *ids.shape)),
                mx.zeros((1,)),
            ),
        ),
        vision_tower=SimpleNamespace(deepstack_merger_list=[]),
        config=SimpleNamespace(
            image_token_id=127, video_token_id=128, audio_token_id=129
        ),
        get_audio_features=lambda *args, **kwargs: noise(3, 3, 4),
    )
    thinker.get_placeholder_mask = lambda *args, **kwargs: Thinker.get_placeholder_mask(
        thinker, *args, **kwargs
    )
    found = attempt(
        lambda: Thinker.get_input_embeddings(
            thinker, ids, input_features=mx.zeros((1, 4, 8))
        )
    )
    return "an answer to three features for two placeholders" if not isinstance(
        found, str
    ) else found, "an error"


@case("minicpmo", at="models/minicpmo/audio.py:174")
def seconds_to_come():
    """Every state of the encoder sees the whole recording: ``audio_chunk_length`` is not read. Right (MiniCPM-o 4.5,
    modeling_minicpmo.py, get_audio_embedding): its own second and those before.
    """
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
    }
    tower = filled(AudioModel(AudioConfig(**sizes, num_mel_bins=8)))
    sound = noise(3, 1, 8, 200)
    sound[..., 100] = 0  # as the convolutions have it at an end
    return tower(sound)[:, :50], tower(sound[..., :100])


@case("minicpmo", at="models/minicpmo/processing_minicpmo.py:588")
def half_a_minute_and_no_more():
    """A recording is cut after 30 s. Right (the published processor): all of it is heard, in pieces of 30 s. A second has a
    hundred frames.
    """
    marks = SimpleNamespace(audio_start="<a>", audio_end="</a>")
    processor = bare(
        MiniCPMOProcessor,
        audio_processor=WhisperFeatureExtractor(),
        tokenizer=marks,
        audio_pool_step=5,
    )
    _, ((frames,),), _ = processor._extract_audio_inputs(
        [[np.zeros(40 * 16_000, np.float32)]]
    )
    return frames, 40 * 100


@case("minicpmo", at="models/minicpmo/minicpmo.py:479")
def as_many_as_fit():
    """Features without a placeholder are dropped, and placeholders without a feature stay words, instead of an error."""
    model = SimpleNamespace(
        language_model=SimpleNamespace(
            model=SimpleNamespace(embed_tokens=lambda ids: mx.ones((*ids.shape, 4))),
        ),
        _set_position_state=lambda ids: None,
        get_audio_embedding=lambda features, lengths: [[noise(3, 3, 4)]],
    )
    given = {
        "audio_features": mx.zeros((1, 8, 30)),
        "audio_feature_lens": [[30]],
        "audio_bounds": [np.array([[1, 3]])],
    }
    found = attempt(
        lambda: minicpmo.Model.get_input_embeddings(
            model, mx.array([[1, 5, 5, 2]]), **given
        )
    )
    return "an answer to three features for two placeholders" if not isinstance(
        found, str
    ) else found, "an error"


@case("phi4mm", at="models/phi4mm/phi4mm.py:83")
def the_adapter_of_the_request_before():
    """A request changes the whole model's weights to those with its adapter, and a text leaves them so. Right (the published
    modeling_phi4mm.py, forward): a text has no adapter. The weight of 1 is 1.5 with that for speech.
    """
    one, model = mx.ones((1, 1)), dict.__new__(phi4mm.Model)
    table = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=lambda ids: mx.zeros((*ids.shape, 1))),
        weight=one,
    )
    key = "language_model.weight"
    halves = {
        "_speech_lora_a": {key: one},
        "_speech_lora_b": {key: one / 2},
        "_speech_lora_scale": 1.0,
    }
    model.__dict__.update(
        halves, _base_weights={key: one}, _active_lora=None, language_model=table
    )
    model.set_modality(has_audio=True)
    model.get_input_embeddings(mx.array([[1, 2]]))
    return table.weight, one


@case("inkling", at="models/inkling/audio_feature_extractor.py:141")
def silence():
    """Magnitudes end at 1e-10, and at 1e-5 in the published processor (``clamp_min(1e-10).sqrt()``): silence, and what a tone
    has beside its pitch, is another of the sixteen levels."""
    features = InklingAudioFeatureExtractor()([np.zeros(800, np.float32)])[
        "input_features"
    ]
    return int(extract_dmel_bins(features).max()), 2


@case("mimo_v2", at="models/mimo_v2/processing.py:76")
def a_codecs_rate():
    """Recordings are read at 16 kHz, and resampled to the 24 kHz that the codec takes: all above 8 kHz is lost."""
    said = []

    def encode(samples, *, sample_rate, num_quantizers):
        said.append(sample_rate)
        return mx.zeros((num_quantizers, 4), mx.int32)

    processor = bare(
        MiMoV2Processor,
        audio_token="<a>",
        _audio_tokenizer=SimpleNamespace(encode=encode),
    )
    attempt(lambda: processor(text="<a>", audio=[np.zeros(800, np.float32)]))
    return f"{said[0]:,} Hz", "24,000 Hz"


if __name__ == "__main__":
    report()
