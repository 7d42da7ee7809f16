"""Whether a script trains with another framework than PyTorch, which a virtual GPU cannot follow.

`other_framework` says so before the script runs, if its own file leaves no doubt: it imports another framework and
nothing that could bring PyTorch. `framework_of` says so of a script that has failed, by what it had imported then.
"""

from __future__ import annotations

import ast
import json
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
    **{name.lower(): name for name in ("Keras", "MXNet", "MindSpore", "MLX", "tinygrad", "CuPy")},
    "paddle": "PaddlePaddle",
}
# Packages that do not train, and so say nothing about the framework.
_NEUTRAL = re.compile(
    "numpy|scipy|pandas|polars|matplotlib|seaborn|plotly|sklearn|skimage|PIL|cv2|imageio|h5py|yaml|toml|absl|"
    "ml_collections|tqdm|rich|click|fire|tyro|hydra|omegaconf|wandb|mlflow|tensorboard|tensorboardX|requests|psutil|"
    "gym|gymnasium|tiktoken|tokenizers|sentencepiece|einops|jaxtyping|numba|pyarrow|grain|clu|fsspec|datasets|dotenv"
)
# Packages that train with PyTorch, or may, besides those with "torch" in their names.
_WITH_TORCH = (
    "transformers|accelerate|lightning|timm|diffusers|peft|trl|fastai|sentence_transformers|deepspeed|ignite|skorch|"
    "monai|detectron2|mmengine|ultralytics|stable_baselines3|unsloth|axolotl|composer|flair|spacy|bitsandbytes"
)
_IMPORTS_TORCH = re.compile(rf"^\s*(?:import|from)\b[^#\n]*\b(\w*torch\w*|{_WITH_TORCH})\b".encode(), re.M)


def other_framework(path: str, module: bool = False) -> str | None:
    """Return the framework that a script surely trains with instead of PyTorch; `None` if it may use PyTorch."""
    text, tree = _read(path, module)
    if tree is None or _IMPORTS_TORCH.search(text):
        return None
    always = {root for node in tree.body for root in _roots([node])}
    others = set(_roots(ast.walk(tree))) - FRAMEWORKS.keys() - sys.stdlib_module_names
    return _name(always, tree) if all(map(_NEUTRAL.fullmatch, others)) else None


def framework_of(path: str, module: bool, imported: Iterable[str]) -> str | None:
    """Return the framework of a script that failed when it had `imported` these; `None` if it may use PyTorch."""
    text, tree = _read(path, module)
    imported = set(imported)
    if tree is None or _IMPORTS_TORCH.search(text) or "torch" in imported:
        return None
    return _name(imported, tree)


def imported_frameworks() -> list[str]:
    """Return the frameworks that this process has imported: PyTorch only if the script's own modules use it."""
    modules = list(sys.modules.items())
    files = {name: getattr(module, "__file__", None) or "" for name, module in modules}
    own = [module for name, module in modules if os.path.isfile(files[name]) and is_own(files[name])]
    uses_torch = any(_is_of_torch(value) for module in own for value in list(vars(module).values()))
    found = FRAMEWORKS.keys() & {name.partition(".")[0] for name, _ in modules}
    return sorted(found | ({"torch"} if uses_torch else set()))


def is_own(file: str) -> bool:
    """Return whether a file or folder lies in the script's own folder or in the working folder, and is no library."""
    folders = (os.path.join(os.path.abspath(folder), "") for folder in (sys.path[0], os.getcwd()))
    inside = os.path.join(os.path.abspath(file), "").startswith(tuple(folders))
    return inside and "site-packages" not in file and not file.startswith((sys.prefix, sys.base_prefix, OURS))


def _is_of_torch(value: object) -> bool:
    name = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return isinstance(name, str) and "torch" in name.partition(".")[0]


def _read(path: str, module: bool) -> tuple[bytes, ast.Module | None]:
    """Read the file that Python would run."""
    inside = Path(*path.split(".")) if module else Path(path)
    places = [inside.with_suffix(".py") if module else inside, inside / "__main__.py"]
    try:
        text = next((place for place in places if place.is_file()), inside).read_bytes()
        return text, ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return b"", None


def _roots(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """The packages that import statements name; an empty name for those of the project itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]


def _name(roots: set[str], tree: ast.Module) -> str | None:
    """The framework among these packages; Keras alone may compute with PyTorch."""
    if "keras" in roots and _keras_backend(tree) == "torch":
        return None
    return next((FRAMEWORKS[root] for root in FRAMEWORKS if root in roots), None)


def _keras_backend(tree: ast.Module) -> str | None:
    """The backend of Keras, as set by the script, a variable or Keras's file of settings."""
    for node in tree.body:
        words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        if "KERAS_BACKEND" in words:
            return "torch" if "torch" in words else None
    if "KERAS_BACKEND" in os.environ:
        return os.environ["KERAS_BACKEND"]
    home = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"))
    try:
        settings = json.loads((home / "keras.json").read_text())
    except (OSError, ValueError):
        return None
    return settings.get("backend") if isinstance(settings, dict) else None
