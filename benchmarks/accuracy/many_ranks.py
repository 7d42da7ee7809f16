"""Rank 0 of many: DDP, FSDP, tensor parallelism and mixtures of them, drawn at random; of pipelines any rank.

    python benchmarks/accuracy/many_ranks.py compare benchmarks/data/ranks_h200_seventh.jsonl.gz

Each line of the file is a training that ran on an H200 in a process of its own. PyTorch's fake process group has as
many ranks as the line says and sends nothing, so one GPU is asked for what the first of them would be; DDP had a real
group of one. The same trainings are estimated without a GPU; printed is how far off the estimates are, by strategy.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path

from rank_trainings.models import Row
from rank_trainings.training import train
from ullage.estimation.asking import estimate
from ullage.jobs import read_rows
from ullage.jobs.job import Ranks


def compare(rows: list[Row]) -> None:
    """Estimate each training and print the errors."""
    results = []
    for row in rows:
        begin = time.perf_counter()
        result: Row = {key: row.get(key) for key in ("id", "strategy", "peak_alloc", "peak_reserved", "failed", "oom")}
        try:
            ranks = Ranks(row["ranks"], follow=(row.get("rank", 0),))
            answer = estimate(functools.partial(train, row), gpu="H200", ranks=ranks)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            result |= {
                "allocated": answer.peak_allocated,
                "reserved": answer.peak_reserved,
                "upper": answer.upper,
                "process": answer.process_memory,
                "context": answer.breakdown["context"],
                "connections": sum(entry["adds"] for entry in answer.assumed if "NCCL" in entry["what"]),
            }
        result["seconds"] = round(time.perf_counter() - begin, 2)
        if row.get("nvml_end") and row.get("peak_reserved"):
            result["process_truth"] = row["nvml_end"] - row["end_reserved"] + row["peak_reserved"]
        results.append(result)
        print(json.dumps(result), flush=True)
    print(report(results))


def report(results: list[Row]) -> str:
    """Return a table of errors by strategy."""
    lines = ["strategy    runs  given  exact  median   90%   worst  alloc. exact  upper holds"]
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
    """Whether the bound holds, without the memory counted for NCCL, which a fake group does not use."""
    if row["strategy"] == "ddp":
        return bool(row["upper"] >= row["process_truth"])
    return bool(row["upper"] - row["context"] - row.get("connections", 0) >= row["peak_reserved"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="one strategy, or the id of one line")
    given = parser.parse_args()
    compare([row for row in read_rows(given.file) if not given.only or given.only in (row["id"], row["strategy"])])


if __name__ == "__main__":
    main()
