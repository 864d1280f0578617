"""Tools for tests of sharded programs, which no training run imports: streams that record and are checked for races."""
