"""How fast and how busy, as a part of every estimate."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import ullage
from ullage.estimation.jobs.child import estimate_here
from ullage.estimation.over_gpus import estimate_over_gpus
from ullage.estimation.result import Estimate
from ullage.estimation.tables import print_gpu_table, print_report
from ullage.performance.cost import Training
from ullage.performance.result import Utilization

SCRIPT = """\
import torch
model = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.zeros(100, 16), 8):
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def train():
    exec(SCRIPT, {})


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def estimated() -> Estimate:
    return ullage.estimate(train, gpu="H200")


def test_functions_scripts_and_models_have_a_step_time(estimated, script, warm):
    found = estimated.utilization
    assert found.gpu == "H200" and found.steady and found.gpu_s > 0 and found.kernels > 0
    of_script = ullage.estimate(script, gpu="H200", training=ullage.Training(epochs=3))
    assert of_script.utilization == replace(found, samples=8)
    assert of_script.epoch_samples == of_script.training.samples == 100 and of_script.training.steps == 3 * 13
    model = ullage.estimate(ullage.Model("torchvision:alexnet", batch_size=2, input_shape=[3, 64, 64]), gpu="H200")
    assert model.utilization.flops > found.flops


def test_it_is_in_the_json_and_is_read_back(estimated):
    values = json.loads(estimated.to_json())
    assert values["utilization"]["step_s"] == estimated.utilization.step_s
    assert "step_calls" not in values
    assert Estimate.from_dict(values).utilization == estimated.utilization
    del values["utilization"]  # of an older version
    assert Estimate.from_dict(values).utilization is None


def test_gpus_that_share_a_run_have_a_utilization_of_their_own():
    runs = []

    def run(card):
        runs.append(card.name)
        return ullage.estimate(train, gpu=card)

    cards = [ullage.gpu(name) for name in ("A100-40GB", "A100-80GB")]
    small, large = estimate_over_gpus(run, cards)
    assert len(runs) == 1
    assert (small.utilization.gpu, large.utilization.gpu) == ("A100-40GB", "A100-80GB")


def test_a_gpu_draws_no_more_than_its_board_may(estimated):
    for name in ("T4", "RTX-4090", "H200"):
        card = ullage.gpu(name)
        found = estimated.with_utilization(estimated.step_calls, card).utilization
        assert 0 < found.power_w <= card.power_w
        assert found.energy_j == pytest.approx(found.power_w * found.step_s)


def test_it_is_unknown_where_no_step_was_seen():
    assert ullage.estimate(lambda: torch.zeros(10, device="cuda"), gpu="H200").utilization is None
    assert ullage.estimate("torchvision:resnet18", batch_size=2, estimator="accelerate").utilization is None


def test_an_estimate_of_memory_does_not_fail_because_of_it(estimated):
    broken = replace(estimated.step_calls, calls=[{}])
    found = estimated.with_utilization(broken, ullage.gpu("H200"))
    assert found.utilization is None and found.peak_reserved == estimated.peak_reserved
    assert "how long a step takes is not known: KeyError: 'operator'" in found.notes
    assert found.with_utilization(broken, ullage.gpu("T4")).notes == found.notes


def test_a_jobs_estimate_has_each_gpu_by_its_requested_name():
    question = {
        "source": "torchvision:alexnet",
        "args": (),
        "module": False,
        "program": None,
        "launcher": (),
        "text": None,
    }
    options = {"batch_size": 2, "input_shape": [3, 64, 64]}
    gpus = ["NVIDIA H200", "T4"]  # a driver's name, and the catalogue's
    found = estimate_here(
        {
            "questions": [{**question, "options": options}],
            "advice": False,
            "conda": None,
            "gpus": gpus,
            "estimator": "ullage",
            "activity": None,
        }
    )
    assert found["utilization"].keys() == set(gpus) and found["gpu"] == "NVIDIA H200", "which takes more memory"
    assert found["utilization"]["T4"]["gpu_s"] > found["utilization"]["NVIDIA H200"]["gpu_s"]


