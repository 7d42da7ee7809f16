"""One table of exit codes for all commands: 2 for what was typed wrongly, 1 for what failed; one line says why."""

import re
import sys
from pathlib import Path

import pytest
from tests.test_options import COMMANDS

from ullage.cli.main import main


@pytest.fixture
def type_in(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("runs.jsonl").write_text('{"id": "one", "model": "mlp:x", "widths": [8, 4], "batch": 2}\n')

    def run(line):
        monkeypatch.setattr(sys, "argv", ["ullage", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
            raise SystemExit(0)
        return stop.value.code or 0, capsys.readouterr().err

    return run


NAMES_THAT_ARE_NOT_THERE = [
    "estimate torchvision:resnet5",
    "estimate torchvision:resnet18 --gpu H20O",
    "estimate torchvision:resnet18 --gpu T4,H20O",
    "estimate torchvision:resnet18 --estimator nobody",
    "estimate torchvision:resnet18 --optimizer nobody",
    "estimate nothing.py",
    "check torchvision:resnet5",
    "check torchvision:resnet18 --gpu H20O",
    "check nothing.py",
    "max-batch torchvision:resnet5",
    "max-batch torchvision:resnet18 --gpu H20O",
    "max-batch torchvision:resnet18 --maximize nothing",
    "share torchvision:resnet5 torchvision:resnet18",
    "share torchvision:resnet18 torchvision:resnet18 --sharing nothing",
    "share torchvision:resnet18 torchvision:resnet18 --gpu H20O",
    "compare torchvision:resnet5",
    "compare torchvision:resnet18 --estimators nobody",
    "compare torchvision:resnet18 --gpu H20O",
    "gpus nothing-like-it",
    "top --cards /no/such/folder",
    "queue --format nothing",
    "history --format nothing",
    "submit nothing.toml",
    "serve --settings nothing.toml",
    "serve --virtual H20O",
    "serve --virtual T4 --policy nobody",
    "lab evaluate nobody",
    "evaluate --truth nothing.jsonl",
    "lab evaluate --truth runs.jsonl --estimators nobody",
    "diff nobody --truth runs.jsonl",
    "diff one --truth nothing.jsonl",
    "measure nothing.jsonl",
    "lab train gpumemnet --data nothing.parquet --family mlp --out x.safetensors",
    "lab train gpumemnet --data nothing.parquet --family nobody --out x.safetensors",
    "lab draw dataset --family nobody",
    "lab measure dataset nothing.jsonl --out x.jsonl",
    "lab data clean nothing.jsonl --out x.parquet",
    "lab data show nothing.parquet",
    "lab train convolutions nothing.jsonl --held-out",
]


@pytest.mark.parametrize("line", NAMES_THAT_ARE_NOT_THERE)
def test_a_name_that_is_not_there_exits_with_2_and_one_line(type_in, line):
    code, said = type_in(line)
    assert code == 2, said
    assert said.startswith("ullage: ") and len(said.strip().splitlines()) == 1 and len(said) < 700, said


@pytest.mark.parametrize("path", COMMANDS)
def test_an_unknown_option_exits_with_2_and_names_the_help(type_in, path):
    code, said = type_in(f"{path} --no-such-option")
    assert code == 2 and re.search(r"^ullage: .*--help'\)\n$", said), said


def test_a_missing_value_names_the_help_of_its_command(type_in):
    code, said = type_in("slurm configure --write")
    assert code == 2 and said.startswith("ullage: Option '--write' requires an argument. (see '"), said
    assert said.endswith("ullage slurm configure --help')\n"), said


WITHOUT_A_DAEMON = [
    "queue",
    "queue --over",
    "status",
    "status 1",
    "logs 1",
    "cancel 1",
    "edit 1 --priority 3",
    "edit 1 --hold",
    "edit 1 --release",
    "edit 1 --requeue",
    "wait 1",
    "report",
    "admin drain 0",
    "admin resume 0",
    "admin token list",
    "admin token create",
    "admin token revoke 1",
    "attach 1",
    "submit true",
]


@pytest.mark.parametrize("line", WITHOUT_A_DAEMON)
def test_commands_without_a_daemon_fail_with_1(type_in, line):
    code, said = type_in(line)
    assert code == 1 and said == "ullage: no daemon is running: start it with `ullage serve`\n"


def test_check_says_with_its_exit_code_whether_a_job_fits(type_in):
    small = "check torchvision:resnet18 --batch-size 2 --input-shape 3,32,32 --gpu T4"
    assert type_in(small)[0] == 0
    assert type_in(f"{small} --margin 100%")[0] == 1
    assert type_in(f"{small} --margin much")[0] == 2
