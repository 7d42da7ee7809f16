"""What the children of these tests do: functions that behave as functions should not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.isolation import child
from ullage.isolation.limits import Limits
from ullage.isolation.parent import run


def echo(request):
    """A good one; it tells about its process."""
    print("noise that is no answer")
    print('{"answer": {"forged": true}}')
    group, stdin = os.getpgid(0) == os.getpid(), sys.stdin.read()
    return {**request, "leads its group": group, "stdin": stdin, "torch": "torch" in sys.modules}


def variable(request):
    import ullage

    found = {name: os.environ.get(name) for name in request["names"]}
    return {**found, "ullage": ullage.__file__, "path": sys.path}


def module_named(request):
    return {"file": __import__(request["name"]).__file__}


def raises(request):
    raise ValueError("\nno such layer\nand more")


def refuses(request):
    raise InvalidValue("needed a batch of at least 1")


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
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    file = Path(request["pids"])
    file.with_suffix(".new").write_text(f"{os.getpid()} {other.pid}")
    file.with_suffix(".new").replace(file)
    time.sleep(600)


def answers_and_sleeps(request):
    child.give_answer({"first": True})
    child.give_answer({"first": False})
    time.sleep(600)


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
        time.sleep(600)
    Path(request["pids"]).write_text(str(other))
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
    from ullage.isolation.limits import limit_address_space

    limit_address_space(request["more"])
    bytearray(request["bytes"])
    return {"done": True}


def asks_another(request):
    """A child that starts a child of its own, as the manager's estimates do."""
    run("children:sleeps", request, limits=Limits(seconds=600))
