"""Models of your own: `package.module:factory`, `path/to/file.py:factory`, and `mlp:NAME` from a list of widths."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ullage.errors import LABS, InvalidValue, MissingPackage, UllageError, UnknownName, nearest
from ullage.jobs.model import PREFIXES, Model
from ullage.jobs.sources.transformers import TransformersTask, is_transformers_model
from ullage.jobs.tasks import OwnTask, Task


def build_own(configuration: Model) -> nn.Module:
    """Return the factory's model; settings and the number of classes become the factory's arguments."""
    place, _, name = configuration.name.rpartition(":")
    module = _module(place)
    if not hasattr(module, name):
        callables = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise UnknownName(f"factory in {place}", name, callables)
    factory = getattr(module, name)
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise InvalidValue(
            f"{configuration.name} must be a callable that returns an nn.Module, got {type(factory).__name__}"
        )
    try:
        model = factory(**_arguments(configuration, factory))
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} raised {_last_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"{configuration.name} must return an nn.Module, got {type(model).__name__}")
    return model


def _arguments(configuration: Model, factory: Any) -> dict[str, Any]:
    arguments = dict(configuration.settings)
    if configuration.num_classes is not None:
        try:
            parameters = inspect.signature(factory).parameters
        except (TypeError, ValueError):
            parameters = {}  # type: ignore[assignment]
        if "num_classes" in parameters:
            arguments.setdefault("num_classes", configuration.num_classes)
    return arguments


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        here = str(Path.cwd())  # as `python -m` does
        if here not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(place)
    except UllageError:
        raise
    except ModuleNotFoundError as error:
        if error.name in LABS:
            raise MissingPackage(error.name, "models such as " + place) from None
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            if nearest(place, PREFIXES):
                raise UnknownName("source of models", place, PREFIXES) from None
            raise InvalidValue(
                f"no module named {place!r} for a factory; a model's name begins with torchvision:, timm: or hf:, "
                "and a file's factory is written path/to/file.py:factory"
            ) from None
        raise InvalidValue(f"importing {place} raised {_last_line(error)}") from error
    except Exception as error:
        raise InvalidValue(f"importing {place} raised {_last_line(error)}") from error


def _module_of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise InvalidValue(f"the factory must be in a Python file; there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None  # a name that ends in .py always has one
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))  # as if the file was run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def own_task(configuration: Model, model: nn.Module) -> Task:
    """Return a task with inputs of the given shape or length, or the task of a transformers model."""
    if configuration.input_shape is not None:
        return OwnTask(list(configuration.input_shape), None, None)
    if is_transformers_model(model):
        return TransformersTask(configuration, model)
    if configuration.sequence_length is None:
        raise InvalidValue(
            f"{configuration.name} needs the shape of its input: --input-shape 3,224,224 (without the batch), "
            "or --sequence-length 512 if it takes integer ids"
        )
    embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    if not embeddings:
        raise InvalidValue(
            f"{configuration.name} has no nn.Embedding, so the number of ids is unknown; "
            "give the shape of its input: --input-shape 512,80"
        )
    return OwnTask(None, configuration.sequence_length, embeddings[0].num_embeddings)


def build_perceptron(configuration: Model) -> nn.Module:
    """Build `mlp:NAME`: linear layers of the given widths, with batch norm and dropout if configured."""
    settings = configuration.settings
    widths = settings["widths"]
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
        layers.append(nn.Linear(inputs, outputs))
        if place == len(widths) - 2:
            break
        if settings.get("bn"):
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(getattr(nn, settings.get("act", "ReLU"))())
        if settings.get("drop"):
            layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers)


def perceptron_task(configuration: Model, model: nn.Module) -> Task:
    """Return a task that classifies vectors."""
    widths = configuration.settings["widths"] or [1]
    return Task([widths[0]], widths[-1])
