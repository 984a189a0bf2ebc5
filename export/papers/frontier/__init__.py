"""Speed against accuracy over tasks and seeds, beside simple reductions of the same speed: ``fewheads frontier``."""
