"""Messages of OpenAI's chats: the types of their parts, and what the engine is asked with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue

from vlm_batch.server.asking import NO_LIMIT
from vlm_batch.server.conversation import (
    document_part,
    parsed_arguments,
    parts_of,
    text_part,
)
from vlm_batch.server.errors import ApiError
from vlm_batch.server.wire import ANY, Member, Nothing, Number, Parts, Wire
from vlm_batch.types import ALL_FRAMES

#: What clients write beside contents, at every depth: their own ids, hints for other servers' caches and providers.
OWN: Nothing = {
    "id": ANY,
    "cache_control": ANY,
    "provider_specific_fields": ANY,
    "extra_content": ANY,
}

# Messages ----------------------------------------------------------------------------------------------------------


class Url(Wire):
    """A picture: a data URI, base64, or, where the server allows it, an http(s) URL or file."""

    nothing = {"detail": ("",), "format": ANY, "uuid": ANY}
    url: str
    # a hint: pictures are taken as they are
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Wire):
    nothing = {"detail": ("", "auto"), "format": ANY, "uuid": ANY}
    url: str


class AudioUrl(Wire):
    nothing = {"format": ANY, "uuid": ANY}
    url: str


class AudioData(Wire):
    """A recording in base64; its bytes decide the format."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus"] | None = None


class PartBase(Member):
    """The fields that every part of a content may have beside it."""

    nothing = {
        **OWN,
        "uuid": ANY,
        "name": ANY,
        "index": ANY,
        "annotations": ANY,
        "extras": ANY,
    }


class TextPart(PartBase):
    type: Literal["text"]
    text: str


class RefusalPart(PartBase):
    """The text of an earlier refusal."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(PartBase):
    type: Literal["image_url"]
    image_url: Url | str


class VideoPart(PartBase):
    """A video and its sampling (``vlm_batch.Video``)."""

    type: Literal["video_url"]
    video_url: VideoUrl | str
    fps: Number | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    sound: bool = False


class AudioPart(PartBase):
    type: Literal["input_audio"]
    input_audio: AudioData


class AudioUrlPart(PartBase):
    type: Literal["audio_url"]
    audio_url: AudioUrl | str


class FileNamed(Wire):
    """A PDF, a picture or a text: a stored file, or a data URI."""

    filename: str | None = None
    file_id: str | None = None
    file_data: str | None = None


class FilePart(PartBase):
    type: Literal["file"]
    file: FileNamed


Said: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Part: TypeAlias = Annotated[
    TextPart | ImagePart | VideoPart | AudioPart | AudioUrlPart | FilePart,
    Field(discriminator="type"),
]


class FunctionCall(Wire):
    nothing = {"parsed_arguments": ANY}
    name: str
    arguments: str


class ToolCall(Wire):
    """A call that the model made in an earlier turn."""

    nothing = {
        "cache_control": ANY,
        "provider_specific_fields": ANY,
        "extra_content": ANY,
        "caller": (),
    }
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Member):
    nothing = OWN
    role: Literal["system", "developer"]
    name: str | None = None
    content: str | Parts[TextPart]


class UserMessage(Member):
    nothing = OWN
    role: Literal["user"]
    name: str | None = None
    content: str | Parts[Part]


class AssistantMessage(Member):
    """An earlier answer, with the fields that clients send back."""

    nothing = {
        **OWN, "parsed": ANY, "status": ANY, "reasoning_details": ANY, "thinking_blocks": ([],), "images": ([],),
    }  # fmt: skip
    role: Literal["assistant"]
    name: str | None = None
    content: str | Parts[Said] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same
    tool_calls: Parts[ToolCall] | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


class ToolMessage(Member):
    nothing = {**OWN, "status": ANY, "is_error": ANY, "artifact": ANY}
    role: Literal["tool"]
    content: str | Parts[TextPart | ImagePart] | None = None
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FrameArguments(Wire):
    """The choice of every video's frames: a rate, a number, or a rate with at most a number, as in vLLM."""

    fps: Number | None = None
    num_frames: int | None = None


class MediaArguments(Wire):
    """The arguments of vLLM's readers of media that are honoured."""

    nothing = {"image": ({},), "audio": ({},)}
    video: FrameArguments | None = None


# In --------------------------------------------------------------------------------------------------------------------

#: OpenAI's newer name of a role; templates know the older one.
_ROLES = {"developer": "system"}
#: The fields of a video part that choose its frames.
_OF_FRAMES = frozenset({"fps", "num_frames", "max_frames"})


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as plain mappings, with calls' arguments parsed."""
    found = [message.model_dump(exclude_none=True) for message in messages]
    for plain in found:
        plain["role"] = _ROLES.get(plain["role"], plain["role"])
        for call in plain.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = parsed_arguments(function["arguments"])
        if plain["role"] == "assistant":
            _clean_answer(plain)
        plain.setdefault("content", "")  # a tool's that returned nothing
        if isinstance(plain["content"], list):
            plain["content"] = [_with_document(part) for part in plain["content"]]
    return found


def _with_document(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part; of a file, what the server's other doors call it. Raises ApiError."""
    if part["type"] != "file":
        return part
    named = part["file"]
    if ("file_id" in named) == ("file_data" in named):
        raise ApiError(400, "a file needs file_id or file_data", param="messages")
    if "file_id" in named:
        return document_part({"file_id": named["file_id"]})
    return document_part({"url": named["file_data"]})


def _clean_answer(plain: dict[str, Any]) -> None:
    """Convert an earlier answer for templates; a refusal becomes text."""
    plain.pop("annotations", None)
    refused = plain.pop("refusal", None)
    plain.setdefault("content", refused or "")
    if isinstance(plain["content"], list):
        plain["content"] = [
            text_part(part.get("text") or part.get("refusal", ""))
            for part in plain["content"]
        ]
    reasoning = plain.pop("reasoning", None)
    if reasoning is not None:
        plain.setdefault("reasoning_content", reasoning)


def with_frames(
    messages: list[dict[str, Any]], given: MediaArguments | None
) -> list[dict[str, Any]]:
    """Return messages whose videos have the choice of frames that is said for all; what a part says goes first."""
    if given is None or given.video is None:
        return messages
    frames = _frames(given.video)
    for message in messages:
        for part in parts_of(message):
            if part["type"] == "video_url" and _OF_FRAMES.isdisjoint(part):
                part |= frames
    return messages


def _frames(given: FrameArguments) -> dict[str, Any]:
    """Return the choice of frames as a part says it, with vLLM's meaning of -1.

    A rate of -1 is none. A number of -1 is every frame, and beside a rate it is no bound.
    """
    has_rate = given.fps not in (None, NO_LIMIT)
    if not has_rate:
        return {} if given.num_frames is None else {"num_frames": given.num_frames}
    rate = {"fps": given.fps}
    is_bound = given.num_frames not in (None, ALL_FRAMES)
    return {**rate, "max_frames": given.num_frames} if is_bound else rate
