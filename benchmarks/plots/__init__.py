"""Static SVG plots of saved results, beside them in ``benchmarks/results/``.

    python -m benchmarks.plots

`style` is what all have in common; one module a result draws its plots. A result that is not there is
skipped with a message. The same result always draws the same bytes.
"""
