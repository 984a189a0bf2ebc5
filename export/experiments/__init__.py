"""Experiments that answer a paper's claims: one command each, resumable, with JSON, a table and plots."""
