"""The plan in CONTRIBUTING.md: rooms import only what is above them, in no circle; their names are true."""

import ast
import functools
import graphlib
import importlib
import inspect
import pickle
import re
from operator import attrgetter
from pathlib import Path

from tests.loops import for_each

import ullage

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ullage"
LAB = ROOT / "lab" / "src" / "ullage_lab"  # a distribution of its own: it imports the other one, never the reverse

# From the ground up: a room imports itself and the rooms before it. A longer name is a room inside another one.
ROOMS = [
    "errors",
    "units",
    "text",
    "fields",
    "home",
    "lazy",
    "hardware",
    "performance",
    "allocator",
    "sandbox",
    "virtual",
    "jobs",
    "estimation",
    "estimation.estimators",
    "estimation.asking",
    "estimation.largest_batch",
    "estimation.planning",
    "estimation.sharing",
    "estimation.jobs",
    "measuring",
    "pytest_plugin",
    "manager.monitor",
    "manager.placement",
    "manager.policy_files",
    "manager.job_words",
    "manager.report_words",
    "manager.simulation",
    "manager",
    "manager.page",
    "manager.slurm",
    "cli",
    "__main__",
    "ullage_lab.networks",
    "ullage_lab.calls",
    "ullage_lab.following",
    "ullage_lab.forking",
    "ullage_lab.estimators",
    "ullage_lab.clean",
    "ullage_lab.judge",
    "ullage_lab.draw",
    "ullage_lab.measure",
    "ullage_lab.train",
    "ullage_lab.cli",
]
FACE = "__init__"  # the public names: loaded on first use, so it may name every room


def name_of(file: Path) -> str:
    """`src/ullage/estimation/scripts/child.py` is `estimation.scripts.child`; the lab's begin with `ullage_lab`."""
    inside = file.is_relative_to(SOURCE)
    parts = list(file.relative_to(SOURCE if inside else LAB.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def path_of(room: str) -> Path:
    """The folder or the module of a room, without its suffix."""
    return (LAB.parent if room.startswith(LAB.name) else SOURCE) / room.replace(".", "/")


def module_of(name: str) -> str:
    """The name by which Python imports it."""
    return "ullage" if name == FACE else name if name.startswith(LAB.name) else f"ullage.{name}"


FILES = {
    name_of(file): file
    for source in (SOURCE, LAB)
    for file in sorted(source.rglob("*.py"))
    if file.name != "sitecustomize.py"
}


def room_of(module: str) -> str | None:
    """The innermost room that a module belongs to."""
    inside = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(inside, key=len, default=None)


@functools.cache
def imported(text: str) -> set[str]:
    """The modules of Ullage that a file imports, wherever in it and for whatever reason."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] in ("ullage", LAB.name):
                start = int(parts[0] == "ullage")
                longest = (".".join(parts[start:end]) for end in range(len(parts), start, -1))
                found.add(next((module for module in longest if module in FILES), FACE))
    return found


def below(module: str, text: str) -> set[str]:
    room = room_of(module)
    assert room is not None, f"{module} is in no room: add it to the list here and to the plan"
    return {other for other in imported(text) if other != FACE and ROOMS.index(str(room_of(other))) > ROOMS.index(room)}


MODULES = [name for name in FILES if name not in (FACE, LAB.name)]


@for_each(MODULES)
def test_module_imports_only_from_its_room_and_those_before_it(module: str) -> None:
    assert not below(module, FILES[module].read_text())


def test_an_import_of_a_later_room_is_seen() -> None:
    assert below("allocator.x", "def f():\n    from ullage.cli import main\n    import ullage.units") == {"cli.main"}
    assert below("cli.x", "from ullage_lab.judge import truth") == {"ullage_lab.judge.truth"}


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: imported(file.read_text()) - {name, FACE} for name, file in FILES.items() if name != FACE}
    assert not circle(graph)
    assert circle({"a": {"b"}, "b": {"a"}})


def test_the_simulator_and_the_manager_do_not_know_each_other() -> None:
    for room, other in (("manager.simulation", "manager"), ("manager", "manager.simulation")):
        files = [file for module, file in FILES.items() if room_of(module) == room]
        used = {name for file in files for name in imported(file.read_text())}
        assert {room_of(name) for name in used} >= {room, "manager.placement"}
        assert other not in {room_of(name) for name in used}


def test_every_room_exists_and_is_in_the_plan() -> None:
    plan = (ROOT / "CONTRIBUTING.md").read_text()
    for room in ROOMS:
        path = path_of(room)
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"there is no room {room}"
    for folder in [path_of(room) for room in ROOMS if "." not in room or room.startswith(LAB.name)]:
        known = not folder.is_dir() or re.search(rf"^\s*{folder.name}/", plan, re.M)
        assert known, f"{folder.name}/ is not in CONTRIBUTING.md"


@for_each(sorted({file.parent for file in FILES.values()}), name=attrgetter("name"))
def test_a_folder_says_what_belongs_in_it(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text and len(text.splitlines()) > 1, f"{folder.name}/__init__.py: say in two lines what belongs here"


def test_no_module_shares_the_name_of_a_public_one() -> None:
    public = set(ullage.__all__) - {"__version__"}
    assert not {name for name in FILES if "." not in name} & public
    for name in FILES:
        if "." not in name and name not in ("__main__", "pytest_plugin", FACE, LAB.name):
            importlib.import_module(f"ullage.{name}")
    for name in public:
        assert getattr(ullage, name) is getattr(ullage, name)
    assert inspect.isfunction(ullage.estimate)
    assert "gpu" in inspect.signature(ullage.estimate).parameters
    assert pickle.loads(pickle.dumps(ullage.estimate)) is ullage.estimate


def classes(texts: dict[str, str]) -> dict[str, list[str]]:
    """The public classes, each with the modules that define it."""
    found: dict[str, list[str]] = {}
    for module, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return found


def test_the_name_of_a_class_means_one_thing() -> None:
    everywhere = classes({name: file.read_text() for name, file in FILES.items()})
    assert {name: modules for name, modules in everywhere.items() if len(modules) > 1} == {}
    assert classes({"a": "class X: ...", "b": "class X: ..."}) == {"X": ["a", "b"]}
