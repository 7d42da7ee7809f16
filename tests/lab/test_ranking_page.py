"""The ranking's page, in a real browser."""

import pytest

from ullage.units import GIB
from ullage_lab.judge.page import write
from ullage_lab.judge.truth import MeasuredRun, TruthSet
from ullage_lab.judge.worker import Record


def ranked():
    runs = [
        MeasuredRun(id=f"<r{i}>", row={}, family=("timm", "MLPs")[i % 2], reserved=i * GIB, process=(i + 1) * GIB)
        for i in range(1, 9)
    ]
    records = []
    for run in runs:
        mine = {"run": run.id, "gpu": "H200"}
        records.append(
            Record(
                estimator="ullage",
                figure=run.process,
                kind="process",
                seconds=1.0,
                **mine,
                upper=run.process + GIB,
                process=run.process,
                reserved=run.reserved,
            )
        )
        records.append(Record(estimator="horus", figure=9 * run.process, kind="allocated", seconds=0.001, **mine))
        records.append(Record(estimator="other", unsupported="needs <b>a summary</b>", seconds=0.0, **mine))
    return TruthSet(name="a & b", gpu="H200", runs=runs, left_out={"too large": 3}, notes=["a note"]), records


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(246, 247, 249)"), ("dark", "rgb(17, 21, 27)")])
def test_a_person_can_read_it(browser, tmp_path, scheme, background):
    file = tmp_path / "out.html"
    write([ranked()], file)
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=scheme)
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    assert page.inner_text("h2").startswith("a & b")
    rows = page.locator("section table").first.locator("tbody tr")
    assert [row.split()[0] for row in rows.all_inner_texts()] == ["ullage", "ullage", "horus", "other"]
    assert rows.nth(0).locator("td").nth(3).inner_text() == "0.00%"
    assert page.locator("svg[aria-label*='Predicted against']").count() == 2
    assert page.locator("svg[aria-label='Predicted against measured memory, ullage'] circle").count() == 8
    assert page.locator("svg[aria-label*='Median error of each']").count() == 2
    assert "needs <b>a summary</b>" in page.inner_text("table.words")
    assert "3 runs left out: too large" in page.inner_text("ul")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert problems == [] and requests == [file.as_uri()]
    page.close()


def test_dots_on_the_line_are_right_and_labels_do_not_overlap(browser, tmp_path):
    file = tmp_path / "out.html"
    write([ranked()], file)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(file.as_uri())
    dots = page.locator("svg[aria-label='Predicted against measured memory, ullage'] circle")
    line = page.locator("svg[aria-label='Predicted against measured memory, ullage'] .equal")
    x1, y1, x2, y2 = (float(line.get_attribute(name)) for name in ("x1", "y1", "x2", "y2"))
    assert dots.count()
    for index in range(dots.count()):
        x, y = (float(dots.nth(index).get_attribute(name)) for name in ("cx", "cy"))
        assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.5)
    boxes = [label.bounding_box() for label in page.locator("svg[aria-label^='Time of'] .name").all()]
    assert len(boxes) == 3
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or abs(one["y"] - other["y"]) >= 12
    page.close()
