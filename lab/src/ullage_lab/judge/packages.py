"""Imports the installed packages of models once in the server, instead of in every process forked from it."""

import contextlib
import importlib

from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

make_torchvision_importable()
for name in ("torchvision", "timm", "transformers"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
