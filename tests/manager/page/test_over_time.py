"""The timeline and the reports in a real browser, on a daemon with virtual GPUs."""

import contextlib
import datetime
import json
import sqlite3
import sys

import pytest
from tests.manager.conftest import until

from ullage.manager.simulation.measures import MEASURES
from ullage.manager.storage.database import FILE

HOSTILE = '<img src=x onerror="window.harmed = 1">'
_CHART = "getElement(Number(document.querySelector('{0}').id.slice(1))).chart"


@pytest.fixture(scope="module")
def tab(browser, page):
    """A page of somebody who signed in with a token to operate."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    sign_in(made, page, scope="operate")
    yield made
    assert not problems and made.evaluate("window.harmed") is None
    context.close()


def sign_in(tab, page, **form) -> None:
    """With a new token."""
    tab.goto(page.url + "/sign-in")
    tab.get_by_label("Token").fill(page.token(**form))
    tab.get_by_role("button", name="Sign in").click()
    tab.wait_for_url(f"{page.url}/")


def see(tab, selector: str, text: str) -> None:
    """Wait until something is shown."""
    tab.locator(selector, has_text=text).first.wait_for()


def figure(tab, name: str) -> str:
    """What the page says to a term."""
    return tab.locator(f"dt:text-is('{name}') + dd").inner_text()


def typed(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "milliseconds")


def test_timeline_spans_have_the_figures_computed_by_hand(page, work, tab):
    job = work.script("sleep 0.4", name=HOSTILE, memory=20 << 30)
    work.wait(job)
    told = next(each for each in work.client.trace()["jobs"] if each["id"] == job)
    [attempt] = told["attempts"]
    came, end, ran = told["queued"] or told["submitted"], attempt["ended"], attempt["elapsed"]
    tab.goto(page.url + "/timeline")
    see(tab, ".scroll td", HOSTILE)
    tab.get_by_label("From").fill(typed(came))
    tab.get_by_label("To").fill(typed(end + 0.2))
    tab.get_by_role("button", name="Show", exact=True).click()
    busy = 100 * ran / (2 * (end + 0.2 - came))  # one GPU of two, for the time it ran
    until(lambda: abs(int(figure(tab, "GPUs with a job").rstrip("%")) - busy) < 1.5, "the figures of the span")
    see(tab, "p", "1 jobs were there; 1 became done, 0 failed or were cancelled, 0 were not over at its end.")
    for name, value in (("Running", ran), ("Completion", end - came), ("Waiting", end - came - ran)):
        wanted = MEASURES[name.lower()].text(value)
        tab.locator(f"dt:text-is('{name}') + dd", has_text=wanted).wait_for()
    chart = _CHART.format(".gantt")
    drawn = tab.evaluate(f"{chart}.getOption().series[1].data.map(bar => bar.job)")
    assert job in drawn
    tab.evaluate(f"{chart}.dispatchAction({{type: 'showTip', seriesIndex: 1, dataIndex: {drawn.index(job)}}})")
    see(tab, ".about", HOSTILE)
    assert tab.locator("img").count() == 0
    box = tab.locator(".gantt").bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 300, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 400, middle, steps=4)
    tab.mouse.up()
    see(tab, "p", "1 jobs were there; 0 became done")
    tab.get_by_role("button", name="All").click()
    tab.locator("p", has_text="0 became done").wait_for(state="detached")


def test_a_report_is_that_of_the_command_and_can_be_downloaded(page, work, tab):
    work.wait(work.script("true", name="=1+1 <b>"))
    tab.goto(page.url + "/reports")
    tab.get_by_label("A row for each").click()
    tab.get_by_role("option", name="user and name").click()
    see(tab, ".scroll td", "=1+1 <b>")
    files = {}
    for kind in ("JSON", "CSV"):
        with tab.expect_download() as waiting:
            tab.get_by_role("button", name=f"Download {kind}").click()
        files[kind] = waiting.value.path().read_text()
    found, told = json.loads(files["JSON"]), json.loads(work.cli("report", "--by", "user,name", "--json"))
    assert (found["by"], found["rows"], found["total"]) == (told["by"], told["rows"], told["total"])
    assert files["CSV"] == work.cli("report", "--by", "user,name", "--csv")
    tab.get_by_role("button", name="waiting", exact=True).click()
    see(tab, "p", "median and 90% stay below (min)")


def test_a_report_shows_others_nothing(page, work, browser):
    work.wait(work.script("true", name="private"))
    context = browser.new_context()
    other = context.new_page()
    other.set_default_timeout(60_000)
    sign_in(other, page, user="nobody")
    other.goto(page.url + "/reports")
    see(other, "[role=status]", "No jobs ran. You see your own jobs, and of others what this daemon shows.")
    other.goto(page.url + "/timeline")
    see(other, "p", "Only your own jobs are shown.")
    assert "private" not in other.content()
    context.close()


# Takes memory of its virtual GPU, and says that it is too little unless more was promised.
TAKE = """
import os, sys, time
from ullage.virtual.shared_card.cards import Cards
Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"]).take(3 << 30)
while not os.path.exists("proceed"):
    time.sleep(0.02)
sys.exit(int(os.environ["ULLAGE_PROMISED_BYTES"]) < 6 << 30)
"""


def test_a_job_shows_its_memory_over_time_and_reruns_with_more(page, work, tab):
    job = work.submit([sys.executable, "-c", TAKE], env=work.environment(), memory=4 << 30, name=HOSTILE)
    until(lambda: work.job(job)["used"], "its memory to be seen")
    work.go()
    assert work.wait(job)["state"] == "failed"
    tab.goto(f"{page.url}/job/{job}")
    see(tab, ".attempts li", "promised 4.00 GiB, used 3.00 GiB)")
    see(tab, ".attempts li", "failed by itself after")
    tab.locator(".over-time canvas").first.wait_for()
    lines = _CHART.format(".over-time") + ".getOption().series.map(one => one.data.map(point => point[1]))"
    used, promised = until(lambda: [line for line in tab.evaluate(lines) if line], "its lines")
    assert 3.0 in used and promised[:2] == [4.0, 4.0]
    tab.get_by_role("button", name="Rerun with more memory").click()
    assert tab.get_by_label("GPU memory on each GPU").input_value() == "9.00 GiB"
    tab.get_by_role("button", name="Leave it").click()
    tab.get_by_role("button", name="Rerun with more memory").click()
    tab.get_by_label("GPU memory on each GPU").fill("7 GiB")
    tab.get_by_role("button", name="Rerun", exact=True).click()
    see(tab, ".q-notification", f"job {job} is in the queue again with 7.00 GiB; its environment was not kept")
    see(tab, ".attempts li", "promised 7.00 GiB")
    work.wait(job)
    assert [each["promise"] for each in work.job(job)["attempts"]] == [4 << 30, 7 << 30]


def test_memory_over_time_survives_a_killed_daemon(work):
    job = work.submit([sys.executable, "-c", TAKE], env=work.environment(), memory=8 << 30)
    database = f"file:{work.folder / 'manager' / FILE}?mode=ro"

    def on_disk() -> list[int | None]:
        with contextlib.closing(sqlite3.connect(database, uri=True)) as found:
            rows = found.execute('SELECT "values" FROM curves WHERE job = ?', (job,)).fetchall()
        return json.loads(rows[0][0]) if rows else []

    before = until(lambda: [value for value in on_disk() if value == 3 << 30], "its memory over time on disk")
    work.kill()
    work.start()
    work.go()
    work.wait(job)
    assert work.client.call("memory", job=job)["attempts"][0]["values"].count(3 << 30) >= len(before)
