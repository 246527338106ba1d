"""Causes of one family alone."""

import importlib
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tiny import (
    CONFIGS,
    alone,
    attempt,
    batched,
    case,
    config_of,
    filled,
    first_logprobs,
    noise,
    pictures,
    prompt,
    report,
    text,
    tiny,
)


@case(
    "deepseek_vl_v2",
    at="models/deepseek_vl_v2/language.py:340 models/deepseek_vl_v2/language.py:361",
)
def deepseek_vl_v2_experts():
    """Experts are chosen without the correction bias (and two rows raise).

    Right (DeepSeek's MoEGate, noaux_tc): by score and bias, each token's.
    """
    from mlx_vlm.models.deepseek_vl_v2.config import TextConfig
    from mlx_vlm.models.deepseek_vl_v2.language import MoEGate

    settings = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 4,
        "topk_group": 2,
    }
    gate = MoEGate(
        TextConfig(
            hidden_size=16, n_routed_experts=8, num_experts_per_tok=2, **settings
        )
    )
    gate.weight, gate.e_score_correction_bias = noise(1, 8, 16), noise(2, 8)
    x = noise(3, 1, 6, 16)
    choice = mx.sigmoid(x @ gate.weight.T) + gate.e_score_correction_bias
    groups = choice.reshape(1, 6, 4, 2).sum(axis=-1)
    allowed = mx.repeat(groups >= mx.sort(groups, axis=-1)[..., -2:-1], 2, axis=-1)
    right = mx.argsort(mx.where(allowed, choice, -9), axis=-1)[..., -2:]
    found = attempt(lambda: mx.sort(gate(x)[0].reshape(1, 6, 2), axis=-1))
    return found, mx.sort(right, axis=-1)


@case("minimax_m3_vl", at="models/minimax_m3_vl/language.py:238")
def minimax_m3_vl_groups():
    """One set of blocks is picked for all heads of the index. Right (arXiv 2606.13392 and transformers): blocks of its own
    for each group of attention heads.
    """
    indexer = tiny("minimax_m3_vl").language_model.model.layers[1].self_attn.indexer
    size, top = indexer.block_size, indexer.topk_blocks
    # (1, 1, T, D): a block's keys are alike
    keys = mx.repeat(mx.eye(top + 1), size, axis=0)[None, None]
    # each head wants its own block
    queries = mx.stack([9 * mx.eye(top + 1)[0], mx.eye(top + 1)[1]])[None, :, None]
    here = mx.array([[keys.shape[2] - 1]])
    apart = [
        indexer.select_blocks(queries[:, head : head + 1], keys, 0, None, here).tolist()
        for head in (0, 1)
    ]
    return indexer.select_blocks(queries, keys, 0, None, here).tolist(), apart


@case(
    "deepseek_vl_v2",
    at="models/deepseek_vl_v2/language.py:150 models/deepseek_vl_v2/language.py:123",
)
def deepseek_vl_v2_rotation():
    """Without rope_scaling, the halves of a head are turned (and the norms of the latents have an epsilon of 1e-5).

    Right (DeepSeek's modeling_deepseek.py and transformers, and mlx-vlm with rope_scaling): neighbours (and 1e-6).
    """
    from mlx_vlm.models.deepseek_vl_v2.config import TextConfig
    from mlx_vlm.models.deepseek_vl_v2.language import DeepseekV2Attention

    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
    }
    attention = DeepseekV2Attention(
        TextConfig(
            **sizes,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            rope_theta=100.0,
        )
    )
    heads = noise(4, 1, 1, 3, 4)
    return attention.rope(heads), mx.fast.rope(
        heads, 4, traditional=True, base=100.0, scale=1.0, offset=0
    )


@case("ernie4_5_moe_vl", at="models/ernie4_5_moe_vl/ernie4_5_moe_vl.py:253")
def ernie4_5_moe_vl_experts():
    """In generate, a picture's tokens go to the text experts: token types are made in ``Model.__call__`` only. Right
    (transformers, the publisher's training code): to the picture experts, start and end included.
    """
    request = pictures(1, (4, 4), length=48)
    model = tiny("ernie4_5_moe_vl")
    ids, grids = request["input_ids"], request["image_grid_thw"]
    embeds = model.get_input_embeddings(
        ids, request["pixel_values"], image_grid_thw=grids
    ).inputs_embeds
    positions, _ = model.language_model.get_rope_index(ids, grids)
    types = ((ids >= 128) & (ids <= 130)).astype(mx.int32)
    hidden = model.language_model.model(
        ids, embeds, mask="causal", position_ids=positions, token_type_ids=types
    )
    logits = model.language_model.lm_head(hidden[0, -1])
    found = first_logprobs(tiny("ernie4_5_moe_vl"), request, prefill_step_size=None)
    return found, logits - mx.logsumexp(logits)


