"""``python -m tests.soak --requests 10000 --seed 1``: exit code 1 where anything is wrong."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Outcome, soak


def main() -> None:
    """Run it and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(soak(Path(folder), num_requests=options.requests, seed=options.seed))
    print(table(outcome))
    problems = outcome.findings.problems
    for problem in problems[:40]:
        print(f"WRONG: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} problems; repeat with --seed {outcome.seed}", file=sys.stderr)
        sys.exit(1)


def table(outcome: Outcome) -> str:
    """All that was counted, as Markdown."""
    counts = outcome.findings.counts
    rows = {
        "wrong answers": counts["wrong answers"],
        "crashes": counts["crashes"],
        **{name: count for name, count in sorted(counts.items()) if count},
        **{f"injected: {name}": count for name, count in sorted(outcome.injected.items())},
        **{f"seconds of {name}": round(each) for name, each in outcome.seconds.items()},
    }
    for process, index in (("engine", 0), ("clients", 1)):
        first, last = (
            round(each[index] / 2**20) for each in (outcome.memory[0], outcome.memory[-1])
        )
        rows[f"memory of the {process}, MiB"] = f"{first} to {last} ({outcome.growth[index]:+.1%})"
    return "\n".join(
        ["| what | count |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows.items())]
    )


if __name__ == "__main__":
    main()
