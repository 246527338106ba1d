"""Record what a model's published code answers to the zoo's requests with the zoo's weights, where transformers has no class.

    python tests/references/published.py molmo_point FOLDER

FOLDER holds the Python files of the model's repository (modeling_molmo_point.py and those that it imports). Needs torch and
transformers, as record.py does, whose format the files have. The published code answers no text without a picture: such
requests are not recorded. Its cache and positions are given to it as ``generate`` would; its own mask function and logits
processor are what is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.nn as nn
import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.zoo import FAMILIES, Inputs, apart, inputs_hash, requests_of, weights_hash
from tests.zoo._build import weights_of

STEPS = 8
HERE = Path(__file__).resolve().parent
NAMES = (
    (r"^lm\.lm_head", "lm_head"),
    (r"^lm\.model\.", "model.transformer."),
    (r"^vision_model\.resblocks", "model.vit.transformer.resblocks"),
    (r"^vision_model\.", "model.vit."),
    (r"^(connector|build_vit|point_pred)", r"model.\1"),
)


def import_published(folder: Path) -> tuple[Any, Any, Any]:
    """(modeling_molmo_point, configuration_molmo_point, configuration_molmo2), which were written for transformers 4."""
    package = types.ModuleType("published")
    package.__path__ = [str(folder)]
    processing = types.ModuleType("published.image_processing_molmo2")  # needs more packages, and no model calls it
    vars(processing).update(Molmo2ImagesKwargs=object, image_to_patches_and_grids=None)
    sys.modules.update({"published": package, processing.__name__: processing})
    ROPE_INIT_FUNCTIONS["default"] = turning
    with mock.patch.object(transformers.AutoModelForImageTextToText, "register"):
        names = ("modeling_molmo_point", "configuration_molmo_point", "configuration_molmo2")
        modeling, *configurations = (importlib.import_module(f"published.{name}") for name in names)
    modeling.create_causal_mask = create_mask
    modeling.MolmoPointForConditionalGeneration.tie_weights = lambda self, *_, **__: None
    return modeling, *configurations


def turning(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    """transformers 4's default RoPE: (D / 2,) frequencies, and the scale of cosines and sines."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float)
    return 1.0 / (config.rope_theta ** (steps / config.head_dim)), 1.0


def create_mask(
    *, attention_mask: Any = None, cache_position: Any = None, or_mask_function: Any = None, **_: Any
) -> torch.Tensor:
    """transformers' ``create_causal_mask`` for one row: (1, 1, L, K), 0 where a key may be seen."""
    if attention_mask is not None:  # made already
        return attention_mask
    places, keys = cache_position, torch.arange(int(cache_position[-1]) + 1)
    seen = keys[None] <= places[:, None]
    if or_mask_function is not None:
        zero = torch.tensor(0)
        both = [[bool(or_mask_function(zero, zero, query, key)) for key in keys] for query in places]
        seen |= torch.tensor(both)
    return torch.where(seen, 0.0, -torch.inf)[None, None]


def molmo_point(zoo: nn.Module, folder: Path) -> torch.nn.Module:
    """The published model with the zoo's weights."""
    modeling, configuration, molmo2 = import_published(folder)
    ours: Any = zoo.config
    text = molmo2.Molmo2TextConfig(**vars(ours.text_config))
    text.rope_theta = ours.text_config.rope_theta  # which transformers 5 moves elsewhere
    text.rope_parameters = {"rope_type": "default", "rope_theta": text.rope_theta}
    facts = {name: value for name, value in vars(ours).items() if not name.endswith("_config")}
    config = configuration.MolmoPointConfig(
        vit_config=molmo2.Molmo2VitConfig(**vars(ours.vision_config)),
        adapter_config=configuration.MolmoPointAdapterConfig(**vars(ours.adapter_config), attn_implementation="sdpa"),
        text_config=text,
        **facts,
    )
    model = modeling.MolmoPointForConditionalGeneration(config).eval().float()
    for part in (model, model.model.transformer, model.model.vit):
        part.config._attn_implementation = "eager"
    found = {}
    for path, value in weights_of(zoo).items():
        for pattern, name in NAMES:
            path = re.sub(pattern, name, path)
        found[path] = torch.tensor(value)
    model.lm_head.new_output_embeddings = torch.nn.Parameter(found["lm_head.new_output_embeddings"])  # 128 there
    model.load_state_dict(found, strict=True)
    return model


@torch.no_grad()
def answer(model: Any, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (T,) and log-probabilities (T, V), greedy."""
    arrays = {name: torch.tensor(value) for name, value in inputs.items()}
    given: Mapping[str, Any] = {
        name: value.long() if value.dtype == torch.int32 else value for name, value in arrays.items()
    }
    tokens, cache, length = given["input_ids"], DynamicCache(), inputs["input_ids"].shape[1]
    processors = model.build_logit_processor_from_inputs(given)
    places = torch.arange(length)
    output = model(**given, past_key_values=cache, use_cache=True, cache_position=places, position_ids=places[None])
    rows = []
    for step in range(STEPS):
        scores = output.logits[:, -1].double()
        for process in processors:
            scores = process(tokens, scores)
        rows.append(torch.log_softmax(scores, dim=-1)[0].float().numpy())
        tokens = torch.cat([tokens, scores.argmax(dim=-1, keepdim=True)], dim=1)
        place = torch.tensor([length + step])
        output = model(
            input_ids=tokens[:, -1:],
            past_key_values=cache,
            use_cache=True,
            cache_position=place,
            position_ids=place[None],
            image_data=output.image_data,
            last_predicted_patch_id=output.last_predicted_patch_id,
        )
    return tokens[0, length:].numpy().astype(np.int32), np.stack(rows)


def record(name: str, folder: Path) -> None:
    """Write tests/references/<family>.npz, and print how far the oracle is from it."""
    tiny = FAMILIES[name]
    zoo = tiny.build()
    model = {"molmo_point": molmo_point}[name](zoo, folder)
    stored: dict[str, Any] = {"weights": weights_hash(zoo), "transformers": transformers.__version__}
    for request, inputs in requests_of(tiny).items():
        if "pixel_values" not in inputs:
            continue
        tokens, logprobs = answer(model, inputs)
        trace = tiny.greedy(zoo, inputs, STEPS)
        print(f"{name} {request}: {tokens.tolist()} {trace.tokens} {apart(logprobs, trace.logprobs):.1e}")
        stored |= {f"{request}/inputs": inputs_hash(inputs), f"{request}/tokens": tokens}
        stored[f"{request}/logprobs"] = logprobs
    np.savez_compressed(HERE / f"{name}.npz", **stored)


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
