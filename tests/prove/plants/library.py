"""Faults of the library, which each rank plants in it before the script of ``user_programs.py`` runs.

Runs on the reference have them as well, and none of their effects: the reference has its own code.
"""

from __future__ import annotations

from plants.user_programs import GUARDED, HSDP, PARKED, UNEVEN, Plant

PATCH = """\
from fsdp2.core.comm import collectives
from fsdp2.core.group import all_gather, gradients, handing_out, param, reduction

def plant(owner, name):
    def put(fault):
        usual = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: fault(usual, *args, **kwargs))
    return put

"""
CLIP = "import fsdp2\nfrom fsdp2 import clip\n"
ROUNDS = "import fsdp2\nfrom fsdp2.agreed import rounds\n"
LOADS = """\
from fsdp2.core.modules import state_dicts
loads = []
@plant(state_dicts.Loading, "__call__")
def _(usual, *args, **rest):
    loads.append(1)
    return usual(*args, **rest)
"""
SYNCHRONIZED = {"sync": ""}
REPLICAS = {"mesh": f"mesh = {HSDP}"}


def fault(name: str, words: str, code: str, lines: dict[str, str] | None = None, **rest: int) -> Plant:
    return Plant(name, words, {**(lines or {}), "patch": PATCH + code}, **rest)


def division(arguments: str) -> str:
    return f"""\
@plant(gradients, "divisions_for")
def _(usual, shards, replicas, dtype, backend, factor=None, *rest):
    return usual(shards, replicas, dtype, backend, {arguments}, *rest)
"""


def copied_out(code: str) -> str:
    """After the copy-out: ``outs`` are the parameters of a gather, a row for each rank."""
    return f"""\
@plant(all_gather.Gathering, "finish")
def _(usual, self):
    had = self.packed is not None
    usual(self)
    outs = self.sender.plan.copy_outs if had else []
{code}
"""


def collected(before: str = "", after: str = "") -> str:
    """``waiting`` are the gradients of earlier micro-batches, ``buffer`` all that are about to be reduced."""
    return f"""\
@plant(gradients.Gradients, "collect")
def _(usual, self, grads):
    waiting = self._accumulated
    {before or "pass"}
    buffer = usual(self, grads)
    if buffer is not None:
        {after or "pass"}
    return buffer
"""


LIBRARY_PLANTS = [
    # --- division ---
    fault("divides by one rank too few", "gradients is 2 times", division("shards * replicas - 1")),
    fault("divides by the root of the ranks", "gradients is 1.414 times", division("(shards * replicas) ** 0.5")),
    fault("divides by the square of the ranks", "gradients is 0.5 times", division("float((shards * replicas) ** 2)")),
    fault(
        "the factor that was set is ignored",
        "gradients blocks.1 is 2 times",
        division("None"),
        {"sharded": "model.blocks[1].set_gradient_divide_factor(4.0)"},
    ),
    fault("replicas are not counted", "gradients is 2 times", division("shards"), REPLICAS),
    # --- reduction ---
    fault(
        "the gradients of one rank do not arrive",
        "gradients",
        """\
@plant(collectives, "reduce_scatter")
def _(usual, output, buffer, *rest):
    if rank == 1:
        buffer.zero_()
    return usual(output, buffer, *rest)
""",
    ),
    fault(
        "the gradients of one rank count twice",
        "gradients",
        """\
@plant(collectives, "reduce_scatter")
def _(usual, output, buffer, *rest):
    return usual(output, buffer.mul_(2) if rank == 1 else buffer, *rest)
""",
    ),
    fault(
        "the pieces of two ranks are exchanged",
        "gradients",
        """\
@plant(collectives, "reduce_scatter")
def _(usual, output, buffer, *rest):
    return usual(output, buffer.view(ranks, -1).flip(0).reshape(-1), *rest)
""",
    ),
    fault(
        "the all-reduce over replicas is left out",
        "gradients",
        '@plant(reduction.Reduction, "all_reduce")\ndef _(usual, *rest):\n    pass\n',
        REPLICAS,
    ),
    fault("gradients are rounded to bf16 before they are reduced", "gradients", collected(after="buffer.copy_(buffer.bfloat16())")),
    fault("one element is not written", "gradients", collected(after="buffer[1] = 0")),
    fault("the end of the buffer is not written", "gradients", collected(after="buffer.view(ranks, -1)[:, -24:] = 0")),
    # --- accumulation ---
    fault("gradients that wait are lost", "gradients", collected("self._accumulated = None")),
    fault("gradients that wait are added twice", "gradients", collected("if waiting is not None: waiting.mul_(2)")),
    fault(
        "gradients that wait are divided as well",
        "gradients",
        collected("if waiting is not None and self.micro_batch.reduces: waiting.div_(ranks)"),
    ),
    fault(
        "the last micro-batch replaces the others",
        "gradients",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    for view in views:
        view.param.sharded.grad = None
    usual(self, reduced, views)
""",
        SYNCHRONIZED,
    ),
    fault(
        "partial sums of replicas are lost",
        "gradients",
        """\
@plant(gradients.Gradients, "reduce")
def _(usual, self, buffer):
    if self._adding is not None and self.micro_batch.all_reduces:
        self._adding = None
    return usual(self, buffer)
""",
        {**REPLICAS, "sync": "model.set_requires_all_reduce(micro == 1)"},
    ),
    # --- handing out ---
    fault(
        "two parameters get each other's gradient",
        "gradients norm",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, views)
    by_name = {view.param.fqn.rpartition("blocks.")[2]: view.param.sharded for view in views}
    for index in range(3):
        one, other = by_name.get(f"{index}.norm.weight"), by_name.get(f"{index}.norm.bias")
        if one is not None and other is not None:
            one.grad, other.grad = other.grad, one.grad
""",
    ),
    fault(
        "one parameter gets no gradient",
        "gradients norm.weight",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, [view for view in views if "norm.weight" not in view.param.fqn])
""",
    ),
    fault(
        "biases are not divided",
        "gradients is 2 times norm.bias",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, views)
    for view in views:
        if view.param.fqn.endswith("bias"):
            view.param.sharded.grad.mul_(ranks)
""",
    ),
    fault(
        "one parameter gets its gradient with the other sign",
        "gradients is -1 times norm.weight",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, views)
    for view in views:
        if view.param.fqn.endswith("norm.weight"):
            view.param.sharded.grad.neg_()
