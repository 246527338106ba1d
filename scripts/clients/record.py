"""Records the bodies that clients send, as data for ``tests/test_clients.py``.

``scripts/clients/record.py FOLDER [NAME ...]`` installs each client into FOLDER/NAME (nothing into this environment), runs
it against a listener, and writes ``tests/data/clients/NAME.json``: client, version, and bodies with pictures left out.
"""

from __future__ import annotations

import json
import os
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
        subprocess.run([*pip, *packages, "pillow"], check=True)
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


def main(folder: Path, names: list[str]) -> None:
    todo = dict.fromkeys(PYTHON, record_python) | {
        f"node_{name}": record_node for name in NODE
    }
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
