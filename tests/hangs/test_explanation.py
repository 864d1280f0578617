"""The sentences about hangs, of reports that the tests make."""

from dataclasses import replace

from fsdp2.hangs.explanation import explain
from fsdp2.hangs.patience import Patience, Sign
from fsdp2.hangs.report import Report
from fsdp2.inspect import Record, Stage


def item(number, kind="all-gather", unit="layers.0", phase="forward", numel=96, *, step=12, stage=Stage.DONE):
    return Record(number, "group", kind, unit, phase, step, numel, "float32", stage)


def report(rank, place, *items, entered=(), stacks="thread MainThread"):
    return Report(rank, "node", 100 + rank, place, list(entered), {"group": (0, 1, 2, 3)}, list(items), stacks)


def test_who_waits_where_and_who_never_came():
    waits = item(214, "reduce-scatter", "layers.7", "backward", stage=Stage.WAITING)
    behind = item(213, unit="layers.8", phase="backward")
    reports = {rank: report(rank, ("backward", "layers.7"), behind, waits) for rank in (0, 2, 3)}
    reports[1] = report(1, ("backward", "layers.8"), behind, entered=[("backward", "layers.8")])
    last = "last finished all-gather of layers.8 in backward (step 12, #213)"
    assert explain(reports, 4, {}).splitlines()[:2] == [
        "ranks 0, 2, 3 wait in reduce-scatter of layers.7 in backward (step 12, #214)",
        f"  rank 1 never entered backward of layers.7: in backward of layers.8; {last}",
    ]


def test_a_call_that_only_some_ranks_have_made_is_named_with_the_ranks_that_have_not():
    inside = replace(report(0, ("", "")), call="full_state_dict", calls={"full_state_dict": 3})
    reports = {0: inside, 2: replace(inside, rank=2), 1: replace(report(1, ("", "")), calls={"full_state_dict": 2})}
    assert explain(reports, 3, {}).splitlines()[0] == (
        "ranks 0, 2 wait in full_state_dict, call 3, which all ranks must make: rank 1 has not made it; "
        "call it outside of `if rank == 0:`"
    )
    told = explain({rank: replace(inside, rank=rank) for rank in range(3)}, 3, {})
    assert "which all ranks must make" not in told  # they save together
    assert Report.from_json(inside.to_json()) == inside
    of_two = replace(inside, of_call=(0, 2))  # rank 1 belongs to another mesh
    assert Report.from_json(of_two.to_json()) == of_two
    assert "has not made it" not in explain({0: of_two, 1: report(1, ("", "")), 2: replace(of_two, rank=2)}, 3, {})
    waiting = explain({0: of_two, 1: report(1, ("", "")), 2: report(2, ("", ""))}, 3, {})
    assert "full_state_dict, call 3, which all its ranks must make: rank 2 has not made it" in waiting


def test_the_first_collective_for_which_ranks_send_something_else():
    same, other = item(2, numel=96), item(2, numel=128)
    reports = {rank: report(rank, ("forward", "layers.0"), item(1), same if rank else other) for rank in range(4)}
    assert explain(reports, 4, {}).splitlines()[0] == (
        "ranks have not issued the same collective #2: rank 0 all-gather of layers.0 in forward, 128 x float32; "
        "ranks 1-3 all-gather of layers.0 in forward, 96 x float32"
    )


def test_a_rank_that_does_not_answer_comes_first():
    waits = item(1, stage=Stage.WAITING)
    reports = {rank: report(rank, ("forward", "layers.0"), waits) for rank in (0, 1, 2)}
    first, second, *rest = explain(reports, 4, {3: 31.2}).splitlines()
    assert first == "rank 3 does not answer (its last sign was 31 s ago): its process is gone, or stopped"
    assert second == "ranks 0-2 wait in all-gather of layers.0 in forward (step 12, #1)"
    assert not any("the network" in line for line in rest)
    assert explain(reports, 4, {}, left={3: ""}).splitlines()[0] == "rank 3 has left the watchdog"
    assert (
        explain(reports, 4, {}, left={3: " with ValueError: ..."}).splitlines()[0]
        == "rank 3 has left the watchdog with ValueError: ..."
    )


