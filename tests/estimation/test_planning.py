"""`ullage.plan` and `ullage plan`: on how many GPUs, and spread how, a job fits."""

import json

import pytest
import torch
import torch.distributed as dist
from tests.commands import typed_in

import ullage
from ullage.errors import InvalidValue, ScriptFailed, UnknownName
from ullage.estimation.planning.asking import read_gpus
from ullage.estimation.scripts.parent import many_runs
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.parent import run

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MODEL = ullage.Model("hf:LlamaForCausalLM", settings=LLAMA, sequence_length=32, batch_size=2, optimizer="sgd")


def by_hand():
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.zeros(4, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist

kind = sys.argv[1]
if kind == "broken" or kind == "pair" and os.environ["WORLD_SIZE"] == "1":
    raise ValueError(f"I need two GPUs; forked: {'ullage.estimation.asking' in sys.modules}")
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if kind == "hangs" and ranks > 1:
    time.sleep(3600)
weights = torch.zeros(1 << 20 + (rank if kind == "stages" else 0), device="cuda", requires_grad=True)
if kind != "alone":
    dist.init_process_group("nccl")
data, sampler = torch.utils.data.TensorDataset(torch.zeros(64, 4)), None
if kind == "shared":
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
for (samples,) in torch.utils.data.DataLoader(data, 8, sampler=sampler):
    (weights * 2).sum().backward()
    if kind == "stages" and ranks > 1:
        dist.send(weights[:8].detach(), 1) if rank == 0 else dist.recv(weights.grad[:8], rank - 1)
    elif kind != "alone":
        dist.all_reduce(weights.grad)  # each rank has samples of its own, or all have the same
    torch.optim.SGD([weights], 0.1).step()
"""


@pytest.fixture(scope="module")
def forked():
    with many_runs(of_ranks=True):
        yield


@pytest.fixture
def of_script(forked, tmp_path, monkeypatch):
    """A plan of a script that shares its work in one of several ways."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return lambda kind, gpus="1..2xH100", **how: ullage.plan(
        ullage.Script("train.py", [kind], timeout=how.pop("timeout", 300.0)), gpus, **how
    )


@pytest.fixture(scope="module")
def found():
    return ullage.plan(MODEL, "1..4xH100", interconnect="pcie3", checkpointing=False)


def row(found, gpus, strategy):
    return next(row for row in found.rows if (row.gpus, row.strategy) == (gpus, strategy))


def test_every_number_of_gpus_is_tried_in_every_way(found):
    ways = ["ddp", "fsdp2", "tp", "pp"]
    assert [(row.gpus, row.strategy) for row in found.rows] == [
        (1, "one GPU"),
        *((count, way) for count in (2, 4) for way in ways),
    ]
    assert all(row.fits for row in found.rows if (row.gpus, row.strategy) not in [(4, "tp"), (2, "pp"), (4, "pp")])


def test_plans_that_cannot_run_give_a_reason(found):
    assert "num_key_value_heads" in row(found, 4, "tp").why_not
    assert "num_key_value_heads" in str(found) and "a pipeline of 4 stages needs at least 4 layers" in str(found)


def test_pieces_get_smaller_and_whole_models_do_not(found):
    def weights(gpus, way):
        return row(found, gpus, way).estimate.breakdown["parameters"]

    assert weights(2, "ddp") == weights(4, "ddp") > weights(2, "fsdp2") > weights(4, "fsdp2")
    assert weights(2, "ddp") > weights(2, "tp")


def test_ranks_of_tensor_parallelism_share_their_samples(found):
    assert row(found, 2, "tp").data_ranks == 1 and row(found, 4, "fsdp2").data_ranks == 4
    one = row(found, 2, "tp")
    assert one.samples_per_s == pytest.approx(2 / one.estimate.utilization.step_s)


