"""Types that users meet: requests, parameters, events, results."""

from vlm_batch.types.media import (
    ALL_FRAMES,
    MAX_SECONDS,
    Audio,
    AudioInput,
    FetchPolicy,
    ImageInput,
    Video,
    VideoInput,
)
from vlm_batch.types.requests import (
    DRAFTS,
    MAX_PRIORITY,
    OF_REQUESTS,
    Message,
    Request,
    params_of,
    record_of,
)
from vlm_batch.types.results import (
    Event,
    FinishReason,
    Result,
    Stats,
    Timings,
    TokenLogprobs,
    Usage,
    failed_result,
)
from vlm_batch.types.sampling import (
    FORMS,
    SAMPLING_PARAMETERS,
    LogitsProcessor,
    SamplingParams,
)
from vlm_batch.types.templates import PLAIN_TEMPLATE, Template

__all__ = [
    "ALL_FRAMES",
    "DRAFTS",
    "FORMS",
    "MAX_PRIORITY",
    "MAX_SECONDS",
    "OF_REQUESTS",
    "PLAIN_TEMPLATE",
    "SAMPLING_PARAMETERS",
    "Audio",
    "AudioInput",
    "Event",
    "FetchPolicy",
    "FinishReason",
    "ImageInput",
    "LogitsProcessor",
    "Message",
    "Request",
    "Result",
    "SamplingParams",
    "Stats",
    "Template",
    "Timings",
    "TokenLogprobs",
    "Usage",
    "Video",
    "VideoInput",
    "failed_result",
    "params_of",
    "record_of",
]
