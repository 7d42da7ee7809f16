"""Draw the memory of a training loop over time, as one SVG file: `python examples/draw_timeline.py out.svg`."""

import sys
from pathlib import Path

import torch
from torch import nn

import ullage

WIDTH, HEIGHT, LEFT, TOP = 900, 320, 70, 40
RESERVED = "reserved by the allocator"


def train() -> None:
    """Three steps of a small Transformer with Adam."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=6).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(16, 256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def path(points: list[tuple[float, float]]) -> str:
    """SVG's words for a line through points."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def draw(answer: ullage.Estimate) -> str:
    """One SVG picture."""
    last, top = answer.timeline[-1][0], answer.peak_reserved * 1.05
    place = [(LEFT + (WIDTH - LEFT - 20) * clock / last, clock) for clock, _, _ in answer.timeline]
    height = HEIGHT - TOP - 40

    def y(size: int) -> float:
        return TOP + height * (1 - size / top)

    allocated = [(x, y(point[1])) for (x, _), point in zip(place, answer.timeline, strict=True)]
    reserved = [(x, y(point[2])) for (x, _), point in zip(place, answer.timeline, strict=True)]
    ground = TOP + height
    area = [(allocated[0][0], ground), *allocated, (allocated[-1][0], ground)]
    lines = []
    for tick in range(5):
        size = answer.peak_reserved * tick / 4
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(round(size)):.1f}" y2="{y(round(size)):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(round(size)) + 4:.1f}" text-anchor="end">{size / 2**20:.0f} MiB</text>'
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"
 font-size="12" fill="#333"><rect width="100%" height="100%" fill="white"/>
<text x="{LEFT}" y="24" font-size="15">Three training steps of a Transformer on a GPU that is not there</text>
{"".join(lines)}
<path d="{path(area)}" fill="#7aa6d8" stroke="none"/>
<path d="{path(reserved)}" fill="none" stroke="#c0392b" stroke-width="2"/>
<text x="{WIDTH - 24}" y="{y(answer.peak_reserved) - 6:.1f}" text-anchor="end" fill="#c0392b">{RESERVED}</text>
<text x="{WIDTH - 24}" y="{ground - 10:.1f}" text-anchor="end" fill="#fff">allocated by tensors</text>
<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{last} requests and frees</text>
</svg>
"""


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.svg")
    target.write_text(draw(ullage.estimate(train, gpu="H200", steps=None)))
    print(f"wrote {target}")
