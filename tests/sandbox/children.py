"""What the children of these tests do: functions that behave as functions should not."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.sandbox import child
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run
from ullage.sandbox.spawn import can_fork


def echo(request):
    """A good one; it tells about its process."""
    print("noise that is no answer")
    print('{"answer": {"forged": true}}')
    group, stdin = os.getpgid(0) == os.getpid(), sys.stdin.read()
    return {**request, "leads its group": group, "stdin": stdin, "torch": "torch" in sys.modules}


def digs(request):
    """Says what takes long, and goes on when somebody has heard it."""
    child.say_doing("digging")
    end = time.monotonic() + 30
    while not Path(request["heard"]).exists() and time.monotonic() < end:
        time.sleep(0.01)
    child.say_doing("")
    return {"heard": Path(request["heard"]).exists()}


def variable(request):
    import ullage

    found = {name: os.environ.get(name) for name in request["names"]}
    return {**found, "ullage": ullage.__file__, "path": sys.path}


def module_named(request):
    return {"file": __import__(request["name"]).__file__}


def raises(request):
    raise ValueError("\nno such layer\nand more")


def refuses(request):
    raise InvalidValue("batch must be at least 1")


def not_plain(request):
    return {"it": object()}


def leaves(request):
    print("loading")
    print("no such file", flush=True)
    os._exit(3)


def says_nothing(request):
    return None


def crashes(request):
    os.kill(os.getpid(), getattr(signal, request["signal"]))


def sleeps(request):
    """Never ends, and has started a process that never ends; both numbers are in the file."""
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    note(request["pids"], os.getpid(), other.pid)
    signal.pause()


def note(name, *pids):
    """Write a file that is there only when it is whole."""
    file = Path(name)
    file.with_suffix(".new").write_text(" ".join(map(str, pids)))
    file.with_suffix(".new").replace(file)


def answers_and_sleeps(request):
    """Answers twice and never ends; its number is in the file."""
    child.give_answer({"first": True})
    child.give_answer({"first": False})
    note(request["pids"], os.getpid())
    signal.pause()


def answers_from_a_thread_and_a_fork(request):
    forked = os.fork()
    if not forked:
        child.give_answer({"by": "fork"})
        os._exit(0)
    os.waitpid(forked, 0)
    thread = threading.Thread(target=child.give_answer, args=({"by": "thread"},))
    thread.start()
    thread.join()
    return {"by": "main"}


def leaves_a_process_behind(request):
    """It holds the pipes open."""
    other = os.fork()
    if not other:
        signal.pause()
    note(request["pids"], other)
    return {"done": True}


def tears_its_answer(request):
    os.write(int(sys.argv[2]), b'{"answer": {"upper": 5}}'[: request["bytes"]])
    os.kill(os.getpid(), signal.SIGKILL)


def long_answer(request):
    return {"text": "x" * request["bytes"]}


def floods(request):
    line = "x" * 1000 + "\n"
    for _ in range(request["lines"]):
        sys.stdout.write(line)
    print("the last words")
    return {"done": True}


def takes_memory(request):
    """In a process that it started, so that only the sum tells."""
    code = f"import time; kept = b'x' * {request['bytes']}; time.sleep(600)"
    subprocess.run([sys.executable, "-c", code])


def maps_memory(request):
    from ullage.sandbox.limits import limit_address_space

    limit_address_space(request["more"])
    bytearray(request["bytes"])
    return {"done": True}


def asks_another(request):
    """A child that starts a child of its own, as the manager's estimates do."""
    run("children:sleeps", request, limits=Limits(seconds=600))


