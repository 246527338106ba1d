"""What drafts in the tests: scripts, and tiny drafting models as folders, with random weights, which mlx-vlm's loader reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import gemma4_assistant, qwen3_5_mtp

from tests.zoo import family, gemma4, qwen3_5
from tests.zoo._build import Rule, enliven, spread
from vlm_batch.engine.batch import DecodeBatch
from vlm_batch.engine.drafts import Drafts
from vlm_batch.engine.row import Row

RULES = [
    Rule(r"embed_tokens\.weight", spread(0.2)),
    Rule(r"q_norm\.weight$", spread(0.1, 0.7)),
    Rule(r"layer_scalar$", spread(0.1, 1.0)),
]


KINDS = ("right", "wrong", "mixed")


class Scripted(Drafts):
    """Each row's drafts as a script says it: the right tokens, wrong ones, or some of both."""

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        kinds: Sequence[str] = KINDS,
        size: int = 3,
    ) -> None:
        super().__init__()
        self._answers, self._kinds, self._size = answers, kinds, size
        self._random = random.Random(7)

    def is_due(self, groups: Sequence[DecodeBatch]) -> bool:
        return True

    def gain(
        self,
        rows: int,
        hoped: float,
        places: int,
        positions: int,
        drafting: float = 0.0,
    ) -> float:
        return 2.0 + hoped

    def draft(self, row: Row, form_seconds: Callable[[], float]) -> tuple[int, ...]:
        index, at = int(row.request_id), row.answer.num_sampled
        most = min(self._size, row.answer.max_tokens - at - 1)
        right = [int(token) for token in self._answers[index][at : at + most]]
        kind = self._kinds[index % len(self._kinds)]
        if kind == "wrong":
            right = [token + 1 if token < 5 else token - 1 for token in right]
        if kind == "mixed":
            right = [
                token if self._random.random() < 0.6 else 3
                for token in right[: self._random.randint(0, most)]
            ]
        return tuple(right)


def assistant_folder(folder: Path, **changes: Any) -> Path:
    """Write an assistant of two layers of 32 for a tiny Gemma 4."""
    own = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "hidden_size_per_layer_input": 0,
    }
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
    }
    text = {**gemma4.text_of(**own, **kinds), **changes.pop("text", {})}
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": gemma4.HIDDEN,
        "text_config": text,
        **changes,
    }
    return written(
        folder,
        gemma4_assistant.Model(gemma4_assistant.ModelConfig.from_dict(config)),
        config,
    )


def heads_folder(folder: Path, name: str) -> Path:
    """Write multi-token heads, one layer, for a tiny Qwen3.5 or Qwen3-Next."""
    of_model = family(name).build().config
    if name == "qwen3_next":
        plain = (bool, int, float, str, list, type(None))
        text: dict[str, Any] = {
            key: value
            for key, value in vars(of_model).items()
            if isinstance(value, plain)
        }
        text["rope_parameters"] = qwen3_5.rope() | {
            "mrope_section": [4, 0, 0]
        }  # as mlx-vlm does (qwen3_5_mtp/split.py)
    else:
        text = of_model.text_config.to_dict()
    text |= {"num_hidden_layers": 1, "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_mtp", "text_config": text}
    model = qwen3_5_mtp.Model(
        qwen3_5_mtp.ModelConfig.from_dict(json.loads(json.dumps(config)))
    )
    return written(folder, model, config)


def written(folder: Path, model: Any, config: Any) -> Path:
    """Fill a drafting model with lively weights and save it."""
    enliven(model, seed=7, rules=RULES)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        {"format": "mlx"},
    )
    return folder
