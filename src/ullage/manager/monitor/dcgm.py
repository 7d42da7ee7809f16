"""Activity from DCGM, for GPUs without GPM: a child process `dcgmi dmon`, read line by line.

Columns come in the order of the requested fields, a row begins with the entity ("GPU 0", "GPU-I 3"), "N/A" is unknown,
headers repeat, and values too wide for their column end in "...".
"""

import contextlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import IO

from ullage.errors import NoGPUSource
from ullage.manager.monitor.nvml import Busy
from ullage.manager.monitor.readings import Device, GPUReading, Source

# DCGM's field numbers (DCGM_FI_PROF_*): shares from 0 to 1, PCIe in bytes a second as the GPU sees it.
FIELD_IDS = {
    "gract": 1001,
    "smact": 1002,
    "smocc": 1003,
    "tensor": 1004,
    "drama": 1005,
    "pcie_tx_bps": 1009,
    "pcie_rx_bps": 1010,
}
_ROW = re.compile(r"\s*(?:(GPU|GPU-I|GPU-CI)\s+)?(\d+)\s+(\S.*)")
_CARD_ROW = re.compile(r"\|\s*(\d*)\s*\|\s*(.*?)\s*\|")
_PARENT = re.compile(r"GPU (GPU-[0-9A-Za-z-]+) \(EntityID: \d+\)")
_INSTANCE = re.compile(r"\bI \d+/(\d+)\b.*GPU Instance \(EntityID: (\d+)\)")
_PATIENCE = 10.0  # seconds to wait for dcgmi, and between restarts of a child that dies

Entity = tuple[str, int]  # kind ("GPU" or "GPU-I") and DCGM's number


class DcgmSource:
    """Another source's readings, with activity and PCIe traffic from DCGM.

    `base` reads everything else, such as devices, memory and processes. If DCGM is silent for three intervals and a
    second, activity is unknown. A host engine on another machine is not supported.
    """

    name = "dcgm"

    def __init__(self, base: Source, interval: float = 1.0, command: str = "dcgmi") -> None:
        self._base, self._interval, self._command = base, max(interval, 0.1), command
        self._rows: dict[Entity, tuple[float, Busy]] = {}
        self._entities: dict[str, Entity] = {}
        self._child: subprocess.Popen[str] | None = None
        self._started = 0.0
        self._message: str | None = None
        devices = base.devices()
        self._listed = {device.id for device in devices}
        self._find_entities(devices)
        self._start()

    @property
    def hint(self) -> str | None:
        if self._child is None or self._child.poll() is None:
            return None
        return f"DCGM gives no activity: '{self._command} dmon' ended and said: {self._message or 'nothing'}"

    @property
    def rates(self) -> Mapping[str, float]:
        return self._base.rates

    def devices(self) -> list[Device]:
        """List the other source's devices; restart the child if they have changed."""
        devices = self._base.devices()
        listed = {device.id for device in devices}
        if listed != self._listed:
            self._listed = listed
            with contextlib.suppress(NoGPUSource):  # the activity of new ones stays unknown
                self._find_entities(devices)
                self._stop()
                self._start()
        return devices

    def read(self, device_id: str) -> GPUReading:
        """Return the other source's reading, with DCGM's activity if it is fresh."""
        reading = self._base.read(device_id)
        dead = self._child is not None and self._child.poll() is not None
        if dead and time.monotonic() - self._started > _PATIENCE:
            with contextlib.suppress(OSError):
                self._start()
        entity = self._entities.get(device_id)
        since, busy = self._rows.get(entity, (0.0, Busy())) if entity else (0.0, Busy())
        if time.monotonic() - since > 3 * self._interval + 1:
            return reading
        fresh = {name: value for name, value in vars(busy).items() if value is not None}
        ages = {name: age for name, age in reading.ages.items() if name not in fresh}
        return replace(reading, ages=ages, **fresh)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        return self._base.processes(device_id)

    def close(self) -> None:
        self._stop()
        self._base.close()

    def _find_entities(self, devices: Iterable[Device]) -> None:
        devices = list(devices)
        cards = parse_cards(self._ask("discovery", "-l"))
        entities: dict[str, Entity] = {}
        instances: Mapping[tuple[str, int], int] = {}
        if any(device.mig for device in devices):
            instances = parse_instances(self._ask("discovery", "-c"))
        for device in devices:
            if device.mig and device.parent is not None and device.instance is not None:
                number, kind = instances.get((device.parent, device.instance)), "GPU-I"
            else:
                number, kind = cards.get(device.id), "GPU"
            if number is not None:
                entities[device.id] = (kind, number)
        if not entities:
            raise NoGPUSource("DCGM answers, but knows none of the GPUs that NVML lists; see 'dcgmi discovery -l'")
        self._entities = entities

    def _ask(self, *words: str) -> str:
        try:
            done = subprocess.run([self._command, *words], capture_output=True, text=True, timeout=_PATIENCE)
        except FileNotFoundError:
            raise NoGPUSource(f"DCGM's program {self._command!r} must be installed, but it is not") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoGPUSource(f"DCGM's program {self._command!r} does not answer: {error}") from None
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise NoGPUSource(
                f"'{self._command} {' '.join(words)}' failed and said: {output[0]}. "
                "Is its host engine running? Type: systemctl status nvidia-dcgm"
            )
        return done.stdout

    def _start(self) -> None:
        wanted = ",".join(f"i:{number}" if kind == "GPU-I" else str(number) for kind, number in self._entities.values())
        numbers = ",".join(str(number) for number in FIELD_IDS.values())
        delay = str(max(100, round(self._interval * 1000)))  # the shortest delay that dmon accepts
        self._started = time.monotonic()
        # In its own session, so that Ctrl-C reaches only this process. Without a reader it ends (SIGPIPE).
        self._child = subprocess.Popen(
            [self._command, "dmon", "-e", numbers, "-d", delay, "-i", wanted],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(self._child.stdout,), daemon=True, name="dcgmi dmon").start()

    def _follow(self, lines: IO[str]) -> None:
        with lines, contextlib.suppress(ValueError):  # closed by another thread
            for line in lines:
                row = parse_row(line)
                if row is not None:
                    self._rows[row[0]] = (time.monotonic(), row[1])
                elif line.strip() and not line.startswith(("#", "ID")):
                    self._message = line.strip()

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._rows.clear()


