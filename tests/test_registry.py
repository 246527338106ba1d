"""Every model package of mlx-vlm is in the registry, or in a table that says why it is not."""

from __future__ import annotations

import json
from pathlib import Path
from pkgutil import iter_modules

import mlx_vlm.models
import mlx_vlm.speculative.drafters
import pytest
from mlx_vlm.utils import MODEL_REMAPPING, get_model_type

from vlm_batch import VLMBatcher, loading
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading import adapt, check_model_type
from vlm_batch.models import families
from vlm_batch.models._refused import ONE_AT_A_TIME, REFUSED
from vlm_batch.runtime.device import Device

#: Registered beside mlx-vlm's own names: types that its loader gives other names to before it looks for a package.
OTHER_NAMES = set(MODEL_REMAPPING)


def packages(parent: object) -> set[str]:
    """The folders of a package: one for each model type that mlx-vlm's loader can find."""
    return {module.name for module in iter_modules(parent.__path__) if module.ispkg}  # type: ignore[attr-defined]


def registered() -> set[str]:
    return {model_type for spec in families() for model_type in spec.model_types}


def test_every_package_of_mlx_vlm_has_an_entry() -> None:
    """A new release of mlx-vlm shows here what is missing."""
    found = packages(mlx_vlm.models) | packages(mlx_vlm.speculative.drafters)
    missing = found - registered() - set(REFUSED) - set(ONE_AT_A_TIME)
    assert not missing, (
        f"neither registered nor refused with a reason: {sorted(missing)}"
    )


def test_no_entry_without_a_package_and_none_twice() -> None:
    found = packages(mlx_vlm.models) | packages(mlx_vlm.speculative.drafters)
    assert set(REFUSED) | set(ONE_AT_A_TIME) <= found
    assert registered() <= found | OTHER_NAMES
    tables = (registered(), set(REFUSED), set(ONE_AT_A_TIME))
    assert len(set().union(*tables)) == sum(len(table) for table in tables)


def test_every_remapped_type_has_an_entry() -> None:
    known = registered() | set(REFUSED) | set(ONE_AT_A_TIME)
    assert {get_model_type({"model_type": name}) for name in MODEL_REMAPPING} <= known


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_a_refused_type_says_why(model_type: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        check_model_type(model_type)
    assert (
        str(refusal.value)
        == f"model type {model_type!r} is refused: {REFUSED[model_type]}"
    )


def test_a_refused_checkpoint_says_why_before_any_weight_is_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "rf-detr"}), encoding="utf-8"
    )
    with pytest.raises(
        UnsupportedModel, match="'rfdetr' is refused: it finds objects in pictures"
    ):
        VLMBatcher(tmp_path)


def test_a_refused_model_object_says_why() -> None:
    with pytest.raises(UnsupportedModel, match="'sam3' is refused"):
        adapt(object(), "sam3")  # type: ignore[arg-type]


NOT_ON_CUDA = sorted(name for spec in families() for name, _ in spec.not_on_cuda)


def test_the_models_that_go_wrong_on_cuda_are_named() -> None:
    """Those that failed alone of 567 cells on an H100, or by drafts, by the names that their checkpoints carry."""
    assert NOT_ON_CUDA == [
        "glm5_next",
        "muse_spark",
        "muse_spark_open",
        "prism_hadamard_qwen35",
        "youtu_vl",
    ]
    for spec in families():
        assert {name for name, _ in spec.not_on_cuda} <= set(spec.model_types)


@pytest.mark.parametrize("model_type", NOT_ON_CUDA)
def test_what_goes_wrong_on_cuda_is_refused_there_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(loading.ON_CUDA, raising=False)
    for other in (Device.CPU, Device.METAL):
        monkeypatch.setattr(loading, "device", lambda other=other: other)
        check_model_type(model_type)
    monkeypatch.setattr(loading, "device", lambda: Device.CUDA)
    check_model_type("qwen3_5")  # its Hadamard packs alone are refused
    for refuses in (check_model_type, lambda name: adapt(object(), name)):  # type: ignore[arg-type]
        with pytest.raises(
            UnsupportedModel,
            match=f"'{model_type}' is refused on CUDA: .*ON_CUDA={model_type}",
        ):
            refuses(model_type)


def test_who_asks_for_it_is_told_what_he_risks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "device", lambda: Device.CUDA)
    monkeypatch.setenv(loading.ON_CUDA, "muse_spark, youtu_vl")
    with pytest.warns(
        UserWarning, match="youtu_vl is served on CUDA, where answers may be wrong"
    ):
        check_model_type("youtu_vl")
    with pytest.raises(UnsupportedModel, match="prism_hadamard_qwen35"):
        check_model_type("prism_hadamard_qwen35")
    monkeypatch.setenv(loading.ON_CUDA, "all")
    with pytest.warns(UserWarning, match="prism_hadamard_qwen35"):
        check_model_type("prism_hadamard_qwen35")


def test_a_checkpoint_is_refused_on_cuda_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "device", lambda: Device.CUDA)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "youtu_vl"}), encoding="utf-8"
    )
    with pytest.raises(UnsupportedModel, match="illegal memory access"):
        VLMBatcher(tmp_path)


def test_drafters_are_found() -> None:
    drafters = packages(mlx_vlm.speculative.drafters) - packages(mlx_vlm.models)
    assert drafters and all("proposes tokens" in REFUSED[name] for name in drafters)
