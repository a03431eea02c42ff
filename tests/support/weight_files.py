"""Files of weights: their bytes, and models that transformers saved."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

HOW = "no torch and transformers to compare with: `make peers` installs them"


def assert_same_bytes(found: Path, expected: Path) -> None:
    ours, theirs = load_file(found), load_file(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tobytes() == tensor.tobytes(), name


def saved(model: Any, folder: Path) -> Path:
    """Save a model of transformers whose norms and biases are not what they start with."""
    torch = pytest.importorskip("torch", reason=HOW)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder)
    return folder / "model.safetensors"
