"""A headless Chromium, spoken to by the DevTools protocol over a pair of pipes."""

import base64
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # Whoever runs tests in a container is root there.
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--font-render-hinting=none",
    "--hide-scrollbars",
)
READ_BYTES = 1 << 20
CLOSE_S = 20.0


class PageError(Exception):
    """The browser refused a command, a script threw, or the process is gone."""


class Browser:
    """One window.  Close it."""

    def __init__(self, executable: str) -> None:
        self._profile = TemporaryDirectory(prefix="duemq-page-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # It reads from 3 and writes to 4, whatever the pipes' numbers are here.
        takes = f'exec {{i}}<&{to_browser} {{o}}>&{from_browser}; exec 3<&$i 4>&$o; exec "$@"'
        arguments = [executable, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        libraries = os.environ.get("LD_LIBRARY_PATH", "")
        beside = str(Path(executable).parent / "lib")
        self._process = subprocess.Popen(
            ["bash", "-c", takes, "browser", *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LD_LIBRARY_PATH": f"{libraries}:{beside}".strip(":")},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._events: list[dict] = []
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def close(self) -> None:
        """Ends the process and deletes its profile."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(CLOSE_S)
        except (PageError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: object) -> dict:
        """One command of the protocol; answers its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        text = json.dumps(command).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        while True:
            said = self._read()
            if said.get("id") == self._number:
                if "error" in said:
                    raise PageError(f"{method}: {said['error']['message']}")
                return said["result"]
            self._events.append(said)

    def show(self, url: str, width: int, *, dark: bool = False, height: int = 800) -> None:
        """Loads a page in a window of `width` CSS pixels; back when it has loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(said.get("method") == "Page.loadEventFired" for said in self._events):
            self._events.append(self._read())

    def ask(self, script: str) -> object:
        """What a JavaScript expression is, as JSON."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def picture(self, path: Path, height_max: int = 16_000) -> None:
        """The whole page as a PNG, as far down as `height_max`."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "scale": 1}
        clip["height"] = min(size["height"], height_max)
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            read = os.read(self._in, READ_BYTES)
            if not read:
                raise PageError(f"the browser has ended, status {self._process.poll()}")
            self._buffer += read
        said, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(said)
