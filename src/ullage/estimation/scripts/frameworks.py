"""Detection of scripts that train with another framework than PyTorch, which a virtual GPU cannot follow."""

import ast
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import ullage

OURS = os.path.dirname(ullage.__file__)
FRAMEWORKS = {
    **dict.fromkeys(("jax", "flax", "optax", "haiku", "equinox", "orbax", "chex"), "JAX"),
    **dict.fromkeys(("tensorflow", "tensorflow_datasets"), "TensorFlow"),
    **{name.lower(): name for name in ("MXNet", "MindSpore", "MLX", "tinygrad", "CuPy")},
    "paddle": "PaddlePaddle",
}
# Packages that do not train, and so do not show the framework.
_NEUTRAL = re.compile(
    "numpy|scipy|pandas|polars|matplotlib|seaborn|plotly|sklearn|skimage|PIL|cv2|imageio|h5py|yaml|toml|absl|"
    "ml_collections|tqdm|rich|click|fire|tyro|hydra|omegaconf|wandb|mlflow|tensorboard|tensorboardX|requests|psutil|"
    "gym|gymnasium|tiktoken|tokenizers|sentencepiece|einops|jaxtyping|numba|pyarrow|grain|clu|fsspec|datasets|dotenv"
)


def other_framework(path: str, module: bool = False) -> str | None:
    """Return the framework that a script surely trains with instead of PyTorch; `None` if it may use PyTorch.

    It is sure if the script's own file always imports that framework, and nothing that may bring PyTorch.
    """
    tree = _read(path, module)
    always = set(_packages(tree.body))
    others = set(_packages(ast.walk(tree))) - FRAMEWORKS.keys() - sys.stdlib_module_names
    if not all(map(_NEUTRAL.fullmatch, others)):
        return None
    return next((FRAMEWORKS[name] for name in FRAMEWORKS if name in always), None)


def is_own(file: str) -> bool:
    """Return whether a file or folder lies in the script's own folder or in the working folder, and is no library."""
    folders = (os.path.join(os.path.abspath(folder), "") for folder in (sys.path[0], os.getcwd()))
    inside = os.path.join(os.path.abspath(file), "").startswith(tuple(folders))
    return inside and "site-packages" not in file and not file.startswith((sys.prefix, sys.base_prefix, OURS))


def _read(path: str, module: bool) -> ast.Module:
    """Parse the file that Python would run; a file that cannot be read or parsed is an empty module."""
    inside = Path(*path.split(".")) if module else Path(path)
    places = [inside.with_suffix(".py") if module else inside, inside / "__main__.py"]
    try:
        return ast.parse(next((place for place in places if place.is_file()), inside).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _packages(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Yield the packages that import statements name; an empty name for those of the project itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]
