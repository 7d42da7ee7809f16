"""How a script may end, and what is said of it."""

import threading
import time

import pytest
from tests.scripts import estimate_script

import ullage
from ullage.errors import ScriptFailed
from ullage.estimation.scripts.failures import is_own, message, where_now
from ullage.estimation.scripts.when_to_stop import RunWatcher

HEAD = """
import sys, torch
from torch import nn
model = nn.Linear(64, 64)
def train(steps, device="cuda"):
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad(); model(torch.randn(4, 64, device=device)).sum().backward(); optimizer.step()
"""


def told(answer, network=False):
    return message(answer, "train.py", 60.0, network)


def test_a_script_that_ends_early_gives_what_was_seen(follow):
    answer = follow(HEAD + "train(1); sys.exit(0)")
    assert answer["estimate"]["steps"] == 1
    assert any("ended after 1 optimizer step, before" in note for note in answer["estimate"]["notes"])


def test_steps_none_lets_a_script_run_to_its_end(follow):
    assert follow(HEAD + "train(40)", steps=None)["estimate"]["steps"] == 40


def test_code_that_catches_everything_is_stopped(follow):
    answer = follow(HEAD + "try:\n    train(10**6)\nexcept:\n    print('caught')\nfinally:\n    print('finally')")
    assert answer["status"] == "estimated" and "finally" in answer["printed"]


def test_a_trainer_that_misses_gpus_says_how_to_give_them(follow):
    """As Lightning puts it for `devices=12`."""
    text = f"You requested gpu: {[*range(12)]}\\n But your machine only has: [0]"
    assert told(follow(f"import torch\nraise ValueError('{text}')")).endswith(
        "Type: ullage estimate train.py --world-size 12"
    )


def test_a_terminal_has_a_size(follow):
    source = "lines, columns = map(int, os.popen('stty size', 'r').read().split())\nassert columns > 0 < lines\n"
    assert follow(HEAD + f"import os\n{source}assert os.get_terminal_size()\ntrain(3)")["status"] == "estimated"


def test_inference_alone_is_estimated(follow):
    source = HEAD + "model.cuda().eval()\nwith torch.no_grad():\n    model(torch.randn(8, 64, device='cuda'))"
    estimate = follow(source)["estimate"]
    assert estimate["phases"] == {"inference": estimate["peak_reserved"]}
    assert any("without a backward pass" in note for note in estimate["notes"])


def test_a_failure_after_training_settled_is_a_note(follow):
    answer = follow(HEAD + "train(10)\nraise ValueError('no metric')")
    assert any("failed (ValueError: no metric)" in note for note in answer["estimate"]["notes"])


def test_a_failure_over_assumed_values_after_training_is_a_note(follow):
    """A metric of NumPy's, say, that finds nothing to count. What fails without a value read is the script's bug."""
    answer = follow(HEAD + "train(1)\nbest = model.weight.sum().item()\nraise ValueError('no class found')")
    (note,) = [note for note in answer["estimate"]["notes"] if "failed" in note]
    assert note.startswith("after 1 optimizer step the script failed, perhaps because data was missing (ValueError")
    assert "what comes after the script failed" in [entry["what"] for entry in answer["estimate"]["left_out"]]
    assert follow(HEAD + "train(1)\nraise ValueError('no class found')")["status"] != "estimated"


def test_a_script_with_network_access_gets_no_hint_about_it(follow):
    answer = follow("import urllib.error; raise urllib.error.URLError('no name')")
    assert "Type: ullage estimate train.py --network" in told(answer)
    assert "did not get it" in told(answer, network=True) and "--network" not in told(answer, network=True)
    under_torchrun = told(answer | {"launched": True})
    assert "Type: the same line as before, with --network after 'ullage estimate';" in under_torchrun


