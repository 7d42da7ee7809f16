"""Scripts with float8, int8, nested tensors and `torch.func`."""

import random
import textwrap
from dataclasses import replace

from drawn_scripts.parts import Part, Script, convolutions, gpt, perceptron, usual


def types(chance: random.Random, number: int) -> str:
    """One of the kinds."""
    kinds = (_float8, _per_sample, _nested, _int8_adapter, _ensemble, _packed, _quantised_aware, _physics, _eight_bit,
             _meta, _int8_product, _forward_mode)  # fmt: skip
    return kinds[number % len(kinds)](chance)


def _over(part: Part, lead: str) -> Part:
    return replace(part, definitions=textwrap.dedent(lead) + "\n\n" + textwrap.dedent(part.definitions))


def _linears(part: Part, name: str) -> Part:
    text = part.definitions
    for line in ("nn.Linear(width, 3 * width)", "nn.Linear(width, width)", "nn.Linear(width, 4 * width)",
                 "nn.Linear(4 * width, width)"):  # fmt: skip
        text = text.replace(line, line.replace("nn.Linear", name))
    return replace(part, definitions=text)


def _float8(chance: random.Random) -> str:
    lead = """
    def to_float8(x, dtype):
        scale = x.abs().max().float().clamp(min=1e-12) / torch.finfo(dtype).max
        return (x / scale).to(dtype), scale


    class Float8Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            x8, sx = to_float8(x, torch.float8_e4m3fn)
            w8, sw = to_float8(weight, torch.float8_e4m3fn)
            ctx.save_for_backward(x8, sx, w8, sw)
            return torch._scaled_mm(x8, w8.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx, grad):
            x8, sx, w8, sw = ctx.saved_tensors
            g8, sg = to_float8(grad.contiguous(), torch.float8_e5m2)
            column = w8.t().contiguous().t()
            dx = torch._scaled_mm(g8, column, scale_a=sg, scale_b=sw, out_dtype=torch.bfloat16)
            dw = grad.t() @ (x8.to(torch.bfloat16) * sx.to(torch.bfloat16))
            return dx, dw


    class Float8Linear(nn.Linear):
        def forward(self, x):
            y = Float8Product.apply(x.flatten(0, -2), self.weight)
            return y.view(*x.shape[:-1], -1) + self.bias
    """
    part = _linears(gpt(chance), "Float8Linear")
    return usual(chance, "A GPT whose matrix products are in float8.", _over(part, lead), precisions=("bf16",)).text()


def _int8_adapter(chance: random.Random) -> str:
    rank = chance.choice((4, 8, 16, 64))
    lead = f'''
    class AdaptedLinear(nn.Module):
        """A frozen weight in int8 with a scale for each row, and a small adapter that trains."""

        def __init__(self, before, after, rank={rank}):
            super().__init__()
            weight = torch.randn(after, before) / before**0.5
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
            self.down, self.up = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
            return nn.functional.linear(x, weight) + self.up(self.down(x))
    '''
    part = _linears(gpt(chance), "AdaptedLinear")
    script = usual(chance, "Adapters over weights in int8.", _over(part, lead), precisions=("amp_bf16", "fp32"))
    script.parameters = "[p for p in model.parameters() if p.requires_grad]"
    return script.text()


def _packed(chance: random.Random) -> str:
    kind = chance.choice(("torch.float8_e4m3fn", "torch.int8"))
    scale = "x.detach().abs().amax().clamp(min=1e-6)" + (" / 448" if "float8" in kind else " / 127")
    lead = f'''
    def pack(x):
        """Keeps large activations in eight bits."""
        if not x.is_floating_point() or x.numel() < 100_000 or isinstance(x, nn.Parameter):
            return x
        scale = {scale}
        return (x / scale){".round()" if "int8" in kind else ""}.to({kind}), scale, x.dtype


    def unpack(kept):
        if torch.is_tensor(kept):
            return kept
        x, scale, dtype = kept
        return x.to(dtype) * scale
    '''
    part = chance.choice((gpt, convolutions, perceptron))(chance)
    script = usual(chance, "Keeps activations in eight bits.", _over(part, lead), precisions=("fp32", "tf32", "bf16"))
    script.after_model += [
        "forward = model.forward",
        "",
        "def packed(*args):",
        "    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):",
        "        return forward(*args)",
        "",
        "model.forward = packed",
    ]
    return script.text()


def _quantised_aware(chance: random.Random) -> str:
    lead = '''
    class QuantisedLinear(nn.Linear):
        """Trains for eight bits: weights by row and inputs as a whole are rounded on the way."""

        def forward(self, x):
            scale = self.weight.detach().abs().amax(1) / 127
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            weight = torch.fake_quantize_per_channel_affine(self.weight, scale.clamp(min=1e-8), zeros, 0, -128, 127)
            step = (x.detach().abs().max() / 127).clamp(min=1e-8)
            zero = torch.zeros(1, dtype=torch.int32, device=x.device)
            x = torch.fake_quantize_per_tensor_affine(x, step, zero, -128, 127)
            return nn.functional.linear(x, weight, self.bias)
    '''
    part = _linears(gpt(chance), "QuantisedLinear")
    return usual(
        chance, "Training that knows of its quantisation.", _over(part, lead), precisions=("fp32", "tf32")
    ).text()


