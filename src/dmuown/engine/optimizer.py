"""The engine: one `step` for every algorithm, on Dion's runtime where it is installed.

`step` collects gradients, makes one task per bucket by looking up the group's algorithm, and runs
the tasks. A task is the sentence of `dmuown.algorithms.base`; algorithms never override `step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuown.algorithms import ElementwiseAlgorithm, fused
from dmuown.engine import joint, loading, rows
from dmuown.engine.base import AsyncRuntime, AsyncTask, _MuonBase
from dmuown.engine.bounds import OFFLOAD_BATCH_SIZE
from dmuown.engine.capturable import check_capture, hold_lr, hold_lrs
from dmuown.engine.exchange import ExchangeCount, orthogonalize, wire_dtype
from dmuown.engine.gradients import NonFinite, collect_gradients
from dmuown.engine.info import generation_of
from dmuown.engine.layout import local_tensor
from dmuown.engine.options import check_names, complete_group, prefer_aliases
from dmuown.engine.planning import Chunk, Plan, load_elementwise, make_plan
from dmuown.engine.records import (
    ParamRecord,
    as_groups,
    check_complete,
    check_distinct,
    check_mesh_type,
    check_not_dedicated_since,
    make_records,
    named_tensors,
    split_by_optim_dtype,
    warn_of_narrow_storage,
)
from dmuown.engine.rounding import Roundings
from dmuown.engine.state import add_missing_buffers
from dmuown.engine.streams import SideStreams
from dmuown.engine.whole import update_whole
from dmuown.errors import OptionError, OptionTypeError, ParameterError
from dmuown.ownership.away import AwayParameter
from dmuown.ownership.record import dedications
from dmuown.state.working import WorkingSet, compute_device, finish_copies


class MuonEngine(_MuonBase):
    """Base of `Muon`, `Muown` and the others; third parties register algorithms instead of deriving.

    Args:
        params: Tensors, groups, a generator, or `(name, tensor)` pairs such as `named_parameters()`.
        distributed_mesh: Accepted for compatibility with Dion and checked for type only: collectives
            follow each parameter's own DTensor mesh.
        defaults: Group keys for groups that leave them out; `algorithm` and `lr` among them.
        newton_schulz_func: `func(x, epsilon=...)`, replaces the orthogonalizer of every matrix group.
        nonfinite: About gradients with NaN or infinity: `"propagate"` uses them as torch does,
            `"skip"` leaves their parameter and its state alone, `"raise"` raises on every rank.
        partial: Of a dedicated model: whether other optimizers step the parameters that are not given here.

    Attributes:
        exchange_count: Counters of what this rank sent and orthogonalized.
        orthogonalized: Logical matrices updated by the last step, over all owners.

    Raises:
        OptionError: A bad hyper-parameter; before any allocation.
        ParameterError, LayoutError: A parameter that cannot be optimized so.
        PlanMismatchError: Ranks were given different parameters or options.
        OwnershipError: A dedicated model's trainable parameters are left out, without `partial`.
    """

    def __init__(
        self,
        params: Any,
        *,
        defaults: Mapping[str, Any],
        distributed_mesh: DeviceMesh | ProcessGroup | None = None,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        nonfinite: NonFinite = "propagate",
    ) -> None:
        generation_of(_MuonBase)  # refuses a Dion that would never ask for our tasks
        check_mesh_type(distributed_mesh)
        if nonfinite not in ("raise", "skip", "propagate"):
            raise OptionError("nonfinite", f"must be 'raise', 'skip' or 'propagate', got {nonfinite!r}")
        if newton_schulz_func is not None and not callable(newton_schulz_func):
            raise OptionTypeError("newton_schulz_func", f"must be callable, got {type(newton_schulz_func).__name__}")
        signature = {key: value.default for key, value in inspect.signature(type(self)).parameters.items()}
        public_name = type(self).__qualname__  # `Muon.__name__` is another: see `dmuown.engine.optimizers`
        defaults = dict(prefer_aliases(defaults, signature, public_name))
        partial = defaults.pop("partial", False)
        if not isinstance(partial, bool):
            raise OptionTypeError("partial", f"must be True or False, got {partial!r}")
        self._class_defaults = {key: value for key, value in defaults.items() if value is not None}
        check_names(self._class_defaults, public_name)
        self._newton_schulz = newton_schulz_func
        self._nonfinite: NonFinite = nonfinite
        self._records: list[ParamRecord] = []
        self._record_of: dict[Tensor, ParamRecord] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self._part: list[joint.Joint] = []
        self._plan: Plan | None = None
        self._held_lrs: dict[int, Tensor] = {}
        self._roundings = Roundings()
        self._streams: SideStreams | None = None
        self._agreed = False
        self._complete = False
        self._rows_unverified = True
        self.exchange_count = ExchangeCount()
        self.orthogonalized = 0
        if isinstance(params, torch.nn.Module):
            from dmuown.ownership.groups import dedicated_param_groups

            # A dedicated model: this rank steps what it owns, whole matrices and shards alike.
            params = dedicated_param_groups(params, algorithm=str(self._class_defaults["algorithm"]))
        groups = as_groups(params)
        if "optim_dtype" not in self._class_defaults:  # an argument is the user's own word, as a group's key is
            groups = split_by_optim_dtype(groups)
        if not partial:
            check_complete(groups)
        self._dedications = dedications()
        probe = {"params": [], **self._class_defaults}
        complete_group(probe, public_name, self._class_defaults)
        super().__init__(
            groups,
            distributed_mesh=None,
            lr=probe["lr"],
            mu=probe.get("mu", 0.95),
            betas=(probe["beta1"], probe["beta2"]),
            weight_decay=probe["weight_decay"],
            epsilon=probe["epsilon"],
            nesterov=probe.get("nesterov", False),
        )
        self.defaults.update({key: value for key, value in probe.items() if key != "params"})
        for record in self._records:
            self._get_or_initialize_state(record.param, record.algorithm.name)
        self._complete = True
        self._make_plan()
        rows.initialize(self._plan_now(), self.state)
        warn_of_narrow_storage(self._records, self.param_groups)

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it is validated whole before anything is allocated or changed.

        Args:
            param_group: `params` (tensors, a generator or named pairs) and any options.

        Raises:
            OptionError, ParameterError, LayoutError: As at construction.
        """
        if not isinstance(param_group, dict):
            raise OptionTypeError("param group", f"must be a dict, got {type(param_group).__name__}")
        index = len(self.param_groups)
        where = f"param group {index}"
        if "params" not in param_group:
            raise OptionError(f"{where}: params", "is missing")
        tensors, names = named_tensors(param_group["params"], where)
        group = {**param_group, "params": tensors}
        complete_group(group, where, self._class_defaults)
        names = names or group.get("param_names")
        records = make_records(tensors, names, group, index)
        check_distinct([*self._records, *records])
        if names:
            group["params"] = list(zip(names, tensors, strict=True))
        if group["capturable"] and records:
            hold_lr(group, local_tensor(records[0].param).device)
        self._records += records
        self._record_of.update({record.param: record for record in records})
        try:
            super().add_param_group(group)
        except BaseException:
            self._forget(records)
            raise
        if self._complete:
            self._join(records)

    def _join(self, records: list[ParamRecord]) -> None:
        """Give parameters that were added later their state and a plan; all of it or nothing."""
        try:
            for record in records:
                self._get_or_initialize_state(record.param, record.algorithm.name)
            self._make_plan()
        except BaseException:
            self.param_groups.pop()
            for record in records:
                self.state.pop(record.param, None)
            self._forget(records)
            raise
        rows.initialize(self._plan_now(), self.state, {record.param for record in records})
        warn_of_narrow_storage(records, self.param_groups)

    @property
    def records(self) -> list[ParamRecord]:
        """The parameters in the order of the groups: name, algorithm, layout."""
        return list(self._records)

    def _forget(self, records: list[ParamRecord]) -> None:
        for record in records:
            self._records.remove(record)
            del self._record_of[record.param]

    @torch.no_grad()
    def _get_or_initialize_state(self, param: Tensor, algo: str) -> dict[str, Any]:
        """Return a parameter's state, allocated whole as its algorithm declares it (Dion's hook)."""
        record = self._record_of.get(param)
        if record is None:
            return {}  # a dedicated parameter of another rank
        state: dict[str, Any] = self.state[param]
        add_missing_buffers(state, record, self.param_groups[record.group_index])
        return state

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimization step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            GradientError: A sparse gradient, one laid out unlike its parameter, or (with
                `nonfinite="raise"`) one that is not finite.
        """
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break("dmuown's step is no single graph: compile around it with fullgraph=False")
        return self._take_step(closure)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        """Do the step, outside any graph: its functions would be compiled anew for each of many shapes."""
        if self._dedications != dedications():
            check_not_dedicated_since(self._records)
            self._dedications = dedications()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_capture(self._records, self.param_groups, self._nonfinite)
        self._sync_hyperparam_tensors()
        plan = self._plan_now()
        self._verify_rows(plan)
        maximize = [self.param_groups[record.group_index]["maximize"] for record in self._records]
        gradients = collect_gradients(
            self._records, plan.audiences, self._nonfinite, maximize, plan.told_back, agreed=self._agreed
        )
        self._gradients = {
            record.param: grad for record, grad in zip(self._records, gradients, strict=True) if grad is not None
        }
        self._roundings.begin_step(self._records, self.param_groups)
        self._advance_host_step_counters()
        self.orthogonalized = 0
        try:
            for self._part in plan.parts:
                with self._streams or nullcontext():
                    tasks = self._create_tasks(last=self._part is plan.parts[-1])
                    AsyncRuntime(tasks, max_concurrent_tasks=plan.tasks_in_flight).run()
            finish_copies()
        finally:
            self._gradients, self._part = {}, []
        return loss

    def _create_tasks(self, last: bool) -> Generator[AsyncTask, None, None]:
        """The tasks of one part of the plan, by the registry, through the hooks that Dion's own step calls."""
        yield from self._create_ortho_tasks(self.param_groups)
        if last:
            yield from self._create_adamw_tasks(self.param_groups)

    def _create_ortho_tasks(self, param_groups: list[dict[str, Any]]) -> Generator[AsyncTask, None, None]:
        """Tasks of the matrix groups (hook of Dion's main): buckets by falling cost."""
        for part, chunks in self._plan_now().tasks(self._gradients, param_groups, self._part):
            yield self._task(joint.run(part, [self._update_matrices(chunk) for chunk in chunks], self.exchange_count))

    def _create_muon_tasks(
        self, param_groups: list[dict[str, Any]], algo_name: str = "muon"
    ) -> Generator[AsyncTask, None, None]:
        """The same hook under the name of Dion's revision 7452a58."""
        yield from self._create_ortho_tasks(param_groups)

    def _create_adamw_tasks(
        self, param_groups: list[dict[str, Any]], algo_name: str = "adamw"
    ) -> Generator[AsyncTask, None, None]:
        """Tasks of all elementwise groups, AdamW and others."""
        for records, group in self._plan_now().elementwise(param_groups):
            yield self._task(self._update_elements(records, group))

    def _create_lion_tasks(
        self, param_groups: list[dict[str, Any]], algo_name: str = "lion"
    ) -> Generator[AsyncTask, None, None]:
        """Nothing: Lion is one more row that `_create_adamw_tasks` finds in the registry."""
        return
        yield

    def _task(self, work: Generator[None, None, None]) -> AsyncTask:
        return AsyncTask(work if self._streams is None else self._streams.run(work))

    def _update_matrices(self, chunk: Chunk) -> joint.Asking[None]:
        """The sentence: one bucket, or as much of it as its group allows at once."""
        algorithm = chunk.algorithm
        if algorithm.updates_whole_tensors():
            yield from update_whole(chunk, self.state, self._gradients, self._roundings.of)
            self.orthogonalized += chunk.matrices
            return
        working = chunk.working_set()
        batch = chunk.batch(self.state, self._gradients, working, self._roundings.of)
        if working.in_flight:
            yield None  # state is on its way from the host: let other tasks compute
        working.wait()
        momentum = fused.before(algorithm, batch, wire_dtype(chunk.bucket.orthogonalizer.dtype))
        disposable = momentum is not None
        if momentum is None:
            gradient = yield from algorithm.prepare_gradient(batch)
            batch.check_returned(algorithm.name, "prepare_gradient", gradient)
            momentum = algorithm.update_momentum(batch, gradient)
            batch.check_returned(algorithm.name, "update_momentum", momentum)
            del gradient
        update = yield from orthogonalize(
            chunk.bucket, momentum, self.exchange_count, first=chunk.first, disposable=disposable
        )
        del momentum
        if not (yield from fused.after(algorithm, batch, update)):
            update = yield from algorithm.shape_update(batch, update)
            batch.check_returned(algorithm.name, "shape_update", update)
            yield from algorithm.apply(batch, update)
        working.store()
        self.orthogonalized += chunk.matrices

    def _update_elements(self, records: list[ParamRecord], group: dict[str, Any]) -> Generator[None, None, None]:
        algorithm = records[0].algorithm
        assert isinstance(algorithm, ElementwiseAlgorithm)
        stepping = [record for record in records if record.param in self._gradients]
        size = OFFLOAD_BATCH_SIZE if group["offload_state"] else max(1, len(stepping))
        for start in range(0, len(stepping), size):
            part = stepping[start : start + size]
            working = WorkingSet(compute_device(local_tensor(part[0].param), group))
            params = [record.param for record in part]
            weights, state = load_elementwise(algorithm, params, self.state, group, working, self._roundings.of)
            gradients = [working.read(self._gradients[record.param]) for record in part]
            if working.in_flight:
                yield
            working.wait()
            algorithm.update(weights, gradients, state, group)
            working.store()

    # ------------------------------------------------------------------ magnitudes

    @torch.no_grad()
    def resync_magnitudes(self) -> None:
        """Take row magnitudes and master weights anew from the weights, when those were changed from outside.

        Call it on every rank after loading a model into parameters that this optimizer already
        holds, or after swapping in averaged weights. Momentum is left as it is.
        """
        rows.initialize(self._plan_now(), self.state)
        rows.refresh_masters(self._records, self.state)
        self._rows_unverified = False

    @torch.no_grad()
    def reset_state(self, params: Iterable[Tensor] | None = None) -> None:
        """Start parameters afresh, in place: as if the optimizer had just been built with their present weights.

        For weights that are given to a new use, such as an adapter's slot: what their old use left in momentum,
        variances and step counters would move them. Call it on every rank; of dedicated parameters, owners reset
        what they own. Groups, and with them the learning rate and the count of steps that schedules go by, stay as
        they are.

        Args:
            params: Parameters of this optimizer; None for all.

        Raises:
            ParameterError: A parameter that this optimizer does not hold; nothing has been changed then.
        """
        given = self._record_of if params is None else params
        chosen = [param for param in given if not isinstance(param, AwayParameter)]
        for index, param in enumerate(chosen):
            if param not in self._record_of:
                raise ParameterError(f"params[{index}]", "is not a parameter of this optimizer")
        for param in chosen:
            record = self._record_of[param]
            fresh: dict[str, Any] = {}
            add_missing_buffers(fresh, record, self.param_groups[record.group_index])
            for key, value in fresh.items():
                local_tensor(self.state[param][key]).copy_(local_tensor(value))
        rows.initialize(self._plan_now(), self.state, set(chosen))

    def _verify_rows(self, plan: Plan) -> None:
        if self._rows_unverified:
            rows.verify(plan, self.state, self.param_groups)
            rows.refresh_masters(self._records, self.state)
            self._rows_unverified = False

    # ------------------------------------------------------------------ plan

    @property
    def plan(self) -> Plan:
        """Who updates what, together with whom; `dmuown.summarize_exchange` prints what follows from it."""
        return self._plan_now()

    def _plan_now(self) -> Plan:
        if self._plan is None:
            self._make_plan()
        assert self._plan is not None
        return self._plan

    def _make_plan(self) -> None:
        plan = make_plan(self._records, self.param_groups, self._newton_schulz)
        self._roundings.prepare(self._records, self.param_groups)
        self._plan = plan

    def _rebuild_records(self) -> None:
        """After unpickling or copying: the tensors are new, the groups are complete."""
        self._records = []
        for index, group in enumerate(self.param_groups):
            self._records += make_records(group["params"], group.get("param_names"), group, index)
        self._record_of = {record.param: record for record in self._records}

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the steps that replays of one's own graphs counted."""
        state_dict = super().state_dict()
        for index, count in self._roundings.counts(self.param_groups).items():
            state_dict["param_groups"][index]["step"] = count
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of the same algorithms and parameters, saved on any base, in any of torch's ways.

        Parameters are matched by name where this optimizer and the state dict have names, else by
        position. Values are copied into the declared buffers in place and keep the declared dtype
        (torch's own loader would cast them to the parameter's). Run-level settings, such as
        `muon_update_scale` and the backend, stay as configured (`dmuown.engine.options.RUN_LEVEL_OPTIONS`).
        State of an older `state_version` is upgraded. On every rank of a mesh, like `step`.

        Args:
            state_dict: What `state_dict()` returned, or torch's `get_optimizer_state_dict`; left as it is.

        Raises:
            CheckpointError: Another algorithm, missing or extra parameters or buffers, wrong shapes, a
                newer `state_version`; nothing has been changed then.
        """
        self._plan_now()
        state_dict = copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        checked = loading.check(self, state_dict)
        loading.apply(self, checked)
        self._roundings.load_counts(self.param_groups)
        if checked.replan:
            self._rebuild_records()
            self._make_plan()
        self._rows_unverified = True
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _restore_step_tensor(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        """Dion's main repairs its own step counter here; ours is declared state."""

    def _live_hyperparams(self, index: int) -> tuple[str, ...]:
        """Dion's main asks which options become device tensors: none, `lr` stays the caller's float."""
        return ()

    def _sync_hyperparam_tensors(self) -> None:
        """Put numbers that schedulers wrote into the tensors that a graph reads (hook of Dion's graph wrapper)."""
        hold_lrs(self._records, self.param_groups, self._held_lrs)

    def _advance_host_step_counters(self) -> None:
        """Count a replayed step (hook of Dion's graph wrapper)."""
        for group in self.param_groups:
            group["step"] += 1

    def __getstate__(self) -> dict[str, Any]:
        own = ("_class_defaults", "_newton_schulz", "_nonfinite", "_rows_unverified")
        counts = self._roundings.counts(self.param_groups)
        groups = [{**group, "step": counts.get(index, group["step"])} for index, group in enumerate(self.param_groups)]
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}, "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._complete = True
        self._gradients, self._part = {}, []
        self._held_lrs, self._streams, self._agreed = {}, None, False
        self._roundings = Roundings()
        # The plan waits until it is needed: making it is collective.
        self._plan = None
        self._rebuild_records()
        self.__dict__.setdefault("exchange_count", ExchangeCount())
        self.__dict__.setdefault("orthogonalized", 0)
        self._dedications = dedications()
