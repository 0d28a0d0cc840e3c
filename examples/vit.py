"""A penalty and repulsion in an image classifier of transformers: a small ViT on images that are generated.

    python examples/vit.py --steps 300

An image has stripes in one of four directions, of any width and phase, under noise. Only the lines marked `headwise`
are added to a plain loop, which prints the loss; at the end accuracy on new images and the effective number of heads.
"""

import math

import torch
import typer
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import headwise as hw

SIZE, DIRECTIONS = 16, 4


def draw(number: int) -> tuple[Tensor, Tensor]:
    """Return images, [number, 1, SIZE, SIZE], and the direction of the stripes in each."""
    labels = torch.randint(DIRECTIONS, (number,))
    angles, widths = labels * math.pi / DIRECTIONS, 4.0 + 4.0 * torch.rand(number)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angles.cos()[:, None, None] * x + angles.sin()[:, None, None] * y
    phases = 2 * math.pi * (along / widths[:, None, None] + torch.rand(number, 1, 1))
    return (phases.sin() + 0.5 * torch.randn(number, SIZE, SIZE))[:, None], labels


def main(steps: int = 200, batch_size: int = 64, seed: int = 0) -> None:
    """Train, and print ten times along the way."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=SIZE,
        patch_size=4,
        num_channels=1,
        id2label={number: str(number) for number in range(DIRECTIONS)},
    )
    model = ViTForImageClassification(config)
    heads = hw.find_heads(model)  # headwise
    penalty = hw.Disagreement(heads, hw.similarity.SquaredCosine(), strength=hw.Relative(0.1))  # headwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    repulsion = hw.repel(heads.layer(0), hw.SVGD(alpha=hw.Relative(0.1)), optimizer)  # headwise
    for step in range(1, steps + 1):
        images, labels = draw(batch_size)
        loss = model(pixel_values=images, labels=labels).loss
        whole_loss = penalty.loss(loss)  # headwise
        optimizer.zero_grad()
        whole_loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4d}  loss {loss:.3f}  repulsion / driving term {repulsion.last.force_ratio.mean():.2f}")
    repulsion.check(optimizer)
    penalty.remove()
    images, labels = draw(500)
    model.eval()
    with torch.no_grad():
        accuracy = (model(pixel_values=images).logits.argmax(dim=-1) == labels).float().mean()
    print(f"accuracy {accuracy:.2f}")
    for layer in hw.measure(heads, [{"pixel_values": images[:100]}]).layers:
        print(f"{layer.site}: {layer.effective_heads:.2f} of {layer.heads} heads effective")


if __name__ == "__main__":
    typer.run(main)
