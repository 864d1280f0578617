"""``import fsdp2`` imports what sharding needs; the other parts come when they are asked for."""

import subprocess
import sys

import pytest

LAZY = (
    "activations",
    "checkpoint",
    "compat",
    "compiled",
    "doctor",
    "hangs.watcher",
    "migrate",
    "optim",
    "state_bytes",
    "testing",
    "wrap",
)


def printed_by(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_parts_that_sharding_does_not_need_are_not_imported():
    # ``parallelize`` chooses groups by ``grouping``; ``wrap`` is only its face.
    program = f"import sys, fsdp2; print([name for name in {LAZY} if 'fsdp2.' + name in sys.modules])"
    assert printed_by(program) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["checkpoint.save_safetensors", "compat.FullyShardedDataParallel", "state_bytes.__name__", "wrap.plan"]
)
def test_they_are_there_without_an_import_of_their_own(name):
    assert printed_by(f"import fsdp2; print(fsdp2.{name} is not None)") == "True"


def test_a_name_that_is_not_there_is_an_attribute_error():
    import fsdp2

    assert callable(fsdp2.compile)
    assert callable(fsdp2.uncompile)
    with pytest.raises(AttributeError, match="no attribute 'fully_shards'"):
        fsdp2.fully_shards  # noqa: B018


def test_dir_shows_the_public_names_alone_and_older_names_can_still_be_imported():
    import fsdp2

    assert dir(fsdp2) == sorted(fsdp2.__all__)
    assert all(getattr(fsdp2, name) is not None for name in dir(fsdp2))
    from fsdp2 import ActivationCheckpointPolicy, AllGather, OrderError, ReduceScatter

    assert ActivationCheckpointPolicy is fsdp2.activations.ActivationCheckpointPolicy
    assert (AllGather, ReduceScatter) == (fsdp2.policy.AllGather, fsdp2.policy.ReduceScatter)
    assert OrderError is fsdp2.errors.OrderError
    assert not {"ActivationCheckpointPolicy", "AllGather", "OrderError", "ReduceScatter"} & set(dir(fsdp2))


def test_the_version_is_that_of_what_is_installed(capsys):
    import importlib.metadata

    import fsdp2
    from fsdp2.cli import main

    assert fsdp2.__version__ == importlib.metadata.version("fsdp2")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp2 {fsdp2.__version__}, torch {importlib.metadata.version('torch')}\n"
