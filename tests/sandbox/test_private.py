"""A child in a private world: nothing that it does is seen outside, and nothing of it is left."""

import os
import socket
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import psutil
import pytest

from ullage.sandbox import overlay
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run, start
from ullage.sandbox.worker_pool import WorkerPool

PRELOADED = "wave"  # nothing else imports it
MODES = {
    "overlays": Sandbox(),
    "forked": Sandbox(),  # as the one before, but from a process that waits
    "redirection": Sandbox(overlays=False),
    "without the kernel": Sandbox(overlays=False, namespaces=False),
}


@pytest.fixture(scope="module")
def possible(tmp_path_factory):
    """The means that this system lets us use."""
    tried = run("os.path:split", {}, private=Sandbox(), cwd=str(tmp_path_factory.mktemp("tried")))
    more = ["forked", "redirection"] if tried.private == "overlays" else []
    return {tried.private, "without the kernel", *more}


@pytest.fixture(scope="module")
def warm():
    processes = WorkerPool([PRELOADED])
    yield processes
    processes.close()


@pytest.fixture(params=MODES)
def private(request, possible, warm, monkeypatch):
    if request.param not in possible:
        pytest.skip("this system refuses namespaces or overlays")
    if request.param == "forked":
        monkeypatch.setitem(start.__kwdefaults__, "warm", warm)
    return MODES[request.param]


