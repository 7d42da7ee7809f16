"""Record the dependencies of a run: the files that it read or looked for, and the variables that it read.

In the child a `Recorder` notes each file when it is first opened; forked workers and further children of Ullage write
to the same file. The parent turns it into `Reads`, which later says whether all is unchanged, so that a cached answer
still holds. Files that the run wrote before reading them do not count. Compiled code that opens files without Python,
and other programs that the run started (`Reads.programs`), are not seen.
"""

import contextlib
import hashlib
import json
import os
import re
import site
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import source_from_cache
from typing import Any

from ullage.sandbox.environment import HOME

MISSING, EXISTS = "missing", "exists"
_LARGEST_FILE = 4 << 20  # bytes whose content is compared; of a larger file, size and time
_LONGEST_LISTING = 10_000  # names
_MOST = 20_000  # files of one process
_LONGEST_RECORD = 64 << 20  # bytes
_ALWAYS = re.compile(r"(PYTORCH_|TORCH_|CUDA|CUBLAS|CUDNN|NVIDIA_).*|OMP_NUM_THREADS|PYTHONPATH")
_AT_START = re.compile(
    r"(PYTHON|LD_|MALLOC_|GLIBC_|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|BLIS_|ATEN_|C10_|NCCL_|LC_).*|LANG|LANGUAGE|TZ|HOME|PATH"
)
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_MODULES = (".py", ".so", ".pyc", ".dist-info", ".egg-info", ".egg-link")
_LIBRARY = os.path.dirname(os.__file__)
_IMPORTING = ("<frozen importlib", f"{_LIBRARY}/importlib/", f"{_LIBRARY}/pkgutil.py")
OF_A_SESSION = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM|COLUMNS|LINES|WINDOWID|(SSH|DBUS|XDG_SESSION|TMUX|STY|INVOCATION|JOURNAL)_?.*"
)


@dataclass(frozen=True)
class Reads:
    """The dependencies of a run: files with their signatures, and variables with a digest of their values.

    `whole` says whether everything could be recorded, `all_variables` whether the run looked through all variables. The
    reads of `programs` that it started are unknown.
    """

    files: dict[str, str]
    variables: dict[str, str | None]
    all_variables: bool = False
    programs: list[str] = field(default_factory=list)
    whole: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Reads":
        return cls(**values)

    def same_variables(self, env: Mapping[str, str]) -> bool:
        """Return whether a run with these variables would read the same values. Opens no file."""
        if any(digest(env.get(name)) != value for name, value in self.variables.items()):
            return False
        return all(name in self.variables for name in env if _counts(name, self.all_variables))

    def same_files(self) -> bool:
        """Return whether every file is unchanged; call it with the rights of the run's user.

        It opens only plain files, and waits for none.
        """
        return self.whole and all(_as_before(path, known) for path, known in self.files.items())


def first_that_holds(request: dict[str, Any]) -> dict[str, Any]:
    """Return the index of the first of the `reads` of earlier runs whose files are unchanged (`held`), or `None`; run
    it in a child with the user's rights."""
    for place, reads in enumerate(request["reads"]):
        if Reads.from_dict(reads).same_files():
            return {"held": place}
    return {"held": None}


def digest(value: str | None) -> str | None:
    """Return a digest that does not reveal the value."""
    return None if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()[:32]


