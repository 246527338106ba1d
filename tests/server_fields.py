"""The table of fields in docs/server-fields.md, from the server's types: ``python -m tests.server_fields`` writes it anew."""

from __future__ import annotations

from pathlib import Path

from mlx_vlm.server.schemas import ChatRequest as OfMlxVlm
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsBase as OfOpenAI,
)

from vlm_batch.server.doors.chat import ChatRequest
from vlm_batch.server.doors.completions import CompletionRequest
from vlm_batch.server.sampled import Common
from vlm_batch.server.unserved import REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "server-fields.md"
HEAD = (
    "| field | `/v1/chat/completions` | `/v1/completions` | why |\n"
    "| --- | --- | --- | --- |\n"
)
#: Fields of a chat in vLLM (chat_completion/protocol.py at 002032e).
OF_VLLM = frozenset({
    "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "response_format", "seed", "stop", "stream",
    "stream_options", "temperature", "top_p", "tools", "tool_choice", "reasoning_effort", "thinking_token_budget",
    "include_reasoning", "parallel_tool_calls", "user", "use_beam_search", "top_k", "min_p", "repetition_penalty",
    "watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "echo", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "return_token_offsets",
    "return_prompt_text", "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
    "repetition_detection", "stream_interval",
})  # fmt: skip
#: Fields of a chat in llama.cpp's server (tools/server/server-schema.cpp and server-common.cpp at 82bb485), which reads
#: those of its completions, too. Without what its chat parser always writes itself (``chat_format``, ``prompt``,
#: ``grammar_lazy``, ``grammar_triggers``, ``preserved_tokens``, ``generation_prompt``, ``message_delimiters``) or tells its
#: sampler (``grammar_type``, ``chat_parser``, ``reasoning_budget_...``).
OF_LLAMA_CPP = frozenset({
    "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict", "n", "n_cmpl",
    "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p",
    "dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat",
    "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "seed", "n_probs", "min_keep",
    "backend_sampling", "cache_prompt", "n_cache_reuse", "return_tokens", "return_progress", "n_keep", "n_discard",
    "n_indent", "t_max_predict_ms", "response_fields", "lora", "json_schema", "grammar", "logit_bias", "ignore_eos",
    "stop", "samplers", "id_slot", "timings_per_token", "verbose", "post_sampling_probs", "tools", "tool_choice",
    "parse_tool_calls", "parallel_tool_calls", "response_format", "chat_template_kwargs", "reasoning_format",
    "reasoning_control", "thinking_budget_tokens", "add_generation_prompt", "continue_final_message", "echo",
    "logprobs", "top_logprobs", "reasoning_effort", "sse_ping_interval",
})  # fmt: skip
#: Fields of chats in OpenAI's API and in other servers.
OF_OTHERS = (
    OF_VLLM
    | OF_LLAMA_CPP
    | {*OfOpenAI.__annotations__, "stream"}
    | {*OfMlxVlm.model_fields}
)


def field_status(model: type[Common]) -> dict[str, str]:
    """Each field of a body, and "honoured", "refused", or "nothing" (refused unless it asks for nothing)."""
    status = dict.fromkeys(model.model_fields, "honoured")
    return (
        status
        | dict.fromkeys(REFUSED, "refused")
        | dict.fromkeys(model.nothing, "nothing")
    )


def table() -> str:
    """Every field that is known of, and what becomes of it at each endpoint: rows, then those without a word of their own."""
    chat, text = field_status(ChatRequest), field_status(CompletionRequest)
    rows: list[str] = []
    others: dict[str, list[str]] = {"nothing": [], "refused": []}
    for name in sorted({*chat, *text} | OF_OTHERS):
        at_chat, at_text = chat.get(name, "refused"), text.get(name, "refused")
        why = REFUSED.get(name, "")
        if at_chat in others and at_chat == at_text and not why:
            others[at_chat].append(f"`{name}`")
            continue
        rows.append(f"| `{name}` | {at_chat} | {at_text} | {why} |")
    lists = [
        f"\n**{word.capitalize()} at both:** {', '.join(names)}.\n"
        for word, names in others.items()
    ]
    return HEAD + "\n".join(rows) + "\n" + "".join(lists)


def write() -> None:
    """Put the table into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(HEAD)
    _, end, after = rest.partition("\n## Errors\n")
    PAGE.write_text(before + table() + end + after, encoding="utf-8")


if __name__ == "__main__":
    write()
