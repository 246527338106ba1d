"""docling's pipeline of vision-language models with this library's engine.

::

    from vlm_batch.integrations.docling import BatchedVlmPipeline

    pdf = PdfFormatOption(pipeline_cls=BatchedVlmPipeline, pipeline_options=VlmPipelineOptions())
    converter = DocumentConverter(format_options={InputFormat.PDF: pdf})

docling (2.143) makes its engines in ``create_vlm_engine``, which knows a closed list; its factories of plug-ins are for OCR,
layout, tables and pictures. What it leaves open is ``pipeline_cls``: ``BatchedVlmPipeline`` is its ``VlmPipeline`` with another
stage in the place of ``VlmConvertModel``, and that stage has ``BatchedVlmEngine`` for its engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import vlm_batch  # noqa: F401  (before mlx.core: it chooses the BLAS)

# isort: split
from docling.datamodel.accelerator_options import AcceleratorOptions
from docling.datamodel.base_models import VlmStopReason
from docling.datamodel.pipeline_options import VlmConvertOptions, VlmPipelineOptions
from docling.datamodel.pipeline_options_vlm_model import ResponseFormat
from docling.datamodel.stage_model_specs import EngineModelConfig
from docling.datamodel.vlm_engine_options import (
    AutoInlineVlmEngineOptions,
    MlxVlmEngineOptions,
)
from docling.models.inference_engines.vlm._utils import (
    check_min_engine_version,
    extract_generation_stoppers,
    generation_stopper_stop_reason,
    preprocess_image_batch,
    resolve_model_artifacts_path,
)
from docling.models.inference_engines.vlm.base import (
    BaseVlmEngine,
    VlmEngineInput,
    VlmEngineOutput,
    VlmEngineType,
)
from docling.models.stages.vlm_convert.vlm_convert_model import VlmConvertModel
from docling.models.utils.generation_utils import GenerationStopper
from docling.models.utils.hf_model_download import HuggingFaceModelDownloadMixin
from docling.pipeline.vlm_pipeline import VlmPipeline

from vlm_batch.batcher import VLMBatcher
from vlm_batch.errors import InvalidRequest, describe
from vlm_batch.handle import Handle
from vlm_batch.types import Request, Result, SamplingParams

__all__ = ["BatchedConvertModel", "BatchedVlmEngine", "BatchedVlmPipeline"]

#: What ``MlxVlmEngine`` answers where a stop string ended the text, and where anything else did, the length included.
STOP_STRING, UNSPECIFIED = "stop_string", VlmStopReason.UNSPECIFIED.value

_log = logging.getLogger(__name__)


class BatchedVlmPipeline(VlmPipeline):
    """docling's ``VlmPipeline``, whose pages share one batch, those of several documents too.

    Engine options are ``MlxVlmEngineOptions`` or ``AutoInlineVlmEngineOptions`` (docling's default); both take the
    preset's checkpoint for MLX. docling hands over ``settings.perf.page_batch_size`` pages at a time of each of
    ``settings.perf.doc_batch_concurrency`` documents.

    Attributes:
        batcher_options: arguments of ``VLMBatcher``, for a subclass to set.

    Raises:
        ValueError: the options name another engine, or are docling's old ones (``InlineVlmOptions``).
    """

    batcher_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, pipeline_options: VlmPipelineOptions) -> None:
        if not isinstance(pipeline_options.vlm_options, VlmConvertOptions):
            kind = type(pipeline_options.vlm_options).__name__
            raise ValueError(
                f"vlm_options is a {kind}; BatchedVlmPipeline takes VlmConvertOptions, as VlmConvertOptions.from_preset"
                " makes them"
            )
        super().__init__(pipeline_options)
        stages = [type(stage) for stage in self.build_pipe]
        if stages != [BatchedConvertModel]:
            raise RuntimeError(
                f"this version of docling makes the stages {stages} by itself, so pages would not be batched"
            )

    def _initialize_new_runtime_system(
        self, pipeline_options: VlmPipelineOptions
    ) -> None:
        """Set what theirs sets, with another stage. Theirs loads the model of its own engine."""
        options = pipeline_options.vlm_options
        is_doctags = options.model_spec.response_format == ResponseFormat.DOCTAGS
        self.force_backend_text = options.force_backend_text and is_doctags
        self.keep_images = pipeline_options.generate_page_images
        stage = BatchedConvertModel(
            enabled=True,
            enable_remote_services=pipeline_options.enable_remote_services,
            artifacts_path=self.artifacts_path,
            options=options,
            accelerator_options=pipeline_options.accelerator_options,
            batcher_options=self.batcher_options,
        )
        self.build_pipe = [stage]


class BatchedConvertModel(VlmConvertModel):
    """docling's stage that converts pages, with ``BatchedVlmEngine``."""

    def __init__(
        self,
        enabled: bool,
        enable_remote_services: bool,
        artifacts_path: Path | str | None,
        options: VlmConvertOptions,
        accelerator_options: AcceleratorOptions,
        batcher_options: Mapping[str, Any] | None = None,
    ) -> None:
        # a stage that is not enabled makes no engine
        super().__init__(
            enabled=False,
            enable_remote_services=enable_remote_services,
            artifacts_path=artifacts_path,
            options=options,
            accelerator_options=accelerator_options,
        )
        self.enabled = enabled
        if not enabled:
            return
        config = options.model_spec.get_engine_config(VlmEngineType.MLX)
        self.repo_id, self.revision = config.repo_id, config.revision
        self.engine = BatchedVlmEngine(
            _mlx_options(options),
            artifacts_path=artifacts_path,
            model_config=config,
            batcher_options=batcher_options,
        )


def _mlx_options(options: VlmConvertOptions) -> MlxVlmEngineOptions:
    """Return the options of docling's MLX engine, as its engine that chooses would."""
    given = options.engine_options
    if isinstance(given, MlxVlmEngineOptions):
        return given
    if not isinstance(given, AutoInlineVlmEngineOptions):
        raise ValueError(
            f"engine_options is a {type(given).__name__}; BatchedVlmPipeline takes MlxVlmEngineOptions or"
            " AutoInlineVlmEngineOptions"
        )
    trusts = given.trust_remote_code or options.model_spec.trust_remote_code
    return MlxVlmEngineOptions(trust_remote_code=trusts)


class BatchedVlmEngine(BaseVlmEngine, HuggingFaceModelDownloadMixin):
    """An engine of docling's with ``VLMBatcher`` below it. Threads that call it share its batch.

    Texts, stop reasons and metadata are those of ``MlxVlmEngine``, but that a page that fails is an
    ``inference_error`` and the others are answered, and that ``num_tokens`` counts tokens, where theirs counts the
    stream's pieces and an empty last one among them.

    Args:
        options: as of docling's MLX engine.
        artifacts_path: folder of docling's models; None downloads.
        model_config: the model, loaded at once; None takes ``batcher``.
        batcher_options: arguments of ``VLMBatcher``.
        batcher: a batcher in the place of one made here. It stays open.
    """

    #: What docling's stages ask an engine that chose for itself.
    selected_engine_type = VlmEngineType.MLX

    def __init__(
        self,
        options: MlxVlmEngineOptions,
        artifacts_path: Path | str | None = None,
        model_config: EngineModelConfig | None = None,
        *,
        batcher_options: Mapping[str, Any] | None = None,
        batcher: VLMBatcher | None = None,
    ) -> None:
        super().__init__(options, model_config=model_config)
        self.options: MlxVlmEngineOptions = options
        self._initialized: bool = False
        self.artifacts_path = artifacts_path
        self.batcher = batcher
        self._batcher_options = dict(batcher_options or {})
        self._is_own = batcher is None
        self._lock = threading.Lock()
        if model_config is not None or batcher is not None:
            self.initialize()

    def initialize(self) -> None:
        """Load the model.

        Raises:
            FileNotFoundError: ``artifacts_path`` has no such model.
            UnsupportedModel: the model cannot be run.
            RuntimeError: no model is named, or it needs a later mlx-vlm.
        """
        with self._lock:
            if self._initialized:
                return
            if self.batcher is None:
                self.batcher = self._load()
            self._initialized = True

    def _load(self) -> VLMBatcher:
        config = self.model_config
        if config is None or config.repo_id is None:
            raise RuntimeError(
                "no model is named: give model_config with a repo_id, or batcher"
            )
        check_min_engine_version(VlmEngineType.MLX, config.min_engine_version)
        trusts = self.options.trust_remote_code

        def download(repo_id: str, revision: str) -> Path:
            return self.download_models(
                repo_id, revision=revision, trust_remote_code=trusts
            )

        folder = resolve_model_artifacts_path(
            config.repo_id, config.revision or "main", self.artifacts_path, download
        )
        _log.info("loading %s for batches", config.repo_id)
        return VLMBatcher(
            folder, **{"trust_remote_code": trusts, **self._batcher_options}
        )

    def predict_batch(
        self, input_batch: Sequence[VlmEngineInput]
    ) -> list[VlmEngineOutput]:
        """Answer pages together. Returns one output each, in their order."""
        if not self._initialized:
            self.initialize()
        pages = [self._submit(one) for one in input_batch]
        watched = [page for page in pages if page.stoppers]
        if watched:
            # each waits for tokens most of the time
            with ThreadPoolExecutor(len(watched)) as threads:
                list(threads.map(_AskedPage.watch, watched))
        model = self.model_config.repo_id if self.model_config else "unknown"
        return [self._output_of(page, model) for page in pages]

    def _output_of(self, page: _AskedPage, model: str | None) -> VlmEngineOutput:
        if page.handle is None:
            return _failed(page.refused, model)
        result = page.handle.result()
        if page.stopped_by is not None:
            reason = generation_stopper_stop_reason(page.stopped_by).value
            return _output(page.text, reason, result, page.num_tokens, model)
        if result.error is not None:
            return _failed(result.error, model)
        if result.finish_reason == "cancelled":
            return _failed("the batcher was closed", model)
        num_tokens = result.usage.completion_tokens
        if _is_by_string(result):
            text = self._with_stop(result)
            return _output(text, STOP_STRING, result, num_tokens, model)
        if result.finish_reason == "length":
            _log.warning("a page was cut after %d tokens", num_tokens)
        return _output(result.text, UNSPECIFIED, result, num_tokens, model)

    def _with_stop(self, result: Result) -> str:
        """Return the text with its stop string, and the rest of the token that ends it, which docling leaves there."""
        assert self.batcher is not None
        least = f"{result.text}{result.stop_reason}"
        tokenizer = self.batcher.processing.tokenizer
        whole = tokenizer.decode(list(result.token_ids), skip_special_tokens=False)
        return whole if whole.startswith(least) else least

    def _submit(self, given: VlmEngineInput) -> _AskedPage:
        assert self.batcher is not None
        try:
            request = self._request(given)
            handle = self.batcher.submit_request(request)
        except InvalidRequest as error:
            return _AskedPage(refused=describe(error))
        # theirs come from a copy for each batch; here pages of a batch are written at the same time
        found = extract_generation_stoppers(given.extra_generation_config)
        return _AskedPage(handle, deepcopy(found))

    def _request(self, given: VlmEngineInput) -> Request:
        assert self.batcher is not None
        (picture,) = preprocess_image_batch([given.image])
        params = SamplingParams(
            **{
                **self.batcher.recommended_sampling.params,
                **self._penalties(),
                "max_tokens": given.max_new_tokens,
                "temperature": given.temperature,
                "stop": given.stop_strings,
                "skip_special_tokens": False,
            }
        )
        if given.prompt:
            return Request(prompt=given.prompt, images=picture, params=params)
        alone = {"role": "user", "content": [{"type": "image"}]}
        return Request(messages=[alone], images=picture, params=params)

    def _penalties(self) -> dict[str, Any]:
        given = {
            "repetition_penalty": self.options.repetition_penalty,
            "repetition_context_size": self.options.repetition_context_size,
        }
        return {name: value for name, value in given.items() if value is not None}

    def cleanup(self) -> None:
        """Close the batcher that was made here."""
        with self._lock:
            batcher, self.batcher = self.batcher, None
            self._initialized = False
        if self._is_own and batcher is not None:
            batcher.close()


@dataclass
class _AskedPage:
    """A page in the batch.

    Attributes:
        refused: why it was not submitted.
        stopped_by: the criterion that ended it.
        text: until then.
        num_tokens: likewise.
    """

    handle: Handle | None = None
    stoppers: Sequence[GenerationStopper] = ()
    refused: str | None = None
    stopped_by: GenerationStopper | None = None
    text: str = ""
    num_tokens: int = 0

    def watch(self) -> None:
        """Read the answer as it comes, and end it when a criterion holds."""
        if self.handle is None:
            return
        for event in self.handle.events():
            if event.token is None or _is_by_string(event.result):
                continue
            self.num_tokens += 1
            self.text += event.text
            self.stopped_by = _met(self.stoppers, self.text)
            if self.stopped_by is not None:
                self.handle.cancel()
                return


def _is_by_string(result: Result | None) -> bool:
    """Return whether an answer ended by a stop string, for which docling looks first."""
    return result is not None and isinstance(result.stop_reason, str)


def _met(stoppers: Iterable[GenerationStopper], text: str) -> GenerationStopper | None:
    """Return the first criterion that holds. One that raises is passed over, as in docling."""
    for stopper in stoppers:
        try:
            # docling's engines for MLX and APIs take characters for its tokens
            if stopper.should_stop(text[-stopper.lookback_tokens() :]):
                return stopper
        except Exception as error:
            _log.warning("%s raised: %s", type(stopper).__name__, error)
    return None


def _output(
    text: str, reason: str, result: Result, num_tokens: int, model: str | None
) -> VlmEngineOutput:
    timings = result.timings
    metadata = {
        # what is shared with other pages included, and waiting for a place left out
        "generation_time": timings.encode + timings.prefill + timings.decode,
        "num_tokens": num_tokens,
        "model": model,
        "finish_reason": result.finish_reason,
    }
    return VlmEngineOutput(text=text, stop_reason=reason, metadata=metadata)


def _failed(error: str | None, model: str | None) -> VlmEngineOutput:
    _log.error("a page has no answer: %s", error)
    metadata = {
        "generation_time": 0.0,
        "num_tokens": 0,
        "model": model,
        "finish_reason": "error",
        "error": error,
    }
    return VlmEngineOutput(
        text="", stop_reason=VlmStopReason.INFERENCE_ERROR.value, metadata=metadata
    )
