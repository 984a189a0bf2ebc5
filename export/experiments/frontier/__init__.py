"""Speed against accuracy over tasks and seeds, beside simple reductions of the same speed: ``fewheads frontier``.

- :mod:`.settings`: what is trained and measured; the committed file was frozen before dev was looked at
- :mod:`.family`: the runs of one task and seed
- :mod:`.answers`: their predictions on dev
- :mod:`.timing`: their times, in turns
- :mod:`.summary`: means, differences and intervals
- :mod:`.report`: Markdown tables, from records alone
"""
