"""Seconds spent in an activity, also while it runs."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Adds up the time inside `running()`; nested uses count once."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        since = self._since
        return self._before if since is None else self._before + time.monotonic() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self._since is not None:
            yield
            return
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None
