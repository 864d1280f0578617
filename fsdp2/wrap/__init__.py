"""Which modules become groups: policies that choose, a dry run that shows, and wrapping by hand during construction.

    print(plan(model, by_class(Block)))                     # what parallelize(model, wrap=by_class(Block)) would do; no process group
    parallelize(model, wrap=by_size(50_000_000))

    with enable_wrap(strategy="zero3"):
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(12))

A policy is a small value; the shorthands are "auto", None (the root alone), and a set, list or tuple of module classes.
"""

from ..grouping.planning import Plan, PlannedGroup, plan
from ..grouping.policies import WrapPolicy, auto, by_class, by_name, by_predicate, by_size, root_only
from .manual import enable_wrap, wrap

__all__ = [
    "Plan",
    "PlannedGroup",
    "WrapPolicy",
    "auto",
    "by_class",
    "by_name",
    "by_predicate",
    "by_size",
    "enable_wrap",
    "plan",
    "root_only",
    "wrap",
]