@pytest.fixture
def folder(tmp_path):
    """A folder with files of a user."""
    for name in ("results.csv", "last.pt", "old.pt", "a.txt", "runs/0/log", "kept/0/log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    return tmp_path


def content(folder):
    """All that can be known of the files in a folder."""
    files = sorted(folder.rglob("*"))
    return [(file, file.lstat().st_mtime_ns, file.read_bytes() if file.is_file() else None) for file in files]


CHANGED = [
    "b.txt",
    "best.pt",
    "checkpoint-1",
    "checkpoint-1/x",
    "kept.old",
    "kept.old/0",
    "kept.old/0/log",
    "last.pt",
    "results.csv",
    "runs",
    "runs/1",
    "runs/1/log",
]


def test_only_a_child_sees_its_changes(private, folder, env):
    before, name = content(folder), uuid.uuid4().hex
    outcome = run("children:changes_files", {"name": name}, env=env, cwd=str(folder), private=private)
    assert outcome.answer == {"rows": "results.csv\nmine\n", "seen": CHANGED}, outcome
    assert outcome.private == ("overlays" if private.overlays else "redirection")
    assert content(folder) == before
    assert not os.path.exists(f"/tmp/{name}")


def test_a_child_starts_in_this_folder(private, folder, env, monkeypatch):
    monkeypatch.chdir(folder)
    assert run("children:where", {}, env=env, private=private).answer["folder"] == str(folder)


def test_writes_of_other_programs_are_hidden_too(private, folder, env):
    before = content(folder)
    outcome = run("children:lets_a_shell_write", {}, env=env, cwd=str(folder), private=private)
    assert outcome.answer is not None and content(folder) == before


MOUNTED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from ullage.sandbox import kernel
from ullage.sandbox.environment import environment
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.parent import run
kernel.call("unshare", 0x00020000)
kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
kernel.mount("none", "data", "tmpfs")
Path("data/file").write_text("of another disk")
outcome = run("children:writes_beside_a_mount", {{}}, env=environment(import_from=sys.path), private=Sandbox())
print(outcome.private, outcome.answer or outcome, Path("data/file").read_text())
"""


def test_a_folder_with_another_disk_in_it_is_covered_as_well(folder):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk")
    (folder / "data").mkdir()
    (folder / "large").write_bytes(b"x" * (9 << 20))
    before = content(folder)
    code = MOUNTED.format(here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    if done.stdout.startswith("redirection"):
        pytest.skip("this system refuses namespaces or overlays")
    seen = {"large": 9 << 20, "replaced": 3, "rows": "results.csv\nmine\n", "data": "changed"}
    assert done.stdout == f"overlays {seen} of another disk\n", done.stderr
    assert content(folder) == before


def test_a_child_of_a_child_has_the_same_world(private, folder, env):
    before = content(folder)
    outcome = run("children:asks_a_nested_one", {"name": folder.name}, env=env, cwd=str(folder), private=private)
    assert outcome.answer.get("seen") == CHANGED and outcome.answer["nested"] is None, outcome
    assert content(folder) == before


def test_concurrent_writes_are_not_lost(private, folder, env, until):
    """The script that is estimated also runs as a job: both append to one file."""
    rows = folder / "results.csv"
    with rows.open("a") as job:
        for number in range(20):
            job.write(f"{number}\n")
            job.flush()
            if number in (3, 12):
                (folder / "old.pt").touch()
                run("children:changes_files", {"name": folder.name}, env=env, cwd=str(folder), private=private)
    assert rows.read_text().splitlines() == ["results.csv", *map(str, range(20))]


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_process_with_its_own_session_ends_with_the_child(private, env, seconds, until):
    mark = f"ullage-test-{uuid.uuid4().hex}"
    request = {"code": f"import time; mark = '{mark}'; time.sleep(600)", "seconds": seconds}
    child = start("children:leaves_a_daemon", request, env=env, private=private)
    if seconds:
        until(lambda: running(mark), "the process has begun")
        assert child.wait(Limits(seconds=0.1)).reason == "time"
    else:
        assert child.wait().answer == {"done": True}
    until(lambda: not running(mark), "the process is gone")


def running(mark):
    """Processes that have a word in their command line, apart from guards, whose order has it too."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if mark in line and "isolation" not in line]


def test_everything_ends_with_a_killed_parent(private, folder, env, until):
    """kill -9 in the middle of saving: the checkpoint is what it was."""
    mark, before = f"ullage-test-{uuid.uuid4().hex}", content(folder)
    code = f"""
import sys
sys.path.insert(0, {sys.path[0]!r})
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.environment import environment
from ullage.sandbox.parent import run
from ullage.sandbox.worker_pool import WorkerPool
request = {{"code": "import time; mark = '{mark}'; time.sleep(600)", "file": "last.pt"}}
run("children:saves_for_ever", request, env=environment(import_from=sys.path), private={private!r},
    warm={"WorkerPool([])" if start.__kwdefaults__["warm"] else None})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    until(lambda: running(mark) or parent.poll() is not None, "the child has begun")
    parent.kill()
    parent.wait()
    until(lambda: not running(mark), "everything is gone")
    assert content(folder) == before


@pytest.fixture
def server():
    """A server on this machine, which to a child without a network is another one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield list(listening.getsockname())


@pytest.mark.parametrize("host", ["192.0.2.1", "ullage.example"])
def test_a_child_reaches_no_other_machine(private, env, host):
    answer = run("children:reaches", {"address": [host, 80]}, env=env, private=private).answer
    assert "unreachable" in answer["refused"] or "name resolution" in answer["refused"]


def test_a_child_reaches_what_it_may(private, env, server):
    """The network of a world made by the kernel is its own: other processes of this machine are not on it."""
    here = run("children:reaches", {"address": server}, env=env, private=private).answer
    assert bool(here["refused"]) == private.namespaces
    allowed = run("children:reaches", {"address": server}, env=env, private=private._replace(network=True))
    assert allowed.answer == {"refused": None}


def test_a_child_may_talk_to_itself(private, env):
    assert run("children:talks_to_itself", {}, env=env, private=private).answer == {"done": True}


def test_too_many_bytes_end_a_child(private, tmp_path, env):
    limits = Limits(written=32 << 20, seconds=60)
    outcome = run(
        "children:writes_much", {"bytes": 64 << 20}, env=env, cwd=str(tmp_path), private=private, limits=limits
    )
    assert (outcome.failure, outcome.reason) == ("wrote more than 32.0 MiB", "written")
    assert not any(tmp_path.iterdir())


def test_too_many_processes_end_a_child(private, env):
    limits = Limits(processes=20, seconds=60)
    outcome = run("children:starts_many", {"count": 40}, env=env, private=private, limits=limits)
    assert (outcome.failure, outcome.reason) == ("started more than 20 processes", "processes")


def test_too_much_memory_ends_a_child(private, env):
    limits = Limits(memory=200 << 20)
    outcome = run("children:takes_memory", {"bytes": 300 << 20}, env=env, private=private, limits=limits)
    assert (outcome.failure, outcome.reason) == ("took more than 200 MiB of this machine's memory", "memory")


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("raises", "ValueError: no such layer"),
        ("leaves", "ended without an answer, with exit code 3: no such file"),
        ("kills_itself_softly", "was ended by SIGTERM"),
    ],
)
def test_a_childs_failure_is_reported_as_without_a_sandbox(private, env, name, failure):
    assert run(f"children:{name}", {}, env=env, private=private).failure == failure


