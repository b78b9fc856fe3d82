"""What the integration tests start ends with them, ranks included, also where they run too long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.tiny import run_group

#: A launcher whose child writes its number and goes on for ever; as stubborn as asked.
LAUNCHER = """
import subprocess, sys
child = "import os, signal, sys, time\\n"
if "stubborn" in sys.argv:
    child += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
child += "open(sys.argv[1] + '.part', 'w').write(str(os.getpid()))\\n"
child += "os.rename(sys.argv[1] + '.part', sys.argv[1])\\n"
child += "while True: time.sleep(1)\\n"
process = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]], start_new_session="session" in sys.argv)
import os, time
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print("started", flush=True)
if "leave" in sys.argv: sys.exit(3)
process.wait()
"""


def is_alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an orphan that nobody has reaped yet is dead


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc, which is not here")
@pytest.mark.parametrize("mode", [("plain",), ("stubborn",), ("stubborn", "session")], ids=" ".join)
def test_a_run_that_takes_too_long_leaves_no_process(mode: tuple[str, ...], tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_group([sys.executable, "-c", LAUNCHER, str(tmp_path / "pid"), *mode], timeout=15, patience=1)
    assert time.monotonic() - begin < 60
    assert caught.value.output == "started\n"
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc, which is not here")
@pytest.mark.parametrize("mode", [("leave",), ("leave", "stubborn")], ids=" ".join)
def test_a_launcher_that_leaves_its_ranks_behind(mode: tuple[str, ...], tmp_path: Path) -> None:
    done = run_group([sys.executable, "-c", LAUNCHER, str(tmp_path / "pid"), *mode], timeout=60, patience=1)
    assert (done.returncode, done.stdout) == (3, "started\n")
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_other_sessions_are_left_alone() -> None:
    done = run_group([sys.executable, "-c", "import os; print(os.getsid(0))"], timeout=60)
    assert int(done.stdout) != os.getsid(0)
