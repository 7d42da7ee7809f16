"""`ullage slurm submit` and `ullage slurm sbatch` on a real Slurm."""

import json
import re
import sys
from dataclasses import replace

import pytest
from tests.commands import typed_in

from ullage.errors import InvalidValue
from ullage.hardware import gpu as find_gpu
from ullage.manager.slurm import commands
from ullage.manager.slurm.batch_script import Hints
from ullage.manager.slurm.commands import read_comment
from ullage.manager.slurm.sbatch_options import GpuRequest, with_options
from ullage.manager.slurm.site import GpuKind, Site, read_site
from ullage.manager.slurm.sizing import GpuNeed, size
from ullage.manager.slurm.submission import plan_words
from ullage.performance.result import Utilization
from ullage.units import GIB


@pytest.fixture
def ullage(monkeypatch, capsys):
    return typed_in(monkeypatch, capsys)


def job(text, options="--gpus=1"):
    return f"#!/bin/bash\n#SBATCH {options} --output=%j.out\n{text}\n"


def of(plan):
    """What it asks for."""
    return plan.options.get("gres")


def test_a_script_is_estimated_submitted_and_gets_its_shards(slurm, project, ullage, warm_estimates):
    before = (project / "job.sh").read_bytes()
    code, printed, errors = ullage("slurm", "submit", "--json", "job.sh")
    assert code == 0, errors
    told = json.loads(printed)
    assert told["scripts"] == ["train.py 4096"] and told["gres"] == "shard:5" and not told["estimate"]["kept"]
    slurm.until_state(told["job"], "COMPLETED")
    assert (project / f"{told['job']}.out").read_text().startswith("shards 5 ")
    (known,) = commands.jobs([told["job"]])
    assert known.shards == 5 and known.name == "job.sh"
    assert read_comment(known.comment) == {"upper": told["estimate"]["upper"], "gpu": "A100-40GB", "shards": 5}
    assert (project / "job.sh").read_bytes() == before

    again = plan_words(["job.sh"])
    assert again.estimate["kept"] and again.estimate["upper"] == told["estimate"]["upper"]
    (project / "train.py").write_text((project / "train.py").read_text().replace("<< 20", "<< 21"))
    larger = plan_words(["job.sh"])
    assert not larger.estimate["kept"] and larger.sizing.count > 8


def test_a_script_that_fails_asks_for_a_whole_gpu_and_says_why(slurm, project, warm_estimates):
    (project / "train.py").write_text("import torch\ntorch.zeros(3).cuda()\nraise SystemError('no data')\n")
    plan = plan_words(["job.sh"])
    assert plan.sizing.gres == "shard:40" and "cannot be estimated" in plan.sizing.why and "no data" in plan.sizing.why
    assert plan.words == ["--gres=shard:40", "--gpus=0"]


def test_a_script_that_is_out_of_time_is_sized_by_what_it_did(slurm, project, warm_estimates):
    with (project / "train.py").open("a") as script:
        script.write("import time\ntime.sleep(600)\n")
    plan = plan_words(["job.sh"], timeout=10.0)
    assert plan.sizing.name == "shard" and 4 * GIB < plan.estimate["upper"] < 8 * GIB
    (project / "train.py").write_text("import time\ntime.sleep(600)\n")
    nothing = plan_words(["job.sh"], timeout=1.0)
    assert nothing.sizing.gres == "shard:40" and "cannot be estimated" in nothing.sizing.why


def test_the_dry_run_prints_the_line_and_submits_nothing(slurm, project, ullage):
    (project / "job.sh").write_text(job("#ULLAGE memory=12GiB\npython train.py"))
    code, printed, _ = ullage("slurm", "submit", "--dry-run", "--partition", "all", "job.sh", "--epochs", "9")
    assert code == 0
    assert printed.splitlines()[-1].startswith("sbatch --partition all --gres=shard:13 --gpus=0 ")
    assert printed.splitlines()[-1].endswith(" job.sh --epochs 9")
    assert not slurm.run("squeue", "--noheader").stdout


