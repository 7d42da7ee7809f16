"""Calls of recurrent networks: drawn at random, and run the same way on a real GPU and on a virtual one.

`benchmarks/accuracy/operators.py` measures them and tests compare with what it measured, so this file needs
PyTorch only.
"""

import random
from typing import NamedTuple

import torch
from torch import nn

CLASSES = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Call(NamedTuple):
    """A module and what it is applied to; a row of a measured file begins with this list."""

    kind: str
    inputs: int
    hidden: int
    layers: int
    both: bool  # directions
    batch_first: bool
    dtype: str
    dropout: float
    steps: int
    batch: int
    train: bool
    projected: int
    packed: bool
    autocast: str
    bias: bool
    grad: bool
    grad_input: bool
    states: bool  # whether the first state is given


def _width(chance):
    """Mostly widths that people choose, some odd ones."""
    unit = chance.choice([64, 64, 8, 8, 1])
    return unit * chance.randint(1, 1024 // unit)


def draw(count, seed):
    """So many different calls; none is chosen by what the rules say of it."""
    chance, calls = random.Random(seed), set()
    while len(calls) < count:
        kind, layers = chance.choice(list(CLASSES)), chance.randint(1, 4)
        hidden = _width(chance)
        dtype = chance.choice(["torch.float32", "torch.float32", "torch.float16", "torch.bfloat16"])
        mixed = dtype == "torch.float32" and chance.random() < 0.2
        train = chance.random() < 0.85
        projects = kind == "LSTM" and hidden > 1 and chance.random() < 0.15
        calls.add(
            Call(
                kind=kind,
                inputs=_width(chance),
                hidden=hidden,
                layers=layers,
                both=chance.random() < 0.3,
                batch_first=chance.random() < 0.5,
                dtype=dtype,
                dropout=chance.choice([0.0, 0.0, 0.2, 0.5]) if layers > 1 else 0.0,
                steps=chance.randint(2, 120),
                batch=chance.randint(1, 128),
                train=train,
                projected=chance.randint(1, hidden - 1) if projects else 0,
                packed=chance.random() < 0.2,
                autocast=chance.choice(["torch.float16", "torch.bfloat16"]) if mixed else "None",
                bias=chance.random() < 0.9,
                grad=train,
                grad_input=chance.random() < 0.8,
                states=chance.random() < 0.2,
            )
        )
    return sorted(calls)


def _type(name):
    return getattr(torch, name.removeprefix("torch."))


def _module(call):
    options = {"proj_size": call.projected} if call.projected else {}
    made = CLASSES[call.kind](
        call.inputs,
        call.hidden,
        call.layers,
        bidirectional=call.both,
        batch_first=call.batch_first,
        dropout=call.dropout,
        bias=call.bias,
        **options,
    )
    return made.cuda().to(_type(call.dtype)).train(call.train)


def run(call, record):
    """One training step (or a pass without gradients) under `record()`, after one that is not recorded."""
    model, own = _module(call), _type(call.dtype)
    cast = None if call.autocast == "None" else _type(call.autocast)
    size = (call.batch, call.steps) if call.batch_first else (call.steps, call.batch)
    source = torch.randn((*size, call.inputs), device="cuda", dtype=own if cast is None else torch.float32)
    source.requires_grad_(call.grad and call.grad_input)

    def step():
        given, state = source, ()
        if call.states:
            rows = call.layers * (2 if call.both else 1)
            state = (torch.zeros(rows, call.batch, call.projected or call.hidden, device="cuda", dtype=own),)
            if call.kind == "LSTM":
                state = ((*state, torch.zeros(rows, call.batch, call.hidden, device="cuda", dtype=own)),)
        if call.packed:
            lengths = torch.linspace(call.steps, call.steps // 2, call.batch).long()
            given = nn.utils.rnn.pack_padded_sequence(source, lengths, batch_first=call.batch_first)
        with torch.autocast("cuda", dtype=cast, enabled=cast is not None), torch.set_grad_enabled(call.grad):
            out = model(given, *state)
        if call.grad:
            values = out[0].data if call.packed else out[0]
            (values if values.dtype is torch.float32 else values.float()).sum().backward()

    step()  # libraries take their workspaces, and dropout its state, at first use
    source.grad = None
    model.zero_grad(set_to_none=True)
    with record() as events:
        step()
    return events


def peak_of(events):
    """The most bytes that a step's requests take at once, rounded as the allocator does."""
    sizes = [-(-size // 512) * 512 for size in events if size >= 0]
    taken = most = number = 0
    for event in events:
        taken += sizes[number] if event >= 0 else -sizes[-1 - event]
        number += event >= 0
        most = max(most, taken)
    return most
