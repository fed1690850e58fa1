"""``tessera-sglang bench``: SGLang's benchmark client against one server, or against two in turns.

`client` runs ``sglang.benchmark.serving`` in this process, with SGLang's plugins loaded; `agents` is the
workload that SGLang does not have; `sides` starts the servers; `rounds` decides who is asked when;
`summary` is medians, spread and gain; `report` prints; `command` is the command line.
"""
