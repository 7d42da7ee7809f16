"""`make test-versions`: the virtual GPU's tests and estimates of example scripts, with every release of PyTorch.

An environment for each release is made in .venvs/ (with uv, where it is installed, else with venv and pip), and kept.
`--only 2.6 2.15` takes a part, and words after `--` go to pytest: `-- -k "not shared_card"`. pip and uv read their
usual variables, such as `PIP_EXTRA_INDEX_URL` for an index of CPU builds, a tenth of the size. Prints a table,
and exits with 1 if anything failed.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venvs"
# The last patch of each release, and a Python that it has builds for: old and new ones in turn.
RELEASES = {
    "2.6.0": "3.11",
    "2.7.1": "3.12",
    "2.8.0": "3.11",
    "2.9.1": "3.13",
    "2.10.0": "3.11",
    "2.11.0": "3.12",
    "2.12.1": "3.13",
    "2.13.0": "3.12",
    "2.14.1": "3.12",
    "2.15.0": "3.13",
}
TOOLS = ["pytest>=8", "pytest-timeout>=2.4", "hypothesis>=6.100", "psutil>=5.9"]
SCRIPTS = ["bf16_transformer.py", "rnn_language_model.py"]
HEADER = ["PyTorch", "Python", "platform", "passed", "failed", "skipped", "example scripts"]


def python_of(version: str) -> str | None:
    """A Python of this version: on the path, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else None


def environment(release: str, python: str) -> Path:
    """The interpreter of the environment, made if it is not there. PyTorch first and alone, as in the Makefile."""
    folder = FOLDER / f"torch-{release}-py{python}"
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        base = python_of(python)
        if base is None:
            raise LookupError(f"no Python {python} here")
        uv = shutil.which("uv")
        make = [uv, "venv", "--quiet", "--clear", "--python", base] if uv else [base, "-m", "venv", "--clear"]
        subprocess.run([*make, str(folder)], check=True)
        add = [uv, "pip", "install", "--python", str(interpreter)] if uv else [str(interpreter), "-m", "pip", "install"]
        for what in ([f"torch=={release}"], ["--editable", str(ROOT), *TOOLS]):
            subprocess.run([*add, "--quiet", *what], check=True)
        ready.touch()
    return interpreter


def tested(interpreter: Path, report: Path, words: list[str]) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of the virtual GPU."""
    report.unlink(missing_ok=True)
    command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, "tests/virtual", *words], cwd=ROOT)
    if not report.exists():
        return 0, 1, 0
    suite = ElementTree.parse(report).getroot()[0]
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - failed - skipped, failed, skipped


def estimated(interpreter: Path) -> tuple[str, bool]:
    """What the example scripts take on an H200, and whether all could be estimated."""
    found, good = [], True
    for script in SCRIPTS:
        command = [str(interpreter), "-c", "from ullage.cli import main; main()"]
        command += ["estimate", f"examples/scripts/{script}", "--gpu", "H200", "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        try:
            found.append(f"{json.loads(done.stdout)['peak_reserved'] / 2**20:.0f} MiB")
        except (ValueError, KeyError, TypeError):
            print(done.stderr, file=sys.stderr)
            found.append("failed")
            good = False
    return ", ".join(found), good


def row_of(release: str, python: str, words: list[str]) -> tuple[list[str], bool]:
    """A row of the table, and whether it is good."""
    try:
        interpreter = environment(release, python)
    except (LookupError, subprocess.CalledProcessError) as error:
        return [release, python, "", "", "", "", f"not tested: {error}"], False
    build = subprocess.run(
        [str(interpreter), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    passed, failed, skipped = tested(interpreter, FOLDER / f"{release}.xml", words)
    takes, good = estimated(interpreter)
    where = f"{platform.system()} {platform.machine()}"
    return [build or release, python, where, str(passed), str(failed), str(skipped), takes], good and not failed


def main() -> int:
    """Test the releases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="RELEASE", help="releases, such as 2.6 2.15")
    parser.add_argument("words", nargs="*", metavar="WORD", help="after --: words for pytest")
    given = parser.parse_args()
    wanted = given.only
    FOLDER.mkdir(exist_ok=True)
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    rows, good = [], True
    for release, python in RELEASES.items():
        if wanted and release.rpartition(".")[0] not in wanted and release not in wanted:
            continue
        row, fine = row_of(release, python, given.words)
        rows.append(row)
        good = good and fine
        print("| " + " | ".join(row) + " |", flush=True)
    print("\n| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0 if rows and good else 1


if __name__ == "__main__":
    sys.exit(main())
