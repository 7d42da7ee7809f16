"""The page in a real browser, on a daemon with virtual GPUs."""

import os
import re
import sys

import pytest
import requests
from tests.manager.conftest import until
from tests.manager.page.conftest import FOCUSED, Page, press_to

from ullage.errors import NotAllowed
from ullage.jobs.job_files import JobSpec
from ullage.manager.client import Client

HOSTILE = '<img src=x onerror="window.harmed = 1">'


@pytest.fixture(autouse=True)
def _nothing_goes_wrong_in_the_browser(visitor):
    problems: list[str] = []
    visitor.on("pageerror", lambda error: problems.append(str(error)))
    yield
    assert not problems and visitor.evaluate("window.harmed") is None


def see(tab, selector: str, text: str) -> None:
    """Wait until something is shown."""
    tab.locator(selector, has_text=text).first.wait_for()


def test_a_gpu_shows_its_promises_and_hostile_names_stay_text(page, work, visitor):
    job = work.submit(proceed="never", name=HOSTILE, memory=10 << 30)
    work.wait(job, "running")
    visitor.goto(page.url + "/")
    see(visitor, ".card", "GPU 0")
    assert visitor.locator(".card").count() == 2
    see(visitor, ".card li", HOSTILE)
    see(visitor, ".card li", "10.0 GiB promised")
    see(visitor, ".card", "Not measured here: DRAMA, power.")
    width = visitor.locator(".band:not(.foreign)").first.evaluate("e => e.offsetWidth / e.parentElement.offsetWidth")
    assert 0.22 < width < 0.28
    assert visitor.locator("img").count() == 0
    work.client.drain(1, reason=HOSTILE)
    see(visitor, ".card.drained .badge", f"drained: {HOSTILE}")
    work.client.resume(1)
    work.go("never")
    work.wait(job)


@pytest.mark.slow  # GPUs are listed again after ten seconds
def test_a_lost_gpu_stands_out_until_it_is_back(page, work, visitor):
    visitor.goto(page.url + "/")
    see(visitor, ".card", "GPU 1")
    card = work.folder / "cards/serve/card-1"
    card.rename(work.work / "card")
    try:
        see(visitor, ".card.lost .badge", "lost: it does not answer")
        assert visitor.locator(".card.lost h2").inner_text().startswith("GPU 1")
        edge = "e => getComputedStyle(e).borderColor"
        lost, well = (visitor.locator(f".card{kind}").first.evaluate(edge) for kind in (".lost", ":not(.lost)"))
        assert lost != well
    finally:
        (work.work / "card").rename(card)
    visitor.locator(".card.lost").wait_for(state="detached")


def test_jobs_of_an_array_have_the_names_of_the_command_line(page, work, visitor):
    first = work.submit(proceed="go", name="sweep", array="3-4")
    until(lambda: all(work.job(f"{first}_{index}")["state"] == "running" for index in (3, 4)), "both to run")
    visitor.goto(page.url + "/")
    for index in (3, 4):
        see(visitor, ".card li", f"{first}_{index} sweep")
    work.go("go")
    for index in (3, 4):
        work.wait(f"{first}_{index}")
    visitor.goto(page.url + "/timeline")
    for index in (3, 4):
        see(visitor, ".scroll td", f"{first}_{index}")


def test_the_browser_runs_no_injected_handler(page, visitor):
    visitor.goto(page.url + "/")
    see(visitor, ".card", "GPU 0")
    insert = "document.body.insertAdjacentHTML('beforeend', html)"
    tried = "document.body.lastElementChild.addEventListener('error', () => tried())"
    visitor.evaluate(f"html => new Promise(tried => {{ {insert}; {tried}; }})", HOSTILE)
    assert visitor.evaluate("window.harmed") is None


