"""Errors of estimates against measured runs."""

from ullage.measuring.accuracy import Comparison, bound


def compared(**figures):
    return Comparison(id="one", model="mlp:x", precision="fp32", seconds=0.1, **figures)


def test_the_bound_is_compared_with_process_memory():
    estimated = {"reserved": 100, "process": 150, "upper": 160}
    holds = compared(**estimated, reserved_truth=105, process_truth=160)
    fails = compared(**estimated, reserved_truth=111)  # 161 with the context of 50
    unknown = compared(**estimated)
    assert bound([holds, fails, unknown])["holds"] == 0.5
    assert bound([unknown]) == {}
