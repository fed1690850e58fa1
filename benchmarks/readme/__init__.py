"""The tables of README.md, made from saved results.

    python -m benchmarks.readme            # rewrite them
    python -m benchmarks.readme --check    # exit with 1 if README.md says something else

A table stands between ``<!-- results: NAME -->`` and ``<!-- end -->``. `tables` maps each name to the
result it is made from and a small function; `markdown` is what they share. Under a table stands how it
came about: the command, whether its checks held, commit, hardware and versions. Where a result is not
there, what stands between the markers stays.
"""