def test_the_queue_shows_why_a_job_waits_and_can_be_filtered(page, work, visitor):
    running = work.submit(proceed="go", name=HOSTILE, memory=30 << 30)
    work.wait(running, "running")
    waiting = work.submit(name="needs both", gpus=2, memory=30 << 30)
    held = work.submit(name="many", array="1-20", hold=True)
    others = [work.submit(name=f"late {number}", hold=True) for number in range(110)]
    visitor.goto(page.url + "/queue")
    see(visitor, ".ag-row", HOSTILE)
    see(visitor, '.ag-row:has-text("needs both")', "needs 30.0 GiB on each of 2 GPUs")
    see(visitor, ".ag-row", f"{held}_[1-20]")
    see(visitor, '.ag-row:has-text("many")', "20 held")
    visitor.get_by_role("button", name="running", exact=True).click()
    visitor.locator(".ag-row", has_text="needs both").wait_for(state="detached")
    see(visitor, ".ag-row", HOSTILE)
    visitor.get_by_role("button", name="all", exact=True).click()
    visitor.get_by_label("Search all columns").fill("needs")
    visitor.locator(".ag-row", has_text="many").wait_for(state="detached")
    visitor.get_by_label("Search all columns").fill("late 109")
    see(visitor, ".ag-row", "late 109")  # the first sight has only the first rows
    visitor.get_by_label("Search all columns").fill("needs")
    visitor.get_by_role("link", name=str(waiting), exact=True).click()
    see(visitor, "h1", f"Job {waiting}")
    see(visitor, ".facts dt:nth-of-type(2) + dd", "needs 30.0 GiB on each of 2 GPUs")  # why it waits stands first
    see(visitor, ".figures", "None yet: it has not started.")
    see(visitor, ".facts", "; waited ")
    work.client.cancel(waiting, f"{held}_all", *others)
    work.go("go")
    work.wait(running)


def test_a_new_job_tops_a_long_queue_and_sinks_when_it_ends(page, work, visitor):
    work.client.cancel(*(work.submit(name=f"old {number}", hold=True) for number in range(40)))
    visitor.goto(page.url + "/queue")
    see(visitor, ".ag-row", "old 39")
    job, later = (work.submit(proceed=name, name=name, memory=1 << 30) for name in ("first", "second"))
    see(visitor, '.ag-row[row-index="0"]', "first")
    see(visitor, '.ag-row[row-index="1"]', "second")
    work.go("first")
    work.wait(job)
    see(visitor, '.ag-row[row-index="0"]', "second")
    see(visitor, '.ag-row[row-index="1"]', "first")  # of those that are over, the last
    see(visitor, '.ag-row[row-index="2"]', "old 39")
    work.go("second")
    work.wait(later)


LOSES_A_WORD = """
const told = emitEvent;
emitEvent = (...words) => {
  if (words[0] !== "job_grid_ready" || window.wordLost) told(...words);
  else window.wordLost = true;
};
"""


def test_a_grid_without_its_ready_signal_still_shows_new_jobs(page, work, visitor):
    """The browser is slow, or the connection is: the page asks again."""
    tab = visitor.context.new_page()
    tab.route("**/static/nicegui.js", lambda route: route.fulfill(body=route.fetch().text() + LOSES_A_WORD))
    tab.goto(page.url + "/queue")
    tab.wait_for_function("window.wordLost")
    job = work.submit(proceed="go", name="after the word was lost")
    see(tab, ".ag-row", "after the word was lost")
    work.go("go")
    work.wait(job)
    tab.close()


def test_a_jobs_page_shows_its_output_and_can_cancel_it(page, work, visitor):
    job = work.script(f"echo '{HOSTILE}'; echo broken >&2; while :; do sleep 0.1; done", name=HOSTILE)
    work.wait(job, "running")
    visitor.goto(f"{page.url}/job/{job}")
    see(visitor, "h2", f"{HOSTILE}: running")
    see(visitor, "pre", HOSTILE)
    visitor.get_by_role("button", name="errors", exact=True).click()
    see(visitor, "pre", "broken")
    see(visitor, ".facts", "while :; do sleep 0.1; done")
    visitor.get_by_role("button", name="Cancel", exact=True).click()
    visitor.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    see(visitor, "h2", f"{HOSTILE}: cancelled")
    see(visitor, ".attempts li", "cancelled")
    assert work.job(job)["state"] == "cancelled"
    assert visitor.get_by_role("button", name="Requeue").is_visible()
    assert not visitor.get_by_role("button", name="Hold").is_visible()


