"""`estimate_script` as users call it: a process of its own, run as `python` would run it."""

import subprocess
import sys
import textwrap
import threading
from importlib.util import find_spec

import pytest
from tests.scripts import estimate_script

from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.scripts import parent
from ullage.estimation.timeline.trace import Trace
from ullage.jobs.ranks import Rank
from ullage.sandbox.parent import run

pytestmark = pytest.mark.usefixtures("warm")
TRAINING = """
def train(steps=10, batch=8):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad(); model(torch.randn(batch, 512, device="cuda")).sum().backward(); optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(source, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    return write


@pytest.fixture
def cold(monkeypatch):
    """A process that is started, as for the command, which has to import everything."""
    monkeypatch.setattr(parent, "run", run)


@pytest.mark.tiny
def test_a_script_runs_as_python_runs_it(script, tmp_path, capfd, cold):
    script("WIDTH = 512", "project/neighbour.py")
    for name in ("kept.pt", "best.pt", "old.pt"):
        (tmp_path / name).write_text("mine")
    name = script(
        f"""
import os, shutil, sys, torch
from torch import nn
from neighbour import WIDTH
assert __name__ == "__main__" and __file__ == sys.argv[0] == "project/train.py", (__file__, sys.argv)
assert sys.argv[1:] == ["--lr", "0.1"] and os.getcwd() == {str(tmp_path)!r}
assert sys.path[0] == {str(tmp_path / "project")!r} and sys.modules["__main__"].WIDTH == 512
{TRAINING}
os.makedirs("runs/1")
torch.save(nn.Linear(8, 8).cuda().state_dict(), "kept.pt")
torch.save({{"epoch": 1}}, "runs/1/last.pt")
shutil.copyfile("kept.pt", "best.pt")
os.remove("old.pt")
open("log.txt", "w").write("new")
print("a word of the script")
train(10**6)
""",
        "project/train.py",
    )
    estimate = estimate_script(name, ["--lr", "0.1"], gpu="A100-40GB", show_output=True)
    assert estimate.fits and estimate.gpu == "A100-40GB" and estimate.source == name
    assert estimate.steps >= 3 and estimate.phases == {"training": estimate.peak_reserved}
    shown = capfd.readouterr()
    assert "a word of the script" in shown.err and not shown.out
    assert {file.name for file in tmp_path.iterdir()} == {"project", "kept.pt", "best.pt", "old.pt"}
    assert all((tmp_path / name).read_text() == "mine" for name in ("kept.pt", "best.pt", "old.pt"))


@pytest.mark.slow
def test_a_module_started_by_torchrun_that_does_not_fit(script):
    script("", "package/__init__.py")
    script(
        f"""
import os, torch
from torch import nn
from . import __name__ as package
assert package == "package"
rank = int(os.environ["LOCAL_RANK"])
torch.distributed.init_process_group("nccl")
big = torch.empty(8 << 30, device=rank)
{TRAINING}
train()
""",
        "package/training.py",
    )
    estimate = estimate_script("package.training", module=True, gpu="RTX-4090")
    assert not estimate.fits and "CUDA out of memory" in estimate.out_of_memory
    assert estimate.peak_reserved > 32 << 30
    assert any("torchrun" in note for note in estimate.notes)
    assert any("without limit" in note for note in estimate.notes)


def test_a_training_process_that_the_script_starts_is_followed(script):
    name = script(
        f"""
import torch, torch.multiprocessing as mp
from torch import nn
{TRAINING}
if __name__ == "__main__":
    mp.set_start_method("spawn")
    process = mp.Process(target=train)
    process.start(); process.join()
"""
    )
    assert estimate_script(name).peak_allocated > 64 << 20


def test_the_scripts_last_words_are_shown_when_it_fails(script):
    name = script("import argparse\nargparse.ArgumentParser().parse_args()")
    with pytest.raises(ScriptFailed, match="exit code 2") as failure:
        estimate_script(name, ["--batch", "8"])
    assert "unrecognized arguments: --batch 8" in str(failure.value)


def test_a_crash_is_reported_with_the_scripts_line(script):
    name = script("import ctypes\nctypes.string_at(0)")
    with pytest.raises(ScriptFailed, match="was ended by SIGSEGV: compiled code may have read a tensor") as failure:
        estimate_script(name)
    assert 'train.py", line 2 in <module>' in str(failure.value)


def test_an_expired_time_limit_is_reported(script):
    name = script("import time\ntime.sleep(3600)")
    with pytest.raises(ScriptFailed, match="had come to no backward pass after 2 s"):
        estimate_script(name, timeout=2.0)


BUSY = f"""
import os, time, torch
from torch import nn
{TRAINING}
train(5)
sizes = iter(range(1, 10**9))
while True:
    torch.empty(next(sizes) * 512, device="cuda")
