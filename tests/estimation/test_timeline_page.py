"""The timeline page, in a real browser."""

import re

import pytest
import torch
from torch import nn

from ullage.errors import InvalidValue
from ullage.estimation.asking import estimate
from ullage.estimation.timeline import page as timeline_page
from ullage.estimation.timeline.trace import Trace


def train():
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
    model = nn.ModuleDict({"<b>body</b>": nn.Sequential(*blocks), "head": nn.Linear(256, 10)}).cuda()
    model.forward = lambda x: model["head"](model["<b>body</b>"](x))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(512, 256, device="cuda")).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def run():
    trace = Trace()
    return estimate(train, gpu="H200", trace=trace), trace


def test_a_person_can_read_it(run, browser, tmp_path):
    e, trace = run
    file = tmp_path / "out.html"
    timeline_page.write(trace, e, file)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert "fits on H200" in page.inner_text("#verdict")
    assert "at the peak" in page.inner_text("#when")
    assert "activations" in page.inner_text("#legend") and page.locator("#alive tr").count() == 12

    box = page.locator("#chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip", state="visible")
    tip = page.inner_text("#tip")
    assert "allocated" in tip and "step 2" in tip and re.search(r" in \S+ \(", tip)
    assert "at call" in page.inner_text("#when")

    page.click("#by-module")
    assert "<b>body</b>.1" in page.inner_text("#legend")  # names are text, whatever they hold
    page.click("text=Step 3")
    assert page.get_attribute("#spans button:last-child", "aria-pressed") == "true"
    assert page.evaluate("[...g2.getImageData(0, 0, cv.width, cv.height).data].some(value => value)")
    page.check("#full")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.dblclick("#chart")
    assert not problems
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_the_peak_that_the_page_computes_is_the_estimates(run, browser, tmp_path):
    e, trace = run
    timeline_page.write(trace, e, tmp_path / "out.html")
    page = browser.new_page()
    page.goto((tmp_path / "out.html").as_uri())
    assert page.evaluate("Math.max(...total) * UNIT") == e.peak_allocated
    assert page.evaluate("total[D.peak] * UNIT") == e.peak_allocated
    kinds = page.evaluate("Object.fromEntries(D.kinds.map((name, i) => [name, valuesAt(D.peak)[i] * UNIT]))")
    assert kinds == {name: e.breakdown.get(name, 0) for name in kinds}  # the report leaves out copies of nothing
    page.close()


def test_a_long_run_shows_the_step_of_the_peak(run, browser, tmp_path, monkeypatch):
    e, trace = run
    monkeypatch.setattr(timeline_page, "MOST_BLOCKS", 100)
    timeline_page.write(trace, e, tmp_path / "out.html")
    page = browser.new_page()
    page.goto((tmp_path / "out.html").as_uri())
    assert "Only the step of the peak is shown" in page.inner_text("#sub")
    assert page.evaluate("D.calls") < trace.events.shape[0]
    assert page.evaluate("total[D.peak] * UNIT") == e.peak_allocated
    page.close()


def test_modules_are_grouped_so_that_layers_show(run):
    names, group_of = timeline_page.module_groups(run[1])
    assert {"<b>body</b>.0", "<b>body</b>.1", "<b>body</b>.2", "AdamW.step()"} <= set(names)
    assert len(group_of) == len(run[1].modules) and group_of[0] == 0
    assert len(names) <= timeline_page.MOST_GROUPS


def test_it_needs_no_network_and_says_where_it_cannot_write(run, tmp_path):
    text = timeline_page.page(run[1], run[0])
    assert not re.search(r"https?://", text) and "</script><b>" not in text
    with pytest.raises(InvalidValue, match="cannot write the timeline .*No such file"):
        timeline_page.write(run[1], run[0], tmp_path / "no" / "out.html")
    with pytest.raises(InvalidValue, match="cannot write the timeline .*No space left"):
        timeline_page.write(run[1], run[0], "/dev/full")
    with pytest.raises(InvalidValue, match="cannot write the timeline .*directory"):
        timeline_page.write(run[1], run[0], tmp_path)
