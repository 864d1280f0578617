"""The doctor's arguments, checked before it looks at anything; and the names of all checks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ArgumentError, got, short

CHECKS = (
    "on-meta-device",
    "uninitialized",
    "cut-tie",
    "models-differ",
    "replicas-differ",
    "buffers-differ",
    "seeds-differ",
    "mesh-axes-swapped",
    "optimizer-before-sharding",
    "optimizer-has-dead-parameters",
    "optimizer-misses-parameters",
    "never-averaged",
    "nothing-trains",
    "two-optimizers",
    "write-not-seen",
    "pure-low-precision",
    "wide-parameters-cast-down",
    "narrow-parameters-cast-up",
    "root-without-policy",
    "large-root",
    "small-groups",
    "padding",
    "environment",
    "ranks-apart",
    "gradient-never-came",
    "clip-on-local-shards",
    "clip-without-effect",
    "accumulation-switch-on-a-part",
    "accumulation-switch-without-effect",
    "step-before-reduction",
    "used-outside-forward",
    "same-data-on-every-rank",
    "same-random-numbers",
    "optimizer-settings-differ",
    "step-on-some-ranks",
    "not-finite",
    "gradients-all-zero",
    "gradients-not-cleared",
    "gradients-reduced-again",
    "no-loss-scaler",
    "eval-mode",
    "parameters-never-change",
    "gradients-on-some-ranks",
    "gradients-dropped",
    "stepped-again",
    "low-precision-loss",
    "gradient-scale",
    "token-weights",
)
"""The checks in the order of docs/doctor.md, which explains each."""


def ignored_checks(caller: str, ignore: Any) -> frozenset[str]:
    """The names in ``ignore``. Raises: ArgumentError if it is no list of checks, or has a name that no check has"""
    names = list(ignore) if isinstance(ignore, Iterable) and not isinstance(ignore, str) else None
    if names is None:
        raise ArgumentError(got(caller, "ignore", ignore), expected="a list of names of checks", fix='for instance ignore=["padding"]')
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), CHECKS, n=1)
        raise ArgumentError(
            f"{caller} got {len(unknown)} names in ignore that no check has",
            items=map(short, unknown),
            expected=f"names of checks: {', '.join(CHECKS)}",
            fix=f"ignore=[{close[0]!r}]" if close else "docs/doctor.md describes each check",
        )
    return frozenset(names)


def checked_ties(ties: Any) -> list[Sequence[str]]:
    """Raises: ArgumentError if they are no sets of two or more names"""
    sets = list(ties) if isinstance(ties, Iterable) and not isinstance(ties, str) else None
    if sets is None or not all(_are_names(names) for names in sets):
        raise ArgumentError(
            got("check", "ties", ties),
            expected="sets of two or more names of parameters that should be one",
            fix="for instance ties=[('embedding.weight', 'head.weight')]",
        )
    return sets


def _are_names(names: Any) -> bool:
    return isinstance(names, (tuple, list, set, frozenset)) and len(names) > 1 and all(isinstance(name, str) for name in names)
