"""The screen of a plan: what stands on it, and that a terminal of 80 columns holds it."""

import dataclasses
import re

import pytest
from plan.plans import (
    ABOUT,
    FORMULA,
    GB,
    KINDS,
    SPEED,
    by_formula,
    make_plan,
    need,
    not_even_one,
    one_device,
    scaled,
    too_large,
    unknown_chip,
)
from support.figures import assert_mentions, figures

from replicax.plan.forecast import StepTime
from replicax.plan.memory_formula import OnPaper
from replicax.plan.plan_table import shown_counts, table
from replicax.plan.planned import Alternative, BatchAdvice, KernelShare, Plan, Scaling
from replicax.plan.step_traffic import Movement, Traffic
from replicax.plan.target import parse_target


def under(plan: Plan, word: str) -> str:
    """What stands beside a word of the margin, in one line and without its columns."""
    found: list[str] = []
    for text in table(plan):
        if text[:7].strip() == word:
            found.append(text[7:])
        elif found and text[:7].strip() == "" and text:
            found.append(text)
        elif found:
            break
    return " ".join(" ".join(found).split())


def says(plan: Plan, word: str, start: str) -> str:
    """What follows `start` beside a word of the margin."""
    found = under(plan, word)
    assert found.startswith(start)
    return found.removeprefix(start)


@pytest.mark.parametrize("kind", KINDS)
def test_a_terminal_holds_every_line(kind: str) -> None:
    lines = table(KINDS[kind]())
    assert max(map(len, lines)) <= 80
    assert not any(text != text.rstrip() for text in lines)
    if kind != "huge":
        assert len(lines) <= 40


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_printed_that_is_no_word(kind: str) -> None:
    text = "\n".join(table(KINDS[kind]()))
    assert not re.search(r"\b(None|nan|inf|False|True)\b", text)
    assert "\ue000" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_come_in_order_before_the_rest(kind: str) -> None:
    words = [text[:7].strip() for text in table(KINDS[kind]()) if text[:7].strip()]
    order = ["plan", "target", "fits", "batch", "speed", "limit", "first", "memory", "change"]
    places = [words.index(word) for word in order if word in words]
    assert places == sorted(places)
    assert {"plan", "target", "fits", "speed", "first", "memory"} <= set(words)


def test_what_was_planned_and_for_what() -> None:
    assert under(make_plan(), "plan") == (
        "gpt2 --preset 124m · 124,439,808 parameters · float32 · jit · replicated"
    )
    target = under(make_plan(), "target")
    assert target.startswith("v5e:16x16 · 256 x TPU v5e · 64 hosts · ")
    assert target.endswith("by libtpu 0.0.42")
    split = make_plan(about={**ABOUT, "accumulate": 4})
    assert under(split, "plan").endswith("4 micro-batches")


def test_a_batch_that_fits() -> None:
    plan = make_plan()
    # 16 GiB of a v5e, less what libtpu keeps, are 16.9 GB; 256 devices with 8 rows have 2,048.
    assert figures(says(make_plan(), "fits", "yes: ")) == ["8", "2,048", "11", "16.9"]
    assert figures(says(plan, "batch", "up to ")) == ["12", "3,072", "16", "13"]
    endless = make_plan(too_large=None)
    assert figures(under(endless, "batch")) == ["12", "3,072", "16"]
    assert "more may" in under(endless, "batch")


def test_a_batch_that_does_not_fit() -> None:
    plan = too_large()
    assert figures(says(plan, "fits", "no: ")) == ["64", "16,384", "81", "16.9"]
    assert "at least 81 GB" in under(plan, "fits")
    assert_mentions(under(plan, "batch"), "accumulate=8: 64 rows", "16,384", "11.4 GB")
    limit = under(plan, "limit")
    assert re.match(r"memory: the state\b.* 1\.5 of 16\.9 GB, .* 12 rows", limit)
    assert "with 12 rows: arithmetic 60%" in limit


def test_not_even_a_row_fits() -> None:
    plan = not_even_one()
    assert says(plan, "batch", "none: not even 1 row")
    assert re.fullmatch(r"none: no batch\b.*", under(plan, "speed"))
    # 200 GB of optimizer, 0.5 GB of parameters and a few bytes.
    assert figures(says(plan, "limit", "memory: the state")) == ["201", "16.9"]
    assert re.search(r"layout=fsdp 90 GB 210 GB .*not fit", under(plan, "change"))
    several = dataclasses.replace(plan, too_large=need(4, 250.0))
    assert says(several, "batch", "none: not even 4 rows")


def test_a_gpu_says_what_jax_leaves_of_its_memory() -> None:
    fits = under(one_device(), "fits")
    # 84942979072 bytes, of which JAX takes three quarters.
    assert figures(fits) == ["8", "11", "63.7", "84.9"]
    assert re.match("yes: .*JAX preallocates", fits)


