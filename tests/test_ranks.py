"""Ranks that are forks of this process: what bodies and scripts see, how they end, and that nothing outlives them."""

import atexit
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist

from fsdp2.errors import OrderError
from fsdp2.ranks import OVER, run_ranks
from fsdp2.run import run_script


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
            import atexit, os, sys, threading, __main__
            import helper
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
    assert ranks[0].output == ranks[1].output == f"{seen}thread\natexit\n"
    assert "no such thing\n" in ranks[2].output
    assert ranks[3].output == seen
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
        dist.init_process_group("gloo")
        if rank.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        dist.barrier()

    ranks = run_ranks(2, body, limit_s=2)
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


def test_a_process_that_is_a_rank_itself_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OrderError, match="no rank itself"):
            run_ranks(2, print)
    finally:
        dist.destroy_process_group()
