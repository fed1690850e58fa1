"""``tessera-sglang verify``: what spans cost in quality on somebody's own model, and what they save."""
