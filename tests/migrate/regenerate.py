"""Writes what the corpus expects, from what the migration does now: read every line of the change before you commit it.

python tests/migrate/regenerate.py
"""

from test_corpus import CONFIGS, CORPUS, SCRIPTS, migrated

if __name__ == "__main__":
    for name in [*SCRIPTS, *CONFIGS]:
        (CORPUS / "expected" / f"{name}.diff").write_text(migrated(CORPUS / name)[1])
