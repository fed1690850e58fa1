"""Rotary embedding: pairing, theta and scaling of a loaded model against its configuration.

SGLang builds its tables from the configuration by its own rules, and not every rule is the
configuration's: the DeepSeek family takes whatever scaling a config names for YaRN. So the table that
a model will use is compared with the one that follows from the config by the formulas.

The configuration has to be remembered before the model is built: SGLang writes ``deepseek_yarn`` over
its rope type.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch

from tessera_sglang.attention.rope import (
    Pairing,
    RelativeRotation,
    yarn_inv_freq,
    yarn_mscale,
)

from .checks import AdmissionError, Checks, Config

_YARN = ("yarn", "deepseek_yarn")


def rope_fields(config: Config) -> dict[str, Any]:
    """A copy of all fields of a configuration that speak of rotary embedding."""
    return {
        field: copy.deepcopy(value)
        for field, value in config.items()
        if "rope" in field or "rotary" in field
    }


def rope_parameters(config: Config) -> dict[str, Any]:
    """Type, theta and scaling of the whole model, under transformers' names; both of its styles.

    Raises AdmissionError where two fields give different thetas.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(found) if isinstance(found, dict) else {}
    theta, above = parameters.get("rope_theta"), config.get("rope_theta")
    if theta is not None and above is not None and float(theta) != float(above):
        raise AdmissionError(
            f"config rope_theta: wanted {theta}, as in rope_parameters; found {above}"
        )
    parameters.setdefault("rope_theta", above)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    return parameters


def check_written_thetas(model_path: str) -> None:
    """The ``config.json`` itself: transformers drops a top-level theta beside ``rope_parameters``."""
    path = Path(model_path) / "config.json"
    if path.is_file():
        written = json.loads(path.read_text())
        rope_parameters(written.get("text_config") or written)


def check_rope(
    checks: Checks,
    path: str,
    rope: Any,
    config: Config,
    *,
    width: int,
    pairing: Pairing | None,
) -> None:
    """Compare ``path.rotary_emb`` with what the configuration asks for.

    ``width`` is the number of rotary channels, ``pairing`` None where no field and no convention
    says what it is.
    """
    table = getattr(rope, "cos_sin_cache", None)
    if table is None:
        checks.leave_out("rotary table")
        return
    if pairing is None:
        checks.leave_out("rotary pairing")
    else:
        found = Pairing.HALF_SPLIT if rope.is_neox_style else Pairing.INTERLEAVED
        checks.equal(f"{path}.rotary_emb", pairing.value, found.value, "pairing of channels")
    where = f"{path}.rotary_emb.cos_sin_cache"
    checks.equal(f"{where} width", width, int(table.shape[-1]), "rotary channels")
    checks.tensors += 1
    parameters = rope_parameters(config)
    expected = _expected(parameters, config, width)
    if expected is None:
        checks.leave_out(f"rotary table of type {parameters['rope_type']!r}")
        return
    wanted, norm = expected
    try:
        rotation = RelativeRotation.from_cos_sin_table(
            table.detach(), pairing or Pairing.HALF_SPLIT
        )
    except ValueError as error:
        raise AdmissionError(f"{where}: wanted {_named(parameters)}; {error}") from error
    found_freq = rotation.inv_freq.cpu()
    # the last row's rounding, spread over the positions, and float32 powers
    slack = 4 * torch.finfo(table.dtype).eps / len(table) + 2e-5 * wanted
    worst = int(((found_freq - wanted).abs() / slack).argmax())
    if not bool(((found_freq - wanted).abs() <= slack).all()):
        raise AdmissionError(
            f"{where}: wanted {_named(parameters)}, {float(wanted[worst]):.6g} radians a position "
            f"for channel pair {worst}; found {float(found_freq[worst]):.6g}"
        )
    found_norm = float(table[0, 0])  # the cosine of nothing, times the factor
    if abs(found_norm - norm) > max(1e-4, 2 * torch.finfo(table.dtype).eps) * norm:
        raise AdmissionError(
            f"{where}: wanted {_named(parameters)}, which multiplies by {norm:.6g}; "
            f"found {found_norm:.6g}"
        )
    checks.note(f"{parameters['rope_type']} rotary table")


def _named(parameters: dict[str, Any]) -> str:
    said = ", ".join(
        f"{field} {parameters[field]}"
        for field in ("rope_theta", "factor", "mscale", "mscale_all_dim", "attention_factor")
        if parameters.get(field) is not None
    )
    return f"rope_type {parameters['rope_type']} ({said})"


def _expected(
    parameters: dict[str, Any], config: Config, width: int
) -> tuple[torch.Tensor, float] | None:
    """Frequencies, float64 [width/2], and the table's factor; None for a type without a formula here.

    Formulas of transformers' ``modeling_rope_utils``.
    """
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    if theta is None or any(isinstance(value, dict) for value in parameters.values()):
        return None  # a table per kind of layer is told by the survey
    plain = float(theta) ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    factor = float(parameters.get("factor") or 1.0)
    if kind == "default" and not {"mrope_section", "use_fope"} & parameters.keys():
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, factor, parameters, config), 1.0
    if kind not in _YARN or not parameters.get("truncate", True) or "mrope_section" in parameters:
        return None
    if parameters.get("extrapolation_factor", 1) != 1:
        return None
    if (parameters.get("mscale") is None) != (parameters.get("mscale_all_dim") is None):
        return None  # DeepSeek's code and transformers' read one without the other differently
    frequencies = yarn_inv_freq(
        float(theta),
        width,
        factor,
        int(_original_length(parameters, config)),
        float(parameters.get("beta_fast") or 32),
        float(parameters.get("beta_slow") or 1),
    )
    return frequencies, _yarn_norm(factor, parameters)


def _yarn_norm(factor: float, parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above is None or below is None or not (above and below):
        norm = yarn_mscale(factor)
    else:
        norm = yarn_mscale(factor, float(above)) / yarn_mscale(factor, float(below))
    return norm * float(parameters.get("attn_factor") or 1.0)


def _llama3(
    plain: torch.Tensor, factor: float, parameters: dict[str, Any], config: Config
) -> torch.Tensor:
    """Slow what turns seldom within the original length, keep what turns often, blend between."""
    low = float(parameters.get("low_freq_factor") or 1.0)
    high = float(parameters.get("high_freq_factor") or 4.0)
    turns = _original_length(parameters, config) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * keep + plain / factor * (1 - keep)


def _original_length(parameters: dict[str, Any], config: Config) -> float:
    found = config.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    return float(found or config.get("max_position_embeddings") or 0)
