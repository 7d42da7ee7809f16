"""Every method of estimating GPU memory, behind one registry: a module or a folder for each.

`ullage.estimators()` lists their names. A new one is a module here and a line in `registry.py`.
"""
