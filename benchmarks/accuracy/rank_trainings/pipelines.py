"""Ranks of a pipeline: `torch.distributed.pipelining` with a model of our own that is cut by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rank_trainings.models import Block, Row, checkpoint_blocks

_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class Stage(nn.Module):
    """Some blocks; the first stage has the embeddings before them, the last one the head after them."""

    def __init__(self, row: Row, number: int, stages: int) -> None:
        super().__init__()
        width, begin, end = row["width"], *(row["layers"] * place // stages for place in (number, number + 1))
        if number == 0:
            self.tok_embeddings = nn.Embedding(row["vocabulary"], width)
        sizes = (width, row["heads"], row["groups"], row["middle"])
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(begin, end))
        if number == stages - 1:
            self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, row["vocabulary"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tok_embeddings"):
            x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)) if hasattr(self, "output") else x


def schedule_of(row: Row, device: torch.device) -> tuple[nn.Module, Any, range]:
    """The parts of the model that a rank has, the schedule that runs them, and their numbers."""
    from torch.distributed import pipelining

    rank, ranks = row["rank"], row["ranks"]
    stages = ranks * (2 if row["schedule"] == "interleaved" else 1)
    own = range(rank, stages, ranks)
    with torch.device(row["made_on"]):
        parts = nn.ModuleList(Stage(row, number, stages) for number in own)
    if row["precision"] == "pure_bf16":
        parts = parts.to(torch.bfloat16)
    parts = parts.to_empty(device=device) if row["made_on"] == "meta" else parts.to(device)
    if row["checkpointing"]:
        checkpoint_blocks(parts, Block)
    samples, length = row["batch"] // row["microbatches"], row["length"]
    ids = torch.empty(samples, length, dtype=torch.long, device="meta")
    kind = torch.bfloat16 if row["precision"] == "pure_bf16" else torch.float32
    passed = torch.empty(samples, length, row["width"], dtype=kind, device="meta", requires_grad=True)
    low = torch.bfloat16 if row["precision"] != "fp32" else torch.float32
    logits = torch.empty(samples, length, row["vocabulary"], dtype=low, device="meta", requires_grad=True)
    made = [
        pipelining.PipelineStage(
            part,
            number,
            stages,
            device,
            input_args=ids if number == 0 else passed,
            output_args=logits if number == stages - 1 else passed,
        )
        for number, part in zip(own, parts, strict=True)
    ]
    several: Any = made if row["schedule"] == "interleaved" else made[0]
    schedule = getattr(pipelining, _SCHEDULES[row["schedule"]])(several, row["microbatches"], loss_fn=_loss)
    return parts, schedule, own


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
