"""Full weights, LoRA and QLoRA from one base: selected on validation, tested once, over several seeds.

    python -m experiments.generalization --profile quick|full [--seeds 3] [--out-dir DIR]

The data are generated: instructions of one or two operations on lists of words. Some pairs of operations are in no
training row; half of the test is those. Every candidate trains on the same rows from the same base; the best of each
method by validation loss, averaged over seeds, is tested beside the base, and nothing else is.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from experiments.generalization import protocol, tables
from experiments.generalization.models import Lab, Scale, pretrained
from riftco import data
from riftco.data import compositions

SCALES = {
    "quick": Scale(2, 64, 128, 400, 100_000, 40, 64, 12, 8),
    "full": Scale(3, 128, 128, 512, 1_000_000, 1500, 4000, 500, 16),
}
RANKS = {"quick": (1, 2), "full": (1, 2, 4, 8, 16)}


def candidates(profile: str) -> list[protocol.Candidate]:
    """Every candidate of a profile, in the order in which ties are broken: lower ranks and rates first."""
    rates = {"full": (5e-4, 1e-3), "adapters": (3e-3,)}
    if profile == "quick":
        rates = {"full": (1e-3,), "adapters": (3e-3,)}
    made = [protocol.Candidate(f"full lr {rate:g}", "full", rate) for rate in rates["full"]]
    for method, ranks in (("lora", RANKS[profile]), ("qlora", RANKS[profile][-2:-1])):
        for rank in ranks:
            made += [
                protocol.Candidate(f"{method} r {rank} lr {rate:g}", method, rate, rank) for rate in rates["adapters"]
            ]
    return made


def main(arguments: list[str] | None = None) -> Path:
    """Run a profile; the path of the report."""
    parser = argparse.ArgumentParser(prog="python -m experiments.generalization", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=sorted(SCALES), default="quick")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each candidate is trained with")
    parser.add_argument("--out-dir", type=Path, default=None, help="a new directory for report.json and report.md")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("runs/generalization"), help="where base and data are kept"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1; got {options.seeds}")
    out = options.out_dir or options.work_dir / f"report-{options.profile}"
    if out.exists():
        # A report says that its test split was opened once; writing over it would open it again.
        parser.error(f"--out-dir {out} exists; a report is never written over: name another, or remove it")
    scale = SCALES[options.profile]
    place = options.work_dir / options.profile
    base = pretrained(place / "base", scale)
    if not (place / "data").is_dir():
        compositions.write_compositions(place / "data", scale.rows, seed=7)
    lab = Lab(base, scale, data.load_examples(place / "data"))
    held_out = np.array([row["held_out"] for row in data.generate_compositions(scale.rows, seed=7)["test"]])
    most = len(lab.files["validation"].rows)
    splits = {"train": lab.rows("train", slice(most)), "validation": lab.rows("validation")}
    sealed = {
        "test_known": protocol.Sealed(lab.rows("test", ~held_out)),
        "test_held_out": protocol.Sealed(lab.rows("test", held_out)),
    }
    tried, seeds, trained = candidates(options.profile), list(range(options.seeds)), {}

    def train(candidate: protocol.Candidate, seed: int) -> object:
        print(f"training {candidate.name}, seed {seed}", file=sys.stderr, flush=True)
        model = lab.train(candidate, seed)
        trained[candidate.name] = model[0].trained_count()
        return model

    found = protocol.run(tried, seeds, train, lab.score, splits, sealed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "format": "riftco.generalization.v1",
        "about": {
            "profile": options.profile,
            "scale": dataclasses.asdict(scale),
            "candidates": [dataclasses.asdict(candidate) for candidate in tried],
            "trained": trained,
            "seeds": seeds,
            "base": base.identity,
            "data": {name: hashlib.sha256(rows[0].tobytes()).hexdigest() for name, rows in splits.items()},
            "commit": commit.stdout.strip() or "unknown",
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].platform}",
        },
        **found,
    }
    out.mkdir(parents=True)
    (out / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (out / "report.md").write_text(tables.markdown(report))
    print(tables.markdown(report))
    return out


if __name__ == "__main__":
    main()