def _int8_product(chance: random.Random) -> str:
    lead = '''
    class Int8Product(torch.autograd.Function):
        """A product in int8 forward, in the usual type backward."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            sx = x.abs().amax(1, keepdim=True).float().clamp(min=1e-8) / 127
            sw = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-8) / 127
            a, b = (x / sx).round().to(torch.int8), (weight / sw).round().to(torch.int8)
            return (torch._int_mm(a, b.t()) * sx * sw.t()).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x


    class Int8Linear(nn.Linear):
        def forward(self, x):
            return Int8Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1) + self.bias
    '''
    part = _linears(gpt(chance), "Int8Linear")
    return usual(
        chance, "A GPT whose forward products are in int8.", _over(part, lead), precisions=("fp32", "bf16")
    ).text()


def _eight_bit(chance: random.Random) -> str:
    block = chance.choice((128, 256, 2048))
    lead = f'''
    class Adam8bit(torch.optim.Optimizer):
        """Adam whose moments are kept in eight bits, with a scale for each block of {block}."""

        def __init__(self, params, lr=1e-3):
            super().__init__(params, dict(lr=lr))

        @staticmethod
        def encode(x):
            x = nn.functional.pad(x.flatten(), (0, -x.numel() % {block})).view(-1, {block})
            scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            return (x / scale).round().to(torch.int8), scale

        @staticmethod
        def decode(kept, like):
            x, scale = kept
            return (x * scale).flatten()[: like.numel()].view_as(like)

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    grad = p.grad.float()
                    first = self.decode(state["first"], p) if state else torch.zeros_like(p, dtype=torch.float32)
                    second = self.decode(state["second"], p) if state else torch.zeros_like(p, dtype=torch.float32)
                    first.lerp_(grad, 0.1)
                    second.lerp_(grad.square(), 0.001)
                    p.sub_((group["lr"] * first / (second.clamp(min=0).sqrt() + 1e-8)).to(p.dtype))
                    state["first"], state["second"] = self.encode(first), self.encode(second)
    '''
    part = chance.choice((gpt, perceptron, convolutions))(chance)
    script = usual(
        chance, "Trains with moments in eight bits.", _over(part, lead), precisions=("fp32", "amp_bf16", "bf16")
    )
    script.optimizer = "Adam8bit({0}, lr=1e-3)"
    return script.text()


def _script(title: str, part: Part, main: str, *imports: str) -> str:
    script = Script(title, part, imports=list(imports))
    script.whole = textwrap.dedent(main)
    return script.text()


def _per_sample(chance: random.Random) -> str:
    part = chance.choice((perceptron, gpt, convolutions))(chance)
    part = replace(part, definitions=part.definitions.replace("nn.BatchNorm", "nn.InstanceNorm"))
    loss = part.loss.replace("output", "predict(values, inputs)").replace("targets", "targets")
    batch = min(part.batch, 16)
    definitions = textwrap.dedent(part.definitions).replace("inplace=True", "")
    return _script("Clips the gradient of each sample, for privacy.", replace(part, definitions=definitions), f'''\
    device = torch.device("cuda")
    model = {part.model}.to(device)
    optimizer = {chance.choice(("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.Adam(model.parameters())"))}
    buffers = dict(model.named_buffers())

    def predict(values, inputs):
        return functional_call(model, (values, buffers), (inputs,))

    def loss_of(values, inputs, targets):
        inputs, targets = inputs.unsqueeze(0), targets.unsqueeze(0)
        return {loss}

    gradients = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
    batch = {batch}
    for step in range({chance.randint(5, 7)}):
        inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)
        values = {{name: p.detach() for name, p in model.named_parameters()}}
        found = gradients(values, inputs, targets)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            clipped = torch.einsum("n,n...->...", factors, found[name])
            p.grad = (clipped + 0.01 * torch.randn_like(p)) / batch
        optimizer.step()
    print(norms.mean().item())
    ''', "from torch.func import functional_call, grad, vmap")  # fmt: skip


def _ensemble(chance: random.Random) -> str:
    part = perceptron(chance)
    count = chance.choice((3, 5, 8))
    return _script("Trains an ensemble as one model.", part, f'''\
    device = torch.device("cuda")
    models = [{part.model}.to(device) for _ in range({count})]
    values, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.AdamW(values.values(), lr=1e-3)

    def predict(values, buffers, inputs):
        return functional_call(base, (values, buffers), (inputs,))

    batch = {part.batch}
    for step in range({chance.randint(5, 8)}):
        inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)
        output = vmap(predict, in_dims=(0, 0, None))(values, buffers, inputs)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.repeat({count}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())
    ''', "import copy", "from torch.func import functional_call, stack_module_state, vmap")  # fmt: skip


