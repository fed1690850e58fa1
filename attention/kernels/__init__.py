"""One file per kernel library behind the interface in `base`."""
