"""Scripts with kernels that PyTorch does not bring: Triton by hand and autotuned, Liger, fla, operators with fakes."""

import random
import textwrap
from dataclasses import replace

from drawn_scripts.parts import Part, gpt, language, usual

_SOFTMAX = """
@triton.jit
def softmax_kernel(out, x, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + place, mask=place < columns, other=-float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + place, values / tl.sum(values, 0), mask=place < columns)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        columns = x.shape[-1]
        rows = x.numel() // columns
        softmax_kernel[(rows,)](out, x, columns, columns, BLOCK=triton.next_power_of_2(columns))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return out * (grad - (out * grad).sum(-1, keepdim=True))
"""
_NORM = """
@triton.jit
def norm_forward(out, x, weight, scale, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    values = tl.load(x + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(values * values, 0) / columns + 1e-6)
    tl.store(scale + row, factor)
    tl.store(out + row * columns + place, values * factor * tl.load(weight + place, mask=inside), mask=inside)


@triton.jit
def norm_backward(dx, dw, grad, x, weight, scale, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    factor = tl.load(scale + row)
    values = tl.load(x + row * columns + place, mask=inside, other=0.0).to(tl.float32) * factor
    g = tl.load(grad + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dw + row * columns + place, g * values, mask=inside)
    g = g * tl.load(weight + place, mask=inside, other=0.0)
    tl.store(dx + row * columns + place, factor * (g - values * (tl.sum(g * values, 0) / columns)), mask=inside)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x = x.contiguous()
        columns = x.shape[-1]
        rows = x.numel() // columns
        out = torch.empty_like(x)
        scale = torch.empty(rows, device=x.device, dtype=torch.float32)
        norm_forward[(rows,)](out, x, weight, scale, columns, BLOCK=triton.next_power_of_2(columns))
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        columns = x.shape[-1]
        grad, dx = grad.contiguous(), torch.empty_like(x)
        dw = torch.empty(scale.numel(), columns, device=x.device, dtype=torch.float32)
        norm_backward[(scale.numel(),)](
            dx, dw, grad, x, weight, scale, columns, BLOCK=triton.next_power_of_2(columns)
        )
        return dx, dw.sum(0).to(weight.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Norm.apply(x, self.weight)
"""
_MATMUL = """
@triton.autotune(
    configs=[
        triton.Config({"M": 64, "N": 64, "K": 32}, num_warps=4, num_stages=2),
        triton.Config({"M": 128, "N": 64, "K": 32}, num_warps=4, num_stages=3),
        triton.Config({"M": 64, "N": 128, "K": 32}, num_warps=8, num_stages=2),
    ],
    key=["m", "n", "k"],
)
@triton.jit
def matmul_kernel(a, b, c, m, n, k, sam, sak, sbk, sbn, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        left = tl.load(
            a + rows[:, None] * sam + (start + inner)[None, :] * sak,
            mask=(rows[:, None] < m) & ((start + inner)[None, :] < k), other=0.0,
        )
        right = tl.load(
            b + (start + inner)[:, None] * sbk + columns[None, :] * sbn,
            mask=((start + inner)[:, None] < k) & (columns[None, :] < n), other=0.0,
        )
        total += tl.dot(left, right)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=inside)


def matmul(a, b):
    m, k = a.shape
    n = b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    grid = lambda meta: (triton.cdiv(m, meta["M"]), triton.cdiv(n, meta["N"]))
    matmul_kernel[grid](a, b, c, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    return c


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return matmul(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2).contiguous()
        return matmul(flat, weight).view_as(x), matmul(flat.t(), x.flatten(0, -2))


class Linear(nn.Linear):
    def forward(self, x):
        return Multiply.apply(x, self.weight) + self.bias
"""
_GELU = """
@triton.jit
def gate_forward(out, a, b, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(a + place, mask=inside).to(tl.float32)
    tl.store(out + place, x * tl.sigmoid(x) * tl.load(b + place, mask=inside).to(tl.float32), mask=inside)


@triton.jit
def gate_backward(da, db, grad, a, b, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x, y = tl.load(a + place, mask=inside).to(tl.float32), tl.load(b + place, mask=inside).to(tl.float32)
    g, s = tl.load(grad + place, mask=inside).to(tl.float32), tl.sigmoid(x)
    tl.store(da + place, g * y * (s + x * s * (1 - s)), mask=inside)
    tl.store(db + place, g * x * s, mask=inside)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        out = torch.empty_like(a)
        gate_forward[(triton.cdiv(a.numel(), 1024),)](out, a, b, a.numel(), BLOCK=1024)
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        gate_backward[(triton.cdiv(a.numel(), 1024),)](da, db, grad.contiguous(), a, b, a.numel(), BLOCK=1024)
        return da, db


class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.both, self.out = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return self.out(Gate.apply(a, b))
"""
_OPERATOR = """
@torch.library.custom_op("mine::scaled_square", mutates_args=())
def scaled_square(x: torch.Tensor, scale: float) -> torch.Tensor:
    work = torch.empty_like(x, dtype=torch.float32)
    work.copy_(x)
    return (work.square_() * scale).to(x.dtype)


@scaled_square.register_fake
def _(x, scale):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return 2 * ctx.scale * x * grad, None


scaled_square.register_autograd(backward, setup_context=keep)


class Square(nn.Module):
    def forward(self, x):
        return scaled_square(x, 0.5)
"""
_TRITON = ("import triton", "import triton.language as tl")


