"""`Orthogonalizer`: momentum -> nearest semi-orthogonal matrix, by an odd polynomial of the singular values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuown.errors import OptionError, OptionTypeError, ParameterError
from dmuown.orthogonalize.backends import BACKENDS, Operations, select_backend
from dmuown.orthogonalize.coefficients import TABLES, CoefficientTable, custom_table
from dmuown.orthogonalize.iterations import gram_cost, iterate, plain_cost
from dmuown.orthogonalize.options import check_choice, check_dtype, check_positive, check_steps, choice_error
from dmuown.orthogonalize.panels import works_in_place
from dmuown.orthogonalize.stages import cached_runs, count_places

# Scheme -> names of the tables it takes, the default first.
SCHEMES: dict[str, tuple[str, ...]] = {
    "newton_schulz": ("keller", "you"),
    "polar_express": ("polar_express", "polar_express_1.02", "polar_express_1.05"),
    "gram": ("polar_express", "polar_express_1.02", "polar_express_1.05", "keller", "you"),
}
NORMS = ("add", "clamp")
FORMS = ("auto", "plain", "gram")

# Sums of squares outside these bounds may have overflowed or lost small entries in fp32.
_SAFE_NORM_RANGE = (1e-15, 1e18)

# The Gram form makes more passes over small matrices; on CPU (fp32 and bf16, m = 256 and 512) it measured even
# with the plain one at n = 2 m for m = 256 and 10% ahead for m = 512, where the counted ratio is 0.88.
_GRAM_MARGIN = 0.9


@dataclass(frozen=True)
class Orthogonalizer:
    """Maps each matrix U S V^T of a batch to about U V^T; hashable, so that it can be part of a bucket's key.

    The input is divided by its Frobenius norm (times the table's safety factor), computed in fp32, cast to
    `dtype`, and iterated in the wide orientation. A matrix of zeros gives zeros. A non-finite matrix gives
    non-finite values in its own place of the batch only.

    Attributes:
        scheme: `newton_schulz` (keller or you coefficients), `polar_express`, or `gram` (any table, Gram form
            for rectangular matrices).
        coefficients: A table's name, own (a, b, c) triples, or None for the scheme's default.
        steps: Number of polynomial steps, an int of at least 1. A table is truncated, or its last triple repeated.
        epsilon: Added to, or lower bound of, the Frobenius norm; above 0.
        dtype: Compute and output dtype: bfloat16, float16, float32, or float64 (meant for tests).
        norm: `add` divides by ||x|| + epsilon, `clamp` by max(||x||, epsilon) as torch.optim.Muon does.
        form: `plain` iterates on x, `gram` on x x^T with restarts, `auto` takes whichever needs fewer
            operations for the shape (`gram` needs more for nearly square matrices).
        backend: Who multiplies: see `backends.select_backend`.
        in_place: Spare the second copy of long matrices (`panels.works_in_place`): x <- Q x by panels, which copies a
            little more. Not while compiling.
        most_bytes: Take so much of a batch at a time that `temporary_bytes` stay within this, one matrix at least; None
            takes whole batches. Not while compiling.
        function: `func(x, epsilon=...) -> Tensor` of x's shape (Dion's `newton_schulz_func`); replaces everything
            above but epsilon, and its result's dtype is kept.

    Raises:
        OptionError: A value outside its range; the nearest name is suggested.
        OptionTypeError: `function` is not callable, or `in_place` no boolean.
    """

    scheme: str = "newton_schulz"
    coefficients: str | Sequence[Sequence[float]] | None = None
    steps: int = 5
    epsilon: float = 1e-7
    dtype: torch.dtype = torch.bfloat16
    norm: str = "add"
    form: str = "auto"
    backend: str = "auto"
    function: Callable[..., Tensor] | None = None
    in_place: bool = False
    most_bytes: int | None = None
    table: CoefficientTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, tuple(SCHEMES))
        check_steps("ns_steps", self.steps)
        check_choice("ns_norm", self.norm, NORMS)
        check_choice("ns_form", self.form, FORMS)
        check_choice("backend", self.backend, BACKENDS)
        if not isinstance(self.in_place, bool):
            raise OptionTypeError("in_place", f"must be true or false, got {self.in_place!r}")
        if self.most_bytes is not None:
            check_steps("most_bytes", self.most_bytes)
        if self.scheme == "gram" and self.form == "plain":
            raise OptionError("ns_form", "must not be 'plain' with scheme 'gram'", "Leave it at 'auto'")
        if self.function is not None and not callable(self.function):
            raise OptionTypeError("newton_schulz_func", f"must be callable, got {type(self.function).__name__}")
        table = _resolve_table(self.scheme, self.coefficients)
        stored = table.triples if table.name == "custom" else table.name
        # Normalised once here, so that equal orthogonalizers compare and hash equal however they were spelled.
        object.__setattr__(self, "coefficients", stored)
        object.__setattr__(self, "epsilon", check_positive("ns_epsilon", self.epsilon))
        object.__setattr__(self, "dtype", check_dtype("ns_dtype", self.dtype))
        object.__setattr__(self, "table", table)

    def __call__(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """Orthogonalize each matrix of `x`.

        Args:
            x: Real floating [B, m, n] or [m, n], whole logical matrices [output, input], any strides; not
                changed without `overwrite`.
            overwrite: x may be changed and its memory used for the result: less temporary memory on CUDA.

        Returns:
            A tensor of x's shape, in `dtype`, on x's device; a new one without `overwrite`.

        Raises:
            ParameterError: x is not a real floating tensor of 2 or 3 axes, or a custom function changed its shape.
        """
        if not x.is_floating_point() or x.dim() not in (2, 3):
            rule = f"must be a real floating tensor of 2 or 3 axes, got {x.dtype} of shape {tuple(x.shape)}"
            raise ParameterError("orthogonalize", rule)
        if self.function is not None:
            return self._call_function(x)
        if x.dim() == 2:
            return self._orthogonalize(x.unsqueeze(0), overwrite).squeeze(0)
        return self._by_parts(x, overwrite)

    def _by_parts(self, x: Tensor, overwrite: bool) -> Tensor:
        """As many matrices of [B, m, n] at a time as `most_bytes` allows."""
        most = self._at_once(*x.shape) if x.numel() and not torch.compiler.is_compiling() else len(x)
        if len(x) <= most:
            return self._orthogonalize(x, overwrite)
        reused = overwrite and x.element_size() == self.dtype.itemsize
        result = x.view(self.dtype) if reused else torch.empty_like(x, dtype=self.dtype)
        for part, target in zip(x.split(most), result.split(most), strict=True):
            done = self._orthogonalize(part, overwrite)
            if done.data_ptr() != target.data_ptr():  # not in place
                target.copy_(done)
            del done  # before the next part takes memory
        return result

    def _call_function(self, x: Tensor) -> Tensor:
        assert self.function is not None
        # A copy: functions of users may work in place, and x may be the momentum.
        result: object = self.function(x.clone(), epsilon=self.epsilon)
        if not isinstance(result, Tensor) or result.shape != x.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ParameterError("newton_schulz_func", f"must return a tensor of shape {tuple(x.shape)}, got {got}")
        return result

    def _orthogonalize(self, x: Tensor, overwrite: bool) -> Tensor:
        if x.numel() == 0:
            return torch.empty_like(x, dtype=self.dtype)
        if tall := x.size(-2) > x.size(-1):
            x = x.mT
        batch, m, n = x.shape
        ops = select_backend(self.backend, x.device, self.dtype, (batch, m, n))
        x = self._normalize(x, ops, overwrite)
        triples = self.table.for_steps(self.steps)
        restarts = self.restarts() if self.chosen_form(m, n, ops) == "gram" else range(len(triples))
        x = iterate(x, triples, ops, restarts, in_place=self.in_place)
        return x.mT if tall else x

    def _normalize(self, x: Tensor, ops: Operations, overwrite: bool) -> Tensor:
        """x / (safety factor * Frobenius norm), guarded by epsilon, in `dtype`; x changes only with `overwrite`."""
        done = ops.normalize(
            x,
            self.dtype,
            factor=self.table.safety_factor,
            epsilon=self.epsilon,
            clamp=self.norm == "clamp",
            overwrite=overwrite,
        )
        if done is not None:
            return done
        high = torch.float64 if self.dtype == torch.float64 else torch.float32
        if x.dtype != high:
            # One cast serves the norm and the division; fp64 input goes through fp32 unless fp64 was asked for.
            x = x.to(high)
        norm = _frobenius_norm(x)
        scale = norm * self.table.safety_factor
        scale = scale + self.epsilon if self.norm == "add" else scale.clamp_min(self.epsilon)
        # On CPU the products of 16-bit matrices fall back to naive loops unless their operands are row-major.
        layout = torch.contiguous_format if x.device.type == "cpu" else torch.preserve_format
        return torch.div(x, scale, out=torch.empty_like(x, dtype=self.dtype, memory_format=layout))

    def restarts(self) -> frozenset[int]:
        """Zero-based steps before which the Gram form starts afresh; see `iterate`.

        fp16, fp32 and fp64: 2, and then every third step. bf16 (8 bits): 2, 3, and then every second.
        Measured on 256 x 1024 on CPU, five steps, relative error against fp64 and largest singular value (exact:
        1.131), Polar Express, singular values evenly spread over [1e-4, 1]: fp16 (2,) 0.006 and 1.13; bf16
        (2,) 0.057 and 1.19, (2, 3) 0.043 and 1.14, (1, 2, 3, 4) 0.029 and 1.13; plain bf16 0.029 and 1.13.
        """
        if self.dtype == torch.bfloat16:
            return frozenset((2, *range(3, self.steps, 2)))
        return frozenset(range(2, self.steps, 3))

    def temporary_bytes(self, m: int, n: int, count: int = 1) -> int:
        """Bytes that `count` m x n matrices take while they are orthogonalized: x, q x and the m x m matrices.

        Of more than `most_bytes` allows at a time, all results and what a part takes. Counted for the Gram form where
        the choice is open, and so for a function of one's own. Not counted: a copy in fp32, from which torch takes the
        norm of 16-bit input where no kernel does.
        """
        at_once = self._at_once(count, m, n)
        if count > at_once:
            return count * m * n * self.dtype.itemsize + at_once * self._bytes_of_one(m, n)
        return count * self._bytes_of_one(m, n)

    def _at_once(self, count: int, m: int, n: int) -> int:
        """How many of so many m x n matrices `most_bytes` allows at a time."""
        return count if self.most_bytes is None else max(1, self.most_bytes // max(1, self._bytes_of_one(m, n)))

    def _bytes_of_one(self, m: int, n: int) -> int:
        m, n = sorted((m, n))
        triples = self.table.for_steps(self.steps)
        plain = self.form == "plain" or (self.form == "auto" and m == n)
        runs = cached_runs(triples, frozenset(range(self.steps)) if plain else self.restarts())
        wide = m * n if self.in_place and works_in_place(m, n) else 2 * m * n
        return self.dtype.itemsize * (wide + max(map(count_places, runs)) * m * m)

    def chosen_form(self, m: int, n: int, ops: Operations) -> str:
        """`plain` or `gram` for an m x n matrix, m <= n, on these operations."""
        if self.form != "auto":
            return self.form
        if m == n:
            return "plain"
        if self.scheme == "gram":
            return "gram"
        gram = gram_cost(m, n, self.steps, ops.symmetric_cost, self.restarts())
        return "gram" if gram < _GRAM_MARGIN * plain_cost(m, n, self.steps, ops.symmetric_cost) else "plain"


def _resolve_table(scheme: str, coefficients: str | Sequence[Sequence[float]] | None) -> CoefficientTable:
    names = SCHEMES[scheme]
    if coefficients is None:
        return TABLES[names[0]]
    if not isinstance(coefficients, str):
        return custom_table(coefficients)
    if coefficients in names:
        return TABLES[coefficients]
    if coefficients in TABLES:
        fitting = [candidate for candidate, tables in SCHEMES.items() if coefficients in tables]
        raise OptionError(
            "coefficients",
            f"must be one of {', '.join(map(repr, names))} with scheme {scheme!r}, got {coefficients!r}",
            f"Use scheme {' or '.join(map(repr, fitting))} for these coefficients",
        )
    raise choice_error("coefficients", coefficients, names)


def _frobenius_norm(x: Tensor) -> Tensor:
    """[B, 1, 1] Frobenius norms of x: [B, m, n], in x's dtype (fp32 or fp64)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        # Telling whether squares over- or underflowed would stall the stream; beyond 1e19 the result is zeros.
        return norm
    low, high = _SAFE_NORM_RANGE
    safe = (norm > low) & (norm < high)
    if bool(safe.all()):
        return norm
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    scaled: Tensor = torch.linalg.vector_norm(x / unit, dim=(-2, -1), keepdim=True)
    # Bit for bit the same for the others, whatever their neighbour holds.
    return torch.where(safe, norm, scaled * unit)


def resolve_compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where a device multiplies it fast, else float32: what `ns_dtype="auto"` means, but see `auto_dtype`.

    That is CUDA with bf16 support, and processors with AMX tiles or AVX512-BF16. Measured on two cores of the latter
    (AMD EPYC): a step of Muown on SmolLM2's matrices takes 0.57 of the time that it takes in float32
    (`benchmarks/results/cpu_step_2026-11-30.md`).
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu":
        checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
        return torch.bfloat16 if any(check is not None and check() for check in checks) else torch.float32
    return torch.float32
