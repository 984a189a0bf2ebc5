"""Fine-tuned Hugging Face directories as runs: heads, labels, sentence-transformers, parity."""
