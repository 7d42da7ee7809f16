"""Files that a script overwrites or deletes while it is estimated are restored afterwards.

A checkpoint that a script saves on the virtual GPU has shapes but no data, and could be mistaken for a real one. So
such files are removed after the run, with the folders created for them, and every file that existed before is restored.
The child process keeps a journal (Python's audit events announce each change before it happens); the parent process
restores the files, also after a crash. Other new files, such as logs and downloads, stay.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ullage.virtual.replacements import Replacements
from ullage.virtual.torch_api import saving

LARGEST_COPY = 256 << 20  # bytes; a larger file that is appended to is not copied first
_UNTOUCHED = ("/dev/", "/proc/", "/sys/")


class Files:
    """Keeps the journal, in the process that runs the script."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._known: set[str] = set()  # created or kept already
        self._hollow: set[str] = set()
        self._busy = False

    def install(self, replacements: Replacements) -> None:
        """Start watching."""
        save: Any = torch.save

        def save_hollow(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
            self.saves(f)
            return save(obj, f, *args, **options)

        replacements.put(torch, "save", save_hollow)
        replacements.put(torch.serialization, "save", save_hollow)
        saving.install_safetensors(replacements)
        sys.addaudithook(self._audit)  # which cannot be removed
        replacements.on_undo(lambda: setattr(self, "_busy", True))

    def saves(self, file: Any) -> None:
        """Tensors without data are about to be saved to a file."""
        if isinstance(file, str | os.PathLike):
            self._opened(os.fspath(file), "w")
            self._mark(os.fspath(file))
        elif isinstance(getattr(file, "name", None), str):
            self._mark(file.name)

    def _mark(self, file: Any) -> None:
        path = os.path.abspath(os.fsdecode(file))
        if path not in self._hollow:
            self._hollow.add(path)
            self._write("hollow", path)

    def _write(self, what: str, path: str, backup: str = "") -> None:
        with self._journal.open("a") as journal:
            journal.write(json.dumps([what, path, backup]) + "\n")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or event not in _EVENTS:
            return
        self._busy = True
        try:
            _EVENTS[event](self, *args)
        except (OSError, TypeError, ValueError):
            pass  # the script's own call will raise the same error
        finally:
            self._busy = False

    def _opened(self, file: Any, mode: Any, flags: int = 0) -> None:
        if isinstance(file, int):
            return
        writes = any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
        if writes:
            truncates = "w" in mode if mode else bool(flags & os.O_TRUNC)
            self._keep(file, "move" if truncates else "copy")

    def _removed(self, file: Any, *rest: Any) -> None:
        self._keep(file, "link")

    def _renamed(self, source: Any, target: Any, *rest: Any) -> None:
        self._keep(source, "link")
        self._keep(target, "link")
        if os.path.abspath(os.fsdecode(source)) in self._hollow:
            self._mark(target)

    def _copied(self, source: Any, target: Any, *rest: Any) -> None:
        if os.path.abspath(os.fsdecode(source)) in self._hollow:
            self._keep(target, "move")
            self._mark(target)

    def _made(self, folder: Any, *rest: Any) -> None:
        path = os.path.abspath(os.fsdecode(folder))
        if not os.path.exists(path):
            self._known.add(path)
            self._write("folder", path)

    def _keep(self, file: Any, how: str) -> None:
        path = os.path.abspath(os.fsdecode(file))
        if path in self._known or path.startswith(_UNTOUCHED) or path == str(self._journal):
            return
        self._known.add(path)
        if not os.path.isfile(path) or os.path.islink(path) or ".ullage-" in path:
            return
        backup = str(Path(path).with_name(f".{os.path.basename(path)}.ullage-{os.getpid()}"))
        if how == "copy" and os.path.getsize(path) > LARGEST_COPY:
            return
        self._write("kept", path, backup)
        if how == "move":
            os.rename(path, backup)
        elif how == "copy":
            shutil.copy2(path, backup)
        else:
            os.link(path, backup)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": Files._opened,
    "os.remove": Files._removed,
    "os.rename": Files._renamed,
    "shutil.copyfile": Files._copied,
    "os.mkdir": Files._made,
}


def put_back(journal: Path) -> None:
    """Undo every change in the journal, the last one first."""
    if not journal.is_file():
        return
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    hollow = {path for what, path, _ in entries if what == "hollow"}
    for what, path, backup in reversed(entries):
        try:
            if what == "hollow":
                Path(path).unlink(missing_ok=True)
            elif what == "kept" and os.path.lexists(backup):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.replace(backup, path)
            elif what == "folder" and any(file.startswith(path + os.sep) for file in hollow):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            print(f"ullage: could not restore {path}: {error}", file=sys.stderr)
