"""Ranks that are forks of this process: what bodies and scripts see, how they end, and that nothing outlives them."""

import atexit
import copy
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2.ranks
from fsdp2 import fully_shard
from fsdp2.errors import OrderError
from fsdp2.ranks import OVER, RankEnd, Ranks, _Run, run_ranks
from fsdp2.run import run_script
from fsdp2.torch_names import torch_dtensors


def test_a_body_meets_the_other_ranks_and_gives_its_result_back(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    atexit.register(os.write, 1, b"the parent ends\n")
    torch.ones(300, 300).requires_grad_().matmul(torch.ones(300, 300)).sum().backward()  # pools of threads, and autograd's state
    offset = torch.full((2,), 10.0)  # a closure's

    def body(rank):
        dist.init_process_group("gloo")
        total = offset + rank.rank
        dist.all_reduce(total)
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
        rank.send(torch.get_num_threads())
        rank.send({name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")})
        print(f"rank {rank.rank} of {rank.num_ranks} is here")
        return total, float(weight.grad.sum())

    ranks = run_ranks(3, body, env={"EXTRA": "1"}, output=sys.stdout, limit_s=60)
    atexit.unregister(os.write)
    assert (ranks.status, ranks.is_late, ranks.first_failed) == (0, False, None)
    for rank, end in enumerate(ranks):
        assert (end.rank, end.status, end.error, end.stack) == (rank, 0, "", "")
        torch.testing.assert_close(end.result, (torch.full((2,), 33.0), 2.0 * 64**3))
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "EXTRA": "1"}
        assert end.sent == [1, names]
        assert end.output == f"rank {rank} of 3 is here\n"
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}] rank {rank} of 3 is here" for rank in range(3)]


