"""Train a small GPT on real text, byte by byte, with its parameters sharded by fsdp2.

    torchrun --standalone --nproc_per_node 2 examples/train_lm.py

The text is the source of Python's standard library, or any file or folder given by `--text`; its last tenth is held
out for validation. A model that knows only how frequent each byte is needs about 4.5 bits a byte there; a lower
validation loss shows what this model has learned. Two CPU cores reach about 2.2 bits in a minute. On CUDA the same
program runs with NCCL and bf16.

A checkpoint is written every `--checkpoint-every` steps, at the end, and on Ctrl-C, SIGTERM or SIGUSR2 (torchrun then adds
a traceback of its own). The same command with `--resume` goes on from the last one, and its losses are those of a run that
never stopped: batches and learning rate are functions of the step, and nothing else that is random happens while training.
`--batch` counts the sequences of all ranks together, so that losses compare across world sizes.

With `--inspect` the run writes down what each step communicated and kept, traces its third step, and ends with a page that shows
both next to what fsdp2 had planned, and what its doctor found (docs/inspecting.md).

On several hosts, with `--hsdp`, each host shards the parameters over its own ranks and the hosts add up gradients
(docs/clusters.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, doctor, fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError
from fsdp2.inspector.report import write_report
from fsdp2.optim import AnyPrecisionAdamW, Muon, flat

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # Ctrl-C; Kubernetes and hosts about to be taken away; Slurm
MODEL_FLAGS = ("layers", "width", "heads", "context")  # a checkpoint fits only a model with the same


class UserError(Exception):
    """A mistake that one line explains; raised on every rank or on none, so that no rank waits for one that left."""


# ---- the model ----------------------------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with the position (RoPE, Su et al. 2021).

    x: (rows, heads, context, features). The dot product of two such vectors knows how far apart they stand.
    """
    position, pair = torch.arange(x.shape[-2], device=x.device), torch.arange(x.shape[-1] // 2, device=x.device)
    angle = position[:, None] * 1000.0 ** (-pair / len(pair))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention, then a perceptron; each reads a norm of the stream (rows, context, width) and adds to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        projected = self.attention_in(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each (rows, heads, context, features)
        attended = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))


class GPT(nn.Module):
    """Maps bytes (rows, context) to the logits of the byte that follows each: (rows, context, 256)."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        for name, linear in self.named_modules():
            if isinstance(linear, nn.Linear):  # what reads the stream keeps its scale, what writes to it starts small
                nn.init.normal_(linear.weight, std=width**-0.5 if name.endswith("_in") else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        stream = self.embedding(text)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


def next_byte_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a byte, of each byte of rows (rows, context + 1) given those before it."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


# ---- the text -----------------------------------------------------------------------------------------------------


def read_text(path: Path | None, limit: int) -> bytes:
    """The first ``limit`` bytes of a file, or of the text files in a folder one after another."""
    root, suffix = (path, "") if path else (Path(sysconfig.get_paths()["stdlib"]), ".py")
    files = [root] if root.is_file() else []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "__pycache__", ".git")]
        files += [Path(folder, name) for name in names if name.endswith(suffix)]
    # Ordered by a hash of the name: neighbors are often similar, and the held-out tenth should be like the rest.
    files.sort(key=lambda file: zlib.crc32(os.fsencode(file.relative_to(root))))
    text = bytearray()
    for file in files:
        content = file.read_bytes()
        text += content if b"\0" not in content else b""  # with a zero byte it is no text
        if len(text) >= limit:
            break
    if not text:
        raise UserError(f"--text: {root} is neither a file nor a folder with text in it")
    return bytes(text[:limit])


def batch_at(step: int, text: Tensor, args: argparse.Namespace) -> Tensor:
    """This rank's rows (rows, context + 1) of batch number ``step``, whose place in ``text`` hangs on step and seed."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=draw)
    return text[starts[dist.get_rank() :: dist.get_world_size()] + torch.arange(args.context + 1)].long()


