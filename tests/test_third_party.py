"""A family of somebody else's: one file and its tiny model in a folder of their own, loaded by path and answered in a batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import TOLERANCE
from vlm_batch.assets import default_checkpoint

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "fixtures" / "images"

#: Answers alone by mlx-vlm's own loop, and by a batch in which all requests meet.
ASK = """
import json, sys
from pathlib import Path
import vlm_batch
from vlm_batch import SamplingParams, VLMBatcher
{before}
import mlx.core as mx
import my_vl_model
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from vlm_batch.loading import load_model

NAMES = ["red_circle.png", "digits_728.png", None, "receipt.jpg"]
folder, pictures = Path("checkpoint"), Path(sys.argv[1])
my_vl_model.save_checkpoint(folder, Path(sys.argv[2]))
paths = [name and pictures / name for name in NAMES]
prompts = ["what is this?", "read it", "say something about words and shapes", "and this?"]
params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)

with VLMBatcher(folder, max_rows=4) as batcher:
    handles = [batcher.submit(path, prompt, params=params) for path, prompt in zip(paths, prompts)]
    together = [handle.result() for handle in handles]

model, processor = load_model(folder)  # what of it is still to be computed belongs to this thread
with VLMBatcher(model, processor) as batcher:
    together.append(batcher.submit(paths[0], prompts[0], params=params).result())
paths, prompts = [*paths, paths[0]], [*prompts, prompts[0]]
alone = []
for path, prompt in zip(paths, prompts):
    marker = "<|vision_start|><|image_pad|><|vision_end|>" if path else ""
    text = f"<|im_start|>user\\n{{marker}}{{prompt}}<|im_end|>\\n<|im_start|>assistant\\n"
    picture = [Image.open(path).convert("RGB")] if path else None
    inputs = {{name: value for name, value in prepare_inputs(processor, images=picture, prompts=text).items()}}
    ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
    steps = list(generate_step(ids, model, pixels, mask, max_tokens=12, temperature=0.0, **inputs))
    alone.append([(int(token), float(logprobs[int(token)])) for token, logprobs in steps])

print(json.dumps({{
    "together": [[list(one.token_ids), [step.logprob for step in one.logprobs or ()], one.error] for one in together],
    "alone": alone,
    "prompt_tokens": [one.usage.prompt_tokens for one in together],
    "families": [spec.family for spec in vlm_batch.families()],
}}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the family's two files, as their author would have them."""
    for name in ("my_family.py", "my_vl_model.py"):
        shutil.copy(ROOT / "tests" / "third_party" / name, tmp_path)
    return tmp_path


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "ask.py").write_text(code, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:vlm_batch", "ask.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def install_entry_point(folder: Path, module: str) -> None:
    """What pip leaves of a package that names a module in the group."""
    (folder / "my_family-1.0.dist-info").mkdir()
    for name, text in {
        "METADATA": "Metadata-Version: 2.1\nName: my-family\nVersion: 1.0\n",
        "entry_points.txt": f"[vlm_batch.families]\nmy_vl = {module}\n",
    }.items():
        (folder / "my_family-1.0.dist-info" / name).write_text(text, encoding="utf-8")


#: What stands before the question: how the family becomes known.
WAYS = {
    "registered": "import my_family",
    "registered after the library's own": "vlm_batch.families(); import my_family",
    "found by its entry point": "",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_family_in_one_file_is_answered_as_alone(folder: Path, way: str) -> None:
    if "entry point" in way:
        install_entry_point(folder, "my_family")
    done = run(
        folder, ASK.format(before=WAYS[way]), str(PICTURES), str(default_checkpoint())
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "my_vl" in found["families"] and "llava" in found["families"]
    answers = set()
    for (tokens, logprobs, error), alone in zip(
        found["together"], found["alone"], strict=True
    ):
        assert error is None
        assert tokens == [token for token, _ in alone]
        assert (
            max(
                abs(one - right)
                for one, (_, right) in zip(logprobs, alone, strict=True)
            )
            < TOLERANCE
        )
        answers.add(tuple(tokens))
    assert len(answers) == 4  # a picture, and what is asked, make a difference
    with_pictures = [
        count for index, count in enumerate(found["prompt_tokens"]) if index != 2
    ]
    assert min(with_pictures) > 10


def test_a_family_that_is_taken_is_refused_whatever_was_imported_first(
    folder: Path,
) -> None:
    for before in ("", "vlm_batch.families()\n"):
        done = run(
            folder,
            f"import vlm_batch\n{before}"
            "from vlm_batch import ModelSpec, register\n"
            "from vlm_batch.adapters.base import Adapter\n"
            "@register(ModelSpec(family='mine', model_types=('llava',)))\nclass Mine(Adapter):\n    pass\n",
        )
        assert (
            "ValueError: model type 'llava' of 'mine' (__main__.Mine) is already registered by 'llava' (vlm"
            in done.stderr
        )


def test_a_class_that_is_registered_again_takes_its_own_place(folder: Path) -> None:
    """A notebook's cell that is run twice, with something changed."""
    done = run(
        folder,
        "import vlm_batch\nfrom vlm_batch import ModelSpec, register\nfrom vlm_batch.adapters.base import Adapter\n"
        "for note in ('first', 'second'):\n"
        "    @register(ModelSpec(family='mine', model_types=('my_vl',), notes=(note,)))\n"
        "    class Mine(Adapter):\n        pass\n"
        "print([spec.notes for spec in vlm_batch.families() if 'my_vl' in spec.model_types], Mine.spec.notes)",
    )
    assert done.stdout.strip() == "[('second',)] ('second',)", done.stderr


def test_the_command_line_knows_a_family_by_its_entry_point(folder: Path) -> None:
    install_entry_point(folder, "my_family")
    code = "from vlm_batch.cli.main import main\nimport sys\nfor args in ([], ['my_vl']):\n    main(['families', *args])"
    done = run(folder, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("my_vl") >= 2


def test_a_module_that_fails_is_said_and_the_others_are_there(folder: Path) -> None:
    install_entry_point(folder, "no_such_module")
    code = (
        "import warnings, vlm_batch\nwith warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
        "    count = len(vlm_batch.families())\nprint(count, *[str(one.message) for one in said])"
    )
    done = run(folder, code)
    assert int(done.stdout.split()[0]) > 60, done.stderr
    assert (
        "the families of no_such_module (entry point 'my_vl') are left out: ModuleNotFoundError"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('package="my_vl_model"', ""),
        ('package="no_such"', "its model code 'no_such' cannot be imported"),
        ('package="json"', "its model code 'json' has no Model and no ModelConfig"),
    ],
)
def test_model_code_that_is_not_there_is_said(
    folder: Path, change: str, said: str
) -> None:
    file = folder / "my_family.py"
    file.write_text(
        file.read_text(encoding="utf-8").replace('package="my_vl_model"', change),
        encoding="utf-8",
    )
    code = (
        "import sys, my_family, my_vl_model\nfrom pathlib import Path\nfrom vlm_batch import UnsupportedModel\n"
        "from vlm_batch.loading import load_model\n"
        "my_vl_model.save_checkpoint(Path('checkpoint'), Path(sys.argv[1]))\n"
        "try:\n    load_model('checkpoint')\nexcept UnsupportedModel as error:\n    print(error)"
    )
    done = run(folder, code, str(default_checkpoint()))
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and bool(said) == bool(done.stdout.strip())