def test_sbatch_behaves_as_sbatch_does(slurm, project):
    text = job("#ULLAGE memory=12GiB\necho $SLURM_SHARDS_ON_NODE $1")
    (project / "job.sh").write_text(text)
    sbatch = (sys.executable, "-m", "ullage", "slurm", "sbatch", "--parsable")
    named = slurm.run(*sbatch, "job.sh", "one two")
    given = slurm.run(*sbatch, input=text)
    for told, printed in ((named, "13 one two\n"), (given, "13\n")):
        slurm.until_state(int(told.stdout), "COMPLETED")
        assert (project / f"{int(told.stdout)}.out").read_text() == printed
        assert "--gres=shard:13" in told.stderr
    assert slurm.run(*sbatch, "--no-such-option=1", "job.sh", check=False).returncode != 0


def test_each_node_gets_shards_for_what_its_rank_takes(slurm, project, warm_estimates):
    (project / "train.py").write_text(
        """
import os, torch
weights = torch.zeros((16 << 28) // int(os.environ["SLURM_NTASKS"]), device="cuda")
"""
    )
    (project / "job.sh").write_text(job(f"srun {sys.executable} train.py", "--nodes=2 --ntasks-per-node=1 --gpus=2"))
    plan = plan_words(["job.sh"])
    assert 8 * GIB < plan.estimate["upper"] < 10 * GIB and plan.estimate["world_size"] == 2
    assert of(plan) == f"shard:{plan.sizing.count}" and plan.sizing.count in (9, 10)
    number = slurm.submit(*with_options(["job.sh"], plan.words))
    (known,) = commands.jobs([number])
    assert known.shards == plan.sizing.count

    whole = plan_words(["--nodes=1", "--ntasks-per-node=2", "job.sh"])
    assert whole.sizing.gres == "gpu:2" and "shards of several GPUs" in whole.sizing.why


def test_more_than_a_gpu_has_is_refused_at_once(slurm, project, ullage):
    (project / "job.sh").write_text(job("#ULLAGE memory=50GiB"))
    code, _, errors = ullage("slurm", "submit", "job.sh")
    assert code == 2 and not slurm.run("squeue", "--noheader").stdout
    assert re.search(r"it needs up to 50.0 GiB on one GPU, and the largest .* A100-40GB, has 39.4 GiB", errors)
    assert "ullage max-batch" in errors
    with pytest.raises(InvalidValue, match="asks for 5 GPUs on a node, and a node has at most 4"):
        plan_words(["--gres=gpu:5", "job.sh"])


@pytest.mark.parametrize(
    ("text", "words", "gres", "cleared"),
    [
        ("#ULLAGE memory=12GiB", [], "shard:13", {"gpus": "0"}),
        ("#ULLAGE memory=12GiB", ["--gpus-per-node=fake:1"], "shard:fake:13", {"gpus": "0", "gpus-per-node": "0"}),
        ("#ULLAGE memory=12GiB", ["--nodes=2", "--gpus=2"], "shard:13", {"gpus": "0"}),
        ("#ULLAGE memory=12GiB exclusive", [], "shard:40", {"gpus": "0"}),
        ("#ULLAGE memory=12GiB", ["--gpus=2"], None, {}),
        ("#ULLAGE no-estimate", [], None, {}),
        ("make train", [], "shard:40", {"gpus": "0"}),
        ("python train.py", ["--gres=shard:3"], None, {"gpus": "0"}),
    ],
)
def test_the_request_of_a_job(slurm, project, text, words, gres, cleared):
    (project / "job.sh").write_text(job(text))
    plan = plan_words([*words, "job.sh"])
    assert of(plan) == gres
    assert {name: value for name, value in plan.options.items() if name.startswith("gpus")} == cleared
    assert slurm.submit("--hold", *with_options([*words, "job.sh"], plan.words)) > 0  # Slurm understands it


