"""Accounts of what users have used: charged attempt by attempt at their ends, or kept up to date all the time."""

import random

import pytest

from ullage.manager.placement import Account, UsageAccounts, held

HOUR = 3600.0
DAY = 24 * HOUR


def attempt_by_attempt(attempts, half_life, now):
    """The long way: each attempt is charged when it ends, those that run are added."""
    accounts, running = {}, {}
    for user, gpus, begin, end in sorted(attempts, key=lambda each: each[3]):
        if begin > now:
            continue
        used = held(gpus, min(end, now) - begin, half_life)
        if end <= now:
            accounts[user] = accounts.get(user, Account(0.0, end)).charged(used, end, half_life)
        else:
            running[user] = running.get(user, 0.0) + used
    users = accounts.keys() | running.keys()
    return {
        user: (accounts[user].worth(now, half_life) if user in accounts else 0.0) + running.get(user, 0.0)
        for user in users
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("half_life", [HOUR, DAY])
def test_both_ways_agree_at_any_time(seed, half_life):
    chance = random.Random(seed)
    attempts = []
    for _ in range(200):
        begin = chance.uniform(0, 30 * DAY)
        attempts.append(
            (
                chance.choice("abc"),
                chance.choice([0.125, 0.5, 1.0, 8.0]),
                begin,
                begin + chance.expovariate(1 / (5 * HOUR)),
            )
        )
    events = [(begin, user, gpus) for user, gpus, begin, _ in attempts]
    events += [(end, user, -gpus) for user, gpus, _, end in attempts]
    accounts = UsageAccounts(half_life)
    looks = sorted(chance.uniform(0, 40 * DAY) for _ in range(20))
    for when, user, gpus in sorted(events):
        while looks and looks[0] < when:
            now = looks.pop(0)
            assert accounts.usage(now) == pytest.approx(attempt_by_attempt(attempts, half_life, now), abs=1e-3)
        accounts.hold(user, gpus, when)


def test_years_do_not_make_the_numbers_too_large():
    accounts = UsageAccounts(HOUR)
    accounts.hold("ada", 1.0, now=0.0)
    for year in range(1, 4):
        accounts.hold("bob", 1.0, now=year * 365 * DAY)
        accounts.hold("bob", -1.0, now=year * 365 * DAY + 60.0)
    used = accounts.usage(3 * 365 * DAY + 60.0)
    assert used == pytest.approx({"ada": held(1.0, 1e9, HOUR), "bob": 60.0}, rel=0.01)


def test_a_charge_that_comes_late_has_faded():
    account = Account(0.0, at=0.0).charged(100.0, at=2 * HOUR, half_life=HOUR).charged(100.0, at=HOUR, half_life=HOUR)
    assert account == Account(150.0, at=2 * HOUR)
