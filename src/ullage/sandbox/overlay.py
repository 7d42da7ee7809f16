"""Overlays: every path stays where it is, and writes go to memory that no other process sees.

An overlay whose upper layer lies on one tmpfs of limited size covers each folder of the system. The mounts belong to a
mount namespace and vanish with its last process: there is nothing to clean up. `build` does this in the first process
of a new pid namespace. It imports little, because every child imports it.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

from ullage.sandbox import kernel

_NAME = "ullage"  # the source of our mounts, by which a process knows that it is in a sandbox
_ORIGINAL = "/.original"  # large files that could not be covered, read-only
_LARGEST_COPY = 8 << 20  # bytes
_MOST_FILES = 1_000_000
_MOST_LOOKED_AT = 2_000
WRITTEN_UNNOTICED = 256 << 20  # bytes beyond the limit, until that is noticed
# File systems without files of users; an overlay could not cover them.
_NO_FILES = re.compile(
    "autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|hugetlbfs|mqueue|nsfs|proc|"
    "pstore|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs"
)
_NEVER_WRITTEN = ("/sys/", "/proc/")
_KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    path: str
    kind: str
    writable: bool
    source: str


def mounts() -> list[Mount]:
    entries = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            first, _, last = line.partition(b" - ")
            path, options = first.split()[4:6]
            kind, source, settings = last.split()[:3]
            writable = b"ro" not in options.split(b",") and b"ro" not in settings.split(b",")
            name = os.fsdecode(path.decode("unicode_escape").encode("latin-1"))  # it has \040 for a space
            entries.append(Mount(name, kind.decode(), writable, os.fsdecode(source)))
    return entries


def is_private() -> bool:
    """Return whether this process is in a sandbox."""
    try:
        return any(mount.source == _NAME for mount in mounts())
    except OSError:
        return False


def patch_renames() -> None:
    """Let this process rename folders on an overlay, which requires a copy, as between two disks."""

    def mended(rename: Callable[..., None]) -> Callable[..., None]:
        @wraps(rename)
        def call(source: Any, target: Any, **options: Any) -> None:
            try:
                rename(source, target, **options)
            except OSError as error:
                if error.errno != errno.EXDEV or options or not os.path.isdir(source):
                    raise
                import shutil

                if os.path.isdir(target):
                    os.rmdir(target)
                shutil.copytree(source, target, symlinks=True)
                shutil.rmtree(source)

        return call

    os.rename, os.replace = mended(os.rename), mended(os.replace)


def build(
    limit: int, cwd: str | None, near: Iterable[str], overlays: bool = True, only_imports: bool = False
) -> int | None:
    """Cover all files; return a descriptor of the memory for writes, for `written`.

    `near` are places where writes are likely, apart from the folder `cwd`. Return `None`, with nothing covered, without
    `overlays` or if they do not suffice. A process that `only_imports` keeps the processes of the system.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if only_imports:
        return _cover(limit, cwd, near, processes=False)
    memory = _cover(limit, cwd, near) if overlays and not _has_files_of_others(cwd or "/") else None
    if memory is None:
        _show_processes("/proc")
    return memory


