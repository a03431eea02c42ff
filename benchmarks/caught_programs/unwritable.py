"""Bugs of the listed suites that no program of a user can have here."""

from caught_programs.parts import Unwritable

UNWRITABLE = [
    Unwritable(
        "pytorch/pytorch",
        "104336",
        "A model moved to the CPU and back loses the hooks by which DDP reduces",
        "Parameters have no hooks: a reduction is a line of the step, or Replicax's own.",
    ),
    Unwritable(
        "pytorch/pytorch",
        "84803, 96600, Baichuan2 #86",
        "Bytes are lost between GPUs of a machine",
        "No program does it; `Audit` compares the replicas of a run.",
    ),
    Unwritable(
        "NVIDIA/Megatron-LM",
        "7452, finding 4",
        "What is recomputed in the backward pass communicates in another group",
        "`jax.checkpoint` runs the same traced operations again, with their axes.",
    ),
]
