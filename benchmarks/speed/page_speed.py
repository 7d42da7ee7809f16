"""The web page with 2,000 jobs and 64 virtual GPUs: how soon it is seen, and what ten open pages cost the daemon.

python benchmarks/speed/page_speed.py [--jobs 2000] [--gpus 64] [--pages 10]

Starts a daemon of its own in a temporary home, with its page beside it, and a Chromium. What is measured of the daemon
is measured in turns, with and without pages; the browser of those pages gets the lowest priority, since it would be on
other machines.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, sync_playwright

from ullage.errors import NoDaemon
from ullage.jobs.job_files import JobSpec
from ullage.manager.client import Client

GOAL = 2.0  # seconds until the first paint
PATHS = {"/": ".card .band", "/queue": ".ag-row", "/timeline": "tbody tr"}  # with what is waited for
SETTINGS = '[placing]\npatience = "1d"\n'  # nothing is kept for those who wait: short jobs go on starting
SHORT, TURNS = 10, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--jobs", 2000), ("--gpus", 64), ("--pages", 10)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as folder:
        home, log = Path(folder), Path(folder) / "serve.log"
        (home / "settings.toml").write_text(SETTINGS)
        words = ["serve", "--virtual", f"{options.gpus}xA100-40GB", "--estimator", "none", "--page", "0"]
        with log.open("wb") as output:
            command = [sys.executable, "-m", "ullage", *words, "--settings", str(home / "settings.toml")]
            daemon = subprocess.Popen(command, env={**os.environ, "ULLAGE_HOME": folder}, stderr=output)
        client = Client(home)
        try:
            url = wait_for_page(log)
            fill(client, options.jobs, options.gpus)
            with sync_playwright() as playwright:
                for priority, measure in ((0, paint), (19, cost)):
                    browser = playwright.chromium.launch(
                        executable_path=chromium(priority, home), args=["--no-sandbox"]
                    )
                    measure(client, browser, url, daemon.pid, options.pages)
                    browser.close()
        finally:
            client.call("cancel", jobs=[job["id"] for job in client.call("queue")])
            daemon.terminate()
            daemon.wait()


def chromium(priority: int, folder: Path) -> str:
    """A wrapper that starts Chromium with a priority."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("needed Chromium; type: apt-get install chromium")
    wrapper = folder / f"chromium-{priority}"
    wrapper.write_text(f'#!/bin/sh\nexec nice -n {priority} {program} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def wait_for_page(log: Path) -> str:
    """Wait until the page answers, and return its address."""
    while True:
        match = re.search(r"(http\S+)/sign-in#code=", log.read_text())
        if match:
            return match[1]
        time.sleep(0.05)


def fill(client: Client, jobs: int, gpus: int) -> None:
    """A job on every GPU but the last, and jobs that wait for two idle ones."""
    alone = {"command": ["sleep", "3600"], "cwd": "/tmp", "memory": 30 << 30, "exclusive": True}
    for number in range(gpus - 1):
        client.submit_spec(JobSpec.model_validate({**alone, "name": f"training-{number}"}))
    while client.call("ping")["jobs"].get("running", 0) < gpus - 1:
        time.sleep(0.2)
    for number in range(jobs - gpus + 1):
        client.submit_spec(JobSpec.model_validate({**alone, "gpus": 2, "name": f"experiment-{number}"}))


def paint(client: Client, browser: Browser, url: str, daemon: int, pages: int) -> None:
    """Print how soon a new visitor sees something."""
    for path, there in PATHS.items():
        times = [first_seen(client, browser, url, path, there) for _ in range(5)]
        first, data = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{path}: first paint after {first:.2f} s, what it shows after {data:.2f} s (medians of {len(times)})")
        print(f"   {'within' if first < GOAL else 'NOT within'} {GOAL:.0f} s")


def cost(client: Client, browser: Browser, url: str, daemon: int, pages: int) -> None:
    """Print what open pages cost the daemon."""
    by_pages: dict[int, list[tuple[list[float], float]]] = {0: [], pages: []}
    for _ in range(TURNS):
        for number in by_pages:
            open_pages = [visit(client, browser, url, list(PATHS)[at % len(PATHS)]) for at in range(number)]
            for at, context in enumerate(open_pages):
                context.pages[0].locator(list(PATHS.values())[at % len(PATHS)]).first.wait_for()
            by_pages[number].append(scheduling(client, daemon))
            for context in open_pages:
                context.close()
    for number, turns in by_pages.items():
        spans = [span for each, _ in turns for span in each]
        cores = statistics.mean(used for _, used in turns)
        print(
            f"{number} pages open: a job starts {statistics.median(spans) * 1e3:.0f} ms after it came (median), "
            f"{max(spans) * 1e3:.0f} ms at most; the daemon uses {cores:.0%} of a core"
        )


def visit(client: Client, browser: Browser, url: str, path: str) -> Any:
    """Open a page as another signed-in user."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(120_000)
    tab = context.new_page()
    token = client.token_create(lasts=3600.0)["token"]
    answer = context.request.post(f"{url}/sign-in", form={"token": token}, headers={"Origin": url}, max_redirects=0)
    assert answer.status == 303, answer.text()
    tab.goto(url + path)
    return context


def first_seen(client: Client, browser: Browser, url: str, path: str, there: str) -> tuple[float, float]:
    """Seconds until a new visitor sees something, and until there are GPUs or jobs."""
    context = visit(client, browser, url, path)
    tab = context.pages[0]
    tab.locator(there).first.wait_for()
    data = tab.evaluate("performance.now()") / 1000
    first = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    context.close()
    return first, data


def scheduling(client: Client, daemon: int) -> tuple[list[float], float]:
    """Seconds from the submissions of short jobs to their starts, one by one, and what the daemon used of a core."""
    began, used, spans = time.monotonic(), processor_time(daemon), []
    for _ in range(SHORT):
        spec = JobSpec.model_validate({"command": ["true"], "cwd": "/tmp", "memory": 1 << 30})
        [number] = client.submit_spec(spec)["jobs"]
        while True:
            [job] = client.call("status", job=number)
            if job["ended"] is not None:
                break
            time.sleep(0.1)
        spans.append(job["started"] - job["submitted"])
    return spans, (processor_time(daemon) - used) / (time.monotonic() - began)


def processor_time(process: int) -> float:
    return sum(psutil.Process(process).cpu_times()[:2])


if __name__ == "__main__":
    try:
        main()
    except NoDaemon as error:
        sys.exit(str(error))
