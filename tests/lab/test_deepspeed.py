"""DeepSpeed's worked examples and those of the ZeRO paper, to the digit."""

import pytest
from torch import nn

import ullage
from ullage.errors import InvalidValue, UnknownName
from ullage_lab.estimators.deepspeed import count, model_states

# docs/code-docs/source/memory.rst of DeepSpeed, "without the actual model": 2851e6 parameters, 32e6 in the largest
# layer, one node of eight GPUs: (options, GB of CPU memory, GB a GPU)
STAGE_2 = [({"offload": True}, "127.45", "5.31"), ({}, "127.45", "15.93")]
STAGE_3 = [
    ({"offload": True, "offload_params": True, "zero_init": True}, "71.69", "0.12"),
    ({"offload": True, "offload_params": True, "zero_init": False}, "127.45", "0.12"),
    ({"offload": True, "zero_init": True}, "63.72", "0.78"),
    ({"offload": True, "zero_init": False}, "127.45", "0.78"),
    ({"zero_init": True}, "1.43", "6.09"),
    ({"zero_init": False}, "127.45", "6.09"),
]


@pytest.mark.parametrize(("options", "cpu", "per_gpu"), STAGE_2)
def test_the_worked_example_of_stage_2(options: dict[str, bool], cpu: str, per_gpu: str) -> None:
    states = model_states(2_851_000_000, stage=2, gpus=8, **options)
    assert (f"{states.cpu / 2**30:.2f}", f"{states.gpu / 2**30:.2f}") == (cpu, per_gpu)


@pytest.mark.parametrize(("options", "cpu", "per_gpu"), STAGE_3)
def test_the_worked_example_of_stage_3(options: dict[str, bool], cpu: str, per_gpu: str) -> None:
    states = model_states(2_851_000_000, 32_000_000, stage=3, gpus=8, **options)
    assert (f"{states.cpu / 2**30:.2f}", f"{states.gpu / 2**30:.2f}") == (cpu, per_gpu)


@pytest.mark.parametrize(
    ("options", "mib"),
    [({}, 3291), ({"offload": True, "offload_params": True}, 125), ({"offload": True}, 477)],
)
def test_the_cases_of_t5_large_on_four_gpus(options: dict[str, bool], mib: int) -> None:
    """The same page: 737.67 M parameters, 32.90 M in the largest layer; the page gives two decimals of a million."""
    states = model_states(737_670_000, 32_900_000, stage=3, gpus=4, **options)
    assert states.gpu >> 20 == mib


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, "120.0"), (1, "31.4")])
def test_the_example_of_the_zero_paper(stage: int, gigabytes: str) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters, 64 GPUs."""
    assert f"{model_states(7_500_000_000, stage=stage, gpus=8, nodes=8).gpu / 1e9:.1f}" == gigabytes


def test_nodes_share_and_each_has_its_own_cpu_memory() -> None:
    one = model_states(10**9, 10**7, stage=3, gpus=8, offload=True)
    four = model_states(10**9, 10**7, stage=3, gpus=8, nodes=4, offload=True)
    assert four.gpu < one.gpu and four.cpu == one.cpu // 4


def test_parameters_that_are_shared_count_once() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    model[1].weight = model[0].weight
    assert count(model) == (800, 800)


@pytest.mark.parametrize(
    "options",
    [{"stage": 4}, {"gpus": 0}, {"stage": 1, "offload": True}, {"stage": 2, "offload_params": True}, {"stage": 3}],
)
def test_options_that_zero_lacks_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidValue):
        model_states(10**6, **options)  # type: ignore[arg-type]


def test_options_through_the_public_face() -> None:
    def asked(**settings: object) -> int:
        found = ullage.estimate(ullage.Model("torchvision:resnet18", settings=settings), estimator="deepspeed")
        assert found.figure_kind == "allocated" and found.process_memory is None
        return found.figure

    assert asked(**{"deepspeed.stage": 3, "deepspeed.gpus": 8}) < asked(**{"deepspeed.stage": 0})
    with pytest.raises(UnknownName, match="did you mean 'deepspeed.stage'"):
        asked(**{"deepspeed.stag": 3})
    with pytest.raises(InvalidValue, match="deepspeed.offload must be a value like False"):
        asked(**{"deepspeed.offload": 1})


def test_it_is_blind_to_the_batch() -> None:
    small, large = (ullage.estimate("torchvision:resnet18", batch_size=b, estimator="deepspeed") for b in (1, 512))
    assert small.figure == large.figure
