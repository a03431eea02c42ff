"""`replicax bench --network`: methods side by side between islands on slow links."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import jax

import replicax as rx
from replicax.bench.link_bench import LINK_CONTROL, LinkForecast, bench_links
from replicax.bench.link_island import LinkIsland, answer_lines
from replicax.bench.link_methods import METHOD_NAMES, LinkMethod, link_methods
from replicax.bench.link_report import link_table, write_link_bench
from replicax.cli.flags import Arguments, several_of, shown_as, words
from replicax.cli.output import run_folder, show
from replicax.cli.step_options import print_data
from replicax.core.between.islands import Islands
from replicax.core.data.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.errors import ConfigError, did_you_mean
from replicax.islands.island_job import IslandJob
from replicax.launch.compiled_folder import compiled_folder
from replicax.plan.site_network import NETWORK_EXAMPLE, SiteNetwork, parse_network
from replicax.plan.slow_links import Method, forecast
from replicax.text.arguments import Count
from replicax.train.run.host_memory import keep_freed_memory

MOST_ISLANDS = 16
_OTHERS = ("devices", "processes", "modes", "layouts", "profile", "pin")
"""Options of `bench` that do not go with `--network`."""


@dataclasses.dataclass(frozen=True)
class LinkOptions:
    """Options of `replicax bench --network`."""

    network: Annotated[str | None, shown_as("RATE", "none")] = None
    """Compare methods of islands, whose links have this rate, as 100Mbit; on CPUs of this host."""
    islands: Annotated[str | None, shown_as("COUNTS", "2")] = None
    """Numbers of islands with --network, as 2,4."""
    methods: Annotated[str | None, several_of(METHOD_NAMES, "all")] = None
    """Methods with --network: sums of every step, rounds of --every steps, rounds overlapped."""
    every: Count = 30
    """Steps of a round with --network."""
    relay: bool = False
    """Shape the links of --network by a relay, even where tc in network namespaces is permitted."""


def measure_links(parsed: Arguments[Any], arguments: Sequence[str]) -> None:
    """Run the command, whose `arguments` the processes of the islands get, too."""
    options, recipe = parsed.options, parsed.recipe
    network, islands, methods = _network(options), _islands(options), _methods(options)
    folder = run_folder(options.run, f"bench-{parsed.name}", new=True)
    print_data(recipe)
    with compiled_folder() as cache:
        # All methods have the same inner step: it is compiled once.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        result = bench_links(
            [sys.executable, "-m", "replicax.cli.bench", *arguments],
            islands,
            network.text,
            network.links[""].bytes_per_second,
            methods,
            _forecast(network),
            logs=folder,
            repetitions=options.rounds,
            seed=options.seed,
            relay=options.relay,
        )
    show(*link_table(result))
    names = [path.name for path in write_link_bench(result, folder)]
    show(f"see    {folder}/ ({', '.join(names)})")


def serve_island(parsed: Arguments[Any]) -> None:
    """Run the steps of one island, as the process that measures tells it."""
    descriptor, cores = os.environ[LINK_CONTROL].split()
    os.sched_setaffinity(0, map(int, cores.split(",")))  # before JAX counts them
    options, recipe = parsed.options, parsed.recipe
    job = rx.initialize(verbose=False)
    assert isinstance(job, IslandJob)
    keep_freed_memory()
    # As few parts as possible: one for each island, if these are a power of two.
    settings = {**options.settings(recipe), "micro_shards": 1 << (job.islands - 1).bit_length()}
    source = recipe.train_source()

    def data_parallel(islands: Islands | None) -> DataParallel:
        return rx.DataParallel(
            recipe.loss, recipe.optimizer(), mode="jit", job=job, islands=islands, **settings
        )

    def batch(dp: DataParallel) -> Batch:
        first: Batch = next(iter(dp.feed(source, recipe.batch_size)))
        return first

    model = recipe.model(jax.random.key(options.seed))
    island = LinkIsland(data_parallel, model, batch, job)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "steps" not in question:
            return {"parameters": island.parameters()}
        method = question["method"]
        chosen = None if method is None else LinkMethod(**method)
        return island.run(chosen, question["steps"], sends=question["sends"])

    answer_lines(answer, int(descriptor))


def check_without_links(options: Any) -> None:
    """Raise `ConfigError` if options of `--network` are given without it."""
    for field in dataclasses.fields(LinkOptions):
        if getattr(options, field.name) != field.default:
            raise ConfigError(
                f"--{field.name} without --network, which it belongs to: add --network 100Mbit, "
                "or leave it out"
            )


def _network(options: Any) -> SiteNetwork:
    for name in _OTHERS:
        if getattr(options, name):
            raise ConfigError(
                f"--network {options.network} with --{name}; each island has one CPU device, in "
                "mode jit: leave one of the two out"
            )
    network = parse_network(options.network)
    link = network.links.get("")
    if link is None or link.round_trip_seconds:
        what = "links of pairs of sites" if link is None else "a round trip"
        raise ConfigError(
            f"--network {options.network!r} has {what}; bench limits one rate for each island, and "
            f"delays nothing: write {NETWORK_EXAMPLE.partition(',')[0]!r}"
        )
    return network


def _islands(options: Any) -> list[int]:
    text = "2" if options.islands is None else options.islands
    counts = words(text)
    if not counts or not all(
        count.isdecimal() and 2 <= int(count) <= MOST_ISLANDS for count in counts
    ):
        raise ConfigError(
            f"--islands {text!r}; it must be a list of counts from 2 to {MOST_ISLANDS}, as 2,4"
        )
    return sorted(set(map(int, counts)))


def _methods(options: Any) -> list[LinkMethod]:
    if options.every < 2:
        raise ConfigError(f"--every {options.every}; a round has at least 2 steps: raise it")
    known = link_methods(options.every)
    names = list(known) if options.methods is None else words(options.methods)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--methods {name!r}; methods are {', '.join(known)}{did_you_mean(name, known)}"
            )
    if not names:
        raise ConfigError("--methods without a name; it must be a list, as int4,rounds-int4")
    return [known[name] for name in dict.fromkeys(names)]


def _forecast(network: SiteNetwork) -> LinkForecast:
    def of(method: LinkMethod, parameters: int, islands: int, step_seconds: float) -> float:
        planned = Method(method.name, method.send, method.every, method.fragments, method.delay)
        found = forecast(parameters, step_seconds, islands, network, planned).utilization
        assert found is not None
        return found

    return of
