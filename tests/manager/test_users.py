"""Several users: who speaks is what the kernel says, jobs run with their submitter's rights, shares are kept.

As root, with another user of this system.
"""

import grp
import json
import os
import pty
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.paths import let_everybody_in, public_python

from ullage.manager.client import Client
from ullage.manager.transport import socket_file

AS_USER = """
import json, os, pwd, resource, sys
from pathlib import Path
from ullage.manager.client import Client  # before the rights go: Python itself may lie where that user cannot read
user = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
client = Client(Path(sys.argv[1]))
try:
    print(json.dumps({"ok": client.call(sys.argv[2], **json.loads(sys.argv[3]))}))
except Exception as error:
    print(json.dumps({"refused": str(error)}))
"""


IDLE = """
import os, pwd, socket, sys
user = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
lines = []
for number in range(int(sys.argv[2])):
    lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    lines[-1].connect(sys.argv[1])
    lines[-1].sendall(b"G" * (number % 2))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shared(request):
    if os.geteuid() != 0:
        pytest.skip("needs root, to speak as another user")
    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    home = request.getfixturevalue("make_home")(folder / "h")
    home.work.chmod(0o777)
    home.settings += f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name}"\n'
    home.settings += "[fairness]\nshares = { nobody = 3.0 }\n"
    home.options = ["--virtual", "4xA100-40GB", "--estimator", "none"]
    home.start()
    yield home
    home.close()
    shutil.rmtree(folder, ignore_errors=True)


def as_user(home, verb, **arguments):
    words = [str(home.folder), verb, json.dumps(arguments)]
    done = home.nursery.run(words, dict(os.environ), "/", program=AS_USER)
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
    edit = {"jobs": [number], "changes": {"priority": -5}}
    for verb, arguments in (
        ("cancel", {"jobs": [number]}),
        ("hold", {"jobs": [number]}),
        ("logs", {"job": number}),
        ("edit", edit),
        ("requeue", {"jobs": [number]}),
    ):
        assert "which is root's; operators may" in as_user(shared, verb, **arguments)["refused"]
    shown = as_user(shared, "status", job=number)["ok"][0]
    assert shown["user"] == "root" and "command" not in shown and "env" not in shown
    assert "operators may" in as_user(shared, "drain", gpu=0)["refused"]
    assert "operators may" in as_user(shared, "stop_serving")["refused"]
    assert shared.job(number)["state"] == "held"


def test_an_operator_edits_jobs_without_their_own_environment(shared):
    script = "touch there; while [ ! -e theirs ]; do sleep 0.05; done; echo $WORD"
    job = {"command": ["/bin/sh", "-c", script], "cwd": str(shared.work), "memory": 1 << 30, "env": {"WORD": "theirs"}}
    [number] = as_user(shared, "submit", job=job, key="nobodys job to requeue")["ok"]["jobs"]
    shared.until((shared.work / "there").exists, "the job")
    assert shared.client.requeue(number, hold=True, env={"WORD": "operators"})[0]["done"]
    shared.wait(number, "held")
    assert shared.client.edit(number, priority=900)[0]["done"]
    mine = as_user(shared, "edit", jobs=[number], changes={"name": "renamed"})["ok"]
    assert mine[0]["done"], "a priority that an operator gave stays, and hinders no other edit"
    more = as_user(shared, "edit", jobs=[number], changes={"priority": 901})["ok"]
    assert not more[0]["done"] and "may ask for a priority of at most" in more[0]["text"]
    shared.go("theirs")
    shared.client.release(number)
    assert shared.wait(number)["state"] == "done" and shared.client.logs(number) == "theirs\n"


def test_output_of_others_cannot_control_an_operators_terminal(shared):
    script = "printf 'red \\033[31m one\\n\\ttwo\\n'"
    job = {"command": ["/bin/sh", "-c", script], "cwd": str(shared.work), "memory": 1 << 30}
    theirs = as_user(shared, "submit", job=job, key="what nobody prints in red")["ok"]["jobs"][0]
    mine = shared.script(script)
    shown = {}
    for number in (theirs, mine):
        assert shared.wait(number)["state"] == "done"
        master, terminal = pty.openpty()
        command = [sys.executable, "-m", "ullage", "logs", str(number)]
        subprocess.run(command, env=shared.environment(), stdout=terminal, timeout=60, check=True)
        shown[number] = os.read(master, 1000).decode()
        os.close(terminal), os.close(master)
    assert shown[theirs] == "red  one\r\n two\r\n" and "\x1b[31m" in shown[mine]


SECRET = "the word is swordfish"


def test_only_owner_and_operators_see_a_jobs_output(shared):
    """Its last words are in its detail, in its attempts and in its events; others see the cause."""
    script = f"echo 'torch.OutOfMemoryError: CUDA out of memory. {SECRET}'; exit 1"
    number = shared.script(script, gpus=4, exclusive=True)
    assert shared.wait(number)["state"] == "failed"
    mine = {verb: json.dumps(shared.client.call(verb, **arguments)) for verb, arguments in _asked_about(number)}
    assert all(SECRET in mine[verb] for verb in ("status", "history", "events"))
    theirs = {verb: as_user(shared, verb, **arguments)["ok"] for verb, arguments in _asked_about(number)}
    for verb in theirs:
        assert SECRET not in json.dumps(theirs[verb]), verb
    [shown] = theirs["status"]
    assert (shown["cause"], shown["attempts"][0]["cause"]) == ("out of GPU memory", "out of GPU memory")
    assert shown["detail"] is None and "as its submitter" not in shown["estimate"]
    assert [event["kind"] for event in theirs["events"]["events"] if event["job"] == number][-1] == "failed"


def _asked_about(number):
    return ("status", {"job": number}), ("history", {}), ("queue", {}), ("events", {}), ("figures", {}), ("ping", {})


def test_a_user_has_limits_and_an_operator_has_none(make_home):
    if os.geteuid() != 0:
        pytest.skip("needs root, to speak as another user")
    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    home = make_home(folder / "h")
    home.work.chmod(0o777)
    home.settings += f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name}"\n'
    home.settings += "[limits]\njobs = 5\ngpus = 2\nmax_priority = 10\nstored = 50000\n"
    home.options = ["--virtual", "4xA100-40GB", "--estimator", "none"]
    home.start()

    def submit(key, **more):
        script = "while [ ! -e proceed ]; do sleep 0.05; done"
        job = {"command": ["/bin/sh", "-c", script], "cwd": str(home.work), "memory": 1 << 30, **more}
        return as_user(home, "submit", job=job, key=f"{key} with more letters")

    try:
        assert "a priority of at most 10, got 11" in submit("a", priority=11)["refused"]
        assert "asks for 3 GPUs; nobody may use 2 at a time" in submit("b", gpus=3)["refused"]
        assert "asks for 6 more; 5 at a time are the limit" in submit("c", array="1-6")["refused"]
        assert "50 KB are the limit" in submit("f", env={"A": "x" * 50_000})["refused"].replace("48.8 KiB", "50 KB")
        big = submit("g", env={"A": "x" * 30_000}, hold=True)["ok"]["jobs"][0]
        assert "(limits.stored in the settings)" in submit("h", env={"A": "x" * 30_000})["refused"]
        as_user(home, "cancel", jobs=[big])
        as_user(home, "cancel", jobs=submit("i", env={"A": "x" * 30_000}, hold=True)["ok"]["jobs"])
        numbers = submit("d", array="1-5", priority=-5, exclusive=True)["ok"]["jobs"]
        assert "nobody has 5 jobs that wait or run" in submit("e")["refused"]
        home.until(lambda: [home.job(each)["state"] for each in numbers].count("running") == 2, "two to run")
        home.until(lambda: "nobody has 2 of 2 at a time (limits.gpus)" in str(home.job(numbers[-1])["reason"]), "why")
        roots = [home.submit(proceed="proceed", priority=1000, exclusive=True, gpus=1) for _ in range(2)]
        home.until(lambda: all(home.job(each)["state"] == "running" for each in roots), "root's jobs to run")
        assert [home.job(each)["state"] for each in numbers].count("running") == 2
        home.go()
        assert {home.wait(each)["state"] for each in (*numbers, *roots)} == {"done"}
    finally:
        home.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_user_without_the_group_cannot_speak_to_the_daemon(common):
    if os.geteuid() != 0:
        pytest.skip("needs root, to speak as another user")
    let_everybody_in(common.folder)
    assert "is not yours to use" in as_user(common, "ping")["refused"]


def test_root_makes_tokens_for_others_and_users_for_themselves(shared):
    made = shared.client.token_create("for nobody", user="nobody")
    assert (made["user"], made["uid"]) == ("nobody", pwd.getpwnam("nobody").pw_uid)
    assert [each["id"] for each in as_user(shared, "tokens")["ok"]] == [made["id"]]
    roots = shared.client.token_create("mine")
    assert "operators may" in as_user(shared, "token_revoke", token=roots["id"])["refused"]
    assert "operators may" in as_user(shared, "token_create", user="root")["refused"]
    assert "operators may" in as_user(shared, "tokens", everybody=True)["refused"]
    assert as_user(shared, "token_revoke", token=made["id"])["ok"]["user"] == "nobody"


COMMAND = """
import sys
from pathlib import Path
import ullage.manager.transport as transport
from ullage.cli.main import main
transport.SYSTEM_HOME = Path(sys.argv[1])
sys.argv = ["ullage", *sys.argv[2:]]
main()
"""


def command_of_nobody(system_home, *words):
    python, path = public_python()
    return subprocess.run(
        [python, "-c", COMMAND, str(system_home), *words],
        env={"PYTHONPATH": path, "HOME": "/nonexistent"},
        cwd="/tmp",
        user="nobody",
        group=pwd.getpwnam("nobody").pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_users_reach_the_system_daemon_without_settings(shared, tmp_path):
    """As the install recipe leaves it: a group for the socket, and users who know of no `ULLAGE_HOME`."""
    if public_python() is None:
        pytest.skip("needs a Python that every user can run")
    done = command_of_nobody(shared.folder, "submit", "--memory", "1GiB", "--wait", "--", "/bin/sh", "-c", "id -un")
    assert done.returncode == 0, done.stderr
    number = int(done.stdout.split()[1].rstrip(":"))
    assert shared.job(number)["user"] == "nobody" and shared.client.logs(number) == "nobody\n"
    done = command_of_nobody(tmp_path, "queue")
    assert (done.returncode, done.stderr) == (1, "ullage: no daemon is running: start it with `ullage serve`\n")


def test_a_user_with_many_idle_connections_locks_none_out(shared):
    command = [sys.executable, "-c", IDLE, str(socket_file(shared.folder)), "700"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as crowd:
        assert crowd.stdout.readline() == "open\n"
        assert Client(shared.folder).ping()["operator"]
        assert as_user(shared, "ping")["ok"]["you"] == "nobody"
        opened = len(os.listdir(f"/proc/{shared.process.pid}/fd"))
        assert opened < 200, "of one user only a few are kept"
        crowd.stdin.close()


WAITING = """
import os, pwd, socket, sys
user = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
order = b"GET /v1/events?since=1000000000000&wait=60 HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n"
lines = []
for number in range(int(sys.argv[2])):
    lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    lines[-1].connect(sys.argv[1])
    lines[-1].sendall(order)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_user_with_many_pending_orders_delays_no_other(shared):
    command = [sys.executable, "-c", WAITING, str(socket_file(shared.folder)), "80"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as crowd:
        assert crowd.stdout.readline() == "open\n"
        refused = shared.until(lambda: as_user(shared, "ping").get("refused"), "all 64 that one user may have to wait")
        assert "you have too many connections that wait" in refused
        assert Client(shared.folder).ping()["operator"]
        crowd.stdin.close()
    shared.until(lambda: "ok" in as_user(shared, "ping"), "room for nobody again")


def test_users_take_turns_by_their_shares(shared):
    """Of four free GPUs the one with three times the share gets three, though the other one's jobs came first."""
    blocker = shared.submit(proceed="proceed", gpus=4, exclusive=True)
    shared.wait(blocker, "running")
    roots = [shared.submit(proceed="until", exclusive=True) for _ in range(4)]
    others = []
    for number in range(4):
        script = "while [ ! -e until ]; do sleep 0.05; done; id -un >> who"
        job = {"command": ["/bin/sh", "-c", script], "cwd": str(shared.work), "memory": 1 << 30, "exclusive": True}
        others += as_user(shared, "submit", job=job, key=f"nobodys job in turn {number}")["ok"]["jobs"]
    shared.go()
    shared.wait(blocker)
    first = {roots[0], *others[:3]}
    shared.until(lambda: all(shared.job(number)["state"] == "running" for number in first), "the first four")
    assert {shared.job(number)["state"] for number in {*roots, *others} - first} == {"queued"}
    shared.go("until")
    assert {shared.wait(number)["state"] for number in roots + others} == {"done"}
    assert (shared.work / "who").read_text().split() == ["nobody"] * 4
    history = {job["id"]: job["user"] for job in shared.client.call("history")}
    assert [history[number] for number in (*roots, *others)] == ["root"] * 4 + ["nobody"] * 4
