"""Runs the HTTP tests of vLLM and of llama.cpp against this server: what other servers' clients rely on.

``PYTHONPATH=. scripts/clients/suites.py FOLDER [PYTEST'S ARGUMENTS]``: FOLDER is a checkout of vLLM, or llama.cpp's
``tools/server/tests``. Their servers are replaced by this one with the tests' tiny model, their other modules by mocks.
With SUITES_ENDLESS=1 no answer ends by itself. ``docs/server.md`` says how many pass, and why the others do not.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib.abc
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest

ROOT = Path(__file__).parent.parent.parent
#: Where the tiny model is, and whether it never ends by itself: many cases want an answer of all its tokens.
MODEL = "SUITES_MODEL"
ENDLESS = "SUITES_ENDLESS"
#: Files about completions; vLLM's are below tests/entrypoints, llama.cpp's below unit.
OF_VLLM = (
    "openai/chat_completion",
    "openai/completion",
    "openai/models",
    "openai/test_chunked_prompt.py",
    "openai/test_openai_schema.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "openai/test_reasoning_enable_thinking.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "multimodal/openai/chat_completion/test_vision.py",
)
OF_LLAMA_CPP = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_ignore_eos.py",
    "test_security.py",
    "test_tool_call.py",
    "test_vision_api.py",
)
#: Tests of what is not served: adapters, embeddings as prompts, beams; llama.cpp's slow ones are of real models.
LEFT_OUT = "not lora and not prompt_embeds and not tensorizer and not beamsearch"
#: Fixtures of vLLM's that are a server or ask one: tests without them are of its insides.
SERVERS = frozenset({"server", "client", "async_client", "uds_server"})


def main(folder: Path, arguments: Sequence[str]) -> int:
    """Make the model, and run a suite in a process in which ``tests`` is the suite's own package."""
    from tests.test_server_tools import copy_with_tools

    files, below = OF_LLAMA_CPP, folder / "unit"
    if not below.exists():
        files, below = OF_VLLM, folder / "tests" / "entrypoints"
    with tempfile.TemporaryDirectory() as made:
        environment = {
            **os.environ,
            MODEL: str(_with_long_context(copy_with_tools(Path(made) / "qwen2_vl"))),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]]),
        }
        pytest_of = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem]
        options = [
            f"--confcutdir={below}",
            "--asyncio-mode=auto",
            f"--rootdir={folder}",
        ]
        paths = [str(below / file) for file in files if (below / file).exists()]
        chosen = ["-m", "not slow", "-k", LEFT_OUT]
        command = [*pytest_of, *options, *chosen, *arguments, *paths]
        return subprocess.run(
            command, cwd=folder, env=environment, check=False
        ).returncode


def _with_long_context(folder: Path) -> Path:
    """Return the folder with a context that holds their prompts."""
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# In the suite's process ------------------------------------------------------------------------------------------------


class Servers:
    """Servers of the tiny model, one for each setting, until the end."""

    def __init__(self) -> None:
        where = ROOT / "tests" / "serving.py"
        spec = importlib.util.spec_from_file_location("serving_of_vlm_batch", where)
        assert spec is not None and spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self._module
        spec.loader.exec_module(self._module)
        self._kept: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def running(self, **settings: Any) -> Any:
        """Return a server with these settings of ``ServerConfig``."""
        key = repr(sorted(settings.items()))
        if key not in self._kept:
            started = self._module.serving(_open_batcher, **settings)
            self._kept[key] = self._open.enter_context(started)
        return self._kept[key]

    def close(self) -> None:
        self._open.close()


