"""The automatic prefix cache: a hit answers exactly as a cold row does, and nothing is ever taken for something else."""

from __future__ import annotations

import pytest

from tests.harness import every_family
from tests.reuse_cases import TAIL, ask, end_of_pictures, engine, length
from vlm_batch.caches import Placement

IMAGE, TEXT = "image:3:2", "text:5:26"

both_placements = pytest.mark.parametrize("placement", list(Placement), ids=lambda placement: placement.value)
all_families = pytest.mark.parametrize("name", every_family())


@both_placements
@all_families
def test_hits(name: str, placement: Placement) -> None:
    """The same prompt again, another question about the same picture, and a longer prompt: all from what is kept."""
    generator = engine(name, placement=placement)
    assert ask(name, generator, IMAGE, TEXT) == [0, 0]
    # Nothing is prefilled, not even the last token: its logits were kept.
    assert ask(name, generator, TEXT, IMAGE) == [length(name, TEXT), length(name, IMAGE)]
    other, longer = ask(name, generator, f"{IMAGE}~1", f"{TEXT}+2")
    assert end_of_pictures(name, IMAGE) <= other <= length(name, IMAGE) - TAIL
    assert longer == length(name, TEXT)
