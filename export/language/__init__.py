"""Language models: frozen backbones, heads of backward attention on them (paper 004), and their controls.

- :mod:`export.language.backward` has the head, :mod:`export.language.folding` its form for inference
- :mod:`export.language.online_softmax` computes weighted means over the vocabulary in chunks
- :mod:`export.language.controls` has simpler modules that a head has to beat
- :mod:`export.language.hidden` keeps the last hidden states of a backbone on disk
- :mod:`export.language.head_objective` trains a head or a control on them
"""
