"""The table of a plan: its contents, within 80 columns."""

import itertools
import re
from dataclasses import replace

import pytest
from plan.plans import FORMULA, KINDS, make_plan, plan_of, scaled

from replicax.plan.plan_table import PLAN_PARTS, plan_lines, shown_counts
from replicax.plan.planned import LATER_PARTS
from replicax.plan.target import parse_target

MODEL = "gpt2 --preset 124m · 124,439,808 parameters · float32 · jit · replicated"
# 0.5 + 1 + 0.5 + 6 + 3 - 0.4, and a batch too small to be named.
MEMORY = (
    "8 rows…: parameters 500 MB, optimizer 1 GB, gradient 500 MB, activations 6 GB,"
    " workspace 3 GB, less 400 MB not…: 10.6 GB by formula"
)
KERNELS = "logits/dot_general 21% (compute), attention/softmax 14% (memory)"


COLUMNS = "at best… step rows/s"
SAID: dict[str, dict[str, str]] = {
    "fits": {
        "plan": MODEL,
        "target": "v5e:16x16 · 256 x TPU v5e · 64 hosts · …by libtpu 0.0.42",
        # 16 GiB of a v5e, less what libtpu keeps; 256 devices with 8 rows have 2,048.
        "fits": "yes: 8 rows…2,048…11…16.9 GB",
        "batch": "up to 12 rows…3,072…16 GB…13…",
        "speed": f"{COLUMNS} tokens/s MFU HFU 8 rows… 50 ms 40,960 41.9M 45% 51%"
        f" {COLUMNS} tokens/s MFU HFU 12 rows… 50 ms 40,960 41.9M 45% 51%",
        # 40 of 50 ms are computed, 3/4 of them by arithmetic; 10 are waited.
        "limit": f"arithmetic 60%, memory bandwidth 20%, network 20% (10 ms)…: {KERNELS}",
        "first": "precision=bfloat16: …2.0…",
        "memory": f"{MEMORY}, 11 GB compiled",
        "paper": "",
        "change": "…8 rows… unchanged 11 GB 50 ms 996 MB precision=bfloat16 7.5 GB 3.5 GB"
        " layout=fsdp 11.2 GB -200 MB moves…more",
        "sends": "… all-reduce 12 500 MB 996 MB 12.3 ms all-gather 150 2 kB 1.9 kB none…"
        "minimum 498 MB sends 2.00 x…",
        "note": "each device…sends 996 MB, 2.00 times…498 MB…",
        "scales": "efficiency… 1 64 256 4,096 131,072 devices 8 rows each 100% 100% 100% 100% 100%"
        " 2,048 rows… 100% 100% 100% - -",
        "pays": "up to 131,072 …8 rows…; up to 64 …2,048 rows…",
        "cost": "",
        "rate": "a batch of 3,072: 1.5 x …SGD, 1.22 x …Adam…train --measure-noise-scale",
    },
    "more may fit": {"batch": "up to 12 rows…3,072…16 GB…more may…"},
    "too large by a line": {"batch": "up to 12 rows…3,072…16 GB; 13…, by formula"},
    "too large": {
        "fits": "no: 64 rows…16,384…at least 81 GB…16.9 GB",
        "batch": "up to 12 rows…3,072…16 GB…13…accumulate=8: 64 rows…16,384…11.4 GB",
        "limit": "memory: the state …1.5 of 16.9 GB, …12 rows with 12 rows: arithmetic 60%,"
        f" memory bandwidth 20%, network 20% (10 ms)…: {KERNELS}",
    },
    "not even one": {
        "batch": "none: not even 1 row…",
        "speed": "none: no batch…",
        "limit": "memory: the state …201 GB…16.9 GB",  # 200 of optimizer, 0.5 of parameters
        "change": "…1 row… layout=fsdp 90 GB 210 GB …not fit",
    },
    "not even four": {"batch": "none: not even 4 rows…"},
    "by formula": {  # it says so at each heading
        "target": "v100:16 · 16 x NVIDIA V100 32 GB (SXM2) · 2 hosts · by formula",
        "fits": "yes, by formula: 8 rows…128…11…25.6 GB…JAX preallocates…34.1 GB",
        "batch": "up to 20 rows…320…25 GB, by formula…21…",
        "speed": "at best, by formula… step rows/s tokens/s MFU HFU"
        " 8 rows… 50 ms 40,960 41.9M 45% 51%",
        "limit": "computation 80%, …network 20% (10 ms)…",
        "memory": MEMORY,
        "change": "…8 rows…, by formula… unchanged 11 GB 50 ms layout=fsdp 10 GB 1 GB",
        "sends": "",
        # 128 rows are not enough for 2,048 devices.
        "scales": "efficiency… 1 16 64 2,048 131,072 devices 8 rows each 100% 81% 78% 78% 78%"
        " 128 rows… 100% 81% 35% - -",
        "pays": "up to 131,072 …8 rows…; up to 64 …128 rows…",
        "note": "by formula: libtpu…; pip install 'replicax[plan-tpu]'",
    },
    "one device": {  # 84942979072 bytes, of which JAX takes three quarters; it sends nothing
        "fits": "yes: 8 rows… 11 of 63.7 GB…JAX preallocates…84.9 GB",
        "sends": "",
        "scales": "",
        "pays": "",
    },
    "unknown chip": {"fits": "unknown: 8 rows…64…11 GB…", "batch": "", "speed": "unknown; …"},
    "no tokens": {"speed": f"{COLUMNS} MFU HFU 8 rows… 50 ms 40,960 45% 51%"},
    "MFU is HFU": {"speed": f"{COLUMNS} MFU 8 rows… 50 ms 40,960 51%"},
    "at measured rates": {
        "speed": f"{COLUMNS} tokens/s MFU HFU 8 rows… 50 ms 40,960 41.9M 45% 51%"
        " at measured rates 50 ms 30,000 41.9M 45% 51%"
    },
    "no MFU": {"speed": f"{COLUMNS} HFU 8 rows… 50 ms 40,960 51%"},
    "waits": {  # the largest share comes first, and kernels of one name are one
        "limit": "network 90% (90 ms), arithmetic 8%, memory bandwidth 2%…"
        "longest: update/add 45% (memory), loss/dot 30% (compute)"
    },
    "too small": {  # nothing about more devices than the target has
        "scales": "efficiency… 1 64 256 devices 8 rows each 100% 100% 100%"
        " 2,048 rows… 100% 100% 100%",
        "pays": "up to 64 …2,048 rows…",
        "rate": "",
    },
    "waits, no kernels": {"limit": "network 90% (90 ms), arithmetic 8%, memory bandwidth 2%…"},
    "frees and sends": {
        "change": "…8 rows… unchanged 11 GB 50 ms 20 B layout=zero1 9 GB 2 GB"
        " precision 8 GB 3 GB by formula remat 11 GB nothing",
        "sends": "… all-reduce 1 10 B 20 B yes minimum 20 B sends 1.00 x…",
        "note": "",
    },
    "desired rows, measured noise": {
        "plan": f"{MODEL} · 4 micro-batches",
        "paper": "M B T²/(4 N D²): activations of 9.6 GB…, 3 rows…",
        "pays": "to the …up to 131,072 …8 rows…; up to 64 …2,048 rows…",
        "cost": "at least 1,235 device-hours…1.02T tokens…",  # 10⁹ rows of 1,024 tokens
        "rate": "a batch of 2,048: 1.25 x …steps, 5 x …rows…critical batch 512 rows, …noise scale",
    },
    "several devices a replica": {
        "plan": f"{MODEL} · data 32 · model 4 · stage 2",
        "fits": "yes: 8 rows…256…11…16.9 GB",
        # of 40 ms that compute, in steps of 50
        "limit": "arithmetic 45%, pipeline bubble 20%, network 20% (10 ms), memory bandwidth 15%…:"
        f" {KERNELS}",
        "change": "…8 rows… unchanged 11 GB 50 ms 1.6 GB model=8 7 GB 4 GB 71.2 ms 3 GB",
        "sends": "… all-reduce over model 96 1 GB 1.5 GB none"
        " collective-permute over stage 18 100 MB 100 MB none",
    },
}
"""Text beside words of the margin, joined to one line with single spaces, by the kind of plan.

`…` stands for any text without a number; an empty text for a word that is not shown.
"""


