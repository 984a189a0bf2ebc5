"""Language models: text formats, training, fine-tuning, reduction and export."""
