"""A daemon with its API, its page as a process of its own, and somebody who looks at it in a browser."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.manager.conftest import PATIENCE, Home, make_home, nursery, until

__all__ = ["make_home", "nursery"]


class Page:
    """The page of a home's daemon."""

    def __init__(self, home: Home, words: Sequence[str] = ("page", "--listen", "0")) -> None:
        self.home, self._log = home, home.folder / f"page-{len(list(home.folder.glob('page-*.log')))}.log"
        self.process = home.nursery.start(
            list(words), home.environment(), ["/dev/null", str(self._log), str(self._log)]
        )
        until(lambda: "#code=" in self.said(), "the page to say where it is")
        self.link = re.findall(r"http\S+#code=\S+", self.said())[-1]
        self.url = self.link.partition("/sign-in")[0]

    def said(self) -> str:
        """All that it said."""
        return self._log.read_text() if self._log.exists() else ""

    def token(self, **more: Any) -> str:
        """A new token of the daemon."""
        return str(self.home.client.token_create(**more)["token"])

    def signed_in(self, token: str | None = None) -> requests.Session:
        """Somebody with a cookie, without a browser."""
        session = requests.Session()
        answer = self.sign_in(session, token=token or self.token())
        assert answer.status_code == 200, answer.text
        return session

    def sign_in(self, session: Any = requests, origin: str | None = None, **form: str) -> requests.Response:
        """Send the form."""
        headers = {"Origin": origin or self.url}
        return session.post(f"{self.url}/sign-in", data=form, headers=headers, timeout=PATIENCE)

    def api(self) -> str:
        """Where the daemon's API is."""
        return str(json.loads((self.home.folder / "run" / "api.json").read_text())["url"])


@pytest.fixture(scope="session")
def page(make_home: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page that all tests share."""
    home = make_home(tmp_path_factory.mktemp("page") / "h")
    home.options += ["--api", "0"]
    home.start()
    made = Page(home)
    yield made
    made.process.kill()
    home.close()


@pytest.fixture(scope="module")
def visitor(browser: Any, page: Page) -> Iterator[Any]:
    """Somebody who has followed the printed link; every error in the browser's console fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    tab.goto(page.link)
    tab.wait_for_url(f"{page.url}/")
    yield tab
    context.close()


@pytest.fixture
def work(page: Page, tmp_path: Path) -> Iterator[Home]:
    """The daemon's home, with a folder of the test's own for its jobs. What a test leaves behind is no other's."""
    page.home.work = tmp_path
    yield page.home
    client = page.home.client
    for gpu in client.gpus():
        if gpu["drain_reason"] is not None:
            client.resume(gpu["index"])
    if left := [job["id"] for job in client.queue()]:
        client.cancel(*left)
        until(lambda: not client.queue(), "the jobs of the last test to end")


# What has the keyboard, as a screen reader would call it.
FOCUSED = """() => {
  const e = document.activeElement;
  return (e.getAttribute("aria-label") ?? e.labels?.[0]?.textContent ?? e.textContent).trim().slice(0, 80);
}"""


def press_to(tab: Any, name: str, key: str = "Tab", most: int = 60) -> None:
    """Press a key until what is called so has the keyboard."""
    seen = []
    for _ in range(most):
        tab.keyboard.press(key)
        seen.append(tab.evaluate(FOCUSED))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name!r} is not reached; these were: {seen}")
