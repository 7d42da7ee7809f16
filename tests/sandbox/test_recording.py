"""What a run depended on is known afterwards, and whether it is still so."""

import os

import pytest

from ullage.sandbox.guard import Sandbox
from ullage.sandbox.parent import run
from ullage.sandbox.recording import Reads, digest, signature


@pytest.fixture
def project(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("config.json", "of_worker.txt", "of_child.txt", "data/1.bin", "results.csv"):
        (tmp_path / name).write_text(name)
    (tmp_path / "neighbour.py").write_text("BATCH = 8")
    return tmp_path


@pytest.fixture(params=[Sandbox(), None], ids=["private", "open"])
def recorded(request, env, project):
    given = {**env, "PYTHONPATH": f"{project}:{env['PYTHONPATH']}", "BATCH": "8", "OTHER": "1", "CUDA_X": "1"}
    outcome = run(
        "children:reads",
        {"variables": ["BATCH", "UNSET"]},
        env=given,
        cwd=str(project),
        private=request.param,
        record=True,
    )
    assert outcome.answer == {"batch": 8}, outcome
    return outcome.reads, given


def test_reads_and_lookups_are_recorded(recorded, project):
    reads, _ = recorded
    files = {os.path.relpath(path, project): value for path, value in reads.files.items() if "ullage" not in path}
    for name in ("config.json", "of_worker.txt", "of_child.txt", "neighbour.py"):
        assert files[name] == signature(str(project / name)), name
    assert files["checkpoint.pt"] == "missing" and files["data"].startswith("names:")
    assert not {"made.txt", "results.csv", "data/1.bin"} & files.keys()
    assert reads.variables["BATCH"] == digest("8") and reads.variables["UNSET"] is None
    assert {"OF_CHILD", "CUDA_X", "PYTHONPATH"} <= reads.variables.keys() and "OTHER" not in reads.variables
    assert reads.whole and not reads.all_variables


def test_unread_files_may_change(recorded, project):
    reads, env = recorded
    (project / "results.csv").write_text("another row")
    (project / "made.txt").write_text("by the job itself")
    (project / "data" / "1.bin").write_text("never opened")
    (project / "job-1.log").write_text("a new file that nobody asked about")
    assert reads.same_files() and reads.same_variables({**env, "OTHER": "2", "NEW": "1"})


@pytest.mark.parametrize(
    "change",
    [
        lambda project: (project / "config.json").write_text("config.jsoN"),
        lambda project: (project / "of_worker.txt").unlink(),
        lambda project: (project / "neighbour.py").write_text("BATCH = 9"),
        lambda project: (project / "checkpoint.pt").touch(),
        lambda project: (project / "data" / "2.bin").touch(),
        lambda project: (project / "json.py").touch(),
    ],
)
def test_a_change_of_what_was_read_is_seen(recorded, project, change):
    reads, _ = recorded
    assert Reads.from_dict(reads.to_dict()).same_files()
    change(project)
    assert not reads.same_files()


def test_a_change_of_a_variable_that_was_read_is_seen(recorded):
    reads, env = recorded
    assert reads.same_variables(env)
    for changed in ({"BATCH": "9"}, {"UNSET": ""}, {"OF_CHILD": "1"}, {"CUDA_NEW": "1"}, {"CUDA_X": "2"}):
        assert not reads.same_variables({**env, **changed}), changed
    assert not reads.same_variables({name: value for name, value in env.items() if name != "BATCH"})


def test_a_run_that_looks_through_all_variables_depends_on_all(env):
    outcome = run("children:reads_all_variables", {}, env={**env, "OTHER": "1"}, record=True)
    assert outcome.reads.all_variables
    assert outcome.reads.same_variables({**env, "OTHER": "1"})
    assert not outcome.reads.same_variables({**env, "OTHER": "2"})
    assert not outcome.reads.same_variables({**env, "OTHER": "1", "NEW": "1"})


def test_large_files_compare_by_size_and_pipes_do_not_block(tmp_path):
    large, pipe = tmp_path / "large", tmp_path / "pipe"
    large.write_bytes(bytes(5 << 20))
    os.mkfifo(pipe)
    known = Reads({str(large): signature(str(large)), str(pipe): signature(str(pipe))}, {})
    assert known.same_files()
    os.utime(large, ns=(0, 0))
    assert not known.same_files()
