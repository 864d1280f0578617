"""``fsdp2 migrate`` as a command: what it shows and writes, its exit status, files that depend on each other, bad input."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.cli import main

IMPORT_ONLY = "from torch.distributed.fsdp import fully_shard\n\nfully_shard(model)\n"
IMPORT_FSDP1 = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
CUSTOM = f"{IMPORT_FSDP1}\n\ndef mine(module, recurse, nonwrapped_numel):\n    return True\n\n\nFSDP(net, auto_wrap_policy=mine)\n"
THEIRS = "from lightning.strategies import FSDPStrategy\nfrom torch.distributed.fsdp import ShardingStrategy\n"
TO_LIGHTNING = f"{THEIRS}\nFSDPStrategy(sharding_strategy=ShardingStrategy.NO_SHARD)\n"
SUBCLASS = f"{IMPORT_FSDP1}\n\nclass Mine(FSDP):\n    pass\n"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return path

    return write


@pytest.fixture
def rewritten(file: Callable[[str, str], Path]) -> Callable[..., str]:
    """What ``fsdp2 migrate --write`` makes of a script; ``status`` is the exit status that it ends with."""

    def write(text: str, status: int = 0, name: str = "train.py") -> str:
        path = file(name, text)
        assert main(["migrate", "--write", str(path)]) == status
        return path.read_text()

    return write


def test_diff_is_the_default_and_changes_no_file(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", IMPORT_ONLY)
    assert main(["migrate", str(path)]) == 0
    assert "-from torch.distributed.fsdp import fully_shard\n+from fsdp2 import fully_shard\n" in capsys.readouterr().out
    assert path.read_text() == IMPORT_ONLY


def test_write_changes_the_file_once(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", IMPORT_ONLY)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == IMPORT_ONLY.replace("torch.distributed.fsdp", "fsdp2")
    assert main(["migrate", str(path)]) == 0
    assert capsys.readouterr().out == ""


def test_line_ends_of_the_file_are_kept(file: Any) -> None:
    python = file("a.py", IMPORT_ONLY.replace("\n", "\r\n"))
    config = file("b.yaml", "distributed_type: FSDP\r\nfsdp_config:\r\n  fsdp_sharding_strategy: 1\r\n")
    assert main(["migrate", "--write", str(python), str(config)]) == 0
    for path in (python, config):
        assert path.read_bytes().count(b"\r\n") == path.read_bytes().count(b"\n") > 2


def test_what_is_left_is_listed_with_its_line_and_status_1(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", CUSTOM)
    assert main(["migrate", "--write", str(path)]) == 1
    assert f"{path}:8: compat: auto_wrap_policy=mine: a policy function" in capsys.readouterr().out
    assert "from fsdp2.compat import FullyShardedDataParallel as FSDP" in path.read_text()


def test_what_compat_refuses_too_stays_on_torch_with_a_comment(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", TO_LIGHTNING)
    assert main(["migrate", "--write", str(path)]) == 1
    assert f"{path}:4: left: FSDPStrategy(ShardingStrategy.NO_SHARD): FSDPStrategy takes torch's FSDP1" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert comments[0].startswith("# fsdp2: not migrated: FSDPStrategy(")
    assert [line for line in lines if line not in comments] == TO_LIGHTNING.splitlines()
    assert main(["migrate", str(path)]) == 1
    assert "+++" not in capsys.readouterr().out, "a second time changes nothing"


def test_subclass_of_fsdp_goes_to_compat(rewritten: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewritten(SUBCLASS, 1).startswith("from fsdp2.compat import FullyShardedDataParallel as FSDP\n")
    assert "train.py:4: compat: a subclass of FSDP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("use", "what"), [("class Mine(DDP):\n    pass", "a subclass of DDP"), ("kinds = (DDP, int)", "DDP as a value")]
)
def test_class_of_ddp_that_is_a_base_or_a_value_is_left(rewritten: Any, capsys: Any, use: str, what: str) -> None:
    """A value was called a subclass."""
    script = f"from torch.nn.parallel import DistributedDataParallel as DDP\n\n{use}\n"
    assert script.splitlines()[-1] in rewritten(script, 1)
    assert f"train.py:3: left: {what}: parallelize changes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "kind", "imports"), [("lightning.strategies", "left", "torch.distributed.fsdp"), ("ours", "compat", "fsdp2.compat")]
)
def test_values_for_what_others_define_stay(file: Any, capsys: Any, module: str, kind: str, imports: str) -> None:
    call = "strategy = FSDPStrategy(sharding_strategy=ShardingStrategy.FULL_SHARD)\n"
    path = file("train.py", f"from torch.distributed.fsdp import ShardingStrategy\nfrom {module} import FSDPStrategy\n\n{call}")
    assert main(["migrate", "--write", str(path)]) == 1
    assert f"{path}:4: {kind}: FSDPStrategy(ShardingStrategy.FULL_SHARD)" in capsys.readouterr().out
    assert f"from {imports} import ShardingStrategy" in (text := path.read_text())
    assert text.endswith(call)


def test_files_that_share_values_stay_on_compat_together(file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = file("settings.py", "from torch.distributed.fsdp import MixedPrecision\n\nprecision = MixedPrecision()\n")
    imports = "from settings import precision\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    file("train.py", f"{imports}\nmodel = FSDP(net, mixed_precision=precision)\n")
    apart = file("other/apart.py", "from torch.distributed.fsdp import MixedPrecision\n\nprecision = MixedPrecision()\n")
    file(".venv/ignored.py", CUSTOM)
    assert main(["migrate", "--write", str(tmp_path)]) == 1
    listed = capsys.readouterr().out
    assert "train.py:4: compat: mixed_precision=precision: its value is not made in this file" in listed
    assert ".venv" not in listed
    assert settings.read_text() == "from fsdp2.compat import MixedPrecision\n\nprecision = MixedPrecision()\n"
    assert apart.read_text() == "import fsdp2\n\nprecision = fsdp2.MixedPrecisionPolicy()\n"


def test_unused_imports_of_a_package_are_kept(rewritten: Any) -> None:
    new = rewritten("from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision\n", name="__init__.py")
    assert new == "from fsdp2.compat import FullyShardedDataParallel, MixedPrecision\n"


def test_what_is_no_python_is_listed_and_left(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, binary = file("train.py", "def (:\n"), file("latin.py", "")
    binary.write_bytes(b"x = '\xe9'\n")
    assert main(["migrate", "--write", str(path), str(binary)]) == 1
    listed = capsys.readouterr().out
    assert f"{path}:1: left: not migrated: it is not Python" in listed
    assert f"{binary}:1: left: not migrated: it is not UTF-8" in listed


@pytest.mark.parametrize(("arguments", "said"), [([], "got no PATH"), (["absent"], "there is no file or folder absent")])
def test_no_file_is_an_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without_libcst(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "libcst":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_libcst)
    assert main(["migrate", "train.py"]) == 2
    assert 'pip install "fsdp2[cli]"' in capsys.readouterr().err


def test_a_path_that_cannot_be_read_is_an_error_beside_others_too(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, notebook = file("train.py", IMPORT_ONLY), file("train.ipynb", "{}")
    assert main(["migrate", "--write", str(path), "absent.py"]) == 2
    assert main(["migrate", "--write", str(path), str(notebook)]) == 2
    assert "there is no file or folder absent.py" in (said := capsys.readouterr().err)
    assert "is a notebook" in said
    assert path.read_text() == IMPORT_ONLY


def test_a_configuration_that_is_no_yaml_is_listed(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("fsdp.yaml", "fsdp_config:\n  names: [a\n")
    assert main(["migrate", str(path), str(file("other.yaml", "a: [1\n"))]) == 1
    assert (listed := capsys.readouterr().out).startswith(f"{path}:")
    assert listed.endswith("left: not migrated: it is not YAML\n")


@pytest.mark.parametrize("made", ["partial(FSDP)(net)", "shard(net)"])
def test_a_partial_makes_the_model_that_no_context_is_needed_for(rewritten: Any, made: str) -> None:
    imports = "from functools import partial\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
    text = f"{imports}shard = partial(FSDP)\nmodel = {made}\nwith FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n"
    new = rewritten(text + "    state = model.state_dict()\nmodel.clip_grad_norm_(1.0)\n")
    assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))" in new
    assert "fsdp2.clip_grad_norm_(model.parameters(), 1.0)" in new


def test_a_model_that_comes_from_elsewhere_is_known_by_its_context(rewritten: Any) -> None:
    imports = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
    body = "def save(net):\n    with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):\n        return net.state_dict()\n"
    assert "return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))" in rewritten(imports + body)


AT_RUN_TIME = '"cuda" if torch.cuda.is_available() else "cpu"'


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("dist.init_process_group('gloo')", '"cpu"'),
        ('dist.init_process_group(backend="gloo")  # not "nccl"', '"cpu"'),
        ('BACKEND = "gloo"\ndist.init_process_group(BACKEND)', '"cpu"'),
        ('def start(backend):\n    dist.init_process_group(backend)\n\nstart("gloo")', '"cpu"'),
        ('dist.init_process_group("nccl")\nmeta = dist.new_group(backend="gloo")', '"cuda"'),
        ('print("gloo")\ndist.init_process_group("cpu:gloo,cuda:nccl")', '"cuda"'),
        ('dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")', AT_RUN_TIME),
        ('parser.add_argument("--backend", default="gloo")\ndist.init_process_group(args.backend)', AT_RUN_TIME),
        ("dist.init_process_group()", AT_RUN_TIME),
        ("", AT_RUN_TIME),
    ],
)
@pytest.mark.parametrize("wrapper", ["FSDP", "DDP"])
def test_device_of_a_mesh_is_that_of_the_backend_that_is_started(file: Any, wrapper: str, start: str, expected: str) -> None:
    """It was "cpu" where the text had the word "gloo" in double quotes and nowhere the word nccl, comments included; else "cuda"."""
    ddp = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    imports = f"import torch\nimport torch.distributed as dist\n{IMPORT_FSDP1 if wrapper == 'FSDP' else ddp}"
    path = file("train.py", f"{imports}{start}\nmodel = {wrapper}(net, process_group=group)\n")
    main(["migrate", "--write", str(path)])
    assert f"DeviceMesh.from_group(group, {expected})" in path.read_text()


BF16 = "MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    "body",
    [
        f"with enable_wrap(wrapper_cls=FSDP, mixed_precision={BF16}):\n    net = wrap(net)\n",
        f"model = partial(FSDP, mixed_precision={BF16})(net)\n",
        f"layers = [FSDP(layer, mixed_precision={BF16}) for layer in layers]\n",
        f"def build():\n    return FSDP(Net(), mixed_precision={BF16})\n",
        f"model = FSDP(net, mixed_precision={BF16}, ignored_modules=[net.table])\n",
        f"model = FSDP(net, mixed_precision={BF16} if low else None)\n",
        f"precision = {BF16}\n",
        *[
            f"{before}\n{given}\n{after}\nmodel = FSDP(net, {rest}**kwargs)\n"
            for ignored in ("ignored_modules", "ignored_states")
            for before, given, after, rest in (
                ("", f"kwargs = dict(mixed_precision={BF16}, {ignored}=[net.table])", "", ""),
                ("", f"kwargs = {{'mixed_precision': {BF16}, '{ignored}': [net.table]}}", "", ""),
                ("kwargs = {}", f"kwargs['mixed_precision'] = {BF16}", f"kwargs['{ignored}'] = [net.table]", ""),
                ("kwargs = {}", f"kwargs.update(mixed_precision={BF16})", f"if low:\n    kwargs.update({ignored}=[net.table])", ""),
                ("", f"kwargs = dict(mixed_precision={BF16})", "", f"{ignored}=[net.table], "),
                ("", f"kwargs = dict({ignored}=[net.table])", "", f"mixed_precision={BF16}, "),
            )
        ],
        f"def make(net, **kwargs):\n    return FSDP(net, mixed_precision={BF16}, **kwargs)\n",
    ],
)
def test_buffers_whose_cast_has_no_place_stay_with_compat(rewritten: Any, body: str) -> None:
    """They stayed in fp32, and met weights in bf16: "expected BFloat16 but found Float"."""
    imports = "from functools import partial\nimport torch\nfrom torch.distributed.fsdp.wrap import enable_wrap, wrap\n"
    more = "from torch.distributed.fsdp import MixedPrecision\n"
    new = rewritten(imports + IMPORT_FSDP1 + more + body, 1)
    assert "fsdp2.compat" in new
    assert "buffer_dtype=torch.bfloat16" in new
    assert ".buffers()" not in new


def test_buffers_whose_cast_has_no_place_are_one_finding_that_says_what_to_do(rewritten: Any, capsys: Any) -> None:
    """A precision on a line of its own and the call that takes it were two findings, with the same comment above each."""
    more = "import torch\nfrom torch.distributed.fsdp import MixedPrecision\n"
    body = f"precision = {BF16}\nmodel = FSDP(net, mixed_precision=precision, ignored_modules=[net.table])\n"
    new = rewritten(IMPORT_FSDP1 + more + body, 1)
    (finding,) = [line for line in capsys.readouterr().out.splitlines() if "compat: buffer_dtype" in line]
    assert "remove buffer_dtype" in finding
    assert new.count("compat: buffer_dtype") == 1


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        ("param_dtype=torch.bfloat16", True),
        ("torch.bfloat16", True),
        ("param_dtype=torch.bfloat16, reduce_dtype=torch.float32", False),
        ("output_dtype=torch.float32", False),
    ],
)
def test_a_policy_of_fsdp2_without_reduce_dtype_is_told_what_torch_2_15_makes_of_it(rewritten: Any, given: str, is_told: bool) -> None:
    imports = "import torch\nfrom torch.distributed.fsdp import MixedPrecisionPolicy\n\n"
    text = rewritten(f"{imports}policy = MixedPrecisionPolicy({given})\n")
    assert "from fsdp2 import MixedPrecisionPolicy" in text
    assert ("reduce_dtype=torch.bfloat16 keeps" in " ".join(text.replace("#", " ").split())) is is_told


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", IMPORT_ONLY + "x = " + "(" * 20_000 + ")" * 20_000),
        ("a.py", IMPORT_ONLY + "x = " + "-" * 60_000 + "1"),
        pytest.param("a.py", IMPORT_ONLY + "x = " + "not " * 2_000 + "1", marks=pytest.mark.slow),
        pytest.param("a.py", IMPORT_ONLY + "x = a" + ".b" * 40_000, marks=pytest.mark.slow),
        pytest.param("a.py", IMPORT_ONLY + "x = a" + " and a" * 40_000, marks=pytest.mark.slow),
        pytest.param("a.py", IMPORT_ONLY + "if 1:\n  0\n" + "elif 1:\n  0\n" * 40_000, marks=pytest.mark.slow),
        pytest.param("a.py", IMPORT_ONLY + "import a" + ".b" * 10_000, marks=pytest.mark.slow),
        pytest.param("a.py", IMPORT_ONLY + "x = a" + "[0" * 5_000 + "]" * 5_000, marks=pytest.mark.slow),
        pytest.param("a.yaml", "fsdp_config: " + "[" * 20_000 + "]" * 20_000, marks=pytest.mark.slow),
        pytest.param("a.yaml", "fsdp_config: " + "[" * 900 + "]" * 900, marks=pytest.mark.slow),
    ],
)
def test_deep_expressions_are_listed_and_left(file: Any, name: str, text: str) -> None:
    """libcst's parser ended the process with SIGSEGV."""
    path = file(name, text)
    run = subprocess.run([sys.executable, "-m", "fsdp2", "migrate", "--write", str(path)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "")
    assert f"{path}:1: left: not migrated: it is nested too deeply" in run.stdout
    assert path.read_text() == text


def test_links_out_of_a_folder_are_listed_and_left(file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside, inside = file("other/a.py", IMPORT_ONLY), file("here/b.py", IMPORT_ONLY)
    (tmp_path / "here/a.py").symlink_to(outside)
    (tmp_path / "here/c.py").symlink_to(inside)
    assert main(["migrate", "--write", str(tmp_path / "here")]) == 1
    assert capsys.readouterr().out.count("leads out of the folder") == 1
    assert outside.read_text() == IMPORT_ONLY
    assert inside.read_text() != IMPORT_ONLY
    assert main(["migrate", "--write", str(tmp_path / "here/a.py")]) == 0  # it is named
    assert outside.read_text() == inside.read_text()


def test_a_sharded_grad_scaler_is_ours_with_its_process_group(rewritten: Any) -> None:
    """It was torch's, whose ranks agree on infinities only in parameters that are sharded over one mesh."""
    imports = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
    new = rewritten(f"{imports}\nscaler = ShardedGradScaler('cuda', 2.0, 0.5, process_group=group)\n")
    call = "fsdp2.optim.GradScaler('cuda', init_scale=2.0, backoff_factor=0.5, process_group=group)"
    assert new == f"import fsdp2\n\nscaler = {call}\n"


@pytest.mark.parametrize(
    "given", ["kwargs.update(mixed_precision=BF16)", "kwargs['mixed_precision'] = BF16", 'kwargs["mixed_precision"] = BF16']
)
def test_buffers_are_cast_only_where_the_run_gives_a_precision(rewritten: Callable[..., str], given: str) -> None:
    """Symptom: they were cast in runs whose branch left the precision out, and BatchNorm refused its input."""
    text = f"""import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

BF16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def make(net, low):
    kwargs = {{}}
    if low:
        {given}
    net = FSDP(net, **kwargs)
    return net
"""
    assert 'if "mp_policy" in kwargs:' in rewritten(text)


def test_a_strategy_that_an_attribute_may_not_have_is_the_default_then(rewritten: Callable[..., str]) -> None:
    """Symptom: the rewritten script passed None, which FSDP1 takes and parallelize does not."""
    text = """from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


class Trainer:
    strategy = None

    def __init__(self, net, full):
        if full:
            self.strategy = ShardingStrategy.FULL_SHARD
        self.net = FSDP(net, sharding_strategy=self.strategy)
"""
    assert 'self.strategy or "zero3"' in rewritten(text)


@pytest.mark.parametrize("annotation", ["Optional[DDP]", "DDP | None", "list[DDP]"])
def test_ddp_in_an_annotation_becomes_the_class_of_what_is_sharded(rewritten: Callable[..., str], annotation: str) -> None:
    text = f"""from typing import Optional
from torch.nn.parallel import DistributedDataParallel as DDP


def make(net, model: {annotation} = None):
    net = DDP(net)
    return net
"""
    assert annotation.replace("DDP", "fsdp2.FSDPModule") in rewritten(text)
