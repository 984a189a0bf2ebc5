"""Fewer and smaller heads, fewer hidden units: transformers reduced from measured activations, to a measured latency.

- :mod:`export.reduction.states`, :mod:`export.reduction.calibration`: what goes through a layer, as it is and as
  means and covariances
- :mod:`export.reduction.lowrank`: heads of a smaller width, in closed form
- :mod:`export.reduction.removal`: which heads and hidden units to leave out, and what makes up for them
- :mod:`export.reduction.sublayers`, :mod:`export.reduction.layer`: the two put together into smaller layers
- :mod:`export.reduction.plan`: which layer gets which shape, what that costs, and what it can give at most
- :mod:`export.reduction.timing`, :mod:`export.reduction.latency`: what shapes and models take on the runtime
- :mod:`export.reduction.search`: the plan with the least loss among those that are fast enough
- :mod:`export.reduction.reduce`: a model from end to end, resumable

Everything the methods need is linear algebra over calibration inputs; nothing here trains.
"""
