"""From a path, a hub id or a model object to a whole engine: the one place that sees all rooms."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_path, get_model_type

from vlm_batch.adapters.base import Adapter
from vlm_batch.adapters.fingerprint import fingerprint
from vlm_batch.adapters.modules import leave_on_disk
from vlm_batch.adapters.quantisation import check_quantisation
from vlm_batch.adapters.single import SingleRow
from vlm_batch.adapters.towers import remember_features
from vlm_batch.caches.known import check_caches
from vlm_batch.caches.quantisation import KVQuantisation, settings_of
from vlm_batch.engine.generator import BatchGenerator
from vlm_batch.engine.loop import EngineLoop, Look
from vlm_batch.engine.port import AnswerText
from vlm_batch.engine.reuse import Caches, Reuse
from vlm_batch.engine.shapes import FreeShapes, Shapes
from vlm_batch.errors import UnsupportedModel, shown
from vlm_batch.inputs.loaders import Loaders
from vlm_batch.inputs.prepare import Limits, Preparer
from vlm_batch.inputs.processing import Processing
from vlm_batch.loading.checkpoints import read_config, read_model, read_processor
from vlm_batch.loading.exactness import fixed_shapes
from vlm_batch.models import families, package_of, spec_for
from vlm_batch.models._refused import ONE_AT_A_TIME, REFUSED
from vlm_batch.policy import Policy, policy_of
from vlm_batch.runtime.blas import narrow_kernels
from vlm_batch.runtime.device import Device, device
from vlm_batch.runtime.memory import free_bytes
from vlm_batch.store.budget import ByteBudget
from vlm_batch.store.features import FeatureStore
from vlm_batch.store.files import Identity
from vlm_batch.types import FetchPolicy


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of an engine, by the part that they belong to; ``VLMBatcher`` says what they mean. Raises ValueError."""

    policy: Policy = field(default_factory=lambda: policy_of({}))
    limits: Limits = field(default_factory=Limits)
    fetch: FetchPolicy = field(default_factory=FetchPolicy)
    caches: Caches = field(default_factory=Caches)
    kv: KVQuantisation | None = None
    reproducible: bool = False
    warm_up: bool = False

    def __post_init__(self) -> None:
        kinds = {"limits": Limits, "fetch": FetchPolicy, "caches": Caches, "kv": KVQuantisation}
        for name, kind in kinds.items():
            value = vars(self)[name]
            if not (isinstance(value, kind) or (name == "kv" and value is None)):
                raise ValueError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")
        for name in ("reproducible", "warm_up"):
            if not isinstance(vars(self)[name], bool):
                raise ValueError(f"{name} is {shown(vars(self)[name])}; it must be True or False")


@dataclass(frozen=True)
class Engine:
    """A model that is ready to answer: its loop, to be run by one thread, and the checks that come before it."""

    loop: EngineLoop
    preparer: Preparer


def make_engine(model: nn.Module, processor: Any, options: EngineOptions) -> Engine:
    """An engine for a loaded model. Raises UnsupportedModel for a model that cannot be run with these options."""
    adapter = adapt(model)
    if options.kv is not None:
        check_scheme(options.kv)
        check_quantisation(adapter, options.kv)
    policy = replace(options.policy, max_prompt_tokens=options.limits.prompt_tokens)
    if adapter.spec.max_rows is not None:
        # Where rows cannot share a batch, what a row's encoding leaves on the model must last until its end.
        policy = replace(
            policy, max_rows=min(policy.max_rows or adapter.spec.max_rows, adapter.spec.max_rows), encode_ahead=0
        )
    shapes = None
    if options.reproducible:
        shapes = fixed_shapes(adapter, options.kv, policy, max_rows=policy.max_rows or policy.most_rows)
    reuse = _reuse(adapter, options, shapes or FreeShapes())
    if policy.max_bytes is None:
        policy = replace(policy, max_bytes=_bytes_for_rows(options.caches.max_bytes))
    processing = Processing(adapter.processor(processor), model.config, adapter.video_sampling)
    generator = BatchGenerator(
        adapter,
        text=AnswerText(processing.decode, frozenset(processing.eos_token_ids)),
        policy=policy,
        reuse=reuse,
        kv=options.kv,
        shapes=shapes,
    )
    preparer = Preparer(
        processing,
        adapter.spec,
        image_token_ids=adapter.image_token_ids,
        check_inputs=adapter.check_inputs,
        max_context=adapter.max_context,
        limits=options.limits,
        fetch=options.fetch,
        hashes=options.caches.max_bytes > 0,
    )
    return Engine(EngineLoop(generator, Loaders(preparer.prepare), warm_up=options.warm_up), preparer)


