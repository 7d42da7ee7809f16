"""Make the pictures of the README: the report in a terminal, the report of a job that is too large, the timeline page.

`python examples/draw_report.py docs` writes report.svg, too_large.svg and, where Chromium and the package playwright
are installed, timeline_page.png.
"""

import io
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from ullage.estimate import advice, report, timeline_page
from ullage.estimate.function import estimate
from ullage.estimate.trace import Trace
from ullage.workload import Configuration, train


def draw_report(name: str, title: str, folder: Path, job: Configuration, gpu: str) -> Trace:
    """One report as SVG, as a terminal shows it."""
    trace = Trace()
    words = f"{job.model}, batch {job.batch}, {job.opt}, {job.precision}"
    answer = replace(estimate(lambda: train(job), gpu=gpu, trace=trace), source=words)
    options = [] if answer.fits else advice.options(job, gpu, answer=answer)
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    report.print_report(answer, console, options)
    console.save_svg(str(folder / f"{name}.svg"), title=title, theme=DIMMED_MONOKAI)
    timeline_page.write(trace, answer, Path(tempfile.gettempdir()) / f"{name}.html")
    return trace


def draw_page(folder: Path, page: Path) -> None:
    """A picture of the timeline page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no picture of the page: Chromium is not installed")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1100, "height": 860}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.click("#by-module")
        tab.mouse.move(840, 330)
        tab.wait_for_selector("#tip", state="visible")
        tab.screenshot(path=str(folder / "timeline_page.png"))
        browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    resnet = Configuration(model="tv:resnet50", batch=64, input=[3, 224, 224])
    draw_report(
        "report", "ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB", target, resnet, "A100-40GB"
    )
    draw_report("too_large", "ullage estimate", target, replace(resnet, batch=384), "RTX-4090")
    draw_page(target, Path(tempfile.gettempdir()) / "report.html")
