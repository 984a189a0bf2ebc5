"""The predictive calculator of papers 000 and 001: small networks that regress the value of ``3 - -4 + 2``."""
