"""Text from tokens, piece by piece, and stop strings that never leak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vlm_batch.engine.text import Detokenizer, StopStrings

BYTES = "a é 漢字 👩‍👩‍👧 z".encode()


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte: the worst case for characters of several bytes."""
    return bytes(ids).decode(errors="replace")


def test_pieces_join_to_the_whole_and_are_whole_characters() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add(byte) for byte in BYTES]
    assert "".join(pieces) + detokenizer.finish() == BYTES.decode()
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_is_never_finished_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.add(byte) for byte in "漢".encode()[:2]] == ["", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_words_keep_their_spaces() -> None:
    """A tokenizer that drops the first token's space (SentencePiece) must not glue words together."""
    words = ["▁the", "▁red", "▁cir", "cle"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.add(i) for i in range(4)) == "the red circle"


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    detokenizer = Detokenizer(decode)
    for _ in range(1000):
        detokenizer.add(1)
    assert longest <= 3


def feed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = ""
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        text += emitted
        if matched is not None:
            return text, matched
    return text + matcher.finish(), None


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stops_match_across_pieces_of_any_size(size: int) -> None:
    text = "one two STOP three"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert feed(["STOP"], pieces) == ("one two ", "STOP")


def test_the_first_stop_in_the_text_wins_and_then_the_longest() -> None:
    assert feed(["three", "two"], ["one two three"]) == ("one ", "two")
    assert feed(["ab", "abc"], ["xabcy"]) == ("x", "abc")


def test_what_only_began_like_a_stop_is_given_out() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.feed("a ST") == ("a ", None)
    assert matcher.feed("AR") == ("STAR", None)
    assert matcher.feed(" S") == (" ", None)
    assert matcher.finish() == "S"


def test_a_repeated_beginning_is_found() -> None:
    assert feed(["aab"], list("aaaab")) == ("aa", "aab")


def test_no_stops_hold_nothing_back() -> None:
    assert StopStrings([]).feed("anything") == ("anything", None)
