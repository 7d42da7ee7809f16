"""What becomes of a job whose attempt failed: more room by steps, a GPU to itself, or the end."""

import pytest

from ullage.manager.placement import Failure, RecoveryRules, after_failure

GIB = 1 << 30
A100 = 40 * GIB


def attempts(rules, promise=8 * GIB, largest=A100):
    """The promises of a job that never has enough memory, attempt by attempt; None where it had a GPU to itself."""
    found, exclusive = [], False
    for before in range(100):
        found.append(None if exclusive else promise)
        failure = Failure("memory", before, promise, exclusive=exclusive, alone=exclusive)
        following = after_failure(failure, largest, rules)
        if not following.again:
            return found
        promise, exclusive = following.promise, following.exclusive
    raise AssertionError("it is tried for ever")


def test_more_room_by_steps_and_at_last_a_gpu_to_itself():
    assert attempts(RecoveryRules()) == [8 * GIB, 13 * GIB, 18 * GIB, None]
    assert attempts(RecoveryRules(exclusive_after=9, attempts=3)) == [8 * GIB, 13 * GIB, 18 * GIB]


def test_a_step_beyond_the_largest_gpu_is_a_gpu_to_itself():
    assert attempts(RecoveryRules(), promise=30 * GIB, largest=36 * GIB) == [30 * GIB, 35 * GIB, None]


def test_rad_rm_gives_a_gpu_to_itself_at_once():
    assert attempts(RecoveryRules(exclusive_after=1)) == [8 * GIB, None]
    assert attempts(RecoveryRules(), promise=None) == [None, None], "nothing to add to where nothing is known"


def test_measured_use_counts_more_than_the_promise():
    rules = RecoveryRules()
    assert after_failure(Failure("memory", promise=GIB, used=11 * GIB), A100, rules).promise == 16 * GIB
    assert after_failure(Failure("memory", promise=GIB, needed=22 * GIB), A100, rules).promise == 27 * GIB


def test_one_that_was_stopped_alone_on_its_gpu_still_gets_more():
    stopped = Failure("over promise", promise=8 * GIB, exclusive=True, alone=True)
    assert after_failure(stopped, A100, RecoveryRules()).again
    assert not after_failure(stopped._replace(kind="memory"), A100, RecoveryRules()).again


@pytest.mark.parametrize(("before", "again"), [(0, True), (1, True), (2, False)])
def test_a_failure_of_the_system_changes_nothing_but_the_count(before, again):
    following = after_failure(Failure("system", before, 8 * GIB, exclusive=True), A100, RecoveryRules(others=2))
    assert (following.again, following.promise, following.exclusive) == (again, 8 * GIB, True)
