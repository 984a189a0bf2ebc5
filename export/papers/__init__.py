"""Experiments of the papers, all in the frame of :mod:`export.papers.experiment`; no verb imports one of them."""
