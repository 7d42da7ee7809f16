"""Scripts with complex numbers: state spaces, Fourier operators, spectral losses."""

import random
from dataclasses import replace

from drawn_scripts.parts import Part, gpt, usual


def complex_types(chance: random.Random, number: int) -> str:
    """One of the kinds."""
    kinds = (
        _state_space,
        _fourier2,
        _stft,
        _complex_layers,
        _fnet,
        _rotary,
        _fourier1,
        _filters,
        _convolution,
        _denoiser,
    )
    return kinds[number % len(kinds)](chance)


def _done(chance: random.Random, title: str, part: Part, *precisions: str) -> str:
    script = usual(chance, title, part, precisions=precisions or ("fp32", "fp32", "tf32"))
    if "cfloat" in part.definitions:  # fused optimizers refuse complex parameters
        script.optimizer = script.optimizer.replace(", fused=True", "")
    return script.text()


def _state_space(chance: random.Random) -> str:
    width, states, layers = chance.choice((64, 128, 256)), chance.choice((16, 32, 64)), chance.randint(2, 5)
    length, batch = chance.choice((256, 784, 1024)), chance.choice((8, 16, 32))
    act = chance.choice(("nn.GELU()", "nn.SiLU()"))
    definitions = f'''
    class Kernel(nn.Module):
        """The diagonal state space's convolution kernel."""

        def __init__(self, width, states):
            super().__init__()
            step = torch.rand(width) * 4.6 - 6.9
            self.log_step = nn.Parameter(step)
            self.C = nn.Parameter(torch.view_as_real(torch.randn(width, states // 2, dtype=torch.cfloat)))
            self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states // 2)))
            self.imaginary = nn.Parameter(torch.pi * torch.arange(states // 2).float().repeat(width, 1))

        def forward(self, length):
            step = torch.exp(self.log_step)
            C = torch.view_as_complex(self.C)
            A = -torch.exp(self.log_real) + 1j * self.imaginary
            dtA = A * step.unsqueeze(-1)
            K = dtA.unsqueeze(-1) * torch.arange(length, device=A.device)
            C = C * (torch.exp(dtA) - 1.0) / A
            return 2 * torch.einsum("hn, hnl -> hl", C, torch.exp(K)).real


    class Layer(nn.Module):
        def __init__(self, width, states):
            super().__init__()
            self.kernel, self.D = Kernel(width, states), nn.Parameter(torch.randn(width))
            self.norm, self.act = nn.LayerNorm(width), {act}
            self.mix = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GLU(dim=-2))

        def forward(self, x):
            u = self.norm(x).transpose(1, 2)
            length = u.size(-1)
            k = self.kernel(length)
            y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)
            y = y[..., :length] + u * self.D.unsqueeze(-1)
            return x + self.mix(self.act(y)).transpose(1, 2)


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(1, {width})
            self.layers = nn.ModuleList(Layer({width}, {states}) for _ in range({layers}))
            self.out = nn.Linear({width}, 10)

        def forward(self, x):
            x = self.inside(x)
            for layer in self.layers:
                x = layer(x)
            return self.out(x.mean(1))
    '''
    part = Part(
        "Model()", batch, f"torch.randn(batch, {length}, 1)", "torch.randint(10, (batch,))", definitions=definitions
    )
    return _done(chance, "A diagonal state space model for sequences.", part)


