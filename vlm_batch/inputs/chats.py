"""Chats with media in content parts, in OpenAI's and Hugging Face's forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.errors import InvalidPrompt, shown
from vlm_batch.inputs.fetch import is_data_uri
from vlm_batch.inputs.media import KINDS, Kind
from vlm_batch.types import Message, Video

_TEXT_PARTS = ("text", "input_text", "output_text")
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
    spare: Iterator[Any]
    ordered: list[Any] = field(default_factory=list)

    def take(self, payload: Any) -> Any:
        """Record and return a part's medium; a bare part uses the next spare one."""
        if payload is None:
            payload = next(self.spare, None)
            if payload is None:
                raise InvalidPrompt(
                    f"the chat has more {self.kind.noun} parts than {self.kind.noun}s"
                )
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
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidPrompt(
            f"messages is of type {type(messages).__name__}; a list of messages is expected"
        )
    if not messages:
        raise InvalidPrompt("the chat has no messages")
    kinds = [Media(kind, iter(spare)) for kind, spare in zip(KINDS, media, strict=True)]
    turns = [_turn(message, kinds) for message in messages]
    left = [list(taken.spare) for taken in kinds]
    last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
    if last is not None and any(map(has_sound, left[1])):
        again = [
            replace(taken, spare=iter(spare))
            for taken, spare in zip(kinds, left, strict=True)
        ]
        bare = [
            {"type": taken.kind.marker}
            for taken, spare in zip(kinds, left, strict=True)
            for _ in spare
        ]
        words, left = last["content"], [[]] * len(kinds)
        words = words if isinstance(words, list) else [{"type": "text", "text": words}]
        last["content"] = [
            *(part for one in bare for part in _strip(one, again)),
            *words,
        ]
    return list[Message](turns), [
        taken.ordered + spare for taken, spare in zip(kinds, left, strict=True)
    ]


def has_sound(video: Any) -> bool:
    """Whether a video is heard."""
    return isinstance(video, Video) and video.sound


