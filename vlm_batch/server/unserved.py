"""Fields of other servers' that no door serves: which of their values ask for nothing, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_batch.server.wire import ANY, Nothing

#: Fields of vLLM's that are not served, and values beside null that change nothing (``REFUSED`` says why others are refused).
_NOTHING_IN_VLLM: Nothing = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "truncate_prompt_tokens": (),
    # of what truncate_prompt_tokens leaves out
    "truncation_side": ("left", "right"),
    "request_id": (),
    # a conversation's name; prefixes are found by content
    "session_id": ANY,
    "logprob_token_ids": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    "return_prompt_text": (False,),
    # of vLLM's paths that only render
    "return_token_offsets": ANY,
    "return_mm_kwargs": ANY,
}
#: Those of llama.cpp's, and of mlx-vlm's samplers.
_NOTHING_IN_LLAMA_CPP: Nothing = {
    # prefixes are always kept
    "cache_prompt": (True,),
    "n_cache_reuse": (0,),
    # a place in the server, with the prefix that it keeps
    "id_slot": ANY,
    "n_predict": (-1,),
    "n_cmpl": (1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "min_keep": (0,),
    "typical_p": (1,),
    "p_less": (False,),
    "top_n_sigma": (-1, 0),
    "repeat_penalty": (1,),
    # of each sampler, what turns it off; the others say how it would work
    "xtc_probability": (0,),
    "xtc_threshold": ANY,
    "dynatemp_range": (0,),
    "dynatemp_exponent": ANY,
    "dry_multiplier": (0,),
    "dry_base": ANY,
    "dry_allowed_length": ANY,
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "mirostat": (0,),
    "mirostat_tau": ANY,
    "mirostat_eta": ANY,
    "adaptive_target": (-1,),
    "adaptive_decay": ANY,
    "backend_sampling": ANY,
    "grammar": ("",),
    "lora": ([],),
    "response_fields": ([],),
    "samplers": (),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "verbose": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_control": (False,),
    "parse_tool_calls": (True,),
    # comments in a stream that is silent
    "sse_ping_interval": ANY,
}
#: Fields of other servers' that are not served, and values beside null that change nothing, which some clients always send.
NOTHING: Nothing = {
    **_NOTHING_IN_VLLM,
    **_NOTHING_IN_LLAMA_CPP,
    "store": (False,),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "best_of": (1,),
    "suffix": ("",),
    "moderation": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
}
#: Refused fields of other servers', and why.
REFUSED: Mapping[str, str] = {
    "audio": "audio is not made here",
    "best_of": "use n, and choose among the answers",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "grammar": "use guided_grammar, in Lark's notation",
    "logprob_token_ids": "log-probabilities are those of the likeliest tokens; use top_logprobs",
    "moderation": "nothing is moderated",
    "n_cmpl": "use n",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "prediction": "tokens are drafted from forms and earlier text",
    "prompt_cache_retention": "prefixes are kept as long as they fit",
    "repeat_last_n": "use repetition_context_size",
    "repeat_penalty": "use repetition_penalty",
    "resize_shape": "it sets the sides of pictures, up and down; min_pixels and max_pixels bound their pixels",
    "stream_interval": "every token is told when it comes",
    "suffix": "text is only added at the end",
    "verbosity": "no family has a control for it",
    "web_search_options": "nothing is searched",
}
