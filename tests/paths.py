"""Where the project's own files are, for tests in whatever folder, and a Python that other users can run."""

import atexit
import functools
import os
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

from ullage.sandbox import kernel

ROOT = Path(__file__).resolve().parents[1]
_CLONE_NEWNS = 0x00020000
_has_own_mounts = False


def enter_own_mounts() -> None:
    """As root, give this process a mount namespace, so that a test can mount without changing the system.

    Call it before the nursery is forked: commands of a nursery in another namespace would not see these mounts.
    """
    global _has_own_mounts
    with suppress(OSError):
        if os.geteuid() == 0:
            kernel.call("unshare", _CLONE_NEWNS)
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
            _has_own_mounts = True


@functools.cache
def public_python() -> tuple[str, str] | None:
    """A Python that every user of this system can run, and the `PYTHONPATH` that has this project and its packages.

    The clone and the environment that runs the tests may lie where others cannot go: then they find them at another
    place. `None` where no Python is for all, or mounting is not allowed. Only for root, who can try it as another user.
    """
    places = [ROOT / "src", Path(sysconfig.get_path("purelib")), Path(sys.base_prefix)]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for shown in (lambda: places, lambda: shown_to_all(places)):
        try:
            source, packages, base = shown()
        except OSError:
            continue
        path = f"{source}{os.pathsep}{packages}"
        for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}", base / "bin" / version):
            if _is_for_all(python, path):
                return str(python), path
    return None


def _is_for_all(python: str | Path, path: str) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", "import ullage, pydantic, torch"],
            env={"PYTHONPATH": path},
            cwd="/",
            user="nobody",
            group="nogroup",
            extra_groups=[],
            capture_output=True,
            timeout=60,
        )
    except OSError:
        return False
    return done.returncode == 0


def shown_to_all(places: list[Path]) -> list[Path]:
    """The folders, read-only, at a place that every user can enter. Only the tests' processes see that place."""
    if not _has_own_mounts:
        raise PermissionError("no mount namespace for the tests")
    public = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    public.chmod(0o755)
    atexit.register(_suppressed, public.rmdir)
    shown = []
    for number, place in enumerate(places):
        target = public / str(number)
        target.mkdir()
        atexit.register(_suppressed, target.rmdir)
        kernel.mount(str(place), str(target), flags=kernel.MS_BIND)
        atexit.register(_suppressed, functools.partial(kernel.unmount, str(target)))
        kernel.make_read_only(str(target))
        shown.append(target)
    return shown


def _suppressed(end) -> None:
    """At the end of the tests: what is left behind is empty folders."""
    with suppress(OSError):
        end()


def let_everybody_in(folder: Path) -> None:
    """Let every user enter a temporary folder, whose parents pytest keeps to itself."""
    for place in (folder, *folder.parents):
        if place == Path("/tmp"):
            return
        place.chmod(place.stat().st_mode | 0o055)
