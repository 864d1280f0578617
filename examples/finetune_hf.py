"""Fine-tune a model of transformers that is sharded by fsdp2, from a Hugging Face checkpoint folder to another.

    torchrun --standalone --nproc_per_node 2 examples/finetune_hf.py      (or: python examples/finetune_hf.py)

The task is summarization of a kind: from what a docstring of Python's standard library says in detail, write its first line. Nothing
is downloaded: a small T5 with random weights, whose tokens are bytes, stands for the pretrained model. It is written as a checkpoint
folder, and from there everything is as it would be with a large one:

1. the model is made on the meta device, without memory, and sharded;
2. ``load_safetensors`` reads into each rank what that rank keeps, and nothing else;
3. an ordinary loop trains it;
4. ``save_safetensors`` writes the folder that ``from_pretrained`` opens, ``config.json`` included, with bounded memory;
5. transformers opens it, finds the same loss, and generates.

A minute on two CPU cores takes the loss on docstrings that it has not seen from 6.4 nats a byte to 2.6: enough
for words that first lines begin with. With weights that were pretrained, the same program would summarize.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import sysconfig
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is a local folder

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.checkpoint import load_safetensors, save_safetensors

PAD, END, FIRST_BYTE = 0, 1, 3  # as in ByT5: a token is a byte, moved by three
Pair = tuple[str, str]


def docstring_pairs(limit: int) -> list[Pair]:
    """(details, first line) of docstrings in the standard library; the same, in the same order, on every rank."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[Pair, None] = {}
    for file in sorted(root.glob("*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                summary, _, details = (ast.get_docstring(node) or "").partition("\n\n")
                pair = " ".join(details.split()), " ".join(summary.split())
                if 15 < len(pair[1]) < 60 and len(pair[0]) > 60:
                    pairs[pair] = None
    # Ordered by a hash: neighbors are similar, and those held out should be like the rest.
    return sorted(pairs, key=lambda pair: zlib.crc32("".join(pair).encode()))[:limit]


def tokens(texts: list[str], length: int) -> Tensor:
    """(texts, at most length) of int64, cut, ended and padded."""
    rows = [torch.tensor([byte + FIRST_BYTE for byte in text.encode()[: length - 1]] + [END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def text_of(row: Tensor) -> str:
    return bytes(token - FIRST_BYTE for token in row.tolist() if FIRST_BYTE <= token < FIRST_BYTE + 256).decode(errors="replace")


def loss_of(model: nn.Module, pairs: list[Pair], args: argparse.Namespace, device: torch.device) -> Tensor:
    """Mean cross-entropy, in nats a byte of the first lines."""
    inputs = tokens([details for details, _ in pairs], args.input_length).to(device)
    labels = tokens([summary for _, summary in pairs], args.input_length).to(device)
    labels = labels.masked_fill(labels == PAD, -100)  # what transformers leaves out of the loss
    return model(input_ids=inputs, attention_mask=inputs != PAD, labels=labels, use_cache=False).loss


def num_tokens(pairs: list[Pair], args: argparse.Namespace) -> int:
    """How many tokens of first lines a loss is the mean of."""
    return sum(min(len(summary.encode()) + 1, args.input_length) for _, summary in pairs)


def write_pretrained(folder: Path, args: argparse.Namespace) -> None:
    """A folder as one would download it."""
    torch.manual_seed(args.seed)
    config = transformers.T5Config(
        vocab_size=FIRST_BYTE + 256, d_model=args.width, d_kv=args.width // 4, d_ff=2 * args.width, num_layers=args.layers, num_heads=4,
        dropout_rate=0.0, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder, max_shard_size="500KB")


def sharded_model(folder: Path, device: torch.device) -> nn.Module:
    """The folder's model; every rank reads and keeps its share of it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = load_safetensors(model, folder, init_fn=model._init_weights)  # init_fn: for what no checkpoint has, as some buffers
    print(f"rank {dist.get_rank()} has read {report.bytes_read:,} bytes of {len(report.loaded)} tensors", flush=True)
    return model


def finetune(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pretrained, finetuned = args.out / "pretrained", args.out / "finetuned"
    if rank == 0:
        write_pretrained(pretrained, args)
    dist.barrier()
    pairs = docstring_pairs(args.pairs)
    held_out, training = pairs[:16], pairs[16:]
    model = sharded_model(pretrained, device)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    @torch.no_grad()
    def validate() -> float:
        return loss_of(model, held_out, args, device).item()  # the same pairs on every rank

    say(f"{len(training)} pairs to learn from; before: {validate():.3f} nats a byte on those held out")
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    draw = torch.Generator().manual_seed(args.seed)  # the same on all ranks, so that each can take its part of the batch
    for step in range(1, args.steps + 1):
        batch = [training[index] for index in torch.randint(len(training), (args.batch,), generator=draw).tolist()]
        own = batch[rank::world_size]
        # Backward averages over ranks. Each mean weighs as many tokens as it is of, so that every token of the batch counts the same.
        share = num_tokens(own, args) * world_size / num_tokens(batch, args)
        (loss_of(model, own, args, device) * share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - step / args.steps)
        if step % max(args.steps // 5, 1) == 0:
            say(f"step {step}/{args.steps}  held out {validate():.3f}")

    loss = validate()
    saved = save_safetensors(model, finetuned, "500KB")
    say(f"saved {saved.nbytes:,} bytes in {len(saved.files)} files: {finetuned}")
    if rank == 0:
        show(finetuned, held_out, loss, args)
    dist.barrier()


@torch.no_grad()
def show(folder: Path, held_out: list[Pair], loss: float, args: argparse.Namespace) -> None:
    """Open the folder with transformers alone, and generate."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    print(f"opened by transformers as {type(model).__name__}: {loss_of(model, held_out, args, model.device):.3f}, sharded {loss:.3f}")
    for details, summary in held_out[:3]:
        written = model.generate(tokens([details], args.input_length), max_new_tokens=60, num_beams=1, do_sample=False)
        print(f"\n  details:    {details[:100]}...\n  first line: {summary}\n  generated:  {text_of(written[0])}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small T5 with fsdp2. Start it with torchrun, or alone.")
    flag = parser.add_argument
    flag("--out", type=Path, default=Path("runs/finetune_hf"), help="folder of both checkpoints, seen by all ranks")
    flag("--pairs", type=int, default=2000, help="take at most this many")
    flag("--steps", type=int, default=150)
    flag("--batch", type=int, default=16, help="pairs a step, over all ranks")
    flag("--input-length", type=int, default=128, help="bytes of a docstring's details that the model sees")
    flag("--layers", type=int, default=2)
    flag("--width", type=int, default=96, help="a multiple of 4")
    flag("--lr", type=float, default=4e-3)
    flag("--seed", type=int, default=0)
    args = parser.parse_args()
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # alone
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    finetune(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Not sys.exit: a thread of gloo (torch <= 2.13) may still be dropping its last tensor, and aborts the process when
    # it finds the interpreter half gone.
    os._exit(0)