"""
# From here on the clock by which a script's time is over goes 40 s fast.
LATER = "import time; now = time.monotonic; time.monotonic = lambda: now() + 40"


def test_when_the_time_is_over_what_was_seen_is_the_answer(script):
    """The thread that answers reads what the script's own thread is changing at that moment."""
    estimate = estimate_script(script(BUSY.replace("sizes =", f"{LATER}\nsizes =")), timeout=40.0)
    assert estimate.steps == 5 and estimate.peak_allocated > 3 << 20
    assert any("the time of 40 s ended after 5 optimizer steps: later code" in note for note in estimate.notes)
    cut = next(entry for entry in estimate.left_out if entry["what"] == "what comes after the time limit")
    assert cut["covered"] is False and cut["adds"] > 0


def test_estimate_without_training_says_nothing_about_fitting(script):
    before = f"import torch\nx = torch.zeros(1 << 20, device='cuda')\n{LATER}\ntime.sleep(3600)"
    estimate = estimate_script(script(before), gpu="H200", timeout=40.0)
    assert estimate.before_training and estimate.mark == "?"
    assert estimate.verdict.startswith("fits so far on H200") and "has not trained one step" in estimate.verdict


def test_a_killed_process_answers_with_what_it_recorded(script):
    estimate = estimate_script(script(BUSY.replace("sizes =", "os.kill(os.getpid(), 9)\nsizes =")))
    assert estimate.steps >= 3 and estimate.peak_allocated > 3 << 20
    assert any("was ended by SIGKILL (was memory short?): later code" in note for note in estimate.notes)
    assert not all(part["covered"] for part in estimate.left_out)


@pytest.mark.slow
def test_a_hang_in_compiled_code_answers_with_what_it_recorded(script, monkeypatch):
    monkeypatch.setattr(parent, "_PATIENCE", 5.0)
    hangs = "import ctypes; ctypes.PyDLL(None).sleep(600)"  # with Python's lock held: no other thread has a turn
    estimate = estimate_script(script(BUSY.replace("sizes =", f"{hangs}\nsizes =")), timeout=20.0)
    assert any("took longer than 30 s: later code" in note for note in estimate.notes)


def test_a_script_that_dies_before_it_trains_fails(script):
    with pytest.raises(ScriptFailed, match="was ended by SIGKILL"):
        estimate_script(script("import os, torch\ntorch.empty(8, device='cuda')\nos.kill(os.getpid(), 9)"))


MISTAKES = [
    (("nowhere.py",), {}, "nowhere.py does not exist \\(in .: beside.py\\)"),
    (("folder",), {}, "folder is a folder \\(in folder: train.py\\)"),
    (("no.such.module",), {"module": True}, "must name a module"),
    (("beside.py",), {"steps": 0}, "steps must be at least 1"),
    (("beside.py",), {"timeout": 0}, "timeout must be more than 0"),
    (("beside.py",), {"gpu": "H20O"}, "no GPU named 'H20O'"),
]


@pytest.mark.parametrize(("args", "options", "told"), MISTAKES)
def test_a_mistake_is_reported_before_any_run(script, args, options, told):
    script("", "beside.py")
    script("", "folder/train.py")
    with pytest.raises((InvalidValue, LookupError), match=told):
        estimate_script(*args, **options)


APPENDS = f"""
import sys, time, torch
from torch import nn
{TRAINING}
with open("results.csv", "a") as results:
    results.write("of the estimate\\n")
    results.flush()
torch.save(nn.Linear(8, 8).cuda().state_dict(), "last.pt")
open("going", "w").close()
train(int(sys.argv[1]))
time.sleep(float(sys.argv[2]))
"""


def test_rows_that_a_running_job_writes_are_not_lost(script, tmp_path):
    """The same script runs as a job and appends to a file while it is estimated."""
    name, stop, rows = script(APPENDS), threading.Event(), []

    def job():
        with open(tmp_path / "results.csv", "a") as results:
            while not stop.wait(0.005):
                rows.append(f"{len(rows)}")
                results.write(f"{rows[-1]}\n")
                results.flush()

    thread = threading.Thread(target=job)
    thread.start()
    try:
        estimate_script(name, ["10", "0"])
    finally:
        stop.set()
        thread.join()
    assert (tmp_path / "results.csv").read_text().split() == rows and len(rows) > 10


KILLED = """
import ullage
ullage.estimate(ullage.Script("train.py", ["10", "600"], show_output=True), gpu="H200")
"""


