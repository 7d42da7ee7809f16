"""`python release_oracle.py MAJOR MINOR`: what the compiled code of the installed PyTorch, built for CUDA, chooses.

Run in a process of its own: the function that describes the GPU is overwritten in memory (x86-64), so that
`torch._fused_sdp_choice` believes in a card of that compute capability. It looks at sizes and types only. Prints, as
JSON, how many cases were asked, those in which `choose_attention_kernel` differs, and the size of cuBLAS's workspace.
"""

import ctypes
import itertools
import json
import sys
from pathlib import Path

import torch

from ullage.virtual.call.native import cuda_stand_in, tensor_without_data
from ullage.virtual.operators.decompositions import AttentionArguments, choose_attention_kernel
from ullage.virtual.releases import release_of

LIBRARIES = Path(torch.__file__).parent / "lib"
NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
PAGE = 4096


def overwrite(library, name, code):
    address = ctypes.cast(library[name], ctypes.c_void_p).value
    whole = ctypes.c_void_p(address & -PAGE)
    if ctypes.CDLL(None).mprotect(whole, ctypes.c_size_t(2 * PAGE), 7):
        raise OSError("the page cannot be written to")
    ctypes.memmove(address, code, len(code))


def believe_in(major, minor):
    """A description of a GPU that has these two numbers and no others."""
    described = (ctypes.c_int32 * 1024)()
    place = 360 // 4  # cudaDeviceProp in driver_types.h, the same in CUDA 12 and 13
    described[place], described[place + 1] = major, minor
    cuda = ctypes.CDLL(str(LIBRARIES / "libtorch_cuda.so"))
    address = ctypes.addressof(described).to_bytes(8, "little")
    overwrite(cuda, "_ZN2at4cuda26getCurrentDevicePropertiesEv", b"\x48\xb8" + address + b"\xc3")  # mov rax, ...; ret
    one = b"\xb8\x01\x00\x00\x00\xc3"  # mov eax, 1; ret
    overwrite(ctypes.CDLL(str(LIBRARIES / "libc10_cuda.so")), "_ZN3c104cuda12device_countEv", one)
    return cuda, described


def tensor(heads, length, size, dtype, grad):
    made = tensor_without_data(
        (2, heads, length, size), (heads * length * size, length * size, size, 1), getattr(torch, dtype)
    )
    return made.requires_grad_(grad)


def cases():
    for dtype, size, grad in itertools.product(
        ("bfloat16", "float16", "float32"), (30, 36, 40, 64, 72, 96, 128, 160, 192, 200, 232, 256, 264), (False, True)
    ):
        query = tensor(8, 128, size, dtype, grad)
        for dropout in (0.0, 0.1, 0.25):
            yield query, query, query, None, dropout, False, False
        short, few = tensor(8, 64, size, dtype, grad), tensor(2, 128, size, dtype, grad)
        yield query, query, query, None, 0.0, True, False
        yield query, short, short, None, 0.0, True, False
        yield query, few, few, None, 0.0, False, True
        one = tensor(8, 1, size, dtype, grad)
        yield query, one, one, None, 0.0, False, False
        for flags in (torch.bool, torch.float32 if dtype == "float32" else getattr(torch, dtype)):
            mask = tensor_without_data((128, 128), (128, 1), flags)
            yield query, query, query, mask, 0.0, False, False


def main(major, minor):
    cuda, _described = believe_in(major, minor)
    stand_in = cuda_stand_in()
    stand_in.install()
    release, different, asked = release_of(torch.__version__), [], 0
    for query, key, value, mask, dropout, causal, grouped in cases():
        code = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
        ours = choose_attention_kernel(
            AttentionArguments(query, key, value, mask, dropout, causal, grouped), (major, minor), release
        )
        asked += 1
        if NAMES.get(code) != ours:
            facts = [tuple(query.shape), tuple(key.shape), str(query.dtype), query.requires_grad, dropout, causal]
            different.append([*map(str, facts), str(mask is not None and mask.dtype), NAMES.get(code), ours])
    try:
        size_of = cuda["_ZN2at4cuda22getChosenWorkspaceSizeEv"]
        size_of.restype = ctypes.c_size_t
        workspace = size_of()
    except AttributeError:  # not visible in this release
        workspace = None
    stand_in.remove()
    print(json.dumps({"asked": asked, "different": different, "workspace": workspace}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
