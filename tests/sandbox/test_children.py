"""What every child process promises: its answer, its limits, its end, its output and its environment."""

import json
import subprocess
import sys
import threading

import pytest

import ullage
from ullage.errors import InvalidValue, MissingPackage
from ullage.sandbox import limits, process_identity
from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run, start
from ullage_lab.forking import start_from_server


@pytest.fixture(params=["fresh", "forked"])
def child(request, env):
    """Starts a child in both ways: a new interpreter, and forked from the server."""
    if request.param == "fresh":
        return lambda name, **values: start(f"children:{name}", values, env=env)
    return lambda name, **values: start_from_server(f"children:{name}", values)


def test_the_answer_is_the_return_value_and_not_the_output(child, request):
    outcome = child("echo", batch_size=4).wait()
    has_torch = request.node.callspec.params["child"] == "forked" and outcome.answer["torch"]  # by an earlier test
    assert outcome.answer == {"batch_size": 4, "leads its group": True, "stdin": "", "torch": has_torch}
    assert outcome.failure is None and "noise that is no answer" in outcome.output


@pytest.mark.parametrize(
    ("name", "failure", "reason"),
    [
        ("raises", "ValueError: no such layer", "error"),
        ("refuses", "batch must be at least 1", "error"),
        ("not_plain", "a message must consist of plain values (text, numbers, lists): Object of type object", "error"),
        ("no_such_function", "AttributeError: module 'children' has no attribute 'no_such_function'", "error"),
        ("leaves", "ended without an answer, with exit code 3: no such file", "died"),
        ("says_nothing", "ended without an answer, with exit code 0", "died"),
    ],
)
def test_a_childs_failure_is_one_sentence(child, name, failure, reason):
    outcome = child(name).wait()
    assert outcome.answer is None and outcome.reason == reason
    assert outcome.failure.startswith(failure) and "\n" not in outcome.failure


@pytest.mark.parametrize(
    ("signal", "failure"),
    [("SIGKILL", "was ended by SIGKILL (was memory short?)"), ("SIGSEGV", "was ended by SIGSEGV")],
)
def test_a_signal_that_ended_a_child_is_named(child, signal, failure):
    outcome = child("crashes", signal=signal).wait()
    assert (outcome.failure, outcome.reason) == (failure, "died")


def test_a_child_is_ended_at_its_time_with_all_that_it_started(child, tmp_path, gone, until):
    pids = tmp_path / "pids"
    started = child("sleeps", pids=str(pids))
    until(pids.exists, "the child has begun")
    outcome = started.wait(Limits(seconds=0.3))
    assert (outcome.failure, outcome.reason) == ("took longer than 300 ms", "time")
    gone(pids)


def test_a_child_above_its_memory_limit_ends_with_its_processes(child):
    outcome = child("takes_memory", bytes=300 << 20).wait(Limits(memory=200 << 20))
    assert (outcome.failure, outcome.reason) == ("took more than 200 MiB of this machine's memory", "memory")


def test_a_child_that_leaves_others_too_little_memory_ends(child):
    outcome = child("takes_memory", bytes=1).wait(Limits(left_free=1.0))
    assert outcome.reason == "memory" and "left less than 100% of this machine's memory to others" in outcome.failure


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much is mapped")
def test_an_allocation_beyond_the_address_space_fails_by_itself(child):
    assert child("maps_memory", more=256 << 20, bytes=64 << 20).wait().answer
    assert child("maps_memory", more=256 << 20, bytes=1 << 30).wait().failure == "MemoryError"


def test_an_answer_longer_than_allowed_is_not_taken(child):
    assert child("long_answer", bytes=1 << 20).wait(Limits(answer=2 << 20)).answer["text"] == "x" * (1 << 20)
    outcome = child("long_answer", bytes=4 << 20).wait(Limits(answer=1 << 20))
    assert (outcome.failure, outcome.reason) == ("gave an answer longer than 1.00 MiB", "answer")


def test_a_flood_of_output_is_read_and_not_kept(child):
    outcome = child("floods", lines=20_000).wait(Limits(seconds=60))
    assert outcome.answer == {"done": True}
    assert len(outcome.output) <= 1 << 16 and outcome.last_lines(1) == "the last words"


def test_an_answer_counts_once_and_however_the_process_ends(child, tmp_path, until):
    pids = tmp_path / "pids"
    started = child("answers_and_sleeps", pids=str(pids))
    until(pids.exists, "the child has answered twice")
    assert started.wait(Limits(seconds=0.1)).answer == {"first": True}


def test_another_thread_may_answer_and_a_forked_process_may_not(child):
    assert child("answers_from_a_thread_and_a_fork").wait().answer == {"by": "thread"}


def test_processes_left_by_a_child_end_with_it(child, tmp_path, gone):
    assert child("leaves_a_process_behind", pids=str(tmp_path / "pids")).wait().answer == {"done": True}
    gone(tmp_path / "pids")


