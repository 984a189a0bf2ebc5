"""Attacks on a running server, each measured by what a well-behaved client beside it notices.

python -m tests.attacks [--transport NAME] [--json FILE] [ATTACK ...]      prints the measurements as a table
"""
