"""Who may do what, with whose rights jobs run, and that nothing which is sent ends the daemon."""

import contextlib
import json
import os
import socket
import stat
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.errors import NoDaemon, NotAllowed, UllageError
from ullage.manager.client import Client
from ullage.manager.identity import Caller, check_submitter
from ullage.manager.transport import PROTOCOL, PROTOCOL_HEADER, request_of, socket_file
from ullage.manager.verbs import VERBS


def test_the_socket_is_its_owners(common):
    assert stat.S_IMODE(socket_file(common.folder).stat().st_mode) == 0o600
    assert stat.S_IMODE((common.folder / "manager/state.db").stat().st_mode) == 0o600


def order(verb, arguments, headers=None) -> bytes:
    """A request as the client of this version sends it."""
    method, target, body = request_of(verb, arguments)
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": len(body or b""), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + (body or b"")


def raw(home, data: bytes, whole: bool = True) -> tuple[int, dict]:
    """Send bytes, a whole request or not; the status and the JSON that come back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(60)
        line.connect(str(socket_file(home.folder)))
        with contextlib.suppress(BrokenPipeError):
            line.sendall(data)
        if not whole:
            line.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := line.recv(1 << 16):
                answer += piece
    if answer.startswith(b"{"):  # to what looks like a line of an old client
        return 400, json.loads(answer)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if b"application/json" in head else {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["job", "jobs", "key", "user", "limit", "since", "gpu", "reason", "attempt", "stream", "offset"]
FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.binary(max_size=200))
def test_any_bytes_get_one_message_and_the_daemon_stays_up(common, data):
    status, answer = raw(common, data + b"\n", whole=False)
    assert status == 400 and answer["message"] and "Traceback" not in answer["message"]


@FUZZ
@given(
    verb=st.sampled_from([name for name in VERBS if name != "stop_serving"]),
    arguments=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=4),
)
def test_any_request_gets_one_answer_and_the_daemon_stays_up(common, verb, arguments):
    named = {name: "1" for name in ("job", "estimate", "gpu", "token") if f"{{{name}}}" in VERBS[verb].path}
    status, answer = raw(common, order(verb, named | arguments))
    assert status < 400 or status < 500 and answer["message"], answer


@FUZZ
@given(method=st.sampled_from(["GET", "POST", "PUT"]), path=st.text(max_size=10), body=JSON)
def test_any_path_gets_one_answer_and_the_daemon_stays_up(common, method, path, body):
    content = json.dumps(body).encode()
    head = (
        f"{method} /v1/{quote(path)} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    status, answer = raw(common, head.encode() + content)
    assert status == 200 or status < 500 and answer["message"], answer


JOB = st.fixed_dictionaries(
    {},
    optional={
        "command": st.lists(st.text(max_size=8), max_size=3) | JSON,
        "cwd": st.just("/tmp") | JSON,
        "env": JSON,
        "gpus": JSON,
        "memory": JSON,
        "array": JSON,
        "after": JSON,
        "priority": JSON,
        "time_limit": JSON,
        "name": JSON,
        "venv": JSON,
        "model": JSON,
        "hold": st.just(True),
    },
)


@FUZZ
@given(job=JOB)
def test_any_job_is_taken_whole_or_refused_in_one_message(common, job):
    before = common.client.call("ping")["jobs"]
    status, answer = raw(common, order("submit", {"job": job | {"hold": True}, "key": os.urandom(8).hex()}))
    after = common.client.call("ping")["jobs"]
    if status == 201:
        common.client.call("cancel", jobs=answer["jobs"])
    else:
        assert answer["message"] and status < 500 and after == before


def test_a_request_that_is_too_long_is_refused(common):
    status, answer = raw(common, order("submit", {"job": {"name": "x" * (5 << 20)}}))
    assert status == 413 and "at most" in answer["message"]
    assert common.answers()


def test_a_request_without_an_end_is_refused(common):
    for part in (b"GET /v1/pi", order("ping", {})[:-2]):
        status, answer = raw(common, part, whole=False)
        assert status == 400 and "must end before the connection does" in answer["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": []}, "job.command: list should have at least 1 item after validation, not 0, got []"),
        ({"cwd": "here"}, "job.cwd: path must be absolute, got 'here'"),
        ({"gpu": 1}, "there is no 'job.gpu'; did you mean 'gpus'?"),
        ({"env": {"A=B": "x"}}, "job.env: names of variables must not be empty or contain =, got 'A=B'"),
        ({"array": [1, 1]}, "job.array: indices must be different numbers from 0 to 1000000000"),
        ({"cwd": None}, "the job must have a cwd, the folder to run in, got none"),
        ({"venv": "/v", "conda": "c"}, "job: environment must be a venv or a conda environment, got both"),
        ({"estimator": "horuss"}, "no estimator named 'horuss'; did you mean 'horus'?"),
    ],
)
def test_a_bad_job_gets_one_clear_message(common, change, message):
    job = {"command": ["true"], "cwd": "/tmp", **change}
    with pytest.raises(UllageError) as refused:
        common.client.call("submit", job=job, key="a key for each job")
    assert str(refused.value).startswith(message)


def test_the_same_key_makes_one_submission(common):
    job = {"command": ["true"], "cwd": "/tmp", "hold": True}
    first = common.client.call("submit", job=job, key="a key of my own")
    assert common.client.call("submit", job=job, key="a key of my own") == first
    common.client.call("cancel", jobs=first["jobs"])


def test_a_daemon_without_root_runs_its_own_users_jobs_only(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    check_submitter(Caller(1234, 1234, "me"))
    with pytest.raises(NotAllowed, match="runs only that user's jobs"):
        check_submitter(Caller(4321, 4321, "you"))


def test_a_client_of_a_home_without_a_daemon_says_so(tmp_path):
    with pytest.raises(NoDaemon, match="no daemon is running: start it with `ullage serve`"):
        Client(tmp_path).call("ping")


@pytest.mark.parametrize("place", ["pipe", "device"])
def test_a_wrong_file_for_condas_list_delays_no_other_job(home, place):
    """The daemon opens no path that a user named; the process of the job does, and reads plain files only."""
    listed = home.folder / "fake/.conda/environments.txt"
    listed.parent.mkdir(parents=True)
    os.mkfifo(listed) if place == "pipe" else listed.symlink_to("/dev/zero")
    job = {"command": ["true"], "conda": "nosuch", "env": {"HOME": str(home.folder / "fake")}}
    home.start()
    for _ in range(2):
        ended = home.wait(home.submit(**job))
        assert ended["state"] == "failed" and "no conda environment named 'nosuch'" in ended["detail"]
        assert [attempt["cause"] for attempt in ended["attempts"]] == ["failed by itself"]
        home.kill()
        home.start()


def test_a_conda_environment_is_found_in_condas_own_list(common):
    tool = common.work / "elsewhere/mine/bin/tool"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\necho "$CONDA_PREFIX $CONDA_DEFAULT_ENV"\n')
    tool.chmod(0o755)
    (common.work / ".conda").mkdir()
    (common.work / ".conda/environments.txt").write_text(f"/no/such/place\n{tool.parents[1]}\n")
    number = common.submit(["tool"], conda="mine", env={"HOME": str(common.work)})
    assert common.wait(number)["state"] == "done"
    assert common.client.call("logs", job=number)["text"] == f"{tool.parents[1]} mine\n"


def test_another_clients_version_is_refused_with_a_command(common):
    before = common.client.ping()["jobs"]
    job = {"job": {"command": ["true"], "cwd": "/tmp"}, "key": "the key of an old client"}
    status, answer = raw(common, order("submit", job, {PROTOCOL_HEADER: PROTOCOL - 1}))
    assert status == 400 and "type: git pull && pip install ." in answer["message"]
    status, answer = raw(common, order("submit", job, {PROTOCOL_HEADER: PROTOCOL + 1}))
    assert status == 400 and "restart it" in answer["message"] and "\n" not in answer["message"]
    assert common.client.ping()["jobs"] == before


def test_a_connection_that_was_closed_meanwhile_is_opened_again(served):
    client = Client(served.folder)
    client.ping()
    served.stop()
    served.start()
    assert client.ping()["pid"] == served.process.pid


def test_a_socket_that_was_removed_is_made_again(served):
    served.client.close()
    socket_file(served.folder).unlink()
    with pytest.raises(NoDaemon):
        Client(served.folder).ping()
    served.until(served.answers, "the daemon to be reached again")
    assert stat.S_IMODE(socket_file(served.folder).stat().st_mode) == 0o600


def test_many_idle_connections_lock_no_user_out(common):
    lines = []
    try:
        for _ in range(600):
            lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            lines[-1].connect(str(socket_file(common.folder)))
        assert Client(common.folder).ping()["pid"] == common.process.pid
        assert lines[0].recv(1) == b"", "the oldest was closed"
        lines[-1].sendall(order("ping", {}))
        assert lines[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
    finally:
        for line in lines:
            line.close()
