"""The beginning of a child in another Python than Ullage's own: `PYTHON boot.py MODULE:FUNCTION CHANNEL TOLD`.

It reports that this is a Python, checks whether it can be used, and loads the package `ullage` into it, without the
packages next to it, such as those that Ullage itself needs. Python 3.6 and newer can read this file, so a Python that
is too old can report that.
"""

import importlib.util
import json
import os
import sys

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 6)
HELLO = "python"  # the child's first message
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def begin(entry: str, channel: str, options: str) -> None:
    """Check this Python, then go on as any child does."""
    _say(channel, {"at": HELLO})
    reason = problem()
    if reason:
        _say(channel, {"error": reason})
        sys.exit(1)
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    spec = importlib.util.spec_from_file_location(
        "ullage", os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["ullage"] = package
    package.is_guest = True  # type: ignore[attr-defined]  # see `environment`
    spec.loader.exec_module(package)
    from ullage.sandbox.child import main

    main(entry, channel, options)


def problem() -> str:
    """Return the reason why this Python cannot be used, or an empty text."""
    here = sys.executable
    if sys.version_info[:2] < OLDEST_PYTHON:
        return f"Python must be {dotted(OLDEST_PYTHON)} or newer; {here} is Python {dotted(sys.version_info[:3])}"
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch must be installed; {here} has none. Type: {here} -m pip install torch"
    from importlib.metadata import PackageNotFoundError, version

    try:
        build = version("torch")
    except PackageNotFoundError:  # a build that was not installed: its error will tell
        return ""
    if tuple(int(part) for part in build.split(".")[:2]) < OLDEST_TORCH:
        wanted = f"'torch>={dotted(OLDEST_TORCH)}'"
        return (
            f"PyTorch must be {dotted(OLDEST_TORCH)} or newer; {here} has {build}. Type: {here} -m pip install {wanted}"
        )
    return ""


def dotted(version: tuple) -> str:  # type: ignore[type-arg]
    return ".".join(str(part) for part in version)


def _say(channel: str, message: dict) -> None:  # type: ignore[type-arg]
    os.write(int(channel), json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    begin(*sys.argv[1:])
