"""When: forward calls, units, prefetch, and the order of every collective in one iteration."""
