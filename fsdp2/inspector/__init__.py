"""What a run did, written down while it runs and shown afterwards (docs/inspecting.md).

``ledger.py`` writes a line for each step and rank; ``meter.py`` is what counts for it, ``memory_now.py`` what is asked for bytes.
``run_folder.py`` says what lies where in a run's folder.
"""

from .ledger import Ledger, ledger

__all__ = ["Ledger", "ledger"]