@pytest.mark.parametrize("kind", SAID)
def test_a_plan_says(kind: str) -> None:
    found: dict[str, str] = dict.fromkeys(SAID[kind], "")
    word = ""
    for text in str(plan_of(kind)).splitlines():
        word = text[:7].strip() or word
        found[word] = " ".join([*found.get(word, "").split(), *text[7:].split()])
    for word, text in SAID[kind].items():
        pattern = re.escape(text).replace("…", r"(?:(?!-?\d).)*")  # a minus is of its number
        assert re.fullmatch(pattern, found[word]), f"{word}: {found[word]!r}"


def test_the_formula_adds_up() -> None:
    assert FORMULA.total == 10_600_066_008


@pytest.mark.parametrize("kind", KINDS)
def test_a_terminal_holds_every_line_and_the_answers_come_first(kind: str) -> None:
    plan = plan_of(kind)
    lines = str(plan).splitlines()
    # A name that is wider than the terminal stays whole, alone in its line, to be copied.
    assert all(len(text) <= 80 or len(text[7:].split()) == 1 for text in lines)
    assert not any(text != text.rstrip() for text in lines)
    assert len(lines) <= 40 or kind == "huge"
    assert not re.search(r"\b(None|nan|inf|False|True)\b|\ue000", "\n".join(lines))
    words = [text[:7].strip() for text in lines if text[:7].strip()]
    # The speed is that of the requested batch if it fits, else that of the largest.
    known = plan.fits or plan.target.chip.usable_bytes is None
    sizes = (
        ["speed", "limit", "memory", "batch"] if known else ["memory", "batch", "speed", "limit"]
    )
    order = ["plan", "target", "fits", *sizes, "change", "first"]
    places = [words.index(word) for word in order if word in words]
    assert places == sorted(places)
    assert {"plan", "target", "fits", "speed", "first", "memory"} <= set(words)


