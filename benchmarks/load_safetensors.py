"""How long does loading a checkpoint into shards take, and how much memory, against loading all everywhere and broadcasting?

A GPT of about 1 GB in fp32 (--quick: 120 MB) on the meta device, to be sharded over gloo ranks, in new processes each time; the files
are in the page cache. Three ways to the same values, each as one would write it:

    ours       ``fully_shard``, ``load_safetensors``: each rank reads the bytes of its own shards
    all        every rank reads the whole model, then ``fully_shard`` keeps its slices
    broadcast  ``fully_shard``; rank 0 reads the whole state dict and ``set_model_state_dict`` broadcasts it

Time is from the meta model to the last rank's values; memory the peak resident set of a rank over what it was before (of rank 0, and
the largest of the others: with "broadcast" they differ). The kernel's own count of bytes that a process has read by system calls
(``/proc/self/io``) shows that ours reads its share and the headers, nothing else; the other two map files, which that count does not
see. A rank needs at least model bytes over ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.checkpoint import load_safetensors

WAYS = ("ours", "all", "broadcast")
VOCAB_SIZE, LENGTH, NUM_HEADS = 8192, 128, 8
SMALL, LARGE = (512, 7), (1024, 19)  # dim, number of blocks


def new_model(size: tuple[int, int]) -> models.GPT:
    with torch.device("meta"):
        return models.GPT(VOCAB_SIZE, LENGTH, *size, NUM_HEADS)


def write_checkpoint(folder: Path, size: tuple[int, int], num_files: int = 4) -> int:
    """Files and index as Hugging Face lays them out; returns the bytes of all tensors."""
    state = {name: torch.full(value.shape, float(index)) for index, (name, value) in enumerate(new_model(size).state_dict().items())}
    names = list(state)
    weight_map = {}
    for index in range(num_files):
        file = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[index * len(names) // num_files : (index + 1) * len(names) // num_files]
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(value.nbytes for value in state.values())


def load(way: str, model: nn.Module, mesh: DeviceMesh, folder: Path) -> int:
    """The bytes that ``load_safetensors`` has read, by the kernel's count. Collective: yes, over the world; that itself is not."""
    if way == "all":
        model.to_empty(device="cpu")
        model.load_state_dict(read_all(folder))
    common.shard(model, model.blocks, common.OURS, mesh)
    before = bytes_read()
    if way == "ours":
        load_safetensors(model, folder)
    read = bytes_read() - before
    if way == "broadcast":
        model.to_empty(device="cpu")
        state = read_all(folder) if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return read


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def run_rank(rank: int, way: str, world_size: int, size: tuple[int, int], directory: str) -> None:
    """Load once and write down what it took. Collective: yes, over the world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", world_size), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = new_model(size)
    reset_peak()
    before = resident()
    dist.barrier()
    begin = time.perf_counter()
    read = load(way, model, mesh, Path(directory) / "checkpoint")
    dist.barrier()
    spent = time.perf_counter() - begin
    for index, param in enumerate(model.parameters()):
        assert (param.to_local() == index).all(), f"{way} has loaded other values"  # a fast wrong load is worth nothing
    result = {"seconds": spent, "memory": peak() - before, "read": read, "share": sum(p.to_local().nbytes for p in model.parameters())}
    (Path(directory) / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def reset_peak() -> None:
    """Begin a new peak of the resident set (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return max(_status("VmHWM"), resident())


def bytes_read() -> int:
    """Bytes that the process has read by system calls, from the page cache or the disk."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def measure(way: str, world_size: int, size: tuple[int, int], checkpoint: Path) -> list[dict[str, Any]]:
    """One load in fresh processes; what each rank wrote down."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "checkpoint").symlink_to(checkpoint)
        # Forked: fresh memory without importing torch again, which takes longer than to load.
        arguments = (way, world_size, size, directory)
        torch.multiprocessing.start_processes(run_rank, arguments, nprocs=world_size, start_method="fork")
        return [json.loads((Path(directory) / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def report(options: argparse.Namespace, world_size: int, nbytes: int, results: dict[str, list[list[dict[str, Any]]]]) -> None:
    case = f"{nbytes / 1e6:.0f} MB, {world_size} ranks"

    def one(figure: str, unit: str, samples: common.Samples, target: common.Target | None = None) -> None:
        result = common.Result.of("load_safetensors", figure, case, unit, samples, target, model_mb=nbytes / 1e6)
        common.report(result, options.json)

    one("load time", "s", {way: [max(rank["seconds"] for rank in run) for run in runs] for way, runs in results.items()})
    mb = {way: [[rank["memory"] / 1e6 for rank in run] for run in runs] for way, runs in results.items()}
    one("peak memory, rank 0", "MB", {way: [run[0] for run in runs] for way, runs in mb.items()})
    one("peak memory, largest other rank", "MB", {way: [max(run[1:]) for run in runs] for way, runs in mb.items()})
    if "ours" in results:
        ratios = [max(rank["read"] / rank["share"] for rank in run) for run in results["ours"]]
        one("bytes read over the rank's share", "x", {common.OURS: ratios}, common.Target(1.01, 1.001, of="own"))


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments.add_argument("--rounds", type=int, help="loads of each way (2)")
    options = arguments.parse_args()
    common.start(options, __doc__)
    size = SMALL if options.quick else LARGE
    rounds = options.rounds or 2  # a round is six loads of 1 GB
    with tempfile.TemporaryDirectory() as checkpoint:
        nbytes = write_checkpoint(Path(checkpoint), size)
        for world_size in options.worlds:
            results: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in options.ways}
            for _ in range(rounds):
                for way in options.ways:
                    results[way].append(measure(way, world_size, size, Path(checkpoint)))
            report(options, world_size, nbytes, results)


if __name__ == "__main__":
    main()
