"""The tokens of options, as they follow a prompt.

The rule is that of evaluation harnesses: the tokens of prompt and option together, less the prompt's. The prompt's must
stay as they are, since its state is computed once for all options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vlm_batch.errors import InvalidOption, InvalidRequest, shown
from vlm_batch.inputs.processing import ESCAPE, Processing
from vlm_batch.inputs.reserved import ReservedWords
from vlm_batch.records import OptionTokens
from vlm_batch.types import Option

#: Last tokens that stand for a prompt whose text is unknown.
LAST = 32


class Context(NamedTuple):
    """A text that options follow, and its tokens."""

    text: str
    tokens: tuple[int, ...]


def tokens_of_options(
    processing: Processing,
    reserved: ReservedWords,
    prompt: str | None,
    ids: Sequence[int],
    options: Sequence[Option],
) -> tuple[OptionTokens, ...]:
    """Return each option's tokens, or its error.

    Args:
        prompt: the prompt's text, if it has one.
        ids: its tokens.
    """
    context: Context | None = None
    if any(isinstance(option, str) for option in options):
        context = _context(processing, prompt, ids)
    found: list[OptionTokens] = []
    for option in options:
        try:
            tokens = _tokens_of(processing, reserved, context, option)
            found.append(OptionTokens(option, tokens))
        except InvalidRequest as error:
            found.append(OptionTokens(option, error=error))
    return tuple(found)


def _tokens_of(
    processing: Processing,
    reserved: ReservedWords,
    context: Context | None,
    option: Option,
) -> tuple[int, ...]:
    """Return an option's tokens. Raises InvalidRequest."""
    if not len(option):
        raise InvalidOption("the option is empty")
    if not isinstance(option, str):
        return tuple(option)
    # as an assistant's turn, it may say the end of its turn
    reserved.check([{"role": "assistant", "content": option}])
    if context is None:
        raise InvalidOption(
            "this prompt's tokens cannot be told from its text; give options as lists of token ids"
        )
    text, before = context
    whole = processing.ids_of(text + option)
    if whole[: len(before)] != before:
        raise InvalidOption(
            f"the option {shown(option)} would change the prompt's last token, and has no tokens of its own behind it; "
            "let the prompt end before its last space, and the option begin with it"
        )
    if len(whole) == len(before):
        raise InvalidOption(f"the option {shown(option)} has no tokens")
    return whole[len(before) :]


def _context(
    processing: Processing, prompt: str | None, ids: Sequence[int]
) -> Context | None:
    """Return a text whose last token is the prompt's; None if there is none."""
    for text in _texts(processing, prompt, ids):
        tokens = processing.ids_of(text)
        if tokens[-1:] == (ids[-1],):
            return Context(text, tokens)
    return None


def _texts(
    processing: Processing, prompt: str | None, ids: Sequence[int]
) -> Iterator[str]:
    if prompt is not None:
        yield prompt.replace(ESCAPE, "")
    # some families write an end of their own behind the text
    last = [token for token in ids[-LAST:] if token >= 0]
    yield processing.decode_all(last)
