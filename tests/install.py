"""Install packages into an environment: `python tests/install.py PYTHON WORD...`, the words as pip takes them.

uv takes a tenth of pip's time for it, and the same packages: it is given pip's settings and the same constraints. Where
uv cannot be had, or fails, pip installs them. Nothing is compiled.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CONSTRAINTS = ["--quiet", "--constraint", str(Path(__file__).parent.parent / "constraints.txt")]
# What pip calls a setting, and the variable by which uv is told.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}


def settings_of(lines: Iterable[str]) -> dict[str, str]:
    """The variables for uv, by what `pip config list` prints; a later line counts more.

    >>> settings_of(["global.find-links='/wheels /more'", "global.quiet='1'", ":env:.index-url='http://local/'"])
    {'UV_FIND_LINKS': '/wheels,/more', 'UV_DEFAULT_INDEX': 'http://local/'}
    """
    found = {}
    for line in lines:
        key, _, value = line.strip().partition("=")
        variable = VARIABLES.get(key.rpartition(".")[2])
        if variable is not None:
            words = value.strip("'\"").replace("\\n", " ").split()
            found[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(words)
    return found


def with_uv(python: str, words: list[str]) -> bool:
    """Install by uv, which is installed first; returns whether that was possible."""
    pip = [python, "-m", "pip"]
    if subprocess.run([*pip, "install", *CONSTRAINTS, "--no-compile", "uv"], capture_output=True).returncode:
        return False
    told = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout.splitlines()
    # All indexes count alike, as for pip: of a version the build that one of them has besides.
    uv = [python, "-m", "uv", "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match"]
    return subprocess.run([*uv, *CONSTRAINTS, *words], env=settings_of(told) | os.environ).returncode == 0


def with_pip(python: str, words: list[str]) -> int:
    """Install by pip. PyTorch first and alone: other packages that ask for it then find the version that is pinned."""
    pip = [python, "-m", "pip", "install", *CONSTRAINTS, "--no-compile"]
    return subprocess.run([*pip, "torch"]).returncode or subprocess.run([*pip, *words]).returncode


if __name__ == "__main__":
    interpreter, *wanted = sys.argv[1:]
    sys.exit(0 if with_uv(interpreter, wanted) else with_pip(interpreter, wanted))