REFUSED = "torch.cuda.memory.CUDAPluggableAllocator('a', 'b', 'c')"
FAILURES = {
    "train(3, 'cpu')": "never used the GPU in 3 optimizer steps",
    "train(1000, 'cpu')": "never used the GPU in 10 optimizer steps",
    "print(1)": 'no tensor was made on "cuda". Is there an option',
    "print('two GPUs needed')": "If it needs several GPUs, say how many with --world-size",
    "torch.optim.SGD(model.parameters(), 0.1, verbose=True)": "Was it written for another version of PyTorch",
    "import subprocess; subprocess.run([sys.executable, '-c', '1'])": "it started another program",
    "raise ValueError('too deep')": "ValueError: too deep (line ",
    "open('data/train.csv')": "needs data that is not there: FileNotFoundError",
    "raise RuntimeError('Dataset not found or corrupted. You can use download=True')": "needs data that is not there",
    "raise OSError('Error no file named model.safetensors found in directory bert')": "needs data that is not there",
    "import urllib.error; raise urllib.error.URLError('no name')": "asked the network for something",
    "import not_a_package": " -m pip install not_a_package, or name a Python that has it",
    "from torch.optim import NotThere": "). The script needs another release than torch ",
    "import torch.not_a_part": "does not have: it was written for another release",
    "sys.path.insert(0, '.'); import pathlib; pathlib.Path('nets').mkdir(); import nets.wide": ", which is not in ",
    "raise ModuleNotFoundError('install x[all]>=4')": "fails: ModuleNotFoundError: install x[all]>=4",
    "sys.exit('give me a config')": "exit code 1, before anything",
    "import argparse; argparse.ArgumentParser().parse_args(['--lr'])": "exit code 2 (argparse uses it for",
    "torch.zeros(1, device='cuda:1')": "asked for a second GPU",
    "torch.cuda.set_device(3)": "asked for a second GPU",
    REFUSED: "cannot follow torch.cuda.CUDAPluggableAllocator",
    "from torch.utils.cpp_extension import load; load('norms', ['x.cu']).forward(1)": "cannot follow norms.forward, a",
    "raise ImportError('libc10_cuda.so: cannot open shared object file', name='norms')": "needs norms, an extension",
    f"try:\n    {REFUSED}\nexcept Exception:\n    sys.exit(3)": "cannot follow torch.cuda.CUDAPluggableAllocator",
    "def f(:": "is not Python",
    "from .models import net": "Type, from above it: ullage estimate --module train",
    "import subprocess; subprocess.run(['nvidia-smi', '-x'], check=True)": "asked the NVIDIA driver, which",
    "import subprocess; subprocess.run(['no-such-program'])": "needs the program no-such-program, which is not there",
    "import flash_attn": "compiled code for GPUs that the virtual GPU cannot follow",
    "torch.ops.flash_attn.forward(1)": "needs the operator flash_attn::forward, which is not there (line ",
    "bytearray(1 << 45)": "asked for more memory than this machine has: MemoryError",
    "class E(Exception): pass\nraise E('no config\\n\\n  in it')": "train.py fails: E: no config in it (line ",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_gets_one_clear_message(follow, line):
    text = told(follow(HEAD + line))
    assert FAILURES[line] in text
    assert "\n" not in text


def test_another_thread_sees_the_line_that_the_script_is_at():
    found = []
    thread = threading.Thread(target=lambda: found.append(where_now()))
    code = "def wait():\n    thread.start()\n    thread.join()\nwait()"
    exec(compile(code, "train.py", "exec"), {"thread": thread})
    assert found[0]["file"] == "train.py" and found[0]["line"] in (2, 3)
    assert f"(line {found[0]['line']} of train.py)" in told({"kind": "timeout", **found[0]})


OF_GPUS = {
    "assert torch.cuda.device_count() > 1, 'needs two'": "fails: AssertionError: needs two (line ",
    "print(model.cuda()(torch.randn(4, 64).cuda()).sum().item())\nraise ValueError('no loss')": "fails: ValueError: no",
    "raise ValueError('give me a GPU of 80 GB')": "fails: ValueError: give me a GPU of 80 GB (line ",
}


@pytest.mark.parametrize("line", OF_GPUS)
def test_a_failure_another_gpu_may_avoid_is_nobodys_bug(follow, line):
    answer = follow(HEAD + line)
    assert not is_own(answer) and OF_GPUS[line] in told(answer)
    assert "It ran with one virtual GPU, cuda:0, whose tensors have no data" in told(answer)


@pytest.mark.parametrize("line", [REFUSED, "torch.empty(1 << 40, device='cuda')", "model.cuda()"])
def test_a_traceback_from_ullage_ends_at_the_scripts_line(follow, line):
    answer = follow(HEAD + f"model = nn.Linear(1 << 20, 1 << 20)\ndef go():\n    {line}\ngo()")
    trace = answer["trace"].splitlines()
    assert line in trace[-3] + trace[-2] and "/ullage/" not in answer["trace"], answer["trace"]
    assert trace[0].startswith("Traceback") and "script.py" in trace[1]


OWN = {
    "raise ValueError('unknown network')": "train.py fails: ValueError: unknown network (line ",
    "{}['lr']": "train.py fails: KeyError: 'lr' (line ",
    "import json; json.loads('{')": "train.py fails: json.decoder.JSONDecodeError",
    "raise KeyboardInterrupt": "train.py fails: KeyboardInterrupt (line ",
    "model(torch.randn(4, 65))": "fails: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x65 and ",
    "nn.Linear(8, 2).cuda()(torch.randn(4, 9).cuda())": "fails: RuntimeError: a and b must have same reduction dim",
    "nn.Conv2d(3, 8, 3).cuda()(torch.randn(2, 4, 8, 8).cuda())": "fails: RuntimeError: Given groups=1, weight of ",
    "torch.randn(2, 8).cuda().view(3, 5)": "fails: RuntimeError: shape '[3, 5]' is invalid for input of size 16 (",
    "torch.utils.data.DataLoader([], 2, shuffle=True)": "fails: ValueError: num_samples should be a positive integer",
    "torch.optim.SGD([], 0.1)": "fails: ValueError: optimizer got an empty parameter list (line ",
    "open('data/train.csv')": "needs data that is not there: FileNotFoundError: [Errno 2] No such file or directory",
    "class D(list):\n    def __getitem__(self, n): raise TypeError('no flow')\n"
    "list(torch.utils.data.DataLoader(D([1]), num_workers=1))": "fails: TypeError: no flow (in a worker of a Data",
}


BUG_OF_ULLAGE = """
import linecache, ullage
file, line = ullage.__path__[0] + "/virtual/blocks.py", "assert torch is None, 'too few blocks'"
linecache.cache[file] = len(line), None, [line], file
exec(compile(line, file, "exec"))
"""


@pytest.mark.parametrize("line", OWN)
def test_a_bug_of_the_script_is_not_called_one_of_ullage(follow, line):
    answer = follow(HEAD + line)
    assert is_own(answer) and OWN[line] in told(answer) and "report" not in told(answer)


@pytest.mark.parametrize(
    "line",
    [
        "if (model.cuda()(torch.randn(4, 64, device='cuda')).sum().item() == 1.0):\n    raise ValueError('no loss')",
        "torch.cuda.no_such_thing()",
        "torch.zeros(1, device='cuda:1')",
        "(model.cuda()(torch.randn(4, 64).cuda()) > 0).nonzero().view(9, 2)",
        REFUSED,
        "raise RuntimeError('Dataset not found or corrupted')",
        BUG_OF_ULLAGE,
        "import os; os.environ['LOCAL_RANK']",
        "sys.exit(1)",
    ],
)
def test_a_failure_a_real_gpu_may_avoid_is_not_the_scripts_bug(follow, line):
    assert not is_own(follow(HEAD + line))


@pytest.mark.parametrize(
    "line", ["import not_a_package", "def f(:", "import argparse; argparse.ArgumentParser().parse_args(['--lr'])"]
)
def test_wrong_code_and_arguments_are_the_scripts_failure(follow, line):
    assert is_own(follow(HEAD + line))


def test_out_of_memory_is_reported_and_measurable_without_limit(follow):
    source = HEAD + "big = [torch.empty(2**30, device='cuda') for _ in range(40)]\ntrain(5)"
    answer = follow(source, gpu="RTX-4090")
    assert "CUDA out of memory" in answer["out_of_memory"]
    assert follow(source, gpu="RTX-4090", limited=False)["estimate"]["peak_reserved"] > 160 << 30


def test_out_of_memory_caught_at_the_first_step_counts(follow):
    source = HEAD + "try:\n    torch.empty(2**40, device='cuda')\nexcept RuntimeError:\n    print('skipped')"
    assert "CUDA out of memory" in follow(source)["out_of_memory"]


def test_a_package_next_to_the_script_names_pythons_search(tmp_path, monkeypatch):
    (tmp_path / "nets").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/train.py").write_text("import torch, nets")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptFailed, match=f"type: PYTHONPATH={tmp_path} ullage estimate tools/train.py"):
        estimate_script("tools/train.py")


def test_compile_time_does_not_count_as_time_of_following(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with ullage.virtual_gpu("H200") as card:
        watcher = RunWatcher(card, 1, lambda: None, lambda: None)
        clock[0] += 5
        watcher._look_around()
        until = watcher.look_until
        with card.compiling.running(), card.compiling.running():
            clock[0] += 90
            assert watcher.look_until == until + 90, "also while it is at work"
        clock[0] += 4
        assert not watcher._has_looked_enough() and watcher.look_until == until + 90
        clock[0] += 2
        assert watcher._has_looked_enough()