def _turn(message: Any, media: Sequence[Media]) -> dict[str, Any]:
    """Check a message; its content becomes text, or text parts and markers."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidPrompt('every message must be a mapping with "role" and "content"')
    role, content = message["role"], message.get("content")
    if not (isinstance(role, str) and role in ROLES):
        raise InvalidPrompt(
            f"a message has the role {shown(role)}; the roles are {', '.join(ROLES)}"
        )
    if content is None and role == "assistant":  # it called tools and said nothing
        content = ""
    if "content" not in message and role != "assistant":
        raise InvalidPrompt(
            f'a message of the role {role} has no "content"; it has {sorted(map(str, message))}'
        )
    if isinstance(content, (list, tuple)):
        content = [stripped for part in content for stripped in _strip(part, media)]
    elif not isinstance(content, str):
        raise InvalidPrompt(
            f"a message has the content {shown(content)}; text or a list of parts is expected"
        )
    if stray := _stray(message, ()):
        raise InvalidPrompt(
            f"a message has {stray[0]!r}, which no model would see: its pictures and videos are parts of its content, "
            f'{{"type": "image", "image": ...}}, or the request\'s images= and videos='
        )
    turn = {**message, "content": content}
    if role == "assistant" and message.get("tool_calls") is not None:
        turn["tool_calls"] = [
            _tool_call(call) for call in _listed(message["tool_calls"])
        ]
    return turn


def _stray(given: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    def is_nothing(value: Any) -> bool:
        return (
            value is None
            or isinstance(value, (int, float))
            or (isinstance(value, _EMPTY) and not value)
        )

    return [
        str(key)
        for key in given
        if key not in known and says_media(str(key)) and not is_nothing(given[key])
    ]


def _listed(calls: Any) -> Sequence[Any]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidPrompt(
            f"a message has the tool_calls {shown(calls)}; a list of mappings is expected"
        )
    return calls


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with parsed arguments: templates need values, not JSON."""
    if not isinstance(call, Mapping):
        raise InvalidPrompt(f"a tool call is {shown(call)}; a mapping is expected")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPrompt(
            f"a tool call is {shown(call)}; it needs a function with a name"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidPrompt(
                f"the arguments of a tool call are no JSON: {shown(arguments)}: {error}"
            ) from error
    named = {**function, "arguments": arguments}
    return {**call, "function": named} if "function" in call else named


def _strip(part: Any, media: Sequence[Media]) -> list[Any]:
    """Convert a part for templates."""
    if isinstance(part, str):
        return [part]
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPrompt('every content part must be a mapping with "type"')
    kind = part["type"] if isinstance(part["type"], str) else None
    for taken in media:
        if kind in taken.kind.parts:
            if not has_sound(taken.take(_medium(part, taken.kind))):
                return [{"type": taken.kind.marker}]
            recordings = media[-1]
            recordings.take(Track(len(taken.ordered) - 1))
            return [{"type": taken.kind.marker}, {"type": recordings.kind.marker}]
    if kind not in _TEXT_PARTS:
        known = ", ".join(
            (*_TEXT_PARTS, *(name for taken in media for name in taken.kind.parts))
        )
        raise InvalidPrompt(
            f"a content part has the type {shown(part['type'])}; the types are {known}"
        )
    if stray := _stray(part, ("type",)):
        raise InvalidPrompt(
            f"a part of type {kind!r} has {stray[0]!r}; a picture or video is a part of its own"
        )
    text = part.get("text", part.get("content"))
    if not isinstance(text, str):
        raise InvalidPrompt(
            f"a content part of type {kind!r} has the text {shown(text)}; a string is expected"
        )
    return [part]


def _medium(part: Mapping[str, Any], kind: Kind) -> Any:
    """Return a part's medium with its options; None for a bare part."""
    if kind.marker == "audio":
        return _recording(_given(part, kind.keys)[1])
    payload = _payload(part, kind.keys)
    if kind.marker == "video":
        return _with_options(
            payload,
            {
                key: value
                for key, value in part.items()
                if key not in ("type", *kind.keys)
            },
        )
    if sized := sorted(
        _PICTURE_SIZES & {key for key, value in part.items() if value is not None}
    ):
        raise InvalidPrompt(
            f"a picture part has {', '.join(sized)}; how large pictures are seen is the request's to say: min_pixels= "
            "and max_pixels="
        )
    strange = (
        []
        if payload is not None
        else sorted({key for key in part if part[key] is not None} - _BARE)
    )
    if wrong := strange or _stray(part, (*kind.keys, "type")):
        raise InvalidPrompt(
            f"a picture part does not know {', '.join(wrong)}; its picture is in {' or '.join(kind.keys)}"
        )
    return payload


def _given(part: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    given = [key for key in keys if part.get(key) is not None]
    if len(given) > 1:
        raise InvalidPrompt(
            f"{given[0]} and {given[1]} exclude each other in a content part"
        )
    return (given[0], part[given[0]]) if given else ("", None)


def _payload(part: Mapping[str, Any], keys: Sequence[str]) -> Any:
    key, payload = _given(part, keys)
    if isinstance(payload, Mapping) and payload.get("url") is None:
        has = ", ".join(map(str, payload)) or "nothing"
        raise InvalidPrompt(
            f'{key} of a content part is a mapping without "url"; it has {has}'
        )
    return payload["url"] if isinstance(payload, Mapping) else payload


def _recording(named: Any) -> Any:
    if not isinstance(named, Mapping) or not {"url", "data"} & named.keys():
        return named
    payload = named.get("data", named.get("url"))
    if not isinstance(payload, str):
        raise InvalidPrompt(
            f"a recording part has the data {shown(payload)}; base64 is expected"
        )
    # the bytes say which format they are of
    return (
        payload
        if "data" not in named or is_data_uri(payload)
        else f"data:audio;base64,{payload}"
    )


def _with_options(payload: Any, options: Mapping[str, Any]) -> Any:
    if unknown := sorted(set(options) - set(_VIDEO_OPTIONS)):
        raise InvalidPrompt(
            f"a video part does not know {unknown}; it takes {sorted(_VIDEO_OPTIONS)}"
        )
    said = {
        _VIDEO_OPTIONS[key]: value
        for key, value in options.items()
        if value is not None
    }
    if not said:
        return payload
    if payload is None:
        raise InvalidPrompt(
            "a video part without a video says how it is sampled; say so in videos=[Video(...)]"
        )
    return replace(payload if isinstance(payload, Video) else Video(payload), **said)


def with_parts(prompt: str | list[Message], *counts: int) -> list[dict[str, Any]]:
    """Return turns with a marker part per medium; ``counts`` follow ``KINDS``.

    Missing markers go before the last user turn's text, pictures first, as in mlx-vlm.
    """
    turns: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    )
    for message in prompt if not isinstance(prompt, str) else ():
        content = message.get("content") or ""
        turns.append(
            {
                **message,
                "content": [_plain(part) for part in content]
                if isinstance(content, list)
                else content,
            }
        )
    placed = [
        part["type"]
        for turn in turns
        if isinstance(turn["content"], list)
        for part in turn["content"]
    ]
    missing = [
        {"type": kind.marker}
        for kind, count in zip(KINDS, counts, strict=False)
        for _ in range(count - placed.count(kind.marker))
    ]
    if missing:
        last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
        if last is None:
            raise InvalidPrompt(
                "the chat has no user turn for its pictures, videos and recordings"
            )
        words = last["content"]
        last["content"] = missing + (
            words if isinstance(words, list) else [{"type": "text", "text": words}]
        )
    return turns


def in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whose text is a part."""
    content = turn["content"]
    return (
        {**turn, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else dict(turn)
    )


def in_text(turn: Mapping[str, Any], image_mark: str) -> dict[str, Any]:
    """Return a turn whose parts are one text, pictures as ``image_mark``, for a template that would write a list out."""
    content = turn.get("content")
    if not isinstance(content, list):
        return dict(turn)
    parts = map(_plain, content)
    return {
        **turn,
        "content": "".join(
            part["text"] if part["type"] == "text" else image_mark for part in parts
        ),
    }


def _plain(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPrompt('every content part must be a mapping with "type"')
    return dict(part)
