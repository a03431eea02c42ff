"""Means and sums of an array: what kind of loss they make."""

import ast

from replicax.verify.rules.finding import spot
from replicax.verify.rules.value import AVERAGE, MASKED, TOTAL, Value, derived, without_gradient


def reduction(
    name: str, value: Value, args: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    """The result of `mean`, `nanmean`, `average`, `sum` or `nansum` of `value`.

    Over an axis it is still an array, perhaps of gradients of single rows.
    """
    others = [keywords[each] for each in ("where", "weights") if each in keywords]
    if name == "average" and len(args) > 1:
        others.append(args[1])
    result = derived([value, *others])
    axis = keywords.get("axis", args[0] if args and name != "average" else None)
    if axis is not None and axis.spec != "none":
        return result
    result = without_gradient(result)
    if name in ("sum", "nansum"):
        return result.but(form=TOTAL)
    weighted = any(other.varies is not False for other in others)
    if name == "nanmean" or weighted:
        # The weights are data: of parameters they would be a model's, as in attention.
        ours = name == "nanmean" or not any(other.differentiated for other in others)
        return result.but(form=MASKED, division=spot(node)) if ours else result
    return result.but(form=AVERAGE)
