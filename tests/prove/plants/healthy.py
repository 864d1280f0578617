"""Variations of the script of ``user_programs.py`` that have no fault, and examples of this project: nothing may be reported."""

from __future__ import annotations

from plants.user_programs import GUARDED, HSDP, OPTIONAL, PARKED, TEACHER, TENSOR_PARALLEL, UNEVEN, Plant

POLICY = 'how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}'

GAN = {
    "whole": "judge = nn.Sequential(nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 1))",
    "sharded": "fully_shard(judge, **how)\nof_judge = torch.optim.AdamW(judge.parameters(), lr=1e-2)",
    "sync": "real = F.one_hot(targets, 11).float()",
    "forward": "of_judge.zero_grad()\nlogits = model(tokens)",
    "loss": "ones, zeros = torch.ones(4, 5, 1), torch.zeros(4, 5, 1)\n"
    "loss = F.binary_cross_entropy_with_logits(judge(real), ones)\n"
    "loss = loss + F.binary_cross_entropy_with_logits(judge(logits.detach()), zeros)",
    "backward": "loss.backward()\nof_judge.step()\noptimizer.zero_grad()\n"
    "F.binary_cross_entropy_with_logits(judge(logits), ones).backward()\noptimizer.step()",
    "clip": "",
    "step": "",
}
HAND_CLIP = """\
from torch.distributed.tensor import DTensor
pieces = [param.grad.to_local() {} for param in model.parameters()]
norm = sum(piece.square().sum() for piece in pieces)
dist.all_reduce(norm)
for piece in pieces:
    piece.mul_(0.05 / norm.sqrt())
"""

