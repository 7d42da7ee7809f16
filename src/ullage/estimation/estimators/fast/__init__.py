"""`fast`: an estimate in under a millisecond from the totals of a job, with a bound from conformal calibration.

It is trained by `ullage train fast`.
"""
