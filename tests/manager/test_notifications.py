"""The ends of jobs are told: by a hook, a job's own command, a webhook and mail; at least once, and to nobody else."""

import contextlib
import http.server
import json
import os
import pwd
import socketserver
import subprocess
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from tests.paths import public_python

from ullage.errors import InvalidValue, StoreFull
from ullage.manager.running.deliveries import allowed_url, by_mail, by_webhook
from ullage.manager.settings import NotifySettings

PREFIX = "https://chat.example.org/hooks/"


class Receiver:
    """A web server that keeps what it is sent, and answers with these codes, the last one for ever."""

    def __init__(self, *codes):
        self.got, self._codes = [], list(codes or [200])
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, json.loads(body), dict(self.headers)))
                code = receiver._codes.pop(0) if len(receiver._codes) > 1 else receiver._codes[0]
                self.send_response(code)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hooks"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class MailServer:
    """As much of SMTP as a client needs; keeps the messages."""

    def __init__(self):
        self.messages = []
        mails = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                self.wfile.write(b"220 here\r\n")
                while line := self.rfile.readline().decode().strip():
                    word = line.upper()
                    if word == "DATA":
                        self.wfile.write(b"354 go on\r\n")
                        text = b""
                        while (part := self.rfile.readline()) != b".\r\n":
                            text += part
                        mails.messages.append(text.decode())
                    self.wfile.write(b"221 bye\r\n" if word == "QUIT" else b"250 fine\r\n")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver():
    with contextlib.closing(Receiver(200)) as made:
        yield made


@pytest.fixture
def mails():
    with contextlib.closing(MailServer()) as made:
        yield made


def served(home, *lines):
    home.settings += "[notify]\nretry_after = 0.05\n" + "\n".join(lines) + "\n"
    home.start()
    return home


def events(home, kind):
    return [event["text"] for event in home.client.events() if event["kind"] == kind]


def test_a_webhook_is_told_what_became_of_a_job_and_nothing_else(home, receiver):
    served(home, f'webhooks = ["{receiver.url}"]')
    job = home.script("exit 3", webhook=f"{receiver.url}/7?x=1", name="train", env={"TOKEN": "secret"})
    home.until(lambda: events(home, "notified"), "the delivery")
    ((path, told, headers),) = receiver.got
    assert path == "/hooks/7?x=1" and headers["Ullage-Delivery"] == told["id"]
    assert (told["job"], told["name"], told["state"], told["exit_code"], told["cause"]) == (
        job, "train", "failed", 3, "failed by itself",
    )  # fmt: skip
    assert "secret" not in json.dumps(told) and "command" not in told
    assert events(home, "notified") == ["webhook: 127.0.0.1 answered 200"]


@pytest.mark.slow
def test_a_server_that_fails_is_asked_again_and_one_that_refuses_is_not(home):
    with contextlib.closing(Receiver(503, 500, 204)) as failing, contextlib.closing(Receiver(404)) as refusing:
        served(home, f'webhooks = ["{failing.url}", "{refusing.url}"]')
        home.script("true", webhook=failing.url)
        home.script("true", webhook=refusing.url)
        home.until(lambda: events(home, "notified") and events(home, "not notified"), "both")
        assert len({told["id"] for _, told, _ in failing.got}) == 1 and len(failing.got) == 3
        assert len(refusing.got) == 1 and events(home, "not notified") == ["webhook: 127.0.0.1 answered 404"]


@pytest.mark.slow
def test_nobody_there_is_given_up_after_a_time_and_said(home, receiver):
    served(home, f'webhooks = ["{receiver.url}"]', "give_up_after = 0.2")
    receiver.close()
    home.script("true", webhook=receiver.url)
    assert "given up" in home.until(lambda: events(home, "not notified"), "the end of trying")[0]


def test_a_redirect_is_not_followed():
    with contextlib.closing(Receiver(302, 200)) as receiver:
        settings = NotifySettings(webhooks=[receiver.url])
        result = by_webhook(receiver.url, {"id": "1-1"}, settings)
        assert not result.done and not result.again and [path for path, _, _ in receiver.got] == ["/hooks"]


