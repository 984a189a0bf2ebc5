"""Generated from ``proto/`` by ``make generate``; only ``pool.py`` is written by hand."""
