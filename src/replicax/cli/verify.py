"""`replicax verify`: check that a step on many devices computes the same as on one."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp

import replicax as rx
from replicax.cli.flags import Arguments, parse, parse_with_recipe, several_of, shown_as, words
from replicax.cli.initial_model import model_program
from replicax.cli.output import JsonOptions, Live
from replicax.cli.program_cache import keep_programs
from replicax.cli.step_options import (
    DeviceOptions,
    ModeOptions,
    RoundOptions,
    StepOptions,
    check_alone,
    data_lines,
    first_rows,
    make_host_devices,
)
from replicax.core.ground.job import Alone
from replicax.core.models.definition import CallContext
from replicax.core.modes.mode_table import MODES, as_mode
from replicax.errors import ConfigError
from replicax.text.arguments import Count, Seed
from replicax.text.checks import FAIL, SKIP, Check
from replicax.text.table import fold_lines, labelled
from replicax.text.wording import first_line
from replicax.train.files.fingerprint import sha256
from replicax.verify.program_cases import program_text
from replicax.verify.verification import GrowingTable, Verification
from replicax.verify.verify_program import ALL, rows_needed

HOST_DEVICES = 8
_USAGE = """\
usage: replicax verify RECIPE [FLAGS]
       replicax verify --step FILE.py:name --reference FILE.py:name [FLAGS]

Checks that a step on many devices computes the same as on one: a recipe's
step, in every mode, or a custom step, against its single-device form.
replicax lint checks source code for common errors, without running it.

The exit code is 1 if anything fails.
replicax recipes lists the recipes; replicax verify RECIPE --help the flags,
and replicax verify --step --help the flags for a custom step.
"""
FROM_KEY = (
    "weights do not depend only on the recipe's key: every run, and every process of a job, starts "
    "with different ones; draw them from the key passed to model(key) (nnx.Rngs(params=key))"
)
NOT_EVALUATED = (
    "the recipe has an eval_source, but its loss cannot be computed in evaluation, where key is "
    "None: draw random numbers only in training: if key is not None"
)


@dataclasses.dataclass(frozen=True)
class VerifyOptions(JsonOptions, StepOptions, RoundOptions, ModeOptions, DeviceOptions):
    """Options of `replicax verify` for any recipe."""

    modes: Annotated[str | None, several_of([*MODES, ALL], "that of --mode")] = None
    """Modes to compare with one device, or all; one that does not support the model is skipped."""
    target: Annotated[str | None, shown_as("TARGET", "the attached devices")] = None
    """Hardware to compile for when looking for sums in 16 bits, such as h100:8."""
    surrogates: Annotated[str | None, shown_as("NAMES", "none")] = None
    """Functions of the loss whose own rule is on purpose not their derivative, by name."""
    seed: Seed = 0
    """Seed of the initial model, and of all other randomness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandWrittenOptions(JsonOptions, DeviceOptions):
    """Checks a custom step against its single-device form."""

    step: Annotated[str, shown_as("FILE.py:name")]
    """The step as the training loop calls it."""
    reference: Annotated[str, shown_as("FILE.py:name")]
    """The same step for one device, which it is checked against."""
    state: str = "state"
    """Name in the file of the state that both start from: a value, or a function that makes it."""
    batch: str = "batch"
    """Name in the file of the global batch, also a value or a function."""
    micro_batches: Count = 1
    """Parts that the step computes each replica's rows in, which helps to name causes."""
    weights: Annotated[str | None, shown_as("NAME", "found, if it is mask, weights, ...")] = None
    """Name of the batch's array of weights, one per row."""
    replicas: Annotated[Count | None, shown_as("INT", "found")] = None
    """Devices that the step splits a batch over."""
    steps: Count = 2
    """Consecutive steps whose state is compared."""