def _physics(chance: random.Random) -> str:
    width, depth, points = chance.choice((64, 128, 256)), chance.randint(3, 6), chance.choice((2000, 8192, 20_000))
    way = chance.choice(("jacrev(jacrev(solution, 1), 1)", "jacfwd(jacrev(solution, 1), 1)", "hessian(solution, 1)"))
    return _script("Solves the heat equation by a network.", Part("", 1, "", ""), f'''\
    device = torch.device("cuda")
    layers = [nn.Linear(2, {width}), nn.Tanh()]
    for _ in range({depth}):
        layers += [nn.Linear({width}, {width}), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear({width}, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def solution(values, place):
        return functional_call(model, values, (place,)).squeeze()

    second = vmap({way}, in_dims=(None, 0))
    first = vmap(jacrev(solution, 1), in_dims=(None, 0))
    for step in range(6):
        places = torch.rand({points}, 2, device=device)
        values = dict(model.named_parameters())
        residual = first(values, places)[:, 1] - 0.1 * second(values, places)[:, 0, 0]
        start = model(torch.stack([places[:, 0], torch.zeros_like(places[:, 0])], 1)).squeeze(1)
        loss = residual.square().mean() + (start - torch.sin(torch.pi * places[:, 0])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())
    ''', "from torch.func import functional_call, hessian, jacfwd, jacrev, vmap")  # fmt: skip


def _meta(chance: random.Random) -> str:
    tasks, shots, width = chance.choice((4, 8, 16)), chance.choice((5, 10, 20)), chance.choice((40, 64, 128))
    inner = chance.choice((1, 3, 5))
    return _script("Learns to learn sine waves (MAML).", Part("", 1, "", ""), f'''\
    device = torch.device("cuda")
    layers = [nn.Linear(1, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, 1)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(values, x, y):
        return (functional_call(model, values, (x,)) - y).square().mean()

    def adapted(values, x1, y1, x2, y2):
        for _ in range({inner}):
            steps = grad(loss_of)(values, x1, y1)
            values = {{name: value - 0.01 * steps[name] for name, value in values.items()}}
        return loss_of(values, x2, y2)

    for step in range(10):
        shift = torch.rand({tasks}, 1, 1, device=device) * 3.14
        x1, x2 = torch.rand(2, {tasks}, {shots}, 1, device=device) * 10 - 5
        losses = vmap(adapted, in_dims=(None, 0, 0, 0, 0))(
            dict(model.named_parameters()), x1, torch.sin(x1 + shift), x2, torch.sin(x2 + shift)
        )
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    print(losses.mean().item())
    ''', "from torch.func import functional_call, grad, vmap")  # fmt: skip


def _forward_mode(chance: random.Random) -> str:
    part = perceptron(chance)
    return _script("Forward gradients: no backward pass.", part, f'''\
    device = torch.device("cuda")
    model = {part.model}.to(device)
    batch = {part.batch}
    values = {{name: p.detach() for name, p in model.named_parameters()}}

    for step in range(8):
        inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)
        tangents = {{name: torch.randn_like(p) for name, p in values.items()}}

        def loss_of(values):
            return nn.functional.cross_entropy(functional_call(model, values, (inputs,)), targets)

        loss, slope = jvp(loss_of, (values,), (tangents,))
        values = {{name: p - 1e-4 * slope * tangents[name] for name, p in values.items()}}
    print(loss.item())
    ''', "from torch.func import functional_call, jvp")  # fmt: skip


def _nested(chance: random.Random) -> str:
    width, heads = chance.choice(((128, 4), (256, 4), (256, 8), (512, 8)))
    layers, batch, most = chance.randint(1, 4), chance.choice((8, 16, 32)), chance.choice((64, 128, 256))
    vocabulary = chance.choice((1000, 10_000))
    definitions = f"""
    class Block(nn.Module):
        def __init__(self, width={width}, heads={heads}):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def split(self, x):
            return x.unflatten(-1, [self.heads, {width // heads}]).transpose(1, 2)

        def forward(self, x):
            y = self.norm1(x)
            y = nn.functional.scaled_dot_product_attention(
                self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
            )
            x = x + self.out(y.transpose(1, 2).flatten(-2))
            return x + self.mlp(self.norm2(x))


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding({vocabulary}, {width})
            self.blocks = nn.Sequential(*(Block() for _ in range({layers})))
            self.head = nn.Linear({width}, 2)

        def forward(self, tokens):
            x = self.blocks(self.tokens(tokens))
            return self.head(x.to_padded_tensor(0.0).mean(1))
    """
    cast = chance.choice(('torch.autocast("cuda", dtype=torch.bfloat16)', "nullcontext()"))
    part = Part("", 1, "", "", definitions=definitions)
    return _script("Classifies texts of many lengths without padding.", part, f'''\
    device = torch.device("cuda")
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = [{most} - (i * 7) % {most // 2} for i in range({batch})]
    for step in range(6):
        texts = [torch.randint({vocabulary}, (n,)) for n in lengths]
        tokens = torch.nested.nested_tensor(texts, layout=torch.jagged, device=device)
        labels = torch.randint(2, ({batch},), device=device)
        with {cast}:
            loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())
    ''', "from contextlib import nullcontext")  # fmt: skip
