"""Plain `sbatch` on a cluster whose configuration `ullage slurm configure` wrote: the two lua files at work."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.commands import typed_in
from tests.manager.slurm.private_slurm import PrivateSlurm, missing
from tests.paths import ROOT

from ullage.manager.slurm import commands, configuration
from ullage.manager.slurm.commands import read_comment

GROUP = configuration.node_group("n[1-2]=4xA100-40GB")


@pytest.fixture(scope="module")
def _site():
    if missing():
        pytest.skip(f"Slurm is not installed ({', '.join(missing())}): as root 'make test-slurm' installs it")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    written = configuration.files([GROUP], "mps", str(folder))
    written = {name: text.replace("/run/ullage-mps", f"{folder}/mps") for name, text in written.items()}
    configuration.write_files(written, folder)
    lines = [
        line
        for line in written["slurm.conf.ullage"].splitlines()
        if line.startswith(("Job", "Cli", "Pro", "Epi", "Task"))
    ]
    cluster = PrivateSlurm(
        folder,
        nodes=2,
        gpus=GROUP.count,
        shards_per_gpu=GROUP.shards_per_gpu,
        gpu_type=GROUP.type,
        more="\n".join(lines),
    )
    try:
        with cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def site(_site, monkeypatch, tmp_path):
    _site.clear()
    for name, value in _site.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    _site.environment["ULLAGE_HOME"] = str(tmp_path / "home")
    return _site


def job(text, options="--gpus=1"):
    return f"#!/bin/bash\n#SBATCH {options} --output=%j.out\n{text}\n"


def test_plain_sbatch_asks_ullage_and_gets_shards(site, project):
    (project / "job.sh").write_text(job("#ULLAGE memory=12GiB\necho $SLURM_SHARDS_ON_NODE"))
    done = site.run("sbatch", "job.sh")
    number = int(done.stdout.split()[-1])
    assert "ullage: --gres=shard:12: 12 of a GPU's 39 shards" in done.stderr
    site.until_state(number, "COMPLETED")
    assert (project / f"{number}.out").read_text() == "12\n"
    (known,) = commands.jobs([number])
    assert read_comment(known.comment) == {"upper": 12 << 30, "gpu": "A100-40GB", "shards": 12}


def test_a_file_on_standard_input_is_read_again(site, project):
    (project / "job.sh").write_text(job("#ULLAGE memory=12GiB\necho $SLURM_SHARDS_ON_NODE"))
    with open("job.sh") as script:
        told = site.run("sbatch", "--parsable", stdin=script)
    assert "ullage: --gres=shard:12" in told.stderr
    site.until_state(int(told.stdout), "COMPLETED")
    assert (project / f"{int(told.stdout)}.out").read_text() == "12\n"
    piped = site.run("sbatch", "--parsable", "--hold", input=(project / "job.sh").read_text())
    assert "ullage" not in piped.stderr and commands.jobs([int(piped.stdout)])[0].shards is None


def test_the_filter_refuses_what_can_never_fit(site, project):
    (project / "job.sh").write_text(job("#ULLAGE memory=50GiB"))
    done = site.run("sbatch", "job.sh", check=False)
    assert done.returncode != 0 and "it needs up to 50.0 GiB" in done.stderr
    assert not site.run("squeue", "--noheader").stdout


def test_the_filter_can_be_left_out_and_leaves_other_jobs_alone(site, project):
    (project / "job.sh").write_text(job("#ULLAGE memory=50GiB"))
    site.environment["ULLAGE"] = "off"
    try:
        done = site.run("sbatch", "--hold", "job.sh")
    finally:
        del site.environment["ULLAGE"]
    assert "ullage" not in done.stderr
    (project / "job.sh").write_text(job("python train.py 4096", options="--ntasks=1"))
    assert site.run("sbatch", "--hold", "job.sh").stderr == ""


def test_a_broken_ullage_holds_no_job_up(site, project):
    path = site.folder / "cli_filter.lua"
    text = path.read_text()
    (project / "job.sh").write_text(job("#ULLAGE memory=12GiB"))
    try:
        path.write_text(re.sub(r'local ULLAGE = ".*"', 'local ULLAGE = "/no/such/program"', text))
        number = site.submit("--hold", "job.sh")
    finally:
        path.write_text(text)
    assert commands.jobs([number])[0].shards is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--gres=shard:40"], "a job can ask for at most 39 shards, which is a whole GPU, got 40"),
        (["--gres=shard:a100-40gb:72"], "a job can ask for at most 39 shards"),
        (["--gres=gpu:5"], "a job can ask for at most 4 GPUs on a node, got 5"),
        (["--gres=shard:2", '--comment=ullage:{"upper":99999999999}'], "it needs up to 93.1 GiB on one GPU"),
    ],
)
def test_the_controller_refuses_what_can_never_fit_by_itself(site, words, part):
    site.environment["ULLAGE"] = "off"
    try:
        done = site.run("sbatch", *words, "--wrap", "true", check=False)
    finally:
        del site.environment["ULLAGE"]
    assert done.returncode != 0 and part in done.stderr


def test_the_controllers_hook_starts_no_process(site):
    """So it answers at once whatever is down: it has no way to open a file, start a program or reach a service."""
    hook = (site.folder / "job_submit.lua").read_text()
    code = re.sub(r"--.*", "", hook)
    assert not re.search(r"\b(io|os|require|dofile|loadfile|package)\b", code)


def test_a_waiting_job_cannot_be_changed_to_what_never_fits(site):
    number = site.submit("--hold", "--gres=shard:2", "--output=/dev/null", "--wrap", "true")
    done = site.run("scontrol", "update", f"jobid={number}", "gres=shard:60", check=False)
    assert done.returncode != 0
    site.run("scontrol", "update", f"jobid={number}", "gres=shard:30")
    assert commands.jobs([number])[0].shards == 30


def test_the_mps_of_a_user_ends_with_the_last_job_with_shards(site, tmp_path):
    if os.getuid():
        pytest.skip("needs root: Slurm's prolog becomes other users")
    control = site.folder / "control"
    control.write_text(
        f'#!/bin/sh\necho "$@ $(cat)" >> {tmp_path}/asked\n[ "$1" = -d ] && touch {tmp_path}/up && exit\n'
        f"[ -e {tmp_path}/up ]\n"
    )
    control.chmod(0o755)
    for name in ("mps_prolog.sh", "mps_epilog.sh"):
        path = site.folder / name
        path.write_text(re.sub(r"^CONTROL=.*", f"CONTROL={control}", path.read_text(), flags=re.M))
    number = site.submit(
        "--gres=shard:3",
        "--output",
        tmp_path / "out",
        "--wrap",
        "echo $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; srun env | grep ^CUDA_MPS",
    )
    site.until_state(number, "COMPLETED")
    printed = (tmp_path / "out").read_text()
    assert f"CUDA_MPS_PIPE_DIRECTORY={site.folder}/mps/" in printed
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M" in printed
    site.until(lambda: "quit" in (tmp_path / "asked").read_text(), "the service is ended")


# configure


def test_files_are_written_once_and_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    ullage = typed_in(monkeypatch, capsys)
    words = ("slurm", "configure", "n[1-3]=4xA100-40GB", "h1=8xH200", "--write", tmp_path / "new")
    code, printed, _ = ullage(*words)
    assert code == 0 and str(tmp_path / "new" / "job_submit.lua") in printed
    assert "shard:1112" in (tmp_path / "new" / "slurm.conf.ullage").read_text()
    (tmp_path / "new" / "job_submit.lua").write_text("mine")
    code, _, errors = ullage(*words)
    assert code == 2 and "nothing was written" in errors
    assert (tmp_path / "new" / "job_submit.lua").read_text() == "mine"


def test_units_of_systemd_are_well_formed(tmp_path, monkeypatch, capsys):
    ullage = typed_in(monkeypatch, capsys)
    words = ("slurm", "configure", "n1=4xA100-40GB", "--systemd", "/shared/ullage", "--write", tmp_path / "new")
    assert ullage(*words)[0] == 0
    unit = tmp_path / "new" / configuration.UNIT
    assert unit.read_text().count("--folder /shared/ullage") == 1
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        assert done.returncode == 0 and "ullage-slurm" not in done.stderr, done.stderr
    code, _, errors = ullage("slurm", "configure", "n1=4xA100-40GB", "--sharing", "timeslice")
    assert code == 2 and "--sharing must be mps or time-slicing, got 'timeslice'" in errors
    code, _, errors = ullage("slurm", "configure", "n1=4xA100-40GB", "--systemd", "shared")
    assert code == 2 and "--systemd must be the path of a folder that all nodes share" in errors


@pytest.mark.parametrize("wrong", ["n1", "n1=", "n1=4xNothing", "n1=2xH200,T4", "a b=H200"])
def test_wrong_nodes_are_one_message(wrong, monkeypatch, capsys):
    code, _, errors = typed_in(monkeypatch, capsys)("slurm", "configure", wrong)
    assert code == 2 and errors.startswith("ullage: ") and len(errors.splitlines()) == 1


def test_the_files_are_part_of_the_package():
    assert '"manager/slurm/files/*"' in (ROOT / "pyproject.toml").read_text()
    assert sys.executable.rpartition("/")[0] in configuration.files([GROUP])["cli_filter.lua"]
