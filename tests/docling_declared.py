"""What docling 2.143 declares and ``vlm_batch.integrations.docling`` builds on, for tests without the package.

``tests/test_docling.py`` compares it with the package where that is installed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from PIL import Image


class VlmEngineType(str, Enum):
    MLX = "mlx"
    AUTO_INLINE = "auto_inline"
    API = "api"


class VlmStopReason(str, Enum):
    STOP_SEQUENCE = "stop_sequence"
    END_OF_SEQUENCE = "end_of_sequence"
    INFERENCE_ERROR = "inference_error"
    UNSPECIFIED = "unspecified"


class ResponseFormat(str, Enum):
    DOCTAGS = "doctags"
    MARKDOWN = "markdown"


@dataclass
class BaseVlmEngineOptions:
    pass


@dataclass
class MlxVlmEngineOptions(BaseVlmEngineOptions):
    engine_type: VlmEngineType = VlmEngineType.MLX
    trust_remote_code: bool = False
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None


@dataclass
class AutoInlineVlmEngineOptions(BaseVlmEngineOptions):
    engine_type: VlmEngineType = VlmEngineType.AUTO_INLINE
    prefer_vllm: bool = False
    trust_remote_code: bool = False


@dataclass
class EngineModelConfig:
    repo_id: str | None = None
    revision: str | None = None
    torch_dtype: str | None = None
    min_engine_version: str | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class VlmEngineInput:
    image: Image.Image
    prompt: str
    temperature: float = 0.0
    max_new_tokens: int = 4096
    stop_strings: list[str] = field(default_factory=list)
    extra_generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class VlmEngineOutput:
    text: str
    stop_reason: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class BaseVlmEngine:
    def __init__(
        self,
        options: BaseVlmEngineOptions,
        model_config: EngineModelConfig | None = None,
    ) -> None:
        self.options = options
        self.model_config = model_config
        self._initialized = False


class HuggingFaceModelDownloadMixin:
    @staticmethod
    def download_models(
        repo_id: str,
        local_dir: Path | None = None,
        force: bool = False,
        progress: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Path:
        raise AssertionError("the tests download nothing")


class GenerationStopper:
    def should_stop(self, s: str) -> bool:
        raise NotImplementedError

    def lookback_tokens(self) -> int:
        return sys.maxsize

    def is_valid_end(self) -> bool:
        return False


def check_min_engine_version(engine_type: Any, min_version: Any) -> None:
    pass


def extract_generation_stoppers(extra_config: dict[str, Any]) -> list[Any]:
    given = extra_config.get("custom_stopping_criteria", [])
    return [one() if isinstance(one, type) else one for one in given]


def generation_stopper_stop_reason(stopper: GenerationStopper) -> VlmStopReason:
    if stopper.is_valid_end():
        return VlmStopReason.END_OF_SEQUENCE
    return VlmStopReason.STOP_SEQUENCE


def preprocess_image_batch(images: list[Any]) -> list[Image.Image]:
    return [image.convert("RGB") for image in images]


def resolve_model_artifacts_path(
    repo_id: str, revision: str, artifacts_path: Any, download_fn: Any
) -> Path:
    if artifacts_path is None:
        return download_fn(repo_id, revision)  # type: ignore[no-any-return]
    return Path(artifacts_path) / repo_id.replace("/", "--")


@dataclass
class VlmConvertOptions:
    engine_options: BaseVlmEngineOptions
    model_spec: Any
    scale: float = 2.0
    max_size: int | None = None
    batch_size: int = 1
    force_backend_text: bool = False


@dataclass
class VlmPipelineOptions:
    vlm_options: Any
    artifacts_path: Any = None
    enable_remote_services: bool = False
    accelerator_options: Any = None
    generate_page_images: bool = False


class VlmConvertModel:
    engine: Any

    def __init__(
        self,
        enabled: bool,
        enable_remote_services: bool,
        artifacts_path: Any,
        options: VlmConvertOptions,
        accelerator_options: Any,
    ) -> None:
        self.enabled = enabled
        self.options = options
        assert not enabled, "docling makes its own engine here"


class VlmPipeline:
    def __init__(self, pipeline_options: VlmPipelineOptions) -> None:
        self.pipeline_options = pipeline_options
        self.artifacts_path = pipeline_options.artifacts_path
        self.build_pipe: list[Any] = []
        self._initialize_new_runtime_system(pipeline_options)

    def _initialize_new_runtime_system(
        self, pipeline_options: VlmPipelineOptions
    ) -> None:
        raise AssertionError("docling makes its own engine here")


#: Modules of docling and the names that are imported from them.
DECLARED: dict[str, tuple[Any, ...]] = {
    "docling.datamodel.base_models": (VlmStopReason,),
    "docling.datamodel.pipeline_options": (VlmConvertOptions, VlmPipelineOptions),
    "docling.datamodel.pipeline_options_vlm_model": (ResponseFormat,),
    "docling.datamodel.stage_model_specs": (EngineModelConfig,),
    "docling.datamodel.vlm_engine_options": (
        AutoInlineVlmEngineOptions,
        MlxVlmEngineOptions,
    ),
    "docling.models.inference_engines.vlm._utils": (
        check_min_engine_version,
        extract_generation_stoppers,
        generation_stopper_stop_reason,
        preprocess_image_batch,
        resolve_model_artifacts_path,
    ),
    "docling.models.inference_engines.vlm.base": (
        BaseVlmEngine,
        BaseVlmEngineOptions,
        VlmEngineInput,
        VlmEngineOutput,
        VlmEngineType,
    ),
    "docling.models.stages.vlm_convert.vlm_convert_model": (VlmConvertModel,),
    "docling.models.utils.generation_utils": (GenerationStopper,),
    "docling.models.utils.hf_model_download": (HuggingFaceModelDownloadMixin,),
    "docling.pipeline.vlm_pipeline": (VlmPipeline,),
}


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, with the packages that hold them."""
    found: dict[str, ModuleType] = {}
    for name, members in DECLARED.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            found.setdefault(path, ModuleType(path))
        for member in members:
            setattr(found[name], member.__name__, member)
    accelerator = ModuleType("docling.datamodel.accelerator_options")
    vars(accelerator)["AcceleratorOptions"] = SimpleNamespace
    found[accelerator.__name__] = accelerator
    return found
