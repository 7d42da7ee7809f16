"""Estimates and submissions from the page, in a real browser; with a daemon on virtual GPUs, and without one."""

import os
import re
import sys
from typing import Any

import pytest
from tests.manager.conftest import until
from tests.manager.page.conftest import Page, press_to

HOSTILE = '<img src=x onerror="window.harmed = 1">'
TINY = """
import torch
layer = torch.nn.Linear(1024, 1024).to("cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


OFFERED = "() => [...document.querySelector('[aria-label=Model]').list?.options ?? []].map(one => one.value)"


def see(tab, selector: str, text: str | re.Pattern[str]):
    """Wait until something is shown."""
    found = tab.locator(selector, has_text=text).first
    found.wait_for()
    return found


def tab_of(browser, url: str, token: str):
    """A page of somebody who has signed in."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    tab.goto(url + "/sign-in")
    tab.get_by_label("Token").fill(token)
    tab.get_by_role("button", name="Sign in").click()
    tab.wait_for_url(f"{url}/")
    return tab


@pytest.fixture(scope="module")
def tab(browser, page):
    """Somebody who may submit."""
    made = tab_of(browser, page.url, page.token())
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    yield made
    assert not problems and made.evaluate("window.harmed") is None
    assert "Traceback" not in page.said()
    made.context.close()


def ask_for_script(tab, url: str, text: str, args: str = "", ranks: str = "") -> None:
    """Fill in the form for a script, and send it."""
    tab.goto(url + "/estimate")
    tab.get_by_role("button", name="script", exact=True).click()
    tab.get_by_label("Text of the script").fill(text)
    tab.get_by_label("Arguments", exact=True).fill(args)
    tab.get_by_label("GPUs (ranks)").fill(ranks)
    tab.get_by_role("button", name="Estimate", exact=True).click()


def test_a_model_is_estimated_and_its_answer_has_a_link(page, tab):
    tab.goto(page.url + "/estimate")
    tab.get_by_label("Model").fill("resnet1")
    until(lambda: "torchvision:resnet18" in tab.evaluate(OFFERED), "names that go on so")
    tab.get_by_label("Model").fill("torchvision:resnet18")
    tab.get_by_label("Batch size").fill("2")
    tab.locator("summary", has_text="More").click()
    tab.get_by_label("Shape of a sample").fill("3,64,64")
    tab.get_by_label("Batches for each step").fill("2")
    tab.get_by_role("button", name="Estimate", exact=True).click()
    see(tab, ".verdict.good", "fits on A100-40GB")
    see(tab, ".parts", "optimizer")
    see(tab, ".facts", "the GPU works")
    tab.locator(".chart canvas").wait_for()
    whole = tab.locator(".answer .band").evaluate_all("all => all.reduce((sum, one) => sum + one.offsetWidth, 0)")
    assert 0 < whole < tab.locator(".answer .bands").evaluate("e => e.offsetWidth")
    link = tab.url
    assert re.fullmatch(re.escape(page.url) + "/estimate/[0-9a-f]{32}", link)
    asked = page.home.client.call("estimated", estimate=link.rpartition("/")[2])["question"]["options"]
    assert (asked["batch_size"], asked["input_shape"], asked["gradient_accumulation"]) == (2, [3, 64, 64], 2)
    tab.get_by_label("Batch size").fill("3")  # the form is live after the first answer
    tab.wait_for_url(lambda url: url != link)
    known = [each["id"] for each in page.home.client.call("estimates", limit=50)]
    tab.goto(link)
    see(tab, ".verdict.good", "fits on A100-40GB")
    later = tab.context.new_page()
    later.goto(link)
    see(later, ".verdict.good", "fits on A100-40GB")
    later.get_by_label("Batch size").fill("4")  # the page server asks about it after all that looking could have asked
    later.wait_for_url(lambda url: url != link)
    later.close()
    asked = [each for each in page.home.client.call("estimates", limit=50) if each["id"] not in known]
    assert [each["question"]["options"]["batch_size"] for each in asked] == [4], "to look is not to ask"
    assert tab.url == link
    assert tab.get_by_label("Batch size").input_value() == "2"
    assert tab.get_by_label("Shape of a sample").input_value() == "3,64,64", "shown without a click"
    assert tab.get_by_label("Model").input_value() == "torchvision:resnet18"


