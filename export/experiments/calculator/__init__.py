"""Experiments with the calculators of papers 000 and 001."""
