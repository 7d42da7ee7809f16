"""The `nvidia-smi` that a script finds while it is estimated: it describes the virtual GPU, on which nothing runs yet.

Run by its path, with a card as JSON before the arguments, by any Python: it needs the standard library only.
"""

import json
import re
import sys
import time
from typing import Any

MIB = 1 << 20
UNKNOWN = "[N/A]"
UNITS = {"memory.": "MiB", "utilization.": "%", "power.": "W", "clocks.": "MHz", "fan.": "%"}
ANSWERED = re.compile(r"--(?:query-gpu|query-compute-apps|format|id)=|-(?:L|i)$|--(?:list-gpus|id)$")


def main(card: dict[str, Any], words: list[str]) -> int:
    """Print the requested values; return the exit code."""
    options = read(words)
    if options is None:
        print(f"nvidia-smi of a virtual GPU: cannot answer {' '.join(words)}", file=sys.stderr)
        return 2
    cards = [number for number in range(card["count"]) if options.get("id") in (None, str(number), card["uuid"])]
    if not cards:
        print("No devices were found")
        return 6
    if "list-gpus" in options:
        for number in cards:
            print(f"GPU {number}: {card['name']} (UUID: {card['uuid']})")
    elif "query-compute-apps" in options:
        table(options, options["query-compute-apps"].split(","), [])
    elif "query-gpu" in options:
        names = options["query-gpu"].split(",")
        table(options, names, [[value(card, number, name.strip()) for name in names] for number in cards])
    else:
        print(f"NVIDIA-SMI {card['driver']}   Driver Version: {card['driver']}   CUDA Version: {card['cuda']}")
        for number in cards:
            print(f"| {number}  {card['name']} | {card['bus']} | 0MiB / {card['total'] // MIB}MiB | 0% Default |")
        print("No running processes found")
    return 0


def read(words: list[str]) -> dict[str, str] | None:
    """Return the options by name, or `None` if one of them has no answer."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not ANSWERED.match(word):
            return None
        name, equals, text = word.lstrip("-").partition("=")
        name = {"L": "list-gpus", "i": "id"}.get(name, name)
        if name == "id" and not equals:
            text = rest.pop(0) if rest else ""
        options[name] = text
    return options


def value(card: dict[str, Any], number: int, name: str) -> Any:
    free, total = card["usable"], card["total"]
    known = {
        "index": number,
        "count": card["count"],
        "name": card["name"],
        "gpu_name": card["name"],
        "uuid": card["uuid"],
        "gpu_uuid": card["uuid"],
        "driver_version": card["driver"],
        "compute_cap": card["capability"],
        "pci.bus_id": card["bus"],
        "gpu_bus_id": card["bus"],
        "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
        "pstate": "P0",
        "display_active": "Disabled",
        "display_mode": "Disabled",
        "memory.total": total // MIB,
        "memory.reserved": (total - free) // MIB,
        "memory.used": 0,
        "memory.free": free // MIB,
        "utilization.gpu": 0,
        "utilization.memory": 0,
        "temperature.gpu": card["temperature"],
        "power.draw": f"{card['power']:.2f}",
        "power.limit": f"{card['power_limit']:.2f}",
    }
    return known.get(name, UNKNOWN)


def table(options: dict[str, str], names: list[str], rows: list[list[Any]]) -> None:
    """Print rows in the format of --format: csv with or without its header and units."""
    form = options.get("format", "csv").split(",")
    units = ["" if "nounits" in form else unit_of(name.strip()) for name in names]
    if "noheader" not in form:
        print(", ".join(name.strip() + (f" [{unit}]" if unit else "") for name, unit in zip(names, units, strict=True)))
    for row in rows:
        cells = zip(row, units, strict=True)
        print(", ".join(f"{cell} {unit}" if unit and cell != UNKNOWN else f"{cell}" for cell, unit in cells))


def unit_of(name: str) -> str:
    return next((unit for begin, unit in UNITS.items() if name.startswith(begin)), "")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
