"""Two tiers of one task, and whether it pays to decide for each item which of them answers.

- :mod:`export.routing.policies`: who answers what, at what mean cost, and the controls at the same cost
- :mod:`export.routing.linear`: a router that reads the mean embedding and the length
- :mod:`export.routing.diagnose`: whether a policy is surely better than the tiers without one
- :mod:`export.routing.run`: from two runs to a decision; :mod:`export.routing.report` holds it,
  :mod:`export.routing.plot` draws it

A policy is only worth its moving parts when it beats the static mix of both tiers *and* its own shuffled scores at the
same mean cost: more accuracy for more time is no achievement.
"""
