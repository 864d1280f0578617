"""What fsdp2 refuses on purpose, of what programs do: the beginning of each error, and where the user reads about it."""

from __future__ import annotations

from fuzz.program import Program, nodes

DOCUMENTED = {
    "OrderError: the root of a forward is a list of modules": "fully_shard: a root is one module",
    "OrderError: {} is tied to parameters that belong to a module outside of the root": "compatibility.md: ties",
    "OrderError: {} parameters were sharded while modules outside of any fully_shard call are tied to them": "compatibility.md: ties",
    "OrderError: {} parameters were written while they were kept unsharded": "notes.md: writes to kept parameters",
    "ParameterError: {} is tied to {}, which an earlier fully_shard call took with another": "compatibility.md: ties",
    "OrderError: requires_grad of parameters of {} changed while": "compatibility.md: requires_grad",
    "OrderError: dtype or memory of the parameters of {} changed while gradients accumulate without sync": "notes.md: micro-batches",
}

WHERE_RANKS_DIFFER = {
    "OrderError: {} units are not in the same backward on all ranks": "compatibility.md: units that some ranks leave out",
    "OrderError: the losses of ranks make them recompute different checkpointed segments": "compatibility.md: ignored outputs",
}


def is_documented(headline: str, program: Program) -> bool:
    """Whether an error that begins so is one of those, and ``program`` does what it is about."""
    known = [*DOCUMENTED, *(WHERE_RANKS_DIFFER if _differs_between_ranks(program) else [])]
    return any(_fits(headline, each) for each in known)


def _differs_between_ranks(program: Program) -> bool:
    return program.ignores or any(node.skip == "rank" for node in nodes(program).values())


def _fits(headline: str, known: str) -> bool:
    at = 0
    for index, piece in enumerate(known.split("{}")):
        found = headline.find(piece, at)
        if found < 0 or (index == 0 and found != 0):
            return False
        at = found + len(piece)
    return True
