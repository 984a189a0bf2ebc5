"""A calculator for long expressions with products and parentheses: a linear recurrent network with a stack."""