def test_a_gpu_request_warns_if_slurm_may_give_gpus_twice(slurm, project):
    (project / "job.sh").write_text(job("#ULLAGE memory=12GiB"))
    told = [note for note in plan_words(["--gpus=2", "job.sh"]).notes if "GPUs of which other jobs have shards" in note]
    assert len(told) == (commands.version() < (23, 11, 5)) and not plan_words(["job.sh"]).notes
    (project / "job.sh").write_text(job("#ULLAGE no-estimate"))
    assert list(plan_words(["job.sh"]).notes) == told
    assert not Site((SMALL,), release=(23, 11, 5)).gives_gpus_twice
    assert not Site((replace(SMALL, shards=0),), release=(22, 5, 8)).gives_gpus_twice


def test_a_job_that_names_no_gpu_gets_what_it_needs(slurm, project):
    (project / "job.sh").write_text(job("#ULLAGE exclusive memory=1GiB", options="--gres=tmp:0"))
    assert of(plan_words(["job.sh"])) == "shard:40,tmp:0"
    assert of(plan_words(["--comment=mine", "job.sh"])) == "shard:40,tmp:0"
    assert plan_words(["--comment=mine", "job.sh"]).options["comment"].startswith("mine ullage:{")


def test_the_cluster_says_how_large_a_shard_is(slurm):
    (kind,) = read_site().kinds
    assert (kind.type, kind.gpu.name, kind.shards, kind.per_node) == ("fake", "A100-40GB", 40, 4)
    assert kind.shards_for(kind.gpu.usable) == 40 and kind.shards_for(1) == 1
    (slurm.folder / "ullage.toml").unlink()
    with pytest.raises(InvalidValue, match="type 'fake' are; name it with '#ULLAGE gpu=NAME'"):
        read_site()
    assert read_site(gpu="H100-80GB").kinds[0].gpu.name == "H100-80GB"


# Clusters that are not here.

SMALL = GpuKind("a100", find_gpu("A100-40GB"), 39, 4)
LARGE = GpuKind("h200", find_gpu("H200"), 139, 8)


def needs(gib, step=None):
    return [GpuNeed(kind, int(gib * GIB), step) for kind in (SMALL, LARGE)]


def test_a_job_may_run_on_both_kinds_of_gpus_or_only_the_larger():
    site = Site((SMALL, LARGE))
    assert size(needs(10), GpuRequest(), site).gres == "shard:10"
    only = size(needs(50), GpuRequest(per_node=1), site)
    assert only.gres == "shard:h200:50"
    assert size(needs(50), GpuRequest(per_node=2), site).gres == "gpu:h200:2"
    assert size(needs(10), GpuRequest(per_node=2), site).gres == "gpu:2"
    assert size(needs(10), GpuRequest(), site, hints=Hints(exclusive=True)).gres == "gpu:1"  # numbers of shards differ
    assert size(needs(50), GpuRequest(), site, hints=Hints(exclusive=True)).gres == "shard:h200:139"
    with pytest.raises(InvalidValue, match="H200"):
        size(needs(500), GpuRequest(), site)


def test_a_job_that_sharing_would_hurt_gets_a_whole_gpu():
    busy = {"smact": 0.99, "smocc": 0.6, "drama": 0.9, "tensor": 0.5, "power_w": 650.0, "energy_j": 40.0}
    step = {"step_s": 0.1, "gpu_s": 0.0999, "host_s": 0.005, "flops": 1e13, "bytes": 4e11, "kernels": 300}
    alone = Utilization(gpu="H200", **step, **busy, steady=True, measured=True)
    need = [GpuNeed(LARGE, 20 * GIB, alone)]
    found = size(need, GpuRequest(), Site((LARGE,)))
    assert found.gres == "shard:139" and "one after the other" in found.why

    idle = replace(alone, smact=0.2, smocc=0.1, drama=0.05, gpu_s=0.03, host_s=0.1)
    need = [GpuNeed(LARGE, 20 * GIB, idle)]
    assert size(need, GpuRequest(), Site((LARGE,))).gres == "shard:20"
    assert "% of its speed" in size(need, GpuRequest(), Site((LARGE,)), hints=Hints(min_speed=1.0)).why
