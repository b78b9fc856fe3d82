"""How long does `import dmuown` take on top of `import torch`? The aim: under 50 ms.

Prints the median over fresh interpreters, for the package alone and for all its public names.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

AIM_MS = 50.0
SRC = Path(__file__).parents[1] / "src"

SCRIPT = """
import sys, time
sys.path.insert(0, {src!r})
import torch
start = time.perf_counter()
import dmuown
package = time.perf_counter()
for name in dmuown.__all__:
    getattr(dmuown, name)
print((package - start) * 1e3, (time.perf_counter() - start) * 1e3)
"""


def measure(repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of `import dmuown`, and of loading every public name with it."""
    samples = []
    for _ in range(repeats):
        command = [sys.executable, "-c", SCRIPT.format(src=str(SRC))]
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        samples.append([float(value) for value in line.split()])
    package, names = (statistics.median(column) for column in zip(*samples, strict=True))
    return package, names


def main() -> None:
    """Measure and print; exit with an error where the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="fresh interpreters to take the median of")
    package, names = measure(parser.parse_args().repeats)
    print(f"import dmuown, after import torch: {package:.1f} ms (aim: under {AIM_MS:.0f} ms)")
    print(f"all public names:                  {names:.1f} ms")
    if package >= AIM_MS:
        sys.exit(f"missed the aim of {AIM_MS:.0f} ms")


if __name__ == "__main__":
    main()
