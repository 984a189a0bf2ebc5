"""Real tasks to fine-tune on: GLUE, SQuAD and images, with their official metrics.

Data are never part of the project. A directory that holds them looks like this, and README files of the data sets'
own sites say where each comes from:

======================  ===========================================================================================
``glue/RTE/train.tsv``  and ``dev.tsv``, likewise for the other tasks: gluebenchmark.com/tasks
``squad/``              ``train-v1.1.json`` and ``dev-v1.1.json``: rajpurkar.github.io/SQuAD-explorer; or
                        ``xquad.en.json`` of XQuAD, of which a quarter of the articles becomes dev
``mnist/``              ``train-images-idx3-ubyte.gz``, ``train-labels-idx1-ubyte.gz`` and the same of ``t10k``; or
                        the latter alone, of which a fifth becomes dev
``imagenet/train/``     a directory of images for each class, and likewise ``imagenet/val/``: image-net.org
======================  ===========================================================================================

The digits come with scikit-learn.
"""

from __future__ import annotations

#: The tasks of :mod:`export.tasks.registry`, here so that a command line can name them without NumPy or torch.
NAMES = (
    *("SST-2", "CoLA", "STS-B", "MRPC", "RTE", "WNLI", "QNLI", "MNLI", "QQP"),
    *("SQuAD", "MNIST", "digits", "ImageNet"),
)
#: The tasks whose headline metrics are averaged. WNLI stands apart: its dev set contradicts its training set, so that
#: what learns is worse than chance on it. The others are too large to be trained by everyone.
AVERAGED = ("SST-2", "CoLA", "STS-B", "MRPC", "RTE")
