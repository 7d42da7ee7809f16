"""Job files: TOML and `.rad`, and what is said of bad ones."""

import csv
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.paths import ROOT

from ullage import estimate
from ullage.errors import InvalidValue, UllageError
from ullage.jobs.job_files import LARGEST_FILE, JobSpec, read_job

LISTING = """\
# assumption is that model.txt file is in the same directory
conda activate tf # specifying the conda environment
python resnet.py --b 128 # command to execute
model: resnet.txt # model summary file name
batch_size: 128 # batch size
policy: exclusive/ collocation
"""


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def message(path):
    with pytest.raises(InvalidValue) as caught:
        read_job(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text.replace(str(path), "FILE")


def test_everything_that_a_toml_file_can_say(write, tmp_path):
    job = read_job(
        write(
            "job.toml",
            """
            command = ["python", "train.py", "--name", "a b"]
            name = "resnet, wide"
            cwd = "project"
            venv = "/opt/venv"
            gpus = 2
            memory = "12GiB"
            host_memory = 1000000
            model = "torchvision:resnet50"
            batch_size = 64
            estimator = "horus"
            policy = "exclusive"
            priority = -5
            time_limit = "1.5h"
            resumable = true
            checkpoint_signal = "USR2"
            checkpoint_lead = "5m"
            array = "1-3,10%2"
            after = [17, "any:18", "12_all", "any:12_{index}", "prepare"]
            begin = 2026-11-20T08:00:00Z
            retries = 3
            hold = true
            min_speed = 0.9
            mps_threads = 50
            mps_memory = "4GiB"
            [env]
            OMP_NUM_THREADS = 4
            WORD = "x=y"
            [estimate]
            optimizer = "adamw"
            """,
        )
    ).spec
    assert job.command == ["python", "train.py", "--name", "a b"]
    assert job.cwd == str(tmp_path / "project")
    assert job.to_dict() == {
        "command": ["python", "train.py", "--name", "a b"],
        "name": "resnet, wide",
        "cwd": str(tmp_path / "project"),
        "venv": "/opt/venv",
        "gpus": 2,
        "memory": 12 << 30,
        "host_memory": 1000000,
        "model": "torchvision:resnet50",
        "batch_size": 64,
        "estimator": "horus",
        "exclusive": True,
        "priority": -5,
        "time_limit": 5400.0,
        "resumable": True,
        "checkpoint_signal": "USR2",
        "checkpoint_lead": 300.0,
        "array": [1, 2, 3, 10],
        "throttle": 2,
        "after": [
            {"kind": "ok", "job": 17},
            {"kind": "any", "job": 18},
            {"kind": "ok", "job": "12_all"},
            {"kind": "any", "job": "12_{index}"},
            {"kind": "ok", "job": "prepare"},
        ],
        "begin": 1795161600.0,
        "retries": 3,
        "hold": True,
        "min_speed": 0.9,
        "mps_threads": 50,
        "mps_memory": 4 << 30,
        "env": {"OMP_NUM_THREADS": "4", "WORD": "x=y"},
        "estimate": {"optimizer": "adamw"},
    }


def test_command_in_one_line_is_split_and_no_shell_is_involved(write):
    job = read_job(write("job.toml", "command = \"python train.py --word 'a b; rm -rf $HOME' > out\"")).spec
    assert job.command == ["python", "train.py", "--word", "a b; rm -rf $HOME", ">", "out"]
    assert job.to_dict() == {"command": job.command}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "FILE: command is missing"),
        ("command = []", "FILE, line 1: command: list should have at least 1 item after validation, not 0, got []"),
        ("command = ''", "FILE, line 1: command: list should have at least 1 item after validation, not 0, got []"),
        ('command = "python \'x"', "FILE, line 1: command: quotes in a command must match, got "),
        ('command = ["a\\u0000"]', "FILE, line 1: command.0: "),
        ("command = 'a'\n\nmemry = 3", "FILE, line 3: there is no 'memry'; did you mean 'memory'?"),
        ("command = 'a'\nmemory = 'much'", "FILE, line 2: memory: size must look like 512MiB, 40GB or 1.5GiB, got"),
        (f"command = 'a'\nmemory = '{'9' * 400}'", "FILE, line 2: memory: size must look like 512MiB, "),
        ("command = 'a'\nmemory = 0", "FILE, line 2: memory: input should be greater than 0, got 0"),
        ("command = 'a'\ngpus = true\n", "FILE, line 2: gpus: value must be a number, got true"),
        ("command = 'a'\ngpus = 2.5", "FILE, line 2: gpus: "),
        ("command = 'a'\ntime_limit = nan", "FILE, line 2: time_limit: "),
        ("command = 'a'\narray = '5-1'", "FILE, line 2: array: indices must look like 1-20, 0-10:2 or 1,5,7, got"),
        (
            "command = 'a'\narray = '0-999999999'",
            "FILE, line 2: array: number of indices must be at most 10000, got more in",
        ),
        ("command = 'a'\narray = [1, 1]", "FILE, line 2: array: indices must be different numbers"),
        (
            "command = 'a'\nafter = [1.5]",
            "FILE, line 2: after.0: job must be given as 17, 12_3, 12_all, a name, ok:17 or any:17, got '1.5'",
        ),
        ("command = 'a'\nthrottle = 2", "FILE: throttle: the job has no array to limit"),
        ("command = 'a'\narray = '1-3%0'", "FILE: throttle: input should be greater than or equal to 1, got '0'"),
        ("command = 'a'\nbegin = 'soon'", "FILE, line 2: begin: time must look like 2026-11-20T08:00, 22:00 or now"),
        ("command = 'a'\nretries = 1\nrequeue = false", "FILE: requeue: a job that is never started twice cannot"),
        ("command = 'a'\nafter = 0", "FILE, line 2: after.0: job must be given as 17"),
        ("command = 'a'\npolicy = 'magm'", "FILE, line 2: policy must be exclusive or collocation, got 'magm'"),
        ("command = 'a'\nnotes = ['x']", "FILE, line 2: there is no 'notes'"),
        ("command = 'a'\nname = ''", "FILE, line 2: name: "),
        ("command = 'a'\n[env]\n'A=B' = 'c'", "FILE, line 2: env: names of variables must not be empty or contain ="),
        ("command = 'a'\nvenv = 'v'\nconda = 'c'", "FILE: environment must be a venv or a conda environment, got both"),
        ("command = 'a'\ncommand = 'b'", "FILE must be valid TOML: Cannot overwrite a value (at the end, line 2)"),
        ("command =", "FILE must be valid TOML: Invalid value (at the end, line 1)"),
        ("x = " + "[" * 5000, "FILE must be valid TOML: "),
        ("x = " + "9" * 5000, "FILE must be valid TOML: "),
        (b"command = 'a'\nname = '\xff'", "FILE, line 2: text must be UTF-8, got the byte 0xff"),
        (b"#" * (LARGEST_FILE + 1), "a job file must have at most 256 KiB, got more in FILE"),
    ],
)
def test_a_bad_toml_file_gets_one_message_with_its_line(write, content, said):
    assert message(write("job.toml", content)).startswith(said)


