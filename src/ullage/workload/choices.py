"""The words that options take, in one place and without importing PyTorch: shell completion needs them at once."""

from __future__ import annotations

from typing import Any

# Short name: class of torch.optim and its arguments. Any other class of torch.optim goes by its own name.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgdm": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-4}),
    "adamw": ("AdamW", {"lr": 1e-4}),
    "sgd_fused": ("SGD", {"lr": 1e-3, "fused": True}),
    "sgdm_fused": ("SGD", {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "adam_fused": ("Adam", {"lr": 1e-4, "fused": True}),
    "adamw_fused": ("AdamW", {"lr": 1e-4, "fused": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 1e-4}),
    "adafactor": ("Adafactor", {"lr": 1e-4}),
}
OPTIMIZER_ALIASES = {
    "momentum": "sgdm",
    "sgd_momentum": "sgdm",
    "fused_adam": "adam_fused",
    "fused_adamw": "adamw_fused",
}

PRECISIONS = {
    "fp32": "weights and arithmetic in 32 bits",
    "tf32": "as fp32, matrix products in TensorFloat-32",
    "amp_fp16": "autocast to float16 with a GradScaler",
    "amp_bf16": "autocast to bfloat16",
    "bf16": "weights, gradients and arithmetic in bfloat16",
    "fp16": "weights, gradients and arithmetic in float16",
}

ATTENTIONS = {
    "sdpa": "scaled_dot_product_attention, with the kernel that PyTorch chooses",
    "eager": "matrix products and softmax, one after the other",
    "flash": "scaled_dot_product_attention, only its flash kernel",
    "efficient": "scaled_dot_product_attention, only its memory-efficient kernel",
    "cudnn": "scaled_dot_product_attention, only cuDNN's kernel",
    "math": "scaled_dot_product_attention, only its plain kernel",
}

SOURCES = {
    "torchvision": "torchvision:NAME, for example torchvision:resnet50",
    "timm": "timm:NAME, for example timm:vit_small_patch16_224",
    "hf": "hf:CLASS (transformers), for example hf:GPT2LMHeadModel, or hf:FOLDER with a config.json",
    "own": "package.module:factory or path/to/file.py:factory, a callable that gives an nn.Module",
}
