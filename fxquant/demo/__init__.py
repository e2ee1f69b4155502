"""What the demonstration needs: handwritten digits, a small network and its training."""
