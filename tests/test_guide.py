"""The worked examples of docs/adding-a-family.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Ask, check, inputs_of, run
from tests.zoo import family as tiny_family
from vlm_batch import families, registry
from vlm_batch.adapters.base import Adapter
from vlm_batch.caches import Placement

GUIDE = (Path(__file__).parent.parent / "docs/adding-a-family.md").read_text(
    encoding="utf-8"
)
#: Heading of an example -> the tiny model that it runs.
EXAMPLES = {
    "A plain family": "llava",
    "A family with M-RoPE": "glm_ocr",
    "A recurrent family": "lfm2_vl",
}
#: Requests that join and leave beside each other, in chunks.
ASKS = [
    Ask("image:2:1"),
    Ask("text:4:9", tokens=12),
    Ask("image:1:2", at=1, cancel_at=6),
    Ask("two:3", at=2),
    Ask("text:5:14", at=4, tokens=5),
    Ask("image:6:0", at=6),
]


def adapter_of(
    heading: str, monkeypatch: pytest.MonkeyPatch, **instead: str
) -> Adapter:
    """Return the adapter that an example registers, over its tiny model; ``instead`` exchanges words of the example."""
    (code,) = re.findall(
        r"```python\n(.*?)```",
        GUIDE.split(f"### {heading}\n")[1].split("\n##")[0],
        re.DOTALL,
    )
    for word, other in instead.items():
        code = re.sub(rf"(?<=\(){word}(?=\):)", other, code)
    known = {spec.family: spec for spec in families()}
    monkeypatch.setattr(registry, "_SPECS", dict(known))
    scope: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, "guide", "exec"), scope)
    ((_, spec),) = registry._SPECS.items() - known.items()
    assert spec.adapter is not None
    return spec.adapter(tiny_family(EXAMPLES[heading]).build())


def answers(heading: str, adapter: Adapter, layout: Placement) -> float:
    """Return the largest difference between the answers and those alone. Raises AssertionError for more than rounding."""
    name = EXAMPLES[heading]
    config = {"max_rows": 3, "max_chunk": 5}
    return check(
        name,
        run(
            adapter,
            lambda key: inputs_of(name, key),
            ASKS,
            placement=layout,
            config=config,
        ),
    )


@pytest.mark.parametrize("layout", Placement, ids=lambda layout: layout.value)
@pytest.mark.parametrize("heading", EXAMPLES)
def test_a_worked_example_answers_as_alone(
    heading: str, layout: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(heading, adapter_of(heading, monkeypatch), layout)


def test_an_example_with_the_wrong_base_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Positions that count tokens are wrong for a family with M-RoPE, and the scenario shows it."""
    heading = "A family with M-RoPE"
    adapter = adapter_of(heading, monkeypatch, MRoPEAdapter="GridAdapter")
    with pytest.raises(AssertionError, match=r"off|other tokens"):
        answers(heading, adapter, Placement.ROWS)
