"""Text on all ranks, images on some: a tower that ranks may leave out, and ranks with different numbers of batches.

    torchrun --standalone --nproc-per-node 2 examples/multimodal.py

Even ranks read pieces of the standard library's sources. Odd ranks read captions of small images, such as "5 red stripes", and have
fewer of them. Expected, within a minute on a laptop: both losses fall, that of the captions below 0.1. A model that ignored the images
would stay above 0.2, since it could not know the number and the color.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2

COLORS = ("red", "green", "blue")
Batch = dict[str, Tensor]


class Captioner(nn.Module):
    """Logits of the next byte, (batch, length, 256), for bytes (batch, length), behind images (batch, 8 rows, 3 colors, 8 pixels)."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.images = nn.Sequential(nn.Linear(3 * 8, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.embedding(text)
        if images is not None:
            x = torch.cat([self.images(images.flatten(2)), x], dim=1)  # each row of pixels becomes a token
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x[:, -text.shape[1] :]))


def pieces_of_text(size: int, generator: torch.Generator) -> Batch:
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    starts = torch.randint(len(source) - 49, (size,), generator=generator).tolist()
    return {"text": torch.tensor([list(source[start : start + 49]) for start in starts])}


def images_with_captions(size: int, generator: torch.Generator) -> Batch:
    """Images of 1 to 8 stripes on a gray ground, and captions of 16 bytes."""
    images = torch.full((size, 8, 3, 8), 0.5) + 0.05 * torch.randn(size, 8, 3, 8, generator=generator)
    numbers = torch.randint(1, 9, (size,), generator=generator).tolist()
    colors = torch.randint(len(COLORS), (size,), generator=generator).tolist()
    for image, number, color in zip(images, numbers, colors, strict=True):
        image[:number] -= 0.5
        image[:number, color] += 1.0
    captions = [f" {number} {COLORS[color]} stripes".ljust(16).encode() for number, color in zip(numbers, colors, strict=True)]
    return {"text": torch.tensor([list(caption) for caption in captions]), "images": images}


def main(epochs: int = 30) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same values on every rank
    model = Captioner()
    fsdp2.fully_shard(model.images).set_optional()  # ranks without images leave it out
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    make, num_batches = (images_with_captions, 8) if rank % 2 else (pieces_of_text, 10)

    with fsdp2.uneven(model) as work:
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(1000 * epoch + rank)
            batches = [make(16, generator) for _ in range(num_batches)]
            sums = torch.zeros(2, 2)  # of text, of captions: losses, bytes
            for batch in work(batches, count=lambda batch: batch["text"][:, 1:].numel()):
                text = batch["text"]
                logits = model(text[:, :-1], batch.get("images"))
                loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
                work.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if not work.stands_in:  # this rank has had its last batch, and repeats it for the others
                    sums[int("images" in batch)] += torch.tensor([loss.item(), text[:, 1:].numel()])
            dist.all_reduce(sums)
            if rank == 0:
                of_text, of_captions = (sums[:, 0] / sums[:, 1]).tolist()
                print(f"epoch {epoch:2d}  text {of_text:.3f}  captions {of_captions:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
