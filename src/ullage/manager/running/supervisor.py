"""The process between the daemon and one attempt of a job, which outlives the daemon.

`python -I -S supervisor.py FOLDER` takes the lock of the attempt's folder, starts the job as its child in a new
session, waits, and writes an exit record. The lock is held while it or the job lives, so the lock, not a pid, shows
whether an attempt is alive. The supervisor enforces time limits by the monotonic clock, also while the daemon is down.
It uses only the standard library.

It consists of two processes. The outer one, the guardian, waits for the inner one, the supervisor. If the supervisor is
killed, the guardian inherits all processes of the job and kills them before it releases the lock. With cgroup v2 the
job also has a group, which the kernel kills as a whole.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import termios
import time
from functools import partial
from typing import Any, NoReturn

if __name__ == "__main__":  # run as a file: find Ullage itself, but no installed packages
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))

from ullage.manager.fault_injection import crash_point
from ullage.manager.running.job_watch import LOOK, WATCHED, JobWatch
from ullage.manager.running.output import OutputFile, OutputPump, OutputTaker
from ullage.manager.running.process_tree import kill_cgroup, kill_tree, read_record, remove_cgroup
from ullage.sandbox.conda import in_conda
from ullage.sandbox.kernel import adopt_orphans, die_with_parent
from ullage.sandbox.process_identity import stat_field

LOCK, ORDER, STARTED, EXIT, STOP, REVOKED = "lock", "order.json", "started.json", "exit.json", "stop.json", "revoked"
TERMINAL = "terminal"  # the socket of an interactive job
CHECKPOINT_PID = "checkpoint-pid"  # the job may write the pid to signal for a checkpoint into this file
TOKEN = "ULLAGE_ATTEMPT"  # in the environment of every process of an attempt
CHECKPOINT_EXIT = 85  # exit code of a job that saved a checkpoint and wants to continue later
_RESERVED = 8192  # bytes reserved on disk for the exit record, in case the disk gets full
_LOCK_NUMBER = 200  # the job inherits the lock as a descriptor that no program uses
_VMSTAT = "/proc/vmstat"
_NAMED_END = 1 << 16  # last bytes of a named output, copied to find the cause of an end
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def main(folder: str) -> int:
    """Run the attempt of a folder from beginning to end, unless it has begun or was revoked."""
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    crash_point("supervisor-locked")
    if any(os.path.exists(name) for name in (REVOKED, STARTED, EXIT)):
        return 0
    with open(ORDER) as file:
        order = json.load(file)
    _put(EXIT + ".new", b" " * _RESERVED)
    if _guard():
        return 0
    stop = read_record(STOP)
    if stop is not None:
        nothing = {"code": None, "signal": None, "never_started": True}
        _write(EXIT, {**nothing, "reason": stop["reason"], "time": time.time()})
        return 0
    record = _run(order, lock)
    _write(EXIT, record)
    _poke(order)
    return 0


def _guard() -> bool:
    """Fork. The outer process waits for the inner one, kills the processes that it leaves, and returns true."""
    adopt_orphans()
    inner = os.fork()
    if inner == 0:
        adopt_orphans()  # a fork does not inherit this
        return False
    os.waitpid(inner, 0)
    _end_all(None)
    return True


def _run(order: dict[str, Any], lock: int) -> dict[str, Any]:
    order["env"] = {**order["env"], "ULLAGE_CHECKPOINT_PID_FILE": _file_of_job(CHECKPOINT_PID, order)}
    pump, streams = _open_streams(order)
    go_read, go = os.pipe()
    failure, failure_write = os.pipe()
    began = time.monotonic()
    kills_before = _kills(_VMSTAT)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.close(failure)
        _become_job(order, streams, lock, go_read, failure_write, parent)
    for descriptor in {go_read, failure_write, *streams}:
        os.close(descriptor)
    pump.start()
    crash_point("supervisor-forked")
    cgroup = _join_cgroup(order.get("cgroup"), child)
    who = {"guardian": os.getppid(), "supervisor": parent, "job": child}
    pids = {f"{kind}_pid": pid for kind, pid in who.items()}
    since = {f"{kind}_start": int(stat_field(pid, 19) or 0) for kind, pid in who.items()}
    _write(STARTED, {**since, **pids, "cgroup": cgroup, "boot": boot_now(), "time": time.time()})
    crash_point("supervisor-recorded")
    _poke(order)
    os.write(go, b"g")
    os.close(go)
    watch = JobWatch(order, child, began, partial(read_record, STOP), _named_for_checkpoint)
    status, usage = watch.wait()
    crash_point("supervisor-waited")
    _end_all(cgroup)
    code, number = _ending_of(status)
    pump.finish({"code": code, "signal": number})
    pump.join(LOOK)  # all writers are gone, unless a process outside of the job got a pipe
    for name, path in zip(("stdout", "stderr"), dict.fromkeys((order.get("output"), order.get("error"))), strict=False):
        if path is not None:
            _output_file(order, name).write(_end_of_named(order, path))
    kills = _kills(os.path.join(cgroup or "/nowhere", "memory.events"))
    if cgroup is not None:
        remove_cgroup(cgroup)
    error = os.read(failure, 2000).decode(errors="replace")
    return {
        "code": code,
        "signal": number,
        "reason": watch.reason,
        "signals_sent": watch.sent,
        "checkpoint_asked": watch.checkpoint_asked,
        "checkpoint_unheard": watch.checkpoint_unheard,
        "leader_asked": watch.leader_asked,
        "extended": watch.extended,
        "could_not_run": error or None,
        "max_rss": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "elapsed": time.monotonic() - began,
        "cgroup_kills": kills,
        "host_kills": None if kills_before is None else (_kills(_VMSTAT) or 0) - kills_before,
        "time": time.time(),
    }


def _named_for_checkpoint() -> int | None:
    """Return the process that the job named in its file."""
    try:
        with open(CHECKPOINT_PID) as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return None


def _become_job(order: dict[str, Any], streams: list[int], lock: int, go: int, failure: int, parent: int) -> NoReturn:
    """In the child, wait until the start is recorded, then become the job."""
    doing, what = "run", order["command"][0]
    try:
        if os.read(go, 1) != b"g":  # the parent died before it recorded the start, so this never happened
            os._exit(127)
        os.close(go)
        os.setsid()
        fcntl.fcntl(lock, fcntl.F_DUPFD, _LOCK_NUMBER)  # shared with the supervisor, so held until both are gone
        if order.get("interactive"):
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        _drop_rights(order)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        os.umask(int(order.get("umask", 0o022)))
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        env = order["env"] if order.get("conda") is None else in_conda(order["conda"], order["env"])
        what = order["cwd"]
        os.chdir(what)
        for number, path in ((1, order.get("output")), (2, order.get("error"))):
            if path is not None:
                doing, what = "write to", path
                os.dup2(_open_named(path), number)
        doing, what = "run", order["command"][0]
        os.execvpe(what, order["command"], env)
    except (OSError, LookupError) as error:
        message = f"cannot {doing} {what}: {error.strerror}" if isinstance(error, OSError) else str(error)
        os.write(failure, message.encode()[:1000])
        os.write(2, f"ullage: {message}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


def _ending_of(status: int) -> tuple[int | None, int | None]:
    return (
        os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
    )


def _open_streams(order: dict[str, Any]) -> tuple[OutputTaker, list[int]]:
    if order.get("interactive"):
        from ullage.manager.running.terminal import Terminal  # most jobs need none

        terminal = Terminal(TERMINAL, _output_file(order, "stdout"), _owner(order))
        return terminal, [terminal.slave] * 3
    pump = OutputPump()
    pipes = [pump.pipe_into(_output_file(order, name), _owner(order)) for name in ("stdout", "stderr")]
    return pump, [os.open("/dev/null", os.O_RDONLY), *pipes]


def _owner(order: dict[str, Any]) -> tuple[int, int] | None:
    return None if order.get("uid") is None else (order["uid"], order["gid"])


def _file_of_job(name: str, order: dict[str, Any]) -> str:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if order.get("uid") is not None:
        os.fchown(file, order["uid"], order["gid"])
    os.close(file)
    return os.path.abspath(name)


def _output_file(order: dict[str, Any], name: str) -> OutputFile:
    return OutputFile(order[name], int(order.get("log_size", 1 << 26)), int(order.get("log_files", 4)), _owner(order))


def _open_named(path: str) -> int:
    """Open a file that the job's user named, with that user's rights; refuse a pipe without a reader."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file


