"""Scripts with streams of their own and CUDA graphs by hand."""

import random
import textwrap

from drawn_scripts.parts import Part, Script, anything, convolutions, gpt, images, perceptron, unet, usual

_PREFETCHER = {
    "timm": '''
    class Prefetcher:
        """Copies the next batch on a stream of its own while the model computes."""

        def __init__(self, loader, device):
            self.loader, self.device = loader, device

        def __iter__(self):
            stream, first = torch.cuda.Stream(device=self.device), True
            for next_inputs, next_targets in self.loader:
                with torch.cuda.stream(stream):
                    next_inputs = next_inputs.to(self.device, non_blocking=True)
                    next_targets = next_targets.to(self.device, non_blocking=True)
                    {change}
                if not first:
                    yield inputs, targets
                else:
                    first = False
                torch.cuda.current_stream(device=self.device).wait_stream(stream)
                inputs, targets = next_inputs, next_targets
            yield inputs, targets
    ''',
    "apex": '''
    class Prefetcher:
        """Keeps one batch ahead; the tensors are marked as used by the main stream."""

        def __init__(self, loader, device):
            self.loader, self.device = iter(loader), device
            self.stream = torch.cuda.Stream()
            self.preload()

        def preload(self):
            self.next_inputs, self.next_targets = next(self.loader, (None, None))
            if self.next_inputs is None:
                return
            with torch.cuda.stream(self.stream):
                next_inputs = self.next_inputs.cuda(non_blocking=True)
                next_targets = self.next_targets.cuda(non_blocking=True)
                {change}
                self.next_inputs, self.next_targets = next_inputs, next_targets

        def __iter__(self):
            while self.next_inputs is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                inputs, targets = self.next_inputs, self.next_targets
                inputs.record_stream(torch.cuda.current_stream())
                targets.record_stream(torch.cuda.current_stream())
                self.preload()
                yield inputs, targets
    ''',
}


def streams(chance: random.Random, number: int) -> str:
    """One of the kinds."""
    kinds = (_prefetched, _graphed_step, _branches, _callables, _offloaded, _prefetched, _average, _graphed_parts,
             _evaluated, _reported)  # fmt: skip
    return kinds[number % len(kinds)](chance)


def _prefetched(chance: random.Random) -> str:
    part = anything(chance)
    script = usual(chance, "Copies batches ahead on a stream of its own.", part)
    script.pin = True
    floats = "randn" in part.inputs
    change = chance.choice(
        ("next_inputs = next_inputs.sub_(0.5).div_(0.25)", "next_inputs = (next_inputs - 0.5) / 0.25")
    )
    if not floats:
        change = "next_targets = next_targets.clone()"
    kind = chance.choice(list(_PREFETCHER))
    script.definitions.append(_PREFETCHER[kind].replace("{change}", change))
    script.loader, script.to_device = "Prefetcher(loader, device)", []
    return script.text()


def _branches(chance: random.Random) -> str:
    """Two towers, each on its stream."""
    width, batch, depth = chance.choice((256, 512, 1024)), chance.choice((256, 1024, 4096)), chance.randint(2, 5)
    definitions = f"""
    def tower(before, width={width}, depth={depth}):
        layers = [nn.Linear(before, width), nn.GELU()]
        for _ in range(depth):
            layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*layers)


    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = tower(64), tower(64)
            self.stream = torch.cuda.Stream()

        def forward(self, x):
            main = torch.cuda.current_stream()
            self.stream.wait_stream(main)
            with torch.cuda.stream(self.stream):
                right = self.right(x[:, 64:])
            left = self.left(x[:, :64])
            main.wait_stream(self.stream)
            {chance.choice(("right.record_stream(main)", "x.record_stream(self.stream)"))}
            return left @ right.t() / {width}
    """
    part = Part(
        "Towers()", batch, "torch.randn(batch, 128)", "torch.arange(batch)",
        "nn.functional.cross_entropy(output, torch.arange(len(output), device=device))", definitions=definitions,
    )  # fmt: skip
    return usual(chance, "Two towers on two streams.", part, precisions=("fp32", "tf32", "amp_bf16")).text()


def _graphable(chance: random.Random) -> Part:
    return chance.choices((gpt, perceptron, convolutions, unet, images), (4, 2, 2, 1, 3))[0](chance)


def _static(part: Part) -> str:
    return f"batch = {part.batch}\n    inputs = {part.inputs}.to(device)\n    targets = {part.targets}.to(device)"


def _graphed_step(chance: random.Random) -> str:
    part = _graphable(chance)
    autocast = chance.choice((True, False))
    context = 'torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)' if autocast else "nullcontext()"
    optimizer = chance.choice(
        (
            "torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True, fused=True)",
        )  # fmt: skip
    )
    warm = chance.choice((3, 5, 11))
    script = Script("Captures the whole step in a CUDA graph.", part, imports=["from contextlib import nullcontext"])
    script.whole = textwrap.dedent(f'''\
    device = torch.device("cuda")
    model = {part.model}.to(device)
    optimizer = {optimizer}
    {_static(part)}

    def step():
        with {context}:
            output = {part.forward}
            loss = {part.loss}
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range({warm}):
            optimizer.zero_grad(set_to_none=True)
            step()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
        optimizer.step()
    for _ in range(8):
        inputs.copy_({part.inputs})
        targets.copy_({part.targets})
        graph.replay()
    print(loss.item())
    ''')  # fmt: skip
    return script.text()


