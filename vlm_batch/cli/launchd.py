"""A property list for macOS' launchd: ``vlm-batch serve`` from login on, and again after a crash."""

from __future__ import annotations

import os
import plistlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: The flag that makes it, which its own command leaves out.
FLAG = "--launchd"
#: Of the environment, what the server's own needs: folders, and no secrets.
CARRIED = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "VLM_BATCH_CACHE")


def label_of(port: int) -> str:
    return f"vlm-batch.{port}"


def property_list(
    words: Sequence[str], port: int, environment: Mapping[str, str]
) -> bytes:
    """Return the XML of a user's agent.

    Args:
        words: The command line behind the program's name, as typed: ``serve --launchd ...``.
        port: The server's, which tells agents apart.
    """
    label = label_of(port)
    log = str(Path.home() / "Library/Logs" / f"{label}.log")
    agent: dict[str, Any] = {
        "Label": label,
        "ProgramArguments": [*_program(), *(one for one in words if one != FLAG)],
        # relative paths mean what they mean here
        "WorkingDirectory": str(Path.cwd()),
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "RunAtLoad": True,
        # one that ends by itself was told to
        "KeepAlive": {"SuccessfulExit": False},
        # others are slowed down behind what has windows
        "ProcessType": "Interactive",
    }
    carried = {name: environment[name] for name in CARRIED if name in environment}
    if carried:
        agent["EnvironmentVariables"] = carried
    return plistlib.dumps(agent)


def _program() -> list[str]:
    """Return how this program was started: its script, or Python with the package."""
    name = sys.argv[0]
    found = shutil.which(name) if os.path.basename(name) == "vlm-batch" else None
    if found is not None:
        # with its links: they outlive an upgrade, and what they lead to does not
        return [os.path.abspath(found)]
    return [sys.executable, "-m", "vlm_batch"]
