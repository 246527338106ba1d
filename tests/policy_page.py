"""The table of docs/tuning.md from ``vlm_batch.policy``: ``python -m tests.policy_page`` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_batch.policy import SETTINGS
from vlm_batch.runtime.device import Device

PAGE = Path(__file__).parent.parent / "docs/tuning.md"
BEGIN = "<!-- table: written by python -m tests.policy_page -->\n"
END = "<!-- end of table -->\n"


def render(page: str) -> str:
    """The page with the table as it is now."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}{_table()}{END}{tail}"


def _table() -> str:
    kinds = list(Device)
    lines = [
        "| setting | meaning | " + " | ".join(kind.value for kind in kinds) + " |",
        "|---" * (2 + len(kinds)) + "|",
    ]
    for name, setting in SETTINGS.items():
        values = " | ".join(_value(*setting.values[kind]) for kind in kinds)
        lines.append(f"| `{name}` | {setting.meaning} | {values} |")
    return "\n".join(lines) + "\n"


def _value(value: Any, source: str) -> str:
    return f"**{value}**" if source.startswith("measured") else str(value)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
