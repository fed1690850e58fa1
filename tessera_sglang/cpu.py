"""The platform class that :mod:`platform` names. Imported only where it is used."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TesseraCpuPlatform(SRTPlatform, CpuDeviceMixin):  # type: ignore[misc] # untyped bases
    """Any CPU, PyTorch only: no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Without a flag, SGLang's own PyTorch backend."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Fused ops run their PyTorch implementation."""
        return "native"
