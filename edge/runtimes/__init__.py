"""Runtimes: one file for each, the table of them, and the builds that they run."""
