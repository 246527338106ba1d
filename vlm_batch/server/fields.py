"""The wire's names of fields, as OpenAI and vLLM have them, and the library's."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.types import SAMPLING_PARAMETERS

#: Wire fields -> fields of ``SamplingParams``.
SAMPLING: Mapping[str, str] = {
    "response_format": "json_schema",
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
} | {one.name: one.name for one in SAMPLING_PARAMETERS if one.over_http}
#: Names of llama.cpp's and vLLM's -> the names here of the same.
ALIASES: Mapping[str, str] = {
    "json_schema": "response_format",
    "guided_json": "response_format",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
}
#: Wire fields -> fields of ``Template``.
TEMPLATE: Mapping[str, str] = {
    "documents": "documents",
    "enable_thinking": "enable_thinking",
    "reasoning_effort": "reasoning_effort",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "chat_template_kwargs": "args",
}
#: Those of them that every chat takes.
THINKING: Mapping[str, str] = {"enable_thinking": "enable_thinking"}
