"""Time and size of `pip install` of some extras from a checkout, each in a fresh environment.

    python benchmarks/install.py after all "" wandb
    python benchmarks/install.py --checkout ../before before all

Adds to benchmarks/results/install.json. Nothing is taken from pip's cache. Seconds depend on the
network, the disk and the load of the machine; processor seconds, those of pip itself, less so.
"""

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/install.json"


def installed(checkout: Path, extras: str) -> dict[str, object]:
    """Return what an installation of `extras` takes, beyond that of an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        empty, started, used = megabytes(folder), time.perf_counter(), processor_seconds()
        asked = f"{checkout}[{extras}]" if extras else str(checkout)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "--no-cache-dir", asked], check=True)
        seconds, used = time.perf_counter() - started, processor_seconds() - used
        listed = subprocess.run(
            [*pip, "list", "--format", "json"], check=True, capture_output=True, text=True
        )
        versions = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
        return {
            "megabytes": megabytes(folder) - empty,
            "seconds": round(seconds),
            "processor_seconds": round(used),
            "packages": len(versions) - 2,  # pip and setuptools
            "versions": versions,
        }


def megabytes(folder: str) -> int:
    """Return the size of a folder on disk, as `du -sm` does."""
    done = subprocess.run(["du", "-sm", folder], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[0])


def processor_seconds() -> float:
    """Return the time that processors have spent in children so far."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="of the results")
    parser.add_argument("extras", nargs="+", help='such as all; "" is the core')
    parser.add_argument("--checkout", type=Path, default=ROOT)
    given = parser.parse_args()
    found = {extras or "core": installed(given.checkout, extras) for extras in given.extras}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[given.name] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "extras": found,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    for extras, each in found.items():
        print(
            f"{extras}: {each['megabytes']} MB, {each['seconds']} s "
            f"({each['processor_seconds']} of processors), {each['packages']} packages"
        )


if __name__ == "__main__":
    main()
