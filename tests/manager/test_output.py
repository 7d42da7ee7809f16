"""What jobs print: no more of it is kept than the site allows, and it goes to files of the user's own if they want."""

import json
import os
import pwd
import subprocess
import sys

import pytest
from tests.manager.test_users import as_user, shared  # noqa: F401

from ullage.manager.running.output import OutputFile, parts_of, read_end, read_piece


def test_the_first_and_newest_parts_are_kept_at_their_places(tmp_path):
    file = str(tmp_path / "stdout")
    output = OutputFile(file, size=10, parts=3)
    whole = "".join(f"{number:04d}" for number in range(25)).encode()
    for begin in range(0, len(whole), 7):
        output.write(whole[begin : begin + 7])
    output.close()
    assert [start for start, _ in parts_of(file)] == [0, 80, 90]
    assert read_piece(file, 0, 1000) == (whole[:10], 10, 0)
    assert read_piece(file, 10, 1000) == (whole[80:], 100, 70), "what is gone is skipped, and said"
    assert read_piece(file, 95, 1000) == (whole[95:], 100, 0)
    assert read_piece(file, 100, 1000) == (b"", 100, 0)
    assert read_end(file, 15) == whole[-15:]


@pytest.fixture
def small(home):
    home.settings += 'log_size = "64KiB"\nlog_files = 3\n'
    home.start()
    return home


def test_a_job_that_prints_much_does_not_fill_the_disk(small):
    number = small.script(
        "echo the beginning; yes | head -c 100000000; echo the end; yes x | head -c 3000000 >&2; exit 3"
    )
    job = small.wait(number)
    folder = small.folder / f"manager/jobs/{number}/1"
    assert sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith("std")) <= 2 * 3 * (64 << 10)
    said = small.client.logs(number)
    assert said.startswith("the beginning\ny\n") and said.endswith("the end\n") and "of the output are not kept" in said
    assert job["exit_code"] == 3 and job["cause"] == "failed by itself"


def test_output_can_be_followed_while_parts_come_and_go(small):
    number = small.script("echo first; while [ ! -e proceed ]; do sleep 0.05; done; seq 20000; echo last")
    pieces = small.client.follow(number)
    assert next(pieces) == "first\n"
    small.go()
    said = "".join(pieces)
    assert said.endswith("20000\nlast\n")


def test_the_last_output_explains_an_end_after_much_output(small):
    job = small.wait(small.script("yes | head -c 300000 >&2; echo 'ValueError: x' >&2; exit 1", retries=0))
    assert job["cause"] == "failed by itself"
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    number = small.script(f"[ -e was ] && exit 0; touch was; yes | head -c 300000 >&2; echo '{text}' >&2; exit 1")
    assert small.wait(number)["attempts"][0]["cause"] == "out of GPU memory"


def test_output_goes_where_the_job_says(common):
    script = 'echo "out {index}"; echo "err {index}" >&2'
    array = common.submit(
        ["/bin/sh", "-c", script], array=[3, 4], name="a/b", output="%n-%A_%a-%t.out", error="%j-%u-100%%.err"
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    for index in (3, 4):
        number = array + index - 3
        common.wait(number)
        assert (common.work / f"a_b-{array}_{index}-1.out").read_text() == f"out {index}\n"
        assert (common.work / f"{number}-{user}-100%.err").read_text() == f"err {index}\n"
        assert common.cli("logs", str(number)) == f"out {index}\n"
        assert common.cli("logs", "--stderr", str(number)) == f"err {index}\n"


def test_errors_go_with_the_rest_and_are_evidence_there_too(common):
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    script = f"echo before; [ -e was ] && exit 0; touch was; echo '{text}' >&2; exit 1"
    number = common.script(script, output="all.txt")
    job = common.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["out of GPU memory", "finished"]
    assert (common.work / "all.txt").read_text() == f"before\n{text}\nbefore\n", "a second attempt adds to it"


def test_a_file_of_ones_own_can_be_followed(common):
    number = common.script("echo first; while [ ! -e proceed ]; do sleep 0.05; done; echo last", output="own.txt")
    command = [sys.executable, "-m", "ullage", "logs", "-f", str(number)]
    follower = subprocess.Popen(command, env=common.environment(), stdout=subprocess.PIPE, text=True)
    assert follower.stdout.readline() == "first\n"
    common.go()
    assert follower.communicate(timeout=60)[0] == "last\n"


def test_unwritable_files_are_named_and_bad_patterns_refused(common):
    job = common.wait(common.script("true", output="/no/such/folder/x"))
    assert job["detail"] == "cannot write to /no/such/folder/x: No such file or directory" and job["state"] == "failed"
    assert "got '%q'" in common.cli("submit", "--output", "%q", "--", "true", code=2)


def test_a_job_makes_root_write_through_no_link(shared, tmp_path_factory):  # noqa: F811
    secret = shared.folder / "roots-own"
    secret.write_text("kept")
    secret.chmod(0o600)
    (shared.work / "link").unlink(missing_ok=True)
    (shared.work / "link").symlink_to(secret)
    for where in ("link", str(secret), f"../manager/jobs/../../{secret.name}"):
        job = {"command": ["echo", "x"], "cwd": str(shared.work), "memory": 1 << 30, "output": where}
        number = as_user(shared, "submit", job=job, key=f"a link to {where}")["ok"]["jobs"][0]
        ended = shared.wait(number)
        assert ended["state"] == "failed" and "Permission denied" in ended["detail"]
    assert secret.read_text() == "kept"
    folder = shared.folder / "manager/jobs" / str(number) / "1"
    assert not os.access(folder, os.W_OK, effective_ids=True) or folder.stat().st_uid == 0
    assert json.loads((folder / "exit.json").read_text())["code"] in (126, 127)


def test_a_program_may_open_its_own_output_again(shared):  # noqa: F811
    job = {"command": ["sh", "-c", "echo x > /dev/stdout"], "cwd": str(shared.work), "memory": 1 << 30}
    number = as_user(shared, "submit", job=job, key="to dev stdout")["ok"]["jobs"][0]
    assert shared.wait(number)["state"] == "done" and shared.client.logs(number) == "x\n"