def _end_of_named(order: dict[str, Any], path: str) -> bytes:
    """Read the end of a file that the job's user named, in a short-lived process with that user's rights."""
    source, sink = os.pipe()
    reader = os.fork()
    if reader == 0:
        try:
            signal.alarm(int(LOOK))
            _drop_rights(order)
            os.chdir(order["cwd"])
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            size = os.fstat(file).st_size
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.write(sink, os.pread(file, _NAMED_END, max(0, size - _NAMED_END)))
        finally:
            os._exit(0)
    os.close(sink)
    ready, _, _ = select.select([source], [], [], 2 * LOOK)
    data = os.read(source, _NAMED_END) if ready else b""
    os.close(source)
    return data


def _drop_rights(order: dict[str, Any]) -> None:
    for name, (soft, hard) in order.get("limits", {}).items():
        with contextlib.suppress(ValueError, OSError):  # only root can raise a limit again
            resource.setrlimit(getattr(resource, name), (soft, hard))
    if order.get("uid") is not None:
        os.initgroups(order["user"], order["gid"])
        os.setgid(order["gid"])
        os.setuid(order["uid"])


def _end_all(cgroup: str | None) -> None:
    """Kill all processes that the job left; orphans become children of this process."""
    while True:
        left = kill_cgroup(cgroup) if cgroup is not None else 0
        kill_tree(os.getpid())
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG if left else 0)
            while pid:
                pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if not left:
                return
        time.sleep(0.002)  # killed processes must first end and become our children


def boot_now() -> str:
    """Return the kernel's id of the present boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _write(name: str, record: dict[str, Any]) -> None:
    """Write a record atomically; the exit record is padded with spaces to its reserved size."""
    text = json.dumps(record).encode()
    _put(name + ".new", text.ljust(_RESERVED) if name == EXIT else text)
    os.rename(name + ".new", name)
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _put(name: str, content: bytes) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, content)
    os.fsync(descriptor)
    os.close(descriptor)


def _join_cgroup(folder: str | None, pid: int) -> str | None:
    """Put a process into a cgroup; return the group, or `None` if that is not allowed."""
    try:
        with open(os.path.join(folder or "/nowhere", "cgroup.procs"), "w") as file:
            file.write(str(pid))
        return folder
    except OSError:
        return None


def _kills(file: str) -> int | None:
    """Return the number of out-of-memory kills in a cgroup, or in the whole system."""
    try:
        with open(file) as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError):
        return None


def _poke(order: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(order["token"].encode(), order["wake"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
