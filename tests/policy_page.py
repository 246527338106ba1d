"""The table of docs/tuning.md from ``vlm_batch.policy``: ``python -m tests.policy_page`` writes it."""

from __future__ import annotations

from pathlib import Path

from vlm_batch.policy import SETTINGS
from vlm_batch.runtime.device import Device

PAGE = Path(__file__).parent.parent / "docs/tuning.md"
BEGIN, END = "<!-- table: written by python -m tests.policy_page -->\n", "<!-- end of table -->\n"


def render(page: str) -> str:
    """The page with the table as it is now."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}{_tables()}{END}{tail}"


def _tables() -> str:
    kinds = list(Device)
    lines = [
        "| setting | meaning | " + " | ".join(kind.value for kind in kinds) + " |",
        "|---" * (2 + len(kinds)) + "|",
    ]
    for name, setting in SETTINGS.items():
        values = " | ".join(str(setting.values[kind][0]) for kind in kinds)
        lines.append(f"| `{name}` | {setting.meaning} | {values} |")
    lines += ["", "Where the values come from:", "", "| setting | cpu | cuda | metal |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | " + " | ".join(setting.values[kind][1] for kind in kinds) + " |"
        for name, setting in SETTINGS.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
