"""A headless Chromium, driven by its DevTools protocol."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 300.0
WAIT_S = 300.0

_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9)}


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def the_browser() -> str:
    """The same for a test that needs one: it is skipped without, and fails where CI is set."""
    path = find_browser()
    if path is None:
        missing = "no Chromium is installed: apt install chromium"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        """What the page wrote to the console as errors, and its uncaught exceptions."""
        self.requested: list[str] = []
        """The URLs that it asked for."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for data in self._socket:
            message = json.loads(data)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(message["params"]["entry"]))
            elif message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        message = await asyncio.wait_for(answer, WAIT_S)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until it is true."""
        end_s = asyncio.get_running_loop().time() + WAIT_S
        while not await self.evaluate(f"Boolean({expression})"):
            text = await self.evaluate("document.body?.innerText")
            assert asyncio.get_running_loop().time() < end_s, f"{expression}\n{text}\n{self.problems}"
            await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Key by key, into what has the focus."""
        for character in text:
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def press(self, key: str, modifiers: int = 0) -> None:
        text, code = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def set_colour_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@asynccontextmanager
async def browser_page(path: str, url: str) -> AsyncIterator[Page]:
    """A page at this URL in a browser of its own."""
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [
                path,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with connect(await _page_socket(Path(profile)), max_size=None) as socket:
                page = Page(socket)
                try:
                    await page.open(url)
                    yield page
                finally:
                    await page.close()
        finally:
            process.terminate()
            process.wait()
            await asyncio.sleep(0.2)  # its children still write to the profile


async def _page_socket(profile: Path) -> str:
    import httpx

    file = profile / "DevToolsActivePort"
    end_s = asyncio.get_running_loop().time() + START_S
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        assert asyncio.get_running_loop().time() < end_s, "the browser does not start"
        await asyncio.sleep(0.05)
    port = file.read_text().splitlines()[0]
    async with httpx.AsyncClient() as client:
        targets = (await client.get(f"http://127.0.0.1:{port}/json/list")).json()
    url: str = next(target for target in targets if target["type"] == "page")["webSocketDebuggerUrl"]
    return url
