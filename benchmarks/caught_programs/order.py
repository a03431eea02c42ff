"""Loaders that yield another order when they are read again after a stop."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from caught_programs.parts import ROWS, Loader, sentences

BATCH = 4


def batches(order: Any) -> Iterator[Any]:
    rows = sentences()
    for start in range(0, ROWS, BATCH):
        taken = order[start : start + BATCH]
        yield {name: leaf[taken] for name, leaf in rows.items()}


class Transgenic59(Loader):
    """A pass is shuffled by the program's generator, which another start has in another state"""

    project, number, also = "wyim-pgl/transgenic", "59", "accelerate #4195"

    @staticmethod
    def broken(resumed: bool) -> Any:
        class Shuffled:
            def __iter__(self) -> Iterator[Any]:
                return batches(np.random.permutation(ROWS))

        return Shuffled()

    @staticmethod
    def mended(resumed: bool) -> Any:
        class Shuffled:
            epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[Any]:
                return batches(np.random.default_rng(self.epoch).permutation(ROWS))

        return Shuffled()


class Accelerate2823(Loader):
    """A pass is shuffled by the number of passes of this start: 0 again after a stop"""

    project, number, also = "huggingface/accelerate", "2823", "2016, 4071"

    @staticmethod
    def broken(resumed: bool) -> Any:
        class DataLoaderShard:
            iteration = 0

            def __iter__(self) -> Iterator[Any]:
                order = np.random.default_rng(self.iteration).permutation(ROWS)
                self.iteration += 1
                return batches(order)

        return DataLoaderShard()

    @staticmethod
    def mended(resumed: bool) -> Any:
        class DataLoaderShard:
            iteration = 0

            def set_epoch(self, epoch: int) -> None:
                self.iteration = epoch

            def __iter__(self) -> Iterator[Any]:
                return batches(np.random.default_rng(self.iteration).permutation(ROWS))

        return DataLoaderShard()


class MsSwift9658(Loader):
    """After a stop the loader is wrapped in one that skips, which does not pass set_epoch on"""

    project, number = "modelscope/ms-swift", "9658"

    @staticmethod
    def broken(resumed: bool) -> Any:
        sampler = SimpleNamespace(epoch=0)

        class BatchSampler:
            def set_epoch(self, epoch: int) -> None:
                sampler.epoch = epoch

            def __iter__(self) -> Iterator[Any]:
                return batches(np.random.default_rng(sampler.epoch).permutation(ROWS))

        class SkipBatchSampler:
            def __iter__(self) -> Iterator[Any]:
                return iter(BatchSampler())

        class Shard:
            batch_sampler = SkipBatchSampler() if resumed else BatchSampler()

            def set_epoch(self, epoch: int) -> None:
                if hasattr(self.batch_sampler, "set_epoch"):
                    self.batch_sampler.set_epoch(epoch)

            def __iter__(self) -> Iterator[Any]:
                return iter(self.batch_sampler)

        return Shard()

    @staticmethod
    def mended(resumed: bool) -> Any:
        sampler = SimpleNamespace(epoch=0)

        class BatchSampler:
            def set_epoch(self, epoch: int) -> None:
                sampler.epoch = epoch

            def __iter__(self) -> Iterator[Any]:
                return batches(np.random.default_rng(sampler.epoch).permutation(ROWS))

        class SkipBatchSampler(BatchSampler):
            pass

        class Shard:
            batch_sampler = SkipBatchSampler() if resumed else BatchSampler()

            def set_epoch(self, epoch: int) -> None:
                if hasattr(self.batch_sampler, "set_epoch"):
                    self.batch_sampler.set_epoch(epoch)

            def __iter__(self) -> Iterator[Any]:
                return iter(self.batch_sampler)

        return Shard()
