"""The parts of FSDP2 that other projects read besides its public interface, under torch's private names.

Nothing in the library reads these names; each has a test that uses it as its readers do.
"""