def _cover(limit: int, cwd: str | None, near: Iterable[str], processes: bool = True) -> int | None:
    there = mounts()
    place = next(folder for folder in ("/tmp", "/mnt", "/run", "/var") if os.path.isdir(folder))
    size = f"size={limit + WRITTEN_UNNOTICED},nr_inodes={_MOST_FILES},mode=0755"
    kernel.mount(_NAME, place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    if not _has_attributes(place):
        kernel.unmount(place)
        return None
    for name in ("old", "new"):
        os.mkdir(f"{place}/{name}")
    kernel.swap_root(place, "old")
    memory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.mount("/new", "/new", flags=kernel.MS_BIND)
    cover = _Cover(there)
    cover.cover("/")
    for path in [*filter(None, [cwd]), *near]:
        cover.cover_near(path)
    if processes:
        _show_processes("/new/proc")
    for path in _KERNEL:
        with suppress(FileNotFoundError):
            kernel.mount(f"/new{path}", f"/new{path}", flags=kernel.MS_BIND)
            kernel.make_read_only(f"/new{path}")
    with suppress(OSError):
        kernel.make_read_only("/new/sys")
    kernel.enter_root("/new")
    return memory


def written(memory: int) -> int:
    statistics = os.fstatvfs(memory)
    return (statistics.f_blocks - statistics.f_bfree) * statistics.f_frsize


def _show_processes(path: str) -> None:
    """Show the processes of this pid namespace."""
    kernel.mount("proc", path, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def _has_attributes(place: str) -> bool:
    """Return whether extended attributes work: without them (before Linux 6.6) an overlay cannot replace a folder."""
    try:
        os.setxattr(place, "user.ullage", b"1")
        os.removexattr(place, "user.ullage")
    except OSError:
        return False
    return True


def _has_files_of_others(folder: str) -> bool:
    """Return whether the user may write to files here that an overlay could not change (`_Cover.cover_near`)."""
    if os.getuid() == 0:
        return False
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MOST_LOOKED_AT):
            if _is_foreign(entry.stat(follow_symlinks=False)) and os.access(entry.path, os.W_OK):
                return True
    return False


def _is_foreign(status: os.stat_result) -> bool:
    return (status.st_uid, status.st_gid) != (os.getuid(), os.getgid())


class _Cover:
    """Builds the new root at /new from the old one at /old."""

    def __init__(self, there: list[Mount]) -> None:
        self._mounts = {mount.path: mount for mount in there}  # the last mount at a place hides the others
        self._covered: list[str] = []  # by overlays
        self._made = 0

    def cover(self, path: str) -> None:
        """Make the folder /new/PATH look like /old/PATH."""
        mount = self._mounts.get(path)
        if mount is not None and (_NO_FILES.fullmatch(mount.kind) or not mount.writable):
            self._show(path)
        elif not self._below(path):
            self._overlay(path)
        else:
            self._split(path)

    def cover_near(self, path: str) -> None:
        """Give each folder of another user on this path its own overlay.

        The overlay above it would copy the folder up with its owner, and only the user's own name exists in this
        namespace.
        """
        path = os.path.normpath(path)
        parts = path.split("/")[1:]
        for folder in ("/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)):
            try:
                status = os.lstat(f"/old{folder}")
            except OSError:
                return
            if not stat.S_ISDIR(status.st_mode):
                return
            if (
                _is_foreign(status)
                and folder not in self._covered
                and not self._below(folder)
                and self._is_under_overlay(folder)
            ):
                self._overlay(folder)

    def _is_under_overlay(self, folder: str) -> bool:
        while folder != "/":
            folder = os.path.dirname(folder)
            if folder in self._covered:
                return True
        return False

    def _below(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return [other for other in self._mounts if other.startswith(start) and other != path]

    def _show(self, path: str) -> None:
        """Bind the folder itself, with all mounts below it; cover those that can be written to."""
        kernel.mount(f"/old{path}", f"/new{path}", flags=kernel.MS_BIND | kernel.MS_REC)
        covered: list[str] = []
        for other in sorted(self._below(path)):
            mount = self._mounts[other]
            inside = other.startswith(_NEVER_WRITTEN) or any(other.startswith(f"{done}/") for done in covered)
            if not _NO_FILES.fullmatch(mount.kind) and mount.writable and not inside and os.path.isdir(f"/old{other}"):
                self.cover(other)
                covered.append(other)

    def _overlay(self, path: str) -> None:
        try:
            upper, work = self._fresh("upper", path), self._fresh("work")
            self._covered.append(path)
            os.chdir(f"/old{path}")  # any other way of naming it would have to be quoted
            options = f"lowerdir=.,upperdir={upper},workdir={work},userxattr"
            kernel.mount(_NAME, f"/new{path}", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except PermissionError:  # a folder that this user cannot enter
            self._bind(path)
        finally:
            os.chdir("/")

    def _fresh(self, name: str, path: str | None = None) -> str:
        """Make an empty folder in our memory, with the permissions of the original."""
        self._made += 1
        folder = f"/{name}{self._made}"
        os.mkdir(folder)
        if path is not None:
            _look_like(folder, os.stat(f"/old{path}"))
        return folder

    def _bind(self, path: str) -> None:
        kernel.mount(f"/old{path}", f"/new{path}", flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(f"/new{path}")

    def _split(self, path: str) -> None:
        """Cover the entries of a folder with mounts below it, because the kernel refuses to cover it as a whole.

        A file that is too large for a copy becomes a link to the original, which can be read and replaced.
        """
        try:
            entries = sorted(os.scandir(f"/old{path}"), key=lambda entry: entry.name)
        except PermissionError:
            self._bind(path)
            return
        if path != "/":
            kernel.mount(self._fresh("new", path), f"/new{path}", flags=kernel.MS_BIND)
        for entry in entries:
            inside = f"{path.rstrip('/')}/{entry.name}"
            target = f"/new{inside}"
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # a mount that only its user can see, or whose server is gone
            if stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(entry.path), target)
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(target)
                _look_like(target, status)
                self.cover(inside)
            elif stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_COPY and os.access(entry.path, os.R_OK):
                with open(entry.path, "rb") as file, open(target, "wb") as copy:
                    copy.write(file.read())
                _look_like(target, status)
            elif stat.S_ISREG(status.st_mode):
                os.symlink(f"{self._original()}{inside}", target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
                kernel.mount(entry.path, target, flags=kernel.MS_BIND)

    def _original(self) -> str:
        if not os.path.exists(f"/new{_ORIGINAL}"):
            os.mkdir(f"/new{_ORIGINAL}")
            kernel.mount("/old", f"/new{_ORIGINAL}", flags=kernel.MS_BIND | kernel.MS_REC)
            kernel.make_read_only(f"/new{_ORIGINAL}")
        return _ORIGINAL


def _look_like(path: str, status: os.stat_result) -> None:
    with suppress(OSError):  # an owner that has no name in this namespace
        os.chown(path, status.st_uid, status.st_gid)
    os.chmod(path, stat.S_IMODE(status.st_mode))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
