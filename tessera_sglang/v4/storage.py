"""A pool and a model's config bound together: each layer's planes as tensors that the model can use.

The reference model has no quantiser, so rows are kept in float32 or bfloat16, all of a row in one dtype.
The packed formats of kernels have the same planes; packing is the business of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessera_sglang.memory_pool.geometry import Geometry, LayerGeometry, Plane
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.models import HybridModel
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.memory_pool.ring import Ring
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat

from .rope import Rope

FORMATS: Mapping[torch.dtype, tuple[KvFormat, IndexFormat]] = {
    torch.float32: (KvFormat.FP32, IndexFormat.FP32),
    torch.bfloat16: (KvFormat.BF16, IndexFormat.BF16),
}


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """One plane of one layer, rows numbered through all pages or slots."""

    plane: Plane
    rows: torch.Tensor  # [units * rows per unit, elements], in the plane's dtype; the pool's memory
    ring: Ring | None  # of an arena plane: which position each row holds


@dataclass(frozen=True, slots=True)
class LayerPlanes:
    """All planes of one layer by name."""

    layer: int
    geometry: LayerGeometry
    planes: Mapping[str, PlaneRows]


class LayerStorage:
    """A pool as the layers of one model see it. Holds no state of its own; one per pool is enough."""

    def __init__(self, pool: TwoTierPool, config: Any) -> None:
        """``config`` is the model's ``DeepseekV4Config``.

        Raises ValueError where the pool was not made for such a model, or not in a format that the
        model can compute on.
        """
        self.pool = pool
        self.model = hybrid_model(config)
        self.rope = Rope(config)
        self._refuse_foreign(pool.geometry)
        self.layers = tuple(self._layer(index) for index in range(len(pool.geometry.layers)))
        self.rings = self._distinct_rings()
        self.strides = tuple(
            sorted({p.plane.tokens for layer in self.layers for p in layer.planes.values()} - {1})
        )

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self.pool.geometry.page_tokens

    @property
    def window_tokens(self) -> int:
        """Tokens in a window, the query's own among them."""
        return self.layers[0].planes["window"].plane.rows

    def _refuse_foreign(self, geometry: Geometry) -> None:
        layers = len(self.model.kinds)
        if len(geometry.layers) != layers:
            raise ValueError(
                f"the pool {geometry.name!r} has {len(geometry.layers)} layers, the model {layers}; "
                "make it with pool_geometry(config)"
            )
        first_foreign = max(
            self._equal_layers(geometry, kv, index) for kv, index in FORMATS.values()
        )
        if first_foreign < layers:
            raise ValueError(
                f"the pool {geometry.name!r} does not fit layer {first_foreign} of the model, a "
                f"{self.model.kinds[first_foreign].value} layer: the reference model keeps rows of its "
                "own widths in float32 or bfloat16; make the pool with pool_geometry(config, dtype)"
            )

    def _equal_layers(self, geometry: Geometry, kv: KvFormat, index: IndexFormat) -> int:
        """How many layers of the pool, from the first on, are the model's in these formats."""
        wanted = self.model.geometry(kv, index, page_tokens=geometry.page_tokens).layers
        equal = [mine == theirs for mine, theirs in zip(geometry.layers, wanted, strict=True)]
        return [*equal, False].index(False)

    def _layer(self, index: int) -> LayerPlanes:
        geometry, planes = self.pool.geometry.layers[index], {}
        for plane in geometry.paged:
            rows = self.pool.paged.tensor(index, plane.name).flatten(0, 1)
            planes[plane.name] = PlaneRows(plane, _typed(rows, plane), None)
        for plane in geometry.arena:
            rows = self.pool.arena.tensor(index, plane.name)
            ring = self.pool.arena.ring(index, plane.name)
            planes[plane.name] = PlaneRows(plane, _typed(rows, plane), ring)
        return LayerPlanes(index, geometry, planes)

    def _distinct_rings(self) -> tuple[Ring, ...]:
        """Layers with the same plane share the tags of its rows, which are moved once a pass."""
        rings = (rows.ring for layer in self.layers for rows in layer.planes.values())
        return tuple(dict.fromkeys(ring for ring in rings if ring is not None))


def hybrid_model(config: Any) -> HybridModel:
    """The widths and strides of a ``DeepseekV4Config``; ValueError for another model's config."""
    model = read_model(config.to_dict(), config.name_or_path or "DeepSeek-V4")
    if not isinstance(model, HybridModel):
        raise ValueError(f"wanted the config of a DeepSeek-V4 model, found {config.model_type}")
    return model


def pool_geometry(
    config: Any, dtype: torch.dtype = torch.float32, *, page_tokens: int | None = None
) -> Geometry:
    """The cache of a ``DeepseekV4Config``, rows in ``dtype``: float32 or bfloat16.

    Raises ValueError for another dtype, and for a page that splits a group of either stride.
    """
    if dtype not in FORMATS:
        known = " or ".join(str(known).removeprefix("torch.") for known in FORMATS)
        raise ValueError(f"rows of the reference model are kept in {known}, not in {dtype}")
    kv, index = FORMATS[dtype]
    return hybrid_model(config).geometry(kv, index, page_tokens=page_tokens)


def _typed(rows: torch.Tensor, plane: Plane) -> torch.Tensor:
    """uint8 [rows, row_bytes] in the one dtype that all regions of the plane have; no copy."""
    dtypes = {region.dtype for region in plane.regions}
    assert len(dtypes) == 1, "a row of several formats"
    assert not plane.padding_bytes, "a padded row"
    return rows.view(dtypes.pop().torch_dtype)