def test_invalid_job_files_are_refused(tmp_path, write):
    assert "does not exist" in message(tmp_path / "none.toml")
    assert "must end in .toml or .rad" in message(write("job.yaml", "command: a"))
    (tmp_path / "folder.rad").mkdir()
    assert "is a folder" in message(tmp_path / "folder.rad")
    with pytest.raises(InvalidValue, match=r"must be a job file|cannot be read"):
        read_job("nul\x00.toml")


def test_the_listing_of_the_dissertation(write, tmp_path):
    file = read_job(write("job.rad", LISTING))
    assert file.spec.to_dict() == {
        "conda": "tf",
        "model": str(tmp_path / "resnet.txt"),
        "command": ["python", "resnet.py", "--b", "128"],
        "batch_size": 128,
        "exclusive": False,  # the listing names both
    }
    assert file.notes == ()


@pytest.mark.parametrize(("policy", "exclusive"), [("exclusive", True), ("collocation", False), ("Exclusive ", True)])
def test_the_policy_of_the_keyed_form(write, policy, exclusive):
    job = read_job(
        write("job.rad", f"python a.py\nbatch_size:8\npolicy:{policy}\ngpus:2\nmodel: torchvision:resnet50\n")
    ).spec
    assert (job.exclusive, job.gpus, job.batch_size, job.model) == (exclusive, 2, 8, "torchvision:resnet50")


