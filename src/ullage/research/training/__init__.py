"""Training of the learned estimators on measured data, and how good they are on data held out.

`ullage train` and `ullage evaluate gpumemnet` are built on it.
"""
