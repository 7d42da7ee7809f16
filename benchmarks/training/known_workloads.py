"""Estimates the simulator's known workloads and writes manager/simulation/data/known_workloads.json.

    python benchmarks/training/known_workloads.py                    # a quarter of an hour, no GPU
    python benchmarks/training/known_workloads.py --gpus B200        # adds a GPU
    python benchmarks/training/known_workloads.py --show             # beside what was measured; writes nothing

Each workload is followed on virtual GPUs. A step of it was measured on the A100-40GB (the time of an epoch over its
steps): what is predicted for the GPU is kept, and where the measured step is longer, the job waits for its data. The
same data loader is assumed beside other GPUs. Where the step was shorter than predicted, or the data lay ready, theirs
differs from its prediction in the same proportion.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ullage
from ullage.estimation.asking import answer_request
from ullage.jobs.job import request_of
from ullage.manager.simulation.known import MEASURED_ON, KnownWorkload, published_workloads
from ullage.performance.result import Utilization, waiting_w
from ullage.units import MIB

FILE = Path(__file__).parents[2] / "src" / "ullage" / "manager" / "simulation" / "data" / "known_workloads.json"
GPUS = (MEASURED_ON, "A100-80GB", "H100-80GB", "H200", "L40S", "RTX-4090", "V100-32GB", "T4")
NOT_KEPT = ("gpu", "notes")
OTHERS = ("horus", "faketensor", "gpumemnet")
STEPS = 4
DIGITS = 5  # that are kept of a figure


def mnist() -> None:
    """The example of PyTorch: it trains on 64 images and tests with 1,000."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    ).cuda()
    optimizer = torch.optim.Adadelta(model.parameters())
    for _ in range(STEPS):
        _step(optimizer, F.cross_entropy(model(torch.rand(64, 1, 28, 28).cuda()), torch.zeros(64).long().cuda()))
    with torch.no_grad():
        model.eval()(torch.rand(1000, 1, 28, 28).cuda())


class UNet(nn.Module):
    """The U-Net of segmentation_models_pytorch over a ResNet-34: 21 classes, decoder of 256 to 16 channels."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet34

        encoder = resnet34()
        self.stem = nn.Sequential(encoder.conv1, encoder.bn1, encoder.relu)
        first = nn.Sequential(encoder.maxpool, encoder.layer1)
        self.stages = nn.ModuleList([first, encoder.layer2, encoder.layer3, encoder.layer4])
        widths = [(512 + 256, 256), (256 + 128, 128), (128 + 64, 64), (64 + 64, 32), (32, 16)]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(come, go, 3, padding=1, bias=False),
                nn.BatchNorm2d(go),
                nn.ReLU(inplace=True),
                nn.Conv2d(go, go, 3, padding=1, bias=False),
                nn.BatchNorm2d(go),
                nn.ReLU(inplace=True),
            )
            for come, go in widths
        )
        self.head = nn.Conv2d(16, 21, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.stem(x)]
        for stage in self.stages:
            seen.append(stage(seen[-1]))
        x = seen.pop()
        for block in self.blocks:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, seen.pop()], 1) if seen else x)
        return self.head(x)


def unet() -> None:
    model = UNet().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        masks = torch.zeros(8, 512, 512).long().cuda()
        _step(optimizer, F.cross_entropy(model(torch.rand(8, 3, 512, 512).cuda()), masks))


class DLRM(nn.Module):
    """Of the sizes in the published command; how large the 26 tables were is not known."""

    def __init__(self, width: int = 64, tables: int = 26, rows: int = 10_000) -> None:
        super().__init__()
        self.bottom = _layers(13, 512, 256, 128, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = _layers(width + tables * (tables + 1) // 2, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        dense = self.bottom(dense)
        all_ = torch.stack([dense, *(table(sparse) for table in self.tables)], 1)
        rows, columns = torch.tril_indices(all_.shape[1], all_.shape[1], -1)
        return self.top(torch.cat([dense, torch.bmm(all_, all_.transpose(1, 2))[:, rows, columns]], 1))


def _layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(part for pair in zip(widths, widths[1:], strict=False) for part in (nn.Linear(*pair), nn.ReLU()))
    )


def dlrm() -> None:
    model = DLRM().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        batch = torch.rand(32768, 13).cuda(), torch.zeros(32768, 1).long().cuda()
        _step(optimizer, F.binary_cross_entropy_with_logits(model(*batch), torch.zeros(32768, 1).cuda()))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def source_of(workload: KnownWorkload) -> tuple[Any, dict[str, Any]]:
    """Return what to estimate: a model's name and options, or a function."""
    options = dict(workload.training)
    if "function" in options:
        return FUNCTIONS[options["function"]], {"steps": None}
    return options.pop("model"), options


