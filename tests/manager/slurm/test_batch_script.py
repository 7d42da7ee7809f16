"""What is read from batch scripts: the training, its words, its folder and its environment; and what is not known."""

import datetime
import os
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.errors import InvalidValue
from ullage.estimation.jobs.launchers import launched
from ullage.estimation.jobs.slurm_words import read_words
from ullage.manager.slurm.batch_script import read_batch, read_hints
from ullage.manager.slurm.sbatch_options import gpu_request, read_directives
from ullage.manager.slurm.shell import programs_of
from ullage.manager.slurm.shell_words import Unknown

BEFORE = {"HOME": "/home/ann", "PATH": "/usr/bin:/bin", "USER": "ann"}


def trainings(text, **options):
    found = read_batch(f"#!/bin/bash\n{text}", "/work", BEFORE, options)
    assert found.refusal is None, found.refusal
    return found.trainings


def words(text):
    """The one training: its script and arguments, as a list."""
    (one,) = trainings(text)
    return [one.command.source, *one.command.args]


def refusal(text):
    return read_batch(f"#!/bin/bash\n{text}", "/work", BEFORE).refusal


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --lr 1",
        "exec python train.py --lr 1",
        "srun python train.py --lr 1",
        "srun -n 4 --gpu-bind=none -c2 --label python -u train.py --lr 1",
        "srun --ntasks 4 --unbuffered python3.11 train.py --lr 1",
        "torchrun --standalone --nproc_per_node 4 train.py --lr 1",
        "srun torchrun --nnodes=2 --rdzv_endpoint=$(hostname -i):29500 train.py --lr 1",
        "accelerate launch --multi_gpu --num_processes 4 --mixed_precision bf16 train.py --lr 1",
        "python -m torch.distributed.run --nproc_per_node=4 train.py --lr 1",
        "deepspeed --num_gpus 4 train.py --lr 1",
        "time nohup nice -n 5 python train.py --lr 1 > log 2>&1",
        "env A=1 python train.py --lr 1 | tee log",
        "timeout -k 5 3h python train.py --lr 1",
        "if python train.py --lr 1; then echo done; fi",
        "python train.py \\\n   --lr \\\n   1",
        "bash -c 'python train.py --lr 1'",
        "srun bash -c 'python train.py --lr 1'",
        'srun -n 1 bash -lc "cd /tmp && python train.py --lr 1"',
        "env LR=1 timeout 5h sh -c 'python train.py --lr $LR'",
        "conda run -n base --no-capture-output python train.py --lr 1",
        "cat > settings <<EOF\npython other.py\nEOF\npython train.py --lr 1",
        "python train.py --lr 1\r",
        'run() { python train.py "$@"; }\nrun --lr 1',
        "LR=1\npython train.py --lr $LR",
        'ARGS=(--lr 1)\npython train.py "${ARGS[@]}"',
        'ARGS="--lr 1"\npython train.py $ARGS',
        "python train.py --lr ${LR:-1}",
        "SCRIPT=train\npython $SCRIPT.py --lr $((3 - 2))",
        "python $(basename /x/train.py) --lr $(seq 1 1)",
        "cd /x/train.py\npython $(basename $(pwd)) --lr $(echo ${PWD:+1})",
        "uv run train.py --lr 1",
    ],
)
def test_the_training_is_found_however_it_is_started(line):
    assert words(line) == ["train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("options", "line", "ranks", "on_each_gpu"),
    [
        ("--gpus=4", "torchrun --nproc-per-node=4 train.py", {"world_size": 4}, 1),
        ("--gpus=4", "torchrun --nproc-per-node=$SLURM_GPUS_ON_NODE train.py", {"world_size": 4}, 1),
        ("--gpus=4", "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) train.py", {"world_size": 4}, 1),
        (
            "--nodes=2 --gpus-per-node=4 --ntasks-per-node=1",
            "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu train.py",
            {"world_size": 8, "nodes": 2},
            1,
        ),
        ("--gpus=2", "accelerate launch train.py", {"world_size": 2}, 1),
        ("--gpus=4", "mpirun -np 4 python train.py", {"world_size": 4}, 1),
        ("--nodes=2 --ntasks-per-node=4 --gpus-per-node=4", "srun python train.py", {"world_size": 8, "nodes": 2}, 1),
        ("--ntasks=4 --gpus-per-task=1", "srun python train.py", {"world_size": 4}, 1),
        ("--gpus=4", "srun -n 2 python train.py", {"world_size": 2}, 1),
        ("--gpus=4", "srun -n 2 bash -c 'python train.py'", {"world_size": 2}, 1),
        ("--ntasks=4 --gpus=1", "srun python train.py", {"world_size": 4}, 4),
        ("--gpus=2", "python train.py", {"world_size": 2}, 1),
        ("--gpus=1", "srun python train.py", {}, 1),
        ("--ntasks=8 --gpus=1", "python train.py", {}, 1),
    ],
)
def test_it_is_known_as_how_many_processes_a_training_runs(options, line, ranks, on_each_gpu):
    (one,) = trainings(f"#SBATCH {options}\n{line}")
    numbers = {name: value for name, value in one.ranks.items() if name != "launcher"}
    assert (numbers, one.on_each_gpu) == (ranks, on_each_gpu)
    if ranks and "torchrun" not in line:
        assert one.ranks.get("launcher", "python").split()[0] == line.split()[0]
    if line.startswith("srun python") and ranks:
        assert one.environment["SLURM_NTASKS"] == str(ranks["world_size"])


