"""Engine-free attention over compressed or plain KV: torch only, no SGLang."""
