"""Fewer and smaller heads, fewer hidden units: transformers reduced from measured activations, to a measured latency.

- :mod:`export.reduce.states`, :mod:`export.reduce.calibration`: the states between layers, and their means and
  covariances
- :mod:`export.reduce.algebra`: heads of a smaller width, in closed form
- :mod:`export.reduce.algebra`: removal of heads and hidden units, with compensation by the others
- :mod:`export.reduce.sublayers`: both together, as smaller sub-layers
- :mod:`export.reduce.plan`: a shape for each layer, its cost, and its largest possible speed-up
- :mod:`export.reduce.latency`: measured times of shapes and models
- :mod:`export.reduce.search`: the plan with the least loss among those that are fast enough
- :mod:`export.reduce.reduce`, :mod:`export.reduce.run`: a whole model, and a whole run, resumable

The methods are linear algebra over calibration inputs; none of them trains.
"""