def test_folder_variables_and_environment_are_those_at_its_line():
    (one,) = trainings(
        'cd "$HOME/project"\nexport DATA=/data/$USER\nsource .venv/bin/activate\nBATCH=64 srun python train.py\ncd /\n'
    )
    assert one.folder == "/home/ann/project"
    assert one.environment["DATA"] == "/data/ann" and one.environment["BATCH"] == "64"
    assert one.environment["VIRTUAL_ENV"] == "/home/ann/project/.venv"
    assert one.environment["PATH"].startswith("/home/ann/project/.venv/bin:")


def test_a_conda_environment_is_entered_as_conda_would(tmp_path):
    place = tmp_path / "miniconda3" / "envs" / "torch"
    (place / "conda-meta").mkdir(parents=True)
    text = '#!/bin/bash\neval "$(conda shell.bash hook)"\nconda activate torch\npython train.py\n'
    (one,) = read_batch(text, "/work", {**BEFORE, "HOME": str(tmp_path)}).trainings
    assert one.environment["CONDA_PREFIX"] == str(place)
    assert read_batch(text, "/work", BEFORE).refusal is not None


def test_variables_of_a_sourced_file_are_read(tmp_path):
    (tmp_path / "settings.sh").write_text("export MODEL=small\ncd sub\n")
    (tmp_path / "sub").mkdir()
    text = "#!/bin/bash\nsource settings.sh\n../inner.sh big\n"
    (tmp_path / "inner.sh").write_text("#!/bin/sh\npython train.py --model $MODEL --size $1\n")
    (one,) = read_batch(text, str(tmp_path), BEFORE).trainings
    assert one.command.args == ["--model", "small", "--size", "big"] and one.folder == f"{tmp_path}/sub"


def test_commands_of_a_loop_are_found_once():
    found = trainings("for lr in 1 2 2; do python train.py --lr $lr; done\npython evaluate.py")
    assert [each.shown for each in found] == ["train.py --lr 1", "train.py --lr 2", "evaluate.py"]


def test_conditions_are_judged_where_they_can_be():
    text = 'if [ -n "$USER" ] && [[ $USER != bob ]]; then M=1; else M=2; fi\npython train.py $M'
    assert words(text) == ["train.py", "1"]
    assert words('case "$USER" in a*) X=3;; *) X=4;; esac\npython train.py $X') == ["train.py", "3"]
    both = trainings("if grep -q x y; then python one.py; else python two.py; fi")
    assert [each.shown for each in both] == ["one.py", "two.py"]


