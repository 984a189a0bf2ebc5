"""Fewer and smaller heads, fewer hidden units: transformers reduced from measured activations, to a measured latency.

- :mod:`export.reduction.states`, :mod:`export.reduction.calibration`: the states between layers, and their means and
  covariances
- :mod:`export.reduction.lowrank`: heads of a smaller width, in closed form
- :mod:`export.reduction.removal`: removal of heads and hidden units, with compensation by the others
- :mod:`export.reduction.sublayers`: both together, as smaller sub-layers
- :mod:`export.reduction.plan`: a shape for each layer, its cost, and its largest possible speed-up
- :mod:`export.reduction.latency`: measured times of shapes and models
- :mod:`export.reduction.search`: the plan with the least loss among those that are fast enough
- :mod:`export.reduction.reduce`, :mod:`export.reduction.run`: a whole model, and a whole run, resumable

The methods are linear algebra over calibration inputs; none of them trains.
"""
