"""Who may do what, with whose rights jobs run, and that nothing which is sent ends the daemon."""

import json
import os
import pwd
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.errors import NotAllowed
from ullage.manager.client import Client, socket_file
from ullage.manager.identity import Who, check_submitter
from ullage.manager.orders import Orders


def test_the_socket_is_its_owners(common):
    assert stat.S_IMODE(socket_file(common.folder).stat().st_mode) == 0o600
    assert stat.S_IMODE((common.folder / "manager/state.db").stat().st_mode) == 0o600


def raw(home, data: bytes) -> dict:
    """Send bytes, and read the line that comes back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(60)
        line.connect(str(socket_file(home.folder)))
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := line.recv(1 << 16):
            answer += piece
    return json.loads(answer.splitlines()[0]) if answer else {}


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
    answer = raw(common, data + b"\n")
    assert answer["ok"] is False and answer["message"] and "Traceback" not in answer["message"]


@FUZZ
@given(
    verb=st.sampled_from([name for name in Orders.names if name != "stop_serving"]) | st.text(max_size=10),
    arguments=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=4),
)
def test_any_request_gets_one_answer_and_the_daemon_stays_up(common, verb, arguments):
    answer = raw(common, json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
    assert answer["ok"] is True or answer["message"] and "inside the daemon" not in answer["message"], answer


JOB = st.fixed_dictionaries(
    {},
    optional={
        "command": st.lists(st.text(max_size=8), max_size=3) | JSON, "cwd": st.just("/tmp") | JSON, "env": JSON,
        "gpus": JSON, "memory": JSON, "array": JSON, "after": JSON, "priority": JSON, "time_limit": JSON, "name": JSON,
        "venv": JSON, "model": JSON, "hold": st.just(True),
    },
)  # fmt: skip


@FUZZ
@given(job=JOB)
def test_any_job_is_taken_whole_or_refused_in_one_message(common, job):
    before = common.client.call("ping")["jobs"]
    order = {"verb": "submit", "arguments": {"job": job | {"hold": True}, "key": os.urandom(8).hex()}}
    answer = raw(common, json.dumps(order).encode() + b"\n")
    after = common.client.call("ping")["jobs"]
    if answer["ok"]:
        common.client.call("cancel", jobs=answer["result"]["jobs"])
    else:
        assert answer["message"] and "inside the daemon" not in answer["message"] and after == before


def test_a_request_that_is_too_long_is_refused(common):
    assert "at most" in raw(common, b"x" * (5 << 20))["message"]
    assert common.answers()


def test_a_request_without_an_end_is_refused(common):
    assert "a line that ends" in raw(common, b'{"verb": "ping"}')["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": []}, "the job: command: list should have at least 1 item after validation, not 0; found []"),
        ({"cwd": "here"}, "the job: cwd: needed an absolute path; found 'here'"),
        ({"gpu": 1}, "the job: there is no 'gpu'; did you mean 'gpus'?"),
        ({"env": {"A=B": "x"}}, "the job: env: needed names and values without = and NUL; found 'A=B'"),
        ({"array": [1, 1]}, "the job: array: needed different numbers from 0 to 1000000000"),
        ({"venv": "/v", "conda": "c"}, "the job: needed a venv or a conda environment; found both"),
        ({"estimator": "horuss"}, "no estimator named 'horuss'; did you mean 'horus'?"),
    ],
)
def test_a_bad_job_gets_one_clear_message(common, change, message):
    job = {"command": ["true"], "cwd": "/tmp", **change}
    with pytest.raises(Exception) as refused:
        common.client.submit(job)
    assert str(refused.value).startswith(message)


def test_the_same_key_makes_one_submission(common):
    job = {"command": ["true"], "cwd": "/tmp", "hold": True}
    first = common.client.submit(job, key="a key of my own")
    assert common.client.submit(job, key="a key of my own") == first
    common.client.call("cancel", jobs=first["jobs"])


def test_a_daemon_without_root_runs_its_own_users_jobs_only(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    check_submitter(Who(1234, 1234, "me"))
    with pytest.raises(NotAllowed, match="runs only that user's jobs"):
        check_submitter(Who(4321, 4321, "you"))


# As root, with another user of this system.

AS_USER = """
import json, os, pwd, resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from ullage.manager.client import Client  # before the rights go: Python itself may lie where that user cannot read
user = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
client = Client(Path(sys.argv[1]))
try:
    print(json.dumps({"ok": client.call(sys.argv[3], **json.loads(sys.argv[4]))}))
except Exception as error:
    print(json.dumps({"refused": str(error)}))
"""


@pytest.fixture(scope="module")
def shared(request):
    if os.geteuid() != 0:
        pytest.skip("needs root, to speak as another user")
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    home = request.getfixturevalue("make_home")(folder / "h")
    home.work.chmod(0o777)
    import grp

    home.settings += f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name}"\n'
    home.start()
    yield home
    home.close()
    shutil.rmtree(folder, ignore_errors=True)


def as_user(home, verb, **arguments):
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, str(home.folder), str(source), verb, json.dumps(arguments)],
        capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_runs_with_the_rights_and_limits_of_its_submitter(shared):
    script = "id -un; id -gn; id -Gn; ulimit -n; ulimit -Hn; touch mine; cat /proc/self/cmdline > /dev/null"
    job = {"command": ["/bin/sh", "-c", script], "cwd": str(shared.work), "memory": 1 << 30}
    answer = as_user(shared, "submit", job=job, key="nobodys first job")
    number = answer["ok"]["jobs"][0]
    assert shared.wait(number)["state"] == "done", shared.client.call("logs", job=number, stream="stderr")
    user, group, groups, soft, hard = shared.client.call("logs", job=number)["text"].split()
    assert (user, soft, hard) == ("nobody", "123", "456") and groups == group
    assert (shared.work / "mine").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert as_user(shared, "logs", job=number)["ok"]["text"].startswith("nobody")


def test_others_jobs_can_be_seen_and_not_touched(shared):
    number = shared.script("true", hold=True, env={"SECRET": "x"})
    for verb, arguments in (("cancel", {"jobs": [number]}), ("hold", {"jobs": [number]}), ("logs", {"job": number})):
        assert "which is root's; operators may" in as_user(shared, verb, **arguments)["refused"]
    shown = as_user(shared, "status", job=number)["ok"][0]
    assert shown["user"] == "root" and "command" not in shown and "env" not in shown
    assert "operators may" in as_user(shared, "drain", gpu=0)["refused"]
    assert "operators may" in as_user(shared, "stop_serving")["refused"]
    assert shared.job(number)["state"] == "held"


def test_a_user_without_the_group_cannot_speak_to_the_daemon(common):
    if os.geteuid() != 0:
        pytest.skip("needs root, to speak as another user")
    for place in (common.folder, *common.folder.parents):
        if place == Path("/tmp"):
            break
        place.chmod(place.stat().st_mode | 0o055)
    assert "is not yours to use" in as_user(common, "ping")["refused"]


def test_a_client_of_a_home_without_a_daemon_says_so(tmp_path):
    with pytest.raises(Exception, match="no daemon is running: start it with `ullage serve`"):
        Client(tmp_path).call("ping")
