"""The comparisons of paper 002, "Adaptive Attention Mechanisms": ``fewheads compare``.

Every mechanism is a small object in :mod:`export.papers.adaptive.mechanisms`. All start from the same fine-tuned
model, get the same training, and are measured on the same items and, in turns, on the same processor.
"""
