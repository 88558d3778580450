"""A headless Chromium, driven over a pipe: for pictures of pages and for tests of them.

with Browser() as browser:
    tab = browser.open(Path("report.html"), width=390, dark=True)
    Path("phone.png").write_bytes(tab.picture())

It uses the DevTools protocol: JSON messages, each followed by a zero byte, written to the browser's file
descriptor 3 and read from its file descriptor 4. It needs no other package and opens no port.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pwfn.errors import PwfnError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT = 60.0  # seconds per answer; the first start on a busy machine takes several


class BrowserError(PwfnError):
    """There is no Chromium, or a call to it failed."""


def find_browser() -> str | None:
    """Path of an installed Chromium, if there is one."""
    return next((path for path in map(shutil.which, _NAMES) if path), None)


class Browser:
    """A Chromium with a temporary profile."""

    def __init__(self) -> None:
        program = find_browser()
        if program is None:
            raise BrowserError("Chromium is not installed: install it (Debian: apt install chromium)")
        self._profile = tempfile.TemporaryDirectory(prefix="pwfn-browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Above 10, so that neither is already 3 or 4 when the shell assigns them.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
        options = ("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}")
        # Root, as in a container, has no sandbox; only our own pages are opened.
        quiet = (
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", program, *options, *quiet],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, to_read, to_write):
            os.close(end)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (BrowserError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for end in (self._read, self._write):
            os.close(end)
        self._profile.cleanup()

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> Tab:
        """Load a page from disk in a new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.shape(width, height, dark=dark)
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.wait_for("Page.loadEventFired")
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its answer; events that arrive meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"{method}: the browser has exited: start it by hand to see why") from None
        for answer in self._messages():
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: the browser answers: {answer['error'].get('message')}")
            else:
                found: dict[str, Any] = answer["result"]
                return found
        raise BrowserError(f"{method}: no answer from the browser in {_TIMEOUT:.0f} seconds")

    def wait_for_event(self, method: str, session: str) -> dict[str, Any]:
        """The first event of that name, which may have arrived already."""
        for event in self.events:
            if event.get("method") == method and event.get("sessionId") == session:
                return event
        for event in self._messages():
            self.events.append(event)
            if event.get("method") == method and event.get("sessionId") == session:
                return event
        raise BrowserError(f"{method}: did not happen in {_TIMEOUT:.0f} seconds")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages as they arrive, until the timeout."""
        end = time.monotonic() + _TIMEOUT
        while True:
            text, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                yield json.loads(text)
                continue
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise BrowserError("the browser has exited: start it by hand to see why")
            self._buffer += piece


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method for this page."""
        return self._browser.call(method, self._session, **parameters)

    def wait_for(self, method: str) -> dict[str, Any]:
        """Wait for an event of this page; one that has already happened counts."""
        return self._browser.wait_for_event(method, self._session)

    def shape(self, width: int, height: int, *, dark: bool, printed: bool = False) -> None:
        """Size in CSS pixels, colours, and screen or paper."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key: its name, its code, and the text it types."""
        shared = {"key": key, "code": key if key != " " else "Space", "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, x: float, y: float) -> None:
        """Click the left button at a position in the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """Events with these names so far."""
        self.value("new Promise(done => setTimeout(done, 50))")  # pending events arrive first
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event.get("method") in methods
        ]

    def picture(self, selector: str | None = None) -> bytes:
        """The whole page, or one element, as PNG."""
        box = (
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
            if selector
            else "document.documentElement.getBoundingClientRect()"
        )
        x, y, width, height = self.value(f"(b => [b.x + scrollX, b.y + scrollY, b.width, b.height])({box})")
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])
