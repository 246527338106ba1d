"""Bodies' fields of sampling, as OpenAI's, vLLM's, mlx-vlm's and llama.cpp's clients write them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from pydantic_core import PydanticCustomError

from vlm_batch.server.asking import NO_LIMIT
from vlm_batch.server.unserved import NOTHING, REFUSED
from vlm_batch.server.wire import (
    Body,
    Json,
    Many,
    Member,
    Metadata,
    Name,
    Number,
    Stops,
    Wire,
    at_most,
)

#: Limits on one request's contents.
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 4096
MAX_BIASES = 1024

Biases: TypeAlias = Annotated[dict[str, Number], BeforeValidator(at_most(MAX_BIASES))]
#: How many likely tokens are told beside the chosen one.
NumTops: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]


def _is_length(value: int) -> int:
    if value == NO_LIMIT or 0 <= value < 2**63:
        return value
    raise PydanticCustomError("out_of_range", "it must be an integer of at least 1")


#: How many tokens an answer may have.
NumTokens: TypeAlias = Annotated[int, AfterValidator(_is_length)]


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class VllmArguments(Wire):
    """Arguments of vLLM's processors against repeated sequences: DeepSeek-OCR's (``ngram_size``) and MinerU's."""

    no_repeat_ngram_size: int | None = None
    ngram_size: int | None = None
    window_size: int | None = None
    whitelist_token_ids: Many[int] | None = None
    debug: bool | None = None  # a word in vLLM's log


class Schema(Wire):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")


class TextFormat(Member):
    type: Literal["text"]


class ObjectFormat(Member):
    type: Literal["json_object"]


class FittingFormat(ObjectFormat):
    """Any object, or one that fits a schema, as llama.cpp's clients write it."""

    schema_: Json | None = Field(None, alias="schema")


class SchemaFormat(Member):
    type: Literal["json_schema"]
    json_schema: Schema


class StructuredOutputs(Wire):
    """vLLM's form of an answer: one of the first five fields."""

    json_: Json | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


ResponseFormat: TypeAlias = Annotated[
    TextFormat | FittingFormat | SchemaFormat, Field(discriminator="type")
]


class SampledBody(Body):
    """Sampling, at every door: OpenAI's fields, and those that vLLM's, mlx-vlm's and llama.cpp's clients add."""

    sampling: Literal["greedy", "recommended"] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    repetition_context_size: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[int] | None = None
    seed: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class ThoughtBody(SampledBody):
    """Sampling, and thinking as mlx-vlm's clients write it."""

    enable_thinking: bool | None = None
    thinking_budget: int | None = None


class Common(SampledBody):
    """The common part of the bodies of both kinds of completions."""

    nothing = NOTHING
    refused = REFUSED
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    n: int | None = None
    prompt_logprobs: NumTops | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stop: str | Stops | None = None
    vllm_xargs: VllmArguments | None = None
    json_schema: Json | str | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # Without effect: prefixes are found by content.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
