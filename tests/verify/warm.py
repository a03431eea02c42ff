"""A subject of verify that is ready to be compared."""

from typing import Any

import replicax as rx
from replicax.verify.plain_step import PlainStep
from replicax.verify.subject import Subject


def warm_subject(
    dp: rx.DataParallel, model: Any, batch: Any, micro_batches: int, seed: int
) -> Subject:
    """Return a subject after its first steps."""
    subject = Subject(dp, model, batch, micro_batches, seed)
    subject.warm(PlainStep(subject))
    return subject
