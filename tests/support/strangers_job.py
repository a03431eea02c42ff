"""One process of a job that gathers values until it must stop: strangers_job.py FOLDER."""

import sys
import time
from pathlib import Path

import replicax as rx

FOLDER = Path(sys.argv[1])


def main() -> None:
    job = rx.initialize()
    number, stop = 0, False
    while not stop:
        found = job.gather("a round", [number, job.process, (FOLDER / "stop").exists()])
        assert [each[:2] for each in found] == [[number, p] for p in range(job.processes)]
        number, stop = number + 1, any(each[2] for each in found)
        (part := FOLDER / f"part-{job.process}").write_text(f"{number}\n")
        part.replace(FOLDER / f"rounds-{job.process}")
        time.sleep(0.01)
    print(number)


if __name__ == "__main__":
    main()
