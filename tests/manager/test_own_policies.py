"""A daemon with a policy of the site's own, from a file."""

from __future__ import annotations

POLICY = """
def choose(job, gpus, now):
    "The GPU with the highest index; nothing for jobs of 3 GiB."
    if job.promise == 3 << 30:
        raise ValueError("three is not\\na number that I like")
    return gpus[-1]
"""


def test_jobs_go_where_it_says_and_one_that_it_fails_for_waits(make_here, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(POLICY)
    here = make_here(policy=f"{tmp_path / 'mine.py'}:choose")
    assert here.call("ping")["policy"] == "mine.py:choose"
    unlucky = here.submit("true", memory=3 << 30)
    lucky = here.submit("true", memory=2 << 30)
    assert here.until_over(lucky)["state"] == "done", "others are placed"
    failed = (
        f"the policy mine.py:choose failed for job {unlucky}: ValueError: three is not a number that I like "
        f"(line 5 of {tmp_path / 'mine.py'})"
    )
    here.until(lambda: here.job(unlucky)["reason"] == failed, "the reason")
    assert here.job(unlucky)["state"] == "queued"
    assert here.call("ping")["trouble"] == failed
    here.until(lambda: failed in capsys.readouterr().out, "a line in the log")
    here.call("edit", jobs=[unlucky], changes={"memory": 2 << 30})
    assert here.until_over(unlucky)["state"] == "done", "nothing was lost"
    here.until(lambda: here.call("ping")["trouble"] is None, "the end of the trouble")


def test_a_missing_file_is_refused_before_any_start(home):
    said = home.cli("serve", "--virtual", "T4", "--policy", "no_such.py:choose", code=2)
    assert "no file no_such.py; it must be a Python file with the function choose (job, gpus, now)" in said
