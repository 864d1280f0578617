"""Programs with planted faults, and healthy ones (test_plants.py)."""