def signature(path: str) -> str:
    """Return the state of a file: its content if it is small, otherwise its size and time."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return EXISTS
        if status.st_size > _LARGEST_FILE:
            return f"large:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return f"sha256:{hashlib.sha256(file.read(_LARGEST_FILE + 1)).hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"refused:{error.errno}"


def _existence(path: str) -> str:
    return EXISTS if os.path.exists(path) else MISSING


def _time(path: str) -> str:
    try:
        return f"time:{os.stat(path).st_mtime_ns}"
    except OSError:
        return MISSING


def _listing(path: str, own: Iterable[str] = ()) -> str:
    """Return the names in a folder, without those that the run made itself."""
    try:
        names = sorted(set(os.listdir(path)).difference(own))
    except OSError:
        return MISSING
    if len(names) > _LONGEST_LISTING:
        return _time(path)
    return f"names:{_hash(names)}:{'/'.join(sorted(own))}"


def _importable(path: str) -> str:
    """Return the modules in a folder: the entries that matter to an import."""
    try:
        with os.scandir(path) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.name.endswith(_MODULES) or os.path.exists(os.path.join(entry.path, "__init__.py"))
            )
    except OSError:
        return MISSING
    return f"modules:{_hash(names)}"


def _hash(names: list[str]) -> str:
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def _as_before(path: str, known: str) -> bool:
    kind, _, rest = known.partition(":")
    if kind == "names":
        return _listing(path, rest.partition(":")[2].split("/")) == known
    now: dict[str, Callable[[str], str]] = {"modules": _importable, "time": _time, EXISTS: _existence}
    return now.get(kind, signature)(path) == known


def reads_of(descriptor: int, env: Mapping[str, str]) -> Reads:
    """Read a record; `env` are the variables of the child."""
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, min(size, _LONGEST_RECORD), 0)
    files: dict[str, str] = {}
    own: set[str] = set()
    names: set[str] = set()
    programs: dict[str, None] = {}
    all_variables, whole = False, size <= _LONGEST_RECORD
    for line in text.splitlines():
        try:
            kind, name, value = json.loads(line)
        except (ValueError, TypeError):
            kind = name = value = None
        if not isinstance(name, str) or not isinstance(value, str | None):
            whole = False
        elif kind == "written":
            own.add(name)
        elif kind == "file" and value is not None:
            if own.isdisjoint(_with_parents(name)) and _tells_more(value, files.get(name)):
                files[name] = value
        elif kind == "variable":
            names.add(name)
        elif kind == "variables":
            all_variables = True
        elif kind == "program":
            programs[name] = None
        else:
            whole = False
    names.update(name for name in env if _counts(name, all_variables))
    return Reads(files, {name: digest(env.get(name)) for name in sorted(names)}, all_variables, [*programs], whole)


def _counts(name: str, all_variables: bool) -> bool:
    """Return whether a variable counts that the run did not read by name."""
    return bool(_ALWAYS.fullmatch(name) or all_variables and not OF_A_SESSION.fullmatch(name))


def matters_at_start(name: str) -> bool:
    """Return whether compiled code may read a variable when Python starts or loads PyTorch, which is not recorded."""
    return bool(_ALWAYS.fullmatch(name) or _AT_START.fullmatch(name))


def _tells_more(signature: str, known: str | None) -> bool:
    """Return whether a signature supersedes an earlier one, such as that of a file that was only looked for."""
    if known is None or known == EXISTS:
        return True
    return known.startswith("modules:") and signature.startswith("names:")


def _with_parents(path: str) -> Iterator[str]:
    while True:
        yield path
        parent = os.path.dirname(path)
        if parent == path:
            return
        path = parent


_recorder: "Recorder | None" = None


def descriptor() -> int | None:
    """Return the descriptor that this process records to, if it records."""
    return None if _recorder is None else _recorder.descriptor


def paused() -> contextlib.AbstractContextManager[None]:
    """Stop recording while this thread starts a child that records for itself."""
    return contextlib.nullcontext() if _recorder is None else _recorder.paused()


def note(path: str | os.PathLike[str]) -> None:
    if _recorder is not None:
        with _recorder.paused():
            _recorder.opened(os.fspath(path), os.O_RDONLY)


def start(descriptor: int, own: str | None = None) -> None:
    """Record the reads of this process and its forks from now on; `own` is a folder of the run's own.

    A fork of a recording process continues its record.
    """
    global _recorder
    if _recorder is None:
        _recorder = Recorder(descriptor, own)
        _recorder.install()
    elif _recorder.descriptor != descriptor:
        _recorder.move(descriptor)


def leave() -> None:
    """Stop recording, in a fork of a process that records."""
    if _recorder is not None:
        os.close(_recorder.descriptor)
        _recorder.descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class _Paused(threading.local):
    now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_: object) -> None:
        self.now = False


class Recorder:
    def __init__(self, descriptor: int, own: str | None = None) -> None:
        self.descriptor = descriptor
        self._paused = _Paused()
        self._seen: set[tuple[str, str]] = set()
        self._made: dict[str, set[str]] = {}  # names that the run made, by folder
        places = [*_packages(), *filter(None, [own])]
        self._skipped = (*_NO_FILES, *{f"{os.path.abspath(place)}/" for place in places})

    def move(self, descriptor: int) -> None:
        """Record to another file from now on, and copy the record so far."""
        size = os.fstat(self.descriptor).st_size
        os.write(descriptor, os.pread(self.descriptor, size, 0))
        os.close(self.descriptor)
        self.descriptor = descriptor

    def paused(self) -> _Paused:
        return self._paused

    def install(self) -> None:
        """Record from now on, and the modules imported so far."""
        with self._paused:
            for place in site.getsitepackages() + [site.getusersitepackages()]:
                self._note("file", os.path.abspath(place), _time)
            for place in sys.path:
                if not f"{os.path.abspath(place)}/".startswith(self._skipped):
                    self._note("file", os.path.abspath(place), _importable)
            for module in list(sys.modules.values()):
                if file := getattr(module, "__file__", None):
                    self.opened(file, os.O_RDONLY)
        sys.addaudithook(self._audit)
        for name in ("stat", "lstat", "access"):
            self._watch_looks(name)
        for environ in (os.environ, getattr(os, "environb", None)):
            if environ is not None:
                environ.__class__ = _watched(environ.__class__, self)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or self._paused.now:
            return
        with self._paused, contextlib.suppress(OSError, TypeError, ValueError):  # the run's own call raises the same
            if event == "open":
                self.opened(args[0], args[2])
            elif event in _LISTED:
                self._listed(*args[:1])
            elif event in _STARTED:
                self._note("program", os.fsdecode(args[0]))
            else:
                for place in _WRITTEN[event]:
                    self._wrote(args[place])

    def opened(self, file: Any, flags: int) -> None:
        """Record a file that is about to be opened."""
        path = _path(file)
        if path is None or path.startswith(self._skipped):
            return
        if path.endswith(".pyc") and "__pycache__" in path:
            path = source_from_cache(path)  # which decides whether this file is used
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        reads = flags & os.O_ACCMODE != os.O_WRONLY and not flags & (os.O_TRUNC | os.O_EXCL)
        if reads:
            self._note("file", path, signature)
        if writes and not os.path.isdir(path):  # a file without a name is made by opening a folder
            self._wrote(path)

    def _wrote(self, file: Any) -> None:
        path = _path(file)
        if path is not None and not path.startswith(self._skipped):
            self._made.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
            self._note("written", path)

    def _listed(self, folder: Any = None) -> None:
        path = _path("." if folder is None else folder)
        if path is None or f"{path}/".startswith(self._skipped):
            return
        if sys._getframe(2).f_code.co_filename.startswith(_IMPORTING):
            self._note("file", path, _importable)
        else:
            self._note("file", path, lambda path: _listing(path, self._made.get(path, ())))

    def _watch_looks(self, name: str) -> None:
        """Record calls of `os.path.exists` and the like, which cause no audit event."""
        look = getattr(os, name)

        def watched(path: Any, *args: Any, **options: Any) -> Any:
            if not self._paused.now and not isinstance(path, int) and options.get("dir_fd") is None:
                with self._paused:
                    absolute = _path(path)
                    if absolute is not None and not f"{absolute}/".startswith(self._skipped):
                        self._note("file", absolute, _existence)
            return look(path, *args, **options)

        watched.__name__ = watched.__qualname__ = name
        for names in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if look in names:
                names.add(watched)
        setattr(os, name, watched)

    def note_variable(self, name: str | None) -> None:
        """Record that the run read a variable, or looked through all of them."""
        if not self._paused.now:
            with self._paused:
                self._note("variables" if name is None else "variable", name or "")

    def is_by_package(self) -> bool:
        """Return whether a package is looking through the variables; it looks for those with its own prefix."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(("<frozen", os.__file__)):
            frame = frame.f_back
        return frame.f_code.co_filename.startswith((*self._skipped, f"{HOME}/ullage/"))

    def _note(self, kind: str, name: str, value: Callable[[str], str] | None = None) -> None:
        key = (kind if value is None else value.__name__, name)
        if key in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(key)
        line = [kind, name, value and value(name)] if len(self._seen) <= _MOST else ["too many", "", None]
        os.write(self.descriptor, json.dumps(line).encode() + b"\n")


