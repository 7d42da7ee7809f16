"""Every method of estimating GPU memory, behind one registry: a module or a folder for each.

`estimators()` lists their names. A new one is a module here and a line in `registry.py`.
"""

from typing import TYPE_CHECKING

from ullage.lazy import loaded_on_first_use

if TYPE_CHECKING:
    from ullage.estimation.estimators.registry import estimators

__all__ = ["estimators"]

# The registry imports the jobs that it supports.
__getattr__ = loaded_on_first_use(__name__, {"estimators": "registry"})
