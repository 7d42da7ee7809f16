"""Trainings with complex numbers, Fourier transforms, matrix decompositions and lazy modules, drawn at random.

    python benchmarks/complex_trainings.py measure --count 20 --seed 1 --out complex_h200.jsonl.gz

runs each on a GPU in a process of its own, three steps. A line a training: its name and sizes, and the peaks of its
allocated and reserved memory. It needs a GPU and PyTorch, nothing else of this project.

    python benchmarks/complex_trainings.py compare complex_h200.jsonl.gz

estimates the same trainings without a GPU and prints how far off the estimates are.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
Sizes = dict[str, Any]
TRAININGS: dict[str, Callable[[Sizes], tuple[nn.Module, Callable[[], tuple[Any, ...]], Callable[..., Any]]]] = {}


def training(function: Any) -> Any:
    """Enter a training under its name: it returns a model, what draws a batch, and what makes the loss of both."""
    TRAININGS[function.__name__] = function
    return function


def _regression(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def _batch(*sizes: list[int], dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.randn(size, dtype=dtype) for size in sizes)


class DiagonalKernel(nn.Module):
    """S4D: the kernel of a diagonal state space."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) * 4 - 6)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(width, states // 2, dtype=torch.cfloat)))
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states // 2)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states // 2).repeat(width, 1).float())

    def forward(self, length: int) -> torch.Tensor:
        step = torch.exp(self.log_step)
        c = torch.view_as_complex(self.c)
        a = -torch.exp(self.log_real) + 1j * self.imaginary
        scaled = a * step.unsqueeze(-1)
        powers = scaled.unsqueeze(-1) * torch.arange(length, device=a.device)
        c = c * (torch.exp(scaled) - 1.0) / a
        return 2 * torch.einsum("hn, hnl -> hl", c, torch.exp(powers)).real


class S4D(nn.Module):
    """A layer of S4D: a long convolution by FFT, dropout, a gated output."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.kernel, self.skip = DiagonalKernel(width, states), nn.Parameter(torch.randn(width))
        self.out = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Conv1d(width, 2 * width, 1), nn.GLU(dim=-2))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        length = u.size(-1)
        kernel_f = torch.fft.rfft(self.kernel(length), n=2 * length)
        u_f = torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(u_f * kernel_f, n=2 * length)[..., :length]
        return self.out(y + u * self.skip.unsqueeze(-1))


class Stack(nn.Module):
    """Residual layers between two linear ones."""

    def __init__(self, layers: list[nn.Module], inputs: int, width: int, outputs: int, last: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in layers)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        if not self.last:
            x = x.transpose(-1, -2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            z = layer(x) + x
            x = norm(z) if self.last else norm(z.transpose(-1, -2)).transpose(-1, -2)
        x = x if self.last else x.transpose(-1, -2)
        return self.decoder(x.mean(1))


@training
def s4d(s: Sizes) -> Any:
    model = Stack([S4D(s["width"], s["states"]) for _ in range(s["layers"])], 3, s["width"], 10)
    return model, _batch([s["batch"], s["length"], 3], [s["batch"], 10]), _regression


class CauchyKernel(nn.Module):
    """S4 with a low-rank correction: a Cauchy product, a Woodbury step and an inverse transform."""

    def __init__(self, width: int, states: int, length: int) -> None:
        super().__init__()
        self.length = length
        n = states // 2
        self.a = nn.Parameter(torch.view_as_real(torch.randn(width, n, dtype=torch.cfloat)))
        self.p = nn.Parameter(torch.randn(width, n, dtype=torch.cfloat))
        self.b = nn.Parameter(torch.randn(width, n, dtype=torch.cfloat))
        self.c = nn.Parameter(torch.randn(width, n, dtype=torch.cfloat))
        self.log_step = nn.Parameter(torch.rand(width, 1) - 4)
        omega = torch.exp(-2j * math.pi * torch.arange(length // 2 + 1) / length)
        self.register_buffer("omega", omega)

    def forward(self) -> torch.Tensor:
        step = self.log_step.exp()
        g = (2.0 / step) * ((1.0 - self.omega) / (1.0 + self.omega + 1e-3))
        a = torch.view_as_complex(self.a)
        cauchy = 1.0 / (g.unsqueeze(1) - a.unsqueeze(-1))
        k00 = ((self.c.conj() * self.b).unsqueeze(-1) * cauchy).sum(1)
        k01 = ((self.c.conj() * self.p).unsqueeze(-1) * cauchy).sum(1)
        k10 = ((self.p.conj() * self.b).unsqueeze(-1) * cauchy).sum(1)
        k11 = ((self.p.conj() * self.p).unsqueeze(-1) * cauchy).sum(1)
        at_roots = 2.0 / (1.0 + self.omega + 1e-3) * (k00 - k01 * (1.0 / (1.0 + k11)) * k10)
        return torch.fft.irfft(at_roots, n=self.length)


class S4(nn.Module):
    """A layer of S4."""

    def __init__(self, width: int, states: int, length: int) -> None:
        super().__init__()
        self.kernel, self.skip = CauchyKernel(width, states, length), nn.Parameter(torch.randn(width, 1))
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        length = u.shape[-1]
        k = torch.fft.rfft(self.kernel(), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * k, n=2 * length)[..., :length]
        return self.out(F.gelu(y + self.skip * u))


@training
def s4(s: Sizes) -> Any:
    layers = [S4(s["width"], s["states"], s["length"]) for _ in range(s["layers"])]
    return Stack(layers, 3, s["width"], 10), _batch([s["batch"], s["length"], 3], [s["batch"], 10]), _regression


class RecurrentUnit(nn.Module):
    """LRU: a diagonal complex recurrence, step by step."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.nu, self.theta = nn.Parameter(torch.rand(states)), nn.Parameter(torch.rand(states))
        self.b = nn.Parameter(torch.randn(states, width, dtype=torch.cfloat) / width)
        self.c = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat) / states)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.polar(torch.exp(-torch.exp(self.nu)), torch.exp(self.theta))
        inputs = x.transpose(1, 2).to(torch.cfloat) @ self.b.T
        state, states = torch.zeros_like(inputs[:, 0]), []
        for step in range(inputs.shape[1]):
            state = decay * state + inputs[:, step]
            states.append(state)
        return (torch.stack(states, 1) @ self.c.T).real.transpose(1, 2)


