"""Text from tokens, piece by piece, and stop strings that never leak."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from vlm_batch.engine.text import ShownText, StopStrings

BYTES = "a é 漢字 👩‍👩‍👧 z".encode()


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte: the worst case for characters of several bytes."""
    return bytes(ids).decode(errors="replace")


def test_pieces_join_to_the_whole_and_are_whole_characters() -> None:
    shown = ShownText(decode_bytes)
    pieces = [shown.piece(byte) for byte in BYTES]
    assert "".join(pieces) + shown.rest() == BYTES.decode()
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_is_never_finished_comes_out_at_the_end() -> None:
    shown = ShownText(decode_bytes)
    assert [shown.piece(byte) for byte in "漢".encode()[:2]] == ["", ""]
    assert shown.rest() == "\ufffd"
    assert shown.rest() == ""


def test_words_keep_their_spaces() -> None:
    """A tokenizer that drops the first token's space (SentencePiece) must not glue words together."""
    words = ["▁the", "▁red", "▁cir", "cle"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    shown = ShownText(decode)
    assert "".join(shown.piece(i) for i in range(4)) == "the red circle"


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    shown = ShownText(decode)
    for _ in range(1000):
        assert shown.piece(1) == "x"
    assert longest <= 3


@pytest.mark.parametrize(
    "tokens",
    [
        [0xE2],
        [0xFF],
        [0xE2, 0x82],
        [256],
        [257],
        [0xE2, 257, 257],
        [258, 0xF0, 0x9F, 0x91, 0xA9],
    ],
    ids=[
        "unfinished",
        "no text",
        "two of three",
        "never at an end",
        "empty",
        "unfinished and empty",
        "text and bytes",
    ],
)
def test_text_that_never_ends_costs_no_more_either(tokens: list[int]) -> None:
    """Bytes that never become a character, characters that end within tokens, and tokens without text: thousands of them."""
    words = [bytes([byte]) for byte in range(256)] + [b"\xa2\xe6\xbc", b"", b" word"]
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return b"".join(words[i] for i in ids).decode(errors="replace")

    shown, ids = ShownText(decode), tokens * 2000
    text = "".join([shown.piece(token) for token in ids])
    assert longest <= 64
    text += shown.rest()
    assert text == decode(ids)


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


def test_stop_strings_are_found_as_by_looking_for_each_of_them() -> None:
    """Random stops and texts of few letters, so that they overlap in every way, against the plain search."""
    chance = random.Random(3)
    matches = 0
    for _ in range(3000):
        stops = [
            "".join(chance.choices("abc", k=chance.randint(1, 7)))
            for _ in range(chance.randint(1, 6))
        ]
        matcher, held = StopStrings(stops), ""
        for _ in range(12):
            piece = "".join(chance.choices("abc", k=chance.randint(0, 5)))
            text = held + piece
            found = sorted(
                (text.find(stop), -len(stop), stop) for stop in stops if stop in text
            )
            if found:
                assert matcher.feed(piece) == (text[: found[0][0]], found[0][2]), (
                    stops,
                    text,
                )
                matches += 1
                break
            ends = [
                n
                for stop in stops
                for n in range(len(stop))
                if n == 0 or text.endswith(stop[:n])
            ]
            held = text[len(text) - max(ends) :]
            assert matcher.feed(piece) == (text[: len(text) - len(held)], None), (
                stops,
                text,
            )
        else:
            assert matcher.finish() == held
    assert 1000 < matches < 3000


def test_the_cost_of_a_character_does_not_grow_with_the_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text that has nearly become one of a hundred long ones, ever again."""
    looks = 0
    longer = StopStrings._longer

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return longer(*given)

    monkeypatch.setattr(StopStrings, "_longer", counted)
    matcher = StopStrings(
        ["a" * (5000 - n) + "b" for n in range(50)]
        + ["b" * (5000 - n) for n in range(50)]
    )
    pieces = (["aaaa"] * 1200 + ["c"]) * 3
    begin = time.perf_counter()
    assert "".join(matcher.feed(piece)[0] for piece in pieces) == "".join(pieces)
    assert looks < 3 * sum(map(len, pieces))
    assert time.perf_counter() - begin < 20