_LISTED = ("os.listdir", "os.scandir")
_STARTED = ("subprocess.Popen", "os.exec", "os.posix_spawn")
_WRITTEN = {  # audit events, and where the files are in their arguments
    **{f"os.{name}": (0,) for name in ("remove", "mkdir", "rmdir", "truncate")},
    **{"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)},
}
_EVENTS = frozenset(("open", *_LISTED, *_STARTED, *_WRITTEN))


def _path(file: Any) -> str | None:
    if isinstance(file, int):
        return None
    return os.path.abspath(os.fsdecode(file))


def _packages() -> list[str]:
    """Return the folders of Python and its packages, whose changes show in their times."""
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()]


def _watched(kind: type, recorder: Recorder) -> type:
    """Return a class of `os.environ` that records."""
    walked: deque[Any] = deque()  # names whose values are asked for because a package looks through all

    class Environ(kind):  # type: ignore[misc]
        def __getitem__(self, name: Any) -> Any:
            if walked and walked[0] == name:
                walked.popleft()
            elif isinstance(name, str | bytes):
                walked.clear()
                recorder.note_variable(os.fsdecode(name))
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            names = list(super().__iter__())
            walked.clear()
            if recorder.is_by_package():
                walked.extend(names)
            else:
                recorder.note_variable(None)
            return iter(names)

    Environ.__name__ = Environ.__qualname__ = kind.__name__
    return Environ
