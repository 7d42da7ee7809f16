"""The database: durable, checked, restorable; a full disk refuses and does not break."""

import contextlib
import os
import shutil
import sqlite3
import subprocess

import pytest

from ullage.errors import DamagedRecord, DiskFull, StoreDamaged
from ullage.manager.storage.database import Database


def test_a_transaction_is_all_or_nothing(tmp_path):
    database = Database(tmp_path)
    with pytest.raises(RuntimeError), database.transaction():
        database.execute("INSERT INTO site VALUES ('a')")
        raise RuntimeError
    with database.transaction():
        database.execute("INSERT INTO site VALUES ('b')")
    database.close()
    assert [row["told"] for row in Database(tmp_path).rows("SELECT told FROM site")] == ["b"]


def test_it_is_written_with_full_sync_and_a_log(tmp_path):
    database = Database(tmp_path)
    assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert database.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert database.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    assert (tmp_path / "state.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["header", "pages", "text"])
def test_a_damaged_database_is_left_alone_and_can_be_restored(tmp_path, damage):
    database = Database(tmp_path)
    with database.transaction():
        for number in range(500):
            database.execute("INSERT INTO site VALUES (?)", (f"GPU-{number} some words that fill pages",))
    database.back_up()
    database.close()
    file = tmp_path / "state.db"
    content = bytearray(file.read_bytes())
    if damage == "header":
        content[:16] = b"x" * 16
    elif damage == "pages":
        content[4096 * 2 :] = os.urandom(len(content) - 4096 * 2)
    else:
        content = bytearray(b"this is no database at all\n" * 100)
    file.write_bytes(content)
    with pytest.raises(StoreDamaged) as refused:
        Database(tmp_path)
    assert file.read_bytes() == content, "nothing was overwritten"
    message = str(refused.value)
    assert "is damaged" in message and "nothing was changed" in message and "\n" not in message
    advice = message.partition("To go back to it: ")[2]
    subprocess.run(["sh", "-c", advice], check=True)
    assert len(Database(tmp_path).rows("SELECT told FROM site")) == 500


def test_a_damaged_database_is_reported_and_left_unchanged(served):
    number = served.script("true")
    served.wait(number)
    served.stop()
    file = served.folder / "manager/state.db"
    file.write_bytes(b"x" * 10000)
    words = ["serve", "--virtual", "2xA100-40GB"]
    said = served.cli(*words, code=1)
    assert said.startswith("ullage: the database") and said.count("\n") == 1
    assert file.read_bytes() == b"x" * 10000
    subprocess.run(["sh", "-c", said.partition("To go back to it: ")[2]], check=True)
    served.start()
    assert served.answers()


def test_an_older_copy_repeats_no_job_and_no_number(served):
    number = served.submit(hold=True)
    served.stop()
    file = served.folder / "manager/state.db"
    shutil.copy(file, served.folder / "copy")
    served.start()
    later = served.script("exit 3")
    served.client.call("release", jobs=[number])
    assert served.wait(number)["state"] == "done" and served.wait(later)["state"] == "failed"
    served.stop()
    shutil.copy(served.folder / "copy", file)
    served.start()
    assert "the database does not know the last 1 jobs" in served.said()
    served.client.call("release", jobs=[number])
    assert served.wait(number)["state"] == "done"
    assert served.log() == [f"start {number} 1", f"end {number} 1"]
    assert served.script("true", hold=True) == later + 1


def test_copies_are_kept_by_age_and_they_are_whole(tmp_path):
    """Many starts in an hour push out none of the days and weeks before."""
    database = Database(tmp_path)
    (tmp_path / "backups").mkdir()
    old = [f"state-2026{month:02}{day:02}-120000-000000.db" for month in (1, 2) for day in range(1, 29)]
    for name in old:
        (tmp_path / "backups" / name).touch()
    for _ in range(6):
        newest = database.back_up()
    kept = sorted(file.name for file in (tmp_path / "backups").iterdir())
    assert kept[-1] == newest.name and len([name for name in kept if name not in old]) == 3
    assert [name[6:14] for name in kept if name in old] == [f"202602{day}" for day in (15, 22, 23, 24, 25, 26, 27, 28)]
    assert sqlite3.connect(newest).execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("loss", ["removed", "emptied", "removed but for its log"])
def test_database_that_is_gone_is_not_replaced_by_an_empty_one(served, loss):
    number = served.submit(hold=True)
    served.stop()
    served.start()  # which makes a copy
    served.client.call("drain", gpu=0)
    served.stop() if loss != "removed but for its log" else served.kill()
    file, log = served.folder / "manager/state.db", served.folder / "manager/state.db-wal"
    file.write_bytes(b"") if loss == "emptied" else file.unlink()
    said = served.cli("serve", *served.options, code=1)
    assert said.startswith("ullage: the database") and said.count("\n") == 1
    assert "nothing was changed" in said and "ullage serve --new-database" in said
    assert file.exists() == (loss == "emptied") and (not log.exists() or log.stat().st_size)
    back = said.partition("To go back to it: ")[2].partition(". To start again")[0]
    subprocess.run(["sh", "-c", back], check=True)
    served.start()
    assert served.job(number)["state"] == "held"


def test_a_database_is_created_only_on_request_if_missing(served):
    before = served.script("true")
    served.wait(before)
    served.stop()
    assert "a database already exists" in served.cli("serve", *served.options, "--new-database", code=2)
    (served.folder / "manager/state.db").unlink()
    served.options += ["--new-database"]
    served.start()
    served.options.remove("--new-database")
    assert served.client.call("history") == []
    assert served.script("true", hold=True) == before + 1, "its files are there"


@pytest.mark.parametrize("what", ["state.db", "state.db-wal"])
def test_a_database_removed_under_the_daemon_loses_nothing(served, what):
    first = served.submit(hold=True)
    (served.folder / "manager" / what).unlink()
    second = served.submit(hold=True)
    assert "it was put back" in served.said()
    served.kill()
    served.start()
    assert [job["id"] for job in served.client.call("queue")] == [first, second]
    third = served.submit(hold=True)
    served.kill()
    served.start()
    assert served.job(third)["state"] == "held"


def test_file_replacing_the_database_ends_the_daemon_untouched(served):
    first = served.submit(hold=True)
    file = served.folder / "manager/state.db"
    file.unlink()
    file.write_bytes(b"somebody else's")
    with pytest.raises(StoreDamaged, match="another file was put in the place") as refused:
        served.client.call("submit", job={"command": ["true"], "cwd": "/tmp", "hold": True}, key="a key of its own")
    assert served.process.wait() == 1 and "Traceback" not in served.said()
    assert file.read_bytes() == b"somebody else's"
    subprocess.run(["sh", "-c", str(refused.value).partition("To go on with that: ")[2]], check=True)
    served.start()
    assert [job["id"] for job in served.client.call("queue")] == [first, first + 1]


def damage(home, *statements):
    """Change rows while no daemon runs."""
    with contextlib.closing(sqlite3.connect(home.folder / "manager/state.db")) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_unreadable_rows_are_set_aside_and_the_others_go_on(served):
    jobs = [served.submit(hold=True) for _ in range(7)]
    over = [served.script("true") for _ in range(2)]
    [served.wait(number) for number in over]
    waiting = served.submit(after=[jobs[0]])
    served.stop()
    damage(
        served,
        f"UPDATE specs SET content = '{{broken' WHERE id = (SELECT spec_id FROM jobs WHERE id = {jobs[0]})",
        f"UPDATE specs SET content = '{{broken' WHERE id = (SELECT spec_id FROM jobs WHERE id = {over[0]})",
        f"UPDATE jobs SET state = 'dreaming' WHERE id = {jobs[1]}",
        f"UPDATE jobs SET submitted = 'noon' WHERE id = {jobs[2]}",
        f"UPDATE specs SET content = '[]' WHERE id = (SELECT spec_id FROM jobs WHERE id = {jobs[3]})",
        f"UPDATE jobs SET state = 'running' WHERE id = {jobs[4]}",
        f"UPDATE jobs SET cause = 'boredom' WHERE id = {jobs[5]}",
    )
    served.start()
    assert [job["id"] for job in served.client.call("queue")] == [jobs[6], waiting]
    assert [job["id"] for job in served.client.call("history")] == [over[1]]
    served.until(lambda: served.job(waiting)["reason"] == f"waits for job {jobs[0]}", "the reason")
    served.client.call("release", jobs=[jobs[6]])
    assert served.wait(jobs[6])["state"] == "done"
    said = served.cli("status")
    for number in (*jobs[:6], over[0]):
        assert f"DAMAGED: job {number} is set aside" in said
        with pytest.raises(DamagedRecord, match=f"job {number} cannot be read"):
            served.job(number)
    assert "spec is not JSON" in said and "submitted is of the type str" in said and "Traceback" not in served.said()
    assert "broken" not in said, "anybody may ask, and it may be a command or a variable"
    served.stop()
    damage(served, f"UPDATE jobs SET state = 'held' WHERE id = {jobs[1]}")
    served.start()
    assert served.job(jobs[1])["state"] == "held", "nothing was lost"


def test_an_unreadable_running_job_keeps_its_promise_to_its_end(served):
    number = served.submit(proceed="proceed", memory=30 << 30)
    served.wait(number, "running")
    served.stop()
    damage(served, f"UPDATE specs SET content = '{{broken' WHERE id = (SELECT spec_id FROM jobs WHERE id = {number})")
    served.start()
    assert sum(gpu["promised"] for gpu in served.client.gpus()) == 30 << 30
    served.go()
    served.until(lambda: not sum(gpu["promised"] for gpu in served.client.gpus()), "its promise to be free again")
    assert served.log() == [f"start {number} 1", f"end {number} 1"]


@pytest.mark.parametrize("written_by", ["an older one", "a newer one", "another program"])
def test_database_of_another_version_is_refused_and_left_alone(served, written_by):
    served.stop()
    file = served.folder / "manager/state.db"
    if written_by == "another program":
        file.unlink()
        with contextlib.closing(sqlite3.connect(file)) as theirs, theirs:
            theirs.execute("CREATE TABLE theirs (x)")
    else:
        damage(served, f"PRAGMA user_version = {1 if written_by == 'an older one' else 1000000}")
    before = file.read_bytes()
    said = served.cli("serve", *served.options, code=1)
    assert said.startswith(f"ullage: {file} must be a database of this version of Ullage") and said.count("\n") == 1
    assert "nothing was changed" in said and file.read_bytes() == before
    subprocess.run(["sh", "-c", said.partition("or start again: ")[2].partition(" && ullage")[0]], check=True)
    served.options += ["--new-database"]
    served.start()
    served.options.remove("--new-database")
    assert served.answers() and served.client.queue() == []


def test_no_room_is_one_message_and_nothing_happened(tmp_path):
    database = Database(tmp_path)
    pages = database.rows("PRAGMA page_count")[0][0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match="nothing was written"), database.transaction():
        for number in range(10000):
            database.execute("INSERT INTO site VALUES (?)", (f"{number} words",))
    assert database.rows("SELECT * FROM site") == []


def kept(home, word):
    """The files of a home in which a word is."""
    found = set()
    for file in (home.folder / "manager").rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            if word.encode() in file.read_bytes():
                found.add(file.name)
    return found


def test_variables_are_kept_no_longer_than_their_job_needs_them(served):
    """Their names are; those of an array go when its last job ends."""
    alone = served.submit(proceed="proceed", env={"TOKEN_OF_MINE": "swordfish 1"})
    array = served.submit(proceed="proceed", env={"TOKEN_OF_MINE": "swordfish 2"}, array="1-3")
    served.wait(alone, "running"), served.wait(array, "running")
    served.kill()
    served.start()
    assert kept(served, "swordfish 1") and kept(served, "swordfish 2")
    served.client.cancel(f"{array}_1", f"{array}_2")
    served.wait(array)
    held = served.submit(hold=True, env={"TOKEN_OF_MINE": "swordfish 3"})
    served.go()
    for number in (alone, array + 2):
        assert served.wait(number)["env"] == ["TOKEN_OF_MINE"]
    served.client.cancel(held)
    waits = served.submit(hold=True, env={"TOKEN_OF_MINE": "swordfish 4"})
    assert served.job(waits)["env"] == ["TOKEN_OF_MINE"]
    served.stop()
    shutil.rmtree(served.folder / "manager/backups")
    assert [kept(served, f"swordfish {number}") for number in (1, 2, 3)] == [set()] * 3
    served.start()
    served.client.release(waits)
    assert served.wait(waits)["state"] == "done"
    served.stop()
    assert [name for name in kept(served, "swordfish 4") if not name.startswith("state-")] == []


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own that can be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("this system refuses mounts")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_full_disk_refuses_submissions_and_keeps_the_daemon_up(make_home, small_disk):
    home = make_home(small_disk / "h")
    home.work = small_disk.parent / "work"  # what the jobs themselves write is on another disk
    home.work.mkdir()
    home.start()
    try:
        running = home.submit(proceed="proceed")
        home.wait(running, "running")
        filler = fill(small_disk)
        refused = home.until(lambda: _refusal(home), "a refusal")
        assert refused.startswith("nothing was written") and "\n" not in refused
        home.go()  # the running job ends: its exit record has had its place from the start
        folder = home.folder / "manager/jobs" / str(running) / "1"
        home.until((folder / "exit.json").exists, "the exit record")
        assert home.answers()
        filler.unlink()
        assert home.wait(running)["state"] == "done"
        assert home.wait(home.script("true"))["state"] == "done"
    finally:
        home.close()


def fill(disk):
    """Leave no room at all; the file to remove for some."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return filler


def one_message(home):
    """What a daemon says that cannot start."""
    said = home.cli("serve", *home.options, code=1)
    assert said.startswith("ullage: nothing was") and said.count("\n") == 1
    return said


def test_a_full_disk_for_a_new_home_is_one_message(make_home, small_disk):
    home = make_home(small_disk / "h")
    filler = fill(small_disk)
    assert "no room" in one_message(home) and "Make room" in one_message(home)
    assert [file for file in home.folder.rglob("*") if file.is_file() and file.stat().st_size] == []
    filler.unlink()
    home.start()
    try:
        assert home.wait(home.script("true"))["state"] == "done"
    finally:
        home.close()


def test_a_failed_start_on_a_full_disk_changes_nothing(make_home, small_disk):
    home = make_home(small_disk / "h")
    home.work = small_disk.parent / "work"
    home.work.mkdir()
    home.start()
    try:
        before, running = home.submit(), home.submit(proceed="proceed")
        home.wait(before), home.wait(running, "running")
        home.stop()
        filler = fill(small_disk)
        assert "Make room" in one_message(home)
        home.go()
        home.until(lambda: f"end {running} 1" in home.log(), "the job to end without a daemon")
        filler.unlink()
        home.start()
        assert home.wait(running)["attempts"][0]["cause"] == "finished" and home.job(before)["state"] == "done"
        assert sorted(home.log()) == sorted(
            f"{what} {number} 1" for what in ("start", "end") for number in (before, running)
        )
    finally:
        home.close()


def test_a_home_that_is_not_ours_to_write_is_one_message(home):
    (home.folder / "manager").write_text("a file where a folder should be")
    said = home.cli("serve", *home.options, code=1)
    assert said.count("\n") == 1 and "cannot be written" in said and "ULLAGE_HOME" in said
    (home.folder / "manager").unlink()


def _refusal(home):
    try:
        home.script("true", env={"FILL": "x" * 100_000})
    except DiskFull as refused:
        return str(refused)
