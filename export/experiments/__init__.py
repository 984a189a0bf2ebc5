"""Experiments on the claims of a paper: one resumable command each, with JSON, a table and plots."""
