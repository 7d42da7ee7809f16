"""The estimator fast answers for any model by name, from totals alone."""

import pytest

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest
from ullage_lab.estimators.fast.estimator import trained as trained_fast

GIB = 1 << 30
MLP = Model("mlp:x", settings={"widths": [2048, 4096, 4096, 1000]}, batch_size=256, optimizer="adam")
CNN = Model(
    "ullage_lab.networks.generated:cnn",
    batch_size=32,
    optimizer="sgd",
    input_shape=[3, 96, 96],
    num_classes=10,
    settings={"arch": "pyramid", "filters": [32, 64, 128], "kernels": [3, 3, 3], "down": [1, 2], "batch_norm": True},
)
ENCODER = Model(
    "ullage_lab.networks.generated:transformer",
    batch_size=16,
    optimizer="adamw",
    sequence_length=128,
    precision="bf16",
    num_classes=10,
    settings={
        "kind": "encoder",
        "vocabulary": 5000,
        "length": 128,
        "size": 256,
        "layers": 4,
        "heads": 4,
        "middle": 1024,
    },
)


@pytest.mark.parametrize("job", [MLP, CNN, ENCODER], ids=["mlp", "cnn", "transformer"])
def test_the_answer_is_near_that_of_the_virtual_gpu(job: Model) -> None:
    ours = find("ullage").estimate(JobRequest(job), gpu("H200"))
    e = find("fast").estimate(JobRequest(job), gpu("H200"))
    assert e.figure_kind == "process" and e.upper >= e.figure
    assert ours.process_memory is not None
    assert abs(e.figure - ours.process_memory) <= 0.4 * ours.process_memory, (e.figure, ours.process_memory)


def test_fast_has_a_bound_that_was_calibrated() -> None:
    card = trained_fast().card
    assert card["generated"]["covered"] >= 0.985 and card["real"]["covered"] >= 0.985
    assert card["real"]["jobs"] > 100


def test_another_gpu_is_reported() -> None:
    e = find("fast").estimate(JobRequest(MLP), gpu("A100-40GB"))
    assert any("trained on an H200" in note for note in e.notes)


def test_it_answers_for_real_models_by_name() -> None:
    pytest.importorskip("torchvision")
    e = ullage.estimate("torchvision:resnet18", batch_size=16, estimator="fast")
    assert e.estimator == "fast" and GIB <= e.figure <= 6 * GIB


def test_inference_is_refused_with_the_reason() -> None:
    job = Model("mlp:x", settings={"widths": [8, 4]}, batch_size=2, inference=True)
    with pytest.raises(InvalidValue, match="this is inference"):
        find("fast").estimate(JobRequest(job), gpu("H200"))
