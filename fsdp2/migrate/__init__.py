"""``fsdp2 migrate``: scripts written for FSDP1, DDP, DeepSpeed's ``initialize`` or torch's FSDP2, rewritten for fsdp2.

Needs the extra ``fsdp2[cli]``. See docs/migrating.md.
"""
