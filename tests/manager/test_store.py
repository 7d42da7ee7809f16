"""The database: durable, checked, restorable; a full disk refuses and does not break."""

import os
import shutil
import sqlite3
import subprocess

import pytest

from ullage.errors import StoreDamaged, StoreFull
from ullage.manager.storage import database as store_module
from ullage.manager.storage.database import Database


def test_a_transaction_is_all_or_nothing(tmp_path):
    database = Database(tmp_path)
    with pytest.raises(RuntimeError), database.transaction():
        database.execute("INSERT INTO gpus VALUES ('a', 1, '')")
        raise RuntimeError
    with database.transaction():
        database.execute("INSERT INTO gpus VALUES ('b', 1, '')")
    database.close()
    assert [row["id"] for row in Database(tmp_path).rows("SELECT id FROM gpus")] == ["b"]


def test_it_is_written_with_full_sync_and_a_log(tmp_path):
    database = Database(tmp_path)
    assert database.rows("PRAGMA journal_mode")[0][0] == "wal"
    assert database.rows("PRAGMA synchronous")[0][0] == 2
    assert database.rows("PRAGMA foreign_keys")[0][0] == 1
    assert (tmp_path / "state.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["header", "pages", "text"])
def test_a_damaged_database_is_left_alone_and_can_be_restored(tmp_path, damage):
    database = Database(tmp_path)
    with database.transaction():
        for number in range(500):
            database.execute("INSERT INTO gpus VALUES (?, 1, 'some words that fill pages')", (f"GPU-{number}",))
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
    assert len(Database(tmp_path).rows("SELECT id FROM gpus")) == 500


def test_a_daemon_with_a_damaged_database_says_so_and_changes_nothing(served):
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


def test_with_an_older_copy_nothing_runs_again_and_no_number_comes_twice(served):
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


def test_few_backups_are_kept_and_they_are_whole(tmp_path):
    database = Database(tmp_path)
    for _ in range(6):
        newest = database.back_up()
    kept = sorted((tmp_path / "backups").iterdir())
    assert len(kept) == store_module.KEPT_BACKUPS and newest in kept
    assert sqlite3.connect(newest).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_an_older_database_is_migrated_and_a_newer_one_refused(tmp_path, monkeypatch):
    Database(tmp_path).close()
    monkeypatch.setattr(store_module, "MIGRATIONS", (*store_module.MIGRATIONS, "CREATE TABLE new (x);"))
    database = Database(tmp_path)
    assert database.rows("PRAGMA user_version")[0][0] == 2 and database.rows("SELECT * FROM new") == []
    assert (tmp_path / "backups/state-before-version-2.db").exists()
    database.close()
    monkeypatch.undo()
    with pytest.raises(StoreDamaged, match="newer Ullage"):
        Database(tmp_path)


def test_a_migration_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    Database(tmp_path).close()
    monkeypatch.setattr(store_module, "MIGRATIONS", (*store_module.MIGRATIONS, "CREATE TABLE a (x); BROKEN;"))
    with pytest.raises(sqlite3.OperationalError):
        Database(tmp_path)
    monkeypatch.undo()
    assert Database(tmp_path).rows("PRAGMA user_version")[0][0] == 1


def test_no_room_is_one_message_and_nothing_happened(tmp_path):
    database = Database(tmp_path)
    pages = database.rows("PRAGMA page_count")[0][0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFull, match="nothing was written"), database.transaction():
        for number in range(10000):
            database.execute("INSERT INTO gpus VALUES (?, 1, 'words')", (str(number),))
    assert database.rows("SELECT * FROM gpus") == []


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own that can be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("a small disk can only be made by root where mounting is allowed")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_on_a_full_disk_submissions_are_refused_and_the_daemon_stays_up(make_home, small_disk):
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


def test_a_new_home_on_a_full_disk_is_one_message_and_works_when_there_is_room(make_home, small_disk):
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


def test_a_daemon_that_cannot_start_on_a_full_disk_leaves_jobs_and_database_alone(make_home, small_disk):
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
    except StoreFull as refused:
        return str(refused)
