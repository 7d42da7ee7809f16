"""xMem and VeritasEst: the trace of a CPU run, the order of a GPU run, the replay, and the limits of the process."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest, Script
from ullage.jobs.training import train
from ullage_lab.estimators.xmem.estimator import CpuTraining, TooLarge, profiled, run_on_cpu
from ullage_lab.estimators.xmem.replay import (
    FORWARD,
    IN_BACKWARD,
    IN_STEP,
    MAKING,
    CpuTrace,
    Life,
    ProfiledBlock,
    ReplayOutcome,
    orchestrate,
    simulate,
)

MLP = Model("mlp:x", settings={"widths": [128, 256, 10]}, batch_size=64, optimizer="sgdm")
PARAMETERS = [128 * 256 * 4, 256 * 4, 256 * 10 * 4, 10 * 4]


def lives(trace: CpuTrace, part: str) -> list[Life]:
    return [life for life in orchestrate(trace) if life.part == part]


@pytest.fixture(scope="module")
def trace() -> CpuTrace:
    return profiled(lambda: train(MLP, 3, device="cpu"))


def test_the_trace_has_three_steps_and_the_parameters(trace: CpuTrace) -> None:
    assert len(trace.steps) == 3 and len(trace.zero_grads) == 3
    assert [size for _, size in trace.parameters] == PARAMETERS
    assert {block.phase for block in trace.blocks} == {MAKING, FORWARD, IN_BACKWARD, IN_STEP}


def test_gradients_come_every_iteration_and_end_at_zero_grad(trace: CpuTrace) -> None:
    found = lives(trace, "gradients")
    assert sorted(life.size for life in found) == sorted(PARAMETERS * 3)
    begins = [begin for begin, _ in trace.zero_grads]
    assert {life.end for life in found if life.start < trace.steps[0][0]} == {begins[1]}


def test_momentum_is_taken_once_and_stays(trace: CpuTrace) -> None:
    kept = [life.size for life in lives(trace, "optimizer") if life.end is None]
    assert sorted(kept) == sorted(PARAMETERS)


def test_the_batch_is_moved_in_every_iteration(trace: CpuTrace) -> None:
    inputs = [life for life in lives(trace, "activations") if life.size == 64 * 128 * 4 and life.start >= 0]
    ends = [end for _, end in trace.steps]
    assert [life.end for life in inputs if life.end in ends] == ends


def test_the_peak_is_what_is_counted_by_hand() -> None:
    """At the end of the step: weights, gradients and momentum, batch and output, each rounded to 512 bytes."""
    outcome = simulate(orchestrate(profiled(lambda: train(MLP, 3, device="cpu"))), 2**34)
    round_up = [-(-size // 512) * 512 for size in PARAMETERS]
    assert outcome.live["parameters"] == sum(round_up)
    assert outcome.live["optimizer"] >= sum(round_up)
    assert 3 * sum(round_up) <= outcome.peak_allocated <= outcome.peak_reserved
    assert outcome.peak_reserved == 2 * 2**20  # all of it fits into one small segment


def test_zeroing_in_place_keeps_the_gradients() -> None:
    def in_place() -> None:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()

    found = [life for life in lives(profiled(in_place), "gradients") if life.size == 64 * 64 * 4]
    assert len(found) == 1


def test_memory_dropped_by_constructor_never_reaches_the_gpu() -> None:
    dropped = ProfiledBlock(1, 2, 10**9, 1, "aten::empty", MAKING)
    foreign = ProfiledBlock(12, None, 10**9, 2, None, FORWARD)
    activation = ProfiledBlock(12, 13, 4096, 3, "aten::relu", FORWARD)
    made = CpuTrace(blocks=[dropped, foreign, activation], steps=[(20, 30)], first_forward=10, parameters=[(7, 512)])
    assert [life.size for life in orchestrate(made)] == [512, 4096]


def test_a_gradient_without_a_later_zero_grad_ends_as_it_did() -> None:
    gradient = ProfiledBlock(12, 40, 4096, 3, "aten::mm", IN_BACKWARD)
    made = CpuTrace(blocks=[gradient], steps=[(20, 30)], zero_grads=[(1, 2)], first_forward=10)
    assert orchestrate(made) == [Life(12, 40, 4096, "gradients")]


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no optimizer step"):
        orchestrate(CpuTrace(first_forward=1))


def test_a_replay_that_runs_out_says_so_and_gives_the_need() -> None:
    outcome = simulate([Life(0, None, 2**30, "parameters"), Life(1, None, 2**30, "activations")], 2**30)
    assert isinstance(outcome, ReplayOutcome) and outcome.out_of_memory is not None
    assert outcome.peak_reserved == 2**31


def test_freed_memory_is_used_again() -> None:
    size = 64 * 2**20
    assert simulate([Life(0, 5, size, "activations"), Life(5, 9, size, "activations")], 2**40).peak_reserved == size


def test_a_run_beyond_its_limits_is_too_large() -> None:
    with pytest.raises(TooLarge, match="three training steps on the CPU took more than 1.00 MiB of this machine's"):
        run_on_cpu(CpuTraining(configuration=MLP), memory=2**20)
    with pytest.raises(TooLarge, match="three training steps on the CPU took longer than 100 ms"):
        run_on_cpu(CpuTraining(configuration=MLP), timeout=0.1)


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(InvalidValue, match="training on the CPU failed: TypeError"):
        run_on_cpu(CpuTraining(function=("os", "getpid")))


def test_a_trace_comes_back_as_it_was(trace: CpuTrace) -> None:
    assert CpuTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


@pytest.mark.slow
def test_a_function_that_takes_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train_on_device.py").write_text(
        "import torch\n"
        "def train(device):\n"
        "    model = torch.nn.Linear(1024, 1024, bias=False).to(device)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    while True:\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(8, 1024, device=device)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import train_on_device

    answer = find("xmem").estimate(JobRequest(train_on_device.train), gpu("T4"))
    assert answer.breakdown["parameters"] == 1024 * 1024 * 4 and answer.figure_kind == "reserved"
    assert answer.peak_reserved is not None and answer.peak_reserved >= 2 * 1024 * 1024 * 4
    assert answer.process_memory is None


def test_unsupported_jobs_have_a_reason() -> None:
    supports = find("xmem").supports
    amp = Model("mlp:x", settings={"widths": [8, 4]}, batch_size=2, precision="amp_bf16")
    assert "autocast" in (supports(JobRequest(amp)) or "")
    assert "one argument" in (supports(JobRequest(lambda: None)) or "")
    assert "import" in (supports(JobRequest(lambda device: None)) or "")  # type: ignore[misc, arg-type]
    assert supports(JobRequest(Script("train.py"))) is not None
    assert supports(JobRequest(MLP)) is None


def test_veritasest_is_for_convolutional_networks() -> None:
    pytest.importorskip("torchvision")
    supports = find("veritasest").supports
    assert supports(JobRequest(Model("tv:resnet18", batch_size=2))) is None
    vit = Model("tv:vit_b_16", batch_size=2)
    assert "has attention" in (supports(JobRequest(vit)) or "")
    assert "no convolution" in (supports(JobRequest(MLP)) or "")
    gpt = Model("hf:GPT2LMHeadModel", batch_size=1, sequence_length=8)
    assert "transformers" in (supports(JobRequest(gpt)) or "")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InvalidValue, match="'steps'"):
        find("xmem").run(JobRequest(MLP, options={"steps": 5}), gpu("T4"))
