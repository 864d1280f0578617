"""Check the devices and the network of all hosts before a training starts: half a minute now, or a hang later.

    torchrun --nnodes 2 ... examples/check_hosts.py --min-gbps 10

Every rank computes on its device, all ranks add up numbers of which they know the sum, and each host sends a block to the
next one. Rank 0 prints a line for each host. The status is 1, on all hosts, if a device is missing, taken, or computes
nonsense, if the sum is wrong, or if a link is slower than `--min-gbps`. A host that does not answer ends the check after
`--timeout` seconds, with an error on the others.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def own_device() -> torch.device:
    """The device, as in the training: one GPU a rank, or the CPU if the host has none at all."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def device_problem(device: torch.device, gpus: int, min_free: float) -> str | None:
    """The faults of this rank's device. ``gpus``: how many the host must show; ``min_free``: the share of memory that must be free."""
    if torch.cuda.device_count() < gpus:
        return f"has {torch.cuda.device_count()} GPUs, and should have {gpus}"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info()
            if free < min_free * total:
                return f"{device} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free: another process is on it"
        ones = torch.ones(512, 512, device=device)
        if not bool((ones @ ones == 512).all()):
            return f"{device} multiplies matrices wrongly"
    except RuntimeError as error:
        return f"{device}: {str(error).splitlines()[0]}"
    return None


def gbit_per_s(device: torch.device, peer: int, sends: bool, nbytes: int) -> float:
    """Best of three blocks from one rank to another, there and an answer back, as the sender measures it."""
    block, answer = torch.ones(nbytes, dtype=torch.uint8, device=device), torch.zeros(1, device=device)
    best = 0.0
    for _ in range(4):  # the first one connects
        began = time.perf_counter()
        if sends:
            dist.send(block, peer)
            dist.recv(answer, peer)
        else:
            dist.recv(block, peer)
            dist.send(answer, peer)
        answer.item()
        best = max(best, nbytes * 8e-9 / (time.perf_counter() - began))
    return best


def check(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Every problem, equal on all ranks."""
    rank, world_size, local_size = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    talk = dist.new_group(backend="gloo")  # it works where a GPU does not
    told: list[tuple[str, str | None]] = [("", None)] * world_size
    dist.all_gather_object(told, (socket.gethostname(), device_problem(device, args.gpus, args.min_free)), group=talk)
    names = [name for name, _ in told]
    problems = [f"{name}: {problem}" for name, problem in told if problem]
    if problems:
        return sorted(set(problems))

    total = torch.full((args.mib * 2**18,), float(rank + 1), device=device)
    dist.all_reduce(total)
    if not bool((total == world_size * (world_size + 1) / 2).all()):
        problems.append(f"{names[rank]}: rank {rank} got a wrong sum from all ranks")

    firsts = list(range(0, world_size, local_size))  # the first rank of each host
    speed = None
    for place, sender in enumerate(firsts if len(firsts) > 1 else []):
        receiver = firsts[(place + 1) % len(firsts)]
        if rank in (sender, receiver):
            measured = gbit_per_s(device, receiver if rank == sender else sender, rank == sender, args.mib * 2**20)
            speed = measured if rank == sender else speed
    if speed is not None and speed < args.min_gbps:
        problems.append(f"{names[rank]}: sends {speed:.1f} Gbit/s to the next host, less than {args.min_gbps:g}")

    found: list[tuple[float | None, list[str]]] = [(None, [])] * world_size
    dist.all_gather_object(found, (speed, problems), group=talk)
    if rank == 0:
        for first in firsts:
            link = f", {found[first][0]:.1f} Gbit/s to the next host" if found[first][0] is not None else ""
            print(f"check_hosts: {names[first]}: {local_size} x {device.type}{link}", flush=True)
    return [problem for _, some in found for problem in some]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check devices and network of all hosts. Start it with torchrun.")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each host must have")
    parser.add_argument("--min-free", type=float, default=0.9, help="share of a GPU's memory that must be free")
    parser.add_argument("--min-gbps", type=float, default=0.0, help="Gbit/s that a host must reach to the next one")
    parser.add_argument("--mib", type=int, default=64, help="size of the blocks that are sent")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a host that does not answer")
    args = parser.parse_args()
    device = own_device()
    if device.type == "cuda" and int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count():
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=args.timeout))
    problems = check(args, device)
    if dist.get_rank() == 0:
        for problem in problems:
            print(f"check_hosts: {problem}", file=sys.stderr, flush=True)
    dist.barrier(group=dist.new_group(backend="gloo"))  # torchrun ends all ranks with the first that fails: rank 0 has spoken
    dist.destroy_process_group()
    return 1 if problems else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # as in train_lm.py: a thread of gloo may still hold a tensor
