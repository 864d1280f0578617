"""Checks that go wrong in each way there is: what the program makes of them is tested. Not part of ``make gpu``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from gpu.check import Setup, Skip, check
from gpu.device import Device

TWO = Setup(ranks=2)


@check("passes", part=1, setups={"": Setup(), "two": TWO})
def planted_pass(device: Device) -> dict[str, Any]:
    return {"sum": device.ones(3).sum().item()}


@check("is wrong", part=1)
def planted_wrong(device: Device) -> None:
    print("this was printed before it failed")
    assert device.ones(3).sum().item() == 4, "three is not four"


@check("crashes", part=1)
def planted_crash(device: Device) -> None:
    print("this was printed before it crashed", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


@check("hangs", part=1, timeout_s=1)
def planted_hang(device: Device) -> None:
    time.sleep(1000)


@check("lacks something", part=1)
def planted_skip(device: Device) -> None:
    raise Skip("a unicorn")


@check("goes on behind the others", part=1)
def planted_last(device: Device) -> None:
    device.ones(1).item()


@check("fails on one rank while the other waits", part=2, setup=TWO)
def planted_one_rank(device: Device) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 alone")
    dist.all_reduce(device.ones(1))
    device.synchronize()


@check("needs several", part=2, setup=Setup(ranks=0))
def planted_several(device: Device) -> dict[str, Any]:
    total = device.ones(1)
    dist.all_reduce(total)
    return {"ranks": total.item()}
