"""``fsdp2 explain OrderError``: what the troubleshooting page says of an error or a symptom. Wheels carry the page."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path

from .errors import ArgumentError
from .printable import say

PAGE = "troubleshooting.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", metavar="WORDS", nargs="*", help="an error's class, or words of its text; without them all titles are listed"
    )


def run(options: argparse.Namespace) -> int:
    sections = _sections(_page())
    pasted = " ".join(" ".join(options.words).split()).casefold()
    words = [word.rpartition(".")[2].strip(":,") for word in options.words]  # as a traceback has them
    whole, part = ([re.compile(rf"{end}{re.escape(word)}{end}", re.IGNORECASE) for word in words] for end in (r"\b", ""))
    found = {title: text for title, text in sections.items() if any(quoted in pasted for quoted in _quoted(title))}
    for patterns, has_title in ((whole, True), (part, True), (whole, False), (part, False)):
        found = found or {
            title: text for title, text in sections.items() if all(pattern.search(title if has_title else text) for pattern in patterns)
        }
    if not found:
        raise ArgumentError(
            f"no section about {' '.join(options.words)}",
            expected="an error's class, or words of its text",
            fix="fsdp2 explain lists the titles",
        )
    say("\n\n".join(found.values()) if words else "\n".join(found))
    return 0


def _sections(page: str) -> dict[str, str]:
    """The page's sections by title, which follows an empty line."""
    texts = re.split(r"\n\n(?=#{2,3} )", page)[1:]
    return {text.splitlines()[0].lstrip("# ").replace("`", ""): text.strip() for text in texts}


def _quoted(title: str) -> list[str]:
    """Texts of errors that the title quotes."""
    return [text.casefold().rstrip(" .") for text in re.findall(r'"([^"]+)"', title)]


def _page() -> str:
    """From the checkout, or from where the wheel has put it."""
    own = Path(__file__).parents[1] / "docs" / PAGE
    installed = (file.locate() for file in importlib.metadata.files("fsdp2") or [] if file.name == PAGE)
    path = next((Path(str(each)) for each in (own, *installed) if Path(str(each)).exists()), None)
    if path is None:
        raise ArgumentError(
            f"this installation lacks {PAGE}", expected="fsdp2 installed from its wheel", fix="install it again with pip"
        )
    return path.read_text()


__all__ = ["add_arguments", "run"]