def test_programs_that_run_at_once_are_known_as_such():
    found = trainings("python a.py &\npython b.py &\nwait\npython c.py")
    assert [(each.shown, each.at_once) for each in found] == [("a.py", True), ("b.py", True), ("c.py", False)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "python train.py --seed $(od -An -N2 /dev/urandom)",
            "line 2: '$(od -An -N2 /dev/urandom)' is known only",
        ),
        ("if grep -q x y; then A=1; else A=2; fi\npython train.py $A", "line 3: '$A' is known only when"),
        ("cd $(mktemp -d)\npython train.py", "the folder in which it runs"),
        ("conda activate nowhere\npython train.py", "the environment in which it runs"),
        ("apptainer exec image.sif python train.py", "container"),
        ("srun --container-image=x.sqsh python train.py", "container"),
        ("srun singularity exec image.sif bash -c 'python train.py'", "container"),
        ("horovodrun -np 4 python train.py", "horovodrun"),
        ("make train", "no Python script"),
        ("python train.py $SLURM_NODELIST", "'$SLURM_NODELIST' is known only when"),
        ("if true; then", "line 2 cannot be read as a shell script"),
    ],
)
def test_unknown_parts_are_reported_and_not_guessed(text, part):
    assert part in refusal(text)


def test_modules_are_reported_and_not_followed():
    found = read_batch("#!/bin/bash\nmodule load cuda/12.4\npython train.py\n", "/work", BEFORE)
    assert found.trainings and "module load cuda/12.4" in found.notes[0]


def test_slurms_variables_follow_from_the_options():
    text = "#SBATCH --array=3-9 -n 2\ncd $SLURM_SUBMIT_DIR\npython train.py $SLURM_ARRAY_TASK_ID $SLURM_NTASKS"
    found = read_batch(f"#!/bin/bash\n{text}", "/work", BEFORE)
    assert found.trainings[0].command.args == ["3", "2"]
    assert "index 3" in found.notes[0]


def test_a_job_has_the_variables_that_sbatch_exports():
    text = "#!/bin/bash\n#SBATCH --export=ALL,LR=0.1\npython train.py $LR $SEED"
    given = {**BEFORE, "SEED": "7", "LR": "9"}

    def arguments(**options):
        return read_batch(text, "/work", given, options).trainings[0].command.args

    assert arguments() == ["0.1", "7"] and arguments(export="ALL") == ["9", "7"]
    assert arguments(export="SEED,LR='a,b'") == ["a,b", "7"] and arguments(export="NONE") == []


def test_a_program_of_python_is_no_script_of_a_shell():
    found = read_batch("#!/usr/bin/env python3\n#SBATCH --gpus=1\nimport torch\n", "/work", BEFORE)
    assert found.options == {"gpus": "1"} and found.refusal.startswith("it is a program of Python")


def test_options_of_sbatch_count_more_than_those_in_the_script():
    text = "#!/bin/bash\n#SBATCH --chdir=/one --gres=gpu:1\npython train.py"
    found = read_batch(text, "/work", BEFORE, {"chdir": "/two"})
    assert found.trainings[0].folder == "/two" and found.options["gres"] == "gpu:1"


def test_hints():
    hints = read_hints(
        "#!/bin/bash\n#ULLAGE exclusive gpu=H200\n  # not one\n#ULLAGE memory=3GiB\n#ULLAGE min-speed=0.8"
    )
    assert (hints.exclusive, hints.gpu, hints.memory, hints.min_speed) == (True, "H200", 3 << 30, 0.8)
    for wrong in ("memory=lots", "min-speed=3", "exclusive=1", "color=red"):
        with pytest.raises(InvalidValue, match="^line 1: "):
            read_hints(f"#ULLAGE {wrong}")


def test_gpus_are_counted_for_each_node():
    assert gpu_request({"gpus-per-task": "1", "ntasks": "8", "nodes": "2"}).per_node == 4
    assert gpu_request({"gpus": "3", "nodes": "2"}).per_node == 2
    assert gpu_request({"gpus-per-node": "a100:2"}).type == "a100"
    assert gpu_request({"ntasks": "4"}).per_node is None
    assert gpu_request({"gpus": "0", "gres": "shard:4"}).shards == 4


