"""OpenAI's lists, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_batch.server.errors import JsonResponse


def listed(
    shown: Sequence[Mapping[str, Any]], order: str, after: str | None, limit: int
) -> JsonResponse:
    """Return a page of a list, whose oldest object is first."""
    found = list(shown)
    if order == "desc":
        found.reverse()
    ids = [one["id"] for one in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = found[begin : begin + limit]
    ends: dict[str, Any] = {"first_id": None, "last_id": None}
    if page:
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]}
    has_more = begin + len(page) < len(found)
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": has_more})
