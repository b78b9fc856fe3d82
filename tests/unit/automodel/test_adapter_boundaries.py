"""Hook boundaries of a model with LoRA adapters, whose layers read their adapters' weights without calling them."""

from __future__ import annotations

from torch import nn

from dmuown.automodel.ownership import adapter_boundaries
from dmuown.ownership.boundaries import find_boundaries


class Adapted(nn.Linear):
    """A linear layer with adapters, as the host builds it."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 4, bias=False)


def model(layer: type[nn.Module]) -> nn.Module:
    def new() -> nn.Module:
        return layer() if layer is Adapted else nn.Linear(4, 4, bias=False)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = new(), nn.LayerNorm(4)

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(3, 4), nn.LayerNorm(4)
            self.layers = nn.ModuleList([Block(), Block(), new()])

    return nn.ModuleDict({"model": Body(), "lm_head": new()})


def boundary_by_parameter(found: nn.Module) -> dict[str, str]:
    names = {name: [name] for name, _ in found.named_parameters()}
    boundaries = find_boundaries(found, names, adapter_boundaries(found))
    return {name: boundaries.entries[at[0]].name for name, at in boundaries.of.items()}


def test_adapters_outside_of_blocks_belong_to_their_layer() -> None:
    found = boundary_by_parameter(model(Adapted))
    assert {name: found[f"lm_head.{name}"] for name in ("weight", "lora_A.weight", "lora_B.weight")} == {
        "weight": "lm_head",
        "lora_A.weight": "lm_head",
        "lora_B.weight": "lm_head",
    }
    assert found["model.layers.2.lora_A.weight"] == "model.layers.2"


def test_everything_else_is_where_it_is_without_adapters() -> None:
    plain = boundary_by_parameter(model(nn.Linear))
    assert adapter_boundaries(model(nn.Linear)) is None
    adapted = boundary_by_parameter(model(Adapted))
    assert {name: at for name, at in adapted.items() if "lora" not in name} == plain