def load_engine(
    folder: Path, options: EngineOptions, look: Look, *, dtype: str = "auto", trust_remote_code: bool = False
) -> Engine:
    """An engine for a checkpoint's folder; raises what ``load_model``, ``look`` and ``make_engine`` raise."""
    model, processor = load_model(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    look()
    return make_engine(model, processor, options)


def _bytes_for_rows(for_caches: int) -> int | None:
    """Bytes for keys and values of live rows beside weights, which are there by now, and what is kept for later requests; half
    of what is free at least. None where nothing is known, or weights leave nothing: what does not fit then fails by itself."""
    free = free_bytes()
    return max(free - for_caches, free // 2) if free else None


def _reuse(adapter: Adapter, options: EngineOptions, shapes: Shapes) -> Reuse:
    identity = Identity(fingerprint(adapter), {**settings_of(options.kv), **shapes.settings})
    if not options.caches.max_bytes:
        return Reuse(adapter, None, identity, shapes=shapes)
    budget = ByteBudget(options.caches.max_bytes)
    remember_features(adapter, FeatureStore(budget))
    prefix = options.caches.prefix_cache(budget, identity) if adapter.spec.no_prefix_reuse is None else None
    return Reuse(adapter, prefix, identity, budget, shapes)


#: Types that weights can be loaded in: ``auto`` is the checkpoint's own, but float32 on a CPU.
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
    """A checkpoint's model and processor, through mlx-vlm's loader; a hub id is fetched first.

    The model type is checked before any weight is read, and an incomplete config is refused. ``dtype`` is one of
    ``DTYPES``; by default half-precision weights become float32 on a CPU: MLX has no fast path for them there. Raises
    UnsupportedModel, FileNotFoundError, ValueError for another ``dtype``, and what the loader raises for a damaged
    checkpoint.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    wanted = mx.float32 if dtype == "auto" and on_cpu else DTYPES[dtype]
    path = find_checkpoint(path_or_id)
    model_type = get_model_type(read_config(path))
    check_model_type(model_type)
    package_of(model_type)  # what is wrong with another package's code is said by its own error
    try:
        model = read_model(
            path, in_float32=on_cpu and wanted is not None and wanted == mx.float32, trust_remote_code=trust_remote_code
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # what a missing or wrong entry ends in
        said = " ".join(str(error).split())[:300]  # mlx lists every weight that does not fit
        raise UnsupportedModel(
            f"{path}: config.json does not describe a whole {model_type} model: {type(error).__name__}: {said}"
        ) from error
    try:
        processor = read_processor(path, model, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a tokenizer's or a processor's class raises, or a package that it asks for
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"{path}: its processor cannot be read: {type(error).__name__}: {said}") from error
    leave_on_disk(model)
    if wanted is not None:
        model.set_dtype(wanted)
        mx.eval(model.parameters())
    _warn_of_narrow_kernels(model)
    return model, processor


def _warn_of_narrow_kernels(model: nn.Module) -> None:
    """Say where the environment slows float32 products down; nothing else goes through the BLAS."""
    said = narrow_kernels() if mx.default_device().type == mx.DeviceType.cpu else None
    if said and any(array.dtype == mx.float32 for array in dict(tree_flatten(model.parameters())).values()):
        warnings.warn(said, stacklevel=3)


def find_checkpoint(path_or_id: str | Path) -> Path:
    """A local folder as it is; anything else is fetched from the hub. Raises FileNotFoundError with both outcomes."""
    try:
        return Path(get_model_path(str(path_or_id)))
    except Exception as error:
        raise FileNotFoundError(f"{path_or_id} is no folder here, and the hub did not provide it: {error}") from error


def check_model_type(model_type: str | None) -> None:
    """Raise UnsupportedModel for a checkpoint whose type is refused, or that neither this library nor mlx-vlm knows."""
    if model_type is None:
        raise UnsupportedModel(f"config.json names no model_type; the known families are {_known()}")
    check_refused(model_type)
    check_device(model_type)
    if spec_for(model_type) is None and find_spec(f"mlx_vlm.models.{model_type}") is None:
        raise UnsupportedModel(f"model type {model_type!r} is not known; the known families are {_known()}")


def check_refused(model_type: str) -> None:
    """Raise UnsupportedModel, with the reason, for a model that writes no text one token at a time."""
    if model_type in REFUSED:
        raise UnsupportedModel(f"model type {model_type!r} is refused: {REFUSED[model_type]}")


#: Model types, with commas between them, that are served on CUDA although they are refused there; ``all`` is every one.
ON_CUDA = "VLM_BATCH_ON_CUDA"


def check_device(model_type: str) -> None:
    """Raise UnsupportedModel for a model that was seen to go wrong on this kind of device; ``ON_CUDA`` makes it a warning."""
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


#: Serves TurboQuant where it has no fused kernels.
TURBOQUANT = "VLM_BATCH_TURBOQUANT"


def check_scheme(kv: KVQuantisation) -> None:
    """Raise UnsupportedModel for TurboQuant away from Metal, unless the environment's ``TURBOQUANT`` is "slow"."""
    if kv.scheme == "turboquant" and device() is not Device.METAL and os.environ.get(TURBOQUANT) != "slow":
        raise UnsupportedModel(
            "scheme='turboquant' is refused here: its fused kernels are Metal's, and without them a decode step takes "
            "5 to 19 times as long (docs/benchmarks.md, caches). kv_bits=4 in scheme='uniform' takes a fifth more "
            f"memory and 1.1 to 1.6 times as long; {TURBOQUANT}=slow in the environment serves it all the same"
        )


def adapt(model: nn.Module, model_type: str | None = None) -> Adapter:
    """The family's adapter; a model of no known family runs one row at a time, which is said once.

    Raises UnsupportedModel if it cannot be run that way either, or not on this device.
    """
    model_type = model_type or str(model.config.model_type)
    if spec_for(model_type) is None:  # a checkpoint's own name for it, which mlx-vlm maps to another
        model_type = str(get_model_type({"model_type": model_type}))
    check_refused(model_type)
    check_device(model_type)
    spec = spec_for(model_type)
    if spec is not None and spec.adapter is not None:
        try:
            adapter = spec.adapter(model)
        except AttributeError as error:
            raise UnsupportedModel(f"this {model_type} model lacks what its adapter needs: {error}") from error
        check_caches(adapter.make_cache(), family=spec.family)
        return adapter
    if not SingleRow.can_run(model):
        raise UnsupportedModel(
            f"model type {model_type!r} is not known, and it is no decoder that could be run one row at a time; "
            f"the known families are {_known()}"
        )
    warnings.warn(
        f"model type {model_type!r} runs one request at a time, through mlx-vlm's own path: "
        f"{ONE_AT_A_TIME.get(model_type, 'it has no verified adapter')}. The known families are {_known()}",
        stacklevel=3,
    )
    return SingleRow(model)


def _known() -> str:
    return ", ".join(spec.family for spec in families())
