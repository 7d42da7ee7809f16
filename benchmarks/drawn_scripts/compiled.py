"""Scripts with `torch.compile`."""

import random
from dataclasses import replace

from drawn_scripts.parts import PRECISIONS, Part, convolutions, gpt, language, perceptron, unet, usual


def compiled(chance: random.Random, number: int) -> str:
    """`torch.compile` with its modes."""
    kinds = ("default", "default", "dynamic", "reduce-overhead", "checkpoint", "breaks", "max-autotune-no-cudagraphs",
             "step", "fullgraph", "flex", "optimizer", "blocks", "default")  # fmt: skip
    kind = kinds[number % len(kinds)]
    how = ""
    if kind in ("checkpoint", "blocks"):
        part = gpt(chance, checkpoint=kind == "checkpoint")
    elif kind == "flex":
        part = _flex(chance)
    elif kind in ("max-autotune-no-cudagraphs", "optimizer"):
        part = chance.choice((perceptron, gpt))(chance)
    elif kind == "default":
        part = chance.choice((_small_images, unet, convolutions, language, gpt, perceptron))(chance)
    elif kind in ("dynamic", "reduce-overhead"):
        part = chance.choice((convolutions, perceptron, gpt, gpt))(chance)
    else:
        part = chance.choice((_small_images, convolutions, language, gpt, gpt))(chance)
    precisions = ("amp_bf16", "bf16") if kind == "flex" else ("fp32", "tf32", "amp_bf16", "amp_bf16", "bf16")
    script = usual(chance, f"Trains a compiled model ({kind}).", part, precisions=precisions)
    script.drop_last = kind != "dynamic"
    if kind == "dynamic":
        how = ", dynamic=True"
    elif kind in ("reduce-overhead", "max-autotune-no-cudagraphs"):
        how = f', mode="{kind}"'
        script.accumulate = 1  # a graph's outputs live until it runs again
    elif kind == "fullgraph":
        how = ", fullgraph=True"
    if kind == "breaks":
        script.definitions.append(
            """
            class Watched(nn.Module):
                \"\"\"Prints the mean of what the model gives: Dynamo breaks the graph here.\"\"\"

                def __init__(self, model):
                    super().__init__()
                    self.model = model
                    self.calls = 0

                def forward(self, *args, **kwargs):
                    output = self.model(*args, **kwargs)
                    self.calls += 1
                    if self.calls % 2 == 0:
                        value = output if torch.is_tensor(output) else output.logits
                        print("mean", value.float().mean().item())
                    return output
            """
        )
        script.after_model.append("model = torch.compile(Watched(model))")
    elif kind == "step":
        autocast = PRECISIONS[script.precision].autocast
        script.definitions.append(_loss_function(part, autocast))
        script.part = replace(part, forward="loss_of(model, inputs, targets)", loss="output")
        script.precision = {"amp_bf16": "fp32"}.get(script.precision, script.precision)
    elif kind == "optimizer":
        script.after_model.append("model = torch.compile(model)")
        script.after_optimizer.append("optimizer.step = torch.compile(optimizer.step)")
    elif kind == "blocks":
        script.after_model += ["for block in model.blocks:", "    block.compile()"]
    else:
        script.after_model.append(f"model = torch.compile(model{how})")
    return script.text()


def _loss_function(part: Part, autocast: str) -> str:
    lines = [f"output = {part.forward}", f"return {part.loss}"]
    if autocast:
        lines = [f"with {autocast}:", *("    " + line for line in lines)]
    return "\n".join(["@torch.compile", "def loss_of(model, inputs, targets):", *("    " + line for line in lines)])


def _small_images(chance: random.Random) -> Part:
    """A model that compiles in seconds."""
    source, name = chance.choice(
        (
            ("torchvision", "resnet18"),
            ("torchvision", "squeezenet1_1"),
            ("torchvision", "regnet_y_400mf"),
            ("timm", "vit_tiny_patch16_224"),
            ("timm", "mixer_s32_224"),
            ("timm", "convnextv2_atto"),
            ("timm", "skresnet18"),
            ("timm", "resnet26d"),
            ("torchvision", "alexnet"),
            ("timm", "repvgg_a0"),
            ("timm", "poolformer_s12"),
            ("torchvision", "vgg11_bn"),
        )  # fmt: skip
    )
    made = f"torchvision.models.{name}(num_classes=10)"
    if source == "timm":
        made = f'timm.create_model("{name}", num_classes=10)'
    batch = chance.choice((8, 12, 16, 24))
    return Part(
        made, batch, "torch.randn(batch, 3, 224, 224)", "torch.randint(10, (batch,))", imports=(f"import {source}",)
    )


def _flex(chance: random.Random) -> Part:
    heads, size = chance.choice((4, 6, 8)), chance.choice((32, 64))
    width, length = heads * size, chance.choice((256, 512, 1024))
    window, layers = chance.choice((0, 64, 128)), chance.randint(2, 4)
    kept = "q >= k" if not window else f"(q >= k) & (q - k < {window})"
    bias = chance.choice(("None", "lambda score, b, h, q, k: score - 0.01 * (q - k)"))
    vocabulary = chance.choice((1000, 8000))
    definitions = f"""
    def visible(b, h, q, k):
        return {kept}


    class Layer(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.norm = heads, nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, x, mask):
            b, t, c = x.shape
            q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
            y = flex_attention(q, k, v, score_mod={bias}, block_mask=mask)
            return x + self.out(y.transpose(1, 2).reshape(b, t, c))


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding({vocabulary}, {width})
            self.layers = nn.ModuleList(Layer({width}, {heads}) for _ in range({layers}))
            self.head = nn.Linear({width}, {vocabulary})
            self.mask = create_block_mask(visible, None, None, {length}, {length}, device="cuda")

        def forward(self, tokens):
            x = self.tokens(tokens)
            for layer in self.layers:
                x = layer(x, self.mask)
            return self.head(x)
    """
    tokens = f"torch.randint({vocabulary}, (batch, {length}))"
    return Part(
        "Model()", chance.choice((2, 4, 8)), tokens, tokens,
        "nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())",
        imports=("from torch.nn.attention.flex_attention import create_block_mask, flex_attention",),
        definitions=definitions,
    )  # fmt: skip
