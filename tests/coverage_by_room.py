"""`make coverage`: what tests reach of each room, a folder of src/ullage, and which functions none reaches.

Prints a table and the largest of these functions; all of them are in build/coverage/unreached.txt.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "coverage"
SHOWN = 20


def room_of(path: str) -> str:
    """The first folder below src/ullage; files that lie in none count together."""
    inside = Path(path).parts[Path(path).parts.index("ullage") + 1 :]
    return inside[0] if len(inside) > 1 else "(no room)"


def main() -> None:
    """Combine what the processes wrote, and print."""
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, check=True)
    subprocess.run([*coverage, "json", "--quiet", "-o", str(FOLDER / "lines.json")], cwd=ROOT, check=True)
    files = json.loads((FOLDER / "lines.json").read_text())["files"]
    lines, covered = defaultdict(int), defaultdict(int)
    unreached = []  # room, number of lines, and where
    for path, file in files.items():
        room = room_of(path)
        lines[room] += file["summary"]["num_statements"]
        covered[room] += file["summary"]["covered_lines"]
        for name, function in file["functions"].items():
            missing = function["missing_lines"]
            if name and missing and not function["executed_lines"]:
                unreached.append((room, len(missing), f"{path}:{missing[0]}-{missing[-1]} {name}"))
    unreached.sort(key=lambda each: (each[0], -each[1], each[2]))
    (FOLDER / "unreached.txt").write_text(
        "".join(f"{room}: {size} lines, {where}\n" for room, size, where in unreached)
    )
    print(f"{'room':<16}{'lines':>8}{'covered':>9}{'%':>7}")
    for room in sorted(lines):
        print(f"{room:<16}{lines[room]:>8}{covered[room]:>9}{100 * covered[room] / max(lines[room], 1):>7.1f}")
    total, reached = sum(lines.values()), sum(covered.values())
    print(f"{'all':<16}{total:>8}{reached:>9}{100 * reached / max(total, 1):>7.1f}")
    print(f"\nNo test reaches {len(unreached)} functions; all are in build/coverage/unreached.txt. The largest:")
    for room, size, where in sorted(unreached, key=lambda each: -each[1])[:SHOWN]:
        print(f"{size:>4} lines  {room}: {where}")


if __name__ == "__main__":
    main()