def test_the_parts_of_a_plan_are_its_table_and_the_answer_needs_no_other() -> None:
    for kind in KINDS:
        plan = plan_of(kind)
        parts = {part: plan_lines(plan, part) for part in PLAN_PARTS}
        assert [*itertools.chain(*parts.values())][:-1] == str(plan).splitlines()
        soon = replace(plan, speeds=plan.speeds[:1], left=("", *LATER_PARTS))
        assert bool(parts["soon"]) < bool(plan_lines(soon, "soon"))
        if plan.fits:  # then nothing that is found later changes it
            before = replace(
                plan, speeds=plan.speeds[:1], largest=None, too_large=None, alternatives=()
            )
            assert (
                plan_lines(replace(before, first="", notes=(), left=LATER_PARTS), "") == parts[""]
            )


@pytest.mark.parametrize("most", [2, 3, 5, 7, 30])
def test_shown_counts_are_the_ends_the_target_and_what_lies_between(most: int) -> None:
    counts = shown_counts(scaled(parse_target("h100:256")), 256, most)
    assert counts == sorted(set(counts))
    assert len(counts) == min(most, 18)
    assert {1, 131_072, *[256][: most - 2]} <= set(counts)


@pytest.mark.parametrize("first", range(60, 72))
def test_a_figure_stays_with_its_unit(first: int) -> None:
    lines = str(make_plan(first=f"{'x' * first} 12.5 GB 3 rows")).splitlines()
    assert not any(text.endswith(("12.5", " 3")) for text in lines)
    assert "12.5 GB" in "\n".join(lines)
