"""System calls of Linux that Python does not have (yet), for sandboxes."""

import _socket  # the module around it takes long to import
import ctypes
import fcntl
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAPABILITIES = 47, 2, 0x20080522
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442  # the same on every architecture, as all newer calls are
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_KEPT_BY_ROOT = {0, 1, 2, 3, 4, 5, 6, 7, 10}  # capabilities over files, processes, users and low ports
_TO_JOIN = {8, 18, 21}  # capabilities to enter another sandbox of the same users, and to give up capabilities there
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_WRITING = (1, *range(4, 15))  # bits: to write, remove, make, link and truncate files and folders
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # bits of each version

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def call(name: str, *args: Any) -> int:
    """Call a function of the C library; raise its errors as `OSError`."""
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: Any) -> int:
    """Make a system call for which the C library has no function."""
    return call("syscall", ctypes.c_long(number), *args)


def enter_namespaces(*, network: bool, processes: bool = True, users: int | None = None) -> None:
    """Enter new namespaces for users, mounts, processes, messages and (without `network`) the network.

    `users` is a namespace of users to join instead of a new one. The next process that this one forks is the first of
    the new namespace of processes; without `processes` there is none.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | (_CLONE_NEWPID if processes else 0)
    if users is not None:
        join(users)
    else:
        flags |= _CLONE_NEWUSER
    call("unshare", flags if network else flags | _CLONE_NEWNET)


def namespaces(*names: str) -> list[int]:
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def join(namespace: int) -> None:
    """Join the namespace of a descriptor; a namespace of processes applies to the next forked process."""
    call("setns", namespace, 0)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = os.fsencode(source), os.fsencode(target), kind.encode() or None
    try:
        call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({kind} at {target})") from None


def unmount(target: str) -> None:
    call("umount2", os.fsencode(target), _MNT_DETACH)


def make_read_only(target: str) -> None:
    """Make a mount and those below it read-only."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    path = os.fsencode(target)
    syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def enter_root(folder: str) -> None:
    """Make a mounted folder this process's root, and drop the old root."""
    os.chdir(folder)
    syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".")
    unmount(".")
    os.chdir("/")


def swap_root(folder: str, old: str) -> None:
    """Make a mounted folder this process's root; the old root is at `old` in it."""
    os.chdir(folder)
    syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", os.fsencode(old))
    os.chdir("/")


def die_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    call("prctl", _PR_SET_PDEATHSIG, number, 0, 0, 0)


def hide_memory() -> None:
    """Keep other processes of the same user from reading this one's memory."""
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def gain_no_rights() -> None:
    """Keep this process and its descendants from gaining rights, also by setuid programs."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_capabilities() -> None:
    """Drop the capabilities that root must not have in a sandbox, above all to mount."""
    for capability in range(64):
        if capability not in _KEPT_BY_ROOT:
            try:
                call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
            except OSError:
                break  # the kernel has no more
    _set_capabilities(_own_capabilities())


def keep_rights_to_join() -> None:
    """Keep the capabilities to join other namespaces across `execv`."""
    capabilities = _own_capabilities() | _TO_JOIN
    _set_capabilities(capabilities, inherited=capabilities)
    for capability in capabilities:
        call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _own_capabilities() -> set[int]:
    return _KEPT_BY_ROOT if os.getuid() == 0 else set()


def _set_capabilities(own: set[int], inherited: Iterable[int] = ()) -> None:
    bits, passed = (sum(1 << each for each in which) for which in (own, inherited))
    words = [word >> shift & 0xFFFFFFFF for shift in (0, 32) for word in (bits, bits, passed)]
    call("capset", struct.pack("Ii", _CAPABILITIES, 0), struct.pack("6I", *words))


def raise_loopback() -> None:
    """Activate the loopback interface of a new network namespace, for 127.0.0.1."""
    link = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    answer = fcntl.ioctl(link.fileno(), _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
    flags = struct.unpack_from("16sH", answer)[1]
    fcntl.ioctl(link.fileno(), _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
    link.close()


def confine(folder: str) -> bool:
    """Restrict writes of this process and its descendants to a folder (Landlock); return `False` if the kernel lacks
    it.

    Devices and shared memory stay writable. Permissions and times of files can still be changed.
    """
    try:
        version = syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
        rights = sum(1 << bit for bit in _WRITING if bit < _LANDLOCK_RIGHTS.get(version, 16))
        handled = struct.pack("Q", rights)
        rules = syscall(_SYS_LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    except OSError:
        return False
    for place in (folder, "/dev", "/proc"):
        beneath = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        syscall(_SYS_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(beneath)
    gain_no_rights()
    syscall(_SYS_LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)
    return True
