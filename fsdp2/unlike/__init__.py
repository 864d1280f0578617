"""Ranks that are not alike: some have fewer batches, or gradients that are not finite. All ranks agree before they communicate."""
