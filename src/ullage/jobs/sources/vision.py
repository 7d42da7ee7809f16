"""Models of torchvision and timm, with the input size and the task of each."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ullage.errors import InvalidValue, MissingPackage, UnknownName
from ullage.jobs.model import Model
from ullage.jobs.sources.names import model_names
from ullage.jobs.tasks import Detection, Segmentation, Task, assume
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

# Kind of torchvision model: the input shape and the number of classes of its trained weights.
_KINDS: dict[str, tuple[list[int], int]] = {
    "classification": ([3, 224, 224], 1000),
    "segmentation": ([3, 520, 520], 21),
    "detection": ([3, 800, 800], 91),
    "video": ([3, 16, 112, 112], 400),
}
_LARGE_VIDEO = ("mvit", "swin3d", "s3d")
_LARGE_VIDEO_SIZE = 224
_INCEPTION_SIZE = 299


def build_torchvision(configuration: Model) -> nn.Module:
    try:
        import torchvision
    except ImportError:
        raise MissingPackage("torchvision", "models named torchvision:NAME") from None
    name, kind = configuration.short_name, torchvision_kind(configuration.short_name)
    options: dict[str, Any] = dict(configuration.settings)
    if name in ("inception_v3", "googlenet"):
        options.setdefault("init_weights", False)  # initialization takes minutes and warns
    if kind in ("segmentation", "detection"):
        options.setdefault("weights_backbone", None)
    if name.startswith("vit_") and configuration.input_shape and configuration.input_shape[-1] != _KINDS[kind][0][-1]:
        options.setdefault("image_size", configuration.input_shape[-1])
    classes = configuration.num_classes or _KINDS[kind][1]
    made: nn.Module = _called(
        configuration, torchvision.models.get_model, name, weights=None, num_classes=classes, **options
    )
    return made


def torchvision_kind(name: str) -> str:
    """Return classification, segmentation, detection or video; raise with the nearest names if unknown."""
    from torchvision import models

    if name not in models.list_models():
        raise UnknownName("torchvision model", name, model_names("torchvision"))
    module = models.get_model_builder(name).__module__.split(".")
    kind = module[2] if module[2] in (*_KINDS, "quantization", "optical_flow") else "classification"
    if kind not in _KINDS:
        raise InvalidValue(f"torchvision:{name} must be for {', '.join(_KINDS)}, got one for {kind.replace('_', ' ')}")
    return kind


def torchvision_task(configuration: Model, model: nn.Module) -> Task:
    name, kind = configuration.short_name, torchvision_kind(configuration.short_name)
    shape, classes = _KINDS[kind]
    if name == "inception_v3":
        shape = [3, _INCEPTION_SIZE, _INCEPTION_SIZE]
    if kind == "video" and name.startswith(_LARGE_VIDEO):
        shape = [*shape[:2], _LARGE_VIDEO_SIZE, _LARGE_VIDEO_SIZE]
    tasks = {"segmentation": Segmentation, "detection": Detection}
    return tasks.get(kind, Task)(_shape(configuration, shape), configuration.num_classes or classes)


def build_timm(configuration: Model) -> nn.Module:
    make_torchvision_importable()
    try:
        import timm
        from timm.layers.config import set_fused_attn
    except ImportError:
        raise MissingPackage("timm", "models named timm:NAME") from None
    if not timm.is_model(configuration.short_name):
        raise UnknownName("timm model", configuration.short_name, model_names("timm"))
    options: dict[str, Any] = dict(configuration.settings)
    if configuration.input_shape and configuration.input_shape[0] != 3:
        options.setdefault("in_chans", configuration.input_shape[0])
    if configuration.attention == "eager":
        set_fused_attn(False)
    try:
        model: nn.Module = _called(
            configuration,
            timm.create_model,
            configuration.short_name,
            pretrained=False,
            num_classes=configuration.num_classes or 1000,
            **options,
        )
    finally:
        if configuration.attention == "eager":
            set_fused_attn(True)
    _fit_to_images(model, configuration.input_shape)
    return model


def _fit_to_images(model: Any, shape: Sequence[int] | None) -> None:
    """Set the image size of a vision transformer with a fixed one, if the model supports it, as most of timm do."""
    embedding: Any = getattr(model, "patch_embed", None)
    made_for = getattr(embedding, "img_size", None)
    if shape is None or made_for is None or not getattr(embedding, "strict_img_size", False):
        return
    if tuple(made_for) != tuple(shape[-2:]) and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=tuple(shape[-2:]))


def timm_task(configuration: Model, model: nn.Module) -> Task:
    """Return a task that classifies images of the size with which the model's weights were trained."""
    settings: Any = getattr(model, "pretrained_cfg", None) or {}
    shape = list(settings.get("input_size") or _KINDS["classification"][0])
    return Task(_shape(configuration, shape), configuration.num_classes or 1000)


def _shape(configuration: Model, default: list[int]) -> list[int]:
    if configuration.input_shape is None:
        assume(f"input shape {','.join(map(str, default))}: the default of {configuration.short_name}")
        return default
    if len(configuration.input_shape) != len(default):
        raise InvalidValue(
            f"{configuration.name}: input shape must have {len(default)} numbers such as "
            f"{','.join(map(str, default))}, got {','.join(map(str, configuration.input_shape))}"
        )
    return list(configuration.input_shape)


def _called(configuration: Model, make: Any, *args: Any, **options: Any) -> Any:
    """Call a function of the package; report refused arguments as values of `--set`."""
    try:
        return make(*args, **options)
    except (TypeError, ValueError, AssertionError) as error:
        if not configuration.settings:
            raise
        given = ", ".join(f"{key}={value}" for key, value in configuration.settings.items())
        raise InvalidValue(f"{configuration.name} does not take {given}: {error}") from None
