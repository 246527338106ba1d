"""A request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from vlm_batch.advice import (
    MEDIA,
    PROMPTS,
    SAMPLING,
    advises_of_fields,
    meant,
    of_params,
)
from vlm_batch.checks import (
    demand,
    is_flag,
    is_non_empty,
    is_whole,
    set_pixel_bounds,
)
from vlm_batch.errors import InvalidParameters, InvalidPrompt, InvalidRequest
from vlm_batch.types.media import AudioInput, ImageInput, VideoInput, several
from vlm_batch.types.options import Option, checked_options
from vlm_batch.types.rules import FieldRule, check_fields, is_text, whole_within
from vlm_batch.types.sampling import SamplingParams
from vlm_batch.types.templates import PLAIN_TEMPLATE, Template

if TYPE_CHECKING:
    from vlm_batch.store.prompt import PromptCache

Message: TypeAlias = Mapping[str, Any]
#: A record that may be given as a mapping of its fields.
Given = TypeVar("Given", "SamplingParams", "Template", "Request")

#: Largest absolute value of a priority.
MAX_PRIORITY = 1_000_000


#: Values of ``Request.draft``.
DRAFTS = ("auto", "off")


#: Names that others have for what a request holds.
OF_REQUESTS = {
    **MEDIA,
    **PROMPTS,
    **of_params(SAMPLING, frozenset(one.name for one in fields(SamplingParams))),
}


@advises_of_fields(OF_REQUESTS)
@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: exactly one of ``prompt``, ``messages``, ``token_ids`` or ``inputs``, with media.

    Args:
        prompt: a single user turn.
        messages: a chat in OpenAI's form (``{"role": ..., "content": str | [parts]}``). Media are parts, or in order in
            ``images``, ``videos`` and ``audios``.
        token_ids: final tokens, with placeholders for media.
        inputs: output of ``mlx_vlm.utils.prepare_inputs``: ``input_ids`` (1, L), ``pixel_values``, ...
        images: one or several: path, URL, data URI, bytes, PIL image or array.
        videos: one or several: path, URL, data URI, bytes, array (T, H, W, 3) or ``Video``.
        audios: one or several: path, URL, data URI, bytes or ``Audio``.
        template: a ``Template``, or a mapping of its fields. None: ``prompt`` is final text with placeholders.
        min_pixels: fewest pixels of a picture, if the family's processor has such bounds.
        max_pixels: most pixels, likewise; no more than the model's own, unless ``min_pixels`` is above those.
            ``Result.model_image_sizes`` has the sizes.
        options: texts, or lists of token ids, that may follow the prompt. ``Result.options`` has the log-probability of
            each, and there is no answer (docs/evaluations.md). Of ``params`` only ``prompt_logprobs`` goes with them.
        params: ``SamplingParams``, or a mapping of its fields.
        request_id: unique name; by default a new one.
        priority: higher goes first, among one client's requests.
        client: number of the client. Clients share places evenly, whatever the priorities; those with negative
            numbers get the places that no other wants.
        cache: state of a conversation that the prompt continues; only new tokens are prefilled.
        return_cache: return prompt's and answer's state in ``Result.cache``.
        return_prompt_ids: return the prompt's tokens in ``Result.prompt_token_ids``.
        cache_salt: what the request leaves in the prefix cache is reused by requests with the same text here, alone.
        draft: "auto" computes probable next tokens together where that is faster; "off" does not. Answers are the same
            (docs/speculation.md).

    Raises:
        InvalidRequest: a value is out of range.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | np.ndarray | None = None
    inputs: Mapping[str, Any] | None = None
    images: ImageInput | Sequence[ImageInput] = ()
    videos: VideoInput | Sequence[VideoInput] = ()
    audios: AudioInput | Sequence[AudioInput] = ()
    template: Template | None = PLAIN_TEMPLATE
    min_pixels: int | None = None
    max_pixels: int | None = None
    options: Sequence[Option] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    client: int = 0
    cache: PromptCache | None = None
    return_cache: bool = False
    draft: str = "auto"
    return_prompt_ids: bool = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        right = f"one of {', '.join(DRAFTS)}"
        is_one = is_text(self.draft) and self.draft in DRAFTS
        demand(is_one, InvalidRequest, "draft", self.draft, right)
        check_fields(self, _RULES, InvalidRequest)
        put = partial(object.__setattr__, self)
        put("images", several(self.images))
        put("videos", several(self.videos))
        put("audios", several(self.audios))
        put("params", params_of(self.params))
        put("options", checked_options(self.options))
        put("priority", int(self.priority))
        put("client", int(self.client))
        if self.template is not None:
            template = record_of(Template, "template", self.template, InvalidPrompt)
            put("template", template)
        set_pixel_bounds(self, self.min_pixels, self.max_pixels)
        continues = self.cache is not None or self.return_cache
        if continues and self.params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs need every token prefilled; leave cache and return_cache out"
            )
        if self.options:
            self._check_scored()

    def _check_scored(self) -> None:
        """Refuse what does not go with options."""
        if self.return_cache:
            raise InvalidRequest(
                "options have no answer whose state return_cache could keep; leave it out"
            )
        asked = SamplingParams(prompt_logprobs=self.params.prompt_logprobs)
        if self.params != asked:
            raise InvalidParameters(
                "options are scored, not sampled: leave params out, but for prompt_logprobs"
            )


def _is_name(value: Any) -> bool:
    return is_non_empty(value) and "\0" not in value


_FLAG = FieldRule(is_flag, "True or False")
_RULES = {
    "priority": FieldRule(
        whole_within(-MAX_PRIORITY, MAX_PRIORITY),
        f"an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}",
    ),
    "client": FieldRule(is_whole, "an integer"),
    "cache_salt": FieldRule(is_non_empty, "text, not empty, or None", or_none=True),
    "request_id": FieldRule(
        _is_name, "text, not empty and without null characters, or None", or_none=True
    ),
    "return_cache": _FLAG,
    "return_prompt_ids": _FLAG,
}


def params_of(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if given is None:
        return SamplingParams()
    return record_of(SamplingParams, "params", given, InvalidParameters)


def record_of(
    kind: type[Given], name: str, given: Any, error: type[InvalidRequest]
) -> Given:
    """Return a record from itself or a mapping of fields. Raises ``error`` for anything else."""
    if isinstance(given, kind):
        return given
    right = f"a {kind.__name__} or a mapping of its fields"
    demand(isinstance(given, Mapping), error, name, given, right)
    names = {field.name for field in fields(kind)}
    strange = sorted(map(str, given.keys() - names))
    if strange:
        instead = SAMPLING if kind is SamplingParams else {}
        likely = meant(strange[0], names, instead)
        said = f"{name} has no {', '.join(strange)}{likely}"
        raise error(f"{said}; it has {', '.join(sorted(names))}")
    return kind(**given)
