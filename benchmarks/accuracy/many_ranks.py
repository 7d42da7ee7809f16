"""Rank 0 of many: DDP, FSDP, tensor parallelism and mixtures of them, drawn at random; of pipelines any rank.

    python benchmarks/accuracy/many_ranks.py draw --count 60 --seed 1 > ranks.jsonl
    python benchmarks/accuracy/many_ranks.py measure ranks.jsonl --out ranks_h200.jsonl.gz

The second runs each on a GPU in a process of its own. PyTorch's fake process group has as many ranks as the line says
and sends nothing, so one GPU is asked for what the first of them would be; DDP has a real group of one. It needs a GPU,
PyTorch and transformers, and nothing else of this project.

    python benchmarks/accuracy/many_ranks.py compare ranks_h200.jsonl.gz

estimates the same trainings without a GPU and prints how far off the estimates are, by strategy.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import sys
import time
from pathlib import Path

from drawn_ranks.drawing import GIB, MOST, STRATEGIES, draw, draw_pipelines
from drawn_ranks.measuring import measure, measure_one
from drawn_ranks.models import Row
from drawn_ranks.training import train


def compare(rows: list[Row], out: Path | None) -> None:
    """Estimate each and print how far off the estimates are."""
    from ullage.estimation.asking import estimate

    results = []
    for row in rows:
        begin = time.perf_counter()
        result: Row = {key: row.get(key) for key in ("id", "strategy", "peak_alloc", "peak_reserved", "failed", "oom")}
        try:
            found = estimate(
                functools.partial(train, row), gpu="H200", world_size=row["ranks"], rank=row.get("rank", 0)
            )
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            result |= {
                "allocated": found.peak_allocated,
                "reserved": found.peak_reserved,
                "upper": found.upper,
                "process": found.process_memory,
                "context": found.breakdown["context"],
                "connections": sum(entry["adds"] for entry in found.assumed if "NCCL" in entry["what"]),
            }
        result["seconds"] = round(time.perf_counter() - begin, 2)
        if row.get("nvml_end") and row.get("peak_reserved"):
            result["process_truth"] = row["nvml_end"] - row["end_reserved"] + row["peak_reserved"]
        results.append(result)
        print(json.dumps(result), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    print(report(results))


def report(results: list[Row]) -> str:
    """A table of errors by strategy."""
    lines = ["strategy    runs  given  exact  median   90 %   worst  alloc. exact  upper holds"]
    judged = [row for row in results if row.get("peak_reserved") and not row.get("oom")]
    for strategy in ("all", *sorted({row["strategy"] for row in judged})):
        some = [row for row in judged if strategy in ("all", row["strategy"])]
        given = [row for row in some if row.get("reserved")]
        errors = sorted(abs(row["reserved"] / row["peak_reserved"] - 1) for row in given)
        if not errors:
            continue
        exact = sum(row["reserved"] == row["peak_reserved"] for row in given) / len(given)
        allocated = sum(row["allocated"] == row["peak_alloc"] for row in given) / len(given)
        bounded = [row for row in given if row.get("process_truth")]
        holds = sum(map(_holds, bounded))
        lines.append(
            f"{strategy:10} {len(some):5} {len(given):6} {exact:6.0%} {errors[len(errors) // 2]:7.2%} "
            f"{errors[min(len(errors) - 1, int(0.9 * len(errors)))]:6.2%} {errors[-1]:7.2%} {allocated:13.0%} "
            f"{holds:7} of {len(bounded)}"
        )
    return "\n".join(lines)


def _holds(row: Row) -> bool:
    """Whether the bound holds. A fake group takes nothing of what is counted for NCCL, so that must not help."""
    if row["strategy"] == "ddp":
        return bool(row["upper"] >= row["process_truth"])
    return bool(row["upper"] - row["context"] - row.get("connections", 0) >= row["peak_reserved"])


def _read(file: Path) -> list[Row]:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--only", choices=(*STRATEGIES, "pp"))
    drawing.add_argument("--limited", type=float, default=0.8, help="the share of FSDP1 with limit_all_gathers")
    drawing.add_argument("--most", type=float, default=MOST / GIB, help="GiB that a training may take, roughly")
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--at-once", type=int, default=8)
    measuring.add_argument("--alone", nargs="*", default=(), help="strategies that have the card to themselves")
    measuring.add_argument("--rest", type=float, default=60.0, help="seconds at the end when they do not")
    measuring.add_argument("--histories", type=Path)
    measuring.add_argument("--seconds", type=float, default=3600.0)
    commands.add_parser("one").add_argument("--history")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--out", type=Path)
    comparing.add_argument("--only", help="one strategy, or the id of one line")
    comparing.add_argument("--part", default="0/1", help="every Nth line, as 3/8: for several processes at once")
    reporting = commands.add_parser("report", help="the table of what `compare --out` has written")
    reporting.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "draw":
        most = int(given.most * GIB)
        if given.only == "pp":
            rows = draw_pipelines(given.count, given.seed, most)
        else:
            rows = draw(given.count, given.seed, most, given.only, given.limited)
        for row in rows:
            print(json.dumps(row))
    elif given.command == "measure":
        measure(_read(given.file), given)
    elif given.command == "one":
        measure_one(json.loads(sys.stdin.readline()), given.history)
    elif given.command == "report":
        print(report(_read(given.file)))
    else:
        first, step = map(int, given.part.split("/"))
        rows = [row for row in _read(given.file) if not given.only or given.only in (row["id"], row["strategy"])]
        compare(rows[first::step], given.out)


if __name__ == "__main__":
    main()