def test_a_step_with_one_of_the_largest_batches_says_so(estimated):
    found = estimated.with_utilization(replace(estimated.step_calls, largest=True), ullage.gpu("H200")).utilization
    assert found.notes == ["batches vary in size: this is a step with one of the largest"]


# How long a training takes.

STEP = Utilization(
    gpu="A100-40GB",
    step_s=0.1,
    gpu_s=0.08,
    host_s=0.04,
    smact=0.8,
    smocc=0.4,
    drama=0.2,
    tensor=0.1,
    power_w=300.0,
    energy_j=30.0,
    flops=1e9,
    bytes=1e9,
    kernels=10,
    steady=True,
    measured=False,
    samples=50,
)


def test_epochs_become_hours_energy_and_money():
    plan = Training(epochs=2, samples=1_800_010, prices={"currency": "EUR", "kwh": 0.5, "hour": {"A100-40GB": 1.5}})
    found = plan.cost(STEP)
    assert found.steps == 2 * 36_001
    assert found.hours == pytest.approx(2.0, rel=1e-3) and found.kwh == pytest.approx(0.6, rel=1e-3)
    assert found.cost == pytest.approx(1.5 * found.hours + 0.5 * found.kwh)
    assert found.words == "2 epochs of 1,800,010 samples: 72,002 steps, 2 h, 0.6 kWh, 3.30 EUR"


def test_samples_alone_mean_one_epoch_and_steps_stay():
    assert Training(samples=100).cost(STEP).steps == 2
    assert Training(total_steps=36_000).cost(replace(STEP, samples=None)).hours == pytest.approx(1.0)
    assert Training(epochs=2).cost(STEP, epoch_samples=100).steps == 4
    assert Training(input_rate=10).cost(STEP) is None


def test_a_step_is_not_quicker_than_its_input():
    slow = STEP.fed_at(250)
    assert (slow.step_s, slow.input_s) == (0.2, 0.2) and slow.waits_for_input
    assert slow.smact == pytest.approx(0.4) and slow.busy == pytest.approx(0.4)
    assert slow.energy_j == pytest.approx(slow.power_w * slow.step_s) and STEP.energy_j < slow.energy_j < 60
    assert "the input: the GPU waits for it 60% of the step" in str(slow)
    quick = STEP.fed_at(1000)
    assert quick.step_s == STEP.step_s and not quick.waits_for_input
    assert "The data loader is not a part of it." in str(STEP) and "data loader" not in str(quick)


def test_the_limit_of_a_step_is_reported():
    assert STEP.limit_words == "the GPU: it works 80% of the step"
    assert replace(STEP, gpu_s=0.03, host_s=0.1).limit_words == "the host: the GPU waits for it 70% of the step"
    assert "Not measured on A100-40GB" in str(STEP) and "Not measured" not in str(replace(STEP, measured=True))
    assert "No step repeated" in str(replace(STEP, steady=False))


