"""A listener that answers like a model's server and keeps what it was sent."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What stands for a picture in recorded bodies.
PICTURE = "data:image/png;base64,PICTURE"
_DATA = re.compile(r"data:[\w./+-]+;base64,[\w+/=]+")
#: Values of a tool's arguments and of an answer's fields, by name.
VALUES = {"shop": "Bakery", "total": "3.00", "response": "3.00", "city": "Paris"}


class Listener(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def do_GET(self) -> None:
        self.server.bodies.append({"method": "GET", "path": self.path})
        self._json(
            {
                "object": "list",
                "data": [
                    {"id": "model", "object": "model", "created": 1, "owned_by": "us"}
                ],
            }
        )

    def do_POST(self) -> None:
        text = self._read().decode()
        self.server.bodies.append(
            {
                "method": "POST",
                "path": self.path,
                "body": json.loads(_DATA.sub(PICTURE, text)),
            }
        )
        body = json.loads(text)
        message = _message(body)
        if body.get("stream"):
            self._stream(
                message,
                usage=bool((body.get("stream_options") or {}).get("include_usage")),
            )
        else:
            choice = {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": _reason(message),
            }
            self._json(
                {**_head("chat.completion"), "choices": [choice], "usage": USAGE}
            )

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, message: dict[str, Any], *, usage: bool) -> None:
        calls = [
            {"index": at, **call}
            for at, call in enumerate(message.get("tool_calls") or ())
        ]
        delta = {
            "role": "assistant",
            "content": message["content"],
            **({"tool_calls": calls} if calls else {}),
        }
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": _reason(message)}]},
        ]
        chunks += [{"choices": [], "usage": USAGE}] if usage else []
        lines = [
            json.dumps({**_head("chat.completion.chunk"), **chunk}) for chunk in chunks
        ]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(
            "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
        )
        self.close_connection = True


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "model"}


def _reason(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _message(body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in the form that a body asks for: a call of its first tool, JSON, or text."""
    tools, turns = body.get("tools") or [], body.get("messages") or []
    is_answered = any(turn.get("role") == "tool" for turn in turns)
    if tools and body.get("tool_choice") != "none" and not is_answered:
        named = tools[0]["function"]
        call = {
            "name": named["name"],
            "arguments": json.dumps(_filled(named.get("parameters") or {})),
        }
        calls = [{"id": "call_1", "type": "function", "function": call}]
        return {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": calls,
        }
    form = body.get("response_format") or {}
    schema = (
        (form.get("json_schema") or {}).get("schema")
        if form.get("type") == "json_schema"
        else None
    )
    text = (
        "3.00"
        if form.get("type") in (None, "text")
        else json.dumps(_filled(schema or {}))
    )
    return {"role": "assistant", "content": text, "refusal": None}


def _filled(schema: dict[str, Any]) -> dict[str, str]:
    names = schema.get("properties") or {"shop": {}, "total": {}}
    return {name: VALUES.get(name, "x") for name in names}