def test_how_fast() -> None:
    speed = under(make_plan(), "speed")
    assert re.search("8 rows .*50 ms 40,960 41.9M 45% 51%", speed)
    assert re.search("12 rows .*50 ms", speed)
    plain = dataclasses.replace(SPEED, tokens_per_second=None)
    speed = under(make_plan(speeds=(plain,)), "speed")
    assert re.fullmatch(r"at best\b.* step rows/s MFU HFU 8 rows .*50 ms 40,960 45% 51%", speed)
    for model_share, name in ((plain.peak_share, "MFU"), (None, "HFU")):
        share = dataclasses.replace(plain, model_share=model_share)
        speed = under(make_plan(speeds=(share,)), "speed")
        assert re.fullmatch(rf"at best\b.* step rows/s {name} 8 rows .*50 ms 40,960 51%", speed)


def test_what_limits_it_is_the_largest_share_first() -> None:
    # Of 50 ms 40 are computed, three quarters of them by arithmetic, and 10 waited.
    limit = under(make_plan(), "limit")
    shares = ("arithmetic 60%", "memory bandwidth 20%", "network 20% (10 ms)")
    assert [limit.index(share) for share in shares] == sorted(map(limit.index, shares))
    assert "logits/dot_general 21% (compute), attention/softmax 14% (memory)" in limit
    waiting = dataclasses.replace(SPEED, step=StepTime(0.1, 0.01, 0.09, 0.09), kernels=())
    limit = under(make_plan(speeds=(waiting,)), "limit")
    assert figures(limit) == ["90", "90", "8", "2"]
    assert limit.index("network") < limit.index("arithmetic") < limit.index("memory")


def test_kernels_of_one_name_count_as_one() -> None:
    kernels = (
        KernelShare("jit(a)/loss/dot", 0.3, "compute"),
        KernelShare("update/add", 0.25, "memory"),
        KernelShare("update/add", 0.2, "memory"),
    )
    speed = dataclasses.replace(SPEED, kernels=kernels)
    limit = under(make_plan(speeds=(speed,)), "limit")
    assert "longest: update/add 45% (memory), loss/dot 30% (compute)" in limit


def test_by_formula_says_so_at_each_heading() -> None:
    plan = by_formula()
    for word in ("target", "fits", "batch", "speed", "change", "memory"):
        assert "by formula" in under(plan, word)
    assert re.match(r"computation 80%, .*network 20% \(10 ms\)", under(plan, "limit"))
    assert under(plan, "note").endswith("pip install 'replicax[plan-tpu]'")
    assert "sends" not in [text[:5] for text in table(plan)]


def test_a_change_by_formula_among_compiled_ones_says_so() -> None:
    mixed = (
        Alternative("layout=zero1", need(8, 9.0), 2 * GB),
        Alternative("remat", need(8, 8.0, compiled=False), 3 * GB),
    )
    change = under(make_plan(alternatives=mixed), "change")
    assert re.search(r"layout=zero1 9 GB 2 GB remat 8 GB 3 GB by\b", change)
    assert change.count("by formula") == 1


def test_memory_adds_up() -> None:
    memory = under(make_plan(), "memory")
    assert re.search(r"10\.6 GB by .*, 11 GB compiled$", memory)
    # 0.5 + 1 + 0.5 + 6 + 3 - 0.4, and a batch too small to be named.
    assert FORMULA.total == pytest.approx(10.6 * GB, rel=1e-3)
    assert "optimizer 1 GB" in memory
    assert re.search(r"less 400 MB not\b", memory)
    assert "batch" not in memory


def test_what_a_change_frees_or_takes() -> None:
    change = under(make_plan(), "change")
    assert "precision=bfloat16 7.5 GB 3.5 GB" in change
    assert re.search(r"layout=fsdp 11\.2 GB -200 MB moves\b.*more", change)
    vain = (Alternative("remat", need(8, 11.0), -560),)
    assert under(make_plan(alternatives=vain), "change").endswith("remat 11 GB nothing")


def test_what_a_step_sends() -> None:
    sends = under(make_plan(), "sends")
    assert "all-reduce 12 500 MB 996 MB 12.3 ms" in sends
    assert re.search(r"all-gather 150 2 kB 1\.9 kB none", sends)
    assert "minimum 498 MB sends 2.00 x" in sends
    assert re.match(r"each device\b.*sends 996 MB, 2\.00 times", under(make_plan(), "note"))
    unknown = Traffic((Movement("all-reduce", 1, 10, 20.0, True, None),), 20.0)
    assert "all-reduce 1 10 B 20 B yes" in under(make_plan(traffic=unknown), "sends")


