"""Paths through a request's options: what each row says, and which options it scores on its way.

An option's last token is never fed, so options that differ in it alone share a row, and one that begins another needs no
row of its own. Options of one token are all scored from the prompt's logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vlm_batch.records import OptionTokens
from vlm_batch.types import OptionScore, TokenLogprobs


@dataclass(eq=False)
class Options:
    """A request's options, and what became of them.

    Attributes:
        tokens: of each, once they are known.
        paths: by row id, once the prompt is prefilled.
        scores: by the index of the option.
    """

    tokens: list[OptionTokens] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    scores: dict[int, OptionScore] = field(default_factory=dict)

    def fail(self, index: int, error: str | None) -> None:
        self.scores[index] = OptionScore(self.tokens[index].given, error=error)

    def score(self, index: int, said: Sequence[TokenLogprobs], num_bytes: int) -> None:
        """Score an option by what its row read.

        Args:
            said: of each position the largest log-probability, and in ``top`` those of the tokens that were asked for.
        """
        option = self.tokens[index]
        logprobs: list[float] = []
        most: list[float] = []
        for token, one in zip(option.tokens, said, strict=False):
            logprobs.append(dict(one.top)[token])
            most.append(one.logprob)
        self.scores[index] = OptionScore(
            option.given,
            logprob=sum(logprobs),
            token_ids=option.tokens,
            token_logprobs=tuple(logprobs),
            num_bytes=num_bytes,
            # of tokens that are as likely, any may be the greedy one
            is_greedy=logprobs == most,
        )


@dataclass(eq=False)
class Path:
    """A row's way through options. That of a prompt which is not prefilled yet leads nowhere.

    Attributes:
        request: all options of its request.
        tokens: that it says, whatever the model would choose.
        options: tokens of those that it scores, by their index in the request. All but the last lie on the path.
        ahead: tokens of the row's next forward behind its last one.
    """

    request: Options
    tokens: tuple[int, ...] = ()
    options: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()

    @property
    def num_positions(self) -> int:
        """Logits that it needs: of the prompt's end, and behind each token."""
        return 1 + len(self.tokens)

    def asked(self, at: int) -> list[int]:
        """Return the tokens to score behind ``at`` of its tokens."""
        options = self.options.values()
        asked = (option[at] for option in options if len(option) > at)
        return list(dict.fromkeys(asked))

    def next(self, at: int) -> int:
        """Return the token that the row says behind ``at`` others. The last is any option's: no forward follows."""
        return self.tokens[at] if at < len(self.tokens) else self.asked(at)[0]


def paths_of(request: Options, options: Mapping[int, tuple[int, ...]]) -> list[Path]:
    """Return the fewest paths that lead to these options (index: tokens) of a request."""
    fed = sorted({option[:-1] for option in options.values()})
    # in this order, what begins others stands right before them
    longest = [one for one, after in pairwise(fed) if after[: len(one)] != one]
    longest += fed[-1:]
    paths = [Path(request, tokens) for tokens in longest]
    for index, option in options.items():
        paths[bisect_left(longest, option[:-1])].options[index] = option
    return paths
