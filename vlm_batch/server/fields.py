"""The wire's names of fields, as OpenAI and vLLM have them, and the library's."""

from __future__ import annotations

from collections.abc import Mapping

#: Wire fields -> fields of ``SamplingParams``.
SAMPLING: Mapping[str, str] = {
    "response_format": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
} | {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size", "presence_penalty",
        "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs", "seed", "stop",
        "stop_token_ids", "ignore_eos", "skip_special_tokens", "thinking_budget",
    )
}  # fmt: skip
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
