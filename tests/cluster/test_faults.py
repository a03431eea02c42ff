"""Each fault once, in real jobs; `benchmarks/faults.py` tries each many times."""

import pytest
from support.cluster_faults import FAULTS, run_trial
from support.tiers import only


@pytest.mark.promise("faults.killed", "faults.leaves-early")
@pytest.mark.parametrize("fault", only(["kill"], FAULTS))
def test_the_others_learn_what_happened(fault: str) -> None:
    trial = run_trial(fault, 0)
    assert not trial.wrong, trial