def test_a_script_sees_what_python_would_show_it(tmp_path):
    (tmp_path / "helper.py").write_text("value = 7\n")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import atexit, os, sys, threading, warnings, __main__
            import helper
            warnings.warn("no error here, as it would be in the tests", FutureWarning)
            class Here: pass
            print(sys.argv, __name__, __main__.Here is Here, os.getcwd(), helper.value, repr(sys.stdin.read()))
            atexit.register(print, "atexit")
            threading.Timer(0.05, print, ["thread"]).start()
            rank = int(os.environ["RANK"])
            if rank == 1:
                sys.exit(5)
            if rank == 2:
                sys.exit("no such thing")
            if rank == 3:
                os._exit(6)
            if rank == 4:
                raise ValueError("wrong here")
            """
        )
    )

    def body(rank):
        rank.send("before")
        run_script(str(script), ["--lr", "1"])
        return "after"

    ranks = run_ranks(5, body, cwd=tmp_path, limit_s=60)
    assert [end.status for end in ranks] == [0, 5, 1, 6, 1]
    assert [end.result for end in ranks] == ["after", None, None, None, None]
    assert all(end.sent == ["before"] for end in ranks)
    seen = f"['{script}', '--lr', '1'] __main__ True {tmp_path} 7 ''\n"
    assert ranks[0].output.endswith(f"{seen}thread\natexit\n")
    assert ranks[0].output == ranks[1].output
    assert "no such thing\n" in ranks[2].output
    assert ranks[3].output.endswith(seen)
    assert ranks[4].error == "ValueError: wrong here"
    assert "Traceback" in ranks[4].output
    assert ranks.status in (1, 5, 6)


def test_ranks_that_wait_for_one_that_failed_are_ended_with_their_stacks():
    def body(rank):
        if rank.rank == 1:
            raise ValueError("only here")
        threading.Event().wait()

    ranks = run_ranks(3, body, grace_s=0.1, limit_s=60)
    assert ranks.first_failed is ranks[1]
    assert (ranks.status, ranks.is_late) == (1, False)
    assert ranks[1].error == "ValueError: only here"
    for end in (ranks[0], ranks[2]):
        assert end.status == -signal.SIGTERM
        assert "in wait" in end.stack
        assert "in body" in end.stack


def test_a_hang_ends_at_the_limit_with_the_stack_of_each_rank_also_where_sigterm_is_ignored():
    def body(rank):
        if rank.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.init_process_group("gloo")
        if rank.rank == 1:
            threading.Event().wait()
        dist.barrier()

    ranks = run_ranks(2, body, limit_s=10)  # a loaded machine takes seconds to come to the body
    assert (ranks.status, ranks.is_late) == (OVER, True)
    assert "in body" in ranks[0].stack
    assert [end.status for end in ranks] == [-signal.SIGTERM, -signal.SIGKILL]


def test_a_crash_has_a_status_and_a_stack():
    ranks = run_ranks(1, lambda rank: os.kill(os.getpid(), signal.SIGSEGV), limit_s=60)
    assert ranks[0].status == -signal.SIGSEGV
    assert ranks.status == 128 + signal.SIGSEGV
    assert "Segmentation fault" in ranks[0].stack


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_parent(number):
    """Neither ranks nor what they have started; an interrupted parent ends them as well."""
    reading, writing = os.pipe()

    def body(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        os.write(writing, f"{os.getpid()} {child.pid}\n".encode())
        threading.Event().wait()

    parent = os.fork()
    if parent == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in jobs that a shell runs in the background
        try:
            run_ranks(2, body)
        finally:
            os._exit(0)
    with os.fdopen(reading) as pipe:
        lives = [os.pidfd_open(int(pid)) for _ in range(2) for pid in pipe.readline().split()]
    os.close(writing)
    os.kill(parent, number)
    os.waitpid(parent, 0)
    for life in lives:
        assert select.select([life], [], [], 30)[0], "it lives on"
        os.close(life)


@pytest.mark.parametrize("started", [0, 1, 2])
def test_ctrl_c_while_ranks_start_ends_those_that_have(started, monkeypatch):
    """Symptom: FileNotFoundError of a log that was not there yet hid the interrupt."""
    fork, forked = _Run._fork, []

    def interrupted(run, *arguments):
        if len(forked) == started:
            raise KeyboardInterrupt
        forked.append(fork(run, *arguments))
        return forked[-1]

    monkeypatch.setattr(_Run, "_fork", interrupted)
    ranks = run_ranks(2, lambda rank: threading.Event().wait(), stops_on=(KeyboardInterrupt,), limit_s=60)
    assert isinstance(ranks.stopped_by, KeyboardInterrupt)
    assert len(ranks) == 2
    assert all(end.status in (-signal.SIGTERM, -signal.SIGKILL) for end in ranks)
    assert not any(process.is_alive() for process in forked)


class NeedsTwoError(Exception):
    """Pickles, and cannot be made again: ``args`` holds one argument."""

    def __init__(self, one, two):
        super().__init__(one)


def test_a_value_that_cannot_be_read_here_takes_no_other_with_it():
    def body(rank):
        rank.send("before")
        if rank.rank == 1:
            rank.send(NeedsTwoError(1, 2))
            __main__ = sys.modules["__main__"]
            __main__.OfTheScript = type("OfTheScript", (), {"__module__": "__main__"})
            rank.send(__main__.OfTheScript())
        rank.send("after")
        return rank.rank

    ranks = run_ranks(2, body, limit_s=60)
    assert [(end.status, end.sent, end.result) for end in ranks] == [(0, ["before", "after"], 0), (0, ["before", "after"], 1)]
    assert ranks[0].error == ""
    assert "cannot be read here: TypeError" in ranks[1].error


def test_of_ranks_that_ended_between_two_looks_the_one_that_a_signal_ended_failed_first():
    ends = [RankEnd(0, 1, 2.0, error="Connection closed by peer"), RankEnd(1, -9, 2.0), RankEnd(2, 1, 1.0)]
    assert Ranks(ends[:2]).first_failed is ends[1]
    assert Ranks(ends).first_failed is ends[2]


def test_a_line_without_an_end_is_read_once_and_shown_whole(tmp_path, capsys):
    """Symptom: every look read again what a progress bar had printed without a newline, from its beginning."""
    run = _Run(1, tmp_path, sys.stdout)
    log, read = tmp_path / "rank0.log", []
    for look in range(5):
        with log.open("a") as file:
            file.write(f"\r{look * 20} %" + "\nthe next\n" * (look == 3))
        run._show()
        read.append(run._shown[0])
    assert read[:3] == [4, 9, 14]  # bytes
    run.kill()
    shown = capsys.readouterr().out
    assert shown.splitlines() == [
        "[rank 0] ",
        *(f"[rank 0] {percent} %" for percent in (0, 20, 40, 60)),
        "[rank 0] the next",
        "[rank 0] ",
        "[rank 0] 80 %",
    ]


def test_a_process_that_is_a_rank_itself_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OrderError, match="no rank itself"):
            run_ranks(2, print)
    finally:
        dist.destroy_process_group()


def blocks():
    torch.manual_seed(0)
    layers = (nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(4))).double()


def trained(model, rank=0, size=1):
    """Losses of 4 steps on one rank's rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        x = torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


