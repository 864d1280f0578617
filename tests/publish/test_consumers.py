"""Consumers that are slow, or die: no collective waits for them, all ranks raise, and training goes on."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.checkpoint import CheckpointError
from fsdp2.errors import ArgumentError, FSDPError, PublishError
from fsdp2.publishing import Stream, read_file, to_file
from fsdp2.publishing import weights as weights_module
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import fed_own_chunk


def sharded(mesh: DeviceMesh | None = None, num_blocks: int = 3) -> Any:
    model = mlp(num_blocks=num_blocks)
    return shard_blocks(model, mesh=mesh)


def assert_same(received: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    expected = mlp().state_dict()
    assert sorted(received) == sorted(expected)
    assert all(torch.equal(received[name], each.to(dtype)) for name, each in expected.items())


@on_ranks(1, 2, 3)
def test_a_sink_on_any_ranks_gets_every_tensor():
    weights = fsdp2.publish(sharded(), dtype=torch.bfloat16)
    for version, with_sink in enumerate([{0}, {0, 1, 2}, {2}, set()], 1):
        received: dict[str, Any] = {}

        def sink(stream: Stream, received: dict[str, Any] = received, version: int = version) -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert stream.version == version
            assert stream.metadata() == weights.metadata()
            received.update(stream)

        weights.send(sink if dist.get_rank() in with_sink else None)
        if dist.get_rank() in with_sink:
            assert_same(received, torch.bfloat16)
    by_group: list[Any] = []
    weights.send(lambda stream: by_group.extend(stream.groups()))
    assert len(by_group) == 4
    weights.send(lambda stream: next(iter(stream)))  # leaves the rest
    weights.send(lambda stream: None)
    assert weights.version == 7


@on_ranks(2)
def test_a_sink_that_blocks_for_longer_than_the_time_out_stalls_no_collective():
    """The same send in the middle of full_tensor() of each parameter would end the other rank's all-gather after 1 s."""
    timeout = timedelta(seconds=1)
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timeout), "cpu")
    weights = fsdp2.publish(sharded(mesh))
    rounds = Counter[str]()
    open_again = threading.Event()
    real = weights_module.largest_over

    def counted(*args: Any, **kwargs: Any) -> list[int]:
        rounds["agreements"] += 1
        if rounds["agreements"] == 8:  # all but 3 of them have waited for a third of a second
            open_again.set()
        return real(*args, **kwargs)

    received: dict[str, Any] = {}

    def sink(stream: Stream) -> None:
        for name, tensor in stream:
            received[name] = tensor
            assert open_again.wait(60)

    with patch.object(weights_module, "largest_over", counted):
        weights.send(sink if dist.get_rank() == 0 else None)
    assert rounds["agreements"] >= 8
    if dist.get_rank() == 0:
        assert_same(received)


@on_ranks(2)
def test_a_consumer_that_dies_is_an_error_on_all_ranks_and_training_goes_on():
    model, reference = sharded(), sharded()
    weights = fsdp2.publish(model)
    for number, at in enumerate((0, 3, 15)):

        def dies(stream: Stream, at: int = at) -> None:
            for index, _ in enumerate(stream):
                if index == at:
                    raise ConnectionError("gone")

        rank = number % 2
        with pytest.raises(PublishError, match="ConnectionError: gone") as caught:
            weights.send(dies if dist.get_rank() == rank else dict)
        assert (dist.get_rank() == rank) == isinstance(caught.value.__cause__, ConnectionError)
    never = threading.Event()
    with pytest.raises(PublishError, match="taken no unit"):
        weights.send((lambda stream: never.wait()) if dist.get_rank() == 1 else None, timeout=0.1)
    never.set()
    with pytest.raises(ArgumentError, match="sink=3"):
        weights.send(3 if dist.get_rank() == 1 else None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="timeout=0"):
        weights.send(None, timeout=0)
    with (
        patch.object(
            fsdp2.publishing.unit_gather.UnitGather, "begin", side_effect=MemoryError("full") if dist.get_rank() == 1 else None
        ),
        pytest.raises(PublishError, match="MemoryError: full"),
    ):
        weights.send()
    received: dict[str, Any] = {}
    weights.send(received.update)
    assert_same(received)
    for each in (model, reference):
        fed_own_chunk(each, batches(2), optimizer=torch.optim.SGD(each.parameters(), lr=0.1))
    published = dict(weights)
    for name, param in reference.named_parameters():
        assert torch.equal(published[name], param.full_tensor()), name


