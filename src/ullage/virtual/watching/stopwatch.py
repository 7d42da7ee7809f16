"""Seconds that something has taken so far, also while it is at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Adds up what happens inside its `running()`; what happens inside of that again counts once."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """All until now."""
        since = self._since
        return self._before if since is None else self._before + time.monotonic() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A `with` whose time counts."""
        if self._since is not None:
            yield
            return
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None