def own_kernels(chance: random.Random, number: int) -> str:
    """One of the kinds."""
    kinds = (_norm, _liger_model, _matmul, _fla, _gate, _liger_loss, _softmax, _operator, _norm, _gate, _liger_layers)
    return kinds[number % len(kinds)](chance)


def _with(part: Part, imports: tuple[str, ...], *changes: tuple[str, str]) -> Part:
    text = part.definitions
    for before, after in changes:
        if before not in text:
            raise ValueError(f"needed {before!r} in the model")
        text = text.replace(before, after)
    return replace(part, definitions=text, imports=(*part.imports, *imports))


def _done(chance: random.Random, title: str, part: Part, kernels: str, *precisions: str) -> str:
    script = usual(chance, title, part, precisions=precisions)
    script.part = replace(
        part, definitions=kernels.strip("\n") + "\n\n\n" + textwrap.dedent(part.definitions).strip("\n")
    )
    return script.text()


def _norm(chance: random.Random) -> str:
    part = gpt(chance)
    for norm in ("nn.LayerNorm(width)", "nn.RMSNorm(width)"):
        part = replace(part, definitions=part.definitions.replace(norm, "RMSNorm(width)"))
    part = _with(part, _TRITON)
    return _done(chance, "A GPT whose norms are Triton kernels.", part, _NORM, "fp32", "amp_bf16", "bf16", "tf32")


def _matmul(chance: random.Random) -> str:
    part = gpt(chance)
    text = part.definitions
    for line in ("nn.Linear(width, 4 * width)", "nn.Linear(4 * width, width)"):
        text = text.replace(line, line.removeprefix("nn."))
    part = _with(replace(part, definitions=text), _TRITON)
    return _done(chance, "A GPT with an autotuned matrix product in Triton.", part, _MATMUL, "bf16", "fp32")


def _gate(chance: random.Random) -> str:
    part = gpt(chance)
    start = part.definitions.index("self.mlp = ")
    end = part.definitions.index("\n", start)
    line = part.definitions[start:end]
    part = _with(part, _TRITON, (line, "self.mlp = Gated(width, 3 * width)"))
    return _done(chance, "A GPT with a gate in Triton.", part, _GELU, "fp32", "amp_bf16", "bf16")


def _softmax(chance: random.Random) -> str:
    part = gpt(chance)
    attention = "y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
    own = "y = Softmax.apply(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5) @ v"
    part = _with(part, _TRITON, (attention, own))
    return _done(chance, "Attention with a softmax in Triton.", part, _SOFTMAX, "fp32", "tf32", "bf16")


