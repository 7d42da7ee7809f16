"""A private Slurm in whose login node the commands of a page are typed: three nodes with four A100 of 40 GB each.

The GPUs are not real, and jobs are said to share them by MPS. The folder in which commands run has a training script
and batch scripts, as a user would.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def slurm_stage() -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder to type in, and its variables, while the cluster runs."""
    sys.path[:0] = [str(ROOT)]
    from tests.slurm.private_slurm import PrivateSlurm

    from ullage.slurm import configuration
    from ullage.slurm.site import SITE_FILE

    group = configuration.node_group(NODES)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place:
        etc, work = Path(place) / "etc", Path(place) / "work"
        written = configuration.files([group], folder=str(etc))
        written[SITE_FILE] = configuration.site_toml([group], "mps")
        configuration.write_files(written, etc)
        lines = [line for line in written["slurm.conf.ullage"].splitlines() if line.startswith(("Job", "Cli"))]
        work.mkdir()
        for name, text in FILES.items():
            (work / name).write_text(text.lstrip())
        (work / ".venv").symlink_to(sys.prefix)
        with PrivateSlurm(
            etc, nodes=3, gpus=group.count, shards_per_gpu=group.shards_per_gpu, gpu_type=group.type,
            more="\n".join(lines),
        ) as cluster:  # fmt: skip
            yield work, {**cluster.environment, "ULLAGE_HOME": f"{place}/home"}
