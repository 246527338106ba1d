"""Molmo-Point: Molmo 2 whose answers point at patches, at parts of them and at places within, by tokens of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.molmo_point import config as upstream
from mlx_vlm.models.molmo_point.molmo_point import Model, MolmoPointLogitProcessor

from . import _molmo
from ._build import Rule, asks, enliven, fan_in, spread, text_request
from ._molmo import (
    COLUMN,
    END,
    FRAME,
    FRAME_END,
    GRIDS,
    LOW,
    LOW_GRID,
    LOW_START,
    PAIR,
    PATCH,
    PATCH_TOKEN,
    POOLING,
    SIDE,
    START,
    TEXT,
    VISION,
    VIT_LAYERS,
    Grid,
    close_view,
)
from ._oracle import generate_by_recomputing, to_mx
from ._types import VOCABULARY, Inputs, TinyFamily, Trace

POINT, PART, PLACE = (VOCABULARY + index for index in range(11, 14))
SMALL = -100000.0


def build() -> nn.Module:
    """Four layers of 64, three vision layers of 32 of which two are read; points are as likely as words."""
    model = Model(
        upstream.ModelConfig(
            image_start_token_id=START,
            image_end_token_id=END,
            image_patch_id=PATCH_TOKEN,
            image_high_res_id=PATCH_TOKEN,
            image_col_id=COLUMN,
            image_non_indexable_patch_id=LOW,
            frame_start_token_id=FRAME,
            frame_end_token_id=FRAME_END,
            patch_token_id=POINT,
            subpatch_token_id=PART,
            location_token_id=PLACE,
            patch_embed_dim=16,
            token_prediction_rotary_theta=100.0,
            eos_token_id=[VOCABULARY - 1],
            text_config=upstream.TextConfig(**TEXT, max_position_embeddings=1024),
            vision_config=upstream.VisionConfig(
                **VISION, image_default_input_size=(SIDE * PATCH, SIDE * PATCH)
            ),
            adapter_config=upstream.AdapterConfig(
                **POOLING, vit_layers=tuple(VIT_LAYERS), pooling_attention_mask=True
            ),
        )
    )
    rules = [
        Rule(
            r"lm_head\.output_embeddings$",
            lambda random, shape: quiet(fan_in(3.0)(random, shape)),
        ),
        Rule(
            r"lm_head\.new_output_embeddings$",
            lambda random, shape: pointing(fan_in(0.3)(random, shape)),
        ),
        Rule(r"embedding$", spread(1.0)),
        Rule(r"add_no_point_class_embed\.vector$", spread(1.0)),
        Rule(r"(patch_q|patch_k|subpatch_q|subpatch_k)\.weight$", fan_in(1.3)),
        Rule(r"subpatch_loc_k\.weight$", fan_in(0.5)),
    ]
    enliven(model, seed=68, rules=rules)
    return model


def quiet(head: np.ndarray) -> np.ndarray:
    """A head (V, D) whose markers' logits are near zero."""
    head[128:] *= 0.1
    return head


def pointing(head: np.ndarray) -> np.ndarray:
    """The rows of the new ids (N, D): the token for points is far out, and so often the best."""
    head[POINT - VOCABULARY] *= 30.0
    return head


def picture(grid: Grid) -> list[int]:
    """The ids of one picture, far view and then close view, as `MolmoPointProcessor.get_image_tokens` orders them."""
    return [LOW_START, *[LOW] * (LOW_GRID[0] * LOW_GRID[1]), END, *close_view(grid)]


def request(seed: int, grids: Sequence[Grid]) -> Inputs:
    made = _molmo.request(seed, grids, picture)
    return {
        **made,
        "token_type_ids": (made["input_ids"] >= VOCABULARY).astype(np.int32),
    }


# One picture of 6, 8 or 12 features. Two pictures with words between; the first sees the second.
image, two_images = asks(request, GRIDS, PAIR)


