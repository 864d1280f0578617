"""What tests of sharded programs use and no training run imports: streams that record what they order, checked for races."""
