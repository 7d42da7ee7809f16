"""Scripts with `cudnn.benchmark`: networks of convolutions."""

import random
import textwrap

from drawn_scripts.parts import PRECISIONS, Part, Script, convolutions, images, unet, usual


def benchmark(chance: random.Random, number: int) -> str:
    """`cudnn.benchmark`: networks of convolutions."""
    kind = chance.choices(("images", "own", "unet", "gan", "video"), (9, 4, 4, 3, 1))[0]
    if kind == "gan":
        return _gan(chance)
    if kind == "video":
        name = chance.choice(("r3d_18", "mc3_18", "r2plus1d_18"))
        part = Part(
            f"torchvision.models.video.{name}(num_classes=20)",
            chance.choice((2, 3, 4)),
            f"torch.randn(batch, 3, {chance.choice((8, 12, 16))}, 112, 112)",
            "torch.randint(20, (batch,))",
            imports=("import torchvision",),
        )
    else:
        part = {"images": lambda: images(chance, patches=False), "own": lambda: convolutions(chance)}.get(
            kind, lambda: unet(chance)
        )()
    script = usual(chance, "Trains with the fastest convolutions that cuDNN finds.", part)
    script.settings.append("torch.backends.cudnn.benchmark = True")
    if kind in ("images", "unet") and chance.random() < 0.35:
        script.after_model.append("model = model.to(memory_format=torch.channels_last)")
        script.to_device.append("inputs = inputs.to(memory_format=torch.channels_last)")
    if chance.random() < 0.3:
        cast = f".to({PRECISIONS[script.precision].dtype})" if PRECISIONS[script.precision].dtype else ""
        inputs = part.inputs.replace("batch", str(max(1, part.batch * chance.choice((1, 2)) // chance.choice((1, 2)))))
        script.at_end = ["model.eval()", "with torch.no_grad():", f"    model({inputs}.to(device){cast})"]
    return script.text()


def _gan(chance: random.Random) -> str:
    width, latent, side = chance.choice((32, 48, 64, 96)), chance.choice((64, 100, 128)), chance.choice((32, 64))
    batch, optimizer = (
        chance.choice((32, 64, 100, 128)),
        "torch.optim.Adam({}.parameters(), lr=2e-4, betas=(0.5, 0.999))",
    )
    last = side // 16
    grow = "ConvTranspose2d(before, width, 4, 2, 1, bias=False)"
    if side == 32:
        grow = "Conv2d(before, width, 3, 1, 1, bias=False)"
    definitions = f"""
    def generator(latent={latent}, width={width}):
        layers, before = [], latent
        for i, after in enumerate((width * 8, width * 4, width * 2)):
            stride, padding = (1, 0) if i == 0 else (2, 1)
            layers += [nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False)]
            layers += [nn.BatchNorm2d(after), nn.ReLU(True)]
            before = after
        layers += [nn.{grow}, nn.BatchNorm2d(width), nn.ReLU(True)]
        return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


    def discriminator(width={width}):
        layers, before = [], 3
        for after in (width, width * 2, width * 4, width * 8):
            layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2, True)]
            before = after
        return nn.Sequential(*layers, nn.Conv2d(before, 1, {last}, 1, 0, bias=False), nn.Flatten())
    """
    script = Script("Trains a DCGAN.", Part("", batch, "", "", definitions=definitions))
    script.settings = ["torch.backends.cudnn.benchmark = True"]
    script.whole = textwrap.dedent(f'''\
    device = torch.device("cuda")
    make, judge = generator().to(device), discriminator().to(device)
    for_make, for_judge = {optimizer.format("make")}, {optimizer.format("judge")}
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones({batch}, 1, device=device), torch.zeros({batch}, 1, device=device)
    fixed = torch.randn({batch}, {latent}, 1, 1, device=device)
    for step in range(6):
        real = torch.randn({batch}, 3, {side}, {side}).to(device)
        fake = make(torch.randn({batch}, {latent}, 1, 1, device=device))
        judge.zero_grad()
        loss_real = criterion(judge(real), ones)
        loss_real.backward()
        loss_fake = criterion(judge(fake.detach()), zeros)
        loss_fake.backward()
        for_judge.step()
        make.zero_grad()
        loss = criterion(judge(fake), ones)
        loss.backward()
        for_make.step()
        if step % 3 == 0:
            print(step, loss_real.item(), loss_fake.item(), loss.item())
            with torch.no_grad():
                make(fixed)
    ''')  # fmt: skip
    return script.text()
