"""Makes an engine from a path, a hub id or a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_path, get_model_type
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.fingerprint import fingerprint
from vlm_batch.adapters.modules import leave_on_disk
from vlm_batch.adapters.operations import compile_products
from vlm_batch.adapters.prompts import num_logits
from vlm_batch.adapters.quantisation import check_quantisation
from vlm_batch.adapters.shared import share_products
from vlm_batch.adapters.single import SingleRow
from vlm_batch.adapters.towers import remember_features
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.caches.verified import check_caches
from vlm_batch.checks import demand
from vlm_batch.engine.drafts import NO_DRAFTS, Drafts, NoDrafts
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.loop import EngineLoop, Look
from vlm_batch.engine.reuse import Caches, Reuse
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.engine.text import AnswerText
from vlm_batch.errors import UnsupportedModel, is_out_of_memory
from vlm_batch.inputs.checking import ModelFacts
from vlm_batch.inputs.limits import Limits
from vlm_batch.inputs.loaders import Loaders
from vlm_batch.inputs.prepare import Preparer
from vlm_batch.inputs.processing import Processing
from vlm_batch.inputs.processors import with_pillow
from vlm_batch.inputs.recalled import with_picture_cache
from vlm_batch.loading.checkpoints import read_config, read_model, read_processor
from vlm_batch.loading.folders import (
    check_config,
    check_folder,
    folder_facts,
    what_is_missing,
)
from vlm_batch.loading.quantised import INSTEAD, quantisation_of
from vlm_batch.models import not_known, package_of, spec_for
from vlm_batch.models._refused import ONE_AT_A_TIME, REFUSED
from vlm_batch.policy import POLICIES, Policy, policy_of
from vlm_batch.proofs.proving import fixed_shapes
from vlm_batch.registry import ModelSpec
from vlm_batch.runtime.blas import narrow_kernels
from vlm_batch.runtime.device import Device, device, rounds_float32
from vlm_batch.runtime.launches import TF32
from vlm_batch.runtime.memory import free_bytes
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.files import Identity
from vlm_batch.store.pictures import PictureStore
from vlm_batch.types import FetchPolicy


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of an engine; see ``VLMBatcher``."""

    policy: Policy = field(default_factory=lambda: policy_of({}))
    limits: Limits = field(default_factory=Limits)
    fetch: FetchPolicy = field(default_factory=FetchPolicy)
    caches: Caches = field(default_factory=Caches)
    kv: KVQuantisation | None = None
    reproducible: bool = False
    warm_up: bool = False

    def __post_init__(self) -> None:
        for name, (kind, right) in _KINDS.items():
            value = vars(self)[name]
            demand(isinstance(value, kind), ValueError, name, value, right)


_KINDS: Mapping[str, tuple[Any, str]] = {
    "limits": (Limits, "Limits"),
    "fetch": (FetchPolicy, "a FetchPolicy"),
    "caches": (Caches, "Caches"),
    "kv": ((KVQuantisation, NoneType), "a KVQuantisation, or None"),
    "reproducible": (bool, "True or False"),
    "warm_up": (bool, "True or False"),
}


@dataclass(frozen=True)
class Engine:
    """The engine's loop and the checks of requests."""

    loop: EngineLoop
    preparer: Preparer


def make_engine(model: nn.Module, processor: Any, options: EngineOptions) -> Engine:
    """Return an engine for a loaded model.

    Raises:
        UnsupportedModel: The model cannot be run with these options.
    """
    adapter = adapt(model, policy=options.policy)
    _warn_of_tf32(model)
    if options.kv is not None:
        check_quantisation(adapter, options.kv)
    compile_products(model)
    policy = replace(options.policy, max_prompt_tokens=options.limits.prompt_tokens)
    if adapter.spec.max_rows is not None:
        # Rows that cannot share a batch keep the state of their encoding on the model until they end.
        most = min(policy.max_rows or adapter.spec.max_rows, adapter.spec.max_rows)
        policy = replace(policy, max_rows=most, encode_ahead=0)
    shapes = None
    if options.reproducible:
        shapes = fixed_shapes(
            adapter, options.kv, policy, max_rows=policy.max_rows or policy.most_rows
        )
    reuse = _reuse(adapter, options, shapes or FreeShapes())
    if policy.max_bytes is None:
        policy = replace(policy, max_bytes=_bytes_for_rows(options.caches.max_bytes))
    processor = adapter.processor(with_pillow(processor))
    if reuse.pictures is not None:
        processor = with_picture_cache(processor, reuse.pictures)
    processing = Processing(processor, model.config, adapter.video_sampling)
    generator = BatchGenerator(
        adapter,
        text=answer_text(processing, adapter.spec),
        policy=policy,
        reuse=reuse,
        kv=options.kv,
        shapes=shapes,
        drafts=_drafts(policy.draft, adapter),
    )
    preparer = Preparer(
        processing,
        ModelFacts(
            spec=adapter.spec,
            image_token_ids=adapter.image_token_ids,
            check_inputs=adapter.check_inputs,
            max_context=adapter.max_context,
            num_logits=num_logits(adapter.language, adapter.token_table),
        ),
        limits=options.limits,
        fetch=options.fetch,
        pictures=reuse.pictures,
    )
    return Engine(
        EngineLoop(
            generator,
            Loaders(preparer.prepare, preparer.compiled),
            warm_up=options.warm_up,
        ),
        preparer,
    )