@training
def lru(s: Sizes) -> Any:
    layers = [RecurrentUnit(s["width"], s["states"]) for _ in range(s["layers"])]
    length = min(s["length"], 200)
    return Stack(layers, 3, s["width"], 10), _batch([s["batch"], length, 3], [s["batch"], 10]), _regression


class SpectralConv(nn.Module):
    """A layer of a Fourier neural operator in one to three dimensions."""

    def __init__(self, width: int, modes: int, rank: int) -> None:
        super().__init__()
        self.modes, self.rank, self.width = modes, rank, width
        shape = (width, width) + (modes,) * rank
        corners = 2 ** (rank - 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.rand(shape, dtype=torch.cfloat) / width**2) for _ in range(corners)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(-self.rank, 0))
        ft = torch.fft.rfftn(x, dim=dims)
        out = torch.zeros(x.shape[0], self.width, *ft.shape[2:], dtype=torch.cfloat, device=x.device)
        letters = "xyz"[: self.rank]
        for corner, weight in enumerate(self.weights):
            place = tuple(
                slice(-self.modes, None) if corner >> dim & 1 else slice(None, self.modes)
                for dim in range(self.rank - 1)
            ) + (slice(None, self.modes),)
            place = (slice(None), slice(None), *place)
            out[place] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", ft[place], weight)
        return torch.fft.irfftn(out, s=x.shape[2:], dim=dims)


class Operator(nn.Module):
    """A Fourier neural operator."""

    def __init__(self, width: int, modes: int, rank: int, layers: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.lift, self.project = (
            nn.Linear(3, width),
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, 1)),
        )
        self.spectral = nn.ModuleList(SpectralConv(width, modes, rank) for _ in range(layers))
        self.local = nn.ModuleList(conv(width, width, 1) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x).movedim(-1, 1)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x.movedim(1, -1))


