"""Chats with pictures and videos in their content parts, in the forms of OpenAI and Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_batch.errors import InvalidPrompt, shown
from vlm_batch.types import ImageInput, Message, Video, VideoInput

_IMAGE_PARTS = ("image", "image_url", "input_image")
_VIDEO_PARTS = ("video", "video_url", "input_video")
_TEXT_PARTS = ("text", "input_text", "output_text")
#: What qwen-vl-utils reads of a picture's part, and no chat template does.
_PICTURE_SIZES = frozenset({"min_pixels", "max_pixels", "resized_height", "resized_width"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: What a video part may say beside its video, and the field of ``Video`` that it is.
_VIDEO_OPTIONS = {
    "fps": "fps",
    "sample_fps": "fps",
    "num_frames": "num_frames",
    "nframes": "num_frames",
    "max_frames": "max_frames",
    "max_pixels": "max_pixels",
}


@dataclass
class Media:
    """The pictures or the videos of a chat, in order; ``spare`` are those that no content part has carried yet."""

    noun: str
    spare: Iterator[Any]
    ordered: list[Any] = field(default_factory=list)

    def take(self, payload: Any) -> None:
        """Note a part's picture or video; a bare part takes the next spare one. Raises InvalidPrompt without one."""
        if payload is None:
            payload = next(self.spare, None)
            if payload is None:
                raise InvalidPrompt(f"the chat has more {self.noun} parts than {self.noun}s")
        self.ordered.append(payload)


def split_messages(
    messages: Sequence[Message], images: Sequence[ImageInput], videos: Sequence[VideoInput] = ()
) -> tuple[list[Message], list[ImageInput], list[VideoInput]]:
    """A chat without its pictures' and videos' payloads, and all of them in order.

    A content part that carries a picture or video keeps it; bare ``{"type": "image"}`` and ``{"type": "video"}`` parts
    take from ``images`` and ``videos`` in order; what is left of these belongs to the last user turn. Raises
    InvalidPrompt.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidPrompt(f"messages is of type {type(messages).__name__}; a list of messages is expected")
    if not messages:
        raise InvalidPrompt("the chat has no messages")
    pictures, clips = Media("picture", iter(images)), Media("video", iter(videos))
    turns = [_turn(message, pictures, clips) for message in messages]
    return turns, pictures.ordered + list(pictures.spare), clips.ordered + list(clips.spare)


def _turn(message: Any, pictures: Media, clips: Media) -> Message:
    """A message whose content is text or a list of text parts and markers. Raises InvalidPrompt for anything else."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidPrompt('every message must be a mapping with "role" and "content"')
    role, content = message["role"], message.get("content")
    if not (isinstance(role, str) and role in ROLES):
        raise InvalidPrompt(f"a message has the role {shown(role)}; the roles are {', '.join(ROLES)}")
    if content is None and role == "assistant":  # it called tools and said nothing
        content = ""
    if "content" not in message and role != "assistant":
        raise InvalidPrompt(f'a message of the role {role} has no "content"; it has {sorted(map(str, message))}')
    if isinstance(content, (list, tuple)):
        content = [_strip(part, pictures, clips) for part in content]
    elif not isinstance(content, str):
        raise InvalidPrompt(f"a message has the content {shown(content)}; text or a list of parts is expected")
    turn = {**message, "content": content}
    if role == "assistant" and message.get("tool_calls") is not None:
        turn["tool_calls"] = [_tool_call(call) for call in _listed(message["tool_calls"])]
    return turn


def _listed(calls: Any) -> Sequence[Any]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidPrompt(f"a message has the tool_calls {shown(calls)}; a list of mappings is expected")
    return calls


def _tool_call(call: Any) -> dict[str, Any]:
    """An earlier tool call, its arguments as a mapping: OpenAI sends them as JSON, templates write them themselves."""
    if not isinstance(call, Mapping):
        raise InvalidPrompt(f"a tool call is {shown(call)}; a mapping is expected")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPrompt(f"a tool call is {shown(call)}; it needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidPrompt(f"the arguments of a tool call are no JSON: {shown(arguments)}: {error}") from error
    named = {**function, "arguments": arguments}
    return {**call, "function": named} if "function" in call else named


def _strip(part: Any, pictures: Media, clips: Media) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPrompt('every content part must be a mapping with "type"')
    kind = part["type"] if isinstance(part["type"], str) else None
    if kind in _IMAGE_PARTS:
        if sized := sorted(_PICTURE_SIZES & {key for key, value in part.items() if value is not None}):
            raise InvalidPrompt(
                f"a picture part has {', '.join(sized)}; how large pictures are seen is the request's to say: min_pixels= "
                "and max_pixels="
            )
        pictures.take(_payload(part, ("image", "image_url", "url", "path")))
        return {"type": "image"}
    if kind in _VIDEO_PARTS:
        keys = ("video", "video_url", "url", "path")
        options = {key: value for key, value in part.items() if key not in ("type", *keys)}
        clips.take(_with_options(_payload(part, keys), options))
        return {"type": "video"}
    if kind not in _TEXT_PARTS:
        known = ", ".join((*_TEXT_PARTS, *_IMAGE_PARTS, *_VIDEO_PARTS))
        raise InvalidPrompt(f"a content part has the type {shown(part['type'])}; the types are {known}")
    text = part.get("text", part.get("content"))
    if not isinstance(text, str):
        raise InvalidPrompt(f"a content part of type {kind!r} has the text {shown(text)}; a string is expected")
    return part


def _payload(part: Mapping[str, Any], keys: Sequence[str]) -> Any:
    payload = next((part[key] for key in keys if part.get(key) is not None), None)
    return payload.get("url") if isinstance(payload, Mapping) else payload


def _with_options(payload: Any, options: Mapping[str, Any]) -> Any:
    """A video part's video with what the part says of its sampling."""
    if unknown := sorted(set(options) - set(_VIDEO_OPTIONS)):
        raise InvalidPrompt(f"a video part does not know {unknown}; it takes {sorted(_VIDEO_OPTIONS)}")
    said = {_VIDEO_OPTIONS[key]: value for key, value in options.items() if value is not None}
    if not said:
        return payload
    if payload is None:
        raise InvalidPrompt("a video part without a video says how it is sampled; say so in videos=[Video(...)]")
    return replace(payload if isinstance(payload, Video) else Video(payload), **said)


def with_parts(prompt: str | list[Message], num_images: int, num_videos: int) -> list[dict[str, Any]]:
    """A prompt or chat as turns whose content parts hold a marker for every picture and video.

    Markers that the chat lacks go before the words of its last user turn, pictures first, as in mlx-vlm's single prompts.
    """
    turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    for message in prompt if not isinstance(prompt, str) else ():
        content = message.get("content") or ""
        turns.append(
            {**message, "content": [_plain(part) for part in content] if isinstance(content, list) else content}
        )
    placed = [part["type"] for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    missing = [{"type": "image"}] * (num_images - placed.count("image"))
    missing += [{"type": "video"}] * (num_videos - placed.count("video"))
    if missing:
        last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
        if last is None:
            raise InvalidPrompt("the chat has no user turn for its pictures and videos")
        words = last["content"]
        last["content"] = missing + (words if isinstance(words, list) else [{"type": "text", "text": words}])
    return turns


def _plain(part: Any) -> dict[str, Any]:
    """A content part in the form that chat templates read."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPrompt('every content part must be a mapping with "type"')
    return dict(part)
