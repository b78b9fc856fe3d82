"""A program that ends lets threads of gloo have the interpreter's lock, to drop their tensors before it shuts down."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, time
import torch
import torch.distributed as dist
import dmuown

if {communicates}:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
time.sleep = lambda seconds: os.write(1, f"paused {{seconds:.2f}} s".encode())
for optimizer in (dmuown.Muon, dmuown.Muown):
    optimizer([torch.nn.Parameter(torch.ones(4, 4))])
if {communicates}:
    dist.destroy_process_group()  # which under FSDP2 does not end the threads
os.write(1, b"ends: ")
"""


@pytest.mark.parametrize(("communicates", "printed"), [(True, b"ends: paused 0.05 s"), (False, b"ends: ")])
def test_a_program_with_ranks_pauses_once_when_it_ends(communicates: bool, printed: bytes) -> None:
    program = PROGRAM.format(communicates=communicates)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr.decode()[-2000:]