def histogram_bits(text: Tensor) -> float:
    """Entropy of the byte histogram, in bits: what the best model that looks at no context spends on a byte."""
    share = torch.bincount(text, minlength=256) / len(text)
    return -torch.special.xlogy(share, share).sum().item() / math.log(2)


# ---- the run ------------------------------------------------------------------------------------------------------


def from_rank_0(make: Callable[[], Any]) -> Any:
    """The result or the error of ``make()`` on rank 0, on all ranks: they agree even if their disks do not."""
    answer = [None]
    if dist.get_rank() == 0:
        try:
            answer = [make()]
        except (UserError, OSError) as error:
            answer = [UserError(str(error))]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def mean_over_ranks(*numbers: Tensor | float, device: torch.device) -> list[float]:
    total = torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a tenth of ``--lr``."""
    warm_up = max(1, args.steps // 20)
    if step <= warm_up:
        return args.lr * step / warm_up
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (args.steps - warm_up)))


def peak_gib() -> float:
    """Most memory this rank ever held: on its GPU, or in its process where there is none."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


@torch.no_grad()
def validation_bits(model: nn.Module, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Bits a byte on the same few batches of the held-out text in every step. Collective: yes."""
    losses = [next_byte_loss(model, batch_at(i, text, args).to(device)) for i in range(args.eval_batches)]
    return mean_over_ranks(torch.stack(losses).mean(), device=device)[0] / math.log(2)


@torch.no_grad()
def sample(model: nn.Module, args: argparse.Namespace, device: torch.device) -> str:
    """``--prompt`` and what the model writes after it. Collective: yes; with one seed, every rank draws the same."""
    draw = torch.Generator().manual_seed(args.seed)
    text = list(args.prompt.encode() or b"\n")
    for _ in range(args.sample_bytes):
        logits = model(torch.tensor([text[-args.context :]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial(F.softmax(logits / args.temperature, dim=0), 1, generator=draw)))
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in bytes(text).decode(errors="replace"))


def sharded_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model; every rank keeps its share of each parameter. An optimizer must be made of these shares."""
    torch.manual_seed(args.seed)  # the ranks must start from the same values; built on the CPU, any device gets them
    model = GPT(args.layers, args.width, args.heads)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if args.hsdp:
        mesh = init_device_mesh(device.type, hosts_and_ranks(), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # the parameters of a block travel together,
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)  # and so do those outside the blocks


def hosts_and_ranks() -> tuple[int, int]:
    """How many hosts there are, and ranks on each."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() // per_host, per_host


def make_optimizer(args: argparse.Namespace, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the sharded parameters, the embedding first, the head last; see docs/optimizers.md."""
    params = list(params)
    options: dict[str, Any] = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    if args.optimizer == "flat-adamw":
        return flat(torch.optim.AdamW, params, **options)
    if args.optimizer == "anyprecision":
        return AnyPrecisionAdamW(params, **options, variance_dtype=torch.float32, use_kahan_summation=True)
    if args.optimizer == "muon":
        hidden = [param for param in params[1:-1] if param.dim() == 2]
        others = [param for param in params if not any(param is each for each in hidden)]
        groups = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
        return Muon(groups, **options, adjust_lr_fn="match_rms_adamw")  # the learning rate is AdamW's then
    return torch.optim.AdamW(params, **options)


def planned(args: argparse.Namespace, device: torch.device) -> Any:
    """The needs of a rank, rehearsed without memory; None on other ranks than 0, which only have to agree to go on."""
    if dist.get_rank() != 0:
        return None
    on_gpu = device.type == "cuda"
    return fsdp2.plan(
        GPT(args.layers, args.width, args.heads),
        dist.get_world_size(),
        "hsdp" if args.hsdp else "zero3",
        shard_size=hosts_and_ranks()[1] if args.hsdp else None,
        wrap=fsdp2.wrap.by_class(Block),
        param_dtype=torch.bfloat16 if on_gpu else None,
        reduce_dtype=torch.float32 if on_gpu else None,
        optimizer=lambda params: make_optimizer(args, params),
        batch=args.batch // dist.get_world_size(),
        sequence=args.context,
        backend="nccl" if on_gpu else "gloo",
    )


def train(args: argparse.Namespace, device: torch.device) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch % world_size or args.width % (2 * args.heads):
        raise UserError(f"--batch must be a multiple of the {world_size} ranks, and --width of twice --heads")
    text = from_rank_0(lambda: read_text(args.text, args.text_bytes))
    if len(text) // 10 <= args.context:
        raise UserError(f"--text: {len(text)} bytes are too few, --context needs {10 * args.context + 10}")
    training, validation = torch.frombuffer(bytearray(text), dtype=torch.uint8).tensor_split([len(text) * 9 // 10])

    model = sharded_model(args, device)
    optimizer = make_optimizer(args, model.parameters())
    flags = {flag: getattr(args, flag) for flag in MODEL_FLAGS}
    saved = flags.copy()
    checkpointer = Checkpointer(args.out, model, optimizer, data=saved)  # batches are functions of the step: no position to save
    resumed = checkpointer.load() if args.resume == "must" or (args.resume and checkpointer.latest()) else None
    if saved != flags:  # what no shape tells
        raise UserError("--resume: the checkpoint is of a model with " + " ".join(f"--{flag} {saved[flag]}" for flag in flags))
    done = resumed.step if resumed else 0

    console = Console(quiet=rank != 0, highlight=False, markup=False, soft_wrap=True)
    columns = MofNCompleteColumn(), BarColumn(8), TextColumn("{task.description}"), TimeRemainingColumn(compact=True)
    bar = Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal)
    task = bar.add_task("", total=args.steps, completed=done)
    log = args.json.open("a" if done else "w", buffering=1) if rank == 0 and args.json else None
    told: list[int] = []  # not empty once this rank was told to stop; the step under way is finished all the same
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: told.append(number))

    numel, histogram = sum(parameter.numel() for parameter in model.parameters()), histogram_bits(validation)
    console.print(f"{numel:,} parameters on {world_size} x {device.type}; {len(training):,} bytes to learn from")
    inspecting, plan, run_folder = contextlib.ExitStack(), None, args.out / "run"
    if args.inspect:
        plan = planned(args, device)
        console.print(str(fsdp2.summary(model, optimizer)))
        tokens = args.batch // world_size * args.context
        findings, watching = doctor.check(model, optimizer), doctor.watch(model, optimizer)
        console.print(str(findings))
        found = [findings, watching]
        inspecting.enter_context(
            fsdp2.ledger(run_folder, model, optimizer, tokens=tokens, first_step=done + 1, plan=plan, findings=found)
        )
        inspecting.enter_context(watching)
    if resumed:
        console.print(f"going on after step {done}, from {resumed.path}")
    stop, seconds = False, []
    bar.start()
    for step in range(done + 1, args.steps + 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with fsdp2.trace(run_folder) if args.inspect and step == done + 3 else contextlib.nullcontext():
            loss = next_byte_loss(model, batch_at(step, training, args).to(device))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
        # The wish to stop travels with the loss: all ranks leave after the same step, whichever rank heard of it first.
        mean_loss, wish = mean_over_ranks(loss.detach(), bool(told), device=device)
        stop = wish > 0
        seconds = [*seconds[-19:], time.perf_counter() - began]
        tokens_per_s, peak = len(seconds) * args.batch * args.context / sum(seconds), peak_gib()
        line = f"loss {mean_loss:.3f}  {tokens_per_s:,.0f} tokens/s  grad norm {norm:.2f}  peak {peak:.2f} GiB"
        bar.update(task, completed=step, description=line)
        if bar.disable and step % 10 == 0:
            console.print(f"step {step}/{args.steps}  {line}")
        record = {"step": step, "loss": mean_loss, "norm": norm, "tokens_per_s": tokens_per_s, "peak_gib": peak}

        if step % args.eval_every == 0 or step == args.steps:
            bits = validation_bits(model, validation, args, device)
            console.print(f"step {step}  validation {bits:.3f} bits/byte  (byte histogram {histogram:.3f})")
            record |= {"validation_bits": bits, "histogram_bits": histogram}
        if log:
            print(json.dumps(record), file=log)
        if step % args.checkpoint_every == 0 or step == args.steps or stop:
            checkpointer.save(step)
        if stop:
            break
    bar.stop()
    inspecting.close()
    latest = checkpointer.latest()
    checkpointer.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # everything is on disk

    if stop:
        console.print(f"interrupted after step {step}; --resume goes on from the checkpoint {latest}")
        return 128 + signal.SIGINT
    written = sample(model, args, device)
    console.print(f"checkpoint {latest}\nsample:\n\n{written}\n")
    if plan is not None:
        report = write_report(run_folder)
        console.print(f"peak of a step: {plan.memory.peak.nbytes / 2**20:.1f} MiB planned, {report.peak / 2**20:.1f} MiB measured")
        console.print(f"report: {report.page}")
    return 0


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if int(text) < 1:
            raise ValueError(text)
        return int(text)

    parser = argparse.ArgumentParser(description="Train a byte-level GPT with fsdp2. Start it with torchrun.")
    flag = parser.add_argument
    flag("--text", type=Path, help="a file, or a folder of files (default: the Python standard library)")
    flag("--text-bytes", type=count, default=8_000_000, help="read at most this much of it")
    flag("--out", type=Path, default=Path("runs/train_lm"), help="folder of the checkpoints, seen by all ranks")
    resume = "go on from the last checkpoint in --out; auto: if there is one"
    flag("--resume", nargs="?", const="must", choices=["must", "auto"], help=resume)
    flag("--inspect", action="store_true", help="write down each step, trace the third, and end with a report in --out/run")
    flag("--hsdp", action="store_true", help="shard within a host, replicate between hosts")
    flag("--json", type=Path, help="file for the same numbers, a JSON line a step, in full precision")
    flag("--steps", type=count, default=400)
    flag("--batch", type=count, default=16, help="sequences a step, over all ranks")
    flag("--context", type=count, default=128, help="bytes a sequence")
    flag("--layers", type=count, default=3)
    flag("--width", type=count, default=128)
    flag("--heads", type=count, default=4)
    flag("--optimizer", choices=["adamw", "flat-adamw", "anyprecision", "muon"], default="adamw")
    flag("--lr", type=float, default=4e-3, help="the highest learning rate, at the end of warm-up")
    flag("--weight-decay", type=float, default=0.1)
    flag("--clip", type=float, default=1.0, help="gradients of a larger norm are scaled down to it")
    flag("--seed", type=int, default=0)
    flag("--eval-every", type=count, default=50, help="steps between validations")
    flag("--eval-batches", type=count, default=4)
    flag("--checkpoint-every", type=count, default=100, help="steps between checkpoints; two are kept")
    flag("--sample-bytes", type=int, default=400, help="length of the text that the model writes at the end")
    flag("--temperature", type=float, default=0.7)
    flag("--prompt", default="def ", help="what that text begins with")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, for instance: torchrun --standalone --nproc_per_node 2 " + sys.argv[0])
    return args


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins, Ctrl-C has nothing to save
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        status = train(args, device)
    except (UserError, CheckpointError) as error:
        status = 2
        if dist.get_rank() == 0:
            print(f"train_lm: {error}", file=sys.stderr, flush=True)
        dist.barrier()  # torchrun ends all ranks when the first one has failed: rank 0 must have spoken by then
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not sys.exit: a thread of gloo (torch <= 2.13) may still be dropping its last tensor, and aborts the process when
    # it finds the interpreter half gone.
    os._exit(status)