def _fourier2(chance: random.Random) -> str:
    width, modes, layers = chance.choice((20, 32, 48)), chance.choice((8, 12, 16)), chance.randint(2, 4)
    side, batch = chance.choice((48, 64, 85, 128)), chance.choice((4, 8, 16, 20))
    product = chance.choice(('torch.einsum("bixy,ioxy->boxy", a, b)', "(a.unsqueeze(2) * b).sum(1)"))
    definitions = f"""
    def multiply(a, b):
        return {product}


    class Spectral(nn.Module):
        def __init__(self, width, modes):
            super().__init__()
            self.modes = modes
            scale = 1 / width**2
            self.low = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
            self.high = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))

        def forward(self, x):
            b, c, h, w = x.shape
            x_ft = torch.fft.rfft2(x)
            out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
            m = self.modes
            out[:, :, :m, :m] = multiply(x_ft[:, :, :m, :m], self.low)
            out[:, :, -m:, :m] = multiply(x_ft[:, :, -m:, :m], self.high)
            return torch.fft.irfft2(out, s=(h, w))


    class FNO(nn.Module):
        def __init__(self, width={width}, modes={modes}, layers={layers}):
            super().__init__()
            self.lift = nn.Conv2d(3, width, 1)
            self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(layers))
            self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
            self.project = nn.Sequential(nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

        def forward(self, x):
            x = self.lift(x)
            for spectral, local in zip(self.spectral, self.local):
                x = nn.functional.gelu(spectral(x) + local(x))
            return self.project(x)
    """
    part = Part(
        "FNO()", batch, f"torch.randn(batch, 3, {side}, {side})", f"torch.randn(batch, 1, {side}, {side})",
        "nn.functional.mse_loss(output, targets)", definitions=definitions,
    )  # fmt: skip
    return _done(chance, "A Fourier neural operator in two dimensions.", part)


def _fourier1(chance: random.Random) -> str:
    width, modes, layers = chance.choice((32, 64, 96)), chance.choice((16, 24, 32)), chance.randint(2, 5)
    length, batch = chance.choice((512, 1024, 2048, 4096)), chance.choice((8, 20, 32))
    definitions = f"""
    class Spectral(nn.Module):
        def __init__(self, width, modes):
            super().__init__()
            self.modes = modes
            self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width**2)

        def forward(self, x):
            x_ft = torch.fft.rfft(x, norm="ortho")
            weight = torch.view_as_complex(self.weight)
            kept = torch.einsum("bix,iox->box", x_ft[..., : self.modes], weight)
            out = nn.functional.pad(kept, (0, x_ft.shape[-1] - self.modes))
            return torch.fft.irfft(out, n=x.shape[-1], norm="ortho")


    class FNO(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.project = nn.Conv1d(2, {width}, 1), nn.Conv1d({width}, 1, 1)
            self.spectral = nn.ModuleList(Spectral({width}, {modes}) for _ in range({layers}))
            self.local = nn.ModuleList(nn.Conv1d({width}, {width}, 1) for _ in range({layers}))

        def forward(self, x):
            x = self.lift(x)
            for spectral, local in zip(self.spectral, self.local):
                x = torch.relu(spectral(x) + local(x))
            return self.project(x)
    """
    part = Part(
        "FNO()", batch, f"torch.randn(batch, 2, {length})", f"torch.randn(batch, 1, {length})",
        "(output - targets).norm() / targets.norm()", definitions=definitions,
    )  # fmt: skip
    return _done(chance, "A Fourier neural operator for Burgers' equation.", part)


def _stft(chance: random.Random) -> str:
    length, batch = chance.choice((8192, 16384, 24000)), chance.choice((4, 8, 16))
    sizes = chance.choice(("(512, 1024, 2048)", "(256, 512)", "(1024,)"))
    width = chance.choice((16, 32, 48))
    definitions = f'''
    class Wave(nn.Module):
        """Makes a waveform from noise and features."""

        def __init__(self, width={width}):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv1d(1, width, 15, padding=7), nn.LeakyReLU(0.1),
                *(self.dilated(width, 3**i) for i in range(4)),
                nn.Conv1d(width, 1, 15, padding=7), nn.Tanh(),
            )

        @staticmethod
        def dilated(width, step):
            return nn.Sequential(nn.Conv1d(width, width, 3, padding=step, dilation=step), nn.LeakyReLU(0.1))

        def forward(self, x):
            return self.net(x.unsqueeze(1)).squeeze(1)


    def spectrum(x, size):
        window = torch.hann_window(size, device=x.device)
        return torch.stft(x, size, hop_length=size // 4, window=window, return_complex=True).abs().clamp(min=1e-7)


    def spectral_loss(output, targets):
        loss = 0.0
        for size in {sizes}:
            a, b = spectrum(output, size), spectrum(targets, size)
            loss = loss + torch.norm(b - a) / torch.norm(b) + nn.functional.l1_loss(a.log(), b.log())
        return loss
    '''
    part = Part(
        "Wave()", batch, f"torch.randn(batch, {length})", f"torch.randn(batch, {length})",
        "spectral_loss(output, targets)", definitions=definitions,
    )  # fmt: skip
    return _done(chance, "A vocoder with a loss of several spectrograms.", part)


