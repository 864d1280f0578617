"""Writes what the corpus expects, from what the migration does now: read every line of the difference before it is committed.

python tests/migrate/regenerate.py
"""

from pathlib import Path

from fsdp2.migrate.accelerate_config import migrate_config
from fsdp2.migrate.source import migrate_source

CORPUS = Path(__file__).parent / "corpus"

if __name__ == "__main__":
    for old in sorted([*(CORPUS / "old").glob("*.py"), *(CORPUS / "yaml_old").glob("*.yaml")]):
        text = old.read_text()
        result = migrate_source(text, old) if old.suffix == ".py" else migrate_config(text)
        new = old.parent.with_name(old.parent.name.replace("old", "new"))
        (new / old.name).write_text(result.new)
        (new / f"{old.name}.txt").write_text("".join(f"{finding.shown(old.name)}\n" for finding in result.findings))