@case("granite4_vision", at="models/granite4_vision/language.py:174")
def granite4_vision_in_a_batch():
    """A slice by ``cache.offset``, which is an array in a batch: any request with a picture ends in an exception."""
    request = {
        "input_ids": prompt(2, [128] * 14),
        "pixel_values": noise(3, 1, 3, 3, 16, 16),
        "image_sizes": mx.array([[16, 32]]),
    }
    return attempt(lambda: batched(tiny("granite4_vision"), request)), [
        alone(tiny("granite4_vision"), request)
    ]


@case("florence2", at="generate/ar.py:1190")
def florence2_in_a_batch():
    """A batch has no encoder output after the first token: the decoder goes on without it. (The tower is left out here:
    features are given.)
    """

    def build():
        with mock.patch(
            "mlx_vlm.models.florence2.florence2.VisionModel", return_value=nn.Module()
        ):
            return tiny("florence2")

    request = {
        "input_ids": mx.array([[128, 5, 6, 7, 8, 9]]),
        "pixel_values": noise(1, 1, 3, 8, 8),
        "cached_image_features": noise(2, 1, 5, 64),
    }
    return attempt(lambda: batched(build(), request)), [alone(build(), request)]


@case("nemotron_parse", at="generate/ar.py:1190")
def nemotron_parse_in_a_batch():
    """A batch has no encoder output after the first token, and the decoder cannot go on without it: any request ends in an
    exception.
    """
    request = {
        "input_ids": mx.array([[5, 6, 7, 8, 9]]),
        "pixel_values": noise(1, 1, 3, 8, 16),
    }
    return attempt(lambda: batched(tiny("nemotron_parse"), request)), [
        alone(tiny("nemotron_parse"), request)
    ]


@case("mistral_large3", at="models/deepseek_v3/language.py:519")
def mistral_large3_ignores_pictures():
    """The text model ignores the embeddings that it is given, and embeds the placeholders' ids.

    Right: the answer does not depend on the ids below a picture's features.
    """
    language = tiny("mistral_large3").language_model
    ids, embeds = text(10, 6)["input_ids"], noise(11, 1, 6, 64)
    return language(ids, inputs_embeds=embeds).logits, language(
        ids[:, ::-1], inputs_embeds=embeds
    ).logits


@case("mistral_large3", at="models/mistral_large3/config.py:78")
def mistral_large3_yarn():
    """The translation of params.json leaves out YaRN, and the growth of queries (llama_4_scaling).

    Right (vLLM's configs/mistral.py, _remap_mistral_yarn_args): positions are stretched by the published factor of 36.
    """
    from mlx_vlm.models.mistral_large3.config import config_from_params

    params = dict.fromkeys(
        [
            "vocab_size",
            "dim",
            "hidden_dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "norm_eps",
        ],
        8,
    )
    params |= dict.fromkeys(
        [
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ],
        8,
    )
    experts = [
        "expert_hidden_dim",
        "num_experts",
        "num_shared_experts",
        "num_experts_per_tok",
        "first_k_dense_replace",
    ]
    sizes = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "image_size",
        "patch_size",
    ]
    sizes += ["rope_theta", "image_token_id", "spatial_merge_size", "adapter_bias"]
    params |= {
        "moe": dict.fromkeys(experts, 1),
        "vision_encoder": dict.fromkeys(sizes, 8),
    }
    params |= {"rope_theta": 10000.0, "max_position_embeddings": 294912}
    params["yarn"] = {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    }
    scaling = config_from_params(params)["text_config"].get("rope_scaling") or {
        "factor": 1
    }
    return mx.array([float(scaling["factor"])]), mx.array([36.0])


@case("mistral_large3", at="models/deepseek_v3/language.py:159")
def mistral_large3_experts():
    """Experts are weighed by sigmoids, as in DeepSeek-V3.

    Right (vLLM's configs/mistral.py, _remap_moe_args, and transformers' Mistral 4): by a softmax.
    """
    gate = next(
        layer.mlp.gate for layer in tiny("mistral_large3").layers if "gate" in layer.mlp
    )
    hidden = noise(12, 1, 5, 64)
    chosen, weights = gate(hidden)
    return weights, mx.softmax(
        mx.take_along_axis(hidden @ gate.weight.T, chosen, axis=-1), axis=-1
    )


@case("zaya1_vl", at="models/zaya1_vl/language.py:680")
def zaya1_vl_text_and_picture():
    """A picture beside a text in a batch: the mask is cut by ``int`` of the rows' offsets, which raises."""
    right = [
        alone(tiny("zaya1_vl"), one, prefill_step_size=None)
        for one in (text(8, 9), pictures(9, (4, 4)))
    ]
    return attempt(
        lambda: batched(tiny("zaya1_vl"), text(8, 9), pictures(9, (4, 4)))
    ), right


