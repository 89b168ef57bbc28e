"""A headless Chromium that opens pages, over the DevTools protocol through a pipe: no driver, no port, no network."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60

MEASURE = """
(async () => {
  await Promise.all([...document.images].map(image => image.decode()));
  const root = document.documentElement;
  const parents = e => e ? [e, ...parents(e.parentElement)] : [];
  const all = [...document.body.querySelectorAll("*")];
  const scrolls = e => parents(e.parentElement).some(p => p !== root && getComputedStyle(p).overflowX !== "visible");
  const wide = all.filter(e => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e));
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const linear = v => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = colour => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(numbers(colour)[i]), 0);
  const opaque = e => { const rgba = numbers(getComputedStyle(e).backgroundColor); return rgba.length < 4 || rgba[3] > 0; };
  const contrast = e => {
    const behind = light(getComputedStyle(parents(e).find(opaque) || root).backgroundColor);
    const ink = light(getComputedStyle(e).color);
    return (Math.max(ink, behind) + 0.05) / (Math.min(ink, behind) + 0.05);
  };
  const texts = all.filter(e => [...e.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    viewport: root.clientWidth,
    width: root.scrollWidth,
    height: root.scrollHeight,
    wide: wide.map(e => e.outerHTML.slice(0, 200)),
    pale: texts.filter(e => contrast(e) < 4.5).map(e => e.outerHTML.slice(0, 200)),
    scripts: document.scripts.length,
    sources: [...document.images].map(image => image.src.slice(0, 30)),
    text: document.body.innerText,
  };
})()
"""
"""Overflowing elements that no parent scrolls, texts of too little contrast, and what the page loads."""


def find_browser() -> str | None:
    """Returns the path of an installed Chromium; None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def pipe_above_4() -> tuple[int, int]:
    """Returns the ends of a pipe, for reading and for writing, that are none of the descriptors which the browser expects."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 5) for end in low)
    for end in low:
        os.close(end)
    return read, write


@dataclass
class Opened:
    """A page as the browser shows it: what MEASURE returns, a picture of all of it (PNG) and messages on the console."""

    measured: dict[str, Any]
    picture: bytes
    console: list[str] = field(default_factory=list)


class Browser:
    """One Chromium process. Use as a context manager."""

    def __init__(self, executable: str, profile: Path) -> None:
        theirs_in, self._out = pipe_above_4()
        self._in, theirs_out = pipe_above_4()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-extensions", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]

        def place() -> None:
            """The protocol reads from descriptor 3 and writes to 4."""
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [executable, *options], pass_fds=(3, 4), preexec_fn=place, stdin=quiet, stdout=quiet, stderr=quiet
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._buffer = 0, b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            os.close(self._out)
            os.close(self._in)

    def open(self, page: Path, width: int, scheme: str) -> Opened:
        """Opens a file at this viewport width in the colour scheme `light` or `dark`."""
        self._events = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

        def call(method: str, **parameters: Any) -> dict[str, Any]:
            return self._call(method, session, **parameters)

        for domain in ("Page", "Runtime", "Log"):
            call(f"{domain}.enable")
        call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        call("Page.navigate", url=page.absolute().as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events))
        answer = call("Runtime.evaluate", expression=MEASURE, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        measured = answer["result"]["value"]
        clip = {"x": 0, "y": 0, "width": width, "height": measured["height"], "scale": 1}
        picture = call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        console = [json.dumps(event["params"]) for event in self._events if event["method"] in said]
        self._call("Target.closeTarget", targetId=target)
        return Opened(measured, base64.b64decode(picture), console)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answers.extend(event for event in self._events if event.get("id") == number)
            return bool(answers)

        self._until(answered)
        self._events = [event for event in self._events if "id" not in event]
        assert "error" not in answers[0], f"{method}: {answers[0]['error']}"
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _until(self, done: Callable[[], bool]) -> None:
        """Reads events until `done`. Raises TimeoutError."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError(f"the browser ended or is silent for {TIMEOUT_S} s (exit status {self._process.poll()})")
            *messages, self._buffer = (self._buffer + data).split(b"\0")
            self._events += [json.loads(message) for message in messages]
