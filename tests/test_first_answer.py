"""A first answer waits for what it needs, and for nothing else: what a run imports, and what it does once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vlm_batch.assets import default_checkpoint, sample_images
from vlm_batch.models import families
from vlm_batch.registry import ModelSpec


def in_a_new_process(code: str, *args: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


LISTED = """
import sys
if sys.argv[1] == "ours":
    import vlm_batch
import transformers
import transformers.models
from transformers.utils import import_utils
modules = (transformers, transformers.models)
if sys.argv[1] == "ours":
    assert all("Qwen2VLProcessor" not in vars(module)["_class_to_module"] for module in modules)  # a few are listed
for module in modules:
    print(sorted(module.__all__), sorted(dir(module)), sorted(module._class_to_module.items()), sorted(module._modules))
    print(sorted((name, sorted(backends)) for name, backends in module._object_missing_backend.items()))
    print(sorted((file, sorted(names)) for file, names in module._import_structure.items()))
print(import_utils.fetch__all__("a = 1"), import_utils.fetch__all__("__all__ = ['b']"))
print(import_utils.fetch__all__("__all__ = ['b']\\n__all__ = [\\n    'c',\\n    'd',\\n]\\n"))
"""
#: Says where each name of transformers' is found while the folder of its name alone is listed.
FOUND = """
import vlm_batch, transformers
few, listed = (vars(transformers)[name] for name in ("_few", "_listed"))
whole = listed(few.all())
like = {name: listed(few.like(name)) for name in whole["_class_to_module"]}
found = {name: one for name, one in like.items() if name in one["_class_to_module"]}
in_order = lambda one: sorted(one) if isinstance(one, list) else one  # the order of back ends follows the hash seed
for what in ("_class_to_module", "_object_missing_backend"):
    assert not [name for name, one in found.items() if in_order(one[what].get(name)) != in_order(whole[what].get(name))]
print(len(found), len(like))
"""
ASKED = """
import vlm_batch, transformers
is_few = lambda: "_few" in vars(transformers)
assert transformers.AutoProcessor and transformers.PreTrainedConfig and transformers.models.auto and is_few()
assert not hasattr(transformers, "_no_such_name") and is_few()
assert transformers.Qwen2Tokenizer is transformers.Qwen2TokenizerFast and transformers.Qwen2VLConfig and is_few()
assert not hasattr(transformers, "NoSuchName") and not is_few()
assert transformers.Qwen2VLConfig().model_type == "qwen2_vl"
"""


def test_transformers_lists_the_same_models() -> None:
    theirs, ours = (in_a_new_process(LISTED, who) for who in ("theirs", "ours"))
    assert "qwen2_vl" in ours and ours == theirs


def test_transformers_finds_a_name_in_the_folder_of_its_model() -> None:
    found, known = map(int, in_a_new_process(FOUND).split())
    assert found > 0.9 * known


def test_transformers_lists_all_models_only_for_a_name_that_is_nowhere_else() -> None:
    in_a_new_process(ASKED)


FIRST_USE = """
import sys
from vlm_batch.runtime.imports import deferred_import
with deferred_import("csv"):
    import csv
    assert csv.__spec__ is not None
assert "csv" not in sys.modules
print(csv.writer is sys.modules["csv"].writer, csv is sys.modules["csv"])
import csv
print(csv is sys.modules["csv"])
with deferred_import("csv"), deferred_import("no_such_package"):
    assert csv is sys.modules["csv"] and "no_such_package" not in sys.modules
with deferred_import("wave"):
    from wave import Error
print(Error is sys.modules["wave"].Error)
"""


def test_a_package_comes_with_its_first_use() -> None:
    assert in_a_new_process(FIRST_USE).split() == ["True", "False", "True", "True"]


def test_every_family_is_found_without_the_others() -> None:
    """Its file holds its model types as texts."""
    told = in_a_new_process(
        "import json, vlm_batch.models as models\n"
        "found = [models.spec_for(t).family for t in ('qwen2_vl', 'falcon_h1')]\n"
        "few = len(models.registered())\n"
        "assert all(models.spec_for(t) is spec for spec in models.families() for t in spec.model_types)\n"
        "print(found, few < len(models.families()) / 2, models.spec_for('no_such_type'))"
    )
    assert told == "['qwen2_vl', 'falcon_h1'] True None"


@pytest.mark.parametrize("spec", families(), ids=lambda spec: spec.family)
def test_a_familys_file_names_its_model_types(spec: ModelSpec) -> None:
    assert spec.adapter is not None
    text = Path(sys.modules[spec.adapter.__module__].__file__ or "").read_text(
        encoding="utf-8"
    )
    assert all(f'"{model_type}"' in text for model_type in spec.model_types)


RUN = """
import sys
from vlm_batch.cli.main import main
assert main(["run", sys.argv[1], "--model", sys.argv[2], "--prompt", "describe the image", "--quiet"]) == 0
print(*sorted(sys.modules))
"""
#: What no run over pictures needs: back ends of transformers, libraries of tables, plots and recordings, servers.
HEAVY = {
    *(
        "torch",
        "torchvision",
        "torchaudio",
        "tensorflow",
        "scipy",
        "sklearn",
        "librosa",
    ),
    *("pandas", "pyarrow", "polars", "datasets", "ray", "matplotlib"),
    *("uvicorn", "starlette", "fastapi", "openai"),
    *("httpx", "httpcore", "httpcore2", "anyio", "requests", "urllib3"),
    *("soundfile", "soxr", "sentencepiece"),
}


def test_a_run_imports_neither_what_it_does_not_need_nor_other_families() -> None:
    found = (
        in_a_new_process(RUN, sample_images()[0], default_checkpoint())
        .splitlines()[-1]
        .split()
    )
    assert (
        "vlm_batch.models.qwen2_vl" in found and "vlm_batch.models.llava" not in found
    )
    assert not HEAVY & {name.partition(".")[0] for name in found}
    assert not [
        name
        for name in found
        if name.startswith(("vlm_batch.server.app", "vlm_batch.cli.facts"))
    ]
    assert len([name for name in found if name.startswith("transformers.models.")]) < 40


@pytest.mark.parametrize(
    "args", [["--version"], ["run", "--help"], ["run", "nowhere.jpg"]]
)
def test_what_needs_no_model_does_not_wait_for_mlx(args: list[str]) -> None:
    code = "import sys\nfrom vlm_batch.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    told = in_a_new_process(
        f"{code}print('mlx.core' in sys.modules, 'transformers' in sys.modules)", *args
    )
    assert told.splitlines()[-1] == "False False"
