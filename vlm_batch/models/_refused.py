"""mlx-vlm's unbatched models, with reasons; ``tests/test_registry.py`` fails for a missing one.

``REFUSED`` do not write token by token. ``ONE_AT_A_TIME`` lack a verified adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlm_batch.models import families
from vlm_batch.runtime.upstream import code_facts

_PICTURES = "it makes pictures by diffusion, not text"
_DENOISES = "it writes text by denoising blocks of it, not one token at a time"
_EMBEDS = "it gives embeddings of its input, not text"
_ENCODES = (
    "it is an encoder without a decoder: it gives features of its input, not text"
)
_DECIDES = "it chooses among given answers by scores, and writes no text"
_LABELS = "it labels the words of its input, and writes no text"
_DETECTS = "it finds objects in pictures and gives boxes or masks, not text"
_GEOMETRY = "it gives depth or shapes of what a picture shows, not text"
_DRAFTS = "it only proposes tokens to another model that decodes speculatively"


#: Model type, after mlx-vlm's remapping, -> why it is refused.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bonsai",
            "ernie_image",
            "flux2",
            "flux3",
            "ideogram4",
            "llada_image",
            "mage_flow",
            "ming_image",
            "moss_image",
            "qwen_image",
            "z_image",
        ),
        _PICTURES,
    ),
    "minimax_h3": "it makes videos with sound by diffusion, not text",
    **dict.fromkeys(
        ("diffusion_gemma", "llada2_moe", "nemotron_labs_diffusion"), _DENOISES
    ),
    **dict.fromkeys(
        (
            "colidefics3",
            "colqwen2_5",
            "embedding_gemma2",
            "gemma3_embedding",
            "lfm2_colbert",
            "lfm2_embedding",
            "llama_bidirec",
            "llama_nemotron_vl_embedding",
            "ministral3_embedding",
            "qwen3_embedding",
            "qwen3_vl_embedding",
            "siglip",
        ),
        _EMBEDS,
    ),
    **dict.fromkeys(
        ("bert", "dinov2", "lfm2_encoder", "modernbert", "xlm_roberta"), _ENCODES
    ),
    **dict.fromkeys(("clef", "d1", "d1_omni", "decider2", "laya"), _DECIDES),
    **dict.fromkeys(("gliner2_5", "openai_privacy_filter"), _LABELS),
    **dict.fromkeys(
        ("pp_doclayout_v3", "rfdetr", "rt_detr_v2", "sam3", "sam3_1", "yolo11"),
        _DETECTS,
    ),
    **dict.fromkeys(
        ("moge3", "sam3d_body", "sam3d_objects", "video_depth_anything"), _GEOMETRY
    ),
    "sapiens2": "it gives poses and dense maps of people in pictures, not text",
    "nemotron_voicechat": "it answers speech with speech, frame by frame",
    "mistral4": "it is the language half of mistral3, whose model type its checkpoints carry",
    **dict.fromkeys(code_facts()["mlx_vlm"]["drafters"], _DRAFTS),
}

_TEXT_ONLY = "it takes text only, and its rows have not been verified in a batch"


class _TextDecoders(Mapping[str, str]):
    def __getitem__(self, model_type: str) -> str:
        is_known = model_type in REFUSED or model_type in _registered()
        if is_known or model_type not in _without_pictures():
            raise KeyError(model_type)
        return _TEXT_ONLY

    def __iter__(self) -> Iterator[str]:
        return (model_type for model_type in _without_pictures() if model_type in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _registered() -> set[str]:
    return {model_type for spec in families() for model_type in spec.model_types}


def _without_pictures() -> list[str]:
    """Return mlx-vlm's packages whose code does not mention vision."""
    found: list[str] = code_facts()["mlx_vlm"]["without_pictures"]
    return found


#: Model type, after mlx-vlm's remapping, -> why it is not batched.
ONE_AT_A_TIME: Mapping[str, str] = _TextDecoders()
