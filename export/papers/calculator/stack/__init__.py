"""A calculator for longer expressions, with products and parentheses: a machine with a stack."""

STACK = "calculator-stack"
NAMES = (STACK,)