@case("falcon_ocr", at="models/falcon_ocr/language.py:368")
def falcon_ocr_after_a_picture():
    """A text's positions are moved by what the picture before it took. Right: as on a fresh model."""
    used = tiny("falcon_ocr")
    used.language_model._rope_deltas = mx.array(
        [[-4]]
    )  # what get_input_embeddings returns for a picture, and the loop leaves
    return alone(used, text(5, 9)), alone(tiny("falcon_ocr"), text(5, 9))


@case("gemma3n", at="models/gemma3n/language.py:523")
def gemma3n_padding():
    """Zero embeddings, as padding has, are divided by their own magnitude: NaN, which reaches the other tokens."""
    from mlx_vlm.models.gemma3n.language import LanguageModel

    language = filled(LanguageModel(config_of("gemma3n").text_config))
    embeds = mx.concatenate([mx.zeros((1, 1, 64)), noise(6, 1, 3, 64)], axis=1)
    per_layer = noise(
        7,
        1,
        4,
        language.config.num_hidden_layers,
        language.config.hidden_size_per_layer_input,
    )
    logits = language(None, inputs_embeds=embeds, per_layer_inputs=per_layer).logits
    return int(mx.isnan(logits[0, -1]).sum()), 0


@case(
    "qwen3_5",
    "qwen3_5_moe",
    at="models/qwen3_5/language.py:830 models/qwen3_5/language.py:952",
)
def qwen3_5_quantised():
    """With kv_bits, prompts of different lengths attend to their padding. Right: each in a batch of its own."""
    settings = {"kv_bits": 8, "kv_group_size": 32, "num_tokens": 8}
    config = {**CONFIGS["qwen3_5"]["text_config"], "head_dim": 32}
    short, long = text(1, 9), text(2, 40)
    right = [
        batched(tiny("qwen3_5", text_config=config), one, **settings)[0]
        for one in (short, long)
    ]
    return batched(tiny("qwen3_5", text_config=config), short, long, **settings), right


def point_at(seed):
    """A picture of four tokens from afar and four from near, between words, as molmo_point's processor lays it out."""
    far, near = [164, *[165] * 4, 163], [162, *[160, 160, 161] * 2, 163]
    ids = prompt(seed, [*far, *near])
    return {
        "input_ids": ids,
        "token_type_ids": (ids >= 160).astype(mx.int32),
        "pixel_values": noise(seed, 2, 16, 48),
        "image_token_pooling": mx.arange(32).reshape(8, 4),
        "image_grids": mx.array([[2, 2, 2, 2]]),
        "image_num_crops": mx.array([2]),
    }


@case("molmo_point", at="models/molmo_point/molmo_point.py:624")
def molmo_point_after_a_picture():
    """A text after a picture is answered as if it had that picture: its tokens are chosen among points at it, too."""
    model, after = tiny("molmo_point"), text(37, 9)
    alone(model, point_at(1))
    return alone(model, after, 8), alone(tiny("molmo_point"), after, 8)


@case("molmo_point", at="models/molmo_point/molmo_point.py:394")
def molmo_point_mask():
    """``token_type_ids`` are read and dropped. Right (the published modeling_molmo_point.py, token_type_ids_mask_function):
    all tokens of pictures see each other.
    """
    model, request = tiny("molmo_point"), point_at(1)
    embeds = model.get_input_embeddings(**request).inputs_embeds
    picture, places = request["token_type_ids"][0] > 0, mx.arange(embeds.shape[1])
    mask = (places[None] <= places[:, None]) | (picture[None] & picture[:, None])
    right = model.lm(inputs_embeds=embeds, mask=mask).logits[0, -1]
    return first_logprobs(model, request), right - mx.logsumexp(right)


@case("molmo_point", at="models/molmo_point/molmo_point.py:711")
def molmo_point_first_token():
    """The first token may be one of those that stand for a patch, a part or a place in general. Right (the published
    MolmoPointForConditionalGeneration): never, in an answer to a picture.
    """
    logprobs = first_logprobs(tiny("molmo_point"), point_at(1))
    return np.exp(logprobs[171:174]), [0.0, 0.0, 0.0]


@case("molmo_point", at="models/molmo_point/molmo_point.py:653")
def molmo_point_chunks():
    """The keys of patches are made of the prompt's first chunk, also at positions of later ones, where memory holds
    anything. Shown: how many positions lie outside. Right: none.
    """
    model, chunk = tiny("molmo_point"), 4
    attempt(lambda: alone(model, point_at(1), 12, prefill_step_size=chunk))
    return int(mx.sum(model._image_cache["image_indices"] >= chunk).item()), 0


