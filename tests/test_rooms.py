"""Every room imports only rooms above it in the list of docs/design.md."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "ullage"

ROOMS = [
    "errors",
    "units",
    "gpus",
    "allocator",
    "virtual",
    "monitor",
    "workload",
    "estimate",
    "measure",
    "estimators",
    "utilization",
    "learn",
    "placement",
    "simulate",
    "manager",
    "slurm",
    "cli",
]


def imported_rooms(file: Path) -> set[str]:
    """The rooms that a file imports, in whatever way it writes it."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ullage" and len(parts) > 1 and parts[1] in ROOMS:
                rooms.add(parts[1])
    return rooms


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in ROOMS)


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_above_it(file: Path) -> None:
    room = room_of(file)
    assert room in ROOMS, f"{room} is in no list: add it to docs/design.md and here"
    below = {other for other in imported_rooms(file) if ROOMS.index(other) > ROOMS.index(room)}
    assert not below, f"{file.relative_to(SOURCE)} imports {', '.join(sorted(below))}, below {room}"


def test_the_check_sees_an_import_of_a_lower_room(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("from ullage import cli\nimport ullage.estimation.result\n")
    assert imported_rooms(file) == {"cli", "estimate"}
