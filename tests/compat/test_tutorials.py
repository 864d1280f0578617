"""The four usages that FSDP1's tutorials show: the same source runs with torch's FSDP1 and, one module name changed, with ours."""

from __future__ import annotations

import re
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import device_type, on_ranks

SCRIPTS = Path(__file__).parent / "scripts"


def script(name: str, fsdp: str) -> Any:
    """The script as a module, its FSDP imports from ``fsdp`` ("torch" or "fsdp2")."""
    source = (SCRIPTS / f"{name}.py").read_text()
    if fsdp == "fsdp2":
        source, count = re.subn(r"(?m)^from torch\.distributed\.fsdp(\.\w+)? import", "from fsdp2.compat import", source)
        assert count > 0
        assert "torch.distributed.fsdp" not in source
    module = types.ModuleType(f"{name}_with_{fsdp}")
    exec(compile(source, f"{name}.py with {fsdp}", "exec"), module.__dict__)
    return module


def results(name: str, fsdp: str, **arguments: Any) -> list[float]:
    with warnings.catch_warnings():
        if fsdp == "torch":
            warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return script(name, fsdp).main(torch.device(device_type()), **arguments)


def assert_same(name: str, tolerance: float = 1e-6, **arguments: Any) -> None:
    theirs = results(name, "torch", **arguments)
    ours = results(name, "fsdp2", **arguments)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=tolerance)
    assert len(set(ours)) == len(ours), "it trains"


@on_ranks(2)
def test_auto_wrap_script_gives_the_same_losses() -> None:
    assert_same("auto_wrap")


@on_ranks(2)
def test_manual_wrap_script_gives_the_same_losses() -> None:
    assert_same("manual_wrap")


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_script_gives_the_same_losses(strategy: str) -> None:
    import torch.distributed.fsdp as theirs

    import fsdp2.compat as ours

    expected = results("hybrid", "torch", strategy=theirs.ShardingStrategy[strategy])
    found = results("hybrid", "fsdp2", strategy=ours.ShardingStrategy[strategy])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2**-6)])
def test_t5_script_gives_the_same_losses_and_streams_the_same_state(precision: str, tolerance: float, tmp_path: Path) -> None:
    """In bf16 within two roundings: what the decoder's blocks add up for the encoder is added block by block, as in FSDP2.

    FSDP1 frees on the CPU what ``offload_to_cpu`` hands out (a crash), so its state is taken without.
    """
    pytest.importorskip("transformers")
    device = torch.device(device_type())
    found = {}
    for fsdp in ("torch", "fsdp2"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = script("t5", fsdp)
            model = module.build(device, mixed_precision=module.bf16 if precision == "bf16" else None)
            losses = [*module.train(model, device, 4), module.validation(model, device)]
            found[fsdp] = losses, module.save(model, offload_to_cpu=fsdp == "fsdp2")
    assert found["fsdp2"][0][0] == found["torch"][0][0], "forward is the same, bit by bit"
    torch.testing.assert_close(torch.tensor(found["fsdp2"][0]), torch.tensor(found["torch"][0]), rtol=tolerance, atol=tolerance)
    ours, theirs = found["fsdp2"][1], found["torch"][1]
    if dist.get_rank() == 0:
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.device.type == "cpu"
            torch.testing.assert_close(value, theirs[name].cpu(), rtol=tolerance, atol=tolerance)
        module.setup_model().load_state_dict(ours)
        model.module.save_pretrained(tmp_path, state_dict=dict(ours))
        again = module.T5ForConditionalGeneration.from_pretrained(tmp_path)
        assert type(again) is module.T5ForConditionalGeneration
        assert torch.equal(again.shared.weight, ours["shared.weight"])
    else:
        assert ours == {}