def _open_batcher() -> Any:
    from vlm_batch import VLMBatcher

    class Endless(VLMBatcher):
        def submit_request(self, request: Any) -> Any:
            params = dataclasses.replace(request.params, ignore_eos=True)
            return super().submit_request(dataclasses.replace(request, params=params))

    kind = Endless if ENDLESS in os.environ else VLMBatcher
    return kind(os.environ[MODEL], max_rows=16)


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's own modules, and what else its tests import, empty."""

    names = ("vllm", "torch", "tests.conftest", "tests.utils")

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mocked = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self, is_package=True) if mocked else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _MockModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "tests.utils":
            module.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
            module.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = _tokenizer  # type: ignore[attr-defined]
        if module.__name__ == "vllm.config":
            module.ModelConfig = _ModelConfig  # type: ignore[attr-defined]
        if module.__name__ == "torch":
            module.iinfo, module.long = numpy.iinfo, numpy.int64  # type: ignore[attr-defined]
        if module.__name__ == "vllm.multimodal.utils":
            module.encode_image_url = _as_url  # type: ignore[attr-defined]


class _MockModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ[MODEL])


class _ModelConfig:
    def __init__(self, **_: Any) -> None:
        config = json.loads((Path(os.environ[MODEL]) / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]

    def get_vocab_size(self) -> int:
        return self.vocab_size


class Assets:
    """The pictures of vLLM's tests: ours, and in the request."""

    url_for = staticmethod(lambda name: _as_url(_picture()))
    get_image_asset = staticmethod(lambda name: _picture())


def _picture() -> Any:
    from PIL import Image

    return Image.open(ROOT / "fixtures" / "images" / "red_circle.png")


def _as_url(picture: Any, *_: Any, **__: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="session")
def local_asset_server() -> type[Assets]:
    return Assets


@pytest.fixture
def image_urls(request: pytest.FixtureRequest) -> list[str]:
    return [_as_url(_picture()) for _ in request.param]


@pytest.fixture
def image_url() -> str:
    return _as_url(_picture())


class RemoteOpenAIServer:
    """What vLLM's tests start, and ask for clients."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        env_dict: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        words = [*map(str, arguments), ""]
        settings: dict[str, Any] = {"served_names": (model,)}
        if "VLLM_API_KEY" in (env_dict or {}):
            settings["api_key"] = env_dict["VLLM_API_KEY"]
        for option, value in pairwise(words):
            if option == "--api-key":
                settings["api_key"] = value
            if option == "--root-path":
                settings["root_path"] = value
            if option == "--served-model-name":
                settings["served_names"] = (value,)
        self.key = settings.get("api_key", self.DUMMY_API_KEY)
        self.host = "localhost"
        running = _servers.running(**settings)
        self.port = running.port
        self.url_root = str(running.url)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> Any:
        return self._client("OpenAI", options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("AsyncOpenAI", options)

    def _client(self, kind: str, options: dict[str, Any]) -> Any:
        import openai

        given = {"base_url": self.url_for("v1"), "api_key": self.key, "timeout": 60}
        return getattr(openai, kind)(**{**given, "max_retries": 0, **options})


def _start(process: Any, timeout_seconds: int = 60) -> None:
    """Stand for ``ServerProcess.start`` of llama.cpp's tests."""
    running = _servers.running(
        served_names=(process.model_alias or "model",),
        any_model=True,
        api_key=process.api_key,
        default_max_tokens=max(process.n_predict or 0, 0) or 64,
    )
    process.server_host, process.server_port = "127.0.0.1", running.port


_servers: Any = None


def pytest_configure(config: pytest.Config) -> None:
    global _servers
    _servers = Servers()
    sys.modules["wget"] = MagicMock()
    sys.path.insert(0, str(config.rootpath))
    if not (config.rootpath / "unit").exists():
        sys.meta_path.insert(0, Mocks())
        transformers = importlib.import_module("transformers")
        transformers.AutoTokenizer.from_pretrained = _tokenizer
        hub = importlib.import_module("huggingface_hub")
        hub.snapshot_download = lambda *_, **__: "nothing"
        return
    utils = importlib.import_module("utils")
    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = lambda process: None
    utils.match_regex = lambda words, text: True  # the words of their model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of vLLM's insides."""
    if (Path.cwd() / "unit").exists():
        return
    items[:] = [one for one in items if SERVERS & set(one.fixturenames)]  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    if _servers is not None:
        _servers.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
