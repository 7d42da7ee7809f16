"""The page that `ullage serve --page` runs beside the daemon."""

import os
import pwd
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import requests
from tests.manager.conftest import PATIENCE, until
from tests.paths import public_python

from ullage.manager.running.page_process import _rights


def python_of_others():
    return public_python() if os.geteuid() == 0 else None


@pytest.fixture(scope="module")
def home(make_home, tmp_path_factory):
    """A daemon that serves a page, and no API that anybody asked for."""
    made = make_home(tmp_path_factory.mktemp("beside") / "h")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    made.options += ["--page", str(port)]
    if (public := python_of_others()) is not None:
        made.by_command, made.python, made.variables = True, public[0], {"PYTHONPATH": public[1]}
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


def test_serve_prints_a_one_time_link_and_its_page_ends_with_it(home):
    until(lambda: links(home), "a link")
    [link] = links(home)
    [token] = home.client.tokens()
    assert token["scope"] == "submit" and token["expires"] is not None
    entered = follow(link)
    assert entered.status_code == 303 and follow(link).status_code == 403
    [page] = processes(home)
    status = Path(f"/proc/{page}/status").read_text()
    if python_of_others() is not None:
        user = pwd.getpwnam("nobody")
        assert f"Uid:\t{user.pw_uid}\t{user.pw_uid}" in status and f"Gid:\t{user.pw_gid}\t{user.pw_gid}" in status
        assert "CapEff:\t0000000000000000" in status, "root's daemon gives its page no rights"
    os.kill(page, signal.SIGKILL)
    until(lambda: len(links(home)) == 2, "another link")
    assert "the page ended (signal 9); it is started again" in home.said()
    address, again = (each.partition("/sign-in")[0] for each in links(home))
    assert again == address
    seen = requests.get(address, cookies=entered.cookies, allow_redirects=False, timeout=PATIENCE)
    assert seen.status_code == 200, "who has signed in stays so"
    kept = [*(home.folder / "run" / "page-sessions").iterdir()]
    assert kept
    for file in kept:
        assert b"ullage" not in file.read_bytes() and file.stat().st_mode & 0o777 == 0o600
    out = {"cookies": entered.cookies, "headers": {"Origin": address}, "allow_redirects": False, "timeout": PATIENCE}
    requests.post(f"{address}/sign-out", **out)
    assert not list((home.folder / "run" / "page-sessions").iterdir())


@pytest.mark.slow
def test_a_browser_reconnects_after_a_restart_of_the_daemon(home, browser):
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE * 1000)
    tab.goto(links(home)[-1])
    tab.locator(".card", has_text="GPU 0").wait_for()
    [page] = processes(home)
    home.kill()
    until(lambda: not Path(f"/proc/{page}").exists(), "the page to end with its daemon")
    tab.get_by_text("Connection lost").wait_for()
    home.start()
    tab.get_by_text("Connection lost").wait_for(state="hidden")
    tab.locator(".card", has_text="GPU 0").wait_for()
    assert tab.get_by_label("Token").count() == 0
    context.close()


def test_without_python_for_others_roots_page_says_what_to_do(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root, whose page would have its rights")
    tmp_path.chmod(0o700)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    said: list[str] = []
    assert _rights(None, said.append) == {}
    assert "the page runs as root" in said[0] and "name a user who can (user in the table [page])" in said[0]


def test_a_page_that_cannot_be_is_one_sentence(home, tmp_path):
    home.stop()
    settings = tmp_path / "settings.toml"
    settings.write_text('[page]\nlisten = "0"\nuser = "no such user"\n')
    assert "this system has no user 'no such user' for the page" in home.cli(
        "serve", *home.options, "--settings", str(settings), code=2
    )
    assert "--page must be a port" in home.cli("serve", *home.options, "--page", "here", code=2)