""",
    ),
    fault(
        "gradients are those of the step before",
        "gradients step",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, views)
    for view in views:
        param = view.param.sharded
        new = param.grad.clone()
        param.grad.copy_(given.get(view.param.fqn, new))
        given[view.param.fqn] = new
given = {}
""",
    ),
    fault(
        "gradients are handed out twice",
        "gradients is 2 times",
        """\
@plant(handing_out.HandedOut, "_give")
def _(usual, self, reduced, views):
    usual(self, reduced, views)
    usual(self, reduced, views)
""",
    ),
    fault(
        "a gradient that only other ranks have is not handed out",
        "run train.py",
        '@plant(handing_out.HandedOut, "add_late")\ndef _(usual, self, flags):\n    self._late, self.output = [], None\n',
        {"output": "return self.head(x) if rank == 0 else F.linear(x, self.embedding.weight)"},
    ),
    # --- gathering ---
    fault("one parameter is not copied out", "loss", copied_out("    for out in outs[:1]:\n        out.zero_()")),
    fault(
        "one rank's elements are sent one place further",
        "loss",
        """\
@plant(all_gather.Gather, "to_send")
def _(usual, self, flat):
    outputs, inputs = usual(self, flat)
    return outputs, [each.roll(1) for each in inputs] if rank == 1 else inputs
""",
    ),
    fault("one rank's rows are not copied out", "loss", copied_out("    for out in outs:\n        out.view(ranks, -1)[1] = 0")),
    fault(
        "two parameters are exchanged",
        "loss",
        copied_out(
            "    for one, other in zip(outs, outs[1:]):\n        if one.shape == other.shape:\n"
            "            kept = one.clone()\n            one.copy_(other)\n            other.copy_(kept)\n            break"
        ),
    ),
    fault(
        "the rows of two ranks are exchanged",
        "loss",
        copied_out("    for out in outs:\n        out.copy_(out.view(ranks, -1).flip(0).view_as(out))"),
    ),
    fault("parameters are rounded to bf16", "loss", copied_out("    for out in outs:\n        out.copy_(out.bfloat16())")),
    fault(
        "one rank sends old values",
        "loss step",
        """\
@plant(all_gather.Gather, "to_send")
def _(usual, self, flat):
    outputs, inputs = usual(self, flat)
    kept = sent.setdefault(id(self), [each.clone() for each in inputs])
    return outputs, kept if rank == 1 else inputs
sent = {}
""",
    ),
    fault(
        "all ranks send old values",
        "loss",
        """\
@plant(all_gather.Gather, "to_send")
def _(usual, self, flat):
    outputs, inputs = usual(self, flat)
    return outputs, sent.setdefault(id(self), [each.clone() for each in inputs])
sent = {}
""",
    ),
    fault(
        "columns are put together as rows",
        "loss",
        '@plant(all_gather, "assemble")\n'
        "def _(usual, rows, cut, whole):\n    whole.copy_(rows.reshape(-1)[: whole.numel()].view_as(whole))\n",
        {
            "how": "from torch.distributed.tensor import Shard\n"
            'how = {"mesh": mesh, "shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None}'
        },
    ),
    fault(
        "ranks keep each other's piece of the first values",
        "parameters",
        """\
@plant(param, "own_shard")
def _(usual, original, spec, rank):
    return usual(original, spec, rank if len(original) % ranks else ranks - 1 - rank)
""",
    ),
    # --- clipping, random numbers, order ---
    fault(
        "each rank clips by its own norm",
        "gradients",
        CLIP + '@plant(clip, "_all_reduce")\ndef _(usual, terms, *rest):\n    return terms\n',
        {"clip": "fsdp2.clip_grad_norm_(model.parameters(), 0.01)"},
    ),
    fault(
        "the norm counts replicas",
        "gradients",
        CLIP
        + """\
@plant(clip, "clip_coefficient")
def _(usual, total, most):
    return usual(total * (2**0.5 if type(model.head.weight) is not nn.Parameter else 1), most)
""",
        {"clip": "fsdp2.clip_grad_norm_(model.parameters(), 0.01)"},
    ),
    fault(
        "gradients are clipped twice",
        "gradients",
        CLIP
        + """\
@plant(clip, "clip_coefficient")
def _(usual, total, most):
    return usual(total, most) ** (2 if type(model.head.weight) is not nn.Parameter else 1)
""",
        {"clip": "fsdp2.clip_grad_norm_(model.parameters(), 0.01)"},
    ),
    fault(
        "hooks draw random numbers",
        "loss",
        """\
from fsdp2.core.modules import hooks
@plant(hooks.UnitHooks, "_post_forward")
def _(usual, *rest):
    torch.rand(1)
    return usual(*rest)
""",
    ),
    fault(
        "one rank issues a collective more",
        "collective",
        """\
@plant(collectives, "all_gather")
def _(usual, *args):
    calls.append(1)
    if rank == 1 and len(calls) == 6:
        dist.all_reduce(torch.ones(3))
    return usual(*args)
calls = []
""",
    ),
    # --- ranks with different numbers of batches, guarded steps, parking ---
    fault("stand-ins contribute", "gradients", ROUNDS + "rounds.Work._contribute = lambda *_: None\n", UNEVEN),
    fault(
        "batches count alike",
        "loss times",
        ROUNDS + '@plant(rounds, "_checked_count")\ndef _(usual, value):\n    return 20.0\n',
        UNEVEN,
    ),
    fault(
        "a rank refuses a step alone",
        "collectives",
        "import fsdp2\nfrom fsdp2.agreed import guarded\nguarded.largest_over = lambda axes, mine: [mine]\n",
        GUARDED,
    ),
    fault(
        "a guarded step clips twice",
        "parameters",
        "import fsdp2\nfrom fsdp2.agreed import guarded\n"
        '@plant(guarded, "clip_coefficient")\ndef _(usual, *rest):\n    return usual(*rest) ** 2\n',
        GUARDED | {"step": 'optimizer.param_groups[0]["eps"] = 0.1\n' + GUARDED["step"].replace("1.0", "0.1")},
    ),
    fault(
        "parked shards come back without a piece",
        "loss",
        """\
import fsdp2
from fsdp2 import parking
@plant(parking, "_unpark")
def _(usual, groups, *rest):
    usual(groups, *rest)
    with torch.no_grad():
        groups[0].params[0].sharded.to_local().zero_()
""",
        PARKED,
    ),
    # --- after a load ---
    fault(
        "gradients are divided twice after a load",
        "checkpoint is 0.5 times",
        LOADS + collected(after="buffer.mul_(0.5 if loads else 1)"),
        ranks=4,
    ),
    fault(
        "forward goes on with the values from before a load",
        "checkpoint the loss is",
        LOADS
        + """@plant(all_gather.Gather, "to_send")
def _(usual, self, flat):
    outputs, inputs = usual(self, flat)
    if not loads:
        sent[id(self)] = [each.clone() for each in inputs]
    return outputs, sent[id(self)]
sent = {}
""",
        ranks=4,
    ),
]
