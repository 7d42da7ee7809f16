"""What the parts of one daemon share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ullage.manager.core.readings import Watching
from ullage.manager.running.launcher import Launcher
from ullage.manager.running.sharing import Sharing
from ullage.manager.settings import Settings
from ullage.manager.storage.book import Book
from ullage.manager.storage.records import AttemptRecord
from ullage.placement import Ledger, Slot, Waiting


@dataclass
class Site:
    """One daemon's settings, book, ledger and eyes. Used by the thread of its event loop only."""

    folder: Path
    settings: Settings
    book: Book
    launcher: Launcher
    watching: Watching
    sharing: Sharing
    ledger: Ledger
    clock: Callable[[], float]
    say: Callable[[str], None]
    cards: Path | None = None  # the folder of the virtual cards, if it serves those
    slots: list[Slot] = field(default_factory=list)
    reasons: dict[int, str | Waiting] = field(default_factory=dict)  # why a job waits
    not_before: dict[int, float] = field(default_factory=dict)  # by the monotonic clock
    queued_at: dict[int, float] = field(default_factory=dict)  # when a job last came into the queue
    taken: dict[str, dict[str, int]] = field(default_factory=dict)  # by token and slot, now
    peaks: dict[str, int] = field(default_factory=dict)  # by token, the most on one GPU
    pids: dict[int, int] = field(default_factory=dict)  # by job, its first process, for readings of the host
    warned: set[str] = field(default_factory=set)  # tokens of those that were reported for taking too much

    def attempt_folder(self, attempt: AttemptRecord) -> Path:
        """Where an attempt's files are."""
        return self.launcher.folder(attempt.job, attempt.number)

    def look(self) -> None:
        """Take over what the monitor sees: slots, and what each attempt holds."""
        self.slots, self.taken = self.watching.look(self.book.drained())
        self.ledger.see(self.slots)
        self.watching.monitor.follow(self.pids.values())
        for job, attempt in self.book.attempts.items():
            held = self.taken.get(attempt.token, {})
            for slot in attempt.slots:
                self.ledger.observe(job, slot, held.get(slot))
            if held:
                self.peaks[attempt.token] = max(self.peaks.get(attempt.token, 0), *held.values())

    def reason(self, job: int) -> str | None:
        """Why a job waits, as far as placement was asked."""
        found = self.reasons.get(job)
        return found if found is None or isinstance(found, str) else found.reason

    @property
    def largest(self) -> int:
        """The memory of the largest GPU that answers."""
        return max((slot.total for slot in self.slots if not slot.lost), default=0)
