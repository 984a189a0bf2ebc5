"""Language models: text formats, training, fine-tuning, reduction and export.

- :mod:`export.language.formats` and :mod:`export.language.answers` read data sets as one text format, from
  :mod:`export.language.rows`; ``generate_mathematics.py`` is a script that makes one of them
- :mod:`export.language.tokenizer` and :mod:`export.language.backbone` make, read and write tokenizers and models,
  whose files :mod:`export.language.files` names
- :mod:`export.language.objective`, :mod:`export.language.recipes` and :mod:`export.language.train` train small models
- :mod:`export.language.decoding`, :mod:`export.language.metrics` and :mod:`export.language.evaluate` measure any
- :mod:`export.language.reduce` removes heads and neurons, which :mod:`export.language.parts` finds in a model, by the
  scores of :mod:`export.language.ranking` from :mod:`export.language.calibration`
- :mod:`export.language.finetuned` makes copies of a model to train, with adapters or whole; :mod:`export.language.nf4`
  rounds the base of adapters, and :mod:`export.language.finetune` trains and writes them
- :mod:`export.language.base` has a frozen model, with its :mod:`export.language.read_out`
- :mod:`export.language.decoder` makes the graph of a model for a device, :mod:`export.language.joined_cache` its form
  for TensorRT, :mod:`export.language.decoder_artifacts` its precisions, :mod:`export.language.bundle` the bundle with
  :mod:`export.language.golden_texts`
- :mod:`export.language.commands` has all commands: those of :mod:`export.language.cli`, which prints
  :mod:`export.language.table`, of :mod:`export.papers.backward.run`,
  :mod:`export.language.finetune_cli`, :mod:`export.language.reduce_cli` and :mod:`export.language.export_cli`
"""
