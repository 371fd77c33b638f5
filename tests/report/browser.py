"""A page in headless Chromium, driven over its DevTools protocol: what a reader would see, as values."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,900")


class Page:
    """An open page.

    Attributes:
        complaints: errors and warnings of its console, exceptions, and addresses that it asked for besides itself.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")

    def open(self, path: Path, timeout: float = 60.0) -> None:
        """Load a file and wait until its script says that it is ready."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + timeout
        while self.evaluate("document.body && document.body.dataset.ready") != "yes":
            assert time.monotonic() < deadline, f"{path} did not become ready: {self.complaints}"
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """The value of an expression; an exception of it is a complaint and gives None."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            self.complaints.append(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._listen(message.get("method", ""), message.get("params", {}))

    def _listen(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(json.dumps(params))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.complaints.append(f"asked for {url}")


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty page; it ends with the context."""
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not address.is_file() or not address.read_text().strip():
            assert process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)
        port = address.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            target = next(t for t in json.load(answer) if t["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None, open_timeout=30) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)
