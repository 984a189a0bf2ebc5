"""Language models: text formats, tokenizers, training, the heads of paper 004, and export as decoders."""
