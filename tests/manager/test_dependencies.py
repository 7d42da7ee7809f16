"""Jobs that wait for arrays, for elements, for names; and that none ever waits for itself."""

import json

import pytest

from ullage.jobs.job_files import JobSpec

LATER = "echo $ULLAGE_JOB_ID >> order"


def array(home, indices, script, **more):
    """Submit an array; its number."""
    return home.submit(["/bin/sh", "-c", script], array=indices, **more)


def element(home, number, index):
    return home.client.status(f"{number}_{index}")["id"]


def test_a_job_waits_for_a_whole_array(common):
    first = array(common, "1-3", LATER, hold=True)
    after = common.script(LATER, after=[f"{first}_all"])
    common.until(lambda: common.job(after)["reason"] == f"waits for array {first}", "the reason")
    assert common.job(after)["after"] == [f"{first}_all"]
    common.client.release(f"{first}_1", f"{first}_3")
    common.wait(element(common, first, 1)), common.wait(element(common, first, 3))
    assert common.job(after)["state"] == "queued"
    common.client.release(f"{first}_2")
    assert common.wait(after)["state"] == "done"
    assert (common.work / "order").read_text().split()[-1] == str(after)


def test_a_failed_array_is_named_with_its_array_job(common):
    first = array(common, "1-3", "[ $ULLAGE_ARRAY_INDEX != 2 ]")
    needs, cares_not = (common.script("true", after=[f"{kind}:{first}_all"]) for kind in ("ok", "any"))
    job = common.wait(needs)
    assert job["state"] == "cancelled"
    assert job["detail"] == f"array {first}, which it needs, did not end well ({first}_2 failed)"
    assert common.wait(cares_not)["state"] == "done"


def test_elements_wait_for_elements(common):
    first = array(common, "1-3", "[ $ULLAGE_ARRAY_INDEX != 2 ]", hold=True)
    second = array(common, "1-3", "true", after=[f"{first}_{{index}}"])
    alone = common.script("true", after=[f"{first}_3"])
    numbers = [element(common, second, index) for index in (1, 2, 3)]
    for index, number in enumerate(numbers, 1):
        assert common.job(number)["after"] == [f"{first}_{index}"]
    common.client.release(f"{first}_all")
    assert [common.wait(number)["state"] for number in numbers] == ["done", "cancelled", "done"]
    assert common.wait(alone)["state"] == "done"


def test_a_name_means_the_jobs_of_that_name_that_are_not_over(common):
    for _ in range(2):
        common.wait(common.script("exit 1", name="prepare"))
    waiting = [common.script("true", name="prepare", hold=True) for _ in range(2)]
    parts = array(common, "1-2", "true", name="prepare", hold=True)
    after = common.script("true", after=["prepare"])
    assert sorted(common.job(after)["after"]) == sorted([*map(str, waiting), f"{parts}_all"])
    common.client.release(*waiting, f"{parts}_all")
    assert common.wait(after)["state"] == "done"
    failed = common.script("exit 1", name="check")
    common.wait(failed)
    assert common.wait(common.script("true", after=["check"]))["state"] == "cancelled", "the newest, if all are over"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("99999", "no job 99999"),
        ("99999_all", "no job 99999_all"),
        ("99999_2", "no job 99999_2"),
        ("no such name", "no job 'no such name'"),
        ("99999_{index}", "only a job of an array has an index: 99999_{index} needs --array too"),
        ("x{index}", "{index} must follow an array, such as 12_{index}, got 'x{index}'"),
        ("", "job must be given as 17"),
    ],
)
def test_missing_things_are_refused_in_one_line(common, after, said):
    text = common.cli("submit", "--memory", "1GiB", "--after", after, "--", "true", code=2)
    assert said in text and "Traceback" not in text and text.count("\n") == 1


def test_an_unknown_array_job_is_refused_without_a_submission(common):
    first = array(common, "1-2", "true", hold=True)
    common.until(lambda: len(common.client.queue()) == 2, "the jobs of other tests to be over")
    before = common.client.ping()["last_event"]
    said = common.cli(
        "submit", "--memory", "1GiB", "--array", "1-3", "--after", f"{first}_{{index}}", "--", "true", code=2
    )
    assert f"no job {first}_3" in said
    assert common.client.ping()["last_event"] == before
    common.client.cancel(f"{first}_all")


def test_waiting_for_the_first_array_job_suggests_all(common):
    first = array(common, "1-2", "true", hold=True)
    [note] = common.client.submit_spec(JobSpec(command=["true"], cwd="/", memory=1 << 30, after=[first]))["notes"]
    assert note == f"{first} is one job of its array; {first}_all means all of them"
    common.client.cancel(f"{first}_all")


def test_a_hundred_jobs_after_a_whole_array_are_a_hundred_rows(common):
    first = array(common, "1-100", "true", hold=True)
    array(common, "1-100", "true", after=[f"{first}_all"], name="hundred")
    jobs = common.client.jobs("hundred")
    assert {tuple(job["after"]) for job in jobs} == {(f"{first}_all",)}
    common.client.cancel(f"{first}_all")
    common.until(lambda: {job["state"] for job in common.client.jobs("hundred")} == {"cancelled"}, "the others")


def test_dependencies_survive_a_restart(home):
    home.start()
    first = array(home, "1-2", "true", hold=True)
    whole, one = home.script("true", after=[f"{first}_all"]), home.script("true", after=[f"any:{first}_2"])
    home.client.release(f"{first}_1")
    home.wait(first)
    home.kill()
    home.start()
    assert (home.job(whole)["after"], home.job(one)["after"]) == ([f"{first}_all"], [f"any:{first}_2"])
    home.client.release(f"{first}_2")
    assert [home.wait(number)["state"] for number in (whole, one)] == ["done", "done"]


def test_no_job_ever_waits_for_itself(common):
    first = common.script("true", hold=True)
    second = common.script("true", after=[first], hold=True)
    many = array(common, "1-2", "true", after=[second], hold=True)
    inside = element(common, many, 2)
    for number, after in (
        (first, first),
        (first, second),
        (first, inside),
        (second, f"{many}_all"),
        (inside, f"{many}_all"),
    ):
        [answer] = common.client.edit(number, after=[after])
        assert not answer["done"] and answer["text"].startswith(f"job {answer['reference']} would wait for itself, ")
    assert common.job(first)["after"] == [] and common.job(inside)["after"] == [str(second)]
    [answer] = common.client.edit(inside, after=[f"any:{first}"])
    assert answer["done"] and common.job(inside)["after"] == [f"any:{first}"]
    common.client.cancel(first, second, f"{many}_all")


def test_the_queue_command_shows_what_is_waited_for(common):
    first = array(common, "1-2", "true", hold=True)
    answer = json.loads(common.cli("submit", "--memory", "1GiB", "--after", f"any:{first}_all", "--json", "--", "true"))
    number = answer["jobs"][0]
    common.until(lambda: common.job(number)["reason"] == f"waits for array {first}", "the reason")
    assert f"  after      any:{first}_all\n" in common.cli("status", str(number))
    common.client.cancel(f"{first}_all")
    assert common.wait(number)["state"] == "done"