def _denoiser(chance: random.Random) -> str:
    size, batch, length = chance.choice((256, 400, 512)), chance.choice((4, 8, 16)), chance.choice((16000, 24000))
    hidden = chance.choice((128, 256, 400))
    definitions = f'''
    class Denoiser(nn.Module):
        """Masks a spectrogram, as magnitudes or as complex numbers, and turns it back into a waveform."""

        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.hann_window({size}))
            self.rnn = nn.GRU({2 * (size // 2 + 1)}, {hidden}, batch_first=True)
            self.mask = nn.Linear({hidden}, {2 * (size // 2 + 1)})

        def forward(self, x):
            spec = torch.stft(x, {size}, {size // 4}, window=self.window, return_complex=True).transpose(1, 2)
            features = torch.cat([spec.real, spec.imag], -1)
            real, imaginary = self.mask(self.rnn(features)[0]).chunk(2, -1)
            spec = spec * torch.complex(torch.tanh(real), torch.tanh(imaginary))
            return torch.istft(spec.transpose(1, 2), {size}, {size // 4}, window=self.window, length=x.shape[-1])
    '''
    part = Part(
        "Denoiser()", batch, f"torch.randn(batch, {length})", f"torch.randn(batch, {length})",
        "nn.functional.l1_loss(output, targets)", definitions=definitions,
    )  # fmt: skip
    return _done(chance, "Removes noise with complex masks.", part, "fp32")


def _complex_layers(chance: random.Random) -> str:
    width, depth, batch = chance.choice((128, 256, 512)), chance.randint(2, 5), chance.choice((64, 256, 512))
    act = chance.choice(
        (
            "torch.complex(torch.relu(x.real), torch.relu(x.imag))",
            "x * torch.sigmoid(x.abs())",
            "torch.view_as_complex(torch.tanh(torch.view_as_real(x)))",
        )  # fmt: skip
    )
    last = chance.choice(("x.abs()", "torch.cat([x.real, x.imag], -1)"))
    size = width if last == "x.abs()" else 2 * width
    definitions = f"""
    class Layer(nn.Module):
        def __init__(self, before, after):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(after, before, dtype=torch.cfloat) / before**0.5)
            self.bias = nn.Parameter(torch.zeros(after, dtype=torch.cfloat))

        def forward(self, x):
            x = nn.functional.linear(x, self.weight, self.bias)
            return {act}


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [64] + [{width}] * {depth}
            self.layers = nn.Sequential(*(Layer(a, b) for a, b in zip(sizes, sizes[1:])))
            self.out = nn.Linear({size}, 10)

        def forward(self, x):
            x = self.layers(torch.view_as_complex(x))
            return self.out({last})
    """
    part = Part("Net()", batch, "torch.randn(batch, 64, 2)", "torch.randint(10, (batch,))", definitions=definitions)
    return _done(chance, "A network of complex weights.", part, "fp32")


def _fnet(chance: random.Random) -> str:
    width, layers, length = chance.choice((128, 256, 512)), chance.randint(2, 6), chance.choice((128, 256, 512))
    batch, vocabulary = chance.choice((4, 8, 16)), chance.choice((2000, 16000))
    mixed = chance.choice(
        ("torch.fft.fft2(x.float(), dim=(-1, -2)).real", "torch.fft.fft(torch.fft.fft(x.float(), dim=-1), dim=-2).real")
    )
    definitions = f"""
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = self.norm1(x + {mixed})
            return self.norm2(x + self.mlp(x))


    class FNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding({vocabulary}, {width})
            self.blocks = nn.Sequential(*(Block({width}) for _ in range({layers})))
            self.head = nn.Linear({width}, {vocabulary})

        def forward(self, tokens):
            return self.head(self.blocks(self.tokens(tokens)))
    """
    tokens = f"torch.randint({vocabulary}, (batch, {length}))"
    loss = "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())"
    part = Part("FNet()", batch, tokens, tokens, loss, definitions=definitions)
    return _done(chance, "FNet: tokens mixed by Fourier transforms.", part, "fp32", "amp_bf16", "tf32")


