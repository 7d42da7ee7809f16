"""Every estimator behind one registry. `ullage.estimators()` gives their names."""

import sys

from ullage import Room
from ullage.estimators.registry import Estimator, Workload, estimator, estimators, find

__all__ = ["Estimator", "Workload", "estimator", "estimators", "find"]

sys.modules[__name__].__class__ = Room
