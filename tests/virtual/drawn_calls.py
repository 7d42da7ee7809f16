"""Calls of PyTorch's operators with sizes drawn at random, since its own samples are small.

A call is a function of PyTorch by its name, the tensors that it is given (size, type, and what is in them), and its
options. `benchmarks/accuracy/operators.py` measures them on a GPU, so this file needs PyTorch only.
"""

import functools
import random
from typing import NamedTuple

import torch
from tests.virtual.pytorch_lists import Moved, nothing, outcome


def _words(text):
    return text.split()


class Drawn(NamedTuple):
    """A call; a row of a measured file begins with this list."""

    name: str  # such as "fft.rfft", below `torch`
    tensors: list  # of [size, type, what]
    options: dict


MOST = 48 << 20  # bytes of a tensor


def _size(chance, rank, itemsize, least=1 << 10, most=MOST):
    """So many dimensions, of a number of bytes drawn evenly from its logarithm; round numbers and odd ones."""
    count = max(1, int(2 ** chance.uniform(0, 1) * least * (most / least / 2) ** chance.random()) // itemsize)
    weights = [chance.uniform(0.5, 2) for _ in range(rank)]
    size = []
    for place in range(rank):
        length = max(1, round(count ** (weights[place] / sum(weights[place:]))))
        unit = chance.choice([1, 1, 2, 8, 16, 64])
        length = max(1, length // unit * unit if length >= unit else length)
        size.append(length)
        count = max(1, count // length)
    return size


def _square(chance, dtype, largest=1024, rows=0):
    """A batch of matrices."""
    n = chance.choice([chance.randint(1, 48), chance.randint(2, 256), chance.randint(2, largest)])
    m = chance.choice([n, chance.randint(1, largest)]) if rows else n
    room = MOST // 2 // (n * m * 8)
    batch = [] if chance.random() < 0.5 else [max(1, min(room, chance.choice([1, 2, 3, 8, 64, 500, 4000])))]
    return [*batch, m, n]


_REAL, _ALL = ("float32", "float32", "float64", "bfloat16", "float16"), ("float32", "float32", "complex64", "float64")
_BYTES = {"float32": 4, "complex64": 8, "float64": 8, "bfloat16": 2, "float16": 2, "complex128": 16, "int64": 8}
_BYTES |= {"int32": 4, "bool": 1, "uint8": 1}


def _fft(chance):
    name = chance.choice(["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2"])
    name = chance.choice([name, name, "fftn", "rfftn", "irfftn", "ifftn"])
    real = name in ("rfft", "ihfft", "rfft2", "rfftn") or (name in ("fft", "fft2", "fftn") and chance.random() < 0.3)
    dtype = chance.choice(["float32", "float32", "float64"] if real else ["complex64", "complex64", "complex128"])
    two = name.endswith("2")
    rank = chance.randint(2 if two or name.endswith("n") else 1, 4)
    size = _size(chance, rank, _BYTES[dtype])
    options = {}
    if not (two or name.endswith("n")):
        options["dim"] = chance.choice([-1, -1, chance.randrange(rank)])
        if name.startswith(("ir", "hf")) or chance.random() < 0.3:
            options["n"] = max(1, size[options["dim"]] * chance.choice([1, 2, 2, 3]) - chance.choice([0, 0, 1, 2]))
    elif chance.random() < 0.4:
        options["dim"] = sorted(chance.sample(range(rank), chance.randint(1 if not two else 2, min(rank, 3 - two))))
        if chance.random() < 0.3:
            options["dim"].reverse()
    what = chance.choice(["normal", "normal", "normal", "transposed"]) if rank > 1 else "normal"
    return Drawn(f"fft.{name}", [[size, dtype, what]], options)


def _linalg(chance):
    name = chance.choice(
        _words(
            "linalg.inv linalg.cholesky linalg.qr linalg.svd linalg.svdvals linalg.eigh linalg.eigvalsh linalg.solve "
            "linalg.lu_factor linalg.lu linalg.det linalg.slogdet linalg.lstsq linalg.pinv linalg.matrix_exp "
            "linalg.solve_triangular cholesky_solve cholesky_inverse linalg.matrix_power linalg.matrix_norm linalg.eig "
            "linalg.householder_product linalg.lu_solve linalg.matrix_rank triangular_solve lu_solve geqrf"
        )
    )
    dtype = chance.choice(_ALL)
    tall = name in ("linalg.qr", "linalg.svd", "linalg.svdvals", "linalg.pinv", "linalg.lstsq", "geqrf", "linalg.lu")
    largest = 300 if "svd" in name or "eig" in name or name in ("linalg.pinv", "linalg.matrix_rank") else 1024
    size = _square(chance, dtype, largest, rows=tall)
    if "svd" in name or "eig" in name or name in ("linalg.pinv", "linalg.matrix_rank", "linalg.matrix_norm"):
        size = [*[min(length, 16) for length in size[:-2]], *size[-2:]]  # they take long
    what = "positive" if "chol" in name or "eigh" in name or "eigv" in name else "normal"
    matrix, options = [size, dtype, what], {}
    right = [[*size[:-1], chance.choice([1, 1, 5, 64])], dtype, "normal"]
    if name in ("linalg.solve", "linalg.lstsq"):
        return Drawn(name, [matrix, right], options)
    if name == "linalg.solve_triangular":
        return Drawn(name, [matrix, right], {"upper": chance.random() < 0.5})
    if name in ("cholesky_solve", "triangular_solve"):
        return Drawn(name, [right, matrix], {})
    if name in ("linalg.lu_solve", "lu_solve"):
        pivots = [size[:-1], "int32", "ones"]
        three = [matrix, pivots, right] if name == "linalg.lu_solve" else [right, matrix, pivots]
        return Drawn(name, three, {})
    if name == "linalg.householder_product":
        return Drawn(name, [matrix, [size[:-1], dtype, "normal"]], {})
    if name == "linalg.matrix_power":
        options["n"] = chance.choice([2, 3, 5, 8])
    if name == "linalg.matrix_norm":
        options["ord"] = chance.choice(["fro", "nuc", 2, 1])
    if name == "linalg.svd":
        options["full_matrices"] = chance.random() < 0.3
    if name == "linalg.qr":
        options["mode"] = chance.choice(["reduced", "reduced", "complete", "r"])
    return Drawn(name, [matrix], options)


def _along(names, kinds, floats=()):
    """Functions of one tensor along a dimension."""

    def draw(chance):
        name = chance.choice(names)
        dtype = chance.choice(kinds)
        rank = chance.randint(1, 4)
        size = _size(chance, rank, _BYTES[dtype])
        what = chance.choice(["normal", "normal", "transposed"]) if rank > 1 else "normal"
        options = {"dim": chance.choice([-1, -1, 0, chance.randrange(rank)])}
        if name == "topk":
            options["k"] = chance.randint(1, size[options["dim"]])
        if name == "kthvalue":
            options["k"] = chance.randint(1, size[options["dim"]])
        if name in ("quantile", "nanquantile"):
            options["q"] = chance.random()
        if name in ("diff",) and size[options["dim"]] < 2:
            name = "flip"
        if name in ("flip", "roll"):
            options = {"dims": [options["dim"]]} | ({"shifts": 3} if name == "roll" else {})
        if name == "renorm":
            options = {"p": 2, "maxnorm": 1.0, "dim": options["dim"]}
        return Drawn(name, [[size, dtype, what]], options)

    return draw


_sorting = _along(
    _words(
        "sort argsort topk kthvalue median nanmedian mode cumsum cumprod cummax cummin logcumsumexp quantile "
        "nanquantile unique_consecutive"
    ),
    _REAL,
)
_reducing = _along(
    _words(
        "sum mean var std prod amax amin max min argmax argmin all any nansum nanmean logsumexp softmax log_softmax "
        "norm count_nonzero diff flip roll renorm"
    ),
    ("float32", "bfloat16", "float64", "float32"),
)
_complex = _along(
    _words("sum mean var std prod cumsum cumprod softmax norm all any count_nonzero diff flip roll"), ("complex64",)
)


def _pointwise(chance):
    name = chance.choice(
        _words(
            "abs angle exp log sin tanh sqrt real imag view_as_real conj conj_physical resolve_conj resolve_neg sgn "
            "reciprocal square sigmoid polar complex mul div add pow isfinite isnan isinf nan_to_num vdot dot outer "
            "ldexp hypot atan2 logaddexp erfinv lgamma digamma special.i0 special.zeta where addcmul lerp cross "
            "allclose isclose"
        )
    )
    rank = chance.randint(1, 4)
    real_only = name in _words(
        "polar complex ldexp hypot atan2 logaddexp erfinv lgamma digamma special.i0 special.zeta"
    )
    real_only = real_only or name in ("nan_to_num",)
    only_complex = name in ("imag", "view_as_real", "resolve_conj")
    dtype = (
        "float32"
        if real_only
        else "complex64"
        if only_complex
        else chance.choice(["complex64", "complex64", "float32"])
    )
    if name in ("vdot", "dot", "outer"):
        size = [chance.randint(1, 3000 if name == "outer" else 1 << 20)]
        return Drawn(name, [[size, dtype, "normal"]] * 2, {})
    size = _size(chance, rank, _BYTES[dtype], most=16 << 20)
    if name == "cross":
        size[-1] = 3
    what = chance.choice(["normal", "transposed", "conjugated"]) if dtype == "complex64" and rank > 1 else "normal"
    count = 1
    if name in _words("polar complex mul div add pow ldexp hypot atan2 logaddexp special.zeta cross allclose isclose"):
        count = 2
    if name in ("addcmul", "lerp"):
        count = 3
    given = [[size, dtype, what]] + [[size, dtype, "normal"]] * (count - 1)
    if count > 1 and chance.random() < 0.3 and name in ("mul", "add", "div", "pow"):
        given[1] = [size, chance.choice(["float32", "complex64"]), "normal"]
    if name == "where":
        given = [[size, "bool", "flags"], *[[size, dtype, "normal"]] * 2]
    return Drawn(name, given, {})


def _products(chance):
    name = chance.choice(
        _words(
            "matmul matmul bmm mm baddbmm addmm einsum einsum tensordot inner kron mv addr nn.functional.linear cov "
            "linalg.multi_dot nn.functional.bilinear cdist nn.functional.pairwise_distance corrcoef chain_matmul"
        )
    )
    dtype = chance.choice(["complex64", "complex64", "float32", "bfloat16", "complex128"])
    if name in ("cdist", "nn.functional.pairwise_distance", "nn.functional.bilinear"):
        dtype = "float32"
    if name in ("cov", "corrcoef") and dtype == "bfloat16":
        dtype = "float32"
    n, m, k = (chance.choice([chance.randint(1, 64), chance.randint(1, 1200)]) for _ in range(3))
    batch = chance.randint(1, max(1, min(64, MOST // 16 // max(n * m, m * k, n * k))))
    what = chance.choice(["normal", "normal", "conjugated", "transposed"])
    if dtype not in ("complex64", "complex128") and what == "conjugated":
        what = "normal"
    left, right = [[n, m], dtype, what], [[m, k], dtype, "normal"]
    many = [[[batch, n, m], dtype, what], [[batch, m, k], dtype, "normal"]]
    if name in ("matmul", "bmm"):
        return Drawn(name, many, {})
    if name in ("mm", "linalg.multi_dot", "chain_matmul"):
        return Drawn("mm", [left, right], {})
    if name == "baddbmm":
        return Drawn(name, [[[batch, n, k], dtype, "normal"], *many], {})
    if name == "addmm":
        return Drawn(name, [[chance.choice([[n, k], [k], [1, k]]), dtype, "normal"], left, right], {})
    if name == "einsum":
        equation = chance.choice(["bnm,bmk->bnk", "bnm,mk->bnk", "bnm,bmk->nk", "bnm,mk->nkb"])
        second = many[1] if "bmk" in equation else right
        return Drawn(name, [many[0], second], {"equation": equation})
    if name in ("tensordot",):
        return Drawn(name, [many[0], right], {"dims": 1})
    if name == "mv":
        return Drawn(name, [left, [[m], dtype, "normal"]], {})
    if name == "addr":
        return Drawn(name, [[[n, m], dtype, "normal"], [[n], dtype, "normal"], [[m], dtype, "normal"]], {})
    if name == "nn.functional.linear":
        bias = [[[k], dtype, "normal"]] if chance.random() < 0.6 else []
        return Drawn(name, [many[0], [[k, m], dtype, "normal"], *bias], {})
    if name == "nn.functional.bilinear":
        n, m, k = (min(length, 128) for length in (n, m, k))
        return Drawn(
            name, [[[batch, n], dtype, "normal"], [[batch, m], dtype, "normal"], [[k, n, m], dtype, "normal"]], {}
        )
    if name == "cdist":
        return Drawn(
            name,
            [[[batch, n, m], dtype, "normal"], [[batch, k, m], dtype, "normal"]],
            {"p": chance.choice([1.0, 2.0, 2.0, float("inf"), 3.0])},
        )
    if name in ("inner", "nn.functional.pairwise_distance"):
        return Drawn(name, [[[batch, m], dtype, "normal"]] * 2, {})
    if name == "kron":
        n, m, k = (min(length, 60) for length in (n, m, k))
        return Drawn(name, [[[n, m], dtype, "normal"], [[k, 4], dtype, "normal"]], {})
    return Drawn(name, [[[min(n, 600), m], dtype, "normal"]], {})


def _indexing(chance):
    name = chance.choice(
        _words(
            "gather scatter scatter_add index_select take take_along_dim masked_fill masked_select nonzero where1 "
            "index_add index_copy index_fill index_put scatter_reduce put searchsorted bucketize bincount unique histc "
            "repeat_interleave triu tril diag_embed diagonal combinations tril_indices rot90 trace "
            "nn.functional.pad nn.functional.unfold nn.functional.fold stft istft"
        )
    )
    dtype = chance.choice(["float32", "float32", "complex64", "bfloat16"])
    rank = chance.randint(1, 3)
    size = _size(chance, rank, _BYTES[dtype], most=24 << 20)
    dim = chance.randrange(rank)
    whole, places = [size, dtype, "normal"], f"index:{size[dim]}"
    few = [chance.randint(1, 2 * size[dim])]
    part = [*size[:dim], few[0], *size[dim + 1 :]]
    if name in ("gather", "take_along_dim"):
        return Drawn(name, [whole, [part if chance.random() < 0.5 else size, "int64", places]], {"dim": dim})
    if name in ("scatter", "scatter_add"):
        return Drawn(name, [whole, [size, "int64", places], whole], {"dim": dim})
    if name == "scatter_reduce":
        kind = "float32" if dtype == "complex64" else dtype
        given = [[size, kind, "normal"], [size, "int64", places], [size, kind, "normal"]]
        return Drawn(name, given, {"dim": dim, "reduce": chance.choice(["sum", "mean", "amax", "prod"])})
    if name == "index_select":
        return Drawn(name, [whole, [few, "int64", places]], {"dim": dim})
    if name in ("index_add", "index_copy"):
        return Drawn(name, [whole, [[size[dim]], "int64", "permutation"], whole], {"dim": dim})
    if name == "index_fill":
        return Drawn(name, [whole, [few, "int64", places]], {"dim": dim, "value": 1.0})
    if name == "index_put":
        return Drawn(
            name,
            [whole, [few, "int64", f"index:{size[0]}"], [[*few, *size[1:]], dtype, "normal"]],
            {"accumulate": chance.random() < 0.5},
        )
    count = functools.reduce(int.__mul__, size, 1)
    if name in ("take", "put"):
        given = [whole, [few, "int64", f"index:{count}"]]
        return Drawn(name, given + ([[few, dtype, "normal"]] if name == "put" else []), {})
    if name == "masked_fill":
        return Drawn(name, [whole, [size, "bool", "flags"]], {"value": 0.0})
    if name in ("masked_select", "where1"):
        return Drawn("masked_select", [whole, [size, "bool", "ones"]], {})
    if name in ("nonzero",):
        return Drawn(name, [[size, "bool", "ones"]], {})
    if name in ("searchsorted", "bucketize"):
        edges, values = [few, "float32", "sorted"], [size, "float32", "normal"]
        return Drawn(name, [edges, values] if name == "searchsorted" else [values, edges], {})
    if name == "bincount":
        return Drawn(name, [[[count], "int64", "index:1000"]], {"minlength": 1000})
    if name == "unique":
        return Drawn(
            name,
            [[size, "int64", "permutation"]],
            {"return_inverse": chance.random() < 0.5, "return_counts": chance.random() < 0.5},
        )
    if name == "histc":
        return Drawn(name, [[size, "float32", "normal"]], {"bins": chance.randint(1, 5000)})
    if name == "repeat_interleave":
        return Drawn(name, [whole], {"repeats": chance.randint(1, 4), "dim": dim})
    if name in ("triu", "tril", "trace", "diagonal", "rot90"):
        size = _size(chance, 2, _BYTES[dtype], most=24 << 20)
        return Drawn(name, [[size, dtype, "normal"]], {})
    if name in ("stft", "istft"):
        length, window = chance.choice([4096, 16000, 48000, 22050]), chance.choice([256, 400, 512, 1024])
        rows = chance.randint(1, 64)
        options = {"n_fft": window, "hop_length": window // chance.choice([2, 4]), "return_complex": True}
        if name == "stft":
            return Drawn(name, [[[rows, length], "float32", "normal"]], options | {"window": window})
        size = [rows, window // 2 + 1, length // options["hop_length"] + 1]
        return Drawn(
            name,
            [[size, "complex64", "normal"]],
            {"n_fft": window, "hop_length": options["hop_length"], "window": window},
        )
    if name == "nn.functional.pad":
        size = _size(chance, 4, _BYTES[dtype], most=24 << 20)
        size[2:] = [max(4, length) for length in size[2:]]
        mode = chance.choice(["constant", "reflect", "replicate", "circular"])
        return Drawn(name, [[size, dtype, "normal"]], {"pad": [1, 2, 3, 1], "mode": mode})
    if name == "nn.functional.unfold":
        size = [chance.randint(1, 16), chance.randint(1, 32), chance.randint(8, 64), chance.randint(8, 64)]
        return Drawn(name, [[size, "float32", "normal"]], {"kernel_size": 3, "padding": 1})
    if name == "nn.functional.fold":
        n, side = chance.randint(1, 16), chance.randint(4, 48)
        return Drawn(
            name,
            [[[n, 9 * chance.randint(1, 16), side * side], "float32", "normal"]],
            {"output_size": [side, side], "kernel_size": 3, "padding": 1},
        )
    if name == "tril_indices":
        return Drawn(name, [], {"row": chance.randint(1, 1500), "col": chance.randint(1, 1500)})
    if name == "combinations":
        return Drawn(name, [[[chance.randint(2, 1000)], "float32", "normal"]], {})
    return Drawn("diag_embed", [[size[:1], dtype, "normal"]] if size[0] < 3000 else [[[3000], dtype, "normal"]], {})


_FAMILIES = (_fft, _fft, _linalg, _linalg, _sorting, _reducing, _complex, _pointwise, _products, _indexing, _indexing)


def draw(count, seed, only=""):
    """So many calls, of each family in turn, or of one alone; none is chosen by what the rules say of it."""
    chance = random.Random(seed)
    families = [family for family in _FAMILIES if only in family.__name__] or _FAMILIES
    return [families[place % len(families)](chance) for place in range(count)]


def run_drawn(call, device, recorded=nothing):
    """The outcome of a drawn call on a device, forward and backward."""
    torch.manual_seed(0)
    moved, given, options = Moved(device), [], dict(call.options)
    for size, dtype, what in call.tensors:
        given.append(moved.leaf(_filled(size, getattr(torch, dtype), what), what))
    if call.name in ("stft", "istft"):
        options["window"] = torch.hann_window(options["window"]).to(device)
    if call.name == "searchsorted":
        options["right"] = True
    if call.name == "tril_indices":
        options["device"] = device
    function = functools.reduce(getattr, call.name.split("."), torch)
    if call.name == "einsum":
        return outcome(functools.partial(function, options.pop("equation"), *given), moved, _itself, recorded)
    if call.name == "index_put":
        given[1] = (given[1],)
    if call.name in (
        "gather",
        "scatter",
        "scatter_add",
        "index_select",
        "index_add",
        "index_copy",
        "index_fill",
        "scatter_reduce",
    ):
        given.insert(1, options.pop("dim"))
    if call.name == "scatter_reduce":
        return outcome(lambda: function(*given, options["reduce"]), moved, _itself, recorded)
    if call.name == "put":
        return outcome(lambda: torch.Tensor.put(*given), moved, _itself, recorded)
    return outcome(lambda: function(*given, **options), moved, _itself, recorded)


def _itself(value):
    return value


def _filled(size, dtype, what):
    if what.startswith("index:"):
        return torch.randint(int(what.removeprefix("index:")), size, dtype=dtype)
    if what == "permutation":
        return torch.randperm(functools.reduce(int.__mul__, size, 1)).to(dtype).view(size)
    if what == "ones":
        return torch.ones(size, dtype=dtype)
    if what == "flags":
        return torch.rand(size) < 0.5
    if what == "sorted":
        return torch.rand(size).sort()[0].to(dtype)
    if what == "transposed":
        return (
            torch.rand([size[-1], *size[1:-1], size[0]], dtype=dtype).transpose(0, -1)
            if len(size) > 1
            else (torch.rand(size, dtype=dtype))
        )
    made = torch.rand(size, dtype=dtype) + 0.1
    if what == "positive":
        return made.mul_(0.1 / size[-1]) + torch.eye(size[-1], dtype=dtype)
    return made