def test_where_ranks_sent_different_things_each_wait_has_its_name_and_the_network_is_not_blamed():
    reports = {}
    for rank in range(4):
        waits = item(2, unit="layers.1" if rank else "layers.0", stage=Stage.WAITING)
        reports[rank] = report(rank, ("forward", "layers.0"), item(1), waits)
    first, *waits = explain(reports, 4, {}).splitlines()[:3]
    assert first.startswith("ranks have not issued the same collective #2: ")
    assert waits == [
        "rank 0 waits in all-gather of layers.0 in forward (step 12, #2)",
        "ranks 1-3 wait in all-gather of layers.1 in forward (step 12, #2)",
    ]
    assert "the network" not in explain(reports, 4, {})


def test_a_rank_that_failed_in_forward_is_said_to_have_failed_there():
    waits = item(2, unit="layers.1", stage=Stage.WAITING)
    reports = {rank: report(rank, ("forward", "layers.1"), item(1), waits) for rank in range(3)}
    reports[3] = replace(report(3, ("", ""), item(1)), failed=("forward", "layers.0"))
    assert "  rank 3 never entered forward of layers.1: failed in forward of layers.0; last finished" in explain(reports, 4, {})


def test_where_all_have_come_the_backend_is_named_and_where_none_waits_their_places():
    waits = item(1, stage=Stage.WAITING)
    reports = {rank: report(rank, ("forward", "layers.0"), waits) for rank in range(4)}
    assert "  all of its ranks are in it: the network, the backend or the device does not go on" in explain(reports, 4, {}).splitlines()
    reports = {rank: report(rank, ("", ""), item(1)) for rank in range(4)}
    assert explain(reports, 4, {}).splitlines()[0] == "ranks 0-3 wait in no collective of fsdp2, outside of forward and backward"


def test_equal_stacks_are_printed_once_and_reports_travel_as_text():
    reports = {rank: report(rank, ("forward", "layers.0"), item(1), entered=[("forward", "")]) for rank in range(4)}
    assert explain(reports, 4, {}).count("thread MainThread") == 1
    assert Report.from_json(reports[2].to_json()) == reports[2]


def test_patience_ends_when_neither_collectives_nor_python_move_on_any_rank():
    patience = Patience(timeout=10, patience=100, num_ranks=2, now=0)
    patience.hear({0: Sign(1, 5, 7), 1: Sign(1, 5, 7)}, (), 0)
    patience.hear({0: Sign(2, 5, 7), 1: Sign(2, 5, 7)}, (), 9)  # they look on, which is no move
    assert patience.is_over(9) == ""
    assert patience.is_over(10) == "nothing has moved on any rank for 10 s"
    patience.hear({0: Sign(3, 5, 7), 1: Sign(3, 6, 7)}, (), 10)
    assert patience.is_over(19) == ""


def test_python_that_runs_on_one_rank_buys_time_but_not_for_ever():
    """Rank 0 evaluates, or a step is slow: the others wait for it."""
    patience = Patience(timeout=10, patience=100, num_ranks=2, now=0)
    for now in range(0, 100, 5):
        patience.hear({0: Sign(now, 5, at=now), 1: Sign(now, 5, at=0)}, (), now)
        assert patience.is_over(now) == ""
    assert patience.is_over(100) == "no collective has moved on any rank for 100 s, though Python runs on some"


def test_a_rank_that_looks_no_longer_is_known_to_be_silent():
    patience = Patience(timeout=10, patience=100, num_ranks=2, now=0)
    patience.hear({0: Sign(1, 5, 7), 1: Sign(1, 5, 7)}, (), 1)
    patience.hear({0: Sign(2, 5, 7), 1: Sign(1, 5, 7)}, (), 9)
    assert (patience.silent_for(0, 9), patience.silent_for(1, 9), patience.silent_for(2, 9)) == (0, 8, None)


def test_a_rank_that_has_not_begun_is_waited_for_longer():
    patience = Patience(timeout=10, patience=100, num_ranks=2, now=0)
    patience.hear({0: Sign(1, 5, 7)}, (), 0)
    assert patience.is_over(99) == ""
    assert patience.is_over(100) == "no collective has moved on any rank for 100 s, and some ranks have not begun"