def _twice(stream: Stream) -> None:
    assert dict(stream)
    list(stream)


MISUSES = {
    "sends again": (lambda weights: lambda stream: weights.send(None), "one send at a time"),
    "iterates the weights": (lambda weights: lambda stream: dict(weights), "one send at a time"),
    "iterates twice": (lambda weights: _twice, "one iteration"),
    "writes into no folder": (lambda weights: to_file("/no/such/folder/weights"), "/no/such/folder is not a folder"),
}


@on_ranks(2)
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_sink_that_misuses_what_it_gets_is_named_on_all_ranks_and_weights_can_be_sent_again(misuse: str):
    weights = fsdp2.publish(sharded())
    make_sink, text = MISUSES[misuse]
    with pytest.raises(FSDPError, match=text):
        weights.send(make_sink(weights) if dist.get_rank() == 1 else None)
    received: dict[str, Any] = {}
    weights.send(received.update)
    assert_same(received)


# --- files ------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_file_has_all_of_one_version_and_readers_keep_theirs(tmp_path):
    model = sharded()
    weights = fsdp2.publish(model)
    path = tmp_path / "weights"
    rank = dist.get_rank()
    if rank == 0:
        assert read_file(path) is None
        assert read_file(path, 3, verify=False) is None
    weights.send(to_file(path) if rank == 0 else None)
    if rank == 0:
        first = read_file(path)
        assert first is not None
        assert first.version == 1
        assert_same(first.tensors)
        assert_same(safetensors.torch.load_file(path))
        assert fsdp2.checkpoint.verify(path, format="safetensors").format == "safetensors"
        assert read_file(path, 1) is None
        kept = copy.deepcopy(first.tensors)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    weights.version = 41  # of a job that was restarted
    weights.send(to_file(path) if rank == 0 else None)
    if rank == 0:
        second = read_file(path, 1)
        assert second is not None
        assert second.version == 42
        assert all(torch.equal(each, kept[name] + 1) for name, each in second.tensors.items())
        assert all(torch.equal(each, kept[name]) for name, each in first.tensors.items())
        before = path.read_bytes()

    def dies(stream: Stream) -> None:
        to_file(path)(BreaksOff(stream))

    with pytest.raises(PublishError, match="OSError"):
        weights.send(dies if rank == 0 else None)
    if rank == 0:
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["weights"]
        damaged = bytearray(before)
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="checksums"):
            read_file(path)
        assert read_file(path, verify=False) is not None


class BreaksOff:
    """A stream that breaks off after its third tensor."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.version = stream.version
        self.metadata = stream.metadata

    def __iter__(self) -> Any:
        for index, named in enumerate(self.stream):
            if index == 3:
                raise OSError("no space")
            yield named


def test_a_file_of_every_kind_of_tensor_is_read_without_a_process_group(tmp_path: Path) -> None:
    model = torch.nn.Module()
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.complex64)
    for index, dtype in enumerate(dtypes):
        model.register_buffer(f"each{index}", torch.ones(index, 3).to(dtype))
    model.register_buffer("scalar", torch.tensor(3.0))
    fsdp2.publish(model).send(to_file(tmp_path / "weights"))
    found = read_file(tmp_path / "weights")
    assert found is not None
    assert all(
        torch.equal(found.tensors[name].view(-1).view(torch.uint8), each.view(-1).view(torch.uint8))
        for name, each in model.named_buffers()
    )
    assert all(
        found.tensors[name].shape == each.shape and found.tensors[name].dtype == each.dtype for name, each in model.named_buffers()
    )
