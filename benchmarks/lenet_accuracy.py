"""LeNet's test accuracy after ten epochs of Fashion-MNIST, in every mode and on 1, 2, 8 devices.

Goals: at least 0.90 in all runs, and a spread of at most 0.005 between modes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from timing import environment, save

RUNS = [
    ("single", 1),
    *((mode, devices) for mode in ("jit", "shard_map", "pmap") for devices in (1, 2, 8)),
]


def train(mode: str, devices: int, epochs: int) -> dict[str, Any]:
    """Run `replicax train`, and return its last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "replicax", "train", "lenet", "--run", "accuracy"]
        command += ["--mode", mode, "--devices", str(devices), "--epochs", str(epochs)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "runs/accuracy/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (*_, last) = (record for record in records if record["kind"] == "eval")
    return {
        "mode": mode,
        "devices": devices,
        "accuracy": last["metrics"]["accuracy"],
        "loss": last["metrics"]["loss"],
        "evaluated_rows": last["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="epochs per run (default: 10)")
    epochs = parser.parse_args().epochs
    print("mode       devices  accuracy    loss  rows evaluated")
    runs = []
    for mode, devices in RUNS:
        found = train(mode, devices, epochs)
        runs.append(found)
        print(
            f"{mode:<10} {devices:>7}  {found['accuracy']:>8.4f}  {found['loss']:.4f}"
            f"  {found['evaluated_rows']:>14,}",
            flush=True,
        )
    accuracies = [run["accuracy"] for run in runs]
    print(f"lowest {min(accuracies):.4f}, highest {max(accuracies):.4f}")
    result = {"environment": environment(), "epochs": epochs, "runs": runs}
    print(f"see {save('lenet_accuracy', result)}")


if __name__ == "__main__":
    main()
