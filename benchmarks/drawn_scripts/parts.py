"""What the scripts are put together from: models with their data and loss, precisions, optimizers."""

import random
import textwrap
from dataclasses import dataclass, field, replace

TORCHVISION = (
    "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "mnasnet1_0", "vgg11_bn", "efficientnet_b0", "efficientnet_b1", "regnet_y_400mf",
    "regnet_x_800mf", "shufflenet_v2_x1_0", "densenet121", "squeezenet1_1", "alexnet", "convnext_tiny",
)  # fmt: skip
TIMM = (
    "resnet26d", "ecaresnet26t", "resnetrs50", "res2net50_26w_4s", "skresnet18", "nf_resnet26", "cspresnet50",
    "seresnext26t_32x4d", "dla34", "convnextv2_atto", "convnext_pico", "mobilevit_xs", "mobilevitv2_050",
    "edgenext_x_small", "ghostnetv2_100", "hardcorenas_a", "mixnet_s", "tf_mobilenetv3_small_075", "repvgg_a0",
    "rexnet_100", "regnetz_b16", "selecsls42b", "poolformer_s12", "fastvit_t8", "mobileone_s0", "hrnet_w18_small",
    "dpn48b", "darknet53", "lcnet_100", "tinynet_a", "efficientnet_es", "fbnetc_100", "xception41",
    "inception_next_atto",
)  # fmt: skip
PATCHES = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224", "mixer_s32_224", "gmlp_ti16_224",
    "resmlp_12_224", "levit_128s", "vit_small_patch32_224", "pvt_v2_b0", "coat_lite_tiny",
)  # fmt: skip
CAUSAL = {  # a configuration of transformers, and what it calls its sizes
    "LlamaConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "Qwen2Config": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "Qwen3Config": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "MistralConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "GPTNeoXConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "GPT2Config": ("n_embd", "n_layer", "n_head", "n_inner"),
    "OPTConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"),
}
MASKED = {
    "BertConfig": CAUSAL["LlamaConfig"],
    "RobertaConfig": CAUSAL["LlamaConfig"],
    "ElectraConfig": CAUSAL["LlamaConfig"],
    "DistilBertConfig": ("dim", "n_layers", "n_heads", "hidden_dim"),
}
PIXELS = 24 * 224 * 224  # the most of a batch


@dataclass(frozen=True)
class Part:
    """A model with its data: pieces of a script. Data are the tensors of one batch, by expressions with `batch`."""

    model: str
    batch: int
    inputs: str
    targets: str
    loss: str = "nn.functional.cross_entropy(output, targets)"
    forward: str = "model(inputs)"
    imports: tuple[str, ...] = ()
    definitions: str = ""
    blocks: str = "model.children()"  # what FSDP wraps, one by one

    def with_model(self, model: str) -> "Part":
        return replace(self, model=model)


