"""Where KV lives and how it is found: the content index (engine-free: numpy, torch, xxhash)."""