def _graphed_parts(chance: random.Random) -> str:
    """Forward and backward in a graph, the optimizer outside."""
    part = _graphable(chance)
    zero = chance.choice(("model.zero_grad(set_to_none=False)", "optimizer.zero_grad(set_to_none=False)"))
    pool = chance.choice((True, False))
    optimizer = chance.choice(
        ("torch.optim.AdamW(model.parameters(), lr=1e-3)", "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)")
    )
    script = Script("Captures forward and backward passes of two batch sizes in CUDA graphs.", part)
    script.whole = textwrap.dedent(f'''\
    device = torch.device("cuda")
    model = {part.model}.to(device)
    optimizer = {optimizer}

    def capture(batch, pool):
        inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                output = {part.forward}
                loss = {part.loss}
                loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            {zero}
            output = {part.forward}
            loss = {part.loss}
            loss.backward()
        return graph, inputs, targets, loss

    large = capture({part.batch}, None)
    small = capture({max(1, part.batch // 2)}, {"large[0].pool()" if pool else "None"})
    for number in range(8):
        graph, inputs, targets, loss = large if number % 2 == 0 else small
        batch = len(inputs)
        inputs.copy_({part.inputs})
        targets.copy_({part.targets})
        graph.replay()
        optimizer.step()
    print(loss.item())
    ''')  # fmt: skip
    return script.text()


def _callables(chance: random.Random) -> str:
    part = chance.choice((gpt, perceptron, convolutions))(chance)
    optimizer = chance.choice(
        ("torch.optim.AdamW(model.parameters(), lr=1e-3)", "torch.optim.SGD(model.parameters(), lr=0.1)")
    )
    script = Script("Makes a graphed callable of the model.", part)
    script.whole = textwrap.dedent(f'''\
    device = torch.device("cuda")
    model = {part.model}.to(device)
    {_static(part)}
    model = torch.cuda.make_graphed_callables(model, (inputs,))
    optimizer = {optimizer}
    for number in range(8):
        inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)
        optimizer.zero_grad()
        output = {part.forward}
        loss = {part.loss}
        loss.backward()
        optimizer.step()
    print(loss.item())
    ''')  # fmt: skip
    return script.text()


def _offloaded(chance: random.Random) -> str:
    part = chance.choice((gpt, unet, images))(chance)
    script = usual(
        chance, "Keeps activations in pinned memory of the host.", part, precisions=("fp32", "tf32", "amp_bf16")
    )
    script.part = part
    pinned = chance.choice(("True", "False"))
    script.after_model += [
        "forward = model.forward",
        "",
        "def offloaded(*args, **kwargs):",
        f"    with torch.autograd.graph.save_on_cpu(pin_memory={pinned}):",
        "        return forward(*args, **kwargs)",
        "",
        "model.forward = offloaded",
    ]
    script.accumulate = 1
    return script.text()


def _average(chance: random.Random) -> str:
    """An average of the weights, updated on a stream of its own."""
    part = anything(chance)
    script = usual(chance, "Averages the weights on a stream of its own.", part)
    script.imports.append("import copy")
    script.after_optimizer += [
        "average = copy.deepcopy(model).eval().requires_grad_(False)",
        f"side = torch.cuda.Stream({chance.choice(('', 'priority=-1'))})",
    ]
    keep = chance.choice(("torch._foreach_lerp_(old, new, 0.01)", "torch._foreach_mul_(old, 0.99)\n    "
                          "    torch._foreach_add_(old, new, alpha=0.01)"))  # fmt: skip
    script.after_step += [
        "side.wait_stream(torch.cuda.current_stream())",
        "with torch.cuda.stream(side), torch.no_grad():",
        "    old, new = list(average.parameters()), [p.detach().clone() for p in model.parameters()]",
        *("    " + line.strip() for line in keep.splitlines()),
        "torch.cuda.current_stream().wait_stream(side)",
    ]
    return script.text()


def _evaluated(chance: random.Random) -> str:
    """Trains as usual, then evaluates by a graph."""
    part = chance.choice((gpt, perceptron, convolutions, images))(chance)
    script = usual(chance, "Trains, then evaluates by a CUDA graph.", part, precisions=("fp32", "tf32"))
    factor = chance.choice((1, 2, 4))
    script.at_end = [
        "model.eval()",
        f"batch = {part.batch * factor}",
        f"inputs, targets = {part.inputs}.to(device), {part.targets}.to(device)",
        "side = torch.cuda.Stream()",
        "side.wait_stream(torch.cuda.current_stream())",
        "with torch.no_grad(), torch.cuda.stream(side):",
        "    for _ in range(2):",
        f"        output = {part.forward}",
        "torch.cuda.current_stream().wait_stream(side)",
        "graph = torch.cuda.CUDAGraph()",
        "with torch.no_grad(), torch.cuda.graph(graph):",
        f"    output = {part.forward}",
        "for _ in range(3):",
        f"    inputs.copy_({part.inputs})",
        "    graph.replay()",
        "torch.cuda.synchronize()",
    ]
    return script.text()


def _reported(chance: random.Random) -> str:
    """Outputs copied to the host by another stream while training goes on."""
    part = chance.choice((gpt, unet, images, perceptron))(chance)
    script = usual(chance, "Copies outputs to the host on a stream of its own.", part)
    script.after_optimizer += ["side, reports = torch.cuda.Stream(), []"]
    script.after_step += [
        "side.wait_stream(torch.cuda.current_stream())",
        "with torch.cuda.stream(side):",
        f"    kept = output.detach(){chance.choice(('', '.float()', '.softmax(1)'))}",
        "    reports.append(kept.to('cpu', non_blocking=True))",
        f"    {chance.choice(('kept', 'output'))}.record_stream(side)",
    ]
    script.at_end = ["side.synchronize()", "print(len(reports), reports[-1].shape)"]
    return script.text()
