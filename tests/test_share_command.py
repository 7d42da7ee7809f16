"""`ullage share` as a person types it, and `ullage.share`."""

import json
import sys
from dataclasses import replace

import pytest
from tests.commands import typed_in

import ullage
from ullage.errors import InvalidValue
from ullage.performance.sharing import HOWS, Sharing

SMALL = ("--batch-size", "2", "--input-shape", "3,32,32")


@pytest.fixture(scope="module")
def estimated():
    return ullage.estimate(ullage.Model("torchvision:resnet18", batch_size=2, input_shape=[3, 32, 32]), gpu="H200")


@pytest.fixture
def type_in(monkeypatch, capsys, tmp_path, estimated):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "mine.py").write_text("from torch import nn\ndef model(): return nn.Conv2d(3, 4, 3)\n")
    (tmp_path / "one.json").write_text(estimated.to_json(timeline=False))
    large = replace(estimated, upper=100 * 2**30, source="large")
    (tmp_path / "large.json").write_text(large.to_json(timeline=False))
    (tmp_path / "broken.json").write_text("{")
    return typed_in(monkeypatch, capsys)


def test_two_models_by_mps(type_in):
    code, out, _ = type_in("share", "torchvision:resnet18", "mine.py:model -b 4", *SMALL, "--gpu", "H200")
    assert code == 0 and out.startswith("H200, by MPS\nworth it: ") and "times the throughput" in out
    table = [line.split("  ")[0] for line in out.splitlines()]
    assert "torchvision:resnet18" in table and "mine.py:model -b 4" in table
    assert "step alone" in out and "waits for its host" in out and "GiB of 140 GiB" in out


def test_options_in_quotes_are_for_one_job(type_in):
    words = ["share", "mine.py:model", "mine.py:model -b 2048", *SMALL, "--gpu", "H200", "--json"]
    jobs = json.loads(type_in(*words)[1])["jobs"]
    assert [job["name"] for job in jobs] == words[1:3]
    assert jobs[1]["memory"] > jobs[0]["memory"]


def test_a_command_of_python_is_a_job(type_in, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(int(sys.argv[1]), 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(4):\n"
        "    model(torch.ones(4, int(sys.argv[1])).cuda()).sum().backward()\n"
        "    optimizer.step()\n"
    )
    jobs = ["one.json", f"{sys.executable} train.py 1048576"]
    code, out, err = type_in("share", *jobs, "--json")
    assert code == 0, err
    found = json.loads(out)["jobs"]
    assert [job["name"] for job in found] == jobs and found[1]["memory"] > 2 * 2**25


def test_classes_of_activity_are_added_up(type_in, tmp_path):
    pytest.importorskip("ullage_lab")
    rows = "".join(f"{f'Linear-{place}':>20} {'[-1, 100]':>25} {'10,100':>15}\n" for place in (1, 2))
    (tmp_path / "net_bs=64.model").write_text(f"{rows}Total params: 20,200\n")
    words = ("share", "net_bs=64.model", "torchvision:resnet18 -b 4", "--gpu", "H200", "--estimator")
    code, out, _ = type_in(*words, "gpuutilnet")
    assert code == 0 and out.startswith("job ") and "SMACT together: " in out and "80% up to which RAD-RM" in out
    code, out, _ = type_in(*words, "gpuutilnet", "--json")
    found = json.loads(out)
    classes = [each["activity"]["smact"] for each in found["jobs"]]
    assert found["smact"] == [sum(each[edge] for each in classes) for edge in ("least", "most")]
    code, _, err = type_in(*words, "horus")
    assert code == 2 and "must be one that predicts activity, such as gpuutilnet, got 'horus'" in err


def test_all_ways_are_compared(type_in):
    code, out, _ = type_in("share", "one.json", "one.json", "one.json", "--sharing", "all")
    assert code == 0 and "H200, by MPS" in out and "H200, time-sliced" in out
    assert "H200, on MIG instances 2g.35gb" in out and "MIG was not measured" in out
    assert "\nmost throughput: " in out
    values = json.loads(type_in("share", "one.json", "one.json", "--sharing", "all", "--json")[1])
    assert list(values) == list(HOWS)
    assert Sharing.from_dict(values["mig"]).profile == "3g.71gb"
    some = json.loads(type_in("share", "one.json", "one.json", "--sharing", "mps,mig:2g.35gb", "--json")[1])
    assert list(some) == ["mps", "mig:2g.35gb"]


def test_a_gpu_without_mig_is_compared_without_it(type_in):
    code, out, _ = type_in("share", "mine.py:model", "mine.py:model", *SMALL, "--gpu", "T4", "--sharing", "all")
    assert code == 0 and "MIG" not in out and "were measured on an H200, not on T4" in out


def test_jobs_that_do_not_fit_are_an_answer(type_in):
    code, out, _ = type_in("share", "large.json", "large.json")
    assert code == 0 and "NOT ENOUGH MEMORY on H200: they need up to 200 GiB of 140 GiB" in out
    code, out, _ = type_in("share", "large.json", "one.json", "--sharing", "mig")
    assert "NOT ENOUGH MEMORY on instances 3g.71gb" in out and "an instance has 69.5 GiB" in out
    assert "in none of these ways" in type_in("share", "large.json", "large.json", "--sharing", "all")[1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["one.json"], "at least two jobs"),
        (["one.json", "one.json", "--sharing", "msp"], "did you mean 'mps'"),
        (["one.json", "one.json", "--sharing", "mps:1g.18gb"], "no way of sharing named 'mps:1g.18gb'"),
        (["one.json", "one.json", "--sharing", "timeslice"], "did you mean 'time-slicing'?"),
        (["one.json", "one.json", "--sharing", "mig:1g.5gb"], "no MIG instance of H200 named '1g.5gb'"),
        (["one.json", "one.json", "--gpu", "T4"], "all estimates must be for T4, got one for H200"),
        (["one.json", "broken.json"], "cannot read broken.json"),
        (["one.json", "missing.json"], "cannot read missing.json: No such file"),
        (["one.json", "mine.py:model --gpu T4"], "--gpu is not for one job of several"),
        (["one.json", "mine.py:model --batch-sise 4"], "No such option"),
        (["one.json", "mine.py:model '"], "cannot read the job"),
        (["one.json", " "], "got an empty word"),
        (["one.json", "torchvision:resnet1"], "no torchvision model"),
    ],
)
def test_a_mistake_is_one_line(type_in, words, text):
    code, _, err = type_in("share", *words)
    assert code == 2 and text in err and len(err.strip().splitlines()) == 1


def test_from_python(estimated):
    pair = ullage.share([estimated, estimated.utilization], how="time-slicing")
    assert pair.gpu == "H200" and pair.fits is None and len(pair.jobs) == 2
    assert ullage.share([estimated, estimated]).fits is True
    assert str(pair).startswith("worth it: ") and "of its speed" in str(pair)
    with pytest.raises(InvalidValue, match="at least two"):
        ullage.share([estimated])
    with pytest.raises(InvalidValue, match="at least two"):
        ullage.share("torchvision:resnet18")
    with pytest.raises(InvalidValue, match="the time of a step of torchvision:resnet18 must be known"):
        ullage.share([estimated, replace(estimated, utilization=None)])
