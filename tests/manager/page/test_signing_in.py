"""Who is let in, for how long, and what everybody else gets."""

import asyncio
import gc
import http.client
import re
import time
from urllib.parse import urlsplit

import nicegui
import pytest
import requests
from tests.manager.conftest import until

from ullage.errors import NotAllowed
from ullage.manager.client import Client
from ullage.manager.page import readings
from ullage.manager.page.kept_files import StaticCache
from ullage.manager.page.sessions import Sessions, TooManyTries


def test_without_a_session_there_is_a_form_and_nothing_else(page):
    asked = requests.get(page.url + "/", allow_redirects=False, timeout=60)
    assert asked.status_code == 303 and asked.headers["location"] == "/sign-in"
    for path in ("/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/_nicegui/3.18.0/static/nicegui.js"):
        assert requests.get(page.url + path, timeout=60).status_code == 401
    form = requests.get(page.url + "/sign-in", timeout=60)
    assert form.status_code == 200 and 'name="token"' in form.text
    assert form.headers["X-Frame-Options"] == "DENY" and "unsafe" not in form.headers["Content-Security-Policy"]
    assert requests.get(page.url + "/health", timeout=60).json() == {"status": "ok"}


def test_preloaded_files_exist(page):
    visitor = page.signed_in()
    shown = visitor.get(page.url + "/queue", timeout=60).text
    addresses = re.findall(r'<link rel="modulepreload" href="([^"]+)"', shown)
    assert any("/esm/" in each for each in addresses), "AG Grid comes with the page"
    for address in addresses:
        first, again = (visitor.get(page.url + address, timeout=60) for _ in range(2))
        assert first.status_code == again.status_code == 200 and first.content == again.content
        assert "nonce" in again.headers["Content-Security-Policy"] and "max-age" in again.headers["Cache-Control"]


def test_files_are_packed_once():
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["path"])
        kind = (b"content-encoding", b"gzip") if scope["path"].endswith(".js") else (b"x", b"y")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def said(files, path, **headers):
        told = []

        async def send(message):
            told.append(message)

        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await files({"type": "http", "method": "GET", "path": path, "headers": given}, None, send)
        return told[1]["body"]

    files, below = StaticCache(app), f"/_nicegui/{nicegui.__version__}"
    for path, packs, times in (
        (f"{below}/a.js", "gzip", 1),
        (f"{below}/b.css", "gzip", 2),
        ("/queue.js", "gzip", 2),
        (f"{below}/a.js", "br", 2),
    ):
        asked.clear()
        for _ in range(2):
            assert asyncio.run(said(files, path, accept_encoding=packs)) == path.encode()
        assert len(asked) == times, path


def test_a_token_signs_in_and_signing_out_ends_it(page):
    visitor = page.signed_in()
    [cookie] = visitor.cookies
    assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite") == "strict"
    shown = visitor.get(page.url + "/", timeout=60)
    assert shown.status_code == 200 and page.token()[:8] not in shown.text
    policy = shown.headers["Content-Security-Policy"]
    nonce = re.search(r"'nonce-([^']+)'", policy)[1]
    scripts = policy.partition("script-src")[2].partition(";")[0]
    assert "'unsafe-inline'" not in scripts and shown.headers["X-Frame-Options"] == "DENY"
    assert set(re.findall(r"<script[^>]*", shown.text)) == set(
        re.findall(rf'<script nonce="{re.escape(nonce)}"[^>]*', shown.text)
    )
    kept = dict(visitor.cookies)
    assert visitor.post(page.url + "/sign-out", headers={"Origin": page.url}, timeout=60).url.endswith("/sign-in")
    again = requests.get(page.url + "/", cookies=kept, allow_redirects=False, timeout=60)
    assert again.status_code == 303


@pytest.mark.parametrize("form", [{"token": "ullage_no"}, {"token": "<b>é"}, {"code": "wrong"}, {}])
def test_anything_else_is_refused_in_one_sentence(page, form):
    answer = page.sign_in(**form)
    assert answer.status_code == 403 and not answer.cookies
    assert 'role="alert"' in answer.text and "Traceback" not in answer.text


