"""Prompts are written by the family's name, and not by what the folder says.

Right is what transformers makes of the same chat, by ``apply_chat_template(tokenize=True)`` with the same template and
tokenizer.
"""

from types import SimpleNamespace

from mlx_vlm.prompt_utils import apply_chat_template, get_chat_template
from mlx_vlm.utils import (
    prepare_inputs,
    resolve_eos_token_ids,
    should_add_special_tokens,
)
from tiny import case, report
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PARTS = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<picture> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def tokenizer(template: str, adds: str = "$A") -> PreTrainedTokenizerFast:
    """A tokenizer of a few words with a template, which adds what ``adds`` says."""
    words = ["<s>", "hello", "<picture>", "</s>", "[UNK]"]
    made = Tokenizer(
        WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="[UNK]",
        chat_template=template,
    )


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@case(
    "gemma3",
    "mllama",
    "mistral3",
    "pixtral",
    "llama4",
    "aya_vision",
    at="utils.py:2356",
)
def two_beginnings():
    """Where template and tokenizer both write a beginning, the prompt has two, in every family but five, and in these where
    the template lies on the tokenizer. Right (transformers, processing_utils.py:2402): the template's own.
    """
    processor = tokenizer("{{ bos_token }} " + PARTS, "<s> $A")
    text = get_chat_template(processor, user("hello"), add_generation_prompt=True)
    adds = should_add_special_tokens("mllama", processor)
    found = prepare_inputs(processor, prompts=text, add_special_tokens=adds)[
        "input_ids"
    ].tolist()[0]
    return found, processor.apply_chat_template(user("hello"), tokenize=True)[
        "input_ids"
    ]


@case("qwen3_5", "qwen3_vl", "glm4v_moe", at="prompt_utils.py:940")
def thinking_is_switched_off():
    """``enable_thinking`` is False where nobody says anything. Right: the template's own default."""
    template = (
        PARTS
        + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    processor = tokenizer(template)
    return get_chat_template(
        processor, user("hello"), True
    ), processor.apply_chat_template(user("hello"), tokenize=False)


@case("qwen3_vl", "qwen3_5", at="prompt_utils.py:939")
def keys_of_tools_are_sorted():
    """Tools stand in the prompt with their keys in the alphabet's order. Right: as they were given, and as in training."""
    processor = tokenizer("{{ tools[0] | tojson }}")
    tools = [{"type": "function", "function": {"name": "a"}}]
    right = processor.apply_chat_template(user("hello"), tools=tools, tokenize=False)
    return get_chat_template(processor, user("hello"), True, tools=tools), right


@case("multi_modality", at="prompt_utils.py:104")
def a_mark_that_the_template_does_not_know():
    """A picture is the text "<image>", also where the template has a mark of its own. Right: the template's, for its part."""
    processor = tokenizer(PARTS)
    parts = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "hello"}],
        }
    ]
    found = apply_chat_template(
        processor, {"model_type": "multi_modality"}, "hello", num_images=1
    )
    return found, processor.apply_chat_template(parts, tokenize=False)


@case(
    "qwen2_vl",
    "idefics2",
    "aya_vision",
    "kimi_vl",
    "kimi_k25",
    "llama4",
    "llava",
    "mllama",
    "gemma3",
    at="prompt_utils.py:45",
)
def pictures_behind_the_text():
    """A prompt's pictures stand behind its text. Right (the publishers' examples; mlx-vlm for other families): before."""
    processor = tokenizer(PARTS)
    parts = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "hello"}],
        }
    ]
    found = apply_chat_template(
        processor, {"model_type": "qwen2_vl"}, "hello", num_images=1
    )
    return found, processor.apply_chat_template(parts, tokenize=False)


@case("qwen3_5", "qwen3_vl", at="prompt_utils.py:486")
def what_a_turn_says_beside_its_words():
    """A turn's further fields, such as its earlier reasoning or a name, are left out. Right: the template has them."""
    processor = tokenizer(
        "{% for message in messages %}{{ message.name }}: hello {% endfor %}"
    )
    chat = [{"role": "user", "content": "hello", "name": "Ada"}]
    found = apply_chat_template(processor, {"model_type": "qwen3_vl"}, chat)
    return found, processor.apply_chat_template(chat, tokenize=False)


@case("qwen3_vl", "gemma3", "mistral3", at="utils.py:841")
def ends_of_the_decoder():
    """Where only config.json's text_config says an ``eos_token_id``, and there is no generation_config.json, an answer ends
    at the tokenizer's alone. Right (transformers, GenerationConfig.from_model_config): at the decoder's, too.
    """
    config = SimpleNamespace(
        eos_token_id=None, text_config=SimpleNamespace(eos_token_id=7)
    )
    tokenizer_of_it = SimpleNamespace(eos_token_id=3)
    return resolve_eos_token_ids(
        getattr(config, "eos_token_id", None), tokenizer_of_it
    ), [7, 3]


if __name__ == "__main__":
    report()
