"""What nodes report of jobs on virtual GPUs, and what `ullage slurm top` makes of it on a real Slurm."""

import json
import os
import shlex
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.commands import typed_in
from tests.paths import ROOT

from ullage.manager.monitor.sources import VirtualSource
from ullage.manager.slurm.node_reports import NODES, NodeMonitor, peak_of, read_reports
from ullage.units import GIB
from ullage.virtual.shared_card.cards import VARIABLE, Cards

# Takes memory of its virtual GPU, without PyTorch, and keeps it until it may go on.
HOLDS = """
import os, sys, time
from ullage.virtual.shared_card.cards import Cards
[card] = Cards.open(os.environ["ULLAGE_CARDS"]).visible(os.environ["CUDA_VISIBLE_DEVICES"])
assert card.take(int(sys.argv[1]) << 30)
open(f"taken-{sys.argv[1]}", "w").close()
while not os.path.exists("proceed"):
    time.sleep(0.05)
"""


@pytest.fixture
def ullage(monkeypatch, capsys):
    run = typed_in(monkeypatch, capsys)

    def printed(*words):
        code, out, errors = run(*words)
        assert code == 0, errors
        return out

    return printed


@pytest.fixture
def cluster(slurm, tmp_path):
    """A node whose GPUs are virtual cards, with two jobs: one within its promise, and one beyond it."""
    cards, shared = tmp_path / "cards", tmp_path / "shared"
    Cards.create(cards, "4xA100-40GB")
    (tmp_path / "holds.py").write_text(HOLDS)
    script = tmp_path / "job.sh"
    exports = {VARIABLE: str(cards), "PYTHONPATH": str(ROOT / "src")}
    begin = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
    script.write_text(f"#!/bin/sh\n{begin}exec {sys.executable} holds.py $1\n")
    place = ["--nodelist=n2", f"--chdir={tmp_path}", "--output=%j.out"]
    jobs = [slurm.submit(f"--gres=shard:{shards}", *place, script, taken) for shards, taken in ((12, 10), (20, 25))]
    slurm.until(lambda: (tmp_path / "taken-10").exists() and (tmp_path / "taken-25").exists(), "both hold their memory")
    monitor = NodeMonitor(VirtualSource(cards), "n2", shared)
    monitor.write()
    yield slurm, shared, jobs, monitor
    (tmp_path / "proceed").touch()


def test_top_shows_what_is_promised_and_what_is_taken_job_by_job(cluster, ullage):
    slurm, shared, (within, beyond), monitor = cluster
    found = json.loads(ullage("slurm", "top", "--folder", str(shared), "--json"))
    nodes = {node["name"]: node for node in found["nodes"]}
    gpu = nodes["n2"]["gpus"][0]
    assert (gpu["shards"], gpu["promised"], gpu["used"]) == (40, 32, 35 * GIB) and gpu["name"] == "A100-40GB"
    jobs = {job["job"]: job for job in gpu["jobs"]}
    assert (jobs[within]["shards"], jobs[within]["used"], jobs[within]["over_promise"]) == (12, 10 * GIB, False)
    assert (jobs[beyond]["shards"], jobs[beyond]["used"], jobs[beyond]["over_promise"]) == (20, 25 * GIB, True)
    assert len(found["over_promised"]) == 1 and f"job {beyond} of " in found["over_promised"][0]
    assert [gpu["promised"] for gpu in nodes["n2"]["gpus"][1:]] == [0, 0, 0]
    assert nodes["n1"]["gpus"][0]["used"] is None  # nobody reports there
    shown = ullage("slurm", "top", "--folder", str(shared))
    assert "32/40" in shown and "25.0 GiB !" in shown and "20480 MiB were promised (20 shards)" in shown
    families = {
        family.name: family.samples
        for family in text_string_to_metric_families(ullage("slurm", "top", "--folder", str(shared), "--prometheus"))
    }
    over = {sample.labels["job"]: sample.value for sample in families["ullage_slurm_job_over_promise"]}
    assert over == {str(within): 0.0, str(beyond): 1.0}
    assert {sample.labels["node"] for sample in families["ullage_slurm_gpu_used_bytes"]} == {"n2"}
    assert "no report of n1, n3" in shown and "n2" not in shown.splitlines()[-1]
    assert "no report of n1, n2, n3" in ullage("slurm", "top")
    blind = json.loads(ullage("slurm", "top", "--json"))
    assert blind["over_promised"] == [] and blind["nodes"][1]["gpus"][0]["promised"] == 32


def test_the_most_that_a_job_took_is_known_after_its_end_and_after_a_restart_of_the_monitor(cluster, tmp_path):
    slurm, shared, (within, _), monitor = cluster
    (tmp_path / "proceed").touch()
    slurm.until_state(within, "COMPLETED")
    again = NodeMonitor(VirtualSource(tmp_path / "cards"), "n2", shared)
    report = again.write()
    assert report.jobs[within].now == {} and peak_of(within, 0.0, shared) == 10 * GIB
    assert peak_of(within, report.time + 1, shared) is None  # of a later run nothing is known
    (shared / NODES / "n3.json").write_text("{")
    assert set(read_reports(shared)) == {"n2"}


def test_the_command_writes_the_report_of_its_node(cluster, tmp_path, ullage):
    slurm, shared, (within, _), _ = cluster
    ullage("slurm", "monitor", "--folder", str(shared), "--node", "n9", "--cards", str(tmp_path / "cards"), "--once")
    assert read_reports(shared)["n9"].jobs[within].now == {0: 10 * GIB}
    assert oct(os.stat(shared / NODES / "n9.json").st_mode & 0o777) == oct(0o666 & ~_umask())


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
