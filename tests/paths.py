"""Where the project's own files are, for tests in whatever folder, and a Python that other users can run."""

import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def public_python() -> tuple[str, str] | None:
    """A Python that every user of this system can run, and the `PYTHONPATH` that has this project and its packages.

    The one that runs the tests may lie in somebody's home, where others cannot go. `None` if there is no other. Only
    for root, who can try it as another user.
    """
    path = os.pathsep.join([str(ROOT / "src"), sysconfig.get_path("purelib")])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            done = subprocess.run(
                [python, "-c", "import ullage, pydantic, torch"], env={"PYTHONPATH": path}, cwd="/", user="nobody",
                group="nogroup", extra_groups=[], capture_output=True, timeout=60,
            )  # fmt: skip
        except OSError:
            continue
        if done.returncode == 0:
            return python, path
    return None


def let_everybody_in(folder: Path) -> None:
    """Let every user enter a temporary folder, whose parents pytest keeps to itself."""
    for place in (folder, *folder.parents):
        if place == Path("/tmp"):
            return
        place.chmod(place.stat().st_mode | 0o055)