def test_a_gpu_without_a_price_is_named(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text('currency = "EUR"\n[hour]\nT4 = 0.5\n')
    found = Training(samples=100, prices=file).cost(STEP)
    assert found.cost is None and found.notes == [f"{file} has no price for A100-40GB"]
    file.write_text("kwh = 0.25\n")
    own_machine = Training(samples=100, prices=file).cost(STEP)
    assert own_machine.cost == pytest.approx(0.25 * own_machine.kwh)


def test_the_users_own_prices_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    assert Training(samples=100).cost(STEP).cost is None
    (tmp_path / "prices.toml").write_text('[hour]\n"A100-40GB" = 3600\n')
    assert Training(samples=100).cost(STEP).cost == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[hour]\nT4 = "cheap"\n', "T4: price must be at least 0, got 'cheap'"),
        ("[hour]\nT4 = -1\n", "T4: price must be at least 0"),
        ("[hour]\nT44 = 1\n", "T4"),
        ("hour = 3\n", r"must have a table \[hour\]"),
        ("[hours]\nT4 = 1\n", r"keys must be currency, kwh and \[hour\], got 'hours'"),
        ("[hour\n", "cannot read the prices in"),
    ],
)
def test_a_file_of_prices_that_makes_no_sense_is_refused(tmp_path, text, said):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(ullage.UllageError, match=said):
        Training(samples=100, prices=file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 3}, r"samples an epoch has is not known: give samples \(--samples N\)"),
        ({"epochs": 3, "total_steps": 5}, "either total_steps, or epochs and samples"),
        ({"samples": 0}, "samples must be a number above zero"),
        ({"prices": "prices.toml"}, "prices need the length of the training"),
        ({"samples": 10, "prices": "nowhere.toml"}, "cannot read the prices in nowhere.toml: No such file"),
    ],
)
def test_impossible_requests_are_refused_before_any_run(options, said):
    with pytest.raises(ullage.UllageError, match=said):
        ullage.estimate("torchvision:resnet18", gpu="H200", training=ullage.Training(**options))


def test_a_function_does_not_tell_its_samples():
    with pytest.raises(ullage.UllageError, match=r"give samples_per_step \(--samples-per-step N\)"):
        ullage.estimate(train, gpu="H200", training=ullage.Training(samples=100))
    found = ullage.estimate(train, gpu="H200", training=ullage.Training(samples=100, samples_per_step=8, input_rate=80))
    assert found.training.steps == 13 and found.utilization.step_s == pytest.approx(0.1)
    again = Estimate.from_dict(json.loads(found.to_json()))
    assert again.training == found.training


def test_an_estimate_survives_a_run_without_a_sample_count(estimated):
    for plan in (Training(epochs=3), Training(samples=9), Training(input_rate=9)):
        found = estimated.for_training(plan)
        assert found.training is None and found.utilization == estimated.utilization
        assert "is not known: give samples" in found.notes[-1]


def test_the_public_function_gives_the_utilization_alone():
    found = ullage.estimate(train, gpu="H200").utilization
    assert isinstance(found, Utilization)
    assert found == ullage.estimate(train, gpu="H200").utilization
    assert json.loads(found.to_json())["step_s"] == found.step_s
    assert "SMACT" in found._repr_html_() and "SMACT" in str(found)
    assert ullage.estimate(lambda: torch.zeros(10, device="cuda"), gpu="H200").utilization is None


def test_the_report_says_it_in_a_terminal_and_in_words(estimated):
    out = io.StringIO()
    print_report(estimated, Console(file=out, width=80, color_system=None))
    for text in (out.getvalue(), str(estimated), estimated._repr_html_()):
        assert all(words in text for words in ("the GPU works", "SMACT", "DRAMA", "J a step"))
    lines = out.getvalue().splitlines()
    assert any(line.split()[:2] == ["limited", "by"] for line in lines)
    without = replace(estimated, fits=False, headroom=-1)
    out.truncate(0)
    print_report(without, Console(file=out, width=80, color_system=None))
    assert "SMACT" not in out.getvalue() + str(without)


def test_the_table_over_gpus_has_steps_hours_and_cost(estimated):
    plan = Training(total_steps=10**9, prices={"currency": "EUR", "hour": {"H200": 3, "T4": 1}})
    cards = [ullage.gpu(name) for name in ("H200", "T4", "A100-80GB-MIG-1g.10gb")]
    estimates = [replace(estimated, gpu=card.name).with_utilization(estimated.step_calls, card) for card in cards]
    for shown in ([e.for_training(plan) for e in estimates], estimates):
        out = io.StringIO()
        print_gpu_table(shown, Console(file=out, width=80, color_system=None))
        assert max(map(len, out.getvalue().splitlines())) <= 80 and "step" in out.getvalue()
        assert ("EUR" in out.getvalue()) == ("cheapest on T4" in out.getvalue()) == (shown is not estimates)
    assert "MIG" in out.getvalue()