@pytest.mark.parametrize(
    "url",
    [
        "https://chat.example.org.evil.net/hooks/7", "https://evil.net/hooks/", "http://chat.example.org/hooks/7",
        "https://chat.example.org:8443/hooks/7", "https://chat.example.org/hooksx", "https://chat.example.org/",
        "https://chat.example.org/hooks/../admin", "https://chat.example.org/hooks/%2e%2e/admin",
        "https://chat.example.org/hooks/..%2fadmin", "https://me@chat.example.org/hooks/7", "file:///etc/passwd",
        "https://chat.example.org\\@evil.net/hooks/7", "https://chat.example.org/hooks/\r\nX: y", "https://[::1/hooks/",
        "https://chat.example.org/hooks/7#x", "https://chat.example.org:x/hooks/7", "", "//chat.example.org/hooks/7",
    ],
)  # fmt: skip
def test_a_url_that_only_looks_allowed_is_refused(url):
    with pytest.raises(InvalidValue, match="needed a webhook that begins with"):
        allowed_url(url, [PREFIX])


def test_urls_below_a_prefix_are_allowed():
    for url in (PREFIX, PREFIX + "7", PREFIX + "a/b?c=d", "https://CHAT.example.org:443/hooks/7"):
        assert allowed_url(url, [PREFIX]).hostname == "chat.example.org"
    assert allowed_url("http://a.b/x", ["http://a.b"]) and allowed_url("http://a.b", ["http://a.b"])


def test_what_the_site_does_not_have_is_refused_at_submission(home):
    served(home, "commands = false")
    for words, message in (
        (["--webhook", "http://127.0.0.1:1/x"], "this site allows none (notify.webhooks in the settings)"),
        (["--mail", "end"], "this site sends none"),
        (["--mail", "begin"], "mail"),
        (["--on-end", "true"], "this site runs none"),
    ):
        assert message in home.cli("submit", "--memory", "1GiB", *words, "--", "true", code=2)


def test_mails_go_to_the_jobs_user_and_only_for_what_was_asked(home, mails):
    served(home, f'smtp = "{mails.address}"', 'sender = "gpu@example.org"', 'mail_domain = "example.org"')
    home.wait(home.script("true", mail="fail"))
    job = home.script("exit 1", mail="fail", name="Zürich train")
    other = home.script("true", mail="end")
    home.until(lambda: len(events(home, "notified")) == 2, "two mails")
    assert len(mails.messages) == 2
    failed, ended = sorted(mails.messages, key=lambda text: "is done" in text)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"To: {user}@example.org" in failed and "From: gpu@example.org" in failed
    assert f"ullage logs {job}" in failed and f"Job {other} " in ended


def test_mails_may_go_through_sendmail(tmp_path):
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\ncat > {tmp_path}/sent\necho "$@" >> {tmp_path}/sent\n')
    program.chmod(0o755)
    facts = {"id": "1-1", "job": 1, "name": "x", "user": "ann", "state": "done", "cause": "finished", "started": 1.0,
             "ran": 60.0}  # fmt: skip
    assert by_mail("ann", facts, NotifySettings(sendmail=str(program))).done
    assert "To: ann" in (tmp_path / "sent").read_text() and "-t -oi" in (tmp_path / "sent").read_text()


def test_the_sites_hook_is_run_for_every_end(home, tmp_path):
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\ncat > "{tmp_path}/told-$ULLAGE_END_JOB-$ULLAGE_END_STATE"\n')
    hook.chmod(0o755)
    served(home, f'hook = ["{hook}"]')
    done, held = home.script("true"), home.script("true", hold=True)
    home.client.cancel(held)
    home.until((tmp_path / f"told-{done}-done").exists, "the first end")
    home.until((tmp_path / f"told-{held}-cancelled").exists, "the second end")
    home.until(lambda: len(events(home, "notified")) == 2, "both to be crossed out")
    assert json.loads((tmp_path / f"told-{done}-done").read_text())["name"] == "sh"


