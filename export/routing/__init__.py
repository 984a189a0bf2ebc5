"""Two tiers of one task, and whether a choice of tier for each item pays.

- :mod:`export.reduce.routing`: policies, their mean cost, and controls at the same cost
- :mod:`export.reduce.route`: a router that reads the mean embedding and the length
- :mod:`export.reduce.routing`: whether a policy is better than the tiers without one, beyond chance
- :mod:`export.reduce.route`: from two runs to a decision; :mod:`export.routing.plot` draws it

A policy pays only if it beats both the static mix of the tiers *and* its own shuffled scores at the same mean cost:
more accuracy for more time is not a gain.
"""