def _rotary(chance: random.Random) -> str:
    part = gpt(chance)
    old = "y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
    new = "y = nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)"
    text = part.definitions.replace(old, new)
    lead = '''
    def rotate(x):
        """Rotary positions, by complex numbers."""
        size = x.shape[-1]
        frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2, device=x.device).float() / size)
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), frequencies)
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


'''
    return _done(
        chance, "A GPT with rotary positions by complex numbers.", replace(part, definitions=lead + text),
        "fp32", "amp_bf16", "bf16", "tf32",
    )  # fmt: skip


def _filters(chance: random.Random) -> str:
    width, layers, side = chance.choice((96, 192, 256)), chance.randint(3, 6), chance.choice((14, 16, 28))
    batch = chance.choice((8, 16, 32))
    definitions = f"""
    class GlobalFilter(nn.Module):
        def __init__(self, width, h, w):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(h, w, width, 2) * 0.02)

        def forward(self, x):
            b, n, c = x.shape
            x = x.view(b, {side}, {side}, c).to(torch.float32)
            x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
            x = x * torch.view_as_complex(self.weight)
            x = torch.fft.irfft2(x, s=({side}, {side}), dim=(1, 2), norm="ortho")
            return x.reshape(b, n, c)


    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.filter = GlobalFilter(width, {side}, {side // 2 + 1})
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            return x + self.mlp(self.norm2(self.filter(self.norm1(x))))


    class GFNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, {width}, 8, stride=8)
            self.blocks = nn.Sequential(*(Block({width}) for _ in range({layers})))
            self.head = nn.Linear({width}, 100)

        def forward(self, x):
            return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
    """
    part = Part(
        "GFNet()", batch, f"torch.randn(batch, 3, {side * 8}, {side * 8})", "torch.randint(100, (batch,))",
        definitions=definitions,
    )  # fmt: skip
    return _done(chance, "GFNet: images through filters in the frequency domain.", part)


def _convolution(chance: random.Random) -> str:
    width, length, layers = chance.choice((64, 128, 256)), chance.choice((512, 1024, 2048)), chance.randint(2, 4)
    batch, vocabulary = chance.choice((2, 4, 8)), chance.choice((256, 8000))
    definitions = f'''
    class LongConvolution(nn.Module):
        """A gated convolution as long as its input, as in Hyena."""

        def __init__(self, width, length):
            super().__init__()
            self.filter = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, width))
            self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)
            t = torch.linspace(0, 1, length).unsqueeze(-1)
            bands = torch.exp(1j * 2 * torch.pi * t * torch.arange(4))
            self.register_buffer("places", torch.cat([bands.real, bands.imag], -1))

        def forward(self, x):
            a, b, v = self.inside(self.norm(x)).chunk(3, -1)
            k = self.filter(self.places)
            size = 2 * x.shape[1]
            y = torch.fft.rfft(b * v, n=size, dim=1) * torch.fft.rfft(k, n=size, dim=0)
            return x + self.out(a * torch.fft.irfft(y, n=size, dim=1)[:, : x.shape[1]])


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding({vocabulary}, {width})
            self.layers = nn.Sequential(*(LongConvolution({width}, {length}) for _ in range({layers})))
            self.head = nn.Linear({width}, {vocabulary})

        def forward(self, tokens):
            return self.head(self.layers(self.tokens(tokens)))
    '''
    tokens = f"torch.randint({vocabulary}, (batch, {length}))"
    loss = "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())"
    part = Part("Model()", batch, tokens, tokens, loss, definitions=definitions)
    return _done(chance, "A language model of long convolutions.", part)
