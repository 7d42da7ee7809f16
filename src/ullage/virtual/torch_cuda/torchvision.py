"""Make `import torchvision` work if its compiled operators do not load, such as a CUDA build's with a CPU build of
PyTorch. They are declared here without code; torchvision registers its own shape functions and derivatives for them."""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from ullage.virtual.call.plan import gpu_handler
from ullage.virtual.call.replacements import after_import
from ullage.virtual.state import GPUState

# torchvision 0.28, torchvision/csrc/ops/*.cpp
_POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_IMAGE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
_SCHEMAS = (
    "_cuda_version() -> int",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOLED}, {_IMAGE}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    f"int rois_zero_point, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOLED}, {_IMAGE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    f"{_POOLED}, int sampling_ratio, {_IMAGE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, {_IMAGE}) -> Tensor",
    f"deform_conv2d({_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@functools.cache
def make_torchvision_importable() -> Any:
    """Declare torchvision's operators, once, if it is installed, not imported yet and its own library does not load."""
    if "torchvision" in sys.modules:
        return None
    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders or _loads(Path(folders[0])):
        return None
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.split("(")[0]):  # another package may have declared it already
            library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")

    def say_that_they_are_there(extension: Any) -> None:
        """Let torchvision find its operators: otherwise it registers no shape functions and derivatives."""
        extension._has_ops = lambda: True

    after_import("torchvision.extension", say_that_they_are_there)
    return library  # an operator lives as long as the library that declared it: the cache keeps it


def _loads(folder: Path) -> bool:
    """Check whether torchvision's own library loads, which registers its operators."""
    files = sorted(folder.glob("_C*.so")) or sorted(folder.glob("_C*.pyd"))
    try:
        for file in files[:1]:
            torch.ops.load_library(str(file))
        return bool(files)
    except (OSError, RuntimeError):
        return False


@gpu_handler("torchvision.nms.default")
def nms(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nms_kernel.cu: temporaries are the sorted boxes, the order and a bit mask. All boxes are assumed to be kept."""
    boxes = args[0]
    count, memory = boxes.shape[0], gpu.memory
    gpu.note("shapes", "non-maximum suppression is assumed to keep every box")
    if count:
        words = -(-count // 64)
        sizes = (count * 8, boxes.numel() * boxes.element_size(), count * words * 8)
        for taken in [memory.take(size) for size in sizes]:
            memory.give_back(taken)
    return memory.tensor((count,), (1,), torch.int64, count * 8)
