"""Collects Ullage's answers, case by case, and compares those of two versions.

    python benchmarks/answers.py ask [OUT] [--scripts ROOT] [--only PATTERN]    # make answers
    python benchmarks/answers.py diff OLD NEW                                   # make answers-diff OLD=... NEW=...

`ask` writes a sorted text file, by default build/answers.txt: a line for each case and field. The cases are the 306
measured runs that are shipped, 300 of the 1,192 random networks (drawn with a fixed seed), the 48 networks with
`cudnn.benchmark`, all examples, and the commands in the documentation that are recorded (`docs/record.py`); those that
need Slurm are left out where Slurm is not installed. With `--scripts ROOT` come the public scripts whose repository is
in ROOT, see `accuracy/scripts.py`. Two idle cores take about half an hour without these. After an interruption the same
command goes on where it was, unless a file or a package has changed since.

An answer may not depend on what came before. So each case is asked for three times: in a process that was asked nothing
before (`alone`), and twice in one that has answered other cases (`first`, `again`). For a script, `alone` is the
command line; all that Ullage starts for it is new each time, so public scripts and printed text are only asked for
once. Where the three differ, all of them are written, and the command names the cases and fails.

`diff` says what differs between two such files, by case and field, and fails if anything does.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
SAMPLE, SEED = 300, 20261118
FIGURES = ("peak_allocated", "peak_reserved", "process_memory", "upper")
PROGRAMS = {
    "draw_report.py": "folder=$(mktemp -d) && python examples/draw_report.py $folder >/dev/null && cat $folder/*.svg",
    "draw_timeline.py": "python examples/draw_timeline.py /dev/stdout",
    "first_estimate.py": "python examples/first_estimate.py",
    "my_policy.py": "ullage simulate --generate 30 --seed 1 --gpus 2xA100-40GB --policy examples/my_policy.py:choose",
}
# How long Ullage took, and the names of elements that Rich makes from all that a picture shows.
PASSING = re.compile(r"(?<=followed in ).*?(?=,)|(?<=followed&#160;in&#160;).*?(?=,)|(?<=terminal-)\d+")
CASES_ARE_IN = ("src/ullage", "examples", "docs", "benchmarks", "README.md")

if __name__ != "__main__":  # what all processes that answer are forked from: it imports, and is asked nothing
    import ullage
    from ullage.jobs import Model, train

    ullage.estimate  # noqa: B018  is imported when it is named


def cases(scripts: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    networks = []
    for file in sorted(DATA.glob("h200_*.jsonl.gz")):
        if file.name in ("h200_runs.jsonl.gz", "h200_fresh_tried.jsonl.gz"):
            yield from of_file(file)
        elif file.name.startswith("h200_fresh"):
            networks += of_file(file)
    yield from random.Random(SEED).sample(networks, SAMPLE)
    for path in sorted((ROOT / "examples" / "scripts").glob("*.py")):
        yield f"examples/scripts/{path.name}", {"script": f"examples/scripts/{path.name}", "args": [], "cwd": str(ROOT)}
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"examples/{path.name}", {"program": PROGRAMS[path.name]}
    for page in record().pages():
        if "<!-- record" in without_slurm(page):
            yield str(page.relative_to(ROOT)), {"page": page}
    for run in [] if scripts is None else program("benchmarks/accuracy/scripts.py").public_runs(scripts):
        yield f"public_scripts/{run['id']}", {"once": True, **run}


def of_file(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the runs of a file of measurements, each with a name."""
    from ullage.jobs import read_rows

    return [(f"{file.name.partition('.')[0]}/{row['id']}", {"row": row}) for row in read_rows(file) if "id" in row]


def program(path: str) -> Any:
    """Another program of the project, such as the one that runs the commands in the documentation."""
    sys.path[:0] = [str((ROOT / path).parent)]
    return importlib.import_module(Path(path).stem)


def record() -> Any:
    """The program that runs the commands in the documentation."""
    return program("docs/record.py")


def has_slurm() -> bool:
    return shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin") is not None


def without_slurm(page: Path) -> str:
    """Return a page, without the marks of commands for Slurm if it is not installed."""
    return page.read_text() if has_slurm() else page.read_text().replace("<!-- record on ", "<!-- on ")


def answer(case: dict[str, Any], way: str) -> dict[str, Any]:
    try:
        if "row" in case:
            configuration = Model.from_row(case["row"])
            return figures(ullage.estimate(lambda: train(configuration), gpu="H200").to_dict(False, False))
        if "script" in case:
            return of_script(case, by_command=way == "alone")
        return {name: PASSING.sub("…", text).splitlines() for name, text in printed(case).items()}
    except Exception as error:  # an error is an answer, too
        return {"failed": str(error).partition("\n")[0] or type(error).__name__}