def answers_in_special_tokens(processing: Processing, spec: ModelSpec) -> bool:
    """Return whether a checkpoint shows special tokens without being asked."""
    return any(processing.has_special(word) for word, _ in spec.special_tokens)


def answer_text(processing: Processing, spec: ModelSpec) -> AnswerText:
    """Return the decoders of a checkpoint's answers."""
    is_shown = answers_in_special_tokens(processing, spec)
    return AnswerText(
        processing.decode,
        frozenset(processing.eos_token_ids),
        decode_all=processing.decode_all,
        decode_usual=processing.decode_content if is_shown else None,
    )


def _drafts(draft: str, adapter: Adapter) -> NoDrafts:
    """Return what an engine drafts with. Raises ValueError."""
    if draft == "off":
        return NO_DRAFTS
    if draft == "auto":
        return Drafts() if adapter.can_draft else NO_DRAFTS
    from vlm_batch.adapters.heads import load_heads

    return Drafts(load_heads(draft, adapter))


def load_engine(
    folder: Path,
    options: EngineOptions,
    look: Look,
    *,
    dtype: str,
    trust_remote_code: bool,
) -> Engine:
    """Return a folder's engine."""
    model, processor = load_model(
        folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
    look()
    return make_engine(model, processor, options)


def _bytes_for_rows(for_caches: int) -> int | None:
    """Return bytes for live rows' keys and values: those that caches leave, at least half; None if unknown."""
    free = free_bytes()
    if free:
        return max(free - for_caches, free // 2)
    return None


def _reuse(adapter: Adapter, options: EngineOptions, shapes: Shapes) -> Reuse:
    identity = Identity(
        fingerprint(adapter), {**settings_of(options.kv), **shapes.settings}
    )
    if not options.caches.max_bytes:
        return Reuse(adapter, None, identity, shapes=shapes)
    budget = ByteBudget(options.caches.max_bytes)
    remember_features(adapter, FeatureStore(budget))
    prefix = (
        options.caches.prefix_cache(budget, identity)
        if adapter.spec.no_prefix_reuse is None
        else None
    )
    return Reuse(adapter, prefix, identity, budget, shapes, PictureStore(budget))


#: Files with an image processor's settings.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Types of weights; ``auto`` is the checkpoint's own, or float32 on a CPU.
DTYPES: dict[str, mx.Dtype | None] = {
    "auto": None,
    "checkpoint": None,
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}


def load_model(
    path_or_id: str | Path, *, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """Load a checkpoint's model and processor by mlx-vlm's loader.

    Args:
        path_or_id: A folder, or a hub id to download.
        dtype: One of ``DTYPES``; MLX's half precision is slow on a CPU.
        trust_remote_code: Run code from the folder.

    Raises:
        UnsupportedModel: The model type is refused or unknown, or the folder incomplete.
        FileNotFoundError: There is no such folder or hub id.
        ValueError: ``dtype`` is unknown.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and dtype == "auto":
        dtype = "float32"
    path = find_checkpoint(path_or_id)
    check_config(path)
    model_type = get_model_type(read_config(path))
    check_model_type(model_type)
    package_of(model_type)  # raises its own error for another package's code
    check_folder(path)
    try:
        model = read_model(
            path,
            in_float32=on_cpu and dtype == "float32",
            trust_remote_code=trust_remote_code,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # a missing or wrong entry
        if is_out_of_memory(error):
            raise
        raise UnsupportedModel(f"{path}: {_misfit(path, model_type, error)}") from error
    try:
        processor = read_processor(path, model, trust_remote_code=trust_remote_code)
    except Exception as error:  # anything that a tokenizer or processor may raise
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"{path}: its processor cannot be read: {type(error).__name__}: {said}"
        ) from error
    _warn_of_missing_processor(path, str(model_type))
    leave_on_disk(model)
    wanted = DTYPES[dtype]
    if wanted is not None:
        model.set_dtype(wanted)
        mx.eval(model.parameters())
    _warn_of_narrow_kernels(model)
    return model, processor


def _misfit(path: Path, model_type: str | None, error: Exception) -> str:
    """Describe a folder that could not be read, by its files and the loader's error."""
    if missing := what_is_missing(path):
        return missing
    # mlx lists every weight that does not fit
    said = " ".join(str(error).split())[:300]
    reason = f"{type(error).__name__}: {said}"
    if method := quantisation_of(folder_facts(path).config):
        return f"its weights are quantised by {method.name}, in a form that mlx-vlm cannot read here ({reason}). {INSTEAD}"
    # mlx.nn.Module.load_weights
    if not said.startswith(("Received ", "Missing ", "Expected shape ")):
        return f"config.json does not describe a whole {model_type} model: {reason}"
    return (
        f"its tensors are not those of the {model_type} model that mlx-vlm builds by its config.json: the folder is not whole, "
        f"or it has what mlx-vlm's class does not know: {reason}"
    )


def _warn_of_missing_processor(path: Path, model_type: str) -> None:
    """Warn where transformers would refuse a folder, and mlx-vlm takes the defaults of a class."""
    if model_type in IMAGE_PROCESSOR_MAPPING_NAMES and not any(
        (path / name).exists() for name in PROCESSOR_FILES
    ):
        message = (
            f"{path} has neither {' nor '.join(PROCESSOR_FILES)}: pictures are scaled and normalised by the defaults of "
            f"mlx-vlm's {model_type}, which may not be this model's"
        )
        warnings.warn(message, stacklevel=3)


def _warn_of_narrow_kernels(model: nn.Module) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    said = narrow_kernels()
    if said and _has_float32(model):
        warnings.warn(said, stacklevel=3)


def _warn_of_tf32(model: nn.Module) -> None:
    if os.environ.get(TF32) == "0" and _has_float32(model) and rounds_float32():
        warnings.warn(
            f"float32 products round their factors to ten bits here (TF32): MLX had read {TF32} before vlm_batch was "
            f"imported. Import vlm_batch before any product is computed, or start Python with {TF32}=0; with {TF32}=1 it "
            "is as you wish, and nothing is said",
            stacklevel=4,
        )


def _has_float32(model: nn.Module) -> bool:
    return any(
        array.dtype == mx.float32
        for array in dict(tree_flatten(model.parameters())).values()
    )


def find_checkpoint(path_or_id: str | Path) -> Path:
    """Return a local or downloaded folder. Raises FileNotFoundError."""
    try:
        return Path(get_model_path(str(path_or_id)))
    except Exception as error:
        raise FileNotFoundError(
            f"{path_or_id} is no folder here, and the hub did not provide it: {error}"
        ) from error


def check_model_type(model_type: str | None) -> None:
    """Raise UnsupportedModel for a type that is refused or unknown."""
    if model_type is None:
        raise UnsupportedModel(
            "config.json names no model_type, so it is not known whose model it is"
        )
    check_refused(model_type)
    check_device(model_type)
    if (
        spec_for(model_type) is None
        and find_spec(f"mlx_vlm.models.{model_type}") is None
    ):
        raise UnsupportedModel(not_known(model_type))


def check_refused(model_type: str) -> None:
    """Raise UnsupportedModel for a model that writes no text token by token."""
    if model_type in REFUSED:
        raise UnsupportedModel(
            f"model type {model_type!r} is refused: {REFUSED[model_type]}"
        )


#: Environment variable with comma-separated model types to serve on CUDA although they are refused; ``all`` for every one.
ON_CUDA = "VLM_BATCH_ON_CUDA"


def check_device(model_type: str) -> None:
    """Refuse a model that fails on this device; with ``ON_CUDA`` warn."""
    spec = spec_for(model_type)
    why = None if spec is None else dict(spec.not_on_cuda).get(model_type)
    if why is None or device() is not Device.CUDA:
        return
    allowed = {name.strip() for name in os.environ.get(ON_CUDA, "").split(",")}
    if not allowed & {model_type, "all"}:
        raise UnsupportedModel(
            f"model type {model_type!r} is refused on CUDA: {why}. Serve it on a CPU or on Apple silicon; "
            f"{ON_CUDA}={model_type} in the environment serves it here all the same, at the risk of wrong answers, or of the "
            "process's end"
        )
    message = f"{ON_CUDA}: {model_type} is served on CUDA, where answers may be wrong and the process may end: {why}"
    warnings.warn(message, stacklevel=4)


def adapt(
    model: nn.Module, model_type: str | None = None, policy: Policy | None = None
) -> Adapter:
    """Return a model's adapter. An unknown decoder runs one row at a time, with a warning.

    Args:
        model: The loaded model.
        model_type: Default: its configuration's.
        policy: Decides if layers with one input share a product. Default: the device's.

    Raises:
        UnsupportedModel: The model cannot run on this device.
    """
    model_type = model_type or str(model.config.model_type)
    if spec_for(model_type) is None:  # mlx-vlm maps some checkpoints' types to others
        model_type = str(get_model_type({"model_type": model_type}))
    check_refused(model_type)
    check_device(model_type)
    spec = spec_for(model_type)
    if spec is not None and spec.adapter is not None:
        try:
            adapter: Adapter = spec.adapter(model)
        except AttributeError as error:
            raise UnsupportedModel(
                f"this {model_type} model lacks what its adapter needs: {error}"
            ) from error
        check_caches(adapter.make_cache(), family=spec.family)
        if (policy or POLICIES[device()]).wide_products:
            share_products(adapter, model)
        return adapter
    if not SingleRow.can_run(model):
        raise UnsupportedModel(
            f"{not_known(model_type)}. It is no decoder that could be run one row at a time, either"
        )
    warnings.warn(
        f"model type {model_type!r} runs one request at a time, through mlx-vlm's own path: "
        f"{ONE_AT_A_TIME.get(model_type, 'it has no verified adapter')}",
        stacklevel=3,
    )
    return SingleRow(model)
