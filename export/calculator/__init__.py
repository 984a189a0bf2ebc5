"""The predictive calculator of paper 000: small networks that regress the value of ``3 - -4 + 2``."""

#: The models, by the names of their runs and bundles. Here, so that naming them does not import torch.
NAMES = ("calculator-oracle", "calculator-gate", "calculator-fnn2", "calculator-transformer4")