def test_other_sites_are_refused(page):
    assert page.sign_in(origin="http://elsewhere.example", token=page.token()).status_code == 403
    visitor = page.signed_in()
    for headers in ({"Origin": "http://elsewhere.example"}, {}):
        assert visitor.post(page.url + "/sign-out", headers=headers, timeout=60).status_code == 403
        assert websocket(page, visitor, headers) == 403
    assert websocket(page, visitor, {"Origin": page.url}) == 101
    assert websocket(page, requests.Session(), {"Origin": page.url}) == 403


def websocket(page, visitor, headers) -> int:
    """What an attempt to open the page's websocket is answered."""
    parts = urlsplit(page.url)
    line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    cookie = "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())
    wanted = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Cookie": cookie,
    }
    line.request("GET", "/_nicegui_ws/socket.io/?EIO=4&transport=websocket", headers=wanted | headers)
    status = line.getresponse().status
    line.close()
    return status


def test_missing_and_failing_pages_show_no_stack_trace(page):
    visitor = page.signed_in()
    for path in ("/no-such-page", "/job/abc"):
        answer = visitor.get(page.url + path, timeout=60)
        assert answer.status_code in (404, 422) and "page does not exist" in answer.text and len(answer.text) < 1000
    assert visitor.put(page.url + "/", timeout=60).status_code == 405
    assert page.sign_in(token="x" * 5000).status_code == 413


def test_a_client_with_many_failed_logins_must_wait(page):
    sessions = Sessions(page.api, 60.0)

    async def tries() -> None:
        for _ in range(10):
            with pytest.raises(NotAllowed):
                await sessions.sign_in("192.0.2.1", token="ullage_wrong")
        with pytest.raises(TooManyTries):
            await sessions.sign_in("192.0.2.1", token=page.token())
        assert not (await sessions.sign_in("192.0.2.2", token=page.token())).over

    asyncio.run(tries())


def test_a_session_ends(page):
    now = [0.0]
    sessions = Sessions(page.api, 3600.0, clock=lambda: now[0])

    async def live() -> None:
        idle = await sessions.sign_in("", token=page.token())
        seen = await sessions.sign_in("", token=page.token())
        assert sessions.find(idle.id) is idle and sessions.find("x") is None and sessions.find(None) is None
        for now[0] in (1500.0, 3000.0):
            seen.seen()
        assert sessions.find(idle.id) is None and sessions.find(seen.id) is seen
        now[0] = 3601.0
        seen.seen()
        assert sessions.find(seen.id) is None
        with pytest.raises(NotAllowed):
            await seen.ask("queue")

    asyncio.run(live())


def test_a_session_ends_with_its_token(page):
    made = page.home.client.token_create(name="short")
    sessions = Sessions(page.api, 3600.0)

    async def live() -> None:
        session = await sessions.sign_in("", token=made["token"])
        assert (await session.readings.latest()).trouble is None
        page.home.client.token_revoke(made["id"])
        with pytest.raises(NotAllowed):
            await session.ask("gpus")
        assert session.over and sessions.find(session.id) is None

    asyncio.run(live())


@pytest.fixture
def asked(monkeypatch):
    """The questions that go to the daemon."""
    verbs, call = [], Client.call

    def counted(client, verb, **arguments):
        verbs.append(verb)
        return call(client, verb, **arguments)

    monkeypatch.setattr(Client, "call", counted)
    return verbs


def test_ten_sessions_of_one_user_ask_once_for_all(page, work, asked):
    job = work.script("true")
    work.wait(job)
    sessions = Sessions(page.api, 3600.0)

    async def look() -> None:
        ten = [await sessions.sign_in("", token=page.token()) for _ in range(10)]
        asked.clear()
        found = await asyncio.gather(*(each.reading() for each in ten for _ in range(2)))
        assert len({id(each) for each in found}) == 1 and found[0].trouble is None and found[0].gpus
        assert sorted(asked) == ["folded_queue", "gpus", "ping"]
        for question in ("finished", "job", "trace"):
            words = {"job": [job], "trace": [3600.0]}.get(question, [])
            asked.clear()
            told = await asyncio.gather(*(getattr(each.readings, question)(*words) for each in ten))
            assert told[0] and all(each == told[0] for each in told) and len(asked) == 1

    asyncio.run(look())


