"""The answer to "how much memory will this take?"."""

import sys

from ullage import Room
from ullage.estimate.dispatch import estimate
from ullage.estimate.result import Estimate

__all__ = ["Estimate", "estimate"]

sys.modules[__name__].__class__ = Room
