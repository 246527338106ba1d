"""Exact continuous batching of vision-language models on MLX.

::

    from vlm_batch import VLMBatcher

    with VLMBatcher("path or hub id") as batcher:
        print(batcher.submit("receipt.jpg", "What is the total?").result().text)

Import this package before ``mlx.core``: on Linux it loads a fast BLAS (unless ``VLM_BATCH_NO_BLAS=1``) and sets the
launches of MLX's CUDA back end. GPUs compute float32 in float32 (unless ``MLX_ENABLE_TF32=1``).
"""

from typing import TYPE_CHECKING, Any

from vlm_batch.runtime import beginning

if beginning.is_command():  # whose imports take a second, in which signals may come
    beginning.begin()

from vlm_batch.runtime.blas import preload_openblas
from vlm_batch.runtime.launches import keep_float32, prefer_single_launches
from vlm_batch.runtime.listing import list_models_quickly

preload_openblas()
prefer_single_launches()
keep_float32()
list_models_quickly()

from vlm_batch._version import __version__  # noqa: E402
from vlm_batch.errors import (  # noqa: E402
    BatcherClosed,
    DoesNotFit,
    InvalidAudio,
    InvalidCache,
    InvalidImage,
    InvalidOption,
    InvalidParameters,
    InvalidPrompt,
    InvalidRequest,
    InvalidVideo,
    OutOfMemory,
    PromptTooLong,
    RequestFailed,
    UnsupportedModel,
    VLMBatchError,
)
from vlm_batch.registry import ModelSpec  # noqa: E402
from vlm_batch.types import (  # noqa: E402
    Audio,
    FetchPolicy,
    OptionScore,
    Request,
    Result,
    SamplingParams,
    Template,
    Timings,
    TokenLogprobs,
    Usage,
    Video,
)

if TYPE_CHECKING:
    from vlm_batch.batcher import (
        Caches,
        Handle,
        KVQuantisation,
        Limits,
        PromptCache,
        Stats,
        VLMBatcher,
    )
    from vlm_batch.jobs import map_table
    from vlm_batch.models import families, register

__all__ = [
    "Audio",
    "BatcherClosed",
    "Caches",
    "DoesNotFit",
    "FetchPolicy",
    "Handle",
    "InvalidAudio",
    "InvalidCache",
    "InvalidImage",
    "InvalidOption",
    "InvalidParameters",
    "InvalidPrompt",
    "InvalidRequest",
    "InvalidVideo",
    "KVQuantisation",
    "Limits",
    "ModelSpec",
    "OptionScore",
    "OutOfMemory",
    "PromptCache",
    "PromptTooLong",
    "Request",
    "RequestFailed",
    "Result",
    "SamplingParams",
    "Stats",
    "Template",
    "Timings",
    "TokenLogprobs",
    "UnsupportedModel",
    "Usage",
    "VLMBatchError",
    "VLMBatcher",
    "Video",
    "__version__",
    "families",
    "map_table",
    "register",
]


def __getattr__(name: str) -> Any:
    """Import the engine, which takes seconds, with its first name."""
    if name in (
        "Caches",
        "Handle",
        "KVQuantisation",
        "Limits",
        "PromptCache",
        "Stats",
        "VLMBatcher",
    ):
        from vlm_batch import batcher

        return vars(batcher)[name]
    if name in ("families", "register"):
        from vlm_batch import models

        return vars(models)[name]
    if name == "map_table":
        from vlm_batch import jobs

        return jobs.map_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