MESHES = {
    "HSDP": {"replicate": 8, "shard": 8},
    "HSDP and tensor parallelism": {"replicate": 4, "shard": 4, "tp": 4},
    "shards over two of four axes": {"replicate": 2, "shard": 4, "context": 2, "tp": 4},
}


def sharded(model, axes):
    """The sharded model, and the mesh over whose ranks the rows are cut."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    shards = torch_dtensors.flatten_mesh(mesh, tuple(name for name in ("shard", "context") if name in axes))
    data = torch_dtensors.concatenate_meshes([mesh["replicate"], shards])
    for block in model:
        if "tp" in axes:
            parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data), data


@pytest.mark.slow
def test_64_ranks_train_four_blocks_as_one_process_does_on_meshes_of_two_to_four_axes():
    whole = blocks()
    expected = trained(whole)

    def body(rank):
        dist.init_process_group("gloo")
        for name, axes in MESHES.items():
            model, data = sharded(blocks(), axes)
            row, column = data.get_coordinate()
            losses = trained(model, row * data.size(1) + column, data.size())
            dist.all_reduce(losses)
            torch.testing.assert_close(losses / 64, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
            for key, param in model.named_parameters():
                own, theirs = param.full_tensor(), whole.get_parameter(key)
                torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, at=(name, key): f"{at}: {text}")
            rank.send(name)

    ranks = run_ranks(64, body, limit_s=600)
    assert ranks.status == 0, ranks.first_failed and ranks.first_failed.error
    assert all(end.sent == list(MESHES) for end in ranks)


@pytest.mark.slow
def test_experts_on_a_mesh_of_their_own_give_the_same_losses_on_64_ranks_as_on_one(tmp_path):
    examples = Path(__file__).parents[1] / "examples" / "clients"
    text = (examples / "experts.py").read_text()
    script = tmp_path / "experts.py"
    script.write_text(text.replace("EXPERTS, TOKENS = 6, 16, 4, 64", "EXPERTS, TOKENS = 6, 16, 4, 1024"))
    assert script.read_text() != text

    def body(rank):
        sys.path.append(str(examples))
        run_script(str(script), [])

    one, many = (run_ranks(number, body, limit_s=600) for number in (1, 64))
    assert (one.status, many.status) == (0, 0), (one.first_failed, many.first_failed)
    losses = [[float(word) for word in ranks[0].output.split()[1:]] for ranks in (one, many)]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("computes", "waits", "is_stalled"), [(0, 1, False), (0, 0, True), (0.003, 0.05, True), (0.02, 0, False), (0.02, 0.9, False)]
)
def test_ranks_hang_if_they_compute_next_to_nothing_and_do_not_wait_for_a_processor(computes, waits, is_stalled, tmp_path, monkeypatch):
    """By shares of the time, on a made-up clock. Threads of gloo and the store compute 0.3 % while they wait."""
    now = [0.0]
    run = _Run(2, tmp_path, None)
    alive = types.SimpleNamespace(pid=7, is_alive=lambda: now[0] < 60, exitcode=None, terminate=lambda: None, join=lambda seconds: None)
    run._processes = [alive, alive, alive]
    (tmp_path / "7").mkdir()

    def sleep(seconds):
        now[0] += 1
        ticks = int(now[0] * computes * os.sysconf("SC_CLK_TCK"))
        (tmp_path / "7" / "stat").write_text(f"7 (a (rank)) S {'0 ' * 10} {ticks} {'0 ' * 30}")
        (tmp_path / "7" / "schedstat").write_text(f"0 {int(1e9 * now[0] * waits)} 3")

    sleep(0)
    monkeypatch.setattr(fsdp2.ranks, "_PROC", tmp_path)
    monkeypatch.setattr(fsdp2.ranks, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    run._begin = now[0]
    try:
        assert run.wait(None, 20.0, 5.0) is is_stalled
    finally:
        for end in (run._life, run._own_life, run._ports, run._port_for_ranks):
            os.close(end)
