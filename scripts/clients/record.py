"""Records the bodies that clients send, as data for ``tests/test_clients.py``.

``scripts/clients/record.py FOLDER [NAME ...]`` installs each client into FOLDER/NAME (nothing into this environment), runs
it against a listener, and writes ``tests/data/clients/NAME.json``: client, version, and bodies with pictures left out.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "tests" / "data" / "clients"
sys.path.insert(0, str(HERE))

from listener import listening  # noqa: E402

#: Name of a client -> its packages; the first one's version is recorded.
PYTHON = {
    "openai": ("openai",),
    "langchain": ("langchain-openai", "langchain"),
    "litellm": ("litellm",),
    "instructor": ("instructor",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "mineru": ("mineru-vl-utils",),
    "docling": ("docling",),
    "olmocr": ("olmocr",),
    "marker": ("marker-pdf",),
    "paddlex": ("paddlex",),
    "lmms_eval": ("lmms-eval",),
}
#: Clients without their dependencies, which are a training stack -> what their requests need of these.
ALONE = {
    "lmms_eval": (
        "openai",
        "loguru",
        "python-dotenv",
        "tqdm",
        "pydantic",
        "pytz",
        "pyyaml",
    ),
}
NODE = {"openai": ("openai",), "ai_sdk": ("ai", "@ai-sdk/openai-compatible")}


def record_python(name: str, folder: Path, listener: Any) -> str:
    packages = PYTHON[name]
    where = folder / name
    if not where.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(where),
        ]
        needs = ALONE.get(name)
        alone = [] if needs is None else ["--no-deps"]
        subprocess.run([*pip, *alone, *packages], check=True)
        subprocess.run([*pip, *(needs or packages), "pillow"], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(where),
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    subprocess.run(
        [sys.executable, str(HERE / "python_clients.py"), name, listener.url],
        check=True,
        env=environment,
        timeout=300,
    )
    first = packages[0].partition("[")[0]
    return f"{first} {next(one.version for one in distributions(name=first, path=[str(where)]))}"


def record_node(name: str, folder: Path, listener: Any) -> str:
    where = folder / "node"
    where.mkdir(exist_ok=True)
    if not (where / "node_modules" / NODE[name][0]).exists():
        packages = [package for several in NODE.values() for package in several]
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages],
            check=True,
            cwd=where,
        )
    subprocess.run(
        ["node", str(HERE / "node_clients.mjs"), name, listener.url],
        check=True,
        cwd=where,
        timeout=300,
    )
    first = NODE[name][0]
    version = json.loads((where / "node_modules" / first / "package.json").read_text())[
        "version"
    ]
    return f"{first} (npm) {version}"


#: Agents whose packages are programs -> the package, and its commands. HOME and URL stand for what they name.
AGENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "claude_code": ("@anthropic-ai/claude-code", ("claude -p 'count to 3'",)),
    "codex": ("@openai/codex", ("codex exec --skip-git-repo-check 'count to 3'",)),
    "cline": (
        "cline",
        (
            "cline auth -p openai-compatible -k none -m model -b URL/v1",
            "cline -P openai-compatible 'count to 3'",
        ),
    ),
    "continue": (
        "@continuedev/cli",
        ("cn --config HOME/continue.yaml -p 'count to 3'",),
    ),
}
#: Most characters of a text in an agent's bodies; their instructions are long, and theirs.
MOST_CHARACTERS = 48
CODEX = """
model = "model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
CONTINUE = """
name: local
version: 0.0.1
schema: v1
models:
  - {{name: model, provider: openai, model: model, apiBase: "{url}/v1", apiKey: none, roles: [chat]}}
"""


def record_agent(name: str, folder: Path, listener: Any) -> str:
    """Record an agent's first question, and what follows a tool. Where the listener's answer is not its API's, it ends."""
    package, commands = AGENTS[name]
    where = folder / "agents"
    (where / "home" / ".codex").mkdir(parents=True, exist_ok=True)
    if not (where / "node_modules" / package).exists():
        packages = [one for one, _ in AGENTS.values()]
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
        subprocess.run([*install, *packages], check=True, cwd=where)
    home = where / "home"
    config = CODEX.format(url=listener.url)
    (home / ".codex" / "config.toml").write_text(config, encoding="utf-8")
    config = CONTINUE.format(url=listener.url)
    (home / "continue.yaml").write_text(config, encoding="utf-8")
    environment = {
        **os.environ,
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": listener.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "model",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    for command in commands:
        told = command.replace("URL", listener.url).replace("HOME", str(home))
        program, *arguments = shlex.split(told)
        subprocess.run(
            [str(where / "node_modules" / ".bin" / program), *arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
    asked = [one for one in listener.bodies if "tools" in one.get("body", {})]
    said = json.dumps(asked[:2]).replace(str(home), "/home/user")
    listener.bodies[:] = cut(json.loads(said))
    package_file = where / "node_modules" / package / "package.json"
    version = json.loads(package_file.read_text())["version"]
    return f"{package.removeprefix('@')} (npm) {version}"


def cut(value: Any) -> Any:
    """Return a body with the beginnings of its texts."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    if isinstance(value, list):
        return [cut(one) for one in value]
    if isinstance(value, dict):
        return {name: cut(one) for name, one in value.items()}
    return value


def main(folder: Path, names: list[str]) -> None:
    todo = dict.fromkeys(PYTHON, record_python) | {
        f"node_{name}": record_node for name in NODE
    }
    todo |= dict.fromkeys(AGENTS, record_agent)
    for name in names or list(todo):
        with listening() as listener:
            client = todo[name](name.removeprefix("node_"), folder, listener)
            lines = ",\n".join(
                "  " + json.dumps(body, ensure_ascii=False) for body in listener.bodies
            )
        text = f'{{"client": {json.dumps(client)}, "requests": [\n{lines}\n]}}\n'
        (DATA / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{client}: {len(listener.bodies)} requests")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
