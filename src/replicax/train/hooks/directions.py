"""Whether less or more of a metric is better, by its name."""

import re

LOWER_IS_BETTER = ("loss", "error", "perplexity", "bits_per_byte")
HIGHER_IS_BETTER = (
    *("accuracy", "precision", "average_precision", "recall", "f1", "auc", "auroc", "iou", "dice"),
    *("bleu", "exact_match"),
)
_NEGATED = re.compile(r"(^|[/_. -])(neg|negative|minus|inverse)[_. -]")


def direction(metric: str) -> str | None:
    """Return `min` or `max` for a metric whose name is known, else None.

    The name may have a prefix, as in `dev/loss` or `top5_accuracy`, and a rank, as in `recall@10`.
    A negated one, such as `neg_mse`, is not known.
    """
    name = re.sub(r"@\d+$", "", metric.lower())
    if _NEGATED.search(name):
        return None
    for mode, words in (("min", LOWER_IS_BETTER), ("max", HIGHER_IS_BETTER)):
        if re.search(rf"(^|[/_. -])({'|'.join(words)})$", name):
            return mode
    return None
