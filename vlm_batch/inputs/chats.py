"""Chats with media in content parts, in OpenAI's and Hugging Face's forms."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from vlm_batch.errors import InvalidPrompt, shown
from vlm_batch.inputs.fetch import is_data_uri
from vlm_batch.inputs.media import KINDS, Kind
from vlm_batch.types import Message, Video

_TEXT_PARTS = ("text", "input_text", "output_text")
#: Kinds of media by the types of their parts.
_KIND_OF_PART = {part: kind for kind in KINDS for part in kind.parts}
_TYPES = (*_TEXT_PARTS, *_KIND_OF_PART)
_MARKERS = [kind.marker for kind in KINDS]
#: Keys of qwen-vl-utils that no chat template reads.
_PICTURE_SIZES = frozenset(
    {"min_pixels", "max_pixels", "resized_height", "resized_width"}
)
#: Keys that a picture part without a picture may have.
_BARE = frozenset({"type", "text", "detail", "id", "index", "cache_control"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EMPTY = (str, list, tuple, Mapping)
#: Words that mean picture or video in the name of a key or a column.
_MEDIA_WORDS = re.compile(
    r"images?|imgs?|pictures?|photos?|photographs?|pics?|scans?|screenshots?|thumbnails?|png|jpe?gs?|videos?",
    re.I,
)
#: Options of a video part, and the field of ``Video`` that each one sets.
_VIDEO_OPTIONS = {
    "fps": "fps",
    "sample_fps": "fps",
    "num_frames": "num_frames",
    "nframes": "num_frames",
    "max_frames": "max_frames",
    "max_pixels": "max_pixels",
    "sound": "sound",
}


@dataclass(frozen=True)
class Track:
    """The place of a video's sound among a request's recordings; ``video`` counts from 0."""

    video: int


@dataclass
class Media:
    """One kind of media in a chat; ``spare`` ones have no content part yet."""

    kind: Kind
    spare: deque[Any]
    ordered: list[Any] = field(default_factory=list)

    def take(self, payload: Any) -> Any:
        """Record and return a part's medium; a bare part uses the next spare one."""
        if payload is None:
            if not self.spare:
                raise InvalidPrompt(
                    f"the chat has more {self.kind.noun} parts than {self.kind.noun}s"
                )
            payload = self.spare.popleft()
        self.ordered.append(payload)
        return payload


def says_media(name: str) -> bool:
    """Whether a name means picture or video: ``image_id``, ``photoUrl``, ``Scan``."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return any(_MEDIA_WORDS.fullmatch(word) for word in words)


def split_messages(
    messages: Sequence[Message], *media: Sequence[Any]
) -> tuple[list[Message], list[list[Any]]]:
    """Separate a chat from its media, a list for each of ``KINDS``.

    A bare ``{"type": "image"}`` part uses the next of the request's own ``media``. The last user turn gets the rest. A
    video's sound follows it, as a ``Track`` among the recordings.
    """
    _check_are_messages(messages)
    kinds = dict(zip(_MARKERS, map(Media, KINDS, map(deque, media)), strict=True))
    turns = [_turn(message, kinds) for message in messages]
    last = _last_of_user(turns)
    is_heard = any(map(has_sound, kinds["video"].spare))
    if last is not None and is_heard:
        _place_before(last, kinds)
    for taken in kinds.values():
        taken.ordered += taken.spare
    return list[Message](turns), [taken.ordered for taken in kinds.values()]


def _check_are_messages(messages: Any) -> None:
    is_text = isinstance(messages, (str, bytes))
    if is_text or not isinstance(messages, Sequence):
        raise InvalidPrompt(
            f"messages is of type {type(messages).__name__}; a list of messages is expected"
        )
    if not messages:
        raise InvalidPrompt("the chat has no messages")


def _place_before(turn: dict[str, Any], media: Mapping[str, Media]) -> None:
    """Place media that have no part before a turn's text, each video's sound behind it."""
    placed: list[Any] = []
    for marker, taken in media.items():
        for _ in range(len(taken.spare)):
            placed += _stripped({"type": marker}, media)
    turn["content"] = [*placed, *_parts_of(turn["content"])]


def _last_of_user(turns: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for turn in reversed(turns):
        if turn["role"] == "user":
            return turn
    return None


def _parts_of(content: Any) -> list[Any]:
    """Return a turn's content as parts."""
    if isinstance(content, list):
        return content
    return [_text_part(content)]


def _text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def has_sound(video: Any) -> bool:
    """Whether a video is heard."""
    return isinstance(video, Video) and video.sound


