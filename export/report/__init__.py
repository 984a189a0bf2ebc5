"""What a fine-tuned run was trained on and how well it does, as numbers and as a page."""
