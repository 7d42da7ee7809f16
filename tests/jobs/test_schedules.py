"""Times to start at, as people write them."""

import datetime

import pytest

from ullage.errors import InvalidValue
from ullage.jobs.schedules import parse_start

EVENING = datetime.datetime(2026, 11, 16, 21, 30)  # local, as the clock on the wall


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", EVENING),
        ("now+2h", EVENING + datetime.timedelta(hours=2)),
        ("now + 90m", EVENING + datetime.timedelta(minutes=90)),
        ("22:00", EVENING.replace(hour=22, minute=0)),
        ("22:00:30", EVENING.replace(hour=22, minute=0, second=30)),
        ("21:29", EVENING.replace(day=17, minute=29)),
        ("8:05", EVENING.replace(day=17, hour=8, minute=5)),
        ("2026-11-20T08:00", datetime.datetime(2026, 11, 20, 8)),
        ("2026-11-20 08:00", datetime.datetime(2026, 11, 20, 8)),
        ("2026-11-20", datetime.datetime(2026, 11, 20)),
        ("2026-11-20T08:00Z", datetime.datetime(2026, 11, 20, 8, tzinfo=datetime.UTC)),
        (datetime.time(22), EVENING.replace(hour=22, minute=0)),  # as TOML has it
        (datetime.date(2026, 11, 20), datetime.datetime(2026, 11, 20)),
    ],
)
def test_start_times_are_understood(text, moment):
    assert parse_start(text, EVENING.timestamp()) == moment.timestamp()


@pytest.mark.parametrize(
    "text", ["", "soon", "25:00", "now+", "now+2x", "now-2h", "2026-13-01", True, "9" * 400, "١٢:٠٠"]
)
def test_invalid_times_are_refused_with_the_valid_form(text):
    with pytest.raises(InvalidValue, match=r"time must look like 2026-11-20T08:00, 22:00 or now\+2h, got "):
        parse_start(text, EVENING.timestamp())
