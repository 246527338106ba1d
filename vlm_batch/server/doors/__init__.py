"""The APIs that are served, one file each."""

from __future__ import annotations

from vlm_batch.server.door import Doors
from vlm_batch.server.doors.batches import BATCHES
from vlm_batch.server.doors.chat import CHAT
from vlm_batch.server.doors.completions import COMPLETIONS
from vlm_batch.server.doors.messages import COUNT_TOKENS, MESSAGES
from vlm_batch.server.doors.responses import INPUT_TOKENS, RESPONSES

DOORS = Doors(
    (
        CHAT,
        COMPLETIONS,
        RESPONSES,
        INPUT_TOKENS,
        MESSAGES,
        COUNT_TOKENS,
        BATCHES,
    ),
)