def test_efficiency_by_device_count() -> None:
    plan = by_formula()
    scales = under(plan, "scales")
    assert plan.scaling is not None
    found = {point.devices: f"{point.efficiency:.0%}" for point in plan.scaling.weak}
    counts = [int(each.replace(",", "")) for each in re.findall(r"[\d,]+", scales.split("dev")[0])]
    assert {1, 16, 64, 131_072} <= set(counts)
    assert f"8 rows each {' '.join(found[count] for count in counts)}" in scales
    # 128 rows are not enough for 131,072 devices.
    assert re.search(r"128 rows [a-z ]+ [\d% ]+( -)+$", scales)
    assert figures(under(plan, "pays")) == ["131,072", "8", "64", "128"]
    assert re.match(r"up to 131,072 .*; up to 64 ", under(plan, "pays"))


def test_one_device_does_not_tell_how_others_would_do() -> None:
    assert under(one_device(), "scales") == ""


def test_the_formula_on_paper_stands_beside_the_rest() -> None:
    assert "paper" not in [text[:5] for text in table(make_plan())]
    plan = make_plan(on_paper=OnPaper(9.6e9, 3))
    assert re.search(r"activations of 9\.6 GB .*, 3 rows", under(plan, "paper"))


@pytest.mark.parametrize("most", [2, 3, 5, 7, 30])
def test_shown_counts_are_the_ends_the_target_and_what_lies_between(most: int) -> None:
    found: Scaling = scaled(parse_target("h100:256"))
    counts = shown_counts(found, 256, most)
    assert counts == sorted(set(counts))
    assert len(counts) == min(most, 18)
    wanted = [1, 131_072, 256]
    assert set(wanted[:most]) <= set(counts)


def test_the_cost_of_what_was_wished() -> None:
    assert "cost" not in [text[:4] for text in table(make_plan())]
    wished = make_plan(about={**ABOUT, "wished_rows": 1e9}, device_hours=1234.6)
    # 10⁹ rows of 1,024 tokens.
    assert re.match(r"at least 1,235 device-hours .* 1\.02T tokens", under(wished, "cost"))


def test_the_learning_rate_of_another_batch() -> None:
    rate = under(make_plan(), "rate")
    assert re.match(r"a batch of 3,072: 1\.5 x .*SGD, 1\.22 x .*Adam", rate)
    assert "train --measure-noise-scale" in rate
    assert "2,048" not in rate
    known = make_plan(
        about={**ABOUT, "noise_scale": 512.0}, batches=(BatchAdvice(2048, 1.0, 1.0, 1.25, 5.0),)
    )
    rate = under(known, "rate")
    assert re.match(r"a batch of 2,048: 1\.25 x .*steps, 5 x .*rows", rate)
    assert re.search(r"critical batch 512 rows, .*noise scale$", rate)
    assert under(known, "pays").startswith("to the")


def test_what_is_not_known_is_said_in_words() -> None:
    plan = unknown_chip()
    assert figures(says(plan, "fits", "unknown: 8 rows")) == ["64", "11"]
    assert says(plan, "speed", "unknown; ")
    assert under(plan, "batch") == ""


@pytest.mark.parametrize("first", range(60, 72))
def test_a_figure_stays_with_its_unit(first: int) -> None:
    lines = table(make_plan(first=f"{'x' * first} 12.5 GB 3 rows"))
    assert not any(text.endswith(("12.5", " 3")) for text in lines)
    assert "12.5 GB" in "\n".join(lines)


def test_what_a_replica_of_several_devices_is_told_by() -> None:
    mesh = {"data": 32, "model": 4, "stage": 2}
    traffic = Traffic(
        (
            Movement("all-reduce", 96, 10**9, 1.5e9, False, 0.0, ("model",)),
            Movement("collective-permute", 18, 10**8, 1e8, False, 0.0, ("stage",)),
        ),
        0.0,
    )
    speed = dataclasses.replace(SPEED, bubble=0.25)
    other = Alternative("model=8", need(16, 7.0), 4 * GB, "", 0.0712, 3e9)
    plan = make_plan(
        mesh=mesh, traffic=traffic, speeds=(speed,), alternatives=(other,), scaling=None
    )
    assert "data 32 · model 4 · stage 2" in under(plan, "plan")
    assert figures(says(plan, "fits", "yes: 8 rows")) == ["256", "11", "16.9"]
    # Of 40 ms that compute, in steps of 50.
    assert "pipeline bubble 20%" in under(plan, "limit")
    assert re.search(r"all-reduce over .* 96 1 GB 1\.5 GB", under(plan, "sends"))
    assert "minimum" not in under(plan, "sends")
    assert "unchanged 11 GB 50 ms 1.6 GB model=8 7 GB 4 GB 71.2 ms 3 GB" in under(plan, "change")
