"""Random programs are right, sharded, or refused by name: 10 of them in ``make test``, 100 in ``make test-slow``, 300 with
``make test-full``, any by ``make fuzz``.

A failure prints the program; ``python tests/fuzz SEED`` makes it small, and what it finds goes to ``test_kept_programs.py``.
"""

from __future__ import annotations

import pytest

from fuzz.body import run
from fuzz.drawing import draw

NUM_QUICK, NUM_SLOW, NUM_ALL = 10, 100, 300


def _seeds() -> list[object]:
    """All of them; the first ones on two ranks are quick, for the pool of two is there in any case."""
    quick = [seed for seed in range(NUM_ALL) if draw(seed).world == 2][:NUM_QUICK]
    return [
        pytest.param(seed, marks=[] if seed in quick else [pytest.mark.slow if seed < NUM_SLOW else pytest.mark.full])
        for seed in range(NUM_ALL)
    ]


@pytest.mark.parametrize("seed", _seeds())
def test_a_random_program_is_right_or_refused_by_name(seed):
    program = draw(seed)
    result = run(program)
    if result.kind == "fault":
        pytest.fail(f"{program}\n\n{result.text}", pytrace=False)
