"""A sandbox without the kernel's help: this process's writes go to a folder, and its reads look there first.

It serves systems that refuse namespaces, and those other than Linux. Python's functions for files are replaced:
`/home/ann/last.pt` is written to FOLDER/root/home/ann/last.pt, and read from there if it exists. FOLDER/gone lists
removed files. Forked processes and further children of Ullage share the folder.

Other ways to write are refused: by Landlock if the kernel has it (`kernel.confine`, which also holds other programs and
compiled code), and by Python's audit events. The network is refused the same way.
"""

import builtins
import errno
import hashlib
import io
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

_SYSTEM = ("/dev", "/proc", "/sys")
_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0", "::")
_MOST_LINKS = 40
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_here: "Redirection | None" = None


def current() -> "Redirection | None":
    return _here


def start(folder: str, *, network: bool) -> None:
    """Redirect all writes of this process to the folder from now on; refuse the network unless `network` is true."""
    global _here
    _here = Redirection(folder, network)
    _here.install()


class Redirection:
    """The mapping of paths in this process."""

    def __init__(self, folder: str, network: bool) -> None:
        self.folder, self.network = os.path.realpath(folder), network
        self._root, self._gone = f"{self.folder}/root", f"{self.folder}/gone"
        self._real = {name: getattr(os, name) for name in _CHANGED}
        self._file = io.open
        self._folders: dict[str, str] = {}  # without links; kept while no link is made or removed
        self._marks: tuple[int, set[str]] = (0, set())  # the names in the folder `gone`, and its time

    def install(self) -> None:
        """Replace Python's functions for files; this cannot be undone."""
        for name in ("root", "gone", "tmp"):
            with suppress(FileExistsError):
                self._real["mkdir"](f"{self.folder}/{name}")
        os.environ["TMPDIR"] = tempfile.tempdir = f"{self.folder}/tmp"
        sys.dont_write_bytecode = True
        for name in _CHANGED:
            replacement = self._look(name) if name in _LOOKS else self._change(name) if name in _CHANGES else None
            replacement = replacement or getattr(self, f"_{name}")
            for names in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
                if self._real[name] in names:
                    names.add(replacement)
            setattr(os, name, replacement)
        builtins.open = io.open = self._open_file
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it would remove by descriptors
        sys.meta_path.insert(0, _WhenImported(self))
        sys.addaudithook(self._refuse)

    # Mapping of paths.

    def _path(self, file: Any) -> str | None:
        """Return the absolute path of a file that may be redirected."""
        if isinstance(file, int):
            return None
        path = os.path.abspath(os.fsdecode(file))
        parent, name = os.path.split(path)
        if parent not in self._folders:
            self._folders[parent] = self._resolved(parent)
        path = os.path.join(self._folders[parent], name)
        if path == self.folder or path.startswith((f"{self.folder}/", *(f"{place}/" for place in _SYSTEM))):
            return None
        return path

    def _resolved(self, folder: str) -> str:
        """Return a folder without links, as this process sees it."""
        parts, resolved, links = folder.split("/")[::-1], "/", 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                resolved = os.path.dirname(resolved)
                continue
            path = os.path.join(resolved, part)
            there = self._shadow(path) if self._has_shadow(path) or self._is_marked(path) else path
            try:
                target = self._real["readlink"](there)
            except OSError:
                resolved = path
                continue
            links += 1
            if links > _MOST_LINKS:
                return folder
            resolved = "/" if target.startswith("/") else resolved
            parts += target.split("/")[::-1]
        return resolved

    def _shadow(self, path: str) -> str:
        return self._root + path

    def _is_marked(self, path: str) -> bool:
        """Return whether this run removed the real file at this path."""
        since = self._real["stat"](self._gone).st_mtime_ns
        if since != self._marks[0]:
            self._marks = since, set(self._real["listdir"](self._gone))
        return bool(self._marks[1]) and _mark(path) in self._marks[1]

    def _has_shadow(self, path: str) -> bool:
        return self._lexists(self._shadow(path))

    def _lexists(self, path: str) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def _is_gone(self, path: str) -> bool:
        """Return whether this run removed the real file, or a folder above it."""
        while not self._is_marked(path):
            parent = os.path.dirname(path)
            if parent == path or not self._marks[1]:
                return False
            path = parent
        return True

    def seen(self, file: Any) -> Any:
        path = self._path(file)
        if path is None:
            return file
        return self._shadow(path) if self._has_shadow(path) or self._is_gone(path) else file

    def _is_folder(self, path: str) -> bool:
        with suppress(OSError):
            return stat.S_ISDIR(self._real["stat"](self.seen(path)).st_mode)
        return False

    def written(self, file: Any, *, keep: bool = True) -> Any:
        """Return the path to write to, with the earlier content if `keep`."""
        path = self._path(file)
        if path is None:
            return file
        shadow = self._shadow(path)
        if not self._has_shadow(path):
            self._make_parents(path)
            if keep and not self._is_gone(path):
                self._copy_up(path, shadow)
        return shadow

    def _make_parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        missing = []
        while not self._has_shadow(parent) and parent != "/":
            if not self._is_folder(parent):
                return  # the call that follows fails as it should
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self._real["mkdir"](self._shadow(folder))

    def _copy_up(self, path: str, shadow: str) -> None:
        try:
            status = self._real["lstat"](path)
        except OSError:
            return
        if stat.S_ISLNK(status.st_mode):
            self._real["symlink"](self._real["readlink"](path), shadow)
        elif stat.S_ISDIR(status.st_mode):
            self._real["mkdir"](shadow)
        elif stat.S_ISREG(status.st_mode):
            with self._file(path, "rb") as source, self._file(shadow, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            self._real["utime"](shadow, ns=(status.st_atime_ns, status.st_mtime_ns))
            self._real["chmod"](shadow, stat.S_IMODE(status.st_mode) | stat.S_IWUSR)

    def _leave(self, path: str | None) -> None:
        """Mark the real file at this path as removed."""
        self._folders.clear()
        if path is not None and self._lexists(path):
            self._file(f"{self._gone}/{_mark(path)}", "wb").close()
            self._marks[1].add(_mark(path))

    # Python's functions for files.

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if any(letter in mode for letter in "wax+"):
            there = self._lexists(self.seen(file)) if not isinstance(file, int) else False
            if "x" in mode and there:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
            return self._file(self.written(file, keep="w" not in mode), mode, *args, **options)
        return self._file(self.seen(file), mode, *args, **options)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None and flags & _WRITES and not flags & getattr(os, "O_DIRECTORY", 0):
            if flags & os.O_EXCL and self._lexists(self.seen(path)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            path = self.written(path, keep=not flags & os.O_TRUNC)
        elif dir_fd is None:
            path = self.seen(path)
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        return descriptor

    def _look(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def look(path: Any = ".", *args: Any, **options: Any) -> Any:
            return real(self.seen(path) if options.get("dir_fd") is None else path, *args, **options)

        look.__name__ = look.__qualname__ = name
        return look

    def _change(self, name: str) -> Callable[..., Any]:
        """Replace a function that changes an existing file."""
        real = self._real[name]

        def change(path: Any, *args: Any, **options: Any) -> Any:
            return real(self.written(path), *args, **options)

        change.__name__ = change.__qualname__ = name
        return change

    def _getcwd(self) -> str:
        return str(self._real["getcwd"]()).removeprefix(self._root) or "/"

    def _listdir(self, path: Any = ".") -> list[Any]:
        names = [entry.name for entry in self._entries(path)]
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        return self._real["scandir"](path) if isinstance(path, int) else _Entries(self._entries(path))

    def _entries(self, folder: Any) -> "Iterator[_Entry]":
        folder = "." if folder is None else folder if isinstance(folder, int) else os.fsdecode(folder)
        for name in self._names(folder):
            yield _Entry(name if isinstance(folder, int) else os.path.join(folder, name), name)

    def _names(self, folder: Any) -> list[str]:
        listdir = self._real["listdir"]
        inside = None if isinstance(folder, int) else self._path(os.path.join(folder, "x"))
        if inside is None:
            return [os.fsdecode(name) for name in listdir(folder)]
        path = os.path.dirname(inside)
        shadow = self._shadow(path)
        if self._is_gone(path):
            return [*listdir(shadow)]
        if not self._has_shadow(path):
            names = listdir(path)
        else:
            names = [*listdir(shadow), *(listdir(path) if self._lexists(path) else ())]
        own = set(listdir(shadow)) if self._has_shadow(path) else set()
        left = (name for name in names if name in own or not self._is_marked(os.path.join(path, name)))
        return [*dict.fromkeys(left)]

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is None and self._lexists(self.seen(path)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._real["mkdir"](self.written(path, keep=False), mode, dir_fd=dir_fd)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        whole = self._path(path)
        if whole is None or dir_fd is not None:
            self._real["remove"](path, dir_fd=dir_fd)
            return
        seen = self.seen(path)
        if stat.S_ISDIR(self._real["lstat"](seen).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if self._has_shadow(whole):
            self._real["remove"](self._shadow(whole))
        self._leave(whole)

    _unlink = _remove

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        whole = self._path(path)
        if whole is None or dir_fd is not None:
            self._real["rmdir"](path, dir_fd=dir_fd)
            return
        if not stat.S_ISDIR(self._real["lstat"](self.seen(path)).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._listdir(whole):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if self._has_shadow(whole):
            self._real["rmdir"](self._shadow(whole))
        self._leave(whole)

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        self._pull(source)
        origin, goal = self._path(source), self._path(target)
        if goal is not None and self._is_folder(goal) and origin is not None and self._is_folder(origin):
            self._rmdir(goal)
        self._real["rename"](self.seen(source), self.written(target, keep=False), **options)
        self._leave(origin)

    _replace = _rename

    def _pull(self, file: Any) -> None:
        """Copy a file, or a folder with its content, to the path to write to."""
        whole = self._path(file)
        if whole is None:
            return
        names = self._listdir(whole) if self._is_folder(whole) and not self._is_link(whole) else []
        self.written(whole)
        for name in names:
            self._pull(os.path.join(whole, name))

    def _is_link(self, path: str) -> bool:
        return stat.S_ISLNK(self._real["lstat"](self.seen(path)).st_mode)

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        self._real["link"](self.written(source), self.written(target, keep=False), **options)

    def _symlink(self, source: Any, target: Any, *args: Any, **options: Any) -> None:
        if self._lexists(self.seen(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._real["symlink"](source, self.written(target, keep=False), *args, **options)
        self._folders.clear()

    # Writes past these functions.

    def _refuse(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            for place in _REFUSED[event]:
                self._refuse_write(args[place])
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._refuse_write(args[0])
        elif event.startswith("socket.") and not self.network:
            self._refuse_network(event, args)

    def _refuse_write(self, file: Any) -> None:
        if isinstance(file, int) or file is None:
            return
        path = os.path.join(self._real["getcwd"](), os.fsdecode(file))
        if not os.path.normpath(path).startswith((f"{self.folder}/", *_SYSTEM)):
            raise PermissionError(errno.EACCES, "this would really be written, which an estimate must not do", path)

    def _refuse_network(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            link, address = args[0], args[1]
            if link.family in (socket.AF_INET, socket.AF_INET6) and address is not None:
                self._refuse_host(address[0], OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)))
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr") and args[0]:
            self._refuse_host(
                args[0], socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), names=True
            )

    def _refuse_host(self, host: Any, error: OSError, names: bool = False) -> None:
        text = os.fsdecode(host) if host else ""
        own = text == socket.gethostname() if names and text else False
        if text and not own and not text.startswith(_LOOPBACK):
            raise error


def _mark(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


class _Entry:
    """An entry of `os.scandir`, for a folder that lies in two places."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Return `False`: junctions exist only on Windows."""
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        with suppress(FileNotFoundError):
            return kind(self.stat(follow_symlinks=follow).st_mode)
        return False


class _Entries:
    """The iterator of `os.scandir`, which is also a context manager."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = iter(list(entries))

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        return

    def close(self) -> None:
        """Do nothing: nothing is open."""


class _WhenImported:
    """Replaces functions of modules whose compiled code opens files, as soon as they are imported."""

    def __init__(self, paths: Redirection) -> None:
        self._paths = paths

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _COMPILED:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _COMPILED[name](module, self._paths)

            spec.loader.exec_module = exec_module
        return spec


def _saving(module: Any, paths: Redirection) -> None:
    """Redirect `torch.serialization`, whose C++ code writes files, and reads them with mmap."""
    writer, load = module._open_zipfile_writer_file.__init__, module.load

    def open_writer(self: Any, name: Any, *args: Any, **options: Any) -> None:
        writer(self, paths.written(name, keep=False), *args, **options)

    def load_file(f: Any, *args: Any, **options: Any) -> Any:
        return load(paths.seen(f) if isinstance(f, str | os.PathLike) else f, *args, **options)

    module._open_zipfile_writer_file.__init__ = open_writer
    module.load = load_file


def _databases(module: Any, paths: Redirection) -> None:
    connect = module.connect

    def connect_to(database: Any, *args: Any, **options: Any) -> Any:
        named = database != ":memory:" and not str(database).startswith("file:")
        return connect(paths.written(database) if named else database, *args, **options)

    module.connect = connect_to


_COMPILED: dict[str, Callable[[Any, Redirection], None]] = {
    "torch.serialization": _saving,
    "sqlite3": _databases,
}
_LOOKS = ("stat", "lstat", "access", "readlink", "chdir", "statvfs", "getxattr", "listxattr")
_CHANGES = ("truncate", "chmod", "chown", "utime")
_MAKES = ("open", "mkdir", "rename", "replace", "link", "symlink")
_OTHERS = (*_MAKES, "getcwd", "listdir", "scandir", "remove", "unlink", "rmdir")
_CHANGED = tuple(name for name in (*_LOOKS, *_CHANGES, *_OTHERS) if hasattr(os, name))
_REFUSED = {  # audit events, and where the path is in their arguments
    **{f"os.{name}": (0,) for name in ("remove", "mkdir", "rmdir", "truncate", "chmod", "chown", "utime")},
    **{"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)},
}
