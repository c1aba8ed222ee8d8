"""Tiny models, made once."""

import pytest

from tests.models.every_operation import every_operation
from tests.native.models import (
    EVERY_OPERATION,
    EXPERTS,
    FLOAT_TYPES,
    ISAS,
    QUANTISED_TYPES,
    UNEQUAL_LAYERS,
    Loaded,
    has_isa,
    make_model,
    quantised_experts,
    with_unequal_layers,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """A tiny model of each tensor type, one whose layers differ, one of every operation, one of experts."""
    folder = tmp_path_factory.mktemp("native")
    models = {kind: make_model(folder / f"{kind}.gguf", kind) for kind in QUANTISED_TYPES + FLOAT_TYPES}
    return {
        **models,
        UNEQUAL_LAYERS: with_unequal_layers(models["F32"]),
        EVERY_OPERATION: every_operation(),
        EXPERTS: quantised_experts(),
    }


@pytest.fixture(scope="session")
def isas(models: dict[str, Loaded]) -> list[str]:
    """The instruction sets of this CPU, best first."""
    return [isa for isa in ISAS if has_isa(models["F32"], isa)]
