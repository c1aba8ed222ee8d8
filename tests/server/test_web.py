"""The page at `/`: its files, the view of the engine, and all of it in a real browser."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from segue.server.page.routes import FILES
from tests.server.browser import Page, browser_page, the_browser
from tests.server.running import RunningServer, serve_process

SHIFT = 8


def browse(server: RunningServer, test: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    path = the_browser()

    async def run() -> None:
        async with browser_page(path, server.url) as page:
            await page.until("document.getElementById('connection')?.dataset.state === 'open'")
            await page.until("document.activeElement.id === 'input'")
            await page.evaluate("document.getElementById('temperature').value = 0")
            await test(page)
            assert page.problems == []
            assert all(
                url.startswith((server.url, "data:")) for url in page.requested if url != "about:blank"
            )

    asyncio.run(run())


# --- files ----------------------------------------------------------------------------------------------------


def test_files_come_with_what_the_page_may_do(server: RunningServer) -> None:
    with server.client() as client:
        for path, (name, kind) in FILES.items():
            response = client.get(path)
            assert response.status_code == 200, name
            assert response.headers["content-type"] == kind
            assert "default-src 'none'" in response.headers["content-security-policy"]
            again = client.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert not re.search(r"(src|href|url\()=?[\"']?(https?:)?//", response.text), name


def test_the_view_of_the_engine(server: RunningServer) -> None:
    with server.client() as client:
        view = client.get("/engine").json()
    assert view["engine"] == "running"
    assert view["model"] == "tiny"
    assert view["stats"]["num_kv_blocks"] == 1200
    held = {block for request in view["snapshot"]["requests"] for block in request["blocks"]}
    cached = set(view["snapshot"]["cached_blocks"])
    assert not held & cached
    assert len(cached) == view["stats"]["num_cached_blocks"]


def test_the_view_needs_the_key_and_the_page_does_not(tmp_path: Path, tiny_path: Path) -> None:
    with (
        serve_process(tmp_path / "log", tiny_path, "--api-key", "secret") as server,
        server.client() as client,
    ):
        assert client.get("/").status_code == 200
        assert client.get("/engine").status_code == 401
        assert client.get("/engine", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("key", ["secret", "a/b+c=="])
def test_the_page_asks_for_the_key(tmp_path: Path, tiny_path: Path, key: str) -> None:
    path = the_browser()
    with serve_process(tmp_path / "log", tiny_path, "--api-key", key) as server:
        asyncio.run(_enter_key(path, server, key))


async def _enter_key(path: str, server: RunningServer, key: str) -> None:
    async with browser_page(path, server.url) as page:
        await page.until("document.getElementById('key-dialog')?.open")
        await page.type(key)
        await page.press("Enter")
        await page.until("document.getElementById('connection').dataset.state === 'open'")
        await page.until("document.getElementById('map-text').textContent.includes('blocks of')")


# --- in a browser ---------------------------------------------------------------------------------------------

LAST = "document.querySelector('#log li:last-child')"


def test_what_is_typed_is_computed_before_enter(server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await page.evaluate("document.getElementById('longest').value = 12")
        await page.type("an inn in the rain")
        await page.until(
            "/^([0-9]+) of \\1 tokens computed$/.test(document.getElementById('progress-text').value)"
        )
        assert await page.evaluate("document.querySelectorAll('#log li').length") == 0
        await page.press("Enter", SHIFT)
        await page.type("oh")
        assert await page.evaluate("document.getElementById('input').value") == "an inn in the rain\noh"
        await page.press("Enter")
        await page.until(f"{LAST}?.querySelector('.note')")
        lines = await page.evaluate("[...document.querySelectorAll('#log li')].map(e => e.className)")
        assert lines == ["user", "assistant"]
        assert await page.evaluate(f"{LAST}.querySelector('.text').textContent.length") > 0
        assert re.fullmatch(r"\d+ ms", await page.evaluate("document.getElementById('ttft').textContent"))
        assert await page.evaluate("document.getElementById('input').value") == ""
        said = await page.evaluate("document.getElementById('announcement').textContent")
        assert said == await page.evaluate(f"{LAST}.querySelector('.text').textContent")

    browse(server, test)


def test_escape_interrupts_and_enter_cuts_in(server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await page.evaluate("document.getElementById('longest').value = 8000")
        await page.type("the hen")
        await page.press("Enter")
        await page.until(
            f"{LAST}?.className === 'assistant' && {LAST}.querySelector('.text').textContent.length > 20"
        )
        await page.until("document.getElementById('running').textContent === '1'")
        await page.until("document.querySelectorAll('#requests tr').length > 0")
        await page.press("Escape")
        await page.until(f"{LAST}.querySelector('.note')?.textContent.includes('client_cancelled')")
        await page.type("rain")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#log li').length === 4")
        await page.until(f"{LAST}.querySelector('.text').textContent.length > 20")
        await page.type("oh")  # typed while the answer comes, and sent in the middle of it
        await page.press("Enter")
        await page.until("document.querySelectorAll('#log li').length === 6")
        await page.until(f"{LAST}.querySelector('.text').textContent.length > 0")
        await page.press("Escape")
        await page.until(f"{LAST}.querySelector('.note')")

    browse(server, test)


def test_a_conversation_survives_a_killed_engine(tmp_path: Path, long_path: Path) -> None:
    with serve_process(tmp_path / "log", long_path, "--max-model-len", "8192") as server:

        async def test(page: Page) -> None:
            await page.evaluate("document.getElementById('longest').value = 3000")
            await page.type("the hen")
            await page.press("Enter")
            await page.until(f"{LAST}?.querySelector('.text')?.textContent.length > 20")
            (pid,) = server.children()
            os.kill(pid, signal.SIGKILL)
            await page.until(f"{LAST}.querySelector('.note')?.textContent.includes('3000 tokens')")

        browse(server, test)


def test_everything_has_a_name_and_can_be_reached_by_key(server: RunningServer) -> None:
    async def test(page: Page) -> None:
        tree = await page.call("Accessibility.getFullAXTree")
        roles = {"button", "textbox", "spinbutton", "progressbar", "table", "main", "complementary", "image"}
        nameless = [
            node
            for node in tree["nodes"]
            if not node["ignored"]
            and node["role"]["value"] in roles
            and not node.get("name", {}).get("value")
        ]
        assert nameless == []
        reached = []
        for _ in range(12):
            await page.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"send", "new", "SUMMARY"} <= set(reached)
        backs = []
        for scheme in ("light", "dark"):
            await page.set_colour_scheme(scheme)
            backs.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert backs[0] != backs[1]

    browse(server, test)
