"""The page of simulations, in a real browser and as text."""

import random
import re

import pytest
from tests.manager.simulation.made_runs import OOM, attempt, job, run

from ullage.errors import InvalidValue
from ullage.manager.simulation import report


def many_jobs(count, gpus, seed=0):
    """A trace of random jobs, one in ten of which runs out of memory at first."""
    rng, made, now = random.Random(seed), [], 0.0
    for number in range(count):
        now += rng.expovariate(1 / 60)
        begin, where = now + rng.expovariate(1 / 300), rng.randrange(gpus)
        attempts = [attempt(begin, begin + 20, (where,), OOM)] if rng.random() < 0.1 else []
        begin += 40 * len(attempts)
        attempts.append(attempt(begin, begin + rng.expovariate(1 / 1200), (where,)))
        made.append(job(number, now, *attempts, kind=f"kind {number % 7}", user=f"user {number % 5}", work_s=600.0))
    return made


@pytest.fixture(scope="module")
def ten_runs(tmp_path_factory):
    """As many as the figures of the dissertation: 90 jobs on 4 GPUs, ten times."""
    runs = [run(f"policy {number}", many_jobs(90, 4, number)) for number in range(9)]
    file = tmp_path_factory.mktemp("page") / "runs.html"
    report.write_runs([run("<i>first</i>"), *runs], file)
    return file


def test_a_person_can_compare_runs(ten_runs, browser):
    shown = browser.new_page(viewport={"width": 1200, "height": 900})
    problems, requests = [], []
    shown.on("console", lambda message: problems.append(message.text))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("request", lambda request: requests.append(request.url))
    shown.goto(ten_runs.as_uri())
    assert shown.locator("h2").all_inner_texts() == ["Jobs on GPUs", "Settings"]
    assert shown.locator("i >> text=first").count() == 0 and "<i>first</i>" in shown.inner_text("table >> nth=0")
    assert "<b>gpt2</b>" in shown.locator("rect title").all_text_contents()[1]
    assert shown.locator("svg").count() == 10 and shown.locator(".row").count() == 40
    assert not problems
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_and_in_the_dark(ten_runs, browser, scheme):
    shown = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    shown.goto(ten_runs.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360
    colours = shown.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    ink, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (ink > ground) == (scheme == "dark") and abs(ink - ground) > 400
    shown.close()


def test_runs_of_many_jobs_are_summed_up(tmp_path):
    report.write_runs([run("large", many_jobs(20_000, 500), [])], tmp_path / "large.html")
    text = (tmp_path / "large.html").read_text()
    assert "Too many to draw one by one" in text and "<rect" not in text
    assert len(text) < 200_000


def test_the_page_goes_where_nothing_else_is(tmp_path):
    file = tmp_path / "page.html"
    report.write_runs([run()], file)
    report.write_runs([run("again")], file)
    assert "again" in file.read_text()
    file.write_text("<p>mine</p>")
    with pytest.raises(InvalidValue, match="is not a page of Ullage"):
        report.write_runs([run()], file)
    assert file.read_text() == "<p>mine</p>"
    with pytest.raises(InvalidValue, match="there is no folder"):
        report.write_runs([run()], tmp_path / "no" / "folder.html")


def test_runs_without_a_job_or_a_placement_have_a_page(tmp_path):
    empty = [run(jobs=[], gpus=[]), run(jobs=[job(1, 0.0, state="waiting")], gpus=[])]
    report.write_runs(empty, tmp_path / "empty.html")
    assert "unplaced" in (tmp_path / "empty.html").read_text()
