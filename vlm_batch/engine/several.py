"""Several answers to one prompt."""

from __future__ import annotations

from dataclasses import replace

from vlm_batch.engine.row import sibling_id
from vlm_batch.types import Event, Result


class Several:
    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.row_ids = (
            request_id,
            *(sibling_id(request_id, index) for index in range(1, n)),
        )
        self._ended: dict[int, Result] = {}

    def take(self, event: Event) -> Event | None:
        """Turn a row's event into the request's; the last has the result. None: the request says nothing yet."""
        index, result = self.row_ids.index(event.request_id), event.result
        if result is None:
            return replace(event, request_id=self.request_id, index=index)
        self._ended[index] = replace(result, request_id=self.request_id)
        whole = None
        if len(self._ended) == len(self.row_ids):
            first, *others = (self._ended[at] for at in range(len(self.row_ids)))
            whole = replace(first, others=tuple(others))
        return replace(
            event,
            request_id=self.request_id,
            index=index,
            answer=self._ended[index],
            result=whole,
        )
