"""The model of a step alone: rates of calls, the host's time, and how good both are.

`ullage lab train utilization` writes what `ullage.performance` ships.
"""
