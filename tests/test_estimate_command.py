"""`ullage estimate` and `ullage max-batch` as a person types them; every mistake gets one message."""

import json
import os
import subprocess
import sys

import pytest
from tests.commands import typed_in

from ullage.hardware import gpu

SMALL = ("--batch-size", "2", "--input-shape", "3,32,32", "--gpu", "T4")


@pytest.fixture
def type_in(monkeypatch, capsys, tmp_path):
    """Run the command line in this process: a process for each would take minutes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def model(): return nn.Conv2d(3, 4, 3)\n"
        "def broken(): raise OSError('the weights are not there')\n"
    )
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"model_type": "gpt2000"}')
    return typed_in(monkeypatch, capsys)


@pytest.mark.tiny
def test_a_model_as_json(type_in):
    code, out, _ = type_in("estimate", "torchvision:resnet18", *SMALL, "--json", "-O", "sgd", "-p", "amp_fp16")
    values = json.loads(out)
    assert code == 0 and values["gpu"] == "T4" and values["fits"] and values["steps"] == 3
    assert "timeline" not in values


def test_how_long_a_training_takes_and_what_it_costs(type_in, tmp_path):
    words = ["estimate", "mine.py:model", "-b", "4", "--input-shape", "3,32,32"]
    (tmp_path / "prices.toml").write_text('currency = "EUR"\n[hour]\nT4 = 0.5\n')
    asked = ["--epochs", "2", "--samples", "400", "--prices", "prices.toml"]
    found = json.loads(type_in(*words, "-g", "T4", *asked, "--json")[1])
    assert found["training"]["steps"] == 200
    assert found["training"]["cost"] == pytest.approx(found["training"]["hours"] / 2)
    _, out, _ = type_in(*words, "-g", "T4,L4", *asked, "--input-rate", "40")
    assert "100 ms" in out and "0.00 EUR" in out and "no price is known for L4" in out
    for options, said in (
        (["--epochs", "2"], "give samples (--samples N)"),
        (["--prices", "prices.toml"], "prices need the length of the training"),
        (["--epochs", "2", "--estimator", "accelerate"], "--epochs is for Ullage's own estimate"),
    ):
        code, _, err = type_in(*words, "-g", "T4", *options)
        assert code == 2 and said in " ".join(err.split())


def test_a_default_gpu_is_an_assumption(type_in, monkeypatch):
    words = ["estimate", "mine.py:model", "-b", "1", "--input-shape", "3,32,32"]
    _, out, _ = type_in(*words)
    assert "the GPU defaults to H200; name another with --gpu NAME" in " ".join(out.split())
    assert json.loads(type_in(*words, "--json")[1])["gpu_assumed"] is True
    assert "GPU defaults to" not in type_in(*words, "--gpu", "H200")[1]
    monkeypatch.setattr("ullage.hardware.lookup.local_gpus", lambda: [gpu("T4")])
    assert "the GPU defaults to T4" in " ".join(type_in(*words)[1].split())


def test_an_unknown_gpu_names_the_command_that_lists_them(type_in):
    code, _, err = type_in("estimate", "torchvision:resnet18", "--gpu", "Radeon")
    assert code == 2 and len(err) < 200 and "'ullage gpus' lists all" in err


def test_a_job_that_does_not_fit_gets_an_answer(type_in):
    code, out, _ = type_in("estimate", "torchvision:resnet18", "-b", "4096", "-g", "RTX-2060", "--json")
    assert code == 0 and not json.loads(out)["fits"]


def test_max_batch_and_jobs(type_in):
    code, out, _ = type_in("max-batch", "mine.py:model", "--input-shape", "3,512,512", "--gpu", "RTX-2060")
    assert code == 0 and "largest batch size on RTX-2060" in out and "estimates in" in out
    code, out, _ = type_in("max-batch", "mine.py:model", "--jobs", *SMALL)
    assert code == 0 and "such jobs fit on T4 together" in out
    code, out, _ = type_in("max-batch", "mine.py:model", "--jobs", *SMALL, "--json")
    assert json.loads(out)["jobs"] > 1


MISTAKES = [
    ("estimate resnet50", "did you mean torchvision:resnet50 or timm:resnet50"),
    ("estimate torchvision:resnet5O", "did you mean 'resnet50'"),
    ("estimate timm:convnxt_tiny", "convnext_tiny"),
    ("estimate hf:GPT2LMHeadMode", "'GPT2LMHeadModel'"),
    ("estimate hf:GPT2LMHeadModel --set n_layers=2", "did you mean 'n_layer'"),
    ("estimate hf:GPT2LMHeadModel --set n_layer", "must be KEY=VALUE"),
    ("estimate hf:GPT2LMHeadModel --set n_head=7", "must be divisible"),
    ("estimate hf:GPT2LMHeadModel --set config=nothing.json", "cannot read nothing.json"),
    ("estimate hf:GPT2LMHeadModel --set config=broken.json", "broken.json is not JSON"),
    ("estimate hf:GPT2LMHeadModel --set config=list.json", "must be a JSON object"),
    ("estimate hf:GPT2LMHeadModel --set config=other.json", "did you mean 'gpt2'"),
    ("estimate hf:./nowhere", "cannot read"),
    ("estimate hf:AutoModelForCausalLM", "--set model_type=gpt2"),
    ("estimate hf:GPT2LMHeadModel --input-shape 3,32,32", "use --sequence-length"),
    ("estimate hf:DetrForObjectDetection", "write a training function"),
    ("estimate torchvison:resnet50", "did you mean 'torchvision'"),
    ("estimate torchvision:", "model must be torchvision:NAME"),
    ("estimate torchvision:resnet50 --sequence-length 12", "use --input-shape"),
    ("estimate torchvision:resnet50 --input-shape 3,abc", "must be whole numbers such as 3,224,224"),
    ("estimate torchvision:resnet50 --input-shape 224,224", "input shape must have 3 numbers"),
    ("estimate torchvision:resnet50 --input-shape 1,64,64", "to have 3 channels, but got 1"),
    ("estimate torchvision:resnet50 --batch-size 0", "batch_size must be a whole number of at least 1"),
    ("estimate torchvision:resnet50 --optimizer adamm", "did you mean 'adam'"),
    ("estimate torchvision:resnet50 --precision fp8", "one of fp32, tf32"),
    ("estimate torchvision:resnet50 --set attention=flsh", "did you mean 'flash'"),
    ("estimate torchvision:resnet50 --set attention=eager", "no eager attention"),
    ("estimate torchvision:resnet50 --set freeze=layr1", "did you mean 'layer1'"),
    ("estimate torchvision:resnet50 --set config=x.json", "has no config file"),
    ("estimate torchvision:resnet50 --gpu A100-40G", "did you mean 'A100-40GB'"),
    ("estimate torchvision:resnet50 --steps 0", "--steps"),
    ("estimate torchvision:resnet50 --timeline no/such/folder/x.html", "cannot write"),
    ("estimate mine.py:model --input-shape 3,8,8 --checkpointing", "no blocks"),
    ("estimate torchvision:raft_large", "optical flow"),
    ("estimate torchvision:resnet50 -- --epochs 3", "arguments after -- are for scripts"),
    ("estimate torchvision:resnet50 --timeout 3", "'timeout' is an option for a script"),
    ("estimate mine.py:model", "needs the shape of its input"),
    ("estimate mine.py:broken", "raised OSError: the weights are not there"),
    ("estimate mine.py:modle", "did you mean 'model'"),
    ("estimate nothing.py:model", "there is no file nothing.py"),
    ("estimate no.such.module:model", "no module named"),
    ("estimate mine.py --batch-size 3", "'batch_size' is an option for a model"),
    ("estimate mine.py --timeout soon", "duration must look like"),
    ("max-batch mine.py", "--batch-arg"),
    ("max-batch torchvision:resnet50 --maximize batch", "did you mean 'batch-size'"),
]


@pytest.mark.parametrize(("typed", "text"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_gets_one_message(type_in, typed, text):
    code, out, err = type_in(*typed.split())
    assert code == 2 and text in err
    assert err.startswith("ullage: ") and len(err.strip().splitlines()) == 1 and not out


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("estimat x", "Did you mean"),
        ("estimate", "Missing argument"),
        ("estimate torchvision:resnet50 --optimzer sgd", "--optimizer"),
        ("estimate torchvision:resnet50 --batch-size many", "--batch-size"),
    ],
)
def test_a_word_that_the_command_line_does_not_know_is_code_2(type_in, typed, text):
    code, _, err = type_in(*typed.split())
    assert code == 2 and text in err and err.startswith("ullage: ") and "--help" in err


def test_help_has_examples_and_groups(type_in):
    code, out, _ = type_in("estimate", "--help")
    assert code == 0
    for words in ("Examples", "ullage estimate torchvision:resnet50", "Training time and cost", "KEY=VALUE"):
        assert words in out


def complete(*words):
    """What the shell is offered, in a real process; nothing heavy may be imported for it."""
    environment = os.environ | {
        "_ULLAGE_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": " ".join(["ullage", *words]),
    }
    code = (
        "import sys; sys.argv = ['ullage']\n"
        "from ullage.cli.main import app\n"
        "try: app(prog_name='ullage')\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("estimate", "torchvision:resnet5"), "resnet50"),
        (("estimate", "x", "--gpu", "A100"), "A100-40GB"),
        (("max-batch", "x", "--precision", "amp"), "amp_bf16"),
    ],
)
def test_the_shell_completes_names_without_pytorch(words, offered):
    out, heavy = complete(*words)
    assert offered in out and heavy == "False"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("estimate", "no_such_script.py"), "no_such_script.py does not exist"),
        (("estimate", "torchvision:resnet5O"), "did you mean 'resnet50'"),
        (("estimate", "timm:resnet5O"), "did you mean 'resnet50'"),
        (("estimate", "hf:GPT2LMHeadModell"), "did you mean 'GPT2LMHeadModel'"),
        (("estimate", "torchvision:resnet50", "--gpu", "H20O"), "did you mean 'H20' or 'H200'"),
        (("estimate", "torchvision:resnet50", "--precision", "fp31"), "no precision named 'fp31'"),
        (("estimate", "torchvision:resnet50", "--gpux", "H200"), "No such option: --gpux"),
        (("estimat", "train.py"), "Did you mean 'estimate'"),
    ],
)
def test_a_mistake_is_reported_before_pytorch_is_imported(words, said):
    code = (
        "import sys\n"
        "from ullage.cli.main import main\n"
        "try: main()\n"
        "finally: print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert said in done.stderr and done.returncode and done.stdout.strip() == "set()", done


@pytest.mark.parametrize("command", ["check", "max-batch", "plan"])
def test_a_missing_script_is_one_line(type_in, command):
    code, out, err = type_in(command, "no_such_script.py")
    assert code == 2 and not out and "no_such_script.py does not exist" in err and len(err.splitlines()) == 1


def test_a_word_after_module_is_not_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.py").write_text("print('no training')")
    words = [sys.executable, "-m", "ullage", "estimate", "other.py", "--module"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "must name a module" in done.stderr, done