def memory(workload: KnownWorkload) -> dict[str, Any]:
    """Return its memory by several estimators, and the predicted step on the GPU of the measurement."""
    source, options = source_of(workload)
    estimate = answer_request(request_of(source, options), MEASURED_ON)
    assert estimate.utilization is not None
    others = {name: promised(source, name, options) for name in OTHERS} if isinstance(source, str) else {}
    return {
        "estimates": {"ullage": estimate.bound, **others},
        "predicted_step_s": rounded(estimate.utilization.step_s),
        "alone": {},
    }


def with_step(alone: Utilization, step_s: float) -> Utilization:
    """Return the same job with a step of `step_s` seconds: a longer one waits for data, in a shorter one the GPU is
    always busy."""
    cut = min(1.0, step_s / alone.gpu_s) if alone.gpu_s else 1.0
    share = alone.step_s * cut / step_s
    energy = alone.energy_j * cut + (step_s - alone.step_s * cut) * min(waiting_w(alone.gpu), alone.power_w)
    shares = {name: min(1.0, share * getattr(alone, name)) for name in ("smact", "smocc", "drama", "tensor")}
    return replace(
        alone,
        step_s=step_s,
        gpu_s=alone.gpu_s * cut,
        host_s=min(alone.host_s, step_s),
        **shares,
        energy_j=energy,
        power_w=energy / step_s,
        input_s=step_s if step_s > alone.step_s else None,
    )


def alone(workload: KnownWorkload, gpu: str, predicted_s: float) -> dict[str, Any]:
    """Return its activity alone on a GPU; `predicted_s` is the predicted step on the GPU of the measurement."""
    source, options = source_of(workload)
    usage = answer_request(request_of(source, options), gpu).utilization
    if gpu == MEASURED_ON:
        step_s = workload.step_s
    elif workload.prepares_data and predicted_s <= workload.step_s:
        step_s = max(usage.step_s, workload.step_s)
    else:
        step_s = usage.step_s * workload.step_s / predicted_s
    values = asdict(with_step(usage, step_s))
    return {name: rounded(value) for name, value in values.items() if name not in NOT_KEPT}


def promised(model: str, estimator: str, options: dict[str, Any]) -> int | None:
    """Return the figure of another estimator, as it is built here; None without one."""
    try:
        return answer_request(request_of(model, options, estimator), MEASURED_ON).bound
    except ullage.UllageError as error:
        print(f"{estimator}, {model}: {error}")
        return None


FUNCTIONS = {function.__name__: function for function in (mnist, unet, dlrm)}


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def show(workloads: dict[str, Any]) -> None:
    names = ("ullage", *OTHERS)
    print(
        f"{'memory in MiB, steps in ms':30} {'truth':>7}",
        *(f"{name:>10}" for name in names),
        "   step pred. smact power",
    )
    for known in published_workloads():
        row = workloads[known.name]
        alone = row["alone"][MEASURED_ON]
        promises = [(row["estimates"].get(name) or 0) // MIB or "-" for name in names]
        print(f"{known.name:30} {known.kind.memory // MIB:>7}", *(f"{promise:>10}" for promise in promises), end=" ")
        print(f"{1e3 * known.step_s:>6.1f} {1e3 * row['predicted_step_s']:>5.1f}", end=" ")
        print(f"{alone['smact']:>5.2f} {alone['power_w']:>4.0f}W")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="show the file that is there")
    parser.add_argument("--gpus", help="follow them only on these GPUs, with commas; the rest of the file stays")
    options = parser.parse_args()
    file = json.loads(FILE.read_text()) if FILE.is_file() else {"workloads": {}}
    if not options.show:
        wanted = options.gpus.split(",") if options.gpus else GPUS
        rows = {}
        for known in published_workloads():
            known_row = file["workloads"].get(known.name) if options.gpus else None
            row = rows[known.name] = known_row or memory(known)
            row["alone"] |= {gpu: alone(known, gpu, row["predicted_step_s"]) for gpu in wanted}
        made = {"ullage": ullage.__version__, "pytorch": torch.__version__.split("+")[0]}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        FILE.write_text(f'{{"made_with": {json.dumps(made)}, "workloads": {{\n{lines}\n}}}}\n')
        file["workloads"] = rows
    show(file["workloads"])


if __name__ == "__main__":
    main()
