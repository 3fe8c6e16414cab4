"""A headless Chromium, driven by the DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

TIMEOUT_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The command of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        # errors in the console, exceptions, and what the content policy blocked
        self.complaints: list[str] = []

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result.

        Raises:
            RuntimeError: the browser refuses it.
        """
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(TIMEOUT_S))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is waited for.

        Raises:
            RuntimeError: it throws.
        """
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds, looking again whenever the page changes or
        becomes ready."""
        timeout = int(1000 * TIMEOUT_S)
        self.evaluate(f"""new Promise((resolve, reject) => {{
            const look = () => {{ if ({condition}) {{ watcher.disconnect(); resolve(true); }} }};
            const watcher = new MutationObserver(look);
            watcher.observe(document, {{ subtree: true, childList: true, characterData: true, attributes: true }});
            document.addEventListener("readystatechange", look);
            setTimeout(() => reject(new Error("never true: " + {json.dumps(condition)})), {timeout});
            look();
        }})""")

    def open(self, url: str, *, key: str | None, dark: bool = False, width: int = 1200) -> None:
        """Load a page, showing a key as a browser does that asked for a password."""
        headers = (
            {"Authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}
            if key
            else {}
        )
        self.command("Network.setExtraHTTPHeaders", headers=headers)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.complaints.clear()
        self.command("Page.navigate", url=url)
        self.wait_until("document.readyState === 'complete'")

    def _note(self, event: Mapping[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))


@contextmanager
def browsing(command: str, directory: Path) -> Iterator[Page]:
    """A page of a new browser that keeps everything in `directory`."""
    process = subprocess.Popen(
        [command, *OPTIONS, f"--user-data-dir={directory}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(directory)},
    )
    try:
        with connect(_page_address(process), max_size=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Network", "Log", "Runtime"):
                page.command(f"{domain}.enable")
            yield page
    finally:
        process.kill()
        process.wait()
        # its helpers may hold the other end for longer: do not read until theirs closes
        if process.stderr is not None:
            process.stderr.close()


def _page_address(process: subprocess.Popen[str]) -> str:
    """Where the first page listens; the browser prints its own address when it is ready."""
    assert process.stderr is not None
    for line in process.stderr:
        if "DevTools listening on " in line:
            browser = line.split("DevTools listening on ")[1].strip()
            break
    else:
        raise RuntimeError("the browser ended before it listened")
    with connect(browser, max_size=None) as socket:
        targets = Page(socket).command("Target.getTargets")["targetInfos"]
    page = next(target["targetId"] for target in targets if target["type"] == "page")
    return browser.split("/devtools/")[0] + f"/devtools/page/{page}"