def _turn(message: Any, media: Mapping[str, Media]) -> dict[str, Any]:
    """Check a message; its content becomes text, or text parts and markers."""
    role = _role_of(message)
    if "content" not in message and role != "assistant":
        raise InvalidPrompt(
            f'a message of the role {role} has no "content"; it has {sorted(map(str, message))}'
        )
    turn = {**message, "content": _content(message, media)}
    stray = _stray(message, ())
    if stray:
        raise InvalidPrompt(
            f"a message has {stray[0]!r}, which no model would see: its pictures and videos are parts of its content, "
            f'{{"type": "image", "image": ...}}, or the request\'s images= and videos='
        )
    calls = message.get("tool_calls")
    if role == "assistant" and calls is not None:
        right = "a list of mappings is expected"
        _expect(_is_list(calls), "a message has the tool_calls", calls, right)
        turn["tool_calls"] = list(map(_tool_call, calls))
    return turn


def _role_of(message: Any) -> str:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidPrompt('every message must be a mapping with "role" and "content"')
    role = message["role"]
    right = f"the roles are {', '.join(ROLES)}"
    _expect(_is_one_of(role, ROLES), "a message has the role", role, right)
    return str(role)


def _is_one_of(name: Any, known: Sequence[str]) -> bool:
    return isinstance(name, str) and name in known


def _expect(is_right: bool, has: str, value: Any, right: str) -> None:
    """Refuse what a chat has, and say what is right."""
    if not is_right:
        raise InvalidPrompt(f"{has} {shown(value)}; {right}")


def _content(message: Mapping[Any, Any], media: Mapping[str, Media]) -> Any:
    """Return a message's text, or its parts as templates take them."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""  # it called tools and said nothing
    right = "text or a list of parts is expected"
    _expect(_is_list(content), "a message has the content", content, right)
    parts: list[Any] = []
    for part in content:
        parts += _stripped(part, media)
    return parts


def _stray(given: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """Return the names that mean a picture or video, are not known, and have a value."""
    said = [str(key) for key, value in given.items() if not _is_nothing(value)]
    return [name for name in said if name not in known and says_media(name)]


def _is_nothing(value: Any) -> bool:
    if isinstance(value, _EMPTY):
        return not value
    return isinstance(value, (int, float, NoneType))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with parsed arguments: templates need values, not JSON."""
    is_mapping = isinstance(call, Mapping)
    _expect(is_mapping, "a tool call is", call, "a mapping is expected")
    function = call.get("function", call)
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    _expect(is_named, "a tool call is", call, "it needs a function with a name")
    named = {**function, "arguments": _parsed(function.get("arguments", {}))}
    if "function" in call:
        return {**call, "function": named}
    return named


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(
            f"the arguments of a tool call are no JSON: {shown(arguments)}: {error}"
        ) from error


def _stripped(part: Any, media: Mapping[str, Media]) -> list[Any]:
    """Return a part as templates take it: a text, or a marker for each of its media."""
    if isinstance(part, str):
        return [_text_part(part)]
    name = _type_of(part)
    if name in _TEXT_PARTS:
        return [_checked_text(part)]
    marker = _KIND_OF_PART[name].marker
    taken, recordings = media[marker], media["audio"]
    medium = taken.take(_READERS[marker](part, taken.kind))
    markers = [{"type": marker}]
    if has_sound(medium):
        recordings.take(Track(len(taken.ordered) - 1))
        markers.append({"type": "audio"})
    return markers


def _type_of(part: Any) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPrompt('every content part must be a mapping with "type"')
    name = part["type"]
    right = f"the types are {', '.join(_TYPES)}"
    _expect(_is_one_of(name, _TYPES), "a content part has the type", name, right)
    return str(name)