def test_short_options_are_read_as_getopt_does():
    assert dict(read_words(["-HN2", "-t", "1:00", "-pgpu", "x.sh", "-n", "9"]).values) == {
        "hold": "",
        "nodes": "2",
        "time": "1:00",
        "partition": "gpu",
    }
    with pytest.raises(InvalidValue, match="line 2"):
        read_directives("#!/bin/sh\n#SBATCH --time\n")


def test_a_launcher_with_nothing_behind_it_launches_nothing():
    assert launched(["srun", "-n", "4"]).words == () and launched(["env"]).words == ()


# What Bash itself says is the oracle.

WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=("Cs", "Cc")), max_size=12)
NAME = st.sampled_from(["A", "B", "LR", "data_dir"])
PIECE = st.one_of(
    WORD.map(shlex.quote),
    WORD.filter(lambda text: not set(text) & set('"$`\\!')).map(lambda text: f'"{text}"'),
    NAME.map(lambda name: f'"${name}"'),
    NAME.map(lambda name: f"${{{name}:-x y}}"),
    NAME.map(lambda name: f'"${{{name}%.*}}"'),
    NAME.map(lambda name: f"${{{name}:+set}}"),
    st.sampled_from(["plain", "--lr=1e-3", "a\\ b", '"${LIST[@]}"', "${#LIST[@]}", "$((2*3+1))", '"$@"', "$#"]),
)
WORDS = st.lists(st.lists(PIECE, min_size=1, max_size=2).map("".join) | st.just("{1..3}"), max_size=5)


@settings(deadline=None)
@given(
    st.dictionaries(NAME, WORD.filter(lambda text: text.isascii() and not set(text) & set("*?[]\\"))),
    WORDS,
    st.lists(WORD, max_size=2),
)
def test_words_are_what_bash_makes_of_them(values, pieces, arguments):
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    text = "\n".join([*lines, "LIST=(one 'two three')", f"show {' '.join(pieces)}"]) + "\n"
    print_all = 'show() { for word in "$@"; do printf \'%s\\0\' "$word"; done; }\n'
    bash = subprocess.run(
        ["bash", "-c", print_all + text, "bash", *arguments],
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        cwd="/",
    )
    expected = bash.stdout.decode().split("\0")[:-1]
    (program,), _ = programs_of(text, {}, "/", arguments)
    assert list(program.words[1:]) == expected
    assert not any(isinstance(word, Unknown) for word in program.words)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab=$(){}[]'\"`\\;&|<>#!\n -if then fi do done case esac")))
def test_no_text_makes_the_reader_fail_in_another_way(text):
    try:
        found, _ = programs_of(text, {"PATH": "/bin"}, "/")
    except InvalidValue as error:
        assert "line" in str(error)
    else:
        assert all(isinstance(word, str) for program in found for word in program.words)


@pytest.mark.parametrize("way", ["$({})", "`{}`", "<({})", "$((A[$({})]))", "${{X%$({})}}", "$(echo a >{mark})"])
def test_nothing_is_run_when_a_script_is_read(tmp_path, way):
    mark = tmp_path / "mark"
    run = way.format(f"touch {mark}", mark=mark)
    text = f"""touch {mark}
X={run} Y='a[$(touch {mark})]'
[ -n "{run}" ] && Y="{run}"
[[ $Y -eq 1 ]]
{sys.executable} t.py {run} $((Y)) ${{LIST[Y]}} "${{Y@P}}" ${{Y:Y:1}}
"""
    read_batch("#!/bin/bash\n" + text, str(tmp_path), dict(os.environ))
    assert not mark.exists()


@pytest.mark.parametrize("clock", ["date -d @0 +%Y", "date $SET +%Y", "date --version", "date +%N"])
def test_a_date_is_formatted_and_the_clock_never_set(clock):
    """`date` sets the clock with other arguments than +FORMAT, also those that a variable holds."""
    (known, unknown), _ = programs_of(f"SET='-d @0'\nshow $(date +%Y)\nshow $({clock})\n", {}, "/")
    assert known.words[1] == str(datetime.date.today().year) and not isinstance(known.words[1], Unknown)
    assert isinstance(unknown.words[1], Unknown)
