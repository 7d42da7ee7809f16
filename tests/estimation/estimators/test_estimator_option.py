"""`ullage estimate … --estimator NAME`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import commands
from typer.testing import CliRunner

import ullage
import ullage.estimation.estimators
from ullage.cli.completion import estimators as complete
from ullage.cli.main import app
from ullage.estimation.asking import answer_over_gpus
from ullage.hardware import gpu
from ullage.jobs.job import request_of

runner = CliRunner()


def ask(*words: str, code: int = 0) -> str:
    done = runner.invoke(app, ["estimate", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_json_says_who_estimated_and_leaves_out_the_unknown() -> None:
    found = json.loads(ask("torchvision:resnet18", "--estimator", "accelerate", "--json"))
    assert (found["estimator"], found["figure_kind"], found["process_memory"]) == ("accelerate", "allocated", None)
    assert found["peak_allocated"] == sum(found["breakdown"].values())
    assert found["source"] == "torchvision:resnet18"


def test_the_report_of_another_estimator_shows_what_it_knows() -> None:
    text = ask("torchvision:resnet18", "--estimator", "deepspeed", "--set", "deepspeed.stage=3", "--gpu", "T4")
    assert "fits on T4" in text and "ZeRO stage 3" in text and "estimated by deepspeed" in text
    assert "nvidia-smi" not in text and "None" not in text


@pytest.mark.parametrize("name", ["horus", "gpumemnet"])
def test_gpus_of_a_generation_each_get_their_estimate(name: str) -> None:
    cards = [gpu("A100-40GB"), gpu("A100-80GB")]
    answers = answer_over_gpus(request_of("torchvision:resnet18", {}, name), cards)
    assert [answer.gpu_memory for answer in answers] == [card.usable for card in cards]


def test_a_job_that_does_not_fit_gets_no_advice_from_ullage() -> None:
    text = ask("torchvision:vgg16", "-b", "256", "--estimator", "horus", "--gpu", "T4")
    assert "DOES NOT FIT" in text and "would make it fit" not in text


def test_a_summary_file(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text("Linear-1     [-1, 10]     7,850\nTotal params: 7,850\n")
    found = json.loads(ask(str(file), "--estimator", "horus", "--batch-size", "32", "--json"))
    assert found["process_memory"] == 4 * (32 * (10 + 7850) + 7850) + (800 << 20)


def test_a_table_over_gpus() -> None:
    rows = json.loads(ask("torchvision:resnet18", "--estimator", "accelerate", "--gpu", "T4,H200", "--json"))
    assert [row["gpu"] for row in rows] == ["T4", "H200"]
    assert "T4" in ask("torchvision:resnet18", "--estimator", "accelerate", "--gpu", "T4,H200")


@pytest.mark.parametrize("name", ["oracle", "gpumemne"])
def test_an_unknown_estimator_is_one_clear_message(name: str) -> None:
    done = commands.ullage("estimate", "torchvision:resnet18", "--estimator", name)
    assert done.returncode == 2
    assert name in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--timeline", "t.html"], ["--snapshot", "s.pickle"]])
def test_options_of_ullage_alone_are_refused(words: list[str]) -> None:
    done = runner.invoke(app, ["estimate", "torchvision:resnet18", "--estimator", "horus", *words])
    assert done.exit_code != 0 and "is for Ullage's own estimate" in str(done.exception)


def test_completion_knows_all() -> None:
    assert complete("") == ullage.estimation.estimators.estimators()


def test_names_are_known_without_pytorch() -> None:
    code = "import sys; from ullage.cli.completion import estimators; estimators(''); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_another_estimator_for_a_script_reports_its_needs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit")
    done = runner.invoke(app, ["estimate", str(script), "--estimator", "faketensor"])
    assert done.exit_code != 0 and "this is a script" in str(done.exception)
    with pytest.raises(ullage.UllageError, match="this is a function"):
        ullage.estimate(print, estimator="horus")