def test_a_checkpoint_survives_an_interrupted_estimate(script, tmp_path):
    script(APPENDS.replace('open("going", "w").close()', 'print("going", flush=True)'))
    (tmp_path / "last.pt").write_bytes(b"three days of training")
    process = subprocess.Popen([sys.executable, "-c", KILLED], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert any("going" in line for line in process.stderr), "it has saved over last.pt"
    process.kill()
    process.wait()
    process.stderr.close()
    assert (tmp_path / "last.pt").read_bytes() == b"three days of training"
    assert {file.name for file in tmp_path.iterdir()} == {"train.py", "last.pt"}


def test_the_network_is_not_reached_unless_allowed(script):
    name = script("import urllib.request\nurllib.request.urlopen('http://ullage.example/weights.pt')")
    with pytest.raises(ScriptFailed, match=r"Type: ullage estimate train.py --network; or download it first"):
        estimate_script(name)


def test_too_many_bytes_are_reported(script, monkeypatch):
    monkeypatch.setattr(parent, "_LIMITS", {"written": 16 << 20})
    name = script("open('large', 'wb').write(bytes(64 << 20))\nimport time\ntime.sleep(60)")
    with pytest.raises(ScriptFailed, match="the process of train.py wrote more than 16.0 MiB"):
        estimate_script(name)


def test_the_trace_that_was_asked_for_is_filled(script):
    name = script(f"import torch\nfrom torch import nn\n{TRAINING}\ntrain()")
    trace = Trace()
    estimate_script(name, trace=trace)
    assert len(trace.operators)


@pytest.mark.slow
def test_another_rank_gets_the_objects_that_the_first_one_sends(script):
    name = script(
        """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
settings = [{"width": 512}] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(settings, src=0)
model = nn.Linear(settings[0]["width"], 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(10):
    optimizer.zero_grad(); model(torch.randn(8, 512, device="cuda")).sum().backward(); optimizer.step()
"""
    )
    found = estimate_script(name, gpu="H200", rank=Rank(4, 3))
    assert found.breakdown["parameters"] == 4 * (512 * 512 + 512) and found.steps > 1


def needs(module, package):
    """They look for a GPU when they are imported, so that is left to the script."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"the package {package} is not installed")


@needs("deepspeed", "deepspeed")
@pytest.mark.parametrize("splits_at_once", [False, True])
def test_deepspeed_shards_its_states_and_makes_its_steps(script, splits_at_once):
    name = script(
        f"""
            import contextlib, deepspeed, torch

            config = {{
                "train_micro_batch_size_per_gpu": 4, "bf16": {{"enabled": True}}, "zero_optimization": {{"stage": 3}},
                "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4, "torch_adam": True}}}},
                "gradient_clipping": 1.0,
            }}
            deepspeed.init_distributed()
            with deepspeed.zero.Init(config_dict_or_path=config) if {splits_at_once} else contextlib.nullcontext():
                model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            for _ in range(6):
                inputs = torch.randn(4, 1024, device=engine.device, dtype=torch.bfloat16)
                engine.backward(engine(inputs).float().pow(2).mean())
                engine.step()
            parts = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
            assert parts == 6 * (1024 * 1024 + 1024) // 8, parts
        """
    )
    found = estimate_script(name, gpu="H200", rank=Rank(8, 0), steps=None)
    assert found.steps == 6 and "failed" not in " ".join(found.notes)


@needs("megatron", "megatron-core")
def test_layers_and_optimizer_of_megatron_core_are_split(script):
    name = script(
        """
            import os, torch
            from megatron.core import parallel_state
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.distributed.finalize_model_grads import finalize_model_grads
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.models.gpt.gpt_model import GPTModel
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
            from megatron.core.transformer.transformer_config import TransformerConfig

            torch.distributed.init_process_group("nccl")
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
            model_parallel_cuda_manual_seed(123)
            config = TransformerConfig(
                num_layers=2, hidden_size=256, num_attention_heads=8, use_cpu_initialization=True, bf16=True,
                params_dtype=torch.bfloat16, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
                masked_softmax_fusion=False, persist_layer_norm=False,
            )
            layers = get_gpt_layer_local_spec()
            model = GPTModel(config, layers, vocab_size=1024, max_sequence_length=64).cuda().bfloat16()
            assert model.decoder.layers[0].mlp.linear_fc1.weight.shape == (4 * 256 // 2, 256)
            splits = DistributedDataParallelConfig(use_distributed_optimizer=True)
            model = DistributedDataParallel(config, splits, model)
            how = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True)
            optimizer = get_megatron_optimizer(how, [model])
            tokens = torch.randint(0, 1024, (2, 64), device="cuda")
            mask = torch.tril(torch.ones(2, 1, 64, 64, device="cuda")) < 0.5
            for _ in range(6):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                places = torch.arange(64, device="cuda").repeat(2, 1)
                model(tokens, places, mask, labels=tokens).float().mean().backward()
                finalize_model_grads([model])
                optimizer.step()
        """
    )
    assert estimate_script(name, gpu="H200", rank=Rank(8, 0)).steps > 2
