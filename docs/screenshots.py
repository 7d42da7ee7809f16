"""Make the pictures of the web page: `make screenshots`. It needs Chromium, and writes to docs/images.

A real daemon serves virtual GPUs; its jobs really take memory of them. The user's name is replaced in the pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from ullage.jobs.job_files import JobSpec
from ullage.manager.client import Client

IMAGES = Path(__file__).resolve().parent / "images"
COLOURS = 128  # of a picture: few colours make small files
WIDE, PHONE = {"width": 1400, "height": 510}, {"width": 390, "height": 720}

# Takes memory of its virtual GPU as a training would: more with every step, up to a limit. One that finds none fails as
# PyTorch does.
JOB = """
import os, sys, time
from ullage.virtual.shared_card.cards import Cards
card = Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"])
size = int(float(sys.argv[1]) * 2**30)
for step in range(8):
    if not card.take(size // 8):
        sys.exit(f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size / 2**33:.2f} GiB.")
    print(f"step {step}, loss {2.3 / (1 + step):.4f}", flush=True)
    time.sleep(0.3)
while True:
    step += 1
    print(f"step {step}, loss {2.3 / (1 + step):.4f}", flush=True)
    time.sleep(1)
"""


def main() -> None:
    browser_file = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_file is None:
        sys.exit("needed Chromium; type: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="ullage-screenshots-") as folder:
        log = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "ullage", "serve", "--virtual", "4xA100-40GB", "--estimator", "none"]
        with log.open("wb") as output:
            env = {**os.environ, "ULLAGE_HOME": folder}
            daemon = subprocess.Popen([*command, "--page", "0"], env=env, stderr=output)
        client = Client(Path(folder))
        try:
            link = wait_for_link(log)
            submit_jobs(client)
            time.sleep(8.0)  # the figures of some seconds
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
                take_pictures(browser, link)
                browser.close()
        finally:
            client.call("cancel", jobs=[job["id"] for job in client.call("queue")])
            daemon.terminate()
            daemon.wait()


def wait_for_link(log: Path) -> str:
    """The link that the daemon prints."""
    for _ in range(1200):
        found = re.search(r"http\S+#code=\S+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.1)
    sys.exit(f"the daemon printed no link: {log.read_text()}")


def submit_jobs(client: Client) -> None:
    """Jobs that run, wait, are held, have failed and take more than they were promised."""

    def submit(name: str, promise: float, takes: float, **more: Any) -> None:
        command = [sys.executable, "-c", JOB, str(takes)]
        env = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH")}
        memory = int(promise * 2**30)
        client.submit_spec(JobSpec(command=command, cwd="/tmp", memory=memory, name=name, env=env, **more))

    single = (
        ("resnet50-imagenet", 18, 15.2),
        ("bert-base-mrpc", 12.5, 11),
        ("vit-large", 22, 20.8),
        ("unet-cells", 9, 7.5),
        ("gpt2-lora", 16, 13.1),
        ("whisper-small", 5, 6.2),
        ("resnet18-cifar", 3, 2.1),
        ("llama-3b-sft", 34, 30),
    )
    for name, promise, takes in single:
        submit(name, promise, takes)
    submit("sweep", 14, 9, array="1-12")
    submit("gpt2-medium-ddp", 30, 10, gpus=2)
    submit("ablation", 4, 3, hold=True)
    client.submit_spec(JobSpec(command=["python3", "-c", "import tourch"], cwd="/tmp", memory=2**30, name="typo"))
    client.call("drain", gpu="3", reason="new fan on Monday")


def take_pictures(browser: Any, link: str) -> None:
    """All pictures."""
    url = link.partition("/sign-in")[0]
    context = browser.new_context(viewport=WIDE)
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(link)
    tab.locator(".card .used").first.wait_for()
    time.sleep(5.0)
    save(tab, "page_gpus.png")
    tab.set_viewport_size(WIDE | {"height": 860})
    tab.goto(url + "/queue")
    tab.locator(".ag-row", has_text="typo").first.wait_for()
    time.sleep(2.0)
    save(tab, "page_queue.png")
    state = context.storage_state()
    phone = browser.new_context(viewport=PHONE, color_scheme="dark", storage_state=state)
    tab = phone.new_page()
    tab.goto(url + "/")
    tab.locator(".card .used").first.wait_for()
    time.sleep(2.0)
    save(tab, "page_phone.png")


def save(tab: Page, name: str) -> None:
    """A picture with few colours, and with Ann in place of who made it."""
    tab.evaluate(
        """() => {
            const who = document.querySelector('.who').textContent, walk = document.createTreeWalker(document.body, 4);
            while (walk.nextNode()) if (walk.currentNode.data === who) walk.currentNode.data = 'ann';
        }"""
    )
    file = IMAGES / name
    tab.screenshot(path=file)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