# Takes memory of its card, as a training on it would, or fails as PyTorch does.
TAKE = """
import os, pathlib, sys, time
from ullage.virtual.shared_card.cards import Cards
if not Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"]).take(int(sys.argv[1]) << 30):
    sys.exit(f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {sys.argv[1]}.00 GiB.")
pathlib.Path(sys.argv[2]).touch()
while sys.argv[3] and not os.path.exists(sys.argv[3]):
    time.sleep(0.05)
"""


def test_an_overbooked_pair_shows_the_failure_and_the_recovery(page, work, visitor):
    work.client.drain(1)
    command, env = [sys.executable, "-c", TAKE], work.environment()
    large = work.submit([*command, "30", "there", "go"], env=env, name="large")
    work.until((work.work / "there").exists, "the first job to have its memory")
    small = work.submit([*command, "20", "too", ""], env=env, name="small")
    visitor.goto(f"{page.url}/job/{small}")
    see(visitor, ".attempts li", "out of GPU memory")
    visitor.goto(page.url + "/queue")
    see(visitor, '.ag-row:has-text("large") .over', "MORE THAN PROMISED")
    see(visitor, '.ag-row:has-text("small")', "GPU 0 will have room when job")
    visitor.goto(page.url + "/")
    see(visitor, ".card .over", "30.0 GiB of 1.00 GiB promised")
    work.client.resume(1)
    work.go("go")
    assert work.wait(small)["state"] == "done" and work.wait(large)["state"] == "done"
    visitor.goto(f"{page.url}/job/{small}")
    see(visitor, ".attempts li:last-child", "finished")