def figures(estimate: dict[str, Any]) -> dict[str, Any]:
    utilization = estimate["utilization"] or {}
    return {name: estimate[name] for name in (*FIGURES, "notes")} | {"step_s": utilization.get("step_s")}


def of_script(case: dict[str, Any], by_command: bool) -> dict[str, Any]:
    """Return a script's figures, from the command that a user would type or from the function."""
    os.chdir(case["cwd"])
    if not by_command:
        return figures(ullage.estimate(case["script"], args=case["args"], gpu="H200").to_dict(False, False))
    places = [os.environ.get("PYTHONPATH"), case.get("env", {}).get("PYTHONPATH")]
    env = {**os.environ, **case.get("env", {}), "PYTHONPATH": os.pathsep.join(filter(None, places))}
    words = [sys.executable, "-m", "ullage", "estimate", case["script"], "--gpu", "H200", "--json", "--", *case["args"]]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return figures(json.loads(done.stdout))
    messages = [line.removeprefix("ullage: ") for line in done.stderr.splitlines() if line.startswith("ullage: ")]
    return {"failed": messages[0] if messages else f"exit code {done.returncode}"}


def printed(case: dict[str, Any]) -> dict[str, str]:
    """Return the output of a program, or of the recorded commands of a page, each block by its number."""
    if "program" in case:
        return {"printed": record().printed(case["program"])}
    blocks = record().BLOCK.findall(record().record(without_slurm(case["page"])))
    return {f"block {number:02}": block[2] for number, block in enumerate(blocks, 1)}


class Asker:
    """A process that answers. If it ends without an answer, a new one gets the next question."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.answers"])  # not "__main__": CPython has that since 3.14
        self._process: Any = None

    def ask(self, case: dict[str, Any], way: str) -> dict[str, Any]:
        if self._process is None:
            self._pipe, there = self._context.Pipe()
            self._process = self._context.Process(target=serve, args=(there,))
            self._process.start()
            there.close()
        try:
            self._pipe.send((case, way))
            answer: dict[str, Any] = self._pipe.recv()
            return answer
        except (EOFError, OSError):
            return {"failed": f"the process ended with {self.close()}"}

    def close(self) -> int | None:
        """End the process; returns its exit code."""
        if self._process is None:
            return None
        self._pipe.close()
        process, self._process = self._process, None
        process.join()
        return int(process.exitcode)


def serve(pipe: Any) -> None:
    while True:
        try:
            case, way = pipe.recv()
        except EOFError:  # no more questions
            return
        os.chdir(ROOT)
        pipe.send(answer(case, way))


def three(case: dict[str, Any], asker: Asker) -> dict[str, dict[str, Any]]:
    """Return the answers of a fresh process, and of a reused one."""
    own = Asker()
    answers = {"alone": own.ask(case, "alone")}
    own.close()
    if "row" in case or ("script" in case and "once" not in case):
        answers |= {way: asker.ask(case, way) for way in ("first", "again")}
    return answers


def ask(out: Path, wanted: dict[str, dict[str, Any]], workers: int) -> dict[str, dict[str, Any]]:
    """Return the answers to all cases, some perhaps from the file of an interrupted run next to `out`."""
    from ullage.cli.progress import following

    part = out.with_name(f"{out.name}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    state, so_far = fingerprint(), part.read_text() if part.exists() else ""
    lines = so_far[: so_far.rfind("\n") + 1].splitlines()
    if lines[:1] != [state]:
        lines = [state]
    part.write_text("".join(f"{line}\n" for line in lines))
    by_case = {name: answers for name, answers in map(json.loads, lines[1:]) if name in wanted}
    missing = [name for name in wanted if name not in by_case]
    random.Random(SEED).shuffle(missing)  # so that different cases precede each case
    idle: queue.SimpleQueue[Asker] = queue.SimpleQueue()
    askers = [Asker() for _ in range(workers)]
    for each in askers:
        idle.put(each)

    def ask_one(name: str) -> str:
        asker = idle.get()
        by_case[name] = three(wanted[name], asker)
        idle.put(asker)
        return name

    with following("asking", len(missing), forks=True) as going, part.open("a") as file:
        pool = ThreadPoolExecutor(workers)
        try:
            for done in as_completed([pool.submit(ask_one, name) for name in missing]):
                file.write(json.dumps([done.result(), by_case[done.result()]]) + "\n")
                file.flush()
                going.step(done.result())
        finally:
            pool.shutdown(cancel_futures=True)
            for each in askers:
                each.close()
    return by_case


def fingerprint() -> str:
    """Return a key of what answers depend on: this project's files, and the packages."""
    packages = sorted(f"{package.name} {package.version}" for package in importlib.metadata.distributions())
    digest = hashlib.sha256(json.dumps([sys.version, packages]).encode())
    for top in CASES_ARE_IN:
        for path in sorted([ROOT / top, *(ROOT / top).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)} ".encode() + path.read_bytes())
    return digest.hexdigest()