def test_the_positional_form(write, tmp_path):
    text = "# as it is\nsource venv/bin/activate\npython 'a b.py' -b 8  # run\nm.model\n/data\n128\nexclusive\n2\n"
    text += "100\n1.5\n3\n4"
    file = read_job(write("job.rad", text.replace("\n", "\r\n")))
    job = file.spec
    assert job.command == ["python", "a b.py", "-b", "8"] and job.venv == str(tmp_path / "venv")
    assert (job.batch_size, job.gpus, job.exclusive) == (128, 2, False)
    assert job.model == str(tmp_path / "m.model")
    assert file.notes == (
        "policy 'exclusive' was not followed: in this form of .rad files the site decides",
        "the file says batch size 128, its command 8",
    )
    assert job.recorded == {"horus": 1 << 20, "faketensor": 3 << 20, "gpumemnet": 4 << 20}
    assert read_job(write("short.rad", "python a.py")).spec.to_dict() == {"command": ["python", "a.py"]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "FILE: the command to run"),
        ("# only\n\nconda activate tf", "FILE: the command to run after the environment is missing"),
        ("conda activate tf\nmodel: x", "FILE, line 2: the command to run"),
        ("python a\nmodle: x.txt", "FILE, line 2: there is no 'modle'; did you mean 'model'?"),
        ("python a\ngpus: 2\nx.txt", "FILE, line 3: line must look like 'gpus: 2', got 'x.txt'"),
        ("python a\ngpus: 2\n\ngpus: 3", "FILE, line 4: gpus is there twice; it is in line 2 too"),
        ("python a\ngpus: many", "FILE, line 2: gpus: "),
        ("python a\npolicy: exclusive/ collocation\npolicy: exclusive", "FILE, line 3: policy is there twice"),
        ("python a\nx\ndata\nmany", "FILE, line 4: batch_size: "),
        ("python a\nx\ndata\n1\nfirst", "FILE, line 5: policy must be exclusive or collocation, got 'first'"),
        ("python a\n" + "x\n" * 12, "FILE, line 11: at most 9 lines can follow the command"),
        ("python a\nx\ndata\n1\nexclusive\n1\n9\n-5", "FILE, line 8: horus must be memory in MiB such as 8000"),
        ("python a\nx\nd\n1\nexclusive\n1\n9\n5\nnan", "FILE, line 9: faketensor must be memory in MiB"),
        ("python a\nx\nd\n1\nexclusive\n1\n9\n5\n5\n1e400", "FILE, line 10: gpumemnet must be memory in MiB"),
        ("python a\nx\nd\n1\nexclusive\n1\n9\n$(reboot)", "FILE, line 8: horus must be memory in MiB such as 8000"),
        ("python a\nx\nd\n-1", "FILE, line 4: batch_size: "),
        ("python a\nx\nd\n1\nexclusive\n99999999999", "FILE, line 6: gpus: "),
        ("python a\nsequence_length: 0", "FILE, line 2: sequence_length: "),
        (b"\x7fELF\x02\x00", "FILE, line 1: command"),
        ("python 'a", "FILE, line 1: command: quotes in a command must match"),
        (b"python a\n\xfe", "FILE, line 2: text must be UTF-8"),
    ],
)
def test_a_bad_rad_file_gets_one_message_with_its_line(write, content, said):
    assert message(write("job.rad", content)).startswith(said)