HEALTHY = [
    Plant("the script as it is", "", {}),
    Plant("each micro-batch is synchronized", "", {"sync": ""}),
    Plant(
        "losses divided by all tokens, and ranks have different numbers of tokens",
        "",
        {
            "targets": "return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(5) > 2 + rank, -100)",
            "loss": 'total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")\n'
            "tokens = (targets != -100).sum()\ndist.all_reduce(tokens)\n"
            "loss = total * ranks / tokens / 2",
        },
    ),
    Plant(
        "sums of losses, and a divisor of gradients for them",
        "",
        {
            "sharded": "for each in [*model.blocks, model]:\n    each.set_gradient_divide_factor(1.0)",
            "loss": "loss = mean_loss(logits, targets) / 2 / ranks",
        },
    ),
    Plant(
        "a frozen base",
        "",
        {
            "whole": "model.requires_grad_(False)\nmodel.head.requires_grad_(True)\nmodel.blocks[2].requires_grad_(True)",
            "optimizer": "optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)",
        },
    ),
    Plant("tied weights", "", {"model": "model = Model()\nmodel.head.weight = model.embedding.weight"}),
    Plant("replicas", "", {"mesh": f"mesh = {HSDP}"}),
    Plant("two replicas of two shards", "", {"mesh": f"mesh = {HSDP}"}, ranks=4),
    Plant(
        "replicas are reduced with the last micro-batch",
        "",
        {"mesh": f"mesh = {HSDP}", "sync": "model.set_requires_all_reduce(micro == 1)"},
    ),
    Plant("mixed precision", "", {"how": POLICY}),
    Plant(
        "a moving average of the weights",
        "",
        {
            "sharded": "average = copy.deepcopy(model).requires_grad_(False)",
            "end": "with torch.no_grad():\n    for kept, param in zip(average.parameters(), model.parameters()):\n"
            "        kept.lerp_(param, 0.1)",
        },
    ),
    Plant(
        "a plateau of the mean loss",
        "",
        {
            "scheduler": "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
            "schedule": "mean = loss.detach()\ndist.all_reduce(mean)\nscheduler.step(mean)",
        },
    ),
    Plant(
        "evaluation between steps",
        "",
        {"end": "model.eval()\nwith torch.no_grad():\n    mean_loss(model(tokens), targets)\nmodel.train()"},
    ),
    Plant(
        "two losses of one forward",
        "",
        {"loss": "loss = (mean_loss(logits, targets) + 0.1 * F.mse_loss(logits, torch.zeros_like(logits))) / 2"},
    ),
    Plant(
        "activations are computed again",
        "",
        {
            "block": "x = checkpoint(block, x, use_reentrant=False)",
            "patch": "from torch.utils.checkpoint import checkpoint",
        },
    ),
    Plant("weights stay after forward", "", {"how": 'how = {"mesh": mesh, "reshard_after_forward": False}'}),
    Plant(
        "two tasks with a backward each",
        "",
        {
            "sync": "",
            "backward": "mean_loss(model(tokens), tokens).backward()\nloss.backward()",
            "loss": "loss = mean_loss(logits, targets)",
        },
    ),
    Plant(
        "two tasks with a backward each, and one reduction",
        "",
        {
            "sync": "model.set_requires_gradient_sync(False)",
            "backward": "mean_loss(model(tokens), tokens).backward()\nmodel.set_requires_gradient_sync(True)\n(0.1 * loss).backward()",
            "loss": "loss = mean_loss(logits, targets)",
        },
    ),
    Plant(
        "two predictions, and one weighs less",
        "",
        {"loss": "loss = (mean_loss(logits, targets) + 0.5 * mean_loss(logits[:, :-1], targets[:, 1:])) / 2"},
    ),
    Plant("a generator and its judge", "", GAN),
    Plant(
        "a generator and its judge, whose steps come last",
        "",
        GAN
        | {
            "forward": "optimizer.zero_grad()\nlogits = model(tokens)",
            "loss": "F.binary_cross_entropy_with_logits(judge(logits), torch.ones(4, 5, 1)).backward()\nof_judge.zero_grad()\n"
            + GAN["loss"],
            "backward": "loss.backward()\noptimizer.step()\nof_judge.step()",
            "clear": "",
        },
    ),
    Plant("clipped by hand", "", {"clip": HAND_CLIP.format("")}),
    Plant(
        "clipped by hand, if they are DTensors",
        "",
        {"clip": HAND_CLIP.format("if isinstance(param.grad, DTensor) else param.grad")},
    ),
    Plant(
        "made on the meta device, and initialized on shards",
        "",
        {
            "model": 'with torch.device("meta"):\n    model = Model()',
            "sharded": 'model.to_empty(device="cpu")\nfor module in model.modules():\n'
            '    module.reset_parameters() if hasattr(module, "reset_parameters") else None\n'
            "for block in model.blocks:\n    block.scale.fill_(0.5)",
        },
    ),
    Plant(
        "made on the meta device, and loaded",
        "",
        {
            "model": 'values = Model().state_dict()\nwith torch.device("meta"):\n    model = Model()',
            "sharded": "from torch.distributed.tensor import distribute_tensor\n"
            "own = {name: values[name] for name in model.state_dict()}\n"
            'if hasattr(model.head.weight, "device_mesh"):\n'
            "    own = {name: distribute_tensor(each, mesh, model.get_parameter(name).placements) for name, each in own.items()}\n"
            "model.load_state_dict(own, assign=True)\n"
            "for block in model.blocks:\n    block.scale = torch.full((8,), 0.5)",
        },
    ),
    Plant(
        "a part of a block is computed again",
        "",
        {
            "patch": "from torch.utils.checkpoint import checkpoint\ndef inner(block, x):\n"
            "    return block.down(block.up(block.norm(x)).tanh()) * block.scale.type_as(x)",
            "model": "Block.forward = lambda self, x: x + checkpoint(inner, self, x, use_reentrant=False)\nmodel = Model()",
        },
    ),
    Plant("tensor parallelism", "", TENSOR_PARALLEL, ranks=4),
    Plant("a teacher that averages the student", "", TEACHER),
    Plant("ranks with different numbers of batches", "", UNEVEN),
    Plant("a rank without batches", "", UNEVEN | {"batches": "batches = batches if rank else []"}),
    Plant("a block that one rank leaves out", "", OPTIONAL),
    Plant("a step that one rank refuses", "", GUARDED),
    Plant("parked after each step", "", PARKED),
    Plant("examples/tutorial/step1_two_processes.py", "", {}),
    Plant("examples/tutorial/step2_large_models.py", "", {}),
    Plant("examples/clients/experts.py", "", {}, ranks=4),
    Plant("examples/clients/fabric_loop.py", "", {}),
    Plant("examples/clients/accelerate_loop.py", "", {}),
]
