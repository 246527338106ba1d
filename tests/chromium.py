"""Headless Chromium, driven over the DevTools protocol on a pair of pipes: nothing but the browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ANSWER_SECONDS = 30.0


def find() -> str | None:
    """A Chromium on this machine, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
        ),
        None,
    )


#: Moves the pipes' ends to where the browser looks for them, and becomes the browser.
_RENUMBER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
for at, end in ((3, commands), (4, answers)):
    os.dup2(end, at, inheritable=True)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a headless browser."""

    def __init__(self, binary: str, profile: str) -> None:
        commands, self._commands = os.pipe()  # the browser reads 3 and writes 4
        self._answers, answers = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _RENUMBER,
                str(commands),
                str(answers),
                binary,
                *options,
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._replies: dict[int, SimpleQueue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._count = 0
        threading.Thread(target=self._listen, daemon=True).start()
        self._session: str | None = None

    def attach(self) -> None:
        """Make the page."""
        target = self._send("Target.createTarget", {"url": "about:blank"}, None)[
            "targetId"
        ]
        self._session = self._send(
            "Target.attachToTarget", {"targetId": target, "flatten": True}, None
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command for the page. Raises RuntimeError for one that fails."""
        return self._send(method, parameters, self._session)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait for an expression to be true. Raises AssertionError."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"waited {seconds} s for {condition}"
            time.sleep(0.05)

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def type(self, words: str) -> None:
        self.call("Input.insertText", text=words)

    def press(
        self, key: str, *, code: int, text: str = "", shift: bool = False
    ) -> None:
        """Press a key; ``text`` is what it would write."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
            )

    def dark(self, wanted: bool = True) -> None:
        """Let the page think that its reader wants dark pages, or light ones."""
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if wanted else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return what is shown, as PNG."""
        coded = self.call("Page.captureScreenshot", format="png")["data"]
        return base64.b64decode(coded)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(self.picture())

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError, Empty):
            self._send("Browser.close", {}, None)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._commands)

    def _send(
        self, method: str, parameters: dict[str, Any], session: str | None
    ) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._replies[number] = SimpleQueue()
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        found = self._replies[number].get(timeout=ANSWER_SECONDS)
        del self._replies[number]
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    def _listen(self) -> None:
        held = b""
        while part := os.read(self._answers, 1 << 16):
            *whole, held = (held + part).split(b"\0")
            for text in whole:
                message = json.loads(text)
                reply = self._replies.get(message.get("id", -1))
                if reply is not None:
                    reply.put(message)
                elif "method" in message:
                    self.events.append(message)
        os.close(self._answers)


@contextlib.contextmanager
def browser(binary: str) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = Browser(binary, profile)
        try:
            made.attach()
            yield made
        finally:
            made.close()