def test_a_queue_that_took_long_is_not_old_for_long(page, work, monkeypatch):
    monkeypatch.setattr(readings, "EVERY", 0.01)
    monkeypatch.setattr(readings, "_REST", 1e6)  # as if each answer had taken that much longer
    monkeypatch.setattr(readings, "_OLD", 0.1)
    sessions = Sessions(page.api, 3600.0)

    async def look() -> None:
        session = await sessions.sign_in("", token=page.token())
        for _ in range(3):
            await asyncio.sleep(0.1)
            await session.reading()
        job = work.submit(["true"], hold=True)
        deadline = time.monotonic() + 60
        while job not in [row["id"] for row in (await session.reading()).rows]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    asyncio.run(look())


def test_one_users_answers_reach_no_other_user_or_scope(page, work):
    job = work.script("sleep 60", name="private")
    until(lambda: work.job(job)["state"] == "running", "the job to run")
    sessions = Sessions(page.api, 3600.0)

    async def look() -> None:
        tokens = [page.token(), page.token(scope="read"), page.token(user="nobody"), page.token()]
        mine, reads, other, again = [await sessions.sign_in("", token=each) for each in tokens]
        told = await asyncio.gather(*(each.reading() for each in (mine, reads, other, again)))
        who = [(each.about["you"], each.about["scope"]) for each in told]
        assert who[0] == who[3] and len(set(who)) == 3 and who[2][0] == "nobody"
        assert mine.readings is again.readings and len({id(each.readings) for each in (mine, reads, other)}) == 3
        assert job in [each["id"] for each in (await mine.readings.trace(3600.0))["jobs"]]
        assert not (await other.readings.trace(3600.0))["jobs"]
        assert "command" in await mine.readings.job(job) and "command" not in await other.readings.job(job)

    asyncio.run(look())
    work.cli("cancel", str(job))


def test_a_revoked_token_shows_nothing_and_others_go_on(page):
    made = page.home.client.token_create(name="short")
    sessions = Sessions(page.api, 3600.0)

    async def look() -> None:
        first, second = [await sessions.sign_in("", token=each) for each in (made["token"], page.token())]
        assert (await first.reading()) is (await second.reading())
        page.home.client.token_revoke(made["id"])
        second.readings.forget(0)
        assert (await second.reading()).trouble is None, "it was asked with the other token"
        shown = await first.reading()
        assert first.over and shown.trouble and not shown.about and not shown.gpus
        signed_out = await sessions.sign_in("", token=page.token())
        assert (await signed_out.reading()).about
        sessions.end(signed_out)
        assert not (await signed_out.reading()).about and (await second.reading()).about

    asyncio.run(look())


def test_a_session_tries_its_own_token_again(page, monkeypatch):
    monkeypatch.setattr("ullage.manager.page.sessions._CHECK", -1.0)
    made = page.home.client.token_create(name="short")
    sessions = Sessions(page.api, 3600.0)

    async def look() -> None:
        first, second = [await sessions.sign_in("", token=each) for each in (page.token(), made["token"])]
        assert (await second.reading()) is (await first.reading())
        page.home.client.token_revoke(made["id"])
        assert not (await second.reading()).about and second.over, "though the first one is told all the same"

    asyncio.run(look())


def test_a_link_works_once_and_for_some_minutes(page):
    now, revoked = [0.0], []
    sessions = Sessions(page.api, 3600.0, lambda: (page.token(), lambda: revoked.append(True)), lambda: now[0])
    used, late = sessions.new_code(), sessions.new_code()

    async def follow() -> None:
        session = await sessions.sign_in("", code=used)
        session.end()
        assert revoked == [True]
        with pytest.raises(NotAllowed):
            await sessions.sign_in("", code=used)
        now[0] = 601.0
        with pytest.raises(NotAllowed):
            await sessions.sign_in("", code=late)

    asyncio.run(follow())


def test_an_unread_answer_may_be_a_refusal():
    """A page that is left while it waits: what the daemon then answers is nobody's."""

    class Slow:
        over = busy = False

        async def ask(self, verb, **arguments):
            asked.set()
            await answered.wait()
            raise NotAllowed("there is no job 5")

    async def leave():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        waiting = asyncio.create_task(readings.Readings(Slow()).job(5))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        answered.set()
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0)
        gc.collect()

    asked, answered, told = asyncio.Event(), asyncio.Event(), []
    asyncio.run(leave())
    assert told == []
