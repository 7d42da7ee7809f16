"""Memory runs that share a process, and processes without the compiler."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ullage_lab.measure import dataset as measuring
from ullage_lab.measure import memory as memory_run
from ullage_lab.measure.dataset import MeasurementSettings
from ullage_lab.measure.memory import bundle, untied
from ullage_lab.measure.pool import ParallelRuns, RunKind


def orders(*needs: int) -> list[dict[str, Any]]:
    return [{"id": f"o{number}", "need": need} for number, need in enumerate(needs)]


def test_every_run_is_in_one_bundle_with_room_for_its_largest() -> None:
    found = bundle(orders(5, 1, 9, 2, 7, 3, 8), 3, lambda order: int(order["need"]))
    assert sorted(row["id"] for parcel in found for row in parcel["rows"]) == [f"o{n}" for n in range(7)]
    for parcel in found:
        assert parcel["room"] == max(row["need"] for row in parcel["rows"])
    assert sorted(len(parcel["rows"]) for parcel in found) == [1, 3, 3]


def test_bundles_are_the_same_every_time() -> None:
    assert bundle(orders(*range(50)), 4, lambda order: int(order["need"])) == bundle(
        orders(*range(50)), 4, lambda order: int(order["need"])
    )


def test_a_bundle_without_an_answer_has_none_for_its_runs() -> None:
    parcel = bundle(orders(1, 2), 2, lambda order: 1)[0]
    assert [answer for _, answer in untied(parcel, {"failed": "killed"})] == [None, None]


def test_the_rest_of_a_bundle_gets_a_fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One bundle stops in the middle, one dies; every run is answered all the same, the rest each by a process."""

    def in_bundle(order: dict[str, Any], pause: Any) -> dict[str, Any]:
        names = [row["id"] for row in order["rows"]]
        if "o0" in names:
            os._exit(9)
        done = names[: names.index("o5")] if "o5" in names else names
        return {"answers": {name: {"process": os.getpid(), "in_bundle": n} for n, name in enumerate(done)}}

    monkeypatch.setattr(memory_run, "prepare_bundle", lambda order: order)
    monkeypatch.setattr(memory_run, "run_bundle", in_bundle)
    kind = RunKind(prepare=lambda o: o, run=lambda o, pause: {"process": os.getpid()}, gpu_memory=measuring.need)
    server = ParallelRuns(kind, total=1 << 40, at_once=3, timeout=30)
    plan = MeasurementSettings(out=tmp_path / "out.jsonl", together=3)
    found = {order["id"]: answer for order, answer in measuring._answers(server, orders(*range(9)), plan)}
    assert sorted(found) == [f"o{n}" for n in range(9)]
    fresh = {name: answer["process"] for name, answer in found.items() if "in_bundle" not in answer}
    assert sorted(fresh) == ["o0", "o1", "o2", "o5"]
    assert len(set(fresh.values())) == 4
    shared = [answer["process"] for name, answer in found.items() if name in ("o6", "o7", "o8")]
    assert len(set(shared)) == 1


@pytest.mark.slow
def test_optimizers_work_without_the_compiler_and_give_the_same() -> None:
    """In processes of their own: what is imported once stays."""
    code = """
import sys, torch
if sys.argv[1] == "without":
    from ullage.virtual.compiler.without_dynamo import no_compiler
    no_compiler()
torch.manual_seed(0)
for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor):
    layer = torch.nn.Linear(4, 4)
    optimizer = kind(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    print(layer.weight.sum().item())
print("sympy.core" in sys.modules)
"""
    said = [
        subprocess.run([sys.executable, "-c", code, way], capture_output=True, text=True, check=True).stdout.split()
        for way in ("with", "without")
    ]
    assert said[0][:-1] == said[1][:-1]
    assert [lines[-1] for lines in said] == ["True", "False"]
