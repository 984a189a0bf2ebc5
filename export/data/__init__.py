"""Data to train on: readers of files, and rows of tokens or pixels."""