def test_another_thread_may_end_a_child(child, tmp_path, gone, until):
    pids, outcomes, stop = tmp_path / "pids", [], threading.Event()
    started = child("sleeps", pids=str(pids))
    waiting = threading.Thread(target=lambda: outcomes.append(started.wait(stop=stop)))
    waiting.start()
    until(pids.exists, "the child has begun")
    stop.set()
    waiting.join(60)
    assert outcomes[0].answer is None
    gone(pids)


PARENT = """if __name__ == "__main__":
    import sys
    sys.path.insert(0, {here!r})
    from ullage.sandbox.environment import environment
    from ullage_lab.forking import start_from_server
    from ullage.sandbox.parent import start
    {start}.wait()
"""


@pytest.mark.parametrize(
    "start",
    [
        'start("children:sleeps", {request}, env=environment(import_from=sys.path))',
        'start("children:asks_another", {request}, env=environment(import_from=sys.path))',
        'start_from_server("children:sleeps", {request})',
    ],
)
def test_a_child_and_its_processes_end_with_a_killed_parent(env, tmp_path, gone, until, start):
    pids, code = tmp_path / "pids", tmp_path / "parent.py"
    code.write_text(PARENT.format(here=sys.path[0], start=start.format(request={"pids": str(pids)})))
    parent = subprocess.Popen([sys.executable, code])
    until(lambda: pids.exists() or parent.poll() is not None, "the child has begun")
    parent.kill()
    parent.wait()
    gone(pids)


@pytest.mark.parametrize("bytes", [0, 1, 12, 24])
def test_a_torn_answer_is_no_answer(env, bytes):
    outcome = run("children:tears_its_answer", {"bytes": bytes}, env=env)
    assert outcome.answer is None and outcome.failure.startswith("was ended by SIGKILL")


def test_a_request_that_another_read_before_is_read_again(env, tmp_path):
    """Where a process that waited does not become the child, one is started that has the same request."""
    request, answer = tmp_path / "request", tmp_path / "answer"
    request.write_text('{"batch_size": 4}')
    arguments = {"parent": None, "redirect": None, "network": True, "record": None}
    with request.open() as given, answer.open("wb") as channel:
        given.read()
        code = "import sys; from ullage.sandbox.child import main; main(*sys.argv[1:])"
        arguments = ["children:echo", str(channel.fileno()), json.dumps(arguments)]
        subprocess.run(
            [sys.executable, "-c", code, *arguments], stdin=given, pass_fds=[channel.fileno()], env=env, check=True
        )
    assert json.loads(answer.read_text())["answer"]["batch_size"] == 4


def test_output_is_shown_as_it_comes(env):
    shown = []
    assert run("children:echo", {"text": "ä" * 100_000}, env=env, show=shown.append).answer["text"] == "ä" * 100_000
    assert "noise that is no answer" in "".join(shown)


def test_long_work_is_reported_meanwhile(env, tmp_path):
    told = []

    def hear(what):
        told.append(what)
        (tmp_path / "heard").touch()

    assert run("children:digs", {"heard": str(tmp_path / "heard")}, env=env, progress=hear).answer == {"heard": True}
    assert told[0] == "digging"


def test_a_request_of_other_types_is_refused_before_any_start():
    with pytest.raises(InvalidValue, match="must consist of plain values"):
        run("children:echo", {"it": object()})


def test_child_imports_this_very_ullage_and_what_its_user_does(tmp_path, env):
    (tmp_path / "ullage").mkdir()
    (tmp_path / "ullage" / "__init__.py").write_text("raise SystemExit('another one')")
    (tmp_path / "mine.py").touch()
    base = {**env, "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}", "MINE": "1"}
    outcome = run("children:variable", {"names": ["MINE"]}, env=environment(base))
    assert outcome.answer["ullage"] == ullage.__file__ and outcome.answer["MINE"] == "1"
    found = run("children:module_named", {"name": "mine"}, env=environment(base))
    assert found.answer == {"file": str(tmp_path / "mine.py")}


def test_folder_in_which_a_child_starts_is_not_imported_from(tmp_path, env):
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user that happens to be called so')")
    assert start("children:echo", {}, env=env, cwd=str(tmp_path)).wait().answer


def test_an_installed_ullage_comes_after_the_users_paths(monkeypatch):
    from ullage.sandbox import environment as module

    monkeypatch.setattr(module, "_installed", lambda: [module.HOME])
    assert environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == "/mine"
    assert "PYTHONPATH" not in environment({})


def test_importing_the_harness_does_not_import_torch():
    modules = "ullage.sandbox.parent, ullage_lab.forking"
    code = f"import sys, {modules}; assert not {{'torch', 'psutil', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_proc_and_psutil_a_dead_process_is_recognized(monkeypatch):
    """As on macOS without the extra that brings psutil: an estimate must not need it."""
    monkeypatch.setattr(process_identity.os.path, "exists", lambda path: False)
    monkeypatch.setitem(sys.modules, "psutil", None)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_identity._start_without_proc(process.pid) == 0
    process.communicate()
    assert process_identity._start_without_proc(process.pid) is None
    monkeypatch.setattr(limits.Path, "read_text", lambda path: "")
    with pytest.raises(MissingPackage, match="limits of memory need the package psutil"):
        limits.machine_memory()
