"""The page that `ullage serve --page` runs beside the daemon."""

import os
import re
import signal
from pathlib import Path

import pytest
import requests
from tests.manager.conftest import PATIENCE, until


@pytest.fixture(scope="module")
def home(make_home, tmp_path_factory):
    """A daemon that serves a page, and no API that anybody asked for."""
    made = make_home(tmp_path_factory.mktemp("beside") / "h")
    made.options += ["--page", "0"]
    made.start()
    yield made
    made.close()


def links(home) -> list[str]:
    """The links that were printed."""
    return re.findall(r"http\S+#code=\S+", home.said())


def processes(home) -> list[int]:
    """Pages of this home's daemon."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--of-daemon" in words and parent == home.process.pid:
            found.append(int(folder.name))
    return found


def follow(link: str) -> requests.Response:
    """What a browser does with a link."""
    address, _, code = link.partition("/sign-in#code=")
    return requests.post(
        f"{address}/sign-in", data={"code": code}, headers={"Origin": address}, allow_redirects=False, timeout=PATIENCE
    )


def test_serve_prints_a_link_that_signs_in_once_and_starts_a_page_that_dies_again(home):
    until(lambda: links(home), "a link")
    [link] = links(home)
    assert [token["scope"] for token in home.client.tokens() if token["revoked"] is None] == ["submit"]
    assert follow(link).status_code == 303
    assert follow(link).status_code == 403
    [page] = processes(home)
    os.kill(page, signal.SIGKILL)
    until(lambda: len(links(home)) == 2, "another link")
    assert "the page ended (signal 9); it is started again" in home.said()
    again = links(home)[-1]
    assert again.partition("/sign-in")[0] == link.partition("/sign-in")[0]
    assert follow(again).status_code == 303
    assert len([token for token in home.client.tokens() if token["revoked"] is None]) == 1


def test_the_page_ends_with_the_daemon(home):
    [page] = until(lambda: processes(home), "a page")
    home.kill()
    until(lambda: not Path(f"/proc/{page}").exists(), "the page to end")


def test_a_page_that_cannot_be_is_one_sentence(home, tmp_path):
    home.stop()
    settings = tmp_path / "settings.toml"
    settings.write_text('[page]\nlisten = "0"\nuser = "no such user"\n')
    assert "found no 'no such user'" in home.cli("serve", *home.options, "--settings", str(settings), code=2)
    assert "--page: needed a port" in home.cli("serve", *home.options, "--page", "here", code=2)
