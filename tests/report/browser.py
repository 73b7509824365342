"""A real browser for tests: Debian's chromium without a window, spoken to over a pipe in the DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page, opened again and again; remembers what it complained of and what it asked the network for."""

    def __init__(self, profile):
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"

        def place():  # chromium reads commands from 3 and answers on 4; neither may be overwritten before it is copied
            read, write = os.dup(to_browser), os.dup(from_browser)
            while min(read, write) <= 4:
                read, write = (os.dup(number) if number <= 4 else number for number in (read, write))
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [CHROMIUM, *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser), os.close(from_browser)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self._number, self._session, self.events, self._rest = 0, None, [], b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command and wait for its answer; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            part = self._in.read1(1 << 20)
            assert part, "chromium has gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(line)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def open(self, url, width, *, dark=False, media=""):
        """Load a page in a window of a width."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def complaints(self):
        """Errors and warnings since the page was opened."""
        self.call("Runtime.evaluate", expression="0")  # whatever is on its way arrives before the answer
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self):
        """Addresses asked for since the page was opened."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def picture(self):
        """The whole page as PNG bytes."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"])

    def pdf(self):
        """The page as printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def close(self):
        """End the browser."""
        self._session = None
        self._number += 1
        self._out.write(json.dumps({"id": self._number, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._in.close()


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here to look at the page with")
