"""The comparisons of paper 002, "Adaptive Attention Mechanisms": ``fewheads compare``.

Every mechanism is one small object in :mod:`export.experiments.attention.attention.mechanisms`. All start from the same
fine-tuned model, get the same training, and are measured on the same items and, in turns, with the same clock.
"""
