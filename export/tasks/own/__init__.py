"""Tasks on a user's own data: texts in tables, or images in folders.

Tables are CSV, TSV, JSON Lines, Parquet, or a directory that Hugging Face's ``datasets`` saved. A directory with a file
or folder for each split (``train`` and, for the published metrics, ``dev``, ``validation`` or ``test``) has its own
dev; otherwise a fifth of the rows is dev. A tenth of what is left is held out for choices.
"""