def written(by_case: dict[str, dict[str, Any]], places: dict[str, str]) -> tuple[str, list[str]]:
    """Return the text of the file, and the cases whose answer depends on earlier ones."""
    lines, unsteady = [], defaultdict(list)
    for name, answers in by_case.items():
        for field in sorted({field for fields in answers.values() for field in fields}):
            values = {way: fields.get(field) for way, fields in answers.items()}
            value = values["alone"]
            if any(other != value for other in values.values()):
                value = values
                unsteady[name].append(field)
            lines.append(f"{name}\t{field}\t{json.dumps(value, ensure_ascii=False)}\n")
    text = "".join(sorted(lines))
    for place, word in places.items():
        text = text.replace(place, word)
    return text, [f"{name}: {', '.join(fields)}" for name, fields in sorted(unsteady.items())]


def read(file: Path) -> dict[tuple[str, str], Any]:
    lines = (line.split("\t", 2) for line in file.read_text().splitlines())
    return {(name, field): json.loads(value) for name, field, value in lines}


def diff(old: Path, new: Path) -> bool:
    """Print the differences; return whether there are any."""
    before, after = read(old), read(new)
    differ = sorted(key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...))
    for key in differ:
        was, now = before.get(key, ...), after.get(key, ...)
        if isinstance(was, list) and isinstance(now, list):
            lines = list(difflib.unified_diff([*map(str, was)], [*map(str, now)], n=0, lineterm=""))[2:]
            print(*key, "\n".join(["", *(f"    {line}" for line in lines if not line.startswith("@@"))]), sep=": ")
        else:
            words = ["not there" if value is ... else json.dumps(value) for value in (was, now)]
            print(*key, " -> ".join(words), sep=": ")
    names, cases = {name for name, _ in before | after}, {name for name, _ in differ}
    fields = Counter(field for _, field in differ)
    which = ", ".join(f"{field} in {count}" for field, count in sorted(fields.items()))
    print(f"{len(cases)} of {len(names)} cases differ" + (f": {which}" if differ else ""))
    return bool(differ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("ask")
    part.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "answers.txt")
    part.add_argument(
        "--scripts",
        type=lambda text: Path(text) if text else None,
        metavar="ROOT",
        help="the folder with the public scripts",
    )
    part.add_argument("--runs", type=Path, metavar="FILE", help="ask for the runs in this file, and for nothing else")
    part.add_argument("--only", default="*", metavar="PATTERN", help="only cases with such names, as 'h200_runs/*'")
    part.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="so many cases at once")
    part = parts.add_parser("diff")
    part.add_argument("old", type=Path)
    part.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.what == "diff":
        sys.exit(diff(options.old, options.new))
    os.chdir(ROOT)  # where models of files are looked for
    os.environ |= {"ULLAGE_PYTORCH": "2.11", "OMP_NUM_THREADS": "1"}  # as the shipped runs were measured
    with tempfile.TemporaryDirectory() as home:
        os.environ["ULLAGE_HOME"] = home  # no prices, GPUs and answers of this user
        scripts = options.scripts and options.scripts.resolve()
        wanted = dict(of_file(options.runs.resolve()) if options.runs else cases(scripts))
        wanted = {name: case for name, case in wanted.items() if fnmatch(name, options.only)}
        by_case = ask(options.out.resolve(), wanted, options.workers)
    places = {str(ROOT): "{root}"} | ({str(scripts): "{scripts}"} if scripts else {})
    text, unsteady = written(by_case, places)
    options.out.write_text(text)
    options.out.with_name(f"{options.out.name}.part").unlink()
    print(f"{len(by_case)} cases are in {options.out}")
    if not options.runs:
        if scripts is None:
            print("public scripts are left out: --scripts names no folder")
        if not has_slurm():
            print("commands for Slurm are left out: it is not installed")
    for line in unsteady:
        print(f"depends on what came before: {line}")
    sys.exit(bool(unsteady))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: type the same command to go on where it was")
