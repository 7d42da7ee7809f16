"""Whether a script trains with another framework than PyTorch, which a virtual GPU cannot follow.

What is sure is said before the script runs (`other_framework`): it imports another framework, and nothing that could
bring PyTorch. What is not is said when the script has failed, by what it had imported then (`framework_of`).
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

FRAMEWORKS = {
    "jax": "JAX",
    "flax": "JAX",
    "optax": "JAX",
    "haiku": "JAX",
    "equinox": "JAX",
    "orbax": "JAX",
    "chex": "JAX",
    "tensorflow": "TensorFlow",
    "tensorflow_datasets": "TensorFlow",
    "keras": "Keras",
    "mxnet": "MXNet",
    "paddle": "PaddlePaddle",
    "mindspore": "MindSpore",
    "mlx": "MLX",
    "tinygrad": "tinygrad",
    "cupy": "CuPy",
}
# Packages that do not train, and so say nothing about the framework.
_NEUTRAL = {
    "numpy",
    "scipy",
    "pandas",
    "polars",
    "matplotlib",
    "seaborn",
    "plotly",
    "sklearn",
    "skimage",
    "PIL",
    "cv2",
    "imageio",
    "h5py",
    "yaml",
    "toml",
    "absl",
    "ml_collections",
    "tqdm",
    "rich",
    "click",
    "fire",
    "tyro",
    "hydra",
    "omegaconf",
    "wandb",
    "mlflow",
    "tensorboard",
    "tensorboardX",
    "requests",
    "psutil",
    "gym",
    "gymnasium",
    "tiktoken",
    "tokenizers",
    "sentencepiece",
    "einops",
    "jaxtyping",
    "numba",
    "pyarrow",
    "grain",
    "clu",
    "fsspec",
    "datasets",
    "dotenv",
}
# Packages that train with PyTorch, or may; beside all whose name has "torch" in it.
_WITH_TORCH = {
    "transformers",
    "accelerate",
    "lightning",
    "timm",
    "diffusers",
    "peft",
    "trl",
    "fastai",
    "sentence_transformers",
    "deepspeed",
    "ignite",
    "skorch",
    "monai",
    "detectron2",
    "mmengine",
    "ultralytics",
    "stable_baselines3",
    "unsloth",
    "axolotl",
    "composer",
    "flair",
    "spacy",
    "bitsandbytes",
}
_IMPORTS_TORCH = re.compile(rb"^\s*(?:import|from)\b[^#\n]*\b(\w*torch\w*|%s)\b" % "|".join(_WITH_TORCH).encode(), re.M)
_MOST_FILES = 500  # of a project that are looked through for PyTorch


def other_framework(path: str, module: bool = False) -> str | None:
    """The framework that a script surely trains with instead of PyTorch; `None` if it may use PyTorch."""
    file = _file(path, module)
    tree = _parse(file)
    if file is None or tree is None:
        return None
    always = {root for node in tree.body for root in _roots([node])}
    found = _name(always, tree)
    if found is None or _may_use_torch(file):
        return None
    known = FRAMEWORKS.keys() | _NEUTRAL | sys.stdlib_module_names
    others = set(_roots(ast.walk(tree))) - known
    return found if all(_local(root, file) for root in others) else None


def framework_of(path: str, module: bool, imported: Iterable[str]) -> str | None:
    """The framework of a script that failed when it had `imported` these packages; `None` if it may use PyTorch."""
    file = _file(path, module)
    tree = _parse(file)
    if file is None or tree is None or _may_use_torch(file):
        return None
    return _name(set(imported), tree)


def _file(path: str, module: bool) -> Path | None:
    """The file that Python would run."""
    if module:
        inside = Path(*path.split("."))
        places = [inside.with_suffix(".py"), inside / "__main__.py"]
    else:
        places = [Path(path), Path(path) / "__main__.py"]
    return next((place for place in places if place.is_file()), None)


def _parse(file: Path | None) -> ast.Module | None:
    try:
        return None if file is None else ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _roots(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """The packages that import statements name; those of relative imports are the project's own."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _name(roots: set[str], tree: ast.Module) -> str | None:
    """The framework among these packages; Keras alone may be a face of PyTorch."""
    found = [FRAMEWORKS[root] for root in FRAMEWORKS if root in roots]
    if "keras" in roots and _keras_backend(tree) == "torch":
        return None
    return found[0] if found else None


def _keras_backend(tree: ast.Module) -> str | None:
    """What Keras is told to compute with, by the script, a variable or its file of settings."""
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


def _local(root: str, importer: Path) -> list[Path]:
    """The files of a module or package of the project's own, which lies beside who imports it or in this folder."""
    for folder in (importer.parent, Path()):
        if (folder / f"{root}.py").is_file():
            return [folder / f"{root}.py"]
        if root and (folder / root).is_dir():
            return sorted((folder / root).rglob("*.py"))[:_MOST_FILES]
    return []


def _may_use_torch(file: Path) -> bool:
    """Whether the script, or what it imports of its own project, imports PyTorch anywhere."""
    seen, waiting = {file}, [file]
    while waiting and len(seen) < _MOST_FILES:
        importer = waiting.pop()
        text = importer.read_bytes()
        if _IMPORTS_TORCH.search(text):
            return True
        for root in re.findall(r"^\s*(?:import|from)\s+\.*(\w+)", text.decode(errors="replace"), re.M):
            new = [each for each in _local(root, importer) if each not in seen]
            seen.update(new)
            waiting += new
    return False