def images(chance: random.Random, *, most: int = PIXELS, patches: bool = True) -> Part:
    """A model of torchvision or timm on random images."""
    kind = chance.choices(("torchvision", "timm", "patches"), (4, 4, 2 if patches else 0))[0]
    classes = chance.choice((10, 37, 100, 1000))
    if kind == "torchvision":
        name = chance.choice(TORCHVISION)
        made, imports = f"torchvision.models.{name}(num_classes={classes})", ("import torchvision",)
    else:
        name = chance.choice(TIMM if kind == "timm" else PATCHES)
        made, imports = f'timm.create_model("{name}", num_classes={classes})', ("import timm",)
    side = 224 if kind == "patches" else chance.choice((96, 128, 160, 176, 192, 224, 256))
    batch = max(2, min(chance.choice((4, 6, 8, 12, 16, 20, 24, 32, 48, 64)), most // side**2))
    return Part(
        made, batch, f"torch.randn(batch, 3, {side}, {side})", f"torch.randint({classes}, (batch,))", imports=imports
    )


def convolutions(chance: random.Random) -> Part:
    """A convolutional network written in the script: in one, two or three dimensions."""
    dimensions = chance.choices((1, 2, 3), (2, 5, 2))[0]
    width, depth = chance.choice((16, 24, 32, 48, 64)), chance.randint(2, 5)
    kernel = chance.choice((3, 3, 5, 7) if dimensions < 3 else (3,))
    norm = chance.choice((f"nn.BatchNorm{dimensions}d(after)", "nn.GroupNorm(8, after)"))
    act = chance.choice(("nn.ReLU(inplace=True)", "nn.GELU()", "nn.SiLU()", "nn.LeakyReLU(0.1)"))
    side = {1: chance.choice((1024, 4000, 8192)), 2: chance.choice((64, 96, 128)), 3: chance.choice((16, 24, 32))}
    size = (side[dimensions],) * dimensions
    channels, classes = chance.choice((1, 3, 4)), chance.choice((2, 10, 50))
    stride = "2 if i % 2 else 1"
    definitions = f"""
    class Net(nn.Module):
        def __init__(self, channels={channels}, width={width}, depth={depth}, classes={classes}):
            super().__init__()
            layers, before = [], channels
            for i in range(depth):
                after = width * 2 ** (i // 2)
                layers += [
                    nn.Conv{dimensions}d(before, after, {kernel}, stride={stride}, padding={kernel // 2}),
                    {norm},
                    {act},
                ]
                before = after
            self.features = nn.Sequential(*layers)
            self.head = nn.Linear(before, classes)

        def forward(self, x):
            return self.head(self.features(x).flatten(2).mean(-1))
    """
    batch = chance.choice((4, 8, 16, 24, 32))
    inputs = f"torch.randn(batch, {', '.join(map(str, (channels, *size)))})"
    return Part("Net()", batch, inputs, f"torch.randint({classes}, (batch,))", definitions=definitions)


def unet(chance: random.Random) -> Part:
    """A U-Net that labels pixels."""
    width, depth, classes = chance.choice((16, 24, 32, 48)), chance.randint(2, 4), chance.choice((1, 2, 21))
    up = chance.choice((True, False))
    rise = (
        "nn.Sequential(nn.Upsample(scale_factor=2, mode='bilinear'), nn.Conv2d(n * 2, n, 1))"
        if up
        else "nn.ConvTranspose2d(n * 2, n, 2, stride=2)"
    )
    definitions = f"""
    def double(before, after):
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        )


    class UNet(nn.Module):
        def __init__(self, width={width}, depth={depth}, classes={classes}):
            super().__init__()
            sizes = [width * 2**i for i in range(depth + 1)]
            self.first = double(3, width)
            self.down = nn.ModuleList(double(n, n * 2) for n in sizes[:-1])
            self.rise = nn.ModuleList({rise} for n in reversed(sizes[:-1]))
            self.up = nn.ModuleList(double(n * 2, n) for n in reversed(sizes[:-1]))
            self.out = nn.Conv2d(width, classes, 1)

        def forward(self, x):
            kept = [self.first(x)]
            for block in self.down:
                kept.append(block(nn.functional.max_pool2d(kept[-1], 2)))
            x = kept.pop()
            for rise, block in zip(self.rise, self.up):
                x = block(torch.cat([rise(x), kept.pop()], 1))
            return self.out(x)
    """
    batch, side = chance.choice((2, 4, 6, 8)), chance.choice((96, 128, 160, 192))
    pixels = f"(batch, {side}, {side})"
    if classes == 1:
        targets = f"torch.rand{pixels}.round()"
        loss = "nn.functional.binary_cross_entropy_with_logits(output.squeeze(1), targets)"
    else:
        targets, loss = f"torch.randint({classes}, {pixels})", "nn.functional.cross_entropy(output, targets)"
    return Part("UNet()", batch, f"torch.randn(batch, 3, {side}, {side})", targets, loss, definitions=definitions)


def language(chance: random.Random, *, most: int = 4096, masked: bool = True) -> Part:
    """A transformer of Hugging Face from a configuration."""
    names = {**CAUSAL, **(MASKED if masked else {})}
    config = chance.choice(list(names))
    hidden, heads = chance.choice(((256, 4), (384, 6), (512, 8), (640, 10), (768, 12)))
    vocabulary, layers = chance.choice((1000, 8192, 16000, 30522)), chance.randint(2, 5)
    length = chance.choice((64, 100, 128, 200, 256, 384, 512))
    batch = max(1, min(chance.choice((2, 3, 4, 6, 8, 12, 16)), most // length))
    sizes = dict(zip(names[config], (hidden, layers, heads, hidden * chance.choice((2, 3, 4))), strict=True))
    if config in ("LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"):
        sizes["num_key_value_heads"] = chance.choice((heads, heads // 2))
    if config in MASKED:
        sizes["max_position_embeddings"] = 600
    if config == "OPTConfig":
        sizes["word_embed_proj_dim"] = hidden
    if config == "Qwen3Config":
        sizes["head_dim"] = hidden // heads
    given = ", ".join(f"{name}={value}" for name, value in {"vocab_size": vocabulary, **sizes}.items())
    auto = "AutoModelForMaskedLM" if config in MASKED else "AutoModelForCausalLM"
    return Part(
        f"{auto}.from_config({config}({given}))",
        batch,
        f"torch.randint({vocabulary}, (batch, {length}))",
        f"torch.randint({vocabulary}, (batch, {length}))",
        "output.loss",
        "model(input_ids=inputs, labels=targets)",
        (f"from transformers import {auto}, {config}",),
    )


def gpt(chance: random.Random, *, checkpoint: bool = False) -> Part:
    """A small GPT written in the script."""
    width, heads = chance.choice(((192, 3), (256, 4), (384, 6), (512, 8), (768, 12)))
    layers, vocabulary = chance.randint(2, 6), chance.choice((256, 5000, 16384, 50304))
    length = chance.choice((64, 128, 192, 256, 512))
    batch = max(1, min(chance.choice((4, 6, 8, 12, 16, 32)), 8192 // length))
    dropout = chance.choice((0.0, 0.0, 0.1))
    norm = chance.choice(("nn.LayerNorm(width)", "nn.RMSNorm(width)"))
    act = chance.choice(("nn.GELU()", "nn.GELU(approximate='tanh')", "nn.SiLU()", "nn.ReLU()"))
    call = "checkpoint(block, x, use_reentrant=False)" if checkpoint else "block(x)"
    definitions = f"""
    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = {norm}, {norm}
            self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), {act}, nn.Linear(4 * width, width))

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
            return x + nn.functional.dropout(self.mlp(self.norm2(x)), {dropout}, self.training)


    class GPT(nn.Module):
        def __init__(self, vocabulary={vocabulary}, length={length}, width={width}, layers={layers}, heads={heads}):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.norm = {norm}
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = {call}
            return self.head(self.norm(x))
    """
    return Part(
        "GPT()",
        batch,
        f"torch.randint({vocabulary}, (batch, {length}))",
        f"torch.randint({vocabulary}, (batch, {length}))",
        "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())",
        imports=("from torch.utils.checkpoint import checkpoint",) if checkpoint else (),
        definitions=definitions,
        blocks="model.blocks",
    )


def perceptron(chance: random.Random) -> Part:
    """A perceptron with residual blocks."""
    width, depth = chance.choice((256, 512, 1000, 1536, 2048)), chance.randint(2, 8)
    features, classes, batch = (
        chance.choice((32, 100, 784)),
        chance.choice((2, 10, 1000)),
        chance.choice((64, 256, 1000)),
    )
    act = chance.choice(("nn.ReLU()", "nn.GELU()", "nn.Tanh()", "nn.Mish()"))
    definitions = f"""
    class Residual(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), {act}, nn.Linear(width, width))

        def forward(self, x):
            return x + self.inner(x)
    """
    model = (
        f"nn.Sequential(nn.Linear({features}, {width}), "
        f"*(Residual({width}) for _ in range({depth})), nn.Linear({width}, {classes}))"
    )
    return Part(
        model, batch, f"torch.randn(batch, {features})", f"torch.randint({classes}, (batch,))", definitions=definitions
    )


def anything(chance: random.Random) -> Part:
    """One of all these."""
    return chance.choices((images, convolutions, unet, language, gpt, perceptron), (4, 1, 2, 4, 3, 1))[0](chance)


@dataclass(frozen=True)
class Precision:
    """How a step computes: flags at the start, the model's type, what surrounds the forward pass, and its scaler."""

    flags: tuple[str, ...] = ()
    dtype: str = ""
    autocast: str = ""
    scaler: bool = False


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(flags=('torch.set_float32_matmul_precision("high")',)),
    "amp_bf16": Precision(autocast='torch.autocast("cuda", dtype=torch.bfloat16)'),
    "amp_fp16": Precision(autocast='torch.autocast("cuda", dtype=torch.float16)', scaler=True),
    "bf16": Precision(dtype="torch.bfloat16"),
}
OPTIMIZERS = (
    "torch.optim.SGD({0}, lr=0.01)",
    "torch.optim.SGD({0}, lr=0.01, momentum=0.9, weight_decay=1e-4)",
    "torch.optim.Adam({0}, lr=1e-3)",
    "torch.optim.AdamW({0}, lr=3e-4, weight_decay=0.1)",
    "torch.optim.AdamW({0}, lr=3e-4, fused=True)",
    "torch.optim.Adam({0}, lr=1e-3, foreach=False)",
    "torch.optim.RMSprop({0}, lr=1e-3)",
)


@dataclass
class Script:
    """A training script as it is being put together; `text` is the whole of it."""

    title: str
    part: Part
    precision: str = "fp32"
    optimizer: str = OPTIMIZERS[3]
    steps: int = 6
    imports: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    before_model: list[str] = field(default_factory=list)
    after_model: list[str] = field(default_factory=list)  # before the optimizer is made
    after_optimizer: list[str] = field(default_factory=list)
    forward: str = ""
    after_step: list[str] = field(default_factory=list)
    at_end: list[str] = field(default_factory=list)
    parameters: str = "model.parameters()"
    to_device: list[str] = field(default_factory=lambda: ["inputs, targets = inputs.to(device), targets.to(device)"])
    loader: str = "loader"
    clip: str = ""
    accumulate: int = 1
    no_sync: str = ""
    drop_last: bool = True
    whole: str = ""  # the main function, where it is not the usual one
    pin: bool = False

    def text(self) -> str:
        """The script."""
        part, precision = self.part, PRECISIONS[self.precision]
        imports = dict.fromkeys(["import torch", "from torch import nn", *part.imports, *self.imports])
        plain = sorted(line for line in imports if line.startswith("import"))
        rest = sorted(line for line in imports if not line.startswith("import"))
        pieces = [f'"""{self.title}"""\n\n' + "\n".join([*plain, *rest])]
        if self.settings or precision.flags:
            pieces.append("\n".join([*self.settings, *precision.flags]))
        for piece in (part.definitions, *self.definitions):
            if piece.strip():
                pieces.append(textwrap.dedent(piece).strip("\n").rstrip())
        pieces.append("def main():\n" + textwrap.indent(self.whole or self._main(precision), "    ").rstrip())
        pieces.append('if __name__ == "__main__":\n    main()')
        return "\n\n\n".join(pieces) + "\n"

    def _main(self, precision: Precision) -> str:
        part = self.part
        moved = f"{part.model}.to(device)" if not precision.dtype else f"{part.model}.to(device, {precision.dtype})"
        floats = precision.dtype and "randn" in part.inputs
        lines = [
            "torch.manual_seed(0)",
            *self.before_model,
            *([] if any("device =" in line for line in self.before_model) else ['device = torch.device("cuda")']),
            f"model = {moved}",
            *self.after_model,
            f"optimizer = {self.optimizer.format(self.parameters)}",
            *(['scaler = torch.amp.GradScaler("cuda")'] if precision.scaler else []),
            *self.after_optimizer,
            f"batch = {part.batch * self.steps + (0 if self.drop_last or part.batch < 4 else part.batch // 2)}",
            f"data = torch.utils.data.TensorDataset({part.inputs}, {part.targets})",
            f"loader = torch.utils.data.DataLoader(data, batch_size={part.batch}, shuffle=True"
            + (", drop_last=True" if self.drop_last else "")
            + (", pin_memory=True" if self.pin else "")
            + ")",
            "model.train()",
        ]
        step = list(self.to_device)
        if floats:
            step.append(f"inputs = inputs.to({precision.dtype})")
        forward = f"output = {self.forward or part.forward}"
        divided = f" / {self.accumulate}" if self.accumulate > 1 else ""
        loss = f"loss = {part.loss}{divided}"
        if precision.dtype and "targets" in part.loss and "cross_entropy" in part.loss:
            loss = loss.replace("(output", "(output.float()", 1)
        if precision.autocast:
            step += [f"with {precision.autocast}:", f"    {forward}", f"    {loss}"]
        else:
            step += [forward, loss]
        backward = "scaler.scale(loss).backward()" if precision.scaler else "loss.backward()"
        update = []
        if self.clip:
            update += (["scaler.unscale_(optimizer)"] if precision.scaler else []) + [self.clip]
        update += ["scaler.step(optimizer)", "scaler.update()"] if precision.scaler else ["optimizer.step()"]
        update.append("optimizer.zero_grad()")
        if self.accumulate > 1:
            body = [*step, backward]
            if self.no_sync:
                body = [
                    f"context = {self.no_sync} if (number + 1) % {self.accumulate} else nullcontext()",
                    "with context:",
                    *("    " + line for line in body),
                ]
            body += [f"if (number + 1) % {self.accumulate} == 0:", *("    " + line for line in update)]
        else:
            body = [*step, backward, *update]
        body += self.after_step
        head = f"for number, (inputs, targets) in enumerate({self.loader}):"
        lines += [head, *("    " + line for line in body), 'print(f"loss {loss.item():.3f}")', *self.at_end]
        return "\n".join(lines)


def usual(chance: random.Random, title: str, part: Part, *, precisions: tuple[str, ...] = ()) -> Script:
    """A script with a precision, an optimizer and habits drawn at random."""
    names = precisions or ("fp32", "fp32", "tf32", "amp_bf16", "amp_bf16", "amp_fp16", "bf16")
    script = Script(title, part, chance.choice(names), chance.choice(OPTIMIZERS), chance.randint(5, 7))
    script.drop_last = chance.random() < 0.8
    script.pin = chance.random() < 0.4
    if chance.random() < 0.25:
        script.clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    if chance.random() < 0.2:
        script.accumulate = 2
        script.steps = 8
    return script
