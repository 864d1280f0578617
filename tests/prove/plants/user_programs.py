"""A healthy training script, and faults that replace a few of its lines.

A comment at the end of a line, or on a line of its own, is the name by which a plant replaces that line. The verdict must have the
name of the finding, and of the parameter that it is about.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

BASE = """\
import copy
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from fsdp2 import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
# patch

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).tanh())) * self.scale.type_as(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)  # embed
        for index, block in enumerate(self.blocks):
            x = block(x)  # block
        return self.head(x)  # output

def batch(step, micro):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)  # data
    tokens = torch.randint(11, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]  # targets

def mean_loss(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

torch.manual_seed(0)  # seed
model = Model()  # model
# whole
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))  # mesh
how = {"mesh": mesh}  # how
for block in model.blocks:
    fully_shard(block, **how)
fully_shard(model, **how)  # root
# sharded
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # optimizer
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)  # scheduler
torch.manual_seed(1 + rank)  # dropout
first = 0
# ready
for step in range(first, 5):
    for micro in range(2):
        tokens, targets = batch(step, micro)
        model.set_requires_gradient_sync(micro == 1)  # sync
        logits = model(tokens)  # forward
        loss = mean_loss(logits, targets) / 2  # loss
        loss.backward()  # backward
    clip_grad_norm_(model.parameters(), 1.0)  # clip
    optimizer.step()  # step
    scheduler.step()  # schedule
    optimizer.zero_grad()  # clear
    # end