def signed_in(browser, page, **form):
    """A page of somebody who has signed in with a new token."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    token = page.token(**form)
    answer = context.request.post(f"{page.url}/sign-in", form={"token": token}, headers={"Origin": page.url})
    assert answer.ok, answer.text()
    return tab


def test_a_read_token_has_no_buttons_and_no_output_of_others(page, work, browser):
    """With two users of this system, where root runs the tests: a job of `games` runs with its rights."""
    owner = "games" if os.geteuid() == 0 else None
    theirs = Client(url=page.api(), token=page.token(user=owner))
    script = "echo secret words of $(id -un); while :; do sleep 0.1; done"
    spec = JobSpec(command=["/bin/sh", "-c", script], cwd="/tmp", memory=1 << 30, name="private")
    [job] = theirs.submit_spec(spec)["jobs"]
    work.wait(job, "running")
    question = theirs.call("estimate", question={"script": "raise ValueError('secret of the script')"})["id"]
    until(lambda: theirs.call("estimated", estimate=question)["state"] == "failed", "the script to fail")
    user = work.job(job)["user"]
    assert owner in (None, user)
    for form, mine in ({"scope": "read", "user": owner}, True), ({"user": "nobody"}, False):
        tab = signed_in(browser, page, **form)
        tab.goto(f"{page.url}/job/{job}")
        see(tab, ".log", f"secret words of {user}" if mine else "nobody may not read the output")
        assert not tab.get_by_role("button", name="Cancel").is_visible()
        assert ("secret" in tab.content()) == mine
        tab.goto(f"{page.url}/estimate/{question}")
        see(tab, ".verdict", "There is no estimate")
        assert ("secret of" in tab.get_by_label("Text of the script").input_value()) == mine
        assert (f"why is told to {user} alone" in tab.locator(".told").inner_text()) != mine
        tab.context.close()
    other = page.token(user="nobody")
    with pytest.raises(NotAllowed):
        Client(url=page.api(), token=other).call("logs", job=job)
    asked = requests.get(f"{page.api()}/v1/jobs/{job}/logs", headers={"Authorization": f"Bearer {other}"}, timeout=60)
    assert asked.status_code == 403 and "secret" not in asked.text
    work.client.cancel(job)
    work.wait(job)


def test_a_job_that_is_not_there_is_one_sentence(page, visitor):
    visitor.goto(page.url + "/job/999999")
    see(visitor, "[role=alert]", "no job 999999")


# With what is waited for. A job that is over has no more to load.
PATHS = {
    "/": ".card .head",
    "/queue": ".ag-row",
    "/timeline": "tbody tr",
    "/reports": "tbody tr",
    "/submit": "form.card",
    "/estimate": "form.card",
    "/estimate/{estimate}": ".chart canvas",
    "/job/{job}": ".attempts li",
    "/sign-in": "form",
}


def emulate_colors(tab, scheme):
    """Change to dark or light colours, and wait until all of them have changed."""
    tab.emulate_media(color_scheme=scheme)
    other = {"dark": "light", "light": "dark"}[scheme]
    changed = (
        f"!document.body.classList.contains('body--{other}')"
        " && !document.getAnimations().some(each => each instanceof CSSTransition)"
    )
    until(lambda: tab.evaluate(changed), f"{scheme} colours at {tab.url}")


LIGHT = ("light", {"runOnly": ["color-contrast"]})  # the other rules see no colours


@pytest.mark.parametrize(
    "also", [pytest.param((), id="dark"), pytest.param((LIGHT,), id="both", marks=pytest.mark.slow)]
)
def test_every_page_is_accessible_dark_and_fits_a_phone(page, work, browser, visitor, also):
    """By the rules of axe-core for WCAG 2.1 AA: names, contrast, headings, tables, landmarks, order."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    state = visitor.context.storage_state()
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", storage_state=state)
    context.set_default_timeout(60_000)
    tab = context.new_page()
    job = work.script("echo it is over", name=HOSTILE)
    asked = {"model": "torchvision:resnet18", "gpu": ["A100-40GB", "T4"], "options": {"batch_size": 4000}}
    estimate = work.client.call("estimate", question=asked)["id"]
    work.wait(job)
    until(lambda: work.client.call("estimated", estimate=estimate)["state"] == "done", "the estimate")
    found = []
    for path, there in PATHS.items():
        tab.goto(page.url + path.format(job=job, estimate=estimate))
        tab.locator(there).first.wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, path
        for scheme, rules in (("dark", {}), *also):
            emulate_colors(tab, scheme)
            for rule in axe.run(tab, options={"resultTypes": ["violations"], **rules}).response["violations"]:
                found += [f"{path} {scheme} {rule['id']}: {node['html'][:150]}" for node in rule["nodes"]]
        emulate_colors(tab, "dark")
    assert not found, "\n".join(found)
    red, green, blue = map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
    assert red + green + blue < 150
    tab.goto(page.url + "/")
    tab.locator(".card .head").first.wait_for()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    context.close()


