"""Configuration files of accelerate: FSDP version 1 to 2, with comments and order kept.

    fsdp_sharding_strategy     here                                              accelerate to-fsdp2
    FULL_SHARD, 1              fsdp_reshard_after_forward: true                  the same; numbers stay as they are
    SHARD_GRAD_OP, 2           fsdp_reshard_after_forward: false                 the same
    NO_SHARD, 3                distributed_type: MULTI_GPU, no fsdp_config       false: sharded like ZeRO-2
    HYBRID_SHARD, 4            true, and a parallelism_config of nodes x ranks   true: sharded over all ranks
    HYBRID_SHARD_ZERO2, 5      false, and the same parallelism_config            false: sharded over all ranks

A node of HYBRID_SHARD has ``num_processes / num_machines`` ranks, as FSDP1 takes it. Source: accelerate's documented keys of
both versions; its converter's results, which differ, as measured on 1.15.
"""

from __future__ import annotations

from typing import Any

from .report import Finding, Kind, Migrated

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # accelerate counts from 1
_SAME = frozenset(
    {
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_min_num_params",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_offload_params",
        "fsdp_state_dict_type",
        "fsdp_activation_checkpointing",
        "fsdp_ignored_modules",
        "fsdp_reshard_after_forward",
        "fsdp_version",
    }
)
_DROPPED = {
    "fsdp_backward_prefetch": "the next group is always prefetched in backward, as by BACKWARD_PRE.",
    "fsdp_backward_prefetch_policy": "the next group is always prefetched in backward, as by BACKWARD_PRE.",
    "fsdp_forward_prefetch": "FSDP2 of accelerate has no such option.",
    "fsdp_sync_module_states": "parameters are loaded on rank 0 and distributed.",
    "fsdp_use_orig_params": "parameters always are the original ones.",
}


