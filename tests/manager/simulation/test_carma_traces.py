"""The evaluation traces of RAD-RM and CARMA."""

from pathlib import Path

import pytest

from ullage.errors import InvalidValue
from ullage.manager.simulation.reading import read_trace
from ullage.units import MIB

HEADER = (
    "task,arrival_s,inter_arrival_s,rad,model,batch_size,gpus,mem_mib,horus_mib,faketensor_mib,gpumemnet_mib,"
    "epochs_in_cmd,duration_min_mapper,duration_min_from_sept_summary,command\n"
)
RESNET = "0,5.0,5.0,resnet3.rad,resnet50,128,1,13000,20000.5,9000.25,24000,,35.0,31.2,python resnet50.py\n"
VGG = "1,9.0,4.0,vgg3.rad,vgg,128,1,21000,40000.0,9000.0,24000,,42.0,,python vgg.py\n"
SHORT = "2,9.5,0.5,resnet18_cifar100_50e_3.rad,resnet18_cifar100,128,1,858,6397.9,93.2,8000,20.0,8.0,3.3,python x.py\n"
MASK = "3,10.0,0.5,maskrcnn.rad,train,128,1,28606,7902.3,40000.0,8000,1.0,112.07,112.07,python train.py\n"


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(lines))
    return path


def test_memory_work_and_estimates_are_the_files_own(tmp_path: Path) -> None:
    job, *_ = read_trace(written(tmp_path, RESNET, VGG)).jobs
    assert (job.arrival, job.work_s, job.gpus, job.kind.name) == (5.0, 2100.0, 1, "resnet50 b128")
    assert job.kind.memory == 13000 * MIB
    estimates = dict(job.kind.estimates)
    assert estimates.pop("ullage") > 13000 * MIB
    assert estimates == {"horus": round(20000.5 * MIB), "faketensor": round(9000.25 * MIB), "gpumemnet": 24000 * MIB}
    alone = job.kind.alone["A100-40GB"]
    assert alone.step_s == pytest.approx(35 * 60 / 10010, rel=0.01) and alone.gpu_s < alone.step_s


def test_a_job_works_only_the_epochs_that_its_command_runs(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SHORT))
    assert trace.jobs[0].work_s == pytest.approx(8.0 * 60 * 20 / 50)
    assert any("epochs" in note for note in trace.notes)


def test_caps_and_unknown_jobs_are_noted(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, RESNET, MASK))
    mask = trace.jobs[1].kind
    assert mask.name == "maskrcnn b128" and mask.estimates["ullage"] is None and mask.alone["A100-40GB"]
    assert mask.estimates["faketensor"] == 40000 * MIB
    assert any("maskrcnn" in note and "nearest" in note for note in trace.notes)
    assert any("40,000" in note for note in trace.notes)
    assert not read_trace(written(tmp_path, RESNET)).notes


def test_jobs_of_one_model_and_batch_share_a_kind(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, RESNET, VGG, RESNET.replace("0,5.0", "4,50.0")))
    assert len(trace.kinds) == 2 and trace.jobs[0].kind is trace.jobs[2].kind


def test_a_bad_cell_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, RESNET, VGG.replace(",21000,", ",many,"))
    with pytest.raises(InvalidValue, match=r"trace\.csv, line 3: mem_mib must be a number, got 'many'"):
        read_trace(path)


@pytest.mark.parametrize(
    ("file", "jobs", "last"),
    [
        ("heavy-60-tasks", 60, 8966.0),
        ("mix-90-tasks", 90, 12514.0),
        ("trace-t1", 60, 13767.0),
        ("trace-t2", 60, 18601.0),
    ],
)
def test_the_published_traces_are_read_whole(reference, file: str, jobs: int, last: float) -> None:
    trace = read_trace(reference(f"reference/trace_{file}.csv"))
    assert len(trace.jobs) == jobs and trace.jobs[-1].arrival == last
    unknown = {kind.name for kind in trace.kinds if kind.estimates["ullage"] is None}
    assert unknown <= {"maskrcnn b128"}
    assert all(kind.alone["A100-40GB"].step_s > 0 for kind in trace.kinds)