def test_a_command_that_hangs_is_ended_and_said(home):
    served(home, "command_timeout = 5.0")
    length = f"1000.{os.getpid()}"  # by which its processes are found
    home.script("true", on_end=f"sh -c 'sleep {length} & sleep {length}'")
    assert "command: sh: it " in home.until(lambda: events(home, "not notified"), "the end of it")[0]
    home.until(lambda: not [each for each in psutil.process_iter() if length in command_line(each)], "its end")


def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


AS_NOBODY = """
import sys
from ullage.manager.running.deliveries import by_command
from ullage.manager.running.environment import least_environment
from ullage.manager.identity import rights
import pwd
user = pwd.getpwnam("nobody")
facts = {"id": "1-1", "job": 1, "state": "done"}
for cwd in sys.argv[1:]:
    command = ["sh", "-c", "echo $(id -u) $(pwd) $ULLAGE_END_STATE > told"]
    print(by_command(command, facts, least_environment(user.pw_uid), cwd, rights(user.pw_uid, user.pw_gid), 60.0))
"""


def test_a_jobs_command_has_the_rights_of_its_user_before_it_enters_a_folder():
    if os.geteuid() != 0:
        pytest.skip("needs root, to run a command as another user")
    if public_python() is None:
        pytest.skip("needs a Python that every user can run")
    python, path = public_python()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        private, inside, open_to_all = Path(folder, "private"), Path(folder, "private/inside"), Path(folder, "open")
        for place, mode in ((private, 0o700), (inside, 0o777), (open_to_all, 0o777)):
            place.mkdir()
            place.chmod(mode)
        words = [python, "-c", AS_NOBODY, str(open_to_all), str(inside)]
        said = subprocess.run(words, env={"PYTHONPATH": path}, cwd="/", capture_output=True, text=True, check=True)
        assert (open_to_all / "told").read_text() == f"{pwd.getpwnam('nobody').pw_uid} {open_to_all} done\n"
        assert not (inside / "told").exists() and "done=False" in said.stdout.splitlines()[1]


@pytest.mark.parametrize("point", ["notify-before-delivery", "notify-delivered", "over"])
def test_a_kill_between_the_end_and_the_delivery_loses_nothing(home, receiver, point):
    home.settings += f'[notify]\nwebhooks = ["{receiver.url}"]\n'
    home.start(crash_at=point)
    job = home.script("true", webhook=receiver.url)
    home.until(lambda: home.process.poll() is not None, "the crash")
    home.start()
    assert home.wait(job)["state"] == "done"
    home.until(lambda: events(home, "notified"), "the delivery")
    ids = {told["id"] for _, told, _ in receiver.got}
    assert len(ids) == 1 and len(receiver.got) == (2 if point == "notify-delivered" else 1), "again, with the same id"
    home.stop()
    home.start()
    assert len(events(home, "notified")) == 1, "what was crossed out stays so"


def test_while_the_disk_is_full_nothing_is_told_twice(make_here, receiver):
    here = make_here(notify={"webhooks": [receiver.url]})
    commit, failures = here.daemon.notifier._commit, []

    async def full_at_first(work):
        if len(failures) < 2:
            failures.append(work)
            here.daemon.notifier._woken.set()
            raise StoreFull("nothing was written: the disk is full")
        return await commit(work)

    here.daemon.notifier._commit = full_at_first
    here.submit("true", webhook=receiver.url)
    here.until(lambda: "notified" in [each["kind"] for each in here.call("events")["events"]], "it to be crossed out")
    assert len(failures) == 2 and len(receiver.got) == 1


def test_a_slow_receiver_of_one_user_does_not_hold_up_the_daemon(home, receiver):
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as silent:  # accepts, never answers
        slow = f"http://127.0.0.1:{silent.server_address[1]}"
        served(home, f'webhooks = ["{receiver.url}", "{slow}"]', "webhook_timeout = 300.0")
        home.script("true", webhook=slow)
        home.wait(home.script("true", on_end="touch told"))
        home.until((home.work / "told").exists, "another kind of telling")
        assert home.client.ping()