def test_a_closed_folder_is_reported_to_the_child(private, env):
    outcome = run("children:where", {}, env=env, cwd="/no/such/folder", private=private)
    assert outcome.failure == "cannot enter the folder /no/such/folder: No such file or directory"


def test_the_users_own_code_runs_in_the_world_and_not_before(private, tmp_path, env):
    """A sitecustomize on PYTHONPATH is run by every Python that heeds it: the guard does not."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    given = {**env, "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}"}
    assert run("children:echo", {}, env=given, private=private).answer
    assert not (tmp_path / "ran").exists()


def test_this_process_is_in_no_world():
    assert not overlay.is_private()


def test_a_worker_keeps_its_imports_and_no_state(possible, warm, env, folder):
    if "forked" not in possible:
        pytest.skip("this system refuses namespaces or overlays")
    seen = []
    for number in range(2):
        given = {**env, "SSH_TTY": f"/dev/pts/{number}", "NOT_READ_ON_IMPORT": str(number)}
        outcome = run("children:leaves_a_trace", {"module": PRELOADED}, env=given, private=Sandbox(), warm=warm)
        seen.append(outcome.answer)
    assert [each["loaded"] for each in seen] == [True, True]
    assert [each["terminal"] for each in seen] == ["/dev/pts/0", "/dev/pts/1"]
    assert not any(each["trace"] for each in seen), "the first must not be seen by the second"


def test_a_worker_imports_more_while_it_waits(possible, env):
    if "forked" not in possible:
        pytest.skip("this system refuses namespaces or overlays")
    own = WorkerPool([PRELOADED], later=["mailbox", "not_installed"])
    ask = partial(run, "children:leaves_a_trace", {"module": "mailbox"}, env=env, private=Sandbox(), warm=own)
    try:
        while not ask().answer["loaded"]:
            pass
    finally:
        own.close()


@pytest.mark.parametrize("line", ["raise RuntimeError", "threading.Thread(target=time.sleep, args=[600]).start()"])
def test_a_worker_goes_on_without_what_it_cannot_import(possible, env, tmp_path, line):
    if "forked" not in possible:
        pytest.skip("this system refuses namespaces or overlays")
    module = tmp_path / "of_the_user.py"
    module.write_text(f"import threading, time\n{line}")
    given = {**env, "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}"}
    own = WorkerPool([PRELOADED], later=[module.stem])
    ask = partial(run, "children:leaves_a_trace", env=given, private=Sandbox(), warm=own)
    try:
        for name, loaded in ((PRELOADED, True), (module.stem, False)) * 3:
            assert ask({"module": name}).answer["loaded"] is loaded
    finally:
        own.close()


def test_a_changed_import_path_imports_again(possible, warm, env, tmp_path):
    if "forked" not in possible:
        pytest.skip("this system refuses namespaces or overlays")
    module = tmp_path / "of_the_user.py"
    own = WorkerPool([module.stem])
    try:
        for text in ("first", "second and longer"):
            module.write_text(f"text = {text!r}")
            given = {**env, "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}"}
            outcome = run("children:text_of", {"module": module.stem}, env=given, private=Sandbox(), warm=own)
            assert outcome.answer == {"text": text}
        module.write_text("import os; text = os.environ['TEXT']")
        for text in ("by a variable", "by another"):
            outcome = run(
                "children:text_of", {"module": module.stem}, env={**given, "TEXT": text}, private=Sandbox(), warm=own
            )
            assert outcome.answer == {"text": text}
    finally:
        own.close()
