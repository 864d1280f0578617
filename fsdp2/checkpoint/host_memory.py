"""Checkpoints in the memory of hosts, which outlive their processes: each rank writes to a folder there, copied to one other host.

    host 0, ranks 0 and 1    /dev/shm/.../step_000120/    .metadata  __0_0.distcp  __1_0.distcp    and copies of __4_0, __5_0
    host 1, ranks 2 and 3    /dev/shm/.../step_000120/    .metadata  __2_0.distcp  __3_0.distcp    and copies of __0_0, __1_0
    host 2, ranks 4 and 5    /dev/shm/.../step_000120/    .metadata  __4_0.distcp  __5_0.distcp    and copies of __2_0, __3_0

A killed process leaves its host's files as they are. When a host is lost, its files are on the next one. The files are DCP's, so that
any number of ranks can read them. Which ranks share a host is what they see: a file that one of them has created.

Copies to another host have been in use since Gemini (Wang et al., SOSP 2023).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from ..core.comm.agreement import agree, reached
from ..errors import ArgumentError, FSDPError
from .checkpoint_folder import CheckpointFolder, Store, step_of
from .dcp_read import METADATA
from .digests import DIGESTS, number_of, read_digests
from .failures import on_every_rank, tried
from .file_reading import bytes_of

_PIECE_NBYTES = 16 << 20
"""Of each file, how many bytes are under way to another host at a time."""

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Kept:
    """A checkpoint in memory.

    number: of its digests: a higher one was made later, on disk or in memory, whatever their steps
    names:  of its folder on each host, by the host's leader
    has:    the files that each host has
    needed: all of its files, with their sizes
    """

    step: int
    number: int
    names: dict[int, str]
    has: dict[int, set[str]]
    needed: dict[str, int]

    @property
    def missing(self) -> list[str]:
        """The files that no host has."""
        return sorted(self.needed.keys() - set().union(*self.has.values()))


@dataclass(frozen=True)
class _Transfer:
    """A file that rank ``source`` has and rank ``target`` gets."""

    name: str
    nbytes: int
    source: int
    target: int

    def length(self, at: int) -> int:
        """Of the piece from byte ``at`` on."""
        return min(max(self.nbytes - at, 0), _PIECE_NBYTES)


class HostMemory(Store):
    """This host's folder, whose leader is the host's lowest rank, and the other hosts'. All methods are collective over ``group``.

    share: this rank's index among the host's ranks, and how many these are
    """

    def __init__(self, where: Literal[True] | str | os.PathLike[str], group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._is_ours = where is True
        path = on_every_rank(group, "cannot keep checkpoints in memory", lambda: _room() if where is True else Path(where))
        leaders = self._leaders_in(path)
        super().__init__(CheckpointFolder(path, keep_last=1), self._rank, leaders[self._rank])
        self._hosts: dict[int, list[int]] = {}
        for rank, leader in enumerate(leaders):
            self._hosts.setdefault(leader, []).append(rank)
        self.num_hosts = len(self._hosts)
        here = self._hosts[self.leader]
        self.share = here.index(self._rank), len(here)

    def _leaders_in(self, path: Path) -> list[int]:
        """Of each rank, the lowest one that sees the same folder."""
        what, token = f"cannot keep checkpoints in {path}", f"rank_{uuid.uuid4().hex}"

        def leave_token() -> None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_ours and os.lstat(path).st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            (path / token).touch(exist_ok=False)

        _, problem = tried(what, leave_token)
        tokens = agree(self._group, problem, token)
        seen, problem = tried(what, lambda: [rank for rank, each in enumerate(tokens) if (path / each).exists()])
        leaders = agree(self._group, problem, min(seen[0]) if seen and seen[0] else self._rank)
        with contextlib.suppress(OSError):  # an empty file
            (path / token).unlink()
        return leaders

    # --- saving ---

    def complete(self, into: Path, metadata: Metadata | None) -> None:
        """Copy what this host's ranks have written to the next host, and what describes it to all.

        Raises: FSDPError on every rank
        """
        own = [f"__{self._rank}_0.distcp", *([METADATA, DIGESTS] if self._rank == 0 else [])]
        what = f"cannot copy {into} to other hosts"
        found, problem = tried(what, lambda: {name: (into / name).stat().st_size for name in own if (into / name).exists()})
        sizes = agree(self._group, problem, found[0] if found else {})
        hosts, transfers = list(self._hosts.values()), list[_Transfer]()
        for host, next_host in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
            for index, rank in enumerate(host):
                for name, nbytes in sizes[rank].items():
                    targets = self._hosts if name in (METADATA, DIGESTS) else [next_host[index % len(next_host)]]
                    transfers += [_Transfer(name, nbytes, rank, each) for each in targets if each not in host]
        on_every_rank(self._group, what, lambda: self._exchange(into, transfers))

    def _exchange(self, folder: Path, transfers: Sequence[_Transfer]) -> None:
        """Copy files between the ranks' folders, a piece of each at a time. All ranks name the same transfers.

        Raises: OSError on a rank that could not read or write, after the last piece
        """
        ranks, problem = range(self._group.size()), None
        outgoing = sorted((each for each in transfers if each.source == self._rank), key=lambda each: each.target)
        incoming = sorted((each for each in transfers if each.target == self._rank), key=lambda each: each.source)
        for at in range(0, max((each.nbytes for each in transfers), default=0), _PIECE_NBYTES):
            to = [sum(each.length(at) for each in outgoing if each.target == rank) for rank in ranks]
            of = [sum(each.length(at) for each in incoming if each.source == rank) for rank in ranks]
            sent, received = (torch.zeros(sum(each), dtype=torch.uint8, device="cpu") for each in (to, of))
            problem = problem or _moved(_read, folder, outgoing, at, sent)
            with reached(self._group):
                dist.all_to_all_single(received, sent, of, to, group=self._group)
            problem = problem or _moved(_write, folder, incoming, at, received)
        if problem is not None:
            raise problem

    # --- loading ---

    def newest(self) -> Kept | None:
        """The complete checkpoint that was made last; if none is complete, the one that was made last. Raises: CheckpointError"""

        def here() -> dict[tuple[int, int, int], tuple[str, set[str], dict[str, int]]]:
            found = {}
            for each in self.folder.checkpoints() if self.leads else ():
                digests = read_digests(each)
                if digests is not None:
                    data = (each / DIGESTS).read_bytes()
                    needed = {name: digest.nbytes for name, digest in digests.items()} | {DIGESTS: len(data)}
                    has = {
                        name for name, nbytes in needed.items() if (each / name).is_file() and (each / name).stat().st_size == nbytes
                    }
                    found[number_of(digests), step_of(each), zlib.crc32(data)] = (each.name, has, needed)
            return found

        found, problem = tried(f"cannot read {self.folder.path}", here)
        kept: dict[tuple[int, int, int], Kept] = {}
        for leader, of_host in enumerate(agree(self._group, problem, found[0] if found else {})):
            for key, (name, has, needed) in of_host.items():
                one = kept.setdefault(key, Kept(key[1], key[0], {}, {}, needed))
                one.names[leader], one.has[leader] = name, has
        complete = [key for key, each in kept.items() if not each.missing]
        return kept[max(complete or kept)] if kept else None

    def fetch(self, kept: Kept, wanted: Callable[[Path], set[str]]) -> Path:
        """This host's folder of a complete checkpoint, with the files that its ranks need copied from the hosts that have them.

        wanted: the names of the files that this rank needs, from a folder with the metadata
        Raises: FSDPError on every rank
        """
        what = f"cannot fetch step {kept.step} from the memory of other hosts"
        is_new = self.leads and self.leader not in kept.names
        begun, problem = tried(what, lambda: self.folder.begin().name if is_new else kept.names.get(self._rank, ""))
        name = agree(self._group, problem, begun[0] if begun else "")[self.leader]
        into = self.folder.path / name
        self._copy_missing(kept, into, what, {METADATA, DIGESTS})
        needed, problem = tried(what, lambda: wanted(into))
        self._copy_missing(kept, into, what, needed[0] if needed else set(), problem)
        ended, problem = tried(what, lambda: self.folder.commit(kept.step).name if is_new else name)
        return self.folder.path / agree(self._group, problem, ended[0] if ended else "")[self.leader]

    def _copy_missing(self, kept: Kept, into: Path, what: str, names: set[str], problem: FSDPError | None = None) -> None:
        """Copy to each host those of its ranks' ``names`` that it lacks. The ranks of a host take turns in sending."""
        told = agree(self._group, problem, names)
        transfers = []
        for leader, ranks in self._hosts.items():
            missing = set().union(*(told[rank] for rank in ranks)) - kept.has.get(leader, set())
            for turn, name in enumerate(sorted(missing)):
                senders = self._hosts[next(each for each, has in sorted(kept.has.items()) if name in has)]
                transfers.append(_Transfer(name, kept.needed[name], senders[turn % len(senders)], leader))
        on_every_rank(self._group, what, lambda: self._exchange(into, transfers))

    def remove(self) -> None:
        """Free the memory, unless the user has named the folder. Collective: no."""
        if self._is_ours and self.leads:
            shutil.rmtree(self.folder.path, ignore_errors=True)


