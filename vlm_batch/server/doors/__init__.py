"""The APIs that are served, one file each."""

from __future__ import annotations

from vlm_batch.server.door import Doors
from vlm_batch.server.doors.chat import CHAT
from vlm_batch.server.doors.completions import COMPLETIONS

DOORS = Doors((CHAT, COMPLETIONS))
