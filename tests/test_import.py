"""What ``import offbeat`` costs: nothing that is heavy is imported before something needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import offbeat

HEAVY = [
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch._aot_autograd",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "accelerate",
    "lightning",
    "numpy",
    "sympy",
    "transformers",
    "triton",
]


def test_nothing_heavy_is_imported():
    program = (
        "import sys, torch; before = set(sys.modules); import offbeat; "
        f"print(*[name for name in {HEAVY} if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["reduce_to_owners", "ReducedToOwners"])
def test_what_was_removed_names_what_to_use(name):
    with pytest.raises(AttributeError, match=rf"offbeat.{name} was removed: use optimizer.share_matrices\(\)"):
        getattr(offbeat, name)
    assert not hasattr(offbeat, name)
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'Adamm'"):
        _ = offbeat.Adamm


def test_what_a_step_is_kept_out_of_is_found_when_it_is_needed():
    """The compiler is imported when a function that it must leave alone is called while it traces, and not before."""
    program = """
import sys, torch, offbeat
w = torch.nn.Parameter(torch.ones(3))
optimizer = offbeat.SGD([w], lr=0.5)

@torch.compile(backend="eager")
def step():
    optimizer.step()

w.grad = torch.ones(3)
step()
optimizer.load_state_dict(optimizer.state_dict())
print(w.tolist(), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert done.stdout.strip() == "[0.5, 0.5, 0.5] True"
