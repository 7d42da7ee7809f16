"""The model of a step alone: rates of calls, the host's time, and the evaluation of both.

`ullage lab train utilization` writes what `ullage.performance` ships.
"""