@case("molmo_point", at="models/molmo_point/molmo_point.py:303")
def molmo_point_nothing_left():
    """After a patch whose last part the point before has had, no token at all may come. Right: some token (the published
    code stops with an assertion).
    """
    from mlx_vlm.models.molmo_point.molmo_point import (
        GeneratedTokenBounds,
        MolmoPointLogitProcessor,
    )

    bounds = GeneratedTokenBounds(
        10, n_patches=3, n_subpatches=2, n_locations=9, no_more_points_class=True
    )
    patch, last_part, place = 10, bounds.subpatch_end - 1, bounds.location_start
    mask = MolmoPointLogitProcessor(bounds, True, True, True)(
        [patch, last_part, place, patch], patch, 25
    )
    return bool((mask == 0).any().item()), True


@case(
    "deepseek_v4",
    at="models/deepseek_v4/language.py:685 models/deepseek_v4/language.py:745",
)
def deepseek_v4_indexer():
    """From ``index_block * index_keep`` pools on (1,024 by default), pools are chosen among means of blocks, and those behind
    the last whole block never are. Right (transformers, modeling_deepseek_v4.py, DeepseekV4Indexer): the best of all.
    """
    from mlx_vlm.models.cache import PoolingCache
    from mlx_vlm.models.deepseek_v4.language import DeepseekV4RoPE, Indexer

    def chosen(**settings):
        indexer = filled(Indexer(config_of("deepseek_v4", index_topk=4, **settings), 4))
        cache, rope = PoolingCache(4), DeepseekV4RoPE(8, 400.0)
        indexer(noise(8, 1, 60, 64), noise(9, 1, 60, 24), rope, cache, 0)  # 15 pools
        return mx.sort(
            indexer(noise(10, 1, 1, 64), noise(11, 1, 1, 24), rope, cache, 60), axis=-1
        )

    return chosen(index_block=4, index_keep=2), chosen(index_block=0)


@case("deepseek_v41", at="models/deepseek_v41/language.py:1282")
def deepseek_v41_tables():
    """Without the map of the n-grams' tokens (engram_token_map.json, or tokenizer.json beside the weights), the answer is
    that of a model without its tables, in silence. Right: an error, or the tables.
    """
    from mlx_vlm.models.deepseek_v41.engram import NgramHashState

    model, whole = tiny("deepseek_v41"), tiny("deepseek_v41")
    model.model_path = "a/folder/without/them"
    language = whole.language_model
    kinds = [token // 4 for token in range(160)]
    language.engram_hash = NgramHashState(
        language.config, language.layout, token_map=kinds
    )
    return first_logprobs(model, text(7, 12)), first_logprobs(whole, text(7, 12))


def dropped_groups(package):
    """Which experts a gate with two groups takes, of which one is dropped, and which the published one does."""
    gate = importlib.import_module(f"mlx_vlm.models.{package}.language").MoEGate
    settings = {
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "n_routed_experts": 8,
        "routed_scaling_factor": 1.0,
    }
    settings |= {
        "n_group": 2,
        "topk_group": 1,
        "hidden_size": 16,
        "topk_method": "noaux_tc",
    }
    gate, x = gate(SimpleNamespace(**settings)), noise(3, 1, 6, 16)
    gate.weight, gate.e_score_correction_bias = noise(1, 8, 16), noise(2, 8) - 0.8
    choice = mx.sigmoid(x @ gate.weight.T) + gate.e_score_correction_bias
    ranks = mx.sort(choice.reshape(1, 6, 2, 4), axis=-1)[..., -2:].sum(axis=-1)
    allowed = mx.repeat(ranks >= ranks.max(axis=-1, keepdims=True), 4, axis=-1)
    right = mx.argsort(mx.where(allowed, choice, -mx.inf), axis=-1)[..., -2:]
    return mx.sort(gate(x)[0], axis=-1), mx.sort(right, axis=-1)


@case("kimi_k25", "mistral_large3", at="models/deepseek_v3/language.py:167")
def deepseek_v3_groups():
    """An expert of a dropped group has a score of zero, which beats a kept one of less. Right (DeepSeek's own code;
    transformers, modeling_deepseek_v3.py:151): it is out of the choice.
    """
    return dropped_groups("deepseek_v3")


@case("kimi_vl", at="models/kimi_vl/language.py:252")
def kimi_vl_groups():
    """As deepseek_v3."""
    return dropped_groups("kimi_vl")


@case("youtu_vl", at="models/youtu_vl/language.py:186")
def youtu_vl_groups():
    """As deepseek_v3."""
    return dropped_groups("youtu_vl")


@case("glm4v_moe", at="models/glm4v_moe/language.py:179")
def glm4v_moe_groups():
    """As deepseek_v3 (transformers, modeling_glm4v_moe.py:301)."""
    return dropped_groups("glm4v_moe")


if __name__ == "__main__":
    report()
