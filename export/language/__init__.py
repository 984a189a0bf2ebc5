"""Language models: text formats, training, fine-tuning, reduction and export.

- :mod:`export.generate.formats` and :mod:`export.generate.answers` read data sets as one text format, from
  :mod:`export.generate.rows`; ``generate_mathematics.py`` is a script that makes one of them
- :mod:`export.generate.tokenizer` and :mod:`export.generate.backbone` make, read and write tokenizers and models,
  whose files :mod:`export.generate.files` names
- :mod:`export.generate.objective`, :mod:`export.generate.recipes` and :mod:`export.generate.train` train small models
- :mod:`export.generate.decoding`, :mod:`export.generate.metrics` and :mod:`export.generate.evaluate` measure any
- :mod:`export.generate.reduce` removes heads and neurons, which :mod:`export.generate.parts` finds in a model, by the
  scores of :mod:`export.generate.ranking` from :mod:`export.generate.calibration`
- :mod:`export.generate.finetuned` makes copies of a model to train, with adapters or whole; :mod:`export.generate.nf4`
  rounds the base of adapters, and :mod:`export.generate.finetune` trains and writes them
- :mod:`export.generate.base` has a frozen model, with its :mod:`export.generate.read_out`
- :mod:`export.generate.decoder` makes the graph of a model for a device, :mod:`export.generate.joined_cache` its form
  for TensorRT, :mod:`export.generate.decoder_artifacts` its precisions, :mod:`export.generate.bundle` the bundle with
  :mod:`export.generate.golden_texts`
- :mod:`export.commands.language_group` has all commands: those of :mod:`export.commands.language`, which prints
  :mod:`export.generate.table`, of :mod:`export.papers.backward.run`,
  :mod:`export.commands.language_finetune`, :mod:`export.commands.language_reduce` and :mod:`export.commands.language_export`
"""
