"""Other servers' tests run against this server: a case of each suite's kind, which one of two answers passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OF_VLLM = {
    "tests/__init__.py": "",
    "tests/entrypoints/openai/models/test_models.py": """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.tokenizers import get_tokenizer

@pytest.fixture(scope="module")
def server():
    with RemoteOpenAIServer("their/model", ["--max-model-len", "8192"]) as running:
        yield running

def test_the_model_is_there(server):
    (model,) = server.get_client().models.list()
    assert (model.id, model.max_model_len) == ("their/model", 16384)
    assert get_tokenizer("their/model").encode("count")

def test_it_says_what_theirs_says(server):
    answer = server.get_client().completions.create(model="their/model", prompt="count", max_tokens=1)
    assert answer.system_fingerprint == "theirs"

def test_of_their_insides():
    assert False
""",
}
OF_LLAMA_CPP = {
    "utils.py": """
import wget

class ServerProcess:
    model_alias, api_key, n_predict = "tiny", None, 8

    def start(self):
        raise AssertionError("their server is not here")

def match_regex(words, text):
    return False
""",
    "unit/test_basic.py": """
import json
from urllib.request import urlopen
from utils import ServerProcess, match_regex

def asked(path):
    server = ServerProcess()
    server.start()
    return json.load(urlopen(f"http://{server.server_host}:{server.server_port}{path}"))

def test_the_model_is_there():
    assert asked("/v1/models")["data"][0]["id"] == "tiny"
    assert match_regex("their words", "ours")

def test_it_says_what_theirs_says():
    assert asked("/props")
""",
}


@pytest.mark.parametrize("files", [OF_VLLM, OF_LLAMA_CPP], ids=["vLLM", "llama.cpp"])
def test_a_suite_asks_this_server(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    script = ROOT / "scripts" / "clients" / "suites.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_it_says_what_theirs_says" in done.stdout
