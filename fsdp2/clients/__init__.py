"""What other projects read of FSDP2 besides its public interface, under the private names by which torch has it.

Nothing in the library reads these names; each has a test that uses it as its readers do.
"""