def test_all_of_a_jobs_life_with_the_keyboard_alone(page, work, browser):
    """Sign in, submit, find it in the queue, open it, cancel it, put it back, choose a span of time, sign out."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(page.url + "/sign-in")
    tab.keyboard.type(page.token())  # the field has the keyboard already
    tab.keyboard.press("Enter")
    see(tab, ".card", "GPU 0")
    press_to(tab, "Submit")
    tab.keyboard.press("Enter")
    see(tab, "h1", "Submit")
    for label, text in (
        ("Command", f"sh -c 'while [ ! -e {work.work}/go ]; do sleep 0.1; done'"),
        ("Folder", str(work.work)),
        ("Name", "by keys"),
        ("GPU memory", "1GiB"),
    ):
        press_to(tab, label)
        tab.keyboard.type(text)
    tab.keyboard.press("Enter")
    job = until(lambda: [one["id"] for one in work.client.queue() if one["name"] == "by keys"], "the job")[0]
    see(tab, "h2", "by keys: running")  # the job's page comes by itself
    press_to(tab, "Queue")
    tab.keyboard.press("Enter")
    see(tab, ".ag-row", "by keys")
    press_to(tab, "Search all columns")
    tab.keyboard.type("by keys")
    until(lambda: tab.locator(".ag-row").count() == 1, "the others to be gone")
    press_to(tab, "Job")  # the head of the first column
    press_to(tab, str(job), "ArrowDown")
    tab.keyboard.press("Enter")
    see(tab, "h2", "by keys: running")
    for order, state in (("Cancel", "cancelled"), ("Requeue", "running"), ("Cancel", "cancelled")):
        press_to(tab, order)
        tab.keyboard.press("Enter")
        until(lambda: tab.evaluate(FOCUSED) == "Leave it", "the question")
        tab.keyboard.press("Escape")
        tab.get_by_role("dialog").wait_for(state="detached")
        assert tab.evaluate(FOCUSED) == order, "who leaves a question is where they were"
        tab.keyboard.press("Enter")
        until(lambda: tab.evaluate(FOCUSED) == "Leave it", "the question")
        press_to(tab, order, "Shift+Tab", most=2)
        tab.keyboard.press("Enter")
        see(tab, "h2", f"by keys: {state}")
    assert [each["cause"] for each in work.job(job)["attempts"]] == ["cancelled", "cancelled"]
    press_to(tab, "Timeline", "Shift+Tab")
    tab.keyboard.press("Enter")
    see(tab, ".scroll td", "by keys")
    press_to(tab, "Closer")
    before = tab.get_by_label("From").input_value()
    tab.keyboard.press("Enter")
    until(lambda: tab.get_by_label("From").input_value() != before, "another span")
    press_to(tab, "Sign out", "Shift+Tab")
    tab.keyboard.press("Enter")
    tab.get_by_label("Token").wait_for()
    context.close()


def test_the_page_reports_a_lost_daemon_and_its_return(page, work, visitor):
    visitor.goto(page.url + "/")
    see(visitor, ".card", "GPU 0")
    work.kill()
    see(visitor, ".connection.trouble", "The daemon does not answer; trying again.")
    work.start()
    see(visitor, ".connection.fine", "The daemon answers again.")
    visitor.locator(".connection").wait_for(state="detached")
    assert "Traceback" not in page.said()


@pytest.mark.slow
def test_pages_reconnect_after_a_restart_of_their_server(page, browser, tmp_path):
    """Whose session was kept goes on; whose was not gets to the form."""
    first = Page(page.home)
    words = ["page", "--listen", first.url.rpartition(":")[2]]
    kept = page.home.folder / "page-sessions"
    tabs = []
    for _ in range(2):
        before = set(kept.iterdir())
        tabs.append(signed_in(browser, first))
        tabs[-1].goto(first.url + "/")
        see(tabs[-1], ".card", "GPU 0")
        [file] = set(kept.iterdir()) - before
    file.unlink()
    first.process.kill()
    first.process.wait()
    tabs[0].get_by_text("Connection lost").wait_for()
    second = Page(page.home, words)
    try:
        tabs[0].get_by_text("Connection lost").wait_for(state="hidden")
        see(tabs[0], ".card", "GPU 0")
        assert tabs[0].url == second.url + "/"
        tabs[1].get_by_label("Token").wait_for()
    finally:
        second.process.kill()
    for tab in tabs:
        tab.context.close()


def test_signing_out_leaves_no_way_back(page, browser, visitor):
    """The visitor, who has used the link, stays signed in for other tests."""
    tab = signed_in(browser, page)
    tab.goto(page.url + "/")
    tab.get_by_role("button", name="Sign out").click()
    tab.get_by_label("Token").wait_for()
    tab.goto(page.url + "/queue")
    assert tab.url == page.url + "/sign-in"
    tab.goto(page.link)
    see(tab, "[role=alert]", "was already used")
    tab.context.close()
