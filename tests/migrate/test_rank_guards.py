"""Where one rank alone saves: which ranks pass the guard decides what the state dict before it is."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

from fsdp2.migrate.source import migrate_source

HEAD = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

"""
ON_RANK_0 = "fsdp2.checkpoint.full_state_dict(model)"
ON_ALL = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"


def migrated(body: str) -> str:
    new = migrate_source(f"{HEAD}model = DDP(net)\n{textwrap.dedent(body)}").new
    ast.parse(new)
    return "".join(line for line in new.splitlines(keepends=True) if not line.strip().startswith("#"))


@pytest.mark.parametrize(
    "test",
    [
        "local_rank == 0",
        "args.local_rank == 0",
        "not local_rank",
        "dist.get_node_local_rank() == 0",
        'int(os.environ["LOCAL_RANK"]) == 0',
        'os.environ.get("LOCAL_RANK") is 0',
        "accelerator.is_local_main_process",
        "is_local_master()",
        "node_rank == 0",
        "dist.get_rank(group) == 0",
        "dist.get_rank() % 8 == 0",
        "mesh.get_local_rank() == 0",
        "tp_rank == 0",
        "self.localRank == 0",
    ],
)
def test_state_that_a_rank_of_each_node_saves_is_whole_on_every_rank(test: str) -> None:
    """It was ``full_state_dict``, which is empty but on rank 0: the second node wrote an empty file."""
    new = migrated(f"if {test}:\n    torch.save(model.module.state_dict(), 'x.pt')\n")
    assert f"model_state = {ON_ALL}\nif {test}:\n    torch.save(model_state, 'x.pt')" in new
    assert "full_state_dict(model)" not in new


@pytest.mark.parametrize(
    ("setup", "test", "expected"),
    [
        ('rank = int(os.environ["LOCAL_RANK"])', "rank == 0", ON_ALL),
        ("rank = dist.get_rank() % per_node", "rank == 0", ON_ALL),
        ('local_rank = int(os.environ["RANK"])', "local_rank == 0", ON_RANK_0),
        ('r = int(os.getenv("RANK", 0))', "r == 0", ON_RANK_0),
        ("first = local_rank == 0", "first", ON_ALL),
        ("def is_first():\n    return local_rank == 0", "is_first()", ON_ALL),
        ("def is_first():\n    return dist.get_rank() == 0", "is_first()", ON_RANK_0),
        ("", "rank in [-1, 0]", ON_RANK_0),
        ("", "args.local_rank in (-1, 0)", ON_ALL),
        ("", "rank < 1", ON_RANK_0),
        ("", "rank == 0 and local_rank == 0", ON_RANK_0),
    ],
)
def test_rank_is_what_its_value_says_before_what_its_name_says(setup: str, test: str, expected: str) -> None:
    new = migrated(f"{setup}\nif {test}:\n    torch.save(model.state_dict(), 'x.pt')\n")
    assert f"model_state = {expected}\nif {test}:\n    torch.save(model_state, 'x.pt')" in new


def test_rank_that_a_function_is_called_with_is_followed() -> None:
    body = "def save(rank):\n    if rank == 0:\n        torch.save(model.state_dict(), 'x.pt')\n\nsave(int(os.environ['LOCAL_RANK']))\n"
    assert f"    model_state = {ON_ALL}\n    if rank == 0:" in migrated(body)


@pytest.mark.parametrize("test", ["lora_rank == 0", "ranking == 0", "frank == 0", "rank == 3", "low_rank"])
def test_what_is_no_rank_of_a_process_is_no_guard(test: str) -> None:
    """A name with "rank" in it was one: the state was taken on rank 0 alone, and the others saved an empty dict."""
    new = migrated(f"if {test}:\n    torch.save(model.state_dict(), 'x.pt')\n")
    if test == "rank == 3":
        assert "if rank == 3:" in new
    else:
        assert f"if {test}:\n" in new
        assert f"torch.save({ON_ALL}, 'x.pt')" in new


@pytest.mark.parametrize("which", ["rank", "local_rank"])
@pytest.mark.parametrize(
    "guarded",
    [
        "if 1:\n    if {which}:\n        print()\n    else:\n        torch.save(model.state_dict(), 'x.pt')\n",
        "if 1:\n    if not {which} == 0:\n        print()\n    else:\n        torch.save(model.state_dict(), 'x.pt')\n",
    ],
)
def test_ranks_that_take_the_other_branch_take_part_too(which: str, guarded: str) -> None:
    """Rank 0 alone came to the collective."""
    new = migrated(guarded.format(which=which))
    value = ON_RANK_0 if which == "rank" else ON_ALL
    assert f"    model_state = {value}\n    if " in new
    assert "torch.save(model_state, 'x.pt')" in new


@pytest.mark.parametrize(
    "guarded",
    [
        "def save():\n    if rank != 0:\n        return\n    print()\n    torch.save(model.state_dict(), 'x.pt')\n",
        "for i in range(3):\n    if rank > 0:\n        continue\n    torch.save(model.state_dict(), 'x.pt')\n",
    ],
)
def test_state_behind_a_test_after_which_other_ranks_leave_is_listed(guarded: str) -> None:
    """Nothing said that rank 0 alone came to the collective."""
    listed = [finding.text for finding in migrate_source(f"{HEAD}model = DDP(net)\n{guarded}").findings]
    assert any("where other ranks leave: call fsdp2.checkpoint.full_state_dict(model) on every rank" in each for each in listed)


def test_choice_in_an_expression_takes_the_state_before_the_statement() -> None:
    new = migrated("state = model.state_dict() if dist.get_rank() == 0 else None\n")
    assert f"model_state = {ON_RANK_0}\nstate = model_state if dist.get_rank() == 0 else None\n" in new