"""


@dataclass(frozen=True)
class Plant:
    """words: that a verdict must contain; module: whose ``fully_shard``. The name of a healthy program may be the path of an example"""

    name: str
    words: str
    lines: dict[str, str] = field(hash=False)
    ranks: int = 2
    module: str = "fsdp2"

    @property
    def script(self) -> str:
        return script_with(self.lines).replace("from fsdp2 import Mixed", f"from {self.module} import Mixed")


def script_with(lines: dict[str, str]) -> str:
    """The base script with other lines."""
    text = BASE
    for marker, code in lines.items():
        pattern = re.compile(rf"^( *)(?:\S.*  )?# {marker}$", re.MULTILINE)
        found = pattern.search(text)
        assert found, f"the base script has no line marked {marker}"
        text = text[: found.start()] + textwrap.indent(textwrap.dedent(code), found[1]) + text[found.end() :]
    return text


LOCAL_OF = 'pieces = [getattr(param.grad, "_local_tensor", param.grad) for param in {}.parameters()]\n'
ALL = LOCAL_OF.format("model")
LOCAL = LOCAL_OF.format("model.blocks")
HSDP = 'init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))'
TENSOR_PARALLEL = {
    "patch": "import fsdp2\nfrom torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
    "data": "generator = torch.Generator().manual_seed(1000 * step + 100 * micro + mesh.get_local_rank())",
    "mesh": 'axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))\nmesh = axes["data"]',
    "how": """\
        how = {"mesh": mesh}
        for block in model.blocks:
            parallelize_module(block, axes["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        """,
    "dropout": "torch.manual_seed(1 + mesh.get_local_rank())",
    "clip": "fsdp2.clip_grad_norm_(model.parameters(), 1.0)",
}
TEACHER = {
    "model": "model = Model()\nstudent, teacher = list(model.parameters()), copy.deepcopy(model).eval()",
    "sharded": "student = list(model.parameters())",
    "loss": "loss = (mean_loss(logits, targets) + F.mse_loss(logits, teacher(tokens).detach())) / 2",
    "end": """\
        with torch.no_grad():
            for kept, param in zip(teacher.parameters(), student):
                kept.lerp_(param.full_tensor() if hasattr(param, "full_tensor") else param, 0.5)
        """,
}
UNEVEN = {
    "patch": "import fsdp2",
    "ready": """\
        def sum_of_losses(logits, targets):
            # sum
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

        def count(batch):
            return batch[1].numel()

        batches = [tuple(each[: 4 - index % 2] for each in batch(index, 0)) for index in range(3 + 4 * rank)]
        # batches
        with fsdp2.uneven(model) as work:
            for tokens, targets in work(batches, count=count, micro_batches=2):
                # micro
                work.backward(sum_of_losses(model(tokens), targets))
                if work.is_last:
                    clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                # inside
        raise SystemExit
        """,
}
"""Rank 1 has four batches more; the first of two steps has three real micro-batches, and the others two."""
OPTIONAL = {"sharded": "model.blocks[1].set_optional()", "block": "x = x if index == rank == 1 else block(x)"}
GUARDED = {
    "patch": "import fsdp2",
    "clip": "",
    "step": "outcome = fsdp2.guarded_step(optimizer, max_norm=1.0, failed=ValueError() if step == 1 and rank == 1 else None)",
}
PARKED = {"patch": "import fsdp2", "end": "fsdp2.park(model, optimizer)\nfsdp2.unpark(model, optimizer)"}

USER_PLANTS = [
    # --- the divisor of gradients ---
    Plant("losses of micro-batches are added up", "gradient-scale", {"loss": "loss = mean_loss(logits, targets)"}),
    Plant(
        "the loss is divided by the ranks as well", "gradient-scale", {"loss": "loss = mean_loss(logits, targets) / 2 / ranks"}, ranks=3
    ),
    Plant(
        "gradients of mean losses are summed over ranks",
        "gradient-scale",
        {"sharded": "for each in [*model.blocks, model]:\n    each.set_gradient_divide_factor(1.0)"},
    ),
    Plant(
        "one block has a divisor of its own", "gradient-scale blocks.1", {"sharded": "model.blocks[1].set_gradient_divide_factor(1.0)"}
    ),
    Plant(
        "each rank averages over its own tokens, and some are padding",
        "token-weights",
        {"targets": "return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(5) > 2 + rank, -100)"},
    ),
    Plant(
        "the last micro-batch is shorter",
        "token-weights",
        {"forward": "tokens, targets = tokens[micro:], targets[micro:]\nlogits = model(tokens)"},
    ),
    Plant(
        "gradients are reduced again",
        "gradients-reduced-again blocks.0.up.weight",
        {"clip": f"{LOCAL}for piece in pieces:\n    dist.all_reduce(piece)"},
    ),
    Plant(
        "gradients are averaged again",
        "gradients-reduced-again blocks.0.up.weight",
        {"clip": f"{LOCAL}for piece in pieces:\n    dist.all_reduce(piece)\n    piece.div_(ranks)"},
    ),
    Plant("backward runs twice", "gradient-scale", {"backward": "loss.backward(retain_graph=True)\nloss.backward()"}),
    # --- clipping ---
    Plant(
        "each rank clips by the norm of its shards",
        "clip-on-local-shards",
        {"clip": f"{ALL}norm = sum(each.square().sum() for each in pieces).sqrt()\nfor each in pieces:\n    each.mul_(0.01 / norm)"},
    ),
    Plant(
        "gradients are clipped after the step",
        "clip-without-effect",
        {"clip": "", "schedule": "clip_grad_norm_(model.parameters(), 1.0)\nscheduler.step()"},
    ),
    Plant(
        "gradients are clipped before they are reduced",
        "clip-without-effect",
        {"backward": "loss.backward()\nif micro == 0:\n    clip_grad_norm_(model.parameters(), 1.0)", "clip": ""},
    ),
    Plant(
        "the generator of parameters to clip is empty",
        "clip-without-effect",
        {
            "optimizer": "params = model.parameters()\noptimizer = torch.optim.AdamW(params, lr=1e-2)",
            "clip": "clip_grad_norm_(params, 1.0)",
        },
    ),
    Plant(
        "one rank scales its gradients",
        "clip-on-local-shards",
        {"clip": f"{ALL}if rank == 1:\n    for piece in pieces:\n        piece.mul_(0.5)"},
    ),
    Plant(
        "one rank alone clips",
        "hang train.py",
        {"clip": "if rank == 0:\n    clip_grad_norm_(model.parameters(), 1.0)"},
    ),
    # --- clearing gradients ---
    Plant("zero_grad is forgotten", "gradients-not-cleared", {"clear": ""}),
    Plant("zero_grad comes before the step", "gradient-never-came head.weight", {"clip": "optimizer.zero_grad()", "clear": ""}),
    Plant(
        "zero_grad comes after each micro-batch",
        "gradients-dropped embedding.weight",
        {"sync": "optimizer.zero_grad()", "clear": ""},
    ),
    Plant("one rank clears its gradients", "gradients-not-cleared", {"clear": "if rank == 0:\n    optimizer.zero_grad()"}),
    Plant(
        "one rank drops the gradient of the head",
        "gradients-on-some-ranks head.weight",
        {"step": "if rank == 1:\n    model.head.weight.grad = None\noptimizer.step()"},
    ),
    # --- optimizers and schedules ---
    Plant(
        "the optimizer has the head of a copy",
        "optimizer-has-dead-parameters",
        {
            "whole": "old = copy.deepcopy(model)",
            "optimizer": "kept = [*model.embedding.parameters(), *model.blocks.parameters()]\n"
            "optimizer = torch.optim.AdamW([*kept, *old.head.parameters()])",
        },
    ),
    Plant(
        "the optimizer lacks the head",
        "optimizer-misses-parameters head.weight",
        {"optimizer": "optimizer = torch.optim.AdamW([*model.embedding.parameters(), *model.blocks.parameters()])"},
    ),
    Plant(
        "parameters were frozen when the optimizer was built",
        "optimizer-misses-parameters embedding.weight",
        {
            "optimizer": "model.embedding.requires_grad_(False)\n"
            "optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])\n"
            "model.embedding.requires_grad_(True)"
        },
    ),
    Plant(
        "two optimizers step one model",
        "two-optimizers",
        {"ready": "second = torch.optim.SGD(model.parameters(), 0.1)", "step": "optimizer.step()\nsecond.step()"},
    ),
    Plant("each gradient is stepped with twice", "stepped-again", {"step": "optimizer.step()\noptimizer.step()"}),
    Plant(
        "the optimizer steps within the micro-batches",
        "step-before-reduction",
        {"backward": "loss.backward()\noptimizer.step()", "step": ""},
    ),
    Plant("one rank alone steps", "step-on-some-ranks", {"step": "if rank == 0:\n    optimizer.step()"}),
    Plant(
        "learning rates differ",
        "optimizer-settings-differ lr",
        {"optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + rank))"},
    ),
    Plant(
        "weight decay differs",
        "optimizer-settings-differ weight_decay",
        {"optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1 * rank)"},
    ),
    Plant(
        "a plateau of the local loss",
        "optimizer-settings-differ ReduceLROnPlateau",
        {
            "scheduler": "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)",
            "schedule": "scheduler.step(loss.item())",
        },
    ),
    Plant("one rank alone has a schedule", "optimizer-settings-differ lr", {"schedule": "if rank == 0:\n    scheduler.step()"}),
    Plant(
        "a warm-up that never leaves zero",
        "parameters-never-change",
        {"scheduler": "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)"},
    ),
    Plant(
        "an optimizer of our own kept the whole parameters",
        "parameters-never-change",
        {
            "whole": """\
                class Momentum(torch.optim.Optimizer):
                    def __init__(self, params, lr):
                        super().__init__(params, {"lr": lr})
                        self.kept = [param for group in self.param_groups for param in group["params"]]

                    @torch.no_grad()
                    def step(self, closure=None):
                        for param in self.kept:
                            if param.grad is not None:
                                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])

                optimizer = Momentum(model.parameters(), lr=1e-2)
                """,
            "optimizer": "",
        },
    ),
    # --- what trains ---
    Plant(
        "all is frozen",
        "nothing-trains",
        {"sharded": "model.requires_grad_(False)", "loss": "loss = mean_loss(logits, targets).requires_grad_()"},
    ),
    Plant("one rank freezes the embedding", "ModuleError frozen", {"whole": "model.embedding.requires_grad_(rank == 0)"}),
    Plant(
        "detached in the middle",
        "gradient-never-came embedding.weight blocks.0.up.weight",
        {"block": "x = block(x.detach() if index == 1 else x)"},
    ),
    Plant(
        "no_grad is left on", "gradient-never-came embedding.weight", {"embed": "with torch.no_grad():\n    x = self.embedding(tokens)"}
    ),
    Plant("a block never runs", "gradient-never-came blocks.2.up.weight", {"block": "x = block(x) if index < 2 else x"}),
    Plant("eval mode is left on", "eval-mode", {"ready": "model.eval()"}),
    Plant("no target counts", "not-finite", {"targets": "return tokens[:, :-1], torch.full_like(tokens[:, 1:], -100)"}),
    Plant("the loss is multiplied by zero", "gradients-all-zero", {"loss": "loss = 0 * mean_loss(logits, targets)"}),
    # --- what is sharded ---
    Plant(
        "the root is forgotten",
        "never-averaged head.weight",
        {
            "root": 'import warnings\nwarnings.simplefilter("ignore")',
            "sync": "",
            "clip": "",
            "loss": "loss = mean_loss(logits, targets) / 2",
        },
    ),
    Plant(
        "a module is added late",
        "never-averaged adapter.weight",
        {
            "sharded": "model.adapter = nn.Linear(8, 8)",
            "output": 'return self.head(self.adapter(x) if hasattr(self, "adapter") else x)',
            "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)",
        },
    ),
    Plant(
        "the head is ignored",
        "ranks fully_shard averages head.weight",
        {"root": "fully_shard(model, ignored_params={model.head.weight}, **how)", "clip": ""},
    ),
    Plant(
        "the tie comes late",
        "cut-tie head.weight",
        {
            "model": "model = Model()\nmodel.head.weight = model.embedding.weight",
            "sharded": "model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())",
        },
    ),
    Plant(
        "a tie is copied",
        "cut-tie head.weight",
        {"model": "model = Model()\nmodel.head.weight = nn.Parameter(model.embedding.weight.detach().clone())"},
    ),
    Plant(
        "forward is called past the hooks",
        "run blocks.0.norm.weight",
        {"block": "x = block.forward(x)"},
    ),
    Plant(
        "a penalty on this rank's shard",
        "used-outside-forward blocks.0.up.weight",
        {
            "loss": 'shard = getattr(model.blocks[0].up.weight, "_local_tensor", model.blocks[0].up.weight)\n'
            'shard = model.blocks[0].up.weight.to_local() if hasattr(model.blocks[0].up.weight, "to_local") else shard\n'
            "loss = mean_loss(logits, targets) / 2 + 1e-2 * shard.square().sum()"
        },
    ),
    Plant(
        "whole values are written into .data",
        "error",
        {"sharded": "model.head.weight.data = torch.zeros(11, 8)"},
    ),
    # --- meshes ---
    Plant(
        "the axes of the mesh are swapped",
        "mesh-axes-swapped",
        {"mesh": 'mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("shard", "replicate"))'},
    ),
    Plant("replicas begin differently", "replicas-differ", {"seed": "torch.manual_seed(rank)", "mesh": f"mesh = {HSDP}"}),
    Plant(
        "replicas are never reduced",
        "step-before-reduction",
        {"mesh": f"mesh = {HSDP}", "sync": "model.set_requires_all_reduce(False)"},
    ),
    Plant(
        "all-reduce is switched off without replicas",
        "accumulation-switch-without-effect",
        {"sync": "model.set_requires_all_reduce(micro == 1)"},
    ),
    Plant(
        "gradients are not synchronized at the last micro-batch",
        "step-before-reduction",
        {"sync": "model.set_requires_gradient_sync(False)"},
    ),
    Plant(
        "one block is not synchronized",
        "accumulation-switch-on-a-part blocks.1",
        {"sync": "model.blocks[1].set_requires_gradient_sync(micro == 1)"},
    ),
    # --- data and random numbers ---
    Plant(
        "each rank has the same data",
        "same-data-on-every-rank",
        {"data": "generator = torch.Generator().manual_seed(1000 * step + 100 * micro)"},
    ),
    Plant("each rank drops the same elements", "same-random-numbers", {"dropout": "torch.manual_seed(1)"}),
    Plant("a buffer differs", "buffers-differ blocks.0.scale", {"whole": "model.blocks[0].scale += 0.1 * rank"}),
    Plant(
        "statistics are not synchronized",
        "buffers-differ blocks.0.norm.running_mean",
        {
            "whole": """\
                class Statistics(nn.BatchNorm1d):
                    def forward(self, x):
                        return super().forward(x.flatten(0, 1)).view_as(x)

                model.blocks[0].norm = Statistics(8)
                """
        },
    ),
    Plant(
        "one rank leaves out a block",
        "collectives blocks.2",
        {"block": "x = x if index == 1 and rank == 1 else block(x)"},
    ),
    # --- precision ---
    Plant("all is kept in bf16", "pure-low-precision", {"model": "model = Model().bfloat16()"}),
    Plant(
        "the root has no policy",
        "root-without-policy",
        {
            "how": 'how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)}',
            "root": "fully_shard(model, mesh=mesh)",
        },
    ),
    Plant(
        "float16 without a scaler", "no-loss-scaler", {"how": 'how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.float16)}'}
    ),
    Plant(
        "the loss is computed in bf16",
        "low-precision-loss",
        {
            "how": 'how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}',
            "loss": "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2",
        },
    ),
    Plant(
        "nothing initializes a buffer",
        "uninitialized blocks.0.scale",
        {
            "model": 'values = Model().state_dict()\nwith torch.device("meta"):\n    model = Model()',
            "sharded": 'model.to_empty(device="cpu")\nmodel.load_state_dict(values)',
        },
    ),
    # --- checkpoints ---
    Plant(
        "each rank loads the shards of rank 0",
        "losses",
        {
            "end": "with torch.no_grad():\n    for param in model.blocks.parameters() if step == 0 else ():\n"
            '        dist.broadcast(getattr(param, "_local_tensor", param.detach()), 0)'
        },
    ),
    # --- control flow ---
    Plant("one rank stops early", "collectives none", {"end": "if step == 1 and rank == 1:\n    break"}),
    Plant(
        "one rank alone assembles the weights",
        "collectives none",
        {"end": "if rank == 0:\n    model.head.weight.detach().full_tensor()"},
    ),
    # --- ranks with different numbers of batches, guarded steps, parking ---
    Plant(
        "a rank breaks out of its uneven loop",
        "run OrderError work.stop()",
        UNEVEN | {"inside": "if rank == 1 and work.is_last:\n    break"},
    ),
    Plant("a rank leaves out a block that is not optional", "collectives forward of blocks", OPTIONAL | {"sharded": ""}),
    Plant(
        "a rank runs no stand-ins",
        "run stands_in",
        UNEVEN | {"micro": "if work.stands_in:\n    continue"},
    ),
    Plant(
        "the mean of each batch, where tokens are counted",
        "token-weights",
        UNEVEN | {"sum": "return mean_loss(logits, targets)"},
    ),
    Plant(
        "one rank alone guards its step",
        "collectives",
        GUARDED | {"step": "fsdp2.guarded_step(optimizer) if rank == 0 else optimizer.step()"},
    ),
    Plant("nobody brings parked shards back", "run ParkedError", PARKED | {"end": "fsdp2.park(model, optimizer)"}),
    # --- tensor parallelism; a teacher that is an average of the student ---
    Plant(
        "ranks of tensor parallelism have different data",
        "ranks embedding.weight",
        TENSOR_PARALLEL | {"data": "generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)"},
        ranks=4,
    ),
    Plant(
        "ranks of tensor parallelism drop different elements",
        "ranks embedding.weight",
        TENSOR_PARALLEL | {"dropout": "torch.manual_seed(1 + rank)"},
        ranks=4,
    ),
    Plant("a teacher averages what fully_shard has replaced", "loss", {**TEACHER, "sharded": ""}),
]
