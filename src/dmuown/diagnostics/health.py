"""Health of an optimizer in training: did it orthogonalize, how well, and how far did it move the weights?

Off until a monitor is attached; then everything is measured on the device, in steps that are asked for, and
reaches the host in `collect` alone.

| metric | of | meaning |
|---|---|---|
| `orthogonalized` | matrices | matrices that the step orthogonalized; 0 means that it trained without Newton-Schulz |
| `orthogonality_residual_max`, `_mean` | matrices | norm of U U^T - I over sqrt(s), s the shorter side |
| `update_to_weight_max`, `_mean` | parameters | norm of the weight's change over the norm of the weight |
| `magnitude_min`, `_mean`, `_max` | rows | row magnitudes of the algorithms that have them |
| `nonfinite` | parameters | gradients with NaN or infinity |

Newton-Schulz with Keller Jordan's coefficients does not converge to 1: singular values stay in about [0.7, 1.2]
(kellerjordan.github.io/posts/muon), which is a residual of some 0.3. Far more than that is worth a look.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.engine.layout import local_tensor
from dmuown.engine.optimizer import MuonEngine
from dmuown.engine.plan import Bucket
from dmuown.errors import OptionError
from dmuown.orthogonalize.blocks import row_indices

PREFIX = "dmuown/"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
#: Quantities that are summed over ranks, and those of which the largest counts.
_SUMS = ("update_squares", "weight_squares", "magnitude_sum", "magnitude_count")
_MAXIMA = ("magnitude_max", "magnitude_negative_min", "nonfinite")


class HealthMonitor:
    """Measures the steps of optimizers of this package.

    Args:
        optimizers: The optimizers; others than this package's are left out.
        every: Measure every n-th step.
        layers: Whether `collect` adds the metrics of each layer.

    Collective to build, where there is a process group: ranks tell each other their parameters.

    Raises:
        OptionError: `every` below 1.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], *, every: int = 1, layers: bool = False) -> None:
        if every < 1:
            raise OptionError("every", f"must be at least 1, got {every}", "Measure every n-th step")
        self.every, self.layers = every, layers
        self._optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, MuonEngine)]
        records = [record for optimizer in self._optimizers for record in optimizer.records]
        self._all_names, self._parts = _everywhere(
            {record.name for record in records}, max((_owner_parts(record.param) for record in records), default=1)
        )
        self._steps = 0
        self._before: dict[Tensor, Tensor] = {}
        self._residuals: list[Tensor] = []
        self._weights: list[Tensor] = []  # of residuals: one over the ranks that find the same one
        self._values: dict[str, dict[str, Tensor]] = {}
        self._orthogonalized = 0.0
        self._handles: list[Any] = []
        owner = weakref.ref(self)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda opt, *_: _call(owner, "_begin", opt)))
            self._handles.append(optimizer.register_step_post_hook(lambda opt, *_: _call(owner, "_end", opt)))

    @property
    def measures_now(self) -> bool:
        """Whether the step that comes, or the one that has just been done, is measured."""
        return self._steps % self.every == 0

    def close(self) -> None:
        """Stop measuring; the optimizers are as they were."""
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            optimizer.exchange_count.observe = None
        self._handles.clear()

    @torch.no_grad()
    def _begin(self, optimizer: MuonEngine) -> None:
        if not self.measures_now:
            return
        if optimizer is self._optimizers[0]:
            self._residuals.clear()
            self._weights.clear()
            self._values.clear()
            self._orthogonalized = 0.0
        optimizer.exchange_count.observe = self._observe
        for record in optimizer.records:
            gradient = record.param.grad
            if gradient is None:
                continue
            local = local_tensor(gradient)
            self._put(record.name, "nonfinite", (~torch.isfinite(local)).any().float())
            self._before[record.param] = local_tensor(record.param).detach().clone()

    def _observe(self, bucket: Bucket, results: Tensor) -> None:
        parts = [results]
        if len(bucket.blocks) > 1:
            parts = [results[:, torch.tensor(list(row_indices(block)))] for block in bucket.blocks]
        # An exchange orthogonalizes every matrix once in each team of replicas; without one, whoever has a copy does.
        mesh, copies = bucket.layout.mesh, 1
        if mesh is None:
            copies = self._copies(bucket.params[0], bucket.params[0])
        elif bucket.owners.team:
            copies = math.prod(mesh.size(dim) for dim in bucket.layout.replicate_dims) // len(bucket.owners.team)
        for part in parts:
            part = part.float()
            if part.shape[-2] > part.shape[-1]:
                part = part.mT
            side = part.shape[-2]
            difference = part @ part.mT - torch.eye(side, device=part.device)
            residual = difference.flatten(1).norm(dim=1) / math.sqrt(max(1, side))
            self._residuals.append(residual)
            self._weights.append(torch.full_like(residual, 1.0 / copies))
        self._orthogonalized += len(results) * len(parts) / copies

    @torch.no_grad()
    def _end(self, optimizer: MuonEngine) -> None:
        if self.measures_now:
            optimizer.exchange_count.observe = None
            for record in optimizer.records:
                before = self._before.pop(record.param, None)
                if before is not None:
                    change = local_tensor(record.param).detach().float() - before.float()
                    scale = 1.0 / self._copies(record.param, record.param)
                    self._put(record.name, "update_squares", change.square().sum() * scale)
                    self._put(record.name, "weight_squares", before.float().square().sum() * scale)
                magnitude = optimizer.state[record.param].get("magnitude")
                if isinstance(magnitude, Tensor) and local_tensor(magnitude).numel():
                    rows = local_tensor(magnitude).float()
                    scale = 1.0 / self._copies(magnitude, record.param)
                    self._put(record.name, "magnitude_sum", rows.sum() * scale)
                    self._put(record.name, "magnitude_count", torch.full_like(rows.sum(), rows.numel() * scale))
                    self._put(record.name, "magnitude_max", rows.max())
                    self._put(record.name, "magnitude_negative_min", -rows.min())
        if optimizer is self._optimizers[-1]:
            self._steps += 1
            self._last_measured = (self._steps - 1) % self.every == 0

    _last_measured = False

    def _copies(self, tensor: Tensor, param: Tensor) -> int:
        """Ranks that hold the same part of a parameter or its state: each adds its share to a sum over ranks."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        owned = _is_owned(param)
        if not isinstance(tensor, DTensor):
            return self._parts if owned else world
        mesh = tensor.device_mesh
        sharded = math.prod(mesh.size(dim) for dim, place in enumerate(tensor.placements) if not place.is_replicate())
        # Other ranks than those of its owner have nothing.
        return max(1, (mesh.size() if owned else world) // sharded)

    def _put(self, name: str, key: str, value: Tensor) -> None:
        self._values.setdefault(name, {})[key] = value

    @torch.no_grad()
    def collect(self) -> dict[str, float]:
        """Return the last step's metrics, prefixed with `dmuown/`; {} where it was not measured.

        Collective over the default group, where there is one. Waits for the device.
        """
        if not self._last_measured or not self._optimizers:
            return {}
        sums, maxima, residual, orthogonalized = self._reduced()
        ratios = _ratios(sums)
        found: dict[str, float] = {"orthogonalized": orthogonalized}
        count = residual[1]
        if count:
            found["orthogonality_residual_mean"] = residual[0] / count
            found["orthogonality_residual_max"] = residual[2]
        if ratios:
            found["update_to_weight_mean"] = sum(ratios.values()) / len(ratios)
            found["update_to_weight_max"] = max(ratios.values())
        found |= _magnitudes(self._all_names, sums, maxima)
        found["nonfinite"] = float(sum(maxima[name]["nonfinite"] > 0 for name in self._all_names))
        if self.layers:
            for layer, names in _by_layer(self._all_names).items():
                own = [ratios[name] for name in names if name in ratios]
                if own:
                    found[f"{layer}/update_to_weight_mean"] = sum(own) / len(own)
                for key, value in _magnitudes(names, sums, maxima).items():
                    found[f"{layer}/{key}"] = value
        return {f"{PREFIX}{key}": value for key, value in found.items()}

    def _reduced(self) -> tuple[_Table, _Table, tuple[float, float, float], float]:
        device = _device(self._optimizers)
        zero, least = torch.zeros((), device=device), torch.full((), -math.inf, device=device)
        residuals = torch.cat(self._residuals) if self._residuals else torch.zeros(0, device=device)
        weights = torch.cat(self._weights) if self._weights else torch.zeros(0, device=device)
        sums = [self._values.get(name, {}).get(key, zero) for name in self._all_names for key in _SUMS]
        counted = torch.tensor(self._orthogonalized, dtype=torch.float64, device=device)
        sums += [(residuals * weights).sum(), weights.sum(), counted]
        maxima = [self._values.get(name, {}).get(key, least) for name in self._all_names for key in _MAXIMA]
        maxima.append(residuals.max() if residuals.numel() else least)
        # In fp64: squares of norms of large matrices, and counts, lose nothing.
        summed = torch.stack([value.to(device, torch.float64) for value in sums])
        largest = torch.stack([value.to(device, torch.float64) for value in maxima])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(summed)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        flat_sums, flat_maxima = summed.tolist(), largest.tolist()
        by_sum = _nest(self._all_names, _SUMS, flat_sums)
        by_max = _nest(self._all_names, _MAXIMA, flat_maxima)
        return by_sum, by_max, (flat_sums[-3], flat_sums[-2], flat_maxima[-1]), flat_sums[-1]


_Table = dict[str, dict[str, float]]


def _everywhere(names: set[str], parts: int) -> tuple[list[str], int]:
    """Names of all ranks, sorted: under the ownership runtime each rank knows its own; and the most parts of owners."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        found: list[tuple[set[str], int]] = [(set(), 1) for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, (names, parts))
        names, parts = set().union(*(entry[0] for entry in found)), max(entry[1] for entry in found)
    return sorted(names), parts