class Answering:
    """One request, answered by the rules of the published modeling_molmo_point.py: the whole sequence at each step.

    ``published`` False makes of it what mlx-vlm does alone: pictures are causal, and the first token may be one of the
    three that stand for points in general.
    """

    def __init__(self, model: Any, inputs: Inputs, published: bool) -> None:
        arrays = to_mx(inputs)
        model._image_cache = None
        self.model, self.config, self.published = model, model.config, published
        self.prompt = model.get_input_embeddings(**arrays).inputs_embeds
        self.image, self.bounds = model._image_cache, model._token_bounds
        self.processor: MolmoPointLogitProcessor | None = (
            model._build_logit_processor() if self.image else None
        )
        self.is_picture = (
            inputs.get("token_type_ids", np.zeros_like(inputs["input_ids"]))[0] > 0
        )
        model._image_cache = model._token_bounds = None

    def logits(self, generated: list[int]) -> mx.array:
        """(V,) after the prompt and an answer's tokens."""
        embeds = mx.concatenate([self.prompt, *self.embedded(generated)], axis=1)
        hidden = self.hidden(embeds)
        words_ = self.model.lm.lm_head(self.model.lm.model.ln_f(hidden[:, -1]))[0]
        if self.image is None:
            return words_
        marks = mx.array(
            [
                self.config.patch_token_id,
                self.config.subpatch_token_id,
                self.config.location_token_id,
            ]
        )
        general, words_ = words_[marks], mx.array(words_)
        # nor are there any points to choose from
        if not self.published and not generated:
            return words_
        words_[marks] = SMALL
        points = np.full(
            self.bounds.location_end - self.bounds.patch_start, SMALL, dtype=np.float32
        )
        if generated:
            self.point(points, hidden[0], generated, float(general[0].item()))
        logits = mx.concatenate([words_, mx.array(points)])
        return (
            logits + mx.array(self.allowed(generated, logits.size))
            if generated
            else logits
        )

    def allowed(self, generated: list[int], size: int) -> np.ndarray:
        """(V,) 0 where a token may come next, and far below 0 where it may not.

        After a patch whose last part was the point before, the published code stops with an assertion, and mlx-vlm takes
        any word: here the last part comes again.
        """
        assert self.processor is not None
        found = np.array(self.processor(generated, generated[-1], size))
        if self.published and (found < 0).all():
            found[self.bounds.subpatch_end - 1] = 0
        return found

    def hidden(self, embeds: mx.array) -> mx.array:
        """(1, L, D) after all layers, before the last norm."""
        length = embeds.shape[1]
        seen = np.tril(np.ones((length, length), dtype=bool))
        if self.published:
            inside = np.concatenate(
                [self.is_picture, np.zeros(length - len(self.is_picture), dtype=bool)]
            )
            seen |= inside[:, None] & inside[None]
        for block in self.model.lm.model.blocks:
            embeds = block(embeds, mx.array(seen))
        return embeds

    def embedded(self, generated: list[int]) -> list[mx.array]:
        """(1, 1, D) of each token of the answer: a patch with its feature, a part as what the tower saw there."""
        found, last = [], None
        for token in generated:
            embed = self.model.lm.model.wte(mx.array([[self.spelled(token)]]))
            kind, number = self.kind(token)
            if kind == "patch" and number < self.bounds.n_patches:
                embed = (
                    embed
                    + self.image["image_features"].reshape(-1, embed.shape[-1])[number]
                )
                last = number
            if kind == "part":
                embed = self.model.build_vit_embedding(
                    self.image["vit_features"][0, last, number]
                )[None, None]
            found.append(embed)
        return found

    def kind(self, token: int) -> tuple[str, int]:
        """What a token stands for, and which of them it is."""
        b = self.bounds
        if b is not None:
            for name, start, end in (
                ("patch", b.patch_start, b.patch_end),
                ("part", b.subpatch_start, b.subpatch_end),
                ("place", b.location_start, b.location_end),
            ):
                if start <= token < end:
                    return name, token - start
        return "word", token

    def spelled(self, token: int) -> int:
        config = self.config
        names = {
            "patch": config.patch_token_id,
            "part": config.subpatch_token_id,
            "place": config.location_token_id,
        }
        return int(names.get(self.kind(token)[0], token))

    def point(
        self, points: np.ndarray, hidden: mx.array, generated: list[int], general: float
    ) -> None:
        """Fill in the logits of points after an answer's last token, from (L, D) hidden states."""
        predictor, b = self.model.point_predictor, self.bounds
        normed = predictor.x_norm(hidden)
        kind, number = self.kind(generated[-1])
        pointed = [
            number
            for what, number in map(self.kind, generated)
            if what == "patch" and number < b.n_patches
        ]
        before = pointed[:-1] if kind == "patch" and number < b.n_patches else pointed
        at = self.image["image_indices"]
        choosable = np.array(self.image["is_indexable_flat"])
        turns = mx.array(np.cumsum(choosable) - 1)[at]
        keys = predictor.patch_rotary(predictor.patch_k(normed[at]), turns)
        query = predictor.patch_q(normed[-1:])
        if before:
            query = predictor.patch_rotary(query, turns[before[-1] : before[-1] + 1])
        scores = np.array(
            query
            @ mx.concatenate([keys, predictor.add_no_point_class_embed.vector[None]]).T
        )[0]
        scores[:-1][choosable[np.array(at)] == 0] = -np.inf
        points[scores.argmax()] = general
        if kind == "patch" and number < b.n_patches:
            found = self.image["subpatch_k"][0, number] @ predictor.subpatch_q(
                normed[-1]
            )
            found = np.array(found) / math.sqrt(self.config.patch_embed_dim)
            start = b.subpatch_start - b.patch_start
            points[start : start + len(found)] = np.where(
                self.image["vit_features_mask"][0, number], found, SMALL
            )
        if kind == "part":
            points[b.location_start - b.patch_start :] = np.array(
                predictor.subpatch_loc_k(hidden[-1])
            )


def greedy(
    model: nn.Module, inputs: Inputs, num_tokens: int, published: bool = True
) -> Trace:
    """The published rules, spelled out."""
    return generate_by_recomputing(
        Answering(model, inputs, published).logits, num_tokens
    )


FAMILY = TinyFamily(
    name="molmo_point",
    build=build,
    text=text_request,
    image=image,
    two_images=two_images,
    greedy=greedy,
    points=POINT,
    oracle_note="The whole sequence at each step over the model's own layers, by the rules of the published "
    "modeling_molmo_point.py. mlx-vlm drops the pictures' mask and lets the first token be one that stands for points in "
    "general; without these two its generate_step agrees on a fresh model (tests/test_zoo.py). The published code's answers to "
    "pictures agree (tests/references/published.py).",
    wrong_alone=("image_1", "two_images"),
)
