"""What every benchmark shares: timing, floors measured in the same run, a report with versions and card.

Timing: warm-up, then events around each repetition on CUDA (the clock on CPU), and the median. Host time is
what the call takes to return before anything is waited for.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one operation."""

    median: float
    low: float
    high: float
    host: float  # median time until the call returned


def default_device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    function: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 3,
    repeats: int = 10,
    seconds: float = 2.0,
    least: int = 3,
) -> Timing:
    """Time `function`: at most `repeats` repetitions or about `seconds`, whichever ends first (`least` at least)."""
    for _ in range(warmup):
        function()
    times: list[float] = []
    hosts: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < repeats and (len(times) < least or time.perf_counter() < deadline):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            begin = time.perf_counter()
            function()
            hosts.append((time.perf_counter() - begin) * 1e3)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
            hosts.append(times[-1])
    return Timing(statistics.median(times), min(times), max(times), statistics.median(hosts))


def measure_graph(function: Callable[[], object], device: torch.device, *, repeats: int = 10) -> Timing:
    """Time `function` replayed from a CUDA graph (device time without launch gaps); on CPU as `measure`."""
    if device.type != "cuda":
        return measure(function, device, warmup=1, repeats=3)
    function()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    timing = measure(graph.replay, device, warmup=2, repeats=repeats)
    del graph
    return timing


def chosen(name: str, wanted: list[str]) -> bool:
    """Whether a name is one of those wanted: `=name` exactly, or with such a part."""
    return any(name == part[1:] if part.startswith("=") else part in name for part in wanted)


def peak_memory(function: Callable[[], object], device: torch.device) -> float:
    """GiB that one call takes on top of what was allocated before it (0 on CPU: not known)."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def overlap(function: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Trace one call: ms of NCCL kernels, of other kernels, of both at once; and each kernel's."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize(device)
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    spans = [("nccl" in event.name.lower(), event.time_range.start, event.time_range.end) for event in kernels]
    by_name: dict[str, float] = {}
    for event in kernels:
        by_name[event.name[:48]] = by_name.get(event.name[:48], 0.0) + event.time_range.elapsed_us() / 1e3
    sent = _union([(start, end) for is_nccl, start, end in spans if is_nccl])
    computed = _union([(start, end) for is_nccl, start, end in spans if not is_nccl])
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in sent for begin, stop in computed)
    return {
        "nccl_ms": sum(end - start for start, end in sent) / 1e3,
        "compute_ms": sum(end - start for start, end in computed) / 1e3,
        "overlapped_ms": both / 1e3,
        "kernels": dict(sorted(by_name.items(), key=lambda item: -item[1])[:12]),
    }


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same times."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True)
class Ceilings:
    """Rates the floors are counted against, measured in the same run."""

    matmul_tflops: float  # one large 16-bit product through torch (fp32 on CPU), random data
    copy_tbps: float  # one large copy, bytes read plus bytes written


def ceilings(device: torch.device, *, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Measure them."""
    cuda = device.type == "cuda"
    side = 8192 if cuda else 512
    a = torch.randn(side, side, device=device, dtype=dtype if cuda else torch.float32)
    b = torch.randn_like(a)
    product = measure(lambda: a @ b, device, repeats=10)
    source = torch.randn(2**31 if cuda else 2**24, device=device, dtype=torch.float16 if cuda else torch.float32)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, repeats=10)
    moved = 2 * source.numel() * source.element_size()
    return Ceilings(2 * side**3 / product.median / 1e9, moved / copy.median / 1e9)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, card and commit."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if device.type == "cuda":
        facts["card"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    else:
        facts["card"] = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    facts["commit"] = head.stdout.strip() or None
    return facts


class Report:
    """Rows printed as they come and written as JSON at the end."""

    def __init__(self, name: str, device: torch.device, *, path: str | None = None, **facts: Any) -> None:
        self.path = Path(path) if path else None
        self.content: dict[str, Any] = {"benchmark": name, **environment(device), **facts, "rows": []}
        print(json.dumps({key: value for key, value in self.content.items() if key != "rows"}, default=str), flush=True)

    def add(self, **row: Any) -> None:
        """One row; numbers are rounded for the eye only."""
        self.content["rows"].append({key: asdict(v) if isinstance(v, Timing) else v for key, v in row.items()})
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        self.write()

    def write(self) -> None:
        """The file so far: a run that is cut short keeps what it had."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content, indent=1, default=str))


def _short(value: object) -> str:
    if isinstance(value, Timing):
        return f"{value.median:.3f}ms(host {value.host:.2f})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