@pytest.mark.parametrize(
    ("words", "length"),
    [("--max_seq_length 256", 256), ("--block-size=128", 128), ("--seq_len 64 -b 4", 64), ("--lr 1e-4", None)],
)
def test_the_sequence_length_is_that_of_the_command(write, words, length):
    job = read_job(write("job.rad", f"python bert.py {words}\nbert.model\nwiki\n32\nexclusive\n1")).spec
    assert (job.sequence_length, job.batch_size) == (length, 32)
    keyed = read_job(write("k.rad", f"python a.py {words}\nmodel: a.txt\nsequence_length: 512"))
    assert keyed.spec.sequence_length == 512
    assert [note for note in keyed.notes if "sequence length" in note] == (
        [f"the file says sequence length 512, its command {length}"] if length else []
    )


def test_nothing_in_a_rad_file_goes_through_a_shell(write):
    job = read_job(write("job.rad", "python a.py $(reboot) ; rm -rf / > x\nmodel: m.txt")).spec
    assert job.command == ["python", "a.py", "$(reboot)", ";", "rm", "-rf", "/", ">", "x"]


@pytest.mark.parametrize(("name", "length", "recorded"), [("gpt", 256, False), ("plain_loop", None, True)])
def test_the_job_files_of_the_examples_are_estimated(name, length, recorded):
    job = read_job(ROOT / "examples" / "rad" / f"{name}.rad").spec
    assert job.sequence_length == length and (set(job.recorded) == {"horus", "faketensor", "gpumemnet"}) is recorded
    found = estimate(
        job.model, batch_size=job.batch_size, sequence_length=length, estimator="gpumemnet", gpu="A100-40GB"
    )
    assert found.figure == job.recorded.get("gpumemnet", 8 << 30)


def test_the_published_job_files(write, reference):
    """Written anew from their table, as they were published: environment, command, then a value a line."""
    with reference("reference/rad_files.csv").open() as source:
        rows = list(csv.DictReader(source))
    assert len(rows) == 52
    fields = ("model_file", "dataset", "batch_size", "rm_policy", "gpus", "mem_mib", "horus", "faketensor", "gpumemnet")
    differing = set()
    for row in rows:
        values = [row[name] for name in fields if row[name]]
        file = read_job(write("job.rad", "\n".join(["# a line", "conda activate tf", row["command"], *values])))
        job = file.spec
        assert job.command == row["command"].split()
        assert os.path.basename(job.model) == os.path.basename(row["model_file"])
        assert (job.batch_size, job.gpus, job.conda) == (int(row["batch_size"]), int(row["gpus"]), "tf")
        if any("batch size" in note for note in file.notes):
            differing.add(row["rad"])
    assert differing == {"maskrcnn.rad"}  # those of UNet and XLNet differ from their programs' own defaults


_WORDS = "command = 'a b' \" ' [ ] gpus array 1-9 env . { } memory 12GiB policy: exclusive # model: python nan"
_PIECES = st.sampled_from(
    [*_WORDS.split(), "after", "true", "conda activate x", "source y/activate", "9" * 30, "\n", "\n", " ", "\r", "\x00"]
    + ["batch_size", "-1", "[env]", "\ufeff", "\u2028", "checkpoint_lead", "1e99"]
)


@settings(max_examples=300, deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=300), st.lists(_PIECES, max_size=25).map(lambda parts: "".join(parts).encode())
    ),
    suffix=st.sampled_from([".toml", ".rad"]),
)
def test_any_bytes_are_a_job_or_an_error_of_ours(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(content)
    try:
        job = read_job(path).spec
    except UllageError as error:
        assert len(str(error)) < 1000
    else:
        assert isinstance(job, JobSpec) and job.command
        assert JobSpec.model_validate(job.model_dump()) == job
        job.to_dict()


WITHOUT_PYDANTIC = """
import sys
sys.modules["pydantic"] = None  # as if it were not installed
import ullage
from ullage.estimation.asking import estimate  # needs no job files
for name in ("ullage.manager.client", "ullage.jobs.job_files"):
    try:
        __import__(name)
    except ullage.UllageError as error:
        print(error)
"""


def test_without_pydantic_estimates_work_and_job_files_name_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYDANTIC], capture_output=True, text=True, timeout=120)
    install = "need the package pydantic; type: pip install '.[manager]'  # in a clone of Ullage\n"
    assert (done.stdout, done.stderr) == (f"the daemon and its client {install}job files {install}", "")
