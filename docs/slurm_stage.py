"""A private Slurm in whose login node the commands of a page are typed: nodes with four A100 of 40 GB each.

The GPUs are not real, and jobs are said to share them by MPS. The folder in which commands run has a training script
and batch scripts, as a user would, and `etc`, where slurm.conf is. A busy cluster has one node, with two jobs that hold
memory of virtual GPUs.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NODES = "n[1-3]=4xA100-40GB"
FILES = {
    "train.py": """
import argparse
import torch, torchvision
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
size = parser.parse_args().batch_size
model = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    optimizer.zero_grad()
    labels = torch.randint(1000, (size,), device="cuda")
    torch.nn.functional.cross_entropy(model(torch.randn(size, 3, 224, 224, device="cuda")), labels).backward()
    optimizer.step()
""",
    "job.sh": """#!/bin/bash
#SBATCH --job-name=resnet50
#SBATCH --gpus=1
#SBATCH --time=12:00:00

source .venv/bin/activate
srun python train.py --batch-size 64
""",
    "big.sh": """#!/bin/bash
#SBATCH --gpus=1
source .venv/bin/activate
srun python train.py --batch-size 1024
""",
    "odd.sh": """#!/bin/bash
#SBATCH --gpus=1
#SBATCH --time=12:00:00
source .venv/bin/activate

# A seed of its own for each run.
srun python train.py --batch-size 64 --seed $(od -An -N2 /dev/urandom)
""",
}
HOLDING = """
import os, sys, time
from ullage.virtual.shared_card.cards import Cards
[card] = Cards.open(os.environ["ULLAGE_CARDS"]).visible(os.environ["CUDA_VISIBLE_DEVICES"])
assert card.take(int(sys.argv[1]) << 30)
open(f"holds-{sys.argv[1]}", "w").close()
time.sleep(600)
"""
BUSY = {
    "holds.py": HOLDING,
    # It fails as PyTorch does where a job gets no more memory than its shards stand for.
    "grows.py": """
import os, sys
if int(os.environ["SLURM_SHARDS_ON_NODE"]) < 16:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
             "39.4 GiB. Including non-PyTorch memory, this process has 14.00 GiB memory in use.")
""",
    "grows.sh": """#!/bin/bash
#SBATCH --job-name=train --gpus=1 --output=%j.out
#ULLAGE memory=12GiB
python grows.py
""",
}


@contextlib.contextmanager
def slurm_stage(busy: bool = False) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder to type in, and its variables, while the cluster runs."""
    sys.path[:0] = [str(ROOT)]
    from tests.manager.slurm.private_slurm import PrivateSlurm

    from ullage.manager.slurm import configuration
    from ullage.manager.slurm.site import SITE_FILE

    group = configuration.node_group(NODES)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place, contextlib.ExitStack() as stack:
        etc, work = Path(place) / "etc", Path(place) / "work"
        written = configuration.files([group], folder=str(etc))
        written[SITE_FILE] = configuration.site_toml([group], "mps")
        configuration.write_files(written, etc)
        lines = [line for line in written["slurm.conf.ullage"].splitlines() if line.startswith(("Job", "Cli"))]
        work.mkdir()
        for name, text in (BUSY if busy else FILES).items():
            (work / name).write_text(text.lstrip())
        (work / ".venv").symlink_to(sys.prefix)
        (work / "etc").symlink_to(etc)
        cluster = PrivateSlurm(
            etc,
            nodes=1 if busy else 3,
            gpus=group.count,
            shards_per_gpu=group.shards_per_gpu,
            gpu_type=group.type,
            more="\n".join(lines),
        )
        stack.enter_context(cluster)
        variables = {**cluster.environment, "ULLAGE_HOME": f"{place}/home"}
        if busy:
            _two_jobs(cluster, work)
        yield work, variables


def _two_jobs(cluster: Any, work: Path) -> None:
    """Start two jobs that hold memory of virtual GPUs."""
    from ullage.virtual.shared_card.cards import VARIABLE, Cards

    Cards.create(work / "cards", "4xA100-40GB")
    for shards, taken in ((12, 10), (20, 25)):
        command = f"{VARIABLE}={work / 'cards'} exec {sys.executable} holds.py {taken}"
        cluster.submit(
            f"--gres=shard:{shards}", f"--chdir={work}", "--output=/dev/null", "--job-name=train", f"--wrap={command}"
        )
        cluster.until((work / f"holds-{taken}").exists, "a job holds its memory")
