"""Puts a daemon together: checks names, finds the GPUs, makes the virtual ones."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ullage.errors import NoGPUSource, NotAllowed, StoreFull, UllageError
from ullage.manager.core.daemon import Daemon
from ullage.manager.core.intake import NOBODY
from ullage.manager.settings import Settings
from ullage.monitor import Monitor, Source, best_source

CARDS = "serve"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def usable_home(folder: Path) -> Iterator[None]:
    """A home that cannot be written to is one clear message, whichever file was the first that could not.

    >>> with usable_home(Path("/dev/null")):
    ...     Path("/dev/null/manager").mkdir()
    Traceback (most recent call last):
    ullage.errors.NotAllowed: nothing was started: /dev/null/manager cannot be written (Not a directory); \
ULLAGE_HOME names another folder to keep everything in
    """
    try:
        yield
    except UllageError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StoreFull(
                f"nothing was started: there is no room in {folder} ({error.strerror}). "
                "Make room on that disk and try again; running jobs go on meanwhile"
            ) from error
        if error.errno in _NOT_OURS:
            raise NotAllowed(
                f"nothing was started: {error.filename or folder} cannot be written ({error.strerror}); "
                "ULLAGE_HOME names another folder to keep everything in"
            ) from error
        raise


def make_daemon(
    folder: Path, settings: Settings, say: Callable[[str], None], clock: Callable[[], float] = time.time
) -> Daemon:
    """A daemon of a home, ready to run. What is wrong with the settings or the machine is one clear message."""
    check_names(settings)
    cards = None if settings.virtual is None else folder / "cards" / CARDS
    source = find_source(settings, cards)
    monitor = Monitor(source, settings.monitoring.interval, settings.monitoring.window)
    return Daemon(folder, settings, monitor, cards=cards, say=say, clock=clock)


def check_names(settings: Settings) -> None:
    """Names of a policy and of an estimator that are not there list those that are."""
    from ullage.estimation.estimators.registry import estimators, find
    from ullage.placement.policies import find_policy

    find_policy(settings.policy)
    name = settings.estimating.estimator
    if name not in (NOBODY, *estimators()):  # those that are there are not loaded here: that would import PyTorch
        find(name)


def find_source(settings: Settings, cards: Path | None) -> Source:
    """Where readings come from: virtual cards, or this machine's GPUs."""
    if cards is not None and settings.virtual is not None:
        from ullage.virtual.shared_card.cards import Cards

        Cards.create(cards, settings.virtual)
        return best_source(cards)
    try:
        return best_source()
    except NoGPUSource as error:
        reason = str(error).partition(". Virtual")[0]
        raise NoGPUSource(f"{reason}; to serve virtual GPUs type: ullage serve --virtual 4xA100-40GB") from None