def _is_owned(param: Tensor) -> bool:
    """Whether the ownership runtime has it whole with one owner."""
    from dmuown.ownership import record_of

    record = record_of(param)
    return record is not None and record.owner is not None


def _owner_parts(param: Tensor) -> int:
    """Tensor-parallel ranks of an owner, as its cut parameters tell."""
    return param.device_mesh.size() if isinstance(param, DTensor) and _is_owned(param) else 1


def _device(optimizers: Iterable[MuonEngine]) -> torch.device:
    for optimizer in optimizers:
        for record in optimizer.records:
            return local_tensor(record.param).device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _call(owner: weakref.ref[HealthMonitor], method: str, optimizer: Any) -> None:
    monitor = owner()
    if monitor is not None:
        getattr(monitor, method)(optimizer)


def _nest(names: list[str], keys: tuple[str, ...], flat: list[float]) -> dict[str, dict[str, float]]:
    values = iter(flat)
    return {name: {key: next(values) for key in keys} for name in names}


def _ratios(sums: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        name: math.sqrt(entry["update_squares"] / entry["weight_squares"])
        for name, entry in sums.items()
        if entry["weight_squares"] > 0 and math.isfinite(entry["update_squares"])
    }


def _magnitudes(
    names: Iterable[str], sums: dict[str, dict[str, float]], maxima: dict[str, dict[str, float]]
) -> dict[str, float]:
    counted = [name for name in names if sums[name]["magnitude_count"] > 0]
    if not counted:
        return {}
    rows = sum(sums[name]["magnitude_count"] for name in counted)
    return {
        "magnitude_mean": sum(sums[name]["magnitude_sum"] for name in counted) / rows,
        "magnitude_min": -max(maxima[name]["magnitude_negative_min"] for name in counted),
        "magnitude_max": max(maxima[name]["magnitude_max"] for name in counted),
    }


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match:
            found.setdefault(f"layer_{int(match.group(1)):03d}", []).append(name)
    return found
