"""FakeTensor against the estimates that its evaluators recorded for timm models."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators.faketensor import MARGIN, EveryResult, Meter, propagate
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest

# MiB, as the evaluators published them for timm models on an A100
PUBLISHED = [
    ("resnet18", 8, 205.524085998535),
    ("mobilenetv3_small_100", 128, 2079.83518218994),
    ("vgg11", 32, 2021.03604888916),
]
SMALL = JobRequest(Model("mlp:x", settings={"widths": [64, 32, 10], "act": "Identity"}, batch_size=4))


@pytest.mark.parametrize(("name", "batch", "mib"), PUBLISHED)
def test_published_estimates_come_out(name: str, batch: int, mib: float) -> None:
    found = ullage.estimate(f"timm:{name}", batch_size=batch, gpu="A100-40GB", estimator="faketensor")
    assert found.figure / 2**20 == pytest.approx(mib, rel=1e-3)


def test_views_share_and_dead_tensors_are_gone() -> None:
    meter = Meter()
    with FakeTensorMode(), EveryResult(meter):
        x = torch.ones(1000)
        y = x.view(10, 100)
        assert meter.bytes == 4000
        z = y + 1
        assert meter.bytes == 8000
        del x, y, z
        assert (meter.bytes, meter.most) == (0, 8000)


def test_a_count_by_hand() -> None:
    """Input twice, both layers' outputs, and the weights of which a linear layer's operator makes a view."""
    assert SMALL.model is not None
    forward, backward = propagate(SMALL.model, gpu("T4"))
    inputs, hidden, out = 4 * 64 * 4, 4 * 32 * 4, 4 * 10 * 4
    viewed = 4 * (64 * 32 + 32 * 10)
    assert forward == 2 * inputs + hidden + out + viewed
    found = find("faketensor").estimate(SMALL, gpu("T4"))
    assert found.figure == backward > forward
    assert (found.figure_kind, found.process_memory, found.peak_reserved) == ("allocated", None, None)


def test_the_margin_is_four_gib() -> None:
    plain, wide = (find(name).estimate(SMALL, gpu("T4")) for name in ("faketensor", "faketensor+margin"))
    assert wide.figure - plain.figure == MARGIN == 4 << 30


def test_unevaluated_jobs_are_refused() -> None:
    with pytest.raises(InvalidValue, match="this is inference"):
        find("faketensor").estimate(
            JobRequest(Model("mlp:x", settings={"widths": [8, 4]}, batch_size=2, inference=True)), gpu("T4")
        )
    with pytest.raises(InvalidValue, match="this is a function"):
        find("faketensor").estimate(JobRequest(print), gpu("T4"))