def test_the_fastest_has_the_most_samples_a_second(found):
    rates = [row.samples_per_s for row in found.rows if row.fits]
    assert found.fastest.samples_per_s == max(rates)
    assert found.fewest.gpus == 1


def test_a_shared_run_is_what_a_run_of_its_own_would_be(found):
    model, how = ullage.Model("torchvision:alexnet", batch_size=2, optimizer="sgd"), {"interconnect": "pcie3"}
    shared = ullage.plan(model, "2..4xA100-80GB", checkpointing=False, parallel="ddp", **how).rows[1]
    alone = ullage.estimate(model, gpu="A100-80GB", ranks=ullage.Ranks(4, parallel="ddp", **how))
    assert shared.same_run
    assert not row(found, 4, "ddp").same_run  # multicast on an H100 takes memory for each GPU
    assert (shared.estimate.process_memory, shared.estimate.upper) == (alone.process_memory, alone.upper)
    assert shared.estimate.utilization == alone.utilization
    assert alone.utilization.collectives[0]["ranks"] == 4


def test_the_plan_as_json(found):
    told = json.loads(json.dumps(found.to_dict()))
    assert told["gpu"] == "H100-80GB" and told["rows"][told["fastest"]]["samples_per_s"] == found.fastest.samples_per_s
    assert told["rows"][1]["estimate"]["utilization"]["interconnect"] == "pcie3,eth-100"


def comparable(found):
    """The plan as plain values, without the time that it took."""
    rows = [row | {"estimate": row["estimate"] and row["estimate"] | {"seconds": None}} for row in found["rows"]]
    return found | {"rows": rows}


@pytest.mark.slow  # two more plans; another test compares a row with an estimate of its own
def test_parallel_rows_equal_sequential_ones():
    model = ullage.Model("torchvision:alexnet", batch_size=2, optimizer="sgd")
    options = {"parallel": ["ddp", "tp"], "checkpointing": False}
    seen = []
    one, many = (
        ullage.plan(model, "1..2xT4", workers=workers, progress=lambda *told: seen.append(told), **options)
        for workers in (1, 2)
    )
    assert comparable(one.to_dict()) == comparable(many.to_dict())
    assert any(row.estimate for row in many.rows) and any(row.why_not for row in many.rows)
    assert {(row, total) for row, _, total in seen[len(one.rows) :]} == {
        (row, 3) for row, _, _ in seen[: len(one.rows)]
    }


def test_ctrl_c_ends_the_scripts_that_are_estimated_at_once(of_script):
    def stop(row, done, total):
        if row.gpus > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at once: the scripts go on for longer than a test may take
        of_script("hangs", "1..4xH100", workers=3, progress=stop, timeout=3600)


def test_no_worker_is_refused():
    with pytest.raises(InvalidValue, match="workers must be at least 1, got 0"):
        ullage.plan("torchvision:alexnet", "2xT4", workers=0)


def test_a_global_batch_is_shared_by_the_ranks():
    found = ullage.plan(
        ullage.Model("torchvision:alexnet", optimizer="sgd"),
        "1..4xH100",
        global_batch=6,
        checkpointing=False,
        parallel="ddp",
    )
    assert [(row.batch_size, row.fits) for row in found.rows] == [(6, True), (3, True), (1, False)]
    assert "6 samples cannot be shared evenly by 4 ranks" in str(found)


def test_code_has_its_own_way():
    found = ullage.plan(by_hand, "1..4xT4")
    ways = [(row.gpus, row.strategy, row.fits) for row in found.rows]
    assert ways == [(1, "its own", True), (2, "its own", True), (4, "its own", True)]
    assert found.rows[2].estimate.utilization.collectives[0]["ranks"] == 4
    with pytest.raises(InvalidValue, match="a script has its own ways"):
        ullage.plan(by_hand, "2xT4", parallel="tp")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_of_a_script_have_samples_of_their_own(of_script, workers):
    found = of_script("data", workers=workers)
    assert [(row.gpus, row.strategy, row.batch_size, row.data_ranks) for row in found.rows] == [
        (1, "its own", 8, 1),
        (2, "its own", 8, 2),
    ]
    assert found.fastest.gpus == 2 and found.fastest.estimate.utilization.collectives[0]["ranks"] == 2
    assert "not tried" not in str(found)