def verify(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if arguments in (["-h"], ["--help"]):
        print(fold_lines(_USAGE), end="")
        return 0
    if arguments and arguments[0].startswith("--source"):
        raise ConfigError("--source has moved: replicax lint FILES... reads files and folders")
    options: VerifyOptions | HandWrittenOptions
    if arguments and arguments[0].startswith("--"):
        if {"-h", "--help"} & set(arguments):  # after --step, it would be parsed as its value
            arguments = ["--help"]
        options = parse("verify --step", HandWrittenOptions, arguments)
        check = partial(_by_hand, options)
    else:
        parsed = parse_with_recipe("verify", VerifyOptions, arguments)
        options, check = parsed.options, partial(_of_recipe, parsed)
        asked = MODES if options.modes == ALL else words(options.modes or "")
        options.fix_threads(options.mode, *asked)
    check_alone(
        "verify",
        "it reads all devices' copies, so it needs a single process: run it alone, with --devices",
    )
    if options.devices is not None or "JAX_NUM_CPU_DEVICES" not in os.environ:
        make_host_devices(HOST_DEVICES if options.devices is None else options.devices)
    if said := keep_programs(jax.devices()[0], prunes=True):
        options.say(*labelled("cache", said))
    with options.working(piped=True) as live:
        verification = check(live)
    options.write_json(verification.to_json())
    if options.json_file is not None:
        options.say(f"see    {options.json_file}")
    return int(not verification.ok)


def _by_hand(options: HandWrittenOptions, live: Live) -> Verification:
    from replicax.verify.step_files import verify_files

    live(f"{options.step} against {options.reference}")
    given = dataclasses.asdict(options)
    del given["json"], given["json_file"], given["devices"]
    verification = verify_files(**given, show=live)
    if not options.json:
        live.stop()
        about = verification.about
        where = f" · {about['devices']} devices · {about['mode']}" if about else ""
        print(f"{options.step}{where}")
        verification.print()
    return verification


def _of_recipe(parsed: Arguments[VerifyOptions], live: Live) -> Verification:
    options, recipe = parsed.options, parsed.recipe
    options.say(*data_lines(recipe))
    mesh = options.mesh(as_mode(options.mode).most_devices or options.devices)
    rounds = options.rounds(mesh, Alone())
    dp = options.data_parallel(recipe, options.mode, mesh, **rounds)
    live("reading the data")
    batch = first_rows(recipe.train_source(), rows_needed(dp))
    live("the model")
    model, by_key = _model(dp, recipe, jax.random.key(options.seed))
    options.say(f"{parsed.name} · {dp.mesh.devices.size} devices · {dp.mode}")
    table = GrowingTable((lambda line: None) if options.json else live.say)
    modes: Any = ALL if options.modes == ALL else options.modes and words(options.modes)
    verification = rx.verify(
        dp,
        model,
        batch,
        modes=modes,
        batch_size=recipe.batch_size,
        target=options.target,
        seed=options.seed,
        surrogates=() if options.surrogates is None else words(options.surrogates),
        show=live,
        found=table.add,
    )
    alone = [*_of_recipe_alone(dp, recipe, model, batch, by_key)]
    for check in alone:
        table.add(check)
    checks = [*verification.checks, *alone]
    about = {**parsed.about(), **verification.about}
    verification = dataclasses.replace(verification, checks=checks, about=about)
    table.finish(verification.summary)
    return verification


def _of_recipe_alone(
    dp: rx.DataParallel, recipe: Any, model: Any, batch: Any, by_key: bool
) -> Iterator[Check]:
    """Yield checks specific to a recipe: its model is reproducible, and it can be evaluated."""
    if not by_key:
        text = "the recipe's model has different weights when created again with the same key"
        yield Check("determinism", "two models", FAIL, text, FROM_KEY)
    source = None if _evaluates(dp, model, batch) else recipe.eval_source()
    if source is not None:
        try:
            dp.evaluate(dp.init(model), [batch], loss=getattr(source, "loss", None))
        except ConfigError as error:
            yield Check("parity", "evaluation", SKIP, f"refused: {error}")
        except Exception as error:  # the user's loss
            yield Check("parity", "evaluation", FAIL, first_line(error), NOT_EVALUATED)


def _model(dp: rx.DataParallel, recipe: Any, key: jax.Array) -> tuple[Any, bool]:
    """Return a recipe's model, and whether it depends only on the key."""
    one, other = (model_program(dp, recipe, key) for _ in range(2))
    if one is not None and other is not None:
        return one(key), program_text(one.traced.jaxpr) == program_text(other.traced.jaxpr)
    split = dp.configuration.split_model
    first, second = recipe.model(key), recipe.model(key)
    digests = {sha256(split(model, dp.mesh)[1:]) for model in (first, second)}
    return first, len(digests) == 1


def _evaluates(dp: rx.DataParallel, model: Any, batch: Any) -> bool:
    """Whether the loss can be traced in evaluation."""
    program = dp.program(model)
    _, params, extras = dp.configuration.split_model(model, dp.mesh)
    context = CallContext(step=jnp.int32(0))
    with contextlib.suppress(Exception):  # the user's loss
        rows = program.batches.placed(batch)
        score = partial(program.objective.loss_sums, context=context)
        jax.eval_shape(score, params, extras, rows)
        return True
    return False
