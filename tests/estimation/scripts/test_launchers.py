"""Programs that start a script as many ranks: which of their words are the script's, and what they set for it."""

import os

import pytest

from ullage.cli.main import with_launcher_apart
from ullage.cli.options import request_from
from ullage.errors import InvalidValue
from ullage.estimation.jobs.launchers import launched
from ullage.jobs.ranks import Rank

TRAIN = """
    import os
    import torch
    import torch.distributed as dist

    def train(*args):
        device = torch.cuda.current_device()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad(); model(torch.randn(8, 64, device="cuda")).sum().backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mpirun -np 8 --map-by ppr:4:node --report-bindings python train.py -n 2", (8, 2, ("mpirun",))),
        ("mpiexec -n 8 -ppn 4 -genv A 1 ./train.py", (8, 2, ("mpirun",))),
        ("mpirun -H a:4,b:4 -np 8 -x NCCL_DEBUG=INFO --mca btl tcp,self python train.py", (8, 2, ("mpirun",))),
        ("mpirun --allow-run-as-root -n 4 python train.py", (4, 1, ("mpirun",))),
        ("srun -N 2 --ntasks-per-node=4 --gpus-per-node 4 python train.py", (8, 2, ("srun",))),
        ("srun -n4 python train.py", (4, 1, ("srun",))),
        ("srun -N2 torchrun --nnodes 2 --nproc-per-node 8 train.py", (16, 2, ())),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", (2, 1, ())),
        ("mpirun python train.py", (0, 1, ("mpirun",))),
        (
            "accelerate launch --config_file fsdp.yaml --num_processes 8 train.py --lr 1",
            (8, 1, ("accelerate", "launch", "--config_file", "fsdp.yaml", "--num_processes", "8")),
        ),
    ],
)
def test_the_ranks_of_a_command(words, found):
    script = launched(words.split()).script
    assert os.path.basename(script.source) == "train.py"
    assert (script.world_size, script.nodes, script.launched_by) == found


def test_variables_of_the_launchers_options_are_set():
    words = "mpirun -x A=1 -x HOME -genv B 2 -n 2 python train.py"
    assert launched(words.split()).variables == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mpirun -n 2 python a.py : -n 2 python b.py", "several programs"),
        ("mpirun -wdir /tmp -n 2 python a.py", "another folder"),
        ("mpirun python a.py", "does not say how many ranks"),
        ("torchrun --nproc-per-node gpu a.py", "does not say how many ranks"),
        ("srun -n 2 hostname", "must start a script"),
        ("horovodrun -np 4 python a.py", "Ullage does not follow horovodrun; type the script alone, with --world-size"),
    ],
)
def test_scripts_that_cannot_be_followed_are_reported(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    source, *args = words.split()
    with pytest.raises(InvalidValue, match=message):
        request_from(source, args)


def test_options_of_an_unsupported_launcher_stay_its_own():
    typed = with_launcher_apart("estimate", ["--gpu", "H200", "horovodrun", "-np", "4", "python", "a.py"])
    assert typed[:4] == ["--gpu", "H200", "--", "horovodrun"]


@pytest.mark.parametrize("words", ["mpirun -n 8 python", "srun -n 8 python", "accelerate launch --num_processes 8"])
def test_the_words_of_a_launcher_are_its_own(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    typed = with_launcher_apart("estimate", ["--gpu", "H200", *words.split(), "train.py", "--lr", "1"])
    assert typed[:3] == ["--gpu", "H200", "--"]
    request = request_from(typed[3], typed[4:])
    assert request.script is not None
    assert (request.script.path, request.script.args, request.ranks.size) == ("train.py", ("--lr", "1"), 8)
    assert request.ranks.launcher.split()[0] == words.split()[0]


@pytest.mark.parametrize(
    ("launcher", "rank", "size", "local"),
    [
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ],
)
def test_a_rank_has_the_variables_of_its_launcher_alone(estimated, launcher, rank, size, local):
    with Rank(8, 6, nodes=2, launcher=launcher).entered():
        found = estimated(
            TRAIN
            + f"""
    assert "RANK" not in os.environ and torch.cuda.device_count() == 4
    torch.cuda.set_device(int(os.environ["{local}"]))
    dist.init_process_group("nccl", rank=int(os.environ["{rank}"]), world_size=int(os.environ["{size}"]),
                            init_method="tcp://10.0.0.1:29500")
    train()
"""
        )
    assert [note for note in found["notes"] if note.startswith("rank 6 of 8 was followed")]


def test_a_script_that_launches_a_function_runs_as_one_rank(estimated):
    found = estimated(
        TRAIN
        + """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def start(name):
        dist.init_process_group("nccl")
        train()
        return name

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4, run_id="mine", rdzv_backend="c10d")
    assert elastic_launch(config, start)("a") == {0: "a"}
"""
    )
    assert [note for note in found["notes"] if note.startswith("rank 0 of 4 was followed")]


@pytest.mark.parametrize("joins", [True, False])
def test_of_separately_started_ranks_the_first_is_followed(estimated, joins):
    found = estimated(
        TRAIN
        + f"""
    import torch.multiprocessing as mp

    def start(rank, ranks):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        train()
        dist.destroy_process_group()

    processes = [mp.Process(target=start, args=(rank, 4)) for rank in range(4)]
    for process in processes:
        process.start()
    if {joins}:
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
"""
    )
    assert [note for note in found["notes"] if note.startswith("rank 0 of 4 was followed")]
    assert [note for note in found["notes"] if "another rank: it was not followed (3 times)" in note]


def test_accelerate_says_itself_what_its_configuration_sets(estimated, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
    )
    found = estimated(
        """
        import os, sys, torch
        from accelerate import Accelerator

        assert sys.argv[1:] == ["--lr", "1"] and os.environ["FSDP_VERSION"] == "2", sys.argv
        accelerator = Accelerator()
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print(accelerator.distributed_type, accelerator.mixed_precision)
        for _ in range(6):
            optimizer.zero_grad()
            accelerator.backward(model(torch.randn(8, 64, device="cuda")).sum())
            optimizer.step()
        """,
        "--lr",
        "1",
        launcher=["accelerate", "launch", "--config_file", "fsdp.yaml"],
    )
    assert found["printed"].split()[:2] == ["DistributedType.FSDP", "bf16"]
    assert [note for note in found["notes"] if note.startswith("rank 0 of 4 was followed")]