@pytest.mark.slow
def test_ranks_share_samples_if_the_sampler_of_a_script_says_so(of_script):
    row = of_script("shared", "2xH100").rows[0]
    assert (row.batch_size, row.data_ranks) == (8, 1)


def test_ranks_that_exchange_activations_use_the_same_samples():
    def split():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
        layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).cuda()
        model = parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.zeros(4, 256, device="cuda")).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("data"))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    assert ullage.plan(split, "4xT4").rows[0].data_ranks == 2


@pytest.mark.slow
def test_script_stages_share_samples_and_the_largest_decides(of_script):
    row = of_script("stages", "2xH100").rows[0]
    assert [each["rank"] for each in row.estimate.ranks] == [0, 1] and row.data_ranks == 1
    assert row.estimate.peak_allocated == row.estimate.ranks[1]["peak_allocated"]


@pytest.mark.slow
def test_ranks_that_send_nothing_are_no_way_to_use_more_gpus(of_script):
    found = of_script("alone", "1..4xH100")
    assert [row.fits for row in found.rows] == [True, False, False] and found.fastest.gpus == 1
    assert "on 2, 4 GPUs: its ranks send each other nothing in a step" in " ".join(str(found).split())


@pytest.mark.slow
def test_a_script_failing_on_some_gpu_counts_reports_it_there(of_script):
    found = of_script("pair")
    assert "I need two GPUs" in found.rows[0].why_not and found.rows[1].fits


def test_a_script_failing_on_all_counts_is_an_error_from_forks(of_script):
    with pytest.raises(ScriptFailed, match="train.py fails: ValueError: I need two GPUs") as told:
        of_script("broken")
    if "forked: False" in str(told.value) and run("os.path:split", {}, private=Sandbox()).private != "overlays":
        pytest.skip("this system refuses namespaces or overlays")
    assert "forked: True" in str(told.value)


@pytest.mark.parametrize(
    ("text", "clusters"),
    [
        ("H100", [(1, 1)]),
        ("8xA100-80GB", [(8, 1)]),
        ("1..6xT4", [(1, 1), (2, 1), (4, 1), (6, 1)]),
        ("8..64xH100", [(8, 1), (16, 2), (32, 4), (64, 8)]),
        ("2x8xH100", [(16, 2)]),
        ("1..4x4xL4", [(4, 1), (8, 2), (16, 4)]),
        ("4 x RTX-4090", [(4, 1)]),
    ],
)
def test_gpus_are_read(text, clusters):
    assert [(one.gpus, one.nodes) for one in read_gpus(text)[1]] == clusters


@pytest.mark.parametrize("text", ["", "0xH100", "8..2xH100", "12xH100", "2x0xH100", "4xH1000", "x"])
def test_gpus_that_make_no_sense_are_refused(text):
    with pytest.raises((InvalidValue, UnknownName)):
        read_gpus(text)


def test_the_command_prints_the_table(monkeypatch, capsys):
    run = typed_in(monkeypatch, capsys)
    words = ["hf:LlamaForCausalLM", "--gpus", "1..2xH100", "--parallel", "fsdp2", "-b", "2", "-O", "sgd"]
    words += [
        "--sequence-length",
        "32",
        *(word for key, value in LLAMA.items() for word in ("--set", f"{key}={value}")),
    ]
    code, out, _ = run("plan", *words, "--workers", "1")
    assert code == 0 and "★" in out and "fsdp2 +ac" in out and "fewest GPUs: 1 GPU" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, error = run("plan", *words, "--parallel", "xp")
    assert code == 2 and "ddp" in error
