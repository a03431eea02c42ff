"""GPT-2's published names, for the parameters of `transformer.init`."""

import numpy as np

from replicax.recipes.transformer import Params
from replicax.weights import rearranged, stacked, tied
from replicax.weights.rename_table import Rename
from replicax.weights.save_weights import named_weights


def _names(prefix: str) -> Rename:
    layer = prefix + r"h.(\d+)"
    attention = stacked(r"h.attn.c_attn.\2")  # query, key and value side by side
    return {
        prefix + r"h\.\d+\.attn\.(masked_)?bias": None,  # the causal mask, in some exports
        layer + ".attn.c_attn.(weight)": rearranged(attention, "width (qkv out) -> width qkv out"),
        layer + ".attn.c_attn.(bias)": rearranged(attention, "(qkv out) -> qkv out"),
        layer + ".(.+)": stacked(r"h.\2"),
        prefix + "(wte|wpe|ln_f).(weight|bias)": r"\1.\2",
    }


GPT2_NAMES: Rename = {**_names(""), **_names("transformer."), "lm_head.weight": tied("wte.weight")}
"""The table for `rx.load_weights` and `rx.save_weights`; without a prefix when written."""


def published(params: Params) -> dict[str, np.ndarray]:
    """Return `params` under the published names, on the host."""
    return named_weights(params, GPT2_NAMES)
