"""``fsdp2.doctor``: finds what makes sharded training wrong in silence; says for which parameters and ranks, why, and how to fix it.

    report = doctor.check(model, optimizer)         # before training; collective
    print(report)
    with doctor.watch(model, optimizer):            # light checks in every step
        train()

docs/doctor.md has every check, its cause and its fix. No part of it runs, or is imported, until a program calls it.
"""

from .checking import check
from .finding import Finding, Report
from .gradient_scale import Certificate, gradient_scales
from .initialization import canaries
from .watching import watch

Watch = watch  # an older name

__all__ = ["Certificate", "Finding", "Report", "canaries", "check", "gradient_scales", "watch"]