def dcgm_installed(command: str = "dcgmi") -> bool:
    """Whether DCGM's program is installed; `DcgmSource` checks that its host engine runs."""
    return shutil.which(command) is not None


def parse_row(line: str) -> tuple[Entity, Busy] | None:
    """Return the entity and values of a line of `dcgmi dmon`; `None` for headers and messages.

    >>> parse_row("GPU 0     0.951     0.615     0.222     N/A       0.400     52428800  104857600")[1].smact
    0.615
    >>> parse_row("#Entity   GRACT       SMACT") is None
    True
    """
    match = _ROW.fullmatch(line.rstrip())
    if match is None or match[1] == "GPU-CI":
        return None
    words = match[3].split()
    if len(words) != len(FIELD_IDS):
        return None
    values = {name: _number(word, name.endswith("_bps")) for name, word in zip(FIELD_IDS, words, strict=True)}
    return (match[1] or "GPU", int(match[2])), Busy(**values)


def parse_cards(listing: str) -> dict[str, int]:
    """Return DCGM's number of each GPU by UUID, from `dcgmi discovery -l`.

    >>> parse_cards("| 0      | Name: NVIDIA A100          |\\n|        | Device UUID: GPU-12ab         |")
    {'GPU-12ab': 0}
    """
    numbers: dict[str, int] = {}
    number: int | None = None
    for line in listing.splitlines():
        match = _CARD_ROW.match(line)
        if match is None:
            continue
        number = int(match[1]) if match[1] else number
        label, _, value = match[2].partition(":")
        if label.strip() == "Device UUID" and number is not None:
            numbers[value.strip()] = number
    return numbers


def parse_instances(listing: str) -> dict[tuple[str, int], int]:
    """Return DCGM's number of each MIG instance by parent UUID and NVML's number, from `dcgmi discovery -c`.

    >>> parse_instances("| GPU 0 | GPU GPU-12ab (EntityID: 0) |\\n| -> I 0/2 | GPU Instance (EntityID: 5) |")
    {('GPU-12ab', 2): 5}
    """
    numbers: dict[tuple[str, int], int] = {}
    parent = ""
    for line in listing.splitlines():
        above, instance = _PARENT.search(line), _INSTANCE.search(line)
        if above is not None:
            parent = above[1]
        elif instance is not None and parent:
            numbers[parent, int(instance[1])] = int(instance[2])
    return numbers


def _number(word: str, traffic: bool) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None  # N/A or truncated
    if value != value or value < 0 or (not traffic and value > 1.05):
        return None
    return value if traffic else min(value, 1.0)