def _operator(s: Sizes, rank: int) -> Any:
    side = {1: s["length"], 2: s["side"], 3: min(s["side"], 32)}[rank]
    width, modes = min(s["width"], (64, 48, 20)[rank - 1]), min(s["modes"], side // 2)
    batch = min(s["batch"], (64, 16, 4)[rank - 1])
    grid = [side] * rank
    model = Operator(width, modes, rank, s["layers"])
    return model, _batch([batch, *grid, 3], [batch, *grid, 1]), _regression


@training
def fno1d(s: Sizes) -> Any:
    return _operator(s, 1)


@training
def fno2d(s: Sizes) -> Any:
    return _operator(s, 2)


@training
def fno3d(s: Sizes) -> Any:
    return _operator(s, 3)


class FourierMixing(nn.Module):
    """FNet: a transform over words and features in place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.two(x + self.feed(x))


@training
def fnet(s: Sizes) -> Any:
    model = Stack([FourierMixing(s["width"]) for _ in range(s["layers"])], 3, s["width"], 10, last=True)
    return model, _batch([s["batch"], s["length"], 3], [s["batch"], 10]), _regression


class GlobalFilter(nn.Module):
    """GFNet: a learned filter in the frequencies of an image."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.randn(side, side // 2 + 1, width, 2) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        x = x.view(b, self.side, self.side, c)
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(x, s=(self.side, self.side), dim=(1, 2), norm="ortho").reshape(b, n, c)


@training
def gfnet(s: Sizes) -> Any:
    side, width = max(4, s["side"] // 4), s["width"]
    layers: list[nn.Module] = [
        nn.Sequential(GlobalFilter(width, side), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(s["layers"])
    ]
    model = Stack(layers, 3, width, 10, last=True)
    return model, _batch([s["batch"], side * side, 3], [s["batch"], 10]), _regression


class ComplexNet(nn.Module):
    """A network whose weights and activations are complex."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [width] * layers + [10]
        self.layers = nn.ModuleList(
            nn.Linear(width, size, dtype=torch.cfloat, bias=place % 2 == 0) for place, size in enumerate(sizes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
            x = torch.complex(F.relu(x.real), F.relu(x.imag))
        return self.layers[-1](x).abs()


@training
def complex_mlp(s: Sizes) -> Any:
    width = 4 * s["width"]
    draw = lambda: (torch.randn(s["batch"] * 8, width, dtype=torch.cfloat), torch.randn(s["batch"] * 8, 10))  # noqa: E731
    return ComplexNet(width, s["layers"]), draw, _regression


class ComplexConv(nn.Module):
    """Images of complex numbers, as in MRI: two real convolutions for one complex, in k-space and back."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [1] + [width] * layers
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, dtype=torch.cfloat)
            for before, after in zip(sizes, sizes[1:], strict=False)
        )
        self.last = nn.Conv2d(2 * width, 1, 1)

    def forward(self, k: torch.Tensor) -> torch.Tensor:
        x = torch.fft.ifft2(k, norm="ortho")
        for layer in self.layers:
            x = layer(x)
            x = x * torch.sigmoid(x.abs())
        return self.last(torch.view_as_real(x).permute(0, 4, 1, 2, 3).flatten(1, 2))


@training
def mri(s: Sizes) -> Any:
    width, batch = min(s["width"], 32), min(s["batch"], 16)
    side = s["side"]
    draw = lambda: (torch.randn(batch, 1, side, side, dtype=torch.cfloat), torch.randn(batch, 1, side, side))  # noqa: E731
    return ComplexConv(width, min(s["layers"], 3)), draw, _regression


class Denoiser(nn.Module):
    """Speech: a mask on the spectrogram, and back to the wave."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window_length = window
        self.register_buffer("window", torch.hann_window(window))
        bins = window // 2 + 1
        self.rnn = nn.GRU(bins, width, batch_first=True)
        self.mask = nn.Linear(width, 2 * bins)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        hop = self.window_length // 4
        spec = torch.stft(wave, self.window_length, hop, window=self.window, return_complex=True)
        mask = self.mask(self.rnn(torch.log1p(spec.abs()).transpose(1, 2))[0])
        real, imaginary = mask.transpose(1, 2).chunk(2, 1)
        return torch.istft(spec * torch.complex(real, imaginary), self.window_length, hop, window=self.window,
                           length=wave.shape[-1])  # fmt: skip


def _spectral_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Several resolutions of short-time transforms."""
    out, loss = model(x), torch.zeros((), device=x.device)
    for window in (256, 512, 1024):
        shape = torch.hann_window(window, device=x.device)
        a = torch.stft(out, window, window // 4, window=shape, return_complex=True).abs()
        b = torch.stft(y, window, window // 4, window=shape, return_complex=True).abs()
        loss = loss + F.l1_loss(a, b) + torch.norm(b - a) / torch.norm(b)
    return loss


@training
def denoiser(s: Sizes) -> Any:
    length = 16 * s["length"]
    return Denoiser(s["width"], s["window"]), _batch([s["batch"], length], [s["batch"], length]), _spectral_loss


class Vocoder(nn.Module):
    """Convolutions over a wave."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 7, padding=3),
            *[
                nn.Sequential(nn.LeakyReLU(0.1), nn.Conv1d(width, width, 3, padding=3**i, dilation=3**i))
                for i in range(min(layers, 4))
            ],
            nn.Conv1d(width, 1, 7, padding=3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.unsqueeze(1)).squeeze(1)


@training
def vocoder(s: Sizes) -> Any:
    length, batch = 8 * s["length"], min(s["batch"], 16)
    return Vocoder(min(s["width"], 64), s["layers"]), _batch([batch, length], [batch, length]), _spectral_loss


class Orthogonal(nn.Module):
    """A recurrent network with an orthogonal matrix, by a parametrization of PyTorch."""

    def __init__(self, width: int, kind: str, steps: int) -> None:
        super().__init__()
        self.recurrent = nn.utils.parametrizations.orthogonal(nn.Linear(width, width, bias=False), orthogonal_map=kind)
        self.inputs, self.out, self.steps = nn.Linear(3, width), nn.Linear(width, 10), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], self.recurrent.in_features, device=x.device)
        with nn.utils.parametrize.cached():
            for step in range(self.steps):
                state = torch.tanh(self.recurrent(state) + self.inputs(x[:, step]))
        return self.out(state)


@training
def orthogonal(s: Sizes) -> Any:
    steps = min(s["length"], 50)
    model = Orthogonal(s["width"], s["map"], steps)
    return model, _batch([s["batch"], steps, 3], [s["batch"], 10]), _regression


class GaussianProcess(nn.Module):
    """The marginal likelihood of an exact Gaussian process."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        covariance = torch.exp(-0.5 * torch.cdist(x, x).square() / self.length.exp() ** 2)
        covariance = covariance + (self.noise.exp() + 1e-4) * torch.eye(len(x), device=x.device)
        factor = torch.linalg.cholesky(covariance)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), factor)
        return 0.5 * (y @ alpha.squeeze(-1)) + factor.diagonal().log().sum()


@training
def gaussian_process(s: Sizes) -> Any:
    count = s["points"]
    return GaussianProcess(), _batch([count, 8], [count]), lambda model, x, y: model(x, y)


class Whitening(nn.Module):
    """Features decorrelated by a decomposition of their covariance."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1) + 1e-2 * torch.eye(z.shape[1], device=z.device)
        if self.how == "eigh":
            values, vectors = torch.linalg.eigh(covariance)
            return z @ vectors * values.rsqrt()
        if self.how == "cholesky":
            return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), z.T, upper=False).T
        return z @ torch.linalg.inv(covariance)


@training
def whitening(s: Sizes) -> Any:
    model, width = Whitening(s["width"], s["how"]), s["width"]
    return model, _batch([s["batch"] * 16, 64], [s["batch"] * 16, width]), _regression


@training
def nuclear(s: Sizes) -> Any:
    """A low-rank penalty: singular values of the weights."""
    width = min(s["width"] * 2, 300)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = sum(torch.linalg.matrix_norm(layer.weight, "nuc") for layer in model if isinstance(layer, nn.Linear))
        return F.mse_loss(model(x), y) + 1e-3 * penalty

    return model, _batch([s["batch"] * 16, 64], [s["batch"] * 16, 10]), loss


@training
def lazy_cnn(s: Sizes) -> Any:
    width, side = min(s["width"], 64), s["side"]
    model = nn.Sequential(
        nn.LazyConv2d(width, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.MaxPool2d(2),
        nn.LazyConv2d(2 * width, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.LazyLinear(s["width"]), nn.ReLU(), nn.LazyLinear(10),
    )  # fmt: skip
    return model, _batch([s["batch"], 3, side, side], [s["batch"], 10]), _regression


class Attention(nn.Module):
    """Attention between complex vectors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Parameter(torch.randn(3, width, width, dtype=torch.cfloat) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = torch.einsum("bnc,kcd->kbnd", x, self.qkv).unflatten(-1, (self.heads, -1)).transpose(2, 3)
        weights = torch.softmax((q @ k.mH).real / math.sqrt(c), -1)
        return x + torch.einsum("bhnm,bhmd->bhnd", weights.to(v.dtype), v).transpose(1, 2).reshape(b, n, c)


class ComplexTransformer(nn.Module):
    """Layers of complex attention on a spectrum."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, width)
        self.layers = nn.ModuleList(Attention(width, 4) for _ in range(layers))
        self.out = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(self.inputs(x), dim=1, norm="ortho")
        for layer in self.layers:
            z = layer(z)
        z = torch.fft.ifft(z, dim=1, norm="ortho").mean(1)
        return self.out(torch.view_as_real(z).flatten(1))


@training
def complex_attention(s: Sizes) -> Any:
    width, length = s["width"] // 4 * 4, min(s["length"], 400)
    model = ComplexTransformer(width, s["layers"])
    return model, _batch([s["batch"], length, 3], [s["batch"], 10]), _regression


def draw(count: int, seed: int) -> list[tuple[str, Sizes]]:
    """So many trainings, each kind in turn."""
    chance, drawn = random.Random(seed), []
    names = list(TRAININGS)
    chance.shuffle(names)
    for place in range(count):
        sizes = {
            "batch": chance.choice([4, 8, 16, 32, 50, 64]),
            "width": chance.choice([32, 48, 64, 100, 128, 200, 256]),
            "length": chance.choice([256, 500, 784, 1024, 2000, 4096]),
            "states": chance.choice([16, 32, 64]),
            "layers": chance.randint(1, 5),
            "side": chance.choice([32, 48, 64, 85, 128]),
            "modes": chance.choice([4, 8, 12, 16]),
            "window": chance.choice([256, 400, 512]),
            "map": chance.choice(["matrix_exp", "cayley", "householder"]),
            "how": chance.choice(["eigh", "cholesky", "inv"]),
            "points": chance.choice([300, 1000, 2000, 3500]),
            "optimizer": chance.choice(["Adam", "AdamW", "SGD", "Adam", "RMSprop", "Adagrad"]),
        }
        drawn.append((names[place % len(names)], sizes))
    return drawn


def train(name: str, sizes: Sizes) -> None:
    """Three steps on "cuda"."""
    torch.manual_seed(0)
    model, batch, loss_of = TRAININGS[name](sizes)
    model = model.cuda()
    optimizer = None
    for _ in range(STEPS):
        given = [tensor.cuda() for tensor in batch()]
        if optimizer is None:
            if name == "lazy_cnn":
                with torch.no_grad():
                    model(given[0])
            optimizer = getattr(torch.optim, sizes["optimizer"])(model.parameters(), lr=1e-4)
        optimizer.zero_grad()
        loss = loss_of(model, *given)
        loss.backward()
        optimizer.step()


def measure(count: int, seed: int, part: tuple[int, int], out: Path) -> None:
    """Write a line for each training, which is run in a process of its own."""
    end = time.monotonic() + float(os.environ.get("SECONDS_LEFT", "1e9"))
    for name, sizes in draw(count, seed)[part[0] - 1 :: part[1]]:
        if time.monotonic() > end:
            print("out of time", flush=True)
            return
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            from pytorch_lists import recorded  # a sibling

            with recorded() as events:
                train(name, sizes)
            result: Any = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "events": events,
            }
        except Exception as error:
            result = f"{type(error).__name__}: {str(error)[:300]}"
        with gzip.open(out, "at") as file:
            file.write(json.dumps([name, sizes, result]) + "\n")
        os._exit(0)


def compare(file: Path, show: bool) -> None:
    """Print how far the estimates are off."""
    sys.path[:0] = [str(ROOT / "src")]
    import ullage

    off, held = [], 0
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for name, sizes, real in rows:
        if isinstance(real, str):
            print(name, sizes, real)
            continue
        with ullage.virtual_gpu("H200") as gpu:
            try:
                train(name, sizes)
            except Exception as error:
                print(f"{name:20} {type(error).__name__}: {error}")
                continue
        reserved = gpu.peak_reserved / real["reserved"] - 1
        allocated = gpu.peak_allocated / real["allocated"] - 1
        off.append(abs(reserved))
        held += gpu.upper - gpu.context >= real["reserved"]
        print(
            f"{name:20} {real['reserved'] / 2**20:9.0f} MiB  reserved {reserved:+8.2%}  allocated {allocated:+8.2%}  "
            f"{gpu.assumed or ''}"
        )
    off.sort()
    if off:
        print(
            f"{len(off)} of {len(rows)}: median {statistics.median(off):.2%}, 90th percentile "
            f"{off[min(len(off) - 1, int(0.9 * len(off)))]:.2%}, upper held for {held}"
        )


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--count", type=int, default=20)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--part", default="1/1")
    measuring.add_argument("--out", type=Path, default=Path("complex_h200.jsonl.gz"))
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        first, parts = map(int, given.part.split("/"))
        measure(given.count, given.seed, (first, parts), given.out)
    else:
        compare(given.file, False)


if __name__ == "__main__":
    main()
