"""Resumable jobs: many rows from files and tables in, their answers out.

::

    from vlm_batch import VLMBatcher, jobs

    sources, _ = jobs.open_sources(["photos/", "receipts.parquet"])
    with VLMBatcher("path or hub id") as batcher:
        jobs.run(sources, jobs.open_sink("answers.jsonl"), batcher, questions=jobs.Questions(("What is the total?",)))
"""

from vlm_batch.jobs.cells import Columns
from vlm_batch.jobs.lines import CannotWrite
from vlm_batch.jobs.maps import map_table
from vlm_batch.jobs.plan import Plan
from vlm_batch.jobs.questions import Item, Questions
from vlm_batch.jobs.rows import InvalidJob, JobRow, Shard, Source
from vlm_batch.jobs.runner import Batcher, Watch, run
from vlm_batch.jobs.sidecars import Sidecars
from vlm_batch.jobs.sinks import Sink, open_sink
from vlm_batch.jobs.sources import Reading, open_sources
from vlm_batch.jobs.summary import Summary

__all__ = [
    "Batcher",
    "CannotWrite",
    "Columns",
    "InvalidJob",
    "Item",
    "JobRow",
    "Plan",
    "Questions",
    "Reading",
    "Shard",
    "Sidecars",
    "Sink",
    "Source",
    "Summary",
    "Watch",
    "map_table",
    "open_sink",
    "open_sources",
    "run",
]