# --- files -------------------------------------------------------------------------------------------------------------------------


def _moved(
    move: Callable[[Path, memoryview, int], None], folder: Path, transfers: Sequence[_Transfer], at: int, buffer: Tensor
) -> OSError | None:
    """The pieces from byte ``at`` on, between files and ``buffer``. Returns an error: the other ranks wait in the next collective."""
    left = bytes_of(buffer)
    try:
        for each in transfers:
            piece, left = left[: each.length(at)], left[each.length(at) :]
            if piece:
                move(folder / each.name, piece, at)
    except OSError as error:
        return error
    return None


def _read(path: Path, piece: memoryview, at: int) -> None:
    with path.open("rb") as file:
        file.seek(at)
        if file.readinto(piece) != len(piece):
            raise OSError(f"{path} is shorter than it was")


def _write(path: Path, piece: memoryview, at: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while piece:
            done = os.pwrite(file, piece, at)
            piece, at = piece[done:], at + done
    finally:
        os.close(file)


def _room() -> Path:
    """A folder in memory for the process that started this one, which outlives it: torchrun's agent, which starts it again.

    Removes the folders of such processes that have ended.
    """
    if not _SHARED_MEMORY.is_dir():
        raise ArgumentError(
            f"Checkpointer got memory=True, and this host has no {_SHARED_MEMORY}",
            expected="a folder in memory (tmpfs)",
            fix='name one: memory="/mnt/ramdisk/run", its own on each host',
        )
    owner = f"fsdp2-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"  # processes are counted in each container by itself
    for each in _SHARED_MEMORY.glob(f"{owner}-*-*"):
        pid, _, started = each.name.removeprefix(f"{owner}-").partition("-")
        if started != _started(pid):
            shutil.rmtree(each, ignore_errors=True)
    return _SHARED_MEMORY / f"{owner}-{os.getppid()}-{_started(os.getppid())}"


def _started(pid: int | str) -> str:
    """When a process has started, in the kernel's ticks; "" if there is none. Numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
