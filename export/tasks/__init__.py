"""Real tasks to fine-tune on: GLUE, SQuAD and images, with their official metrics.

Data are never part of the project. A directory that holds them looks like this, and README files of the data sets'
own sites say where each comes from:

======================  ===========================================================================================
``glue/RTE/train.tsv``  and ``dev.tsv``, likewise for the other tasks: gluebenchmark.com/tasks
``squad/``              files in SQuAD v1.1 JSON: rajpurkar.github.io/SQuAD-explorer, or xquad.en.json of XQuAD
``mnist/``              ``t10k-images-idx3-ubyte.gz`` and ``t10k-labels-idx1-ubyte.gz`` of MNIST
======================  ===========================================================================================
"""

from __future__ import annotations

#: The tasks of :mod:`export.tasks.glue`, here so that a command line can name them without NumPy or torch.
NAMES = ("SST-2", "CoLA", "STS-B", "MRPC", "RTE", "WNLI", "QNLI", "MNLI", "QQP")