def test_condition_that_depends_on_the_rank_otherwise_too_is_listed() -> None:
    text = f"{HEAD}model = DDP(net)\nif rank == 0 or debug:\n    torch.save(model.state_dict(), 'x.pt')\n"
    listed = [finding.text for finding in migrate_source(text).findings]
    assert any("a state dict under `if rank == 0 or debug`" in each for each in listed)


@pytest.mark.parametrize("between", ["", "    def _snapshot(self, epoch):\n        self._save(epoch)\n"])
def test_a_guarded_call_of_a_method_that_takes_the_state_is_named(between: str) -> None:
    """The pattern of DDP's tutorial. Under a strategy that shards, rank 0 would have gathered alone."""
    called = "_snapshot" if between else "_save"
    body = f"""
class Trainer:
    def __init__(self, net, rank):
        self.model, self.rank = DDP(net), rank
    def _save(self, epoch):
        torch.save(self.model.module.state_dict(), "x.pt")
{between}
    def train(self):
        for epoch in range(3):
            if self.rank == 0 and epoch % 2 == 0:
                self.{called}(epoch)
"""
    findings = [str(each) for each in migrate_source(HEAD + body).findings]
    assert any(f"self.{called}(epoch) `self.rank == 0 and epoch % 2 == 0` takes a state dict" in each for each in findings), findings


@pytest.mark.parametrize(
    ("test", "expression"),
    [
        ("`self.rank == 0`", "self.rank == 0 and {call}"),
        ("`self.rank == 0 and e % 2`", "self.rank == 0 and e % 2 and {call}"),
        ("`not (self.rank != 0)`", "self.rank != 0 or {call}"),
        ("`not (self.rank)`", "self.rank or {call}"),
        ("`self.rank == 0`", "{call} if self.rank == 0 else None"),
        ("`not (self.rank)`", "None if self.rank else {call}"),
        ("`self.rank == 0`", "done = [self.rank == 0 and {call} for e in range(3)]"),
    ],
)
def test_a_condition_on_the_rank_may_be_an_expression(test: str, expression: str) -> None:
    """``and`` and ``or`` were no guards: rank 0 would have gathered alone, and the state of a guarded line was taken inside of it."""
    body = f"""
class Trainer:
    def __init__(self, net, rank):
        self.model, self.rank = DDP(net), rank
    def _save(self):
        torch.save(self.model.state_dict(), "x.pt")
    def train(self, e):
        {expression.format(call="self._save()")}
"""
    findings = [str(each) for each in migrate_source(HEAD + body).findings]
    assert any(f"self._save() {test} takes a state dict" in each for each in findings), findings
    if "done" not in expression:
        guarded = expression.replace("self.", "").format(call="torch.save(model.state_dict(), 'x.pt')")
        value = f"{ON_RANK_0} if e % 2 else None" if "e % 2" in test else ON_RANK_0
        expected = f"model_state = {value}\n{guarded.replace('model.state_dict()', 'model_state')}\n"
        assert expected in migrated(f"{guarded}\n")


FSDP1_HELPER = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def load(net, opt, path):
    state = torch.load(path)
{lines}
"""


@pytest.mark.parametrize(
    "lines",
    [
        "    opt.load_state_dict(FSDP.optim_state_dict_to_load(net, opt, state))",
        "    sharded = FSDP.optim_state_dict_to_load(model=net, optim=opt, optim_state_dict=state)\n    opt.load_state_dict(sharded)",
        "    sharded = FSDP.shard_full_optim_state_dict(state, net, optim=opt)\n    opt.load_state_dict(sharded)",
    ],
)
def test_a_helper_that_loads_an_optimizer_made_elsewhere_shards_its_state(lines: str) -> None:
    """It became ``opt.load_state_dict(state)``: whole tensors in the place of shards."""
    new = migrate_source(FSDP1_HELPER.replace("{lines}", lines)).new
    ast.parse(new)
    assert "set_optimizer_state_dict(net, opt, s" in new
    assert ".load_state_dict(" not in new


@pytest.mark.parametrize("wraps", ["DDP(net)", "FSDP(net)"])
def test_a_function_applied_to_a_wrapped_model_is_named(wraps: str) -> None:
    imports = f"{HEAD}from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    source = f"{imports}net.apply(init)\nmodel = {wraps}\nmodel.apply(init)\n"
    (finding,) = [each for each in map(str, migrate_source(source).findings) if "apply" in each]
    assert "model.apply(init) gives the function shards now" in finding


@pytest.mark.parametrize(
    ("loop", "is_named"),
    [
        ("for each in {model}.modules():\n    init(each)", True),
        ("for name, each in {model}.named_modules():\n    if isinstance(each, nn.Linear):\n        init(name, module=each)", True),
        ("done = [init(each) for each in {model}.children()]", True),
        ("done = [(lambda it: init(it))(each) for each in {model}.children()]", True),
        ("done = list(map(init, {model}.modules()))", True),
        ("collections.deque(map(lambda each: init(each), {model}.children()), maxlen=0)", True),
        ("kinds = set(map(type, {model}.modules()))", False),
        ("rates = [*map(lambda each: getattr(each, 'p', 0.0), {model}.modules())]", False),
        ("for each in {model}.modules():\n    if isinstance(each, nn.Dropout):\n        each.p = 0.0", False),
    ],
)
def test_a_loop_that_gives_the_modules_of_a_wrapped_model_to_a_function_is_named(loop: str, is_named: bool) -> None:
    source = f"{HEAD}{loop.format(model='net')}\nmodel = DDP(net)\n{loop.format(model='model')}\n"
    found = [each for each in map(str, migrate_source(source).findings) if "gives the function shards now" in each]
    assert [bool(re.search(r"\binit\b.* for each of model", each)) for each in found] == [True] * is_named