def test_lora_quantization_and_rank_fields_are_sent_and_kept(page, tab):
    """What is asked, and cancelled at once: the estimates themselves have tests of their own."""

    def asked() -> dict[str, Any]:
        see(tab, "[role=status]", "is being estimated")
        tab.get_by_role("button", name="Cancel", exact=True).click()
        see(tab, "[role=status]", "Cancelled.")
        return page.home.client.call("estimates", limit=1)[0]

    tab.goto(page.url + "/estimate")
    tab.get_by_label("Model").fill("hf:LlamaForCausalLM")
    tab.locator("summary", has_text="More").click()
    tab.get_by_label("LoRA rank").fill("16")
    tab.get_by_label("Quantization").click()
    tab.get_by_role("option", name="nf4").click()
    tab.get_by_label("Config for hf:CLASS (JSON)").fill('{"num_hidden_layers": 1}')
    tab.get_by_role("button", name="Estimate", exact=True).click()
    found = asked()
    assert found["question"]["options"] == {
        "batch_size": 32,
        "optimizer": "adamw",
        "lora": 16,
        "quantize": "nf4",
        "config": {"num_hidden_layers": 1},
    }
    tab.goto(f"{page.url}/estimate/{found['id']}")
    see(tab, ".told", "it was cancelled")
    assert tab.get_by_label("LoRA rank").input_value() == "16", "shown without a click"
    see(tab, ".q-field", "nf4")
    ask_for_script(tab, page.url, TINY, ranks="4")
    found = asked()
    assert found["question"]["options"] == {"world_size": 4}
    tab.goto(f"{page.url}/estimate/{found['id']}")
    until(lambda: tab.get_by_label("GPUs (ranks)").input_value() == "4", "the form to be filled")


def test_hostile_names_stay_text_and_a_failing_script_says_why(page, tab, tmp_path):
    tab.goto(page.url + "/estimate")
    tab.get_by_label("Model").fill(f"torchvision:{HOSTILE}")
    tab.get_by_role("button", name="Estimate", exact=True).click()
    see(tab, "[role=alert]", HOSTILE)
    script = tmp_path / f"{HOSTILE.replace('/', '')}.py"
    script.write_text(f"raise ValueError({HOSTILE!r})")
    tab.goto(page.url + "/estimate")
    tab.get_by_role("button", name="script", exact=True).click()
    tab.get_by_label("A file of this computer: Script").set_input_files(script)
    see(tab, ".file", script.name)
    tab.get_by_role("button", name="Estimate", exact=True).click()
    see(tab, "[role=alert] .verdict", "There is no estimate")
    said = see(tab, "[role=alert]", "ValueError").text_content()
    assert HOSTILE in said and "Traceback" not in said and "ullage/" not in said
    assert tab.locator("img").count() == 0


def file_dialog(tab):
    """The dialog that a key opens. A browser opens none long after the key, as on a busy machine: then press again."""
    late = pytest.importorskip("playwright.sync_api").TimeoutError
    for again in (True, True, False):
        try:
            with tab.expect_file_chooser(timeout=20_000) as opened:
                tab.keyboard.press("Space")
            return opened.value
        except late:
            if not again:
                raise


def test_a_chosen_script_is_estimated_with_the_keyboard_alone(page, tab, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY.replace("range(3)", "range(int(__import__('sys').argv[1]))"))
    tab.on("filechooser", lambda dialog: None)  # the browser knows early that somebody waits for dialogs
    tab.goto(page.url + "/estimate")
    see(tab, "h1", "Estimate")
    press_to(tab, "script")
    tab.keyboard.press("Enter")
    press_to(tab, "A file of this computer: Script")
    file_dialog(tab).set_files(tmp_path / "tiny.py")
    see(tab, ".file", "tiny.py")
    press_to(tab, "Arguments")
    tab.keyboard.type("3")
    press_to(tab, "Estimate")
    tab.keyboard.press("Enter")
    see(tab, ".verdict.good", "fits on A100-40GB")
    asked = page.home.client.call("estimated", estimate=tab.url.rpartition("/")[2])["question"]
    assert asked["args"] == ["3"] and "Linear(1024, 1024)" in asked["script"]


