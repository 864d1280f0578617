"""The prose is American English, and without the words that made it read as translated (CONTRIBUTING.md has the rest)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROSE = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md") if "_build" not in path.parts),
    *(path for folder in ("fsdp2", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")),
]
INSTEAD = {
    r"beside": "next to, alongside, compared with",
    r"mend(s|ed|ing)?": "fix",
    r"refuses? to know": "does not depend on",
    r"on (all|every) ranks? alike": "on all ranks, the same on all ranks",
    r"numbers of (words|tokens)": "token ids",
    r"behaviours?|colours?|favours?|neighbours?|honours?": "-or",
    r"(initial|optim|normal|serial|synchron|material|summar|organ|recogn|minim|maxim)is(e[sd]?|ing|ations?)": "-ize",
}


def test_words_that_have_better_ones():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; better: {better}"
        for path in PROSE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, better in INSTEAD.items()
        for match in re.finditer(rf"(?<![/\w])({word})(?![/\w])", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
