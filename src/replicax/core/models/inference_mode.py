"""Modules in the state of a custom step, as a loss sees them in evaluation."""

import sys
from typing import Any

import jax

from replicax.core.ground.leaves import PyTree


def in_inference_mode(state: PyTree) -> PyTree:
    """Return `state` with its NNX and Equinox modules in inference mode; it may be changed."""
    # No module can come from a library that was never imported.
    if "flax.nnx" in sys.modules:
        module = sys.modules["flax.nnx"].Module

        def evaluates(node: Any) -> bool:
            if isinstance(node, module):
                node.eval()
                return True
            return False

        jax.tree.leaves(state, is_leaf=evaluates)
    if "equinox" in sys.modules:
        state = sys.modules["equinox"].nn.inference_mode(state)
    return state
