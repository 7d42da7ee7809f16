"""What trainings take on a GPU: each in a process of its own, as many at once as the card has room for."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from drawn_ranks.drawing import GIB, rough_need
from drawn_ranks.models import Row
from drawn_ranks.training import train


def measure_one(row: Row, history: str | None) -> None:
    """In a process of its own: print the peaks of one training, by PyTorch and by NVML; it waits for its turn."""
    import torch.distributed as dist

    begin = time.perf_counter()

    def turn() -> None:
        nonlocal begin
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()

    torch.cuda.synchronize()
    context = _process_memory()
    if history:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=10_000_000)
    if row["strategy"] == "ddp":
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        dist.init_process_group("nccl")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=row.get("rank", 0), world_size=row["ranks"])
    answer: Row = {"nvml_ctx": context}
    try:
        train(row, turn)
    except torch.OutOfMemoryError as error:
        answer["oom"] = str(error).split(" If reserved")[0]
    torch.cuda.synchronize()
    answer |= {
        "peak_alloc": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "end_reserved": torch.cuda.memory_reserved(),
        "nvml_end": _process_memory(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "wall_s": round(time.perf_counter() - begin, 2),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    print(json.dumps(answer), flush=True)
    if history:
        _save(history)


def _save(file: str) -> None:
    """The allocator's events: action, address, size, stream, microseconds."""
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    kinds = {"alloc": 0, "free_requested": 1, "free_completed": 2, "segment_alloc": 3, "segment_free": 4}
    base = min((event["addr"] for event in events if event["action"] == "segment_alloc"), default=0)
    begin = events[0]["time_us"] if events else 0
    streams: dict[int, int] = {}
    with gzip.open(file, "wt", compresslevel=4) as out:
        for event in events:
            if event["action"] in kinds:
                stream = streams.setdefault(event["stream"], len(streams))
                words = kinds[event["action"]], event["addr"] - base, event["size"], stream, event["time_us"] - begin
                out.write(" ".join(map(str, words)) + "\n")


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _process_memory() -> int | None:
    """What `nvidia-smi` shows for this process."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        for line in subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines():
            pid, used = (word.strip() for word in line.split(","))
            if int(pid) == os.getpid() and used.isdecimal():
                return int(used) << 20
    return None


_READY = 6  # processes at once where one has the card: enough that the next is always ready


class _Card:
    """The memory of the card, shared by the runs that go on."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, size: Callable[[], int]) -> Iterator[bool]:
        """Wait for so much of the card, which may become less while we wait; whether it is all of it."""
        with self._changed:
            while self._free < (taken := min(size(), self.size)):
                self._changed.wait(1.0)
            self._free -= taken
        try:
            yield taken == self.size
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


def measure(rows: list[Row], given: argparse.Namespace) -> None:
    """Every row in a process of its own, as many at once as the card has room for; none begins after so long.

    Those that depend on timing (`--alone`) come first and have the card to themselves, while a few next ones are
    imported and built on the CPU. When `--rest` seconds are left, those that are not measured yet share the card.
    """
    card = _Card(132 * GIB)
    end, lock = time.monotonic() + given.seconds, threading.Lock()
    environment = {"OMP_NUM_THREADS": "4", **os.environ}
    first = [row for row in rows if row["strategy"] in given.alone]

    def one(row: Row) -> None:
        need = row.get("estimate", {}).get("upper") or rough_need(row)

        def size() -> int:
            return card.size if row in first and end - time.monotonic() > given.rest else need

        if end - time.monotonic() < 20:
            return
        words = [sys.executable, sys.argv[0], "one"]
        if given.histories and row.get("history", True):
            words += ["--history", str(given.histories / f"{row['id']}.txt.gz")]
        with tempfile.TemporaryFile("w+") as errors:
            run = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
            watch = threading.Timer(max(end - time.monotonic(), 1), run.kill)
            watch.start()
            answer: Row = {}
            with run, contextlib.suppress(BrokenPipeError):
                assert run.stdin and run.stdout
                run.stdin.write(json.dumps(row) + "\n")
                run.stdin.flush()
                while run.stdout.readline().strip() not in ("ready", ""):
                    pass
                with card.holding(size) as alone:
                    run.stdin.write("go\n")
                    run.stdin.flush()
                    found = next((line for line in run.stdout if line.startswith("{")), "{}")
                    if not alone:  # else the next may begin while this one is ending
                        run.communicate()
                answer |= {"alone": alone, **json.loads(found)}
            watch.cancel()
            if "peak_reserved" not in answer:
                errors.seek(0)
                answer["failed"] = errors.read()[-1500:] or "it took too long"
        with lock, gzip.open(given.out, "at") as file:
            file.write(json.dumps(row | answer) + "\n")
            print(row["id"], row["strategy"], answer.get("wall_s"), answer.get("failed", ""), flush=True)

    given.out.unlink(missing_ok=True)
    if given.histories:
        given.histories.mkdir(parents=True, exist_ok=True)
    for some, at_once in (
        (first, min(given.at_once, _READY)),
        ([row for row in rows if row not in first], given.at_once),
    ):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, some))
        print(f"{given.seconds - end + time.monotonic():.0f} s", flush=True)
