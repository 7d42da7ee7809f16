"""A DCGAN: a generator and a discriminator, each with an optimizer of its own."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--latent", type=int, default=100)
parser.add_argument("--features", type=int, default=64)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Generator(nn.Module):
    def __init__(self, latent, width):
        super().__init__()
        layers, channels = [], latent
        for number, out in enumerate([width * 8, width * 4, width * 2, width]):
            stride, padding = (1, 0) if number == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(channels, out, 4, stride, padding, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(True),
            ]
            channels = out
        self.net = nn.Sequential(*layers, nn.ConvTranspose2d(channels, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, noise):
        return self.net(noise)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width * 4, 1, 8),
        )

    def forward(self, images):
        return self.net(images).flatten()


generator, discriminator = Generator(args.latent, args.features).to(device), Discriminator(args.features).to(device)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(64, args.latent, 1, 1, device=device)

for step in range(args.steps):
    real = torch.rand(args.batch_size, 3, 64, 64, device=device) * 2 - 1
    ones, zeros = torch.ones(args.batch_size, device=device), torch.zeros(args.batch_size, device=device)

    discriminator.zero_grad()
    loss_real = criterion(discriminator(real), ones)
    loss_real.backward()
    fake = generator(torch.randn(args.batch_size, args.latent, 1, 1, device=device))
    loss_fake = criterion(discriminator(fake.detach()), zeros)
    loss_fake.backward()
    d_optimizer.step()

    generator.zero_grad()
    g_loss = criterion(discriminator(fake), ones)
    g_loss.backward()
    g_optimizer.step()

    if step % 10 == 0:
        with torch.no_grad():
            samples = generator(fixed_noise).cpu()
        d_loss = loss_real.item() + loss_fake.item()
        print(f"step {step} d {d_loss:.3f} g {g_loss.item():.3f} mean {samples.mean():.3f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