def _checked_text(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    stray = _stray(part, ("type",))
    if stray:
        raise InvalidPrompt(
            f"a part of type {kind!r} has {stray[0]!r}; a picture or video is a part of its own"
        )
    text = part.get("text", part.get("content"))
    has = f"a content part of type {kind!r} has the text"
    _expect(isinstance(text, str), has, text, "a string is expected")
    return {**part, **_text_part(text)}


def _picture(part: Mapping[str, Any], kind: Kind) -> Any:
    payload = _payload(part, kind.keys)
    _check_picture(part, kind, is_bare=payload is None)
    return payload


def _video(part: Mapping[str, Any], kind: Kind) -> Any:
    return _with_options(_payload(part, kind.keys), part, kind)


def _heard(part: Mapping[str, Any], kind: Kind) -> Any:
    _, named = _given(part, kind.keys)
    return _recording(named)


#: What reads a part's medium with its options, by its kind's marker; None for a bare part.
_READERS = {"image": _picture, "video": _video, "audio": _heard}


def _check_picture(part: Mapping[str, Any], kind: Kind, *, is_bare: bool) -> None:
    """Refuse what a picture's part says beside its picture."""
    given = [key for key, value in part.items() if value is not None]
    sized = sorted(_PICTURE_SIZES.intersection(given))
    if sized:
        raise InvalidPrompt(
            f"a picture part has {', '.join(sized)}; how large pictures are seen is the request's to say: min_pixels= "
            "and max_pixels="
        )
    wrong = _stray(part, (*kind.keys, "type"))
    if is_bare:
        wrong = sorted(map(str, set(given) - _BARE)) or wrong
    if wrong:
        raise InvalidPrompt(
            f"a picture part does not know {', '.join(wrong)}; its picture is in {' or '.join(kind.keys)}"
        )


def _given(part: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    """Return the one of the keys that a part has, with its value; none for a bare part."""
    given = [key for key in keys if part.get(key) is not None]
    if len(given) > 1:
        raise InvalidPrompt(
            f"{given[0]} and {given[1]} exclude each other in a content part"
        )
    if not given:
        return "", None
    return given[0], part[given[0]]


def _payload(part: Mapping[str, Any], keys: Sequence[str]) -> Any:
    key, payload = _given(part, keys)
    if not isinstance(payload, Mapping):
        return payload
    if payload.get("url") is None:
        has = ", ".join(map(str, payload)) or "nothing"
        raise InvalidPrompt(
            f'{key} of a content part is a mapping without "url"; it has {has}'
        )
    return payload["url"]


def _recording(named: Any) -> Any:
    """Return a recording of a part: OpenAI's mapping has its bytes in base64, others its address."""
    if not isinstance(named, Mapping) or not {"url", "data"} & named.keys():
        return named
    data = named.get("data")
    payload = named.get("url") if data is None else data
    is_text = isinstance(payload, str)
    _expect(is_text, "a recording part has the data", payload, "base64 is expected")
    if data is None or is_data_uri(payload):
        return payload
    # the bytes say which format they are of
    return f"data:audio;base64,{payload}"


def _with_options(payload: Any, part: Mapping[str, Any], kind: Kind) -> Any:
    """Return a video with what its part says of it."""
    options = {**part}
    for key in ("type", *kind.keys):
        options.pop(key, None)
    unknown = sorted(map(str, options.keys() - _VIDEO_OPTIONS.keys()))
    if unknown:
        raise InvalidPrompt(
            f"a video part does not know {unknown}; it takes {sorted(_VIDEO_OPTIONS)}"
        )
    given = {
        _VIDEO_OPTIONS[key]: value
        for key, value in options.items()
        if value is not None
    }
    if not given:
        return payload
    if payload is None:
        raise InvalidPrompt(
            "a video part without a video says how it is sampled; say so in videos=[Video(...)]"
        )
    video = payload if isinstance(payload, Video) else Video(payload)
    return replace(video, **given)


def with_parts(prompt: str | list[Message], *counts: int) -> list[dict[str, Any]]:
    """Return turns with a marker part per medium; ``counts`` follow ``KINDS``.

    Missing markers go before the last user turn's text, pictures first, as in mlx-vlm.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    turns = [{**turn, "content": turn.get("content") or ""} for turn in prompt]
    placed = _types_of_parts(turns)
    missing: list[Any] = []
    for kind, count in zip(KINDS, counts, strict=False):
        marker = {"type": kind.marker}
        missing += [marker] * (count - placed[kind.marker])
    if not missing:
        return turns
    last = _last_of_user(turns)
    if last is None:
        raise InvalidPrompt(
            "the chat has no user turn for its pictures, videos and recordings"
        )
    last["content"] = missing + _parts_of(last["content"])
    return turns


def _types_of_parts(turns: Sequence[dict[str, Any]]) -> Counter[str]:
    """Count the parts of each type."""
    found = Counter[str]()
    for turn in turns:
        found.update(part["type"] for part in _parts_of(turn["content"]))
    return found


def in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whose text is a part."""
    if isinstance(turn["content"], str):
        return {**turn, "content": [_text_part(turn["content"])]}
    return dict(turn)


def in_text(turn: Mapping[str, Any], image_mark: str) -> dict[str, Any]:
    """Return a turn whose parts are one text, pictures as ``image_mark``, for a template that would write a list out."""
    content = turn.get("content")
    if not isinstance(content, list):
        return dict(turn)
    written = ""
    for part in content:
        written += part.get("text", image_mark)
    return {**turn, "content": written}