def _operator(chance: random.Random) -> str:
    part = gpt(chance)
    text = part.definitions
    for act in ("nn.GELU()", "nn.GELU(approximate='tanh')", "nn.SiLU()", "nn.ReLU()"):
        text = text.replace(act, "Square()")
    return _done(
        chance, "A GPT with an operator of its own.", replace(part, definitions=text), _OPERATOR, "fp32", "bf16"
    )


def _liger_model(chance: random.Random) -> str:
    family = chance.choice(("Llama", "Qwen2", "Qwen3", "Mistral"))
    part = language(chance, masked=False, most=4096)
    while f"import AutoModelForCausalLM, {family}Config" not in part.imports[0]:
        part = language(chance, masked=False, most=4096)
    script = usual(chance, f"Trains a {family} with Liger's kernels.", part, precisions=("amp_bf16", "bf16", "bf16"))
    script.imports.append(f"from liger_kernel.transformers import apply_liger_kernel_to_{family.lower()}")
    fused = chance.choice((True, False))
    given = "" if fused else "fused_linear_cross_entropy=False, cross_entropy=True"
    script.before_model.append(f"apply_liger_kernel_to_{family.lower()}({given})")
    return script.text()


def _liger_loss(chance: random.Random) -> str:
    part = gpt(chance)
    fused = chance.choice((True, False))
    if fused:
        text = part.definitions.replace("return self.head(self.norm(x))", "return self.norm(x)")
        call = "LigerFusedLinearCrossEntropyLoss()(model.head.weight, output.flatten(0, 1), targets.flatten())"
        part = replace(part, definitions=text, loss=call)
        name = "LigerFusedLinearCrossEntropyLoss"
    else:
        part = replace(part, loss="LigerCrossEntropyLoss()(output.flatten(0, 1), targets.flatten())")
        name = "LigerCrossEntropyLoss"
    part = replace(part, imports=(*part.imports, f"from liger_kernel.transformers import {name}"))
    return usual(chance, "A GPT with Liger's loss.", part, precisions=("bf16", "fp32")).text()


def _liger_layers(chance: random.Random) -> str:
    part = gpt(chance)
    text = part.definitions
    for norm in ("nn.LayerNorm(width)", "nn.RMSNorm(width)"):
        text = text.replace(norm, "LigerRMSNorm(width)")
    part = replace(
        part, definitions=text, imports=(*part.imports, "from liger_kernel.transformers import LigerRMSNorm")
    )
    return usual(chance, "A GPT with Liger's norms.", part, precisions=("bf16", "amp_bf16", "fp32")).text()


def _fla(chance: random.Random) -> str:
    layer, given = chance.choice(
        (
            ("GatedLinearAttention", "hidden_size=width, num_heads={heads}, mode='chunk'"),
            ("MultiScaleRetention", "hidden_size=width, num_heads={heads}"),
            ("DeltaNet", "hidden_size=width, num_heads={heads}"),
            ("GatedDeltaNet", "hidden_size=width, num_heads={heads}, head_dim=64"),
        )
    )
    width, heads = chance.choice(((256, 2), (256, 4), (512, 4)))
    length, batch, vocabulary = chance.choice((256, 512, 1024)), chance.choice((2, 4, 8)), chance.choice((1000, 16000))
    definitions = f"""
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix = {layer}({given.format(heads=heads)})
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = x + self.mix(self.norm1(x))[0]
            return x + self.mlp(self.norm2(x))


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding({vocabulary}, {width})
            self.blocks = nn.Sequential(*(Block({width}) for _ in range({chance.choice((2, 3, 4))})))
            self.head = nn.Linear({width}, {vocabulary})

        def forward(self, tokens):
            return self.head(self.blocks(self.tokens(tokens)))
    """
    tokens = f"torch.randint({vocabulary}, (batch, {length}))"
    loss = "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())"
    part = Part(
        "Model()", batch, tokens, tokens, loss, imports=(f"from fla.layers import {layer}",), definitions=definitions
    )
    return usual(chance, f"Trains with fla's {layer}.", part, precisions=("bf16", "amp_bf16")).text()