def migrate_config(text: str) -> Migrated:
    """Rewrite one YAML file; a file without an FSDP1 configuration of accelerate stays as it is, and so does every other line."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        config: Any = YAML().load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        left = Finding(mark.line + 1 if mark is not None else 1, Kind.LEFT, "not migrated: it is not YAML")
        return Migrated(text, text, (left,) if "fsdp_config" in text else ())
    fsdp: Any = config.get("fsdp_config") if isinstance(config, dict) else None
    is_mapping = isinstance(fsdp, dict) and bool(fsdp)
    if not is_mapping or config.get("distributed_type") != "FSDP" or fsdp.get("fsdp_version", 1) == 2:
        return Migrated(text, text)
    if fsdp.fa.flow_style():
        left = Finding(_line(config, "fsdp_config") + 1, Kind.LEFT, "fsdp_config on one line: write its keys on lines of their own")
        return Migrated(text, text, (left,))
    converter = _Converter(config, fsdp, text.splitlines())
    converter.convert()
    end = "\r\n" if "\r\n" in text else "\n"
    new = "".join(f"{line}{end}" for line in converter.lines())
    return Migrated(text, new, tuple(sorted(converter.findings, key=lambda each: each.line)))


def _line(mapping: Any, key: str) -> int:
    """The line of a key, from 0."""
    return int(mapping.lc.key(key)[0])


class _Converter:
    """Collects what becomes of each line; ``lines`` applies it."""

    def __init__(self, config: Any, fsdp: Any, lines: list[str]) -> None:
        self._config, self._fsdp, self._old = config, fsdp, lines
        self._instead: dict[int, list[str]] = {}
        self._end: list[str] = []
        self.findings: list[Finding] = []

    def lines(self) -> list[str]:
        changed = [self._instead.get(index, [line]) for index, line in enumerate(self._old)]
        return [line for group in [*changed, self._end] for line in group]

    def convert(self) -> None:
        key = "fsdp_sharding_strategy" if "fsdp_sharding_strategy" in self._fsdp else "fsdp_reshard_after_forward"
        strategy = self._strategy(key)
        if strategy is None:
            return
        if strategy == "NO_SHARD":
            self._replicate(key)
            return
        first = next(iter(self._fsdp))
        if key in self._fsdp:
            value = str(strategy in ("FULL_SHARD", "HYBRID_SHARD")).lower()
            notes = self._hybrid(strategy, key) if strategy.startswith("HYBRID") else []
            self._instead[_line(self._fsdp, key)] = [*notes, self._with_value(key, "fsdp_reshard_after_forward", value)]
        for each in self._fsdp:
            self._convert_key(each)
        if "fsdp_version" in self._fsdp:
            self._instead[_line(self._fsdp, "fsdp_version")] = [self._with_value("fsdp_version", "fsdp_version", "2")]
        else:
            at = _line(self._fsdp, first)
            self._instead[at] = [f"{self._indent(first)}fsdp_version: 2", *self._instead.get(at, [self._old[at]])]

    def _convert_key(self, key: str) -> None:
        at = _line(self._fsdp, key)
        if key in _DROPPED:
            text = f"{key}: {_value(self._fsdp[key])} dropped: {_DROPPED[key]}"
            own = _comment(self._old[at])
            self._instead[at] = [*([f"{self._indent(key)}{own}"] if own else []), self._note(key, text)]
            self._say(key, text)
        elif key == "fsdp_state_dict_type" and self._fsdp[key] == "LOCAL_STATE_DICT":
            text = "LOCAL_STATE_DICT is SHARDED_STATE_DICT: FSDP2 has no flat parameters."
            self._instead[at] = [self._note(key, text), self._with_value(key, key, "SHARDED_STATE_DICT")]
            self._say(key, text)
        elif key not in _SAME and key != "fsdp_sharding_strategy":
            self._say(key, f"{key} is not an option that accelerate documents for FSDP2; it is kept", Kind.LEFT)

    def _strategy(self, key: str) -> str | None:
        """The name of the strategy; older files have it as a number, newer ones of version 1 under the other key."""
        value = self._fsdp.get(key, "FULL_SHARD")
        if isinstance(value, bool):
            return "FULL_SHARD" if value else "SHARD_GRAD_OP"
        if str(value).isdigit() and 1 <= int(value) <= len(_STRATEGIES):
            return _STRATEGIES[int(value) - 1]
        name = str(value).upper().removeprefix("_")
        if name not in _STRATEGIES:
            self._say(key, f"{key}: {value} is not one of {', '.join(_STRATEGIES)}; nothing is changed", Kind.LEFT)
            return None
        return name

    def _replicate(self, key: str) -> None:
        """NO_SHARD is DDP: accelerate's own, since its FSDP2 always shards."""
        for each in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
            if self._fsdp.get(each) is True:
                self._say(each, f"{each}: true has no counterpart without FSDP: set it in the script", Kind.LEFT)
        text = "NO_SHARD is DDP: distributed_type MULTI_GPU; fsdp_config is not read by it."
        self._say(key, text)
        at = _line(self._config, "distributed_type")
        self._instead[at] = [f"# fsdp2: {text}", self._old[at].replace("FSDP", "MULTI_GPU", 1)]
        start = _line(self._config, "fsdp_config")
        following = [_line(self._config, each) for each in self._config if _line(self._config, each) > start]
        for index in range(start, min(following, default=len(self._old))):
            self._instead[index] = [f"# {self._old[index]}" if self._old[index].strip() else ""]

    def _hybrid(self, strategy: str, key: str) -> list[str]:
        """The 2-D layout, in ``parallelism_config``; returns comments for the strategy's line."""
        machines, processes = self._config.get("num_machines", 1), self._config.get("num_processes", 1)
        if not isinstance(machines, int) or not isinstance(processes, int) or machines < 1 or processes % machines:
            text = f"{strategy}: num_processes / num_machines is not a whole number; write dp_replicate and dp_shard sizes yourself"
            self._say(key, text, Kind.LEFT)
            return [self._note(key, text)]
        if machines == 1:
            text = f"{strategy} on one machine shards over all of its ranks: no parallelism_config."
        else:
            text = f"{strategy}: {machines} nodes of {processes // machines} ranks, in parallelism_config."
            self._sizes(machines, processes // machines)
        self._say(key, text)
        return [self._note(key, text)]

    def _sizes(self, replicate: int, shard: int) -> None:
        sizes = {"parallelism_config_dp_replicate_size": replicate, "parallelism_config_dp_shard_size": shard}
        present: Any = self._config.get("parallelism_config")
        if not present:
            self._end = ["parallelism_config:", *(f"  {key}: {size}" for key, size in sizes.items())]
            return
        last = _line(present, list(present)[-1])
        indent = " " * int(present.lc.key(list(present)[-1])[1])
        fresh = [f"{indent}{key}: {size}" for key, size in sizes.items() if key not in present]
        for key, size in sizes.items():
            if key in present:
                at = _line(present, key)
                self._instead[at] = [f"{indent}{key}: {size}"]
        self._instead[last] = [*self._instead.get(last, [self._old[last]]), *fresh]

    def _with_value(self, key: str, new_key: str, value: str) -> str:
        """The line of ``key`` with another key and value; a comment after it stays."""
        comment = _comment(self._old[_line(self._fsdp, key)])
        return f"{self._indent(key)}{new_key}: {value}" + (f"  {comment}" if comment else "")

    def _indent(self, key: str) -> str:
        return " " * int(self._fsdp.lc.key(key)[1])

    def _note(self, key: str, text: str) -> str:
        return f"{self._indent(key)}# fsdp2: {text}"

    def _say(self, key: str, text: str, kind: Kind = Kind.CHANGED) -> None:
        line = _line(self._fsdp, key) + 1 if key in self._fsdp else _line(self._config, "fsdp_config") + 1
        self.findings.append(Finding(line, kind, text))


def _comment(line: str) -> str:
    """The comment at the end of a line; values of these files hold no ``#``."""
    _, mark, comment = line.partition(" #")
    return f"#{comment}" if mark else ""


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