def changes_files(request):
    """Does to the files in its folder whatever a script may do; says what it sees then."""
    with open("results.csv", "a") as file:
        file.write("mine\n")
    Path("last.pt").write_bytes(b"hollow")
    Path("old.pt").unlink()
    Path("a.txt").replace("b.txt")
    shutil.rmtree("runs")
    os.makedirs("runs/1")
    Path("runs/1/log").write_text("new")
    os.mkdir("staging")
    Path("staging/x").write_text("x")
    os.rename("staging", "checkpoint-1")
    os.rename("kept", "kept.old")
    os.symlink("last.pt", "best.pt")
    Path(tempfile.gettempdir(), request["name"]).write_text("temporary")
    return {"rows": Path("results.csv").read_text(), "seen": sorted(map(str, Path().rglob("*")))}


def lets_a_shell_write(request):
    return {"code": os.system("echo more >> results.csv; rm old.pt; mkdir new; mv a.txt b.txt")}


def writes_beside_a_mount(request):
    large = Path("large").stat().st_size
    Path("new").write_text("new")
    os.replace("new", "large")
    Path("data/file").write_text("changed")
    with open("results.csv", "a") as file:
        file.write("mine\n")
    rows, data = Path("results.csv").read_text(), Path("data/file").read_text()
    return {"large": large, "replaced": Path("large").stat().st_size, "rows": rows, "data": data}


def kills_itself_softly(request):
    os.kill(os.getpid(), signal.SIGTERM)


def reaches(request):
    """Whether it comes to another process by the network."""
    try:
        socket.create_connection(tuple(request["address"]), timeout=5).close()
    except OSError as error:
        return {"refused": str(error)}
    return {"refused": None}


def talks_to_itself(request):
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    return {"done": True}


def leaves_a_daemon(request):
    """A process with a session of its own, that nobody is the parent of."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            for stream in range(3):
                os.close(stream)
            os.execve(sys.executable, [sys.executable, "-c", request["code"]], {})
        os._exit(0)
    os.wait()
    time.sleep(request["seconds"])
    return {"done": True}


def writes_much(request):
    with open("large", "wb") as file:
        for _ in range(request["bytes"] >> 20):
            file.write(b"x" * (1 << 20))
    time.sleep(600)


def starts_many(request):
    for _ in range(request["count"]):
        if not os.fork():
            time.sleep(600)
    time.sleep(600)


def saves_for_ever(request):
    """Saves a file again and again, beside a process that can be seen."""
    subprocess.Popen([sys.executable, "-c", request["code"]])
    while True:
        Path(request["file"]).write_bytes(os.urandom(1 << 16))


def asks_a_nested_one(request):
    outcome = run("children:changes_files", request, private=Sandbox())
    return {**(outcome.answer or {"failure": outcome.failure}), "nested": outcome.private, "pid": os.getpid()}


def where(request):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "folder": os.getcwd(),
        "user": os.getuid(),
        "groups": os.getgroups(),
        "forked": can_fork(),
        "capabilities": sum(int(status[kind], 16) for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb")),
    }


def reads(request):
    """Reads, looks and asks as a script may."""
    import neighbour

    Path("config.json").read_text()
    Path("made.txt").write_text("mine")
    Path("made.txt").read_text()
    os.path.exists("checkpoint.pt")
    os.listdir("data")
    Path("results.csv").open("a").close()
    for name in request["variables"]:
        os.environ.get(name)
    worker = multiprocessing.get_context("fork").Process(target=Path("of_worker.txt").read_text)
    worker.start()
    worker.join()
    run("children:reads_one", {"file": "of_child.txt"})
    return {"batch": neighbour.BATCH}


def reads_one(request):
    Path(request["file"]).read_text()
    return {"asked": os.environ.get("OF_CHILD")}


def reads_all_variables(request):
    return {"count": len(dict(os.environ))}


def leaves_a_trace(request):
    """What it finds of an earlier one: a module, a variable and a value that it leaves itself."""
    found = {
        "loaded": request["module"] in sys.modules,
        "terminal": os.environ.get("SSH_TTY"),
        "trace": getattr(os, "trace", None) or os.environ.get("TRACE"),
    }
    os.trace = os.environ["TRACE"] = "left"
    return found


def text_of(request):
    return {"text": __import__(request["module"]).text}
