"""Calculators for longer expressions, with products and parentheses: a machine with a stack, and its baselines."""

STACK = "calculator-stack"
#: Networks without a stack that learn from the same tokens, to compare with.
LSTM, TRANSFORMER = "calculator-token-lstm", "calculator-token-transformer"
NAMES = (STACK, LSTM, TRANSFORMER)
