"""Tests whose body runs on real gloo ranks that stay alive between tests.

    from harness import cpu_mesh, on_ranks

    @on_ranks(2, 3)
    @pytest.mark.parametrize("rows", [1, 4, 7])
    def test_forward_matches_unsharded_when_rows_do_not_divide(rows):
        ...  # runs in 2, then in 3 processes, each with the process group already initialized

See ``on_ranks`` for what a body may use and what happens when it fails.
"""

from harness.decorator import on_ranks
from harness.mesh import cpu_mesh, device_type
from harness.versions import needs_torch

__all__ = ["cpu_mesh", "device_type", "needs_torch", "on_ranks"]
