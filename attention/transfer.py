"""What the plan knows on the host, brought to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 arrays on a device, in one copy that the host does not wait for."""
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        joined = joined.pin_memory()
    placed = joined.to(device, non_blocking=True)
    return list(torch.split(placed, [len(array) for array in arrays]))
