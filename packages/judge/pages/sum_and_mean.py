"""Draws sum_and_mean.svg: a small training in PyTorch that averages four micro-batches' gradients, and one that adds
them up. Writes both logs into a directory, for judge.

python packages/judge/pages/sum_and_mean.py DIRECTORY
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 20
MICRO_BATCHES = 4
WIDTH, HEIGHT = 300, 150  # of a panel
COLOURS = {"mean.jsonl": "#2f6fb0", "sum.jsonl": "#c2571a"}
PICTURE = Path(__file__).with_suffix(".svg")


def train(scale: float) -> list[dict[str, float]]:
    """A line for each step. scale: of each micro-batch's loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(8 * 32, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lines = []
    for step in range(1, STEPS + 1):
        losses = [loss_of(model, step, number) for number in range(MICRO_BATCHES)]
        for loss in losses:
            (loss * scale).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        lines.append({"step": step, "loss": float(sum(losses)) / MICRO_BATCHES, "grad_norm": float(norm)})
    return lines


def loss_of(model: nn.Module, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * (step % 5) + number)
    inputs = torch.randint(64, (8, 8), generator=generator)
    return F.cross_entropy(model(inputs), inputs.sum(1) % 64)


def panel(title: str, left: int, logs: dict[str, list[dict[str, float]]], value: Callable[..., float]) -> list[str]:
    most = max(value(line) for lines in logs.values() for line in lines)
    drawn = [f'<text x="{left}" y="20" font-weight="bold">{title}</text>']
    for number, (name, lines) in enumerate(logs.items()):
        points = [place(line["step"], value(line) / most, left) for line in lines]
        drawn.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS[name]}" {dash(number)}/>')
        x, y = points[-1].split(",")
        drawn.append(f'<text x="{float(x) + 6:.0f}" y="{float(y) + 4 + 14 * number:.0f}">{name.split(".")[0]}</text>')
    base = 40 + HEIGHT
    drawn.append(f'<path d="M{left} 40V{base}H{left + WIDTH}" fill="none" stroke="#7a808c"/>')
    drawn.append(f'<text x="{left}" y="{base + 18}">step 1 to {STEPS}, from 0 to {most:.2g}</text>')
    return drawn


def place(step: float, height: float, left: int) -> str:
    return f"{left + (step - 1) / (STEPS - 1) * WIDTH:.1f},{40 + (1 - height) * HEIGHT:.1f}"


def dash(number: int) -> str:
    """The second line lets the first one show where they lie upon each other."""
    return 'stroke-width="2" stroke-dasharray="5 5"' if number else 'stroke-width="2"'


def main(words: Sequence[str]) -> None:
    logs = {"mean.jsonl": train(1 / MICRO_BATCHES), "sum.jsonl": train(1.0)}
    for name, lines in logs.items():
        (Path(words[0]) / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn = panel("loss", 10, logs, lambda line: line["loss"])
    drawn += panel("gradient norm", 390, logs, lambda line: line["grad_norm"])
    style = 'font-family="sans-serif" font-size="12" fill="#7a808c"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 215" {style}>'
    PICTURE.write_text("\n".join([begin, *drawn, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