TAKES = """
import sys, torch
size = int(sys.argv[sys.argv.index("--batch-size") + 1])
torch.empty(size << 30, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.slow
def test_a_script_that_does_not_fit_gets_advice(page, tab):
    tab.goto(page.url + "/estimate")
    tab.get_by_role("button", name="script", exact=True).click()
    tab.get_by_label("Text of the script").fill(TAKES)
    tab.get_by_label("Arguments", exact=True).fill("--batch-size 40")
    until(lambda: tab.get_by_label("Its argument for a batch").input_value() == "--batch-size", "the guess")
    tab.get_by_role("button", name="Estimate", exact=True).click()
    see(tab, ".verdict.bad", "does not fit")
    tab.get_by_role("button", name="What would make it fit?").click()
    tab.locator("td", has_text="a larger GPU: ").wait_for(timeout=180_000)
    see(tab, "section", "38")


def test_an_estimate_can_be_cancelled(page, tab):
    ask_for_script(tab, page.url, "import time; time.sleep(200)")
    see(tab, "[role=status]", "is being estimated")
    tab.get_by_role("button", name="Cancel", exact=True).click()
    see(tab, "[role=status]", "Cancelled.")
    until(lambda: not page.home.client.ping()["estimates_pending"], "the process to end")


def test_job_is_tried_out_and_submitted_and_watched_to_its_end(page, work, tab):
    tab.goto(page.url + "/submit")
    tab.get_by_label("Command").fill(
        f"/bin/sh -c 'while [ ! -e {work.work}/go ]; do sleep 0.05; done; echo it is over'"
    )
    tab.get_by_label("Folder").fill(str(work.work))
    tab.get_by_label("Name").fill(HOSTILE)
    tab.get_by_label("GPU memory").fill("3GiB")
    before = page.home.client.ping()["last_event"]
    tab.get_by_role("button", name="What if?").click()
    see(tab, ".notes li", "Would start now on GPU")
    see(tab, ".notes li", "Promise 3.00 GiB (as its submitter says).")
    see(tab, ".figures", re.compile(r"GPU \d: 0 B of 39.4 GiB are in use now, 3.00 GiB with this job."))
    assert page.home.client.ping()["last_event"] == before
    tab.get_by_role("button", name="Submit", exact=True).click()
    see(tab, "h2", f"{HOSTILE}: running")
    work.go("go")
    see(tab, "h2", f"{HOSTILE}: done")
    see(tab, "pre", "it is over")


@pytest.mark.slow
def test_what_if_estimates_a_job_without_memory(page, work, tab):
    (work.work / "train.py").write_text(TINY)
    tab.goto(page.url + "/submit")
    tab.get_by_label("Command").fill(f"{sys.executable} train.py")
    tab.get_by_label("Folder").fill(str(work.work))
    tab.get_by_role("button", name="What if?").click()
    see(tab, ".notes li", re.compile(r"Promise \d+ MiB \(estimated by ullage for A100-40GB\)"))
    see(tab, ".notes li", "Would start now on GPU")


# Keeps all that the page says to be wrong.
NOTE_ALERTS = """() => {
  const line = document.querySelector("[role=alert]");
  window.alerts = [];
  new MutationObserver(() => alerts.push(line.textContent)).observe(line, { childList: true, subtree: true });
}"""


def test_a_read_token_cannot_submit_or_estimate(page, browser):
    """An empty form that is sent would be told what it lacks; what is done after it has an effect."""
    tab = tab_of(browser, page.url, page.token(scope="read"))
    for path, name, says, number in (
        ("/submit", "Submit", "to submit a job", "GPUs"),
        ("/estimate", "Estimate", "to ask for an", "Batch size"),
    ):
        tab.goto(page.url + path)
        see(tab, "[role=status]", says)
        assert not tab.get_by_role("button", name=name, exact=True).is_visible()
        tab.evaluate(NOTE_ALERTS)
        tab.locator("form.form").evaluate("form => form.requestSubmit()")
        field = tab.get_by_label(number, exact=True)
        field.fill("1.6")
        field.blur()
        until(lambda field=field: field.input_value() == "2", "the server to make a whole number of it")
        assert not any(tab.evaluate("alerts")) and tab.url == page.url + path
    tab.context.close()


@pytest.mark.slow
def test_without_a_daemon_the_page_estimates_for_its_own_user(make_home, browser, tmp_path):
    home = make_home(tmp_path / "h")
    alone = Page(home)
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    context.set_default_timeout(60_000)
    tab = context.new_page()
    try:
        tab.goto(alone.link)
        tab.wait_for_url(f"{alone.url}/estimate")
        see(tab, ".connection.trouble", "The daemon does not answer")
        ask_for_script(tab, alone.url, TINY, "--epochs 1")
        see(tab, ".verdict.good", "fits on")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        link = tab.url
        tab.goto(alone.url + "/estimate")
        tab.goto(link)
        see(tab, ".verdict.good", "fits on")
        assert "torch.nn.Linear" in tab.get_by_label("Text of the script").input_value()
        [kept] = (home.folder / "estimates").iterdir()
        assert os.stat(kept).st_mode & 0o077 == 0 and kept.stem in link
        assert not [name for name in os.listdir(home.folder / "work") if name.endswith(".py")]
        assert "Traceback" not in alone.said()
    finally:
        context.close()
        alone.process.kill()
