"""Make the pictures of the README by the commands that they show.

`python examples/draw_report.py docs` writes report.svg, too_large.svg and, where Chromium and the package playwright
are installed, timeline_page.png.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

WIDTH = 104
FITS = "estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB"
TOO_LARGE = "estimate torchvision:resnet50 --batch-size 384 --gpu RTX-4090"


def draw_terminal(words: str, file: Path) -> None:
    """What a command prints in a terminal, as SVG."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)}
    command = [sys.executable, "-m", "ullage", *words.split()]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed))
    console.save_svg(str(file), title=f"ullage {words}", theme=DIMMED_MONOKAI)


def draw_page(words: str, file: Path) -> None:
    """The timeline page of a command, as a browser shows it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no picture of the page: Chromium is not installed")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "out.html"
        command = [sys.executable, "-m", "ullage", *words.split(), "--timeline", str(page)]
        subprocess.run(command, capture_output=True, check=True)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1100, "height": 860}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.click("#by-module")
        tab.mouse.move(840, 330)
        tab.wait_for_selector("#tip", state="visible")
        tab.screenshot(path=str(file))
        browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    draw_terminal(FITS, target / "report.svg")
    draw_terminal(TOO_LARGE, target / "too_large.svg")
    draw_page(FITS, target / "timeline_page.png")
