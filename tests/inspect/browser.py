"""A headless Chromium for tests, spoken to over a pipe in its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "needs Chromium (apt-get install chromium)"


class Browser:
    """One page in one Chromium. Whatever the page logs or requests is kept in `messages` and `requests`."""

    def __init__(self, profile: Path, timeout_s: float = 60.0) -> None:
        assert CHROMIUM is not None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._rest = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        arguments = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        arguments += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            is_ready = left > 0 and bool(select.select([self._read], [], [], left)[0])
            assert is_ready, "Chromium gave no answer in time"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path: Path, *, width: int = 1400, height: int = 900, is_dark: bool = False) -> None:
        """Open a file in a window of a size and a colour scheme, and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.messages.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + self._timeout_s
        drawn = "(document.documentElement.dataset.drawn || !document.scripts.length)"
        while not self.evaluate(f"document.readyState === 'complete' && {drawn}"):
            is_waiting = time.monotonic() < deadline and not self.messages
            assert is_waiting, f"the page was not drawn: {self.messages}"
            time.sleep(0.02)
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait for two frames, so that what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key as a user would; `key` as in KeyboardEvent.key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes.update(ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40, PageUp=33, PageDown=34)
        text = {"text": key} if len(key) == 1 else {}
        for _ in range(times):
            self.call(
                "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes.get(key, 0), **text
            )
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes.get(key, 0))
        self.settle()

    def point(self, selector: str) -> None:
        """Move the pointer over the middle of the first element that matches."""
        box = self.evaluate(
            f"(r => [r.left + r.width / 2, r.top + r.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        self.settle()

    def screenshot(self, path: Path) -> None:
        """A picture of what is in the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
