"""What a job would do, worked out from its YAML and the numbers of its model: no ranks, GPUs, weights or host.

cluster    the meshes of ranks that the host would make, and how each parameter would lie on them
exchange   owners, work and bytes of the engine's exchange, by rank
ownership  the same for the ownership runtime
model      the parameters, which are trained, adapters
memory     bytes by rank
routes     the route table
transfers  the table of transfers under the ownership runtime
stage      all of it for one pipeline stage
plan       all of it for a job, from its YAML
"""

from __future__ import annotations

from dmuown.automodel.planned.plan import JobPlan, plan_job

__all__ = ["JobPlan", "plan_job"]
