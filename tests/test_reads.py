"""The table of what mlx-vlm's and transformers' code reads is that of the installed versions; loading reads no code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests import reads_table
from tests.checkpoints import write_checkpoint
from tests.reads_table import TABLE, Reads, knows_pictures, note_tiny
from tests.zoo import FAMILIES
from vlm_batch.errors import UnsupportedModel
from vlm_batch.loading.checkpoints import read_model
from vlm_batch.models import _reads
from vlm_batch.models._reads import config_reads, warn_of_other_version
from vlm_batch.models._refused import ONE_AT_A_TIME

WRITTEN: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
#: Types whose part of the table is made anew: a plain one, one whose decoder follows the folder, one of text alone.
SAMPLED = ("qwen2_vl", "llava", "llama")
ADVICE = "; python -m tests.reads_table makes the table anew"


def installed(package: str) -> bool:
    return bool(version(package) == WRITTEN[package.replace("-", "_")]["version"])


@pytest.mark.parametrize("package", ["mlx-vlm", "transformers"])
def test_the_table_is_of_the_installed_code(package: str) -> None:
    """Its digests say that no file of models changed since."""
    if not installed(package):
        pytest.skip(f"{package} {version(package)} is not the table's")
    name = package.replace("-", "_")
    assert reads_table.digests()[name] == WRITTEN["digests"][name], name + ADVICE


@pytest.mark.skipif(not installed("mlx-vlm"), reason="another mlx-vlm")
@pytest.mark.skipif(not installed("transformers"), reason="another transformers")
@pytest.mark.parametrize("model_type", SAMPLED)
def test_the_script_makes_what_is_written(model_type: str) -> None:
    found = reads_table.reads_of_mlx_vlm([model_type])
    written = WRITTEN["mlx_vlm"]["models"][model_type]
    assert found[model_type].as_json() == written, model_type + ADVICE


@pytest.mark.skipif(not installed("transformers"), reason="another transformers")
def test_the_script_makes_what_is_written_of_transformers() -> None:
    written = WRITTEN["transformers"]
    for folder in ("qwen2_vl", "mistral"):
        found = reads_table.read_in(reads_table.TRANSFORMERS / "models" / folder)
        assert sorted(found) == written["models"][folder], folder + ADVICE
    assert "mistral" in written["all_layers_slide"]
    assert "qwen2_vl" not in written["all_layers_slide"]


@pytest.mark.skipif(not installed("mlx-vlm"), reason="another mlx-vlm")
def test_whatever_models_and_adapters_read_is_written() -> None:
    """Of every family in the zoo: an adapter that reads a further setting shows here."""
    found: dict[str, Reads] = defaultdict(Reads)
    for tiny in FAMILIES.values():
        note_tiny(found, tiny)
    for model_type, reads in found.items():
        written = WRITTEN["mlx_vlm"]["models"][model_type]
        assert reads.later <= set(written["later"]), model_type + ADVICE
        assert reads.activations <= set(written["activations"]), model_type + ADVICE
        for path, names in reads.named.items():
            known = set(written["named"].get(path, ()))
            assert names <= known, model_type + ADVICE


def test_reads_are_noted_by_part() -> None:
    """LLaVA's decoder reads its epsilon, and its tower none; what nobody reads is not there."""
    reads = config_reads("llava")
    assert reads is not None
    assert ("text_config", "rms_norm_eps") in reads
    assert ("vision_config", "no_such_setting") not in reads
    assert ("text_config", "attention_dropout") not in reads
    assert config_reads("of_another_package") is None


def test_a_decoder_of_text_is_known_by_its_code(tmp_path: Path) -> None:
    """A package of mlx-vlm is served one row at a time if it takes no pictures; else it needs an entry."""
    (tmp_path / "language.py").write_text(
        '"""As in the vision model."""\n\nclass Model:\n    pass  # no vision\n'
    )
    assert not knows_pictures(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "other.py").write_text(
        "from .language import Model\n\ndef look(config):\n    return config.vision_config\n"
    )
    assert knows_pictures(other)
    assert {"llama", "gpt_oss", "qwen3_5_text"} <= set(ONE_AT_A_TIME)
    assert "llava" not in ONE_AT_A_TIME and "no_such_type" not in ONE_AT_A_TIME


# Loading
# ---------------------------------------------------------------------------------------------------------------------

#: Loads a folder with its processor, and prints each .py file that was opened, but by imports.
LOADING = """
import inspect
import sys

opened = []

def note(event, arguments):
    if event != "open" or not str(arguments[0]).endswith(".py"):
        return
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" in file or "/site-packages/" in file:
            return  # an import, or a library's own doing
        if "/vlm_batch/" in file:
            opened.append(arguments[0])
            return
        frame = frame.f_back


def refuse(*_):
    raise OSError("could not get source code")

inspect.getsource = inspect.getsourcelines = inspect.findsource = refuse
sys.addaudithook(note)
from vlm_batch import VLMBatcher, SamplingParams
from PIL import Image

with VLMBatcher(sys.argv[1]) as batcher:
    asked = batcher.submit(Image.new("RGB", (56, 56)), "x", params=SamplingParams(max_tokens=2))
    assert asked.result(timeout=120).error is None
print("opened:", *sorted(set(opened)))
"""


def test_no_code_is_read_when_a_checkpoint_is_loaded() -> None:
    """And an answer is given, where no source of any function can be had."""
    folder = Path("fixtures/checkpoints/qwen2_vl").resolve()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADING, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    opened = done.stdout.split("opened:")[1].split()
    package = str(Path.cwd() / "vlm_batch")
    # which of our own files has a family: a folder without sources imports them all
    assert [one for one in opened if not one.startswith(package)] == []


def test_families_are_found_without_their_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vlm_batch import models

    imported: list[str] = []
    monkeypatch.setattr(models, "_files", lambda: ["no_source", "llava"])
    monkeypatch.setattr(models, "import_module", imported.append)
    models._import_naming.__wrapped__("llava")
    assert imported == ["vlm_batch.models.no_source", "vlm_batch.models.llava"]
    imported.clear()
    models._import_naming.__wrapped__("of_no_file")
    assert imported == ["vlm_batch.models.no_source"]


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_reads, "version", lambda name: "0.7.99")
    warn_of_other_version.cache_clear()
    yield
    warn_of_other_version.cache_clear()


@pytest.mark.usefixtures("another_version")
def test_another_mlx_vlm_is_said_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder = write_checkpoint(tmp_path / "llava", "llava")
    with pytest.warns(UserWarning, match=r"0\.7\.99 is installed"):
        read_model(folder, in_float32=True)
    read_model(folder, in_float32=True)


def test_settings_of_an_unknown_type_are_said_to_be_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"vision_config": {"hidden_act": "relu6"}}
    folder = write_checkpoint(tmp_path / "llava", "llava")
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written["vision_config"] |= config["vision_config"]
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        read_model(folder, in_float32=True)
    monkeypatch.setattr("vlm_batch.models._settings.config_reads", lambda _: None)
    read_model(folder, in_float32=True)
    assert "the llava model reads: none is checked" in caplog.text
