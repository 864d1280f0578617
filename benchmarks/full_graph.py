"""How does one graph of forward, backward and collectives compare with compiled blocks, and with no compiler?

A GPT over gloo ranks, one process with one thread each. Ours as it comes uses its own algorithms for gloo, in graphs as operators of
its own; the rows named "stock" use the backend's collectives, as upstream does. Three kinds of figures:

* wall time of forward and backward over the plain compiled model, of the slowest rank, in turns: what sharding costs
* the collectives of a step and their bytes, counted where they are issued, and of graphs what computes between start and wait
* the peak of resident memory in a step over what is held between steps, from the kernel's own high-water mark

Numbers of collectives, bytes and positions are the same on every machine; times are those of this one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back at once, so that peaks can be seen

import common
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

VOCAB_SIZE, LENGTH, NUM_HEADS = 2048, 64, 8
TARGET = common.Target(0.8)
REGIONAL, EAGER = "regional", "eager"
REGIONAL_STOCK, GRAPH_STOCK, GRAPH_MERGED, GRAPH_UNORDERED, INDUCTOR_OVERLAP = STOCK = (
    "regional, stock",
    "one graph, stock",
    "one graph, stock, two blocks a bucket",
    "one graph, stock, as traced",
    "one graph, stock, inductor's overlap passes",  # they need Triton
)

COLLECTIVES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
    "broadcast": ("broadcast",),  # what our own algorithms are made of
    "send": ("isend",),
}


def build(name: str, options: argparse.Namespace, mesh: Any) -> nn.Module:
    """The model of one row of the table, compiled as its name says. Collective: no."""
    import fsdp2
    from fsdp2.core.setup.build import private_options

    torch.manual_seed(0)
    model = models.GPT(VOCAB_SIZE, LENGTH, options.dim, options.blocks, NUM_HEADS)
    if name == common.PLAIN:
        model.compile(backend=options.backend)
        return model
    if name == common.UPSTREAM:
        for block in model.blocks:
            block.compile(backend=options.backend)
        return common.shard(model, model.blocks, common.UPSTREAM, mesh)
    if name in STOCK:
        private_options.update(all_gather="stock", reduce_scatter="stock")
    if name in (REGIONAL, REGIONAL_STOCK):
        for block in model.blocks:
            block.compile(backend=options.backend)
    common.shard(model, model.blocks, common.OURS, mesh)
    private_options.clear()
    if name in (common.OURS, GRAPH_STOCK):
        return fsdp2.compile(model, backend=options.backend)
    if name == GRAPH_MERGED:
        return fsdp2.compile(model, backend=options.backend, bucket_bytes=32 << 20)
    if name == GRAPH_UNORDERED:
        return fsdp2.compile(model, backend=options.backend, reorder=False)
    if name == INDUCTOR_OVERLAP:
        passes = {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "aten_distributed_optimizations.collective_bucketing": True,
        }
        return fsdp2.compile(model, reorder=False, options=passes)
    return model


@contextlib.contextmanager
def counted(counts: collections.Counter[str]) -> Iterator[None]:
    """Inside, every collective that is issued from Python is counted, with the bytes of its unsharded side."""
    originals = {name: getattr(dist, name) for names in COLLECTIVES.values() for name in names if hasattr(dist, name)}

    def counting(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            counts[f"{kind}_nbytes"] += max(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            return original(*args, **kwargs)

        return call

    for kind, names in COLLECTIVES.items():
        for name in names:
            if name in originals:
                setattr(dist, name, counting(kind, originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Row:
    """One implementation: its model, and the work of one step."""

    def __init__(self, name: str, options: argparse.Namespace, mesh: Any, tokens: torch.Tensor) -> None:
        self.name = name
        self.model = build(name, options, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.tokens = tokens
        self.loss = 0.0
        begin = time.perf_counter()
        self.sample()
        self.first_step_s = time.perf_counter() - begin
        self.sample()
        self.counts = self.count()
        self.peak_nbytes = self.peak()

    def forward_backward(self) -> None:
        inputs, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        loss = F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        self.loss = loss.item()

    def sample(self) -> float:
        """Milliseconds of one step on the slowest rank. Collective: yes."""
        self.optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        begin = time.perf_counter()
        self.forward_backward()
        spent = torch.tensor([(time.perf_counter() - begin) * 1e3], dtype=torch.float64)
        self.optimizer.step()
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return spent.item()

    def count(self) -> dict[str, Any]:
        """The collectives of one step. Collective: yes."""
        from fsdp2.compiled import graph_summaries

        counts: collections.Counter[str] = collections.Counter()
        with counted(counts):
            self.forward_backward()
        self.optimizer.zero_grad(set_to_none=True)
        found: dict[str, Any] = dict(counts)
        graphs = graph_summaries(self.model)
        for summary in graphs:
            for each in summary.collectives:
                found[each.kind] = found.get(each.kind, 0) + 1
                found[f"{each.kind}_nbytes"] = found.get(f"{each.kind}_nbytes", 0) + each.nbytes
        if graphs:
            found["overlapped"] = {each.kind: [c.overlapped for c in each.collectives] for each in graphs}
            found["graph_peak_mib"] = {each.kind: round(each.peak_nbytes / 2**20, 1) for each in graphs}
        return found

    def peak(self) -> int:
        """The most resident bytes in a step over those before it. Collective: yes."""
        peaks = []
        for _ in range(3):
            self.optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
            self.forward_backward()
            peaks.append(resident("VmHWM") - before)
        return sorted(peaks)[1]


def resident(what: str) -> int:
    """Bytes of this process: VmRSS, what is resident now; VmHWM, the most since the mark was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch._dynamo.config.recompile_limit = 64  # all rows share the code objects of torch's modules
    store = dist.FileStore(f"{directory}/store", options.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    tokens = torch.randint(VOCAB_SIZE, (options.batch, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    names = [*options.implementations, REGIONAL, EAGER]
    if not options.few:
        names += [REGIONAL_STOCK, GRAPH_STOCK, GRAPH_MERGED, GRAPH_UNORDERED]
        if options.backend == "inductor" and find_spec("triton"):
            names.append(INDUCTOR_OVERLAP)
    rows: dict[str, Row] = {}
    for name in names:
        rows[name] = Row(name, options, mesh, tokens)
        if rank == 0:
            row = rows[name]
            print(f"    {name}: first step {row.first_step_s:.1f} s, peak {row.peak_nbytes / 2**20:.0f} MiB, {row.counts}", flush=True)
    rounds = options.rounds or (5 if options.quick else 20)
    samples = common.interleave({name: row.sample for name, row in rows.items()}, rounds, warmup=1)
    if rank == 0:
        report(samples, rows, options)
    dist.barrier()
    os._exit(0)  # gloo's threads abort now and then at an orderly exit


def report(samples: common.Samples, rows: dict[str, Row], options: argparse.Namespace) -> None:
    case = f"GPT of {options.blocks} blocks of {options.dim}, {options.world} ranks, fp32, {options.backend}"
    medians = {name: common.Spread.of(values).p50 for name, values in samples.items()}
    details = {
        "step_ms": medians,
        "over_regional": {name: value / medians[REGIONAL] for name, value in medians.items()},
        "first_step_s": {name: row.first_step_s for name, row in rows.items()},
        "counts": {name: row.counts for name, row in rows.items()},
        "peak_mib": {name: row.peak_nbytes / 2**20 for name, row in rows.items()},
        "last_loss": {name: row.loss for name, row in rows.items()},
    }
    for name, value in medians.items():
        print(f"    {name}: step {value:.0f} ms, {value / medians[REGIONAL]:.2f} of regional, loss {rows[name].loss:.5f}")
    over_plain = common.over_plain(samples)
    common.report(
        common.Result.of("full_graph", "step over plain, both compiled", case, "ms", over_plain, TARGET, **details), options.json
    )
    peaks = {name: [row.peak_nbytes / 2**20] for name, row in rows.items()}
    common.report(common.Result.of("full_graph", "peak of resident memory in a step", case, "MiB", peaks), options.json)


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=2, help="number of processes")
    arguments.add_argument("--rounds", type=int, help="samples of each implementation")
    arguments.add_argument("--dim", type=int, default=512)
    arguments.add_argument("--blocks", type=int, default=6)
    arguments.add_argument("--backend", choices=["inductor", "aot_eager"], default="inductor", help="of all that is compiled")
    arguments.add_argument("--few", action="store_true", help="without the variants of one graph")
    arguments.add_argument("--batch", type=int, default=4, help="sequences a rank")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
