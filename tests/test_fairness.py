"""Where ten times as many requests come as fit, all are answered, and about in their order."""

from __future__ import annotations

from tests.fairness import LOOK_AHEAD, oversubscribe


def test_ten_times_as_many_as_fit_wait_in_their_order() -> None:
    fit = 4
    waited, most, _ = oversubscribe(10 * fit, fit)
    assert [one.result.finish_reason for one in waited] == ["length"] * (10 * fit)
    assert most <= fit
    # a picture takes longer to be read than a text, and those that are read are encoded some at a time
    assert max(one.overtaken for one in waited) <= LOOK_AHEAD + fit
