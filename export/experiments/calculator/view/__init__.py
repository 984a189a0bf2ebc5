"""What a calculator does: its error by operands and by length, and what it attends to."""
