"""pynvml (package nvidia-ml-py), which need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "needed the package nvidia-ml-py to ask NVML; type: pip install nvidia-ml-py"


def pynvml() -> Any:
    """The module, or `None` where it is not installed.

    >>> module = pynvml()
    >>> module is None or hasattr(module, "nvmlInit")
    True
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def text(value: Any) -> str:
    """A name or UUID; older versions of pynvml give bytes.

    >>> text(b"NVIDIA H200"), text("NVIDIA H200")
    ('NVIDIA H200', 'NVIDIA H200')
    """
    return value.decode() if isinstance(value, bytes) else str(value)
