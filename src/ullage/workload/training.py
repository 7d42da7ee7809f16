"""The standard training loop over a configuration: the same on a real GPU and on a virtual one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import MissingPackage, UnknownName
from ullage.virtual.torchvision_operators import make_torchvision_importable
from ullage.workload.configuration import Configuration

_AMP = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
AUXILIARY_WEIGHT = 0.4  # of the second classifier of Inception-like networks


def build(configuration: Configuration) -> nn.Module:
    """The model, on the CPU and untrained."""
    make_torchvision_importable()  # timm and transformers import it too, also outside a virtual GPU
    builders = {"tv": _torchvision, "timm": _timm, "hf": _transformers, "mlp": _perceptron}
    return builders[configuration.source](configuration)


def _torchvision(configuration: Configuration) -> nn.Module:
    try:
        import torchvision
    except ImportError:
        raise MissingPackage("torchvision", "models named tv:NAME") from None
    names = torchvision.models.list_models(module=torchvision.models)
    if configuration.name not in names:
        raise UnknownName("torchvision model", configuration.name, names)
    slow_to_fill = configuration.name in ("inception_v3", "googlenet")  # they warn and take minutes to initialise
    options = {"init_weights": False} if slow_to_fill else {}
    model: nn.Module = torchvision.models.get_model(
        configuration.name, weights=None, num_classes=configuration.classes, **options
    )
    return model


def _timm(configuration: Configuration) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise MissingPackage("timm", "models named timm:NAME") from None
    if not timm.is_model(configuration.name):
        raise UnknownName("timm model", configuration.name, timm.list_models())
    model: nn.Module = timm.create_model(configuration.name, pretrained=False, num_classes=configuration.classes)
    return model


def _transformers(configuration: Configuration) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "models named hf:CLASS") from None
    for name in (f"{configuration.conf}Config", configuration.name):
        if not hasattr(transformers, name):
            raise UnknownName("transformers class", name, dir(transformers))
    settings = getattr(transformers, f"{configuration.conf}Config")(**configuration.hf_config)
    model: Any = getattr(transformers, configuration.name)._from_config(
        settings, attn_implementation=configuration.attn
    )
    if configuration.ckpt:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    built: nn.Module = model
    return built


def _perceptron(configuration: Configuration) -> nn.Module:
    widths = configuration.widths or []
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
        layers.append(nn.Linear(inputs, outputs))
        if place == len(widths) - 2:
            break
        if configuration.bn:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(getattr(nn, configuration.act)())
        if configuration.drop:
            layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers)


def optimizer_for(configuration: Configuration, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer by its short name."""
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3),
        "sgdm": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-4),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-4),
        "adamw_fused": lambda: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-4),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-4),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=1e-4),
    }
    optimizer: torch.optim.Optimizer = makers[configuration.opt]()
    return optimizer


def one_batch(configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets on the CPU."""
    size = configuration.batch
    if configuration.source == "hf":
        length, words = configuration.seq or 1, configuration.vocab or 1
        return torch.randint(0, words, (size, length)), torch.randint(0, words, (size, length))
    if configuration.source == "mlp":
        widths = configuration.widths or [1]
        return torch.randn(size, widths[0]), torch.randint(0, widths[-1], (size,))
    return torch.randn(size, *(configuration.input or ())), torch.randint(0, configuration.classes, (size,))


def classification_loss(out: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, also of the second classifier of Inception-like networks."""
    if not hasattr(out, "logits"):
        return functional.cross_entropy(out, targets)
    loss = functional.cross_entropy(out.logits, targets)
    auxiliary = getattr(out, "aux_logits", None)
    return loss if auxiliary is None else loss + AUXILIARY_WEIGHT * functional.cross_entropy(auxiliary, targets)


def train(configuration: Configuration, iterations: int = 5, device: str = "cuda", after_iteration: Any = None) -> None:
    """Train for some iterations; `after_iteration` is called after each.

    >>> train(Configuration(model="mlp:x", widths=[8, 4], batch=2, opt="sgd"), iterations=1, device="cpu")
    """
    low = configuration.precision == "bf16"
    model = build(configuration)
    if low:
        model = model.to(torch.bfloat16)
    model = model.to(device)
    if configuration.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    optimizer = optimizer_for(configuration, model.parameters())
    inputs, targets = one_batch(configuration)
    if low and inputs.is_floating_point():
        inputs = inputs.to(torch.bfloat16)
    cast = _AMP.get(configuration.precision)
    scaler = torch.amp.GradScaler("cuda") if configuration.precision == "amp_fp16" else None
    for _ in range(iterations):
        on_device = inputs.to(device)
        wanted = targets.to(device)
        if configuration.channels_last:
            on_device = on_device.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
            if configuration.source == "hf":
                loss = model(input_ids=on_device, labels=wanted).loss
            else:
                out = model(on_device)  # alive through the backward pass, as in most people's loops
                loss = classification_loss(out, wanted)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if after_iteration is not None:
            after_iteration()
