"""What a trained model is worth: its loss by length and position, and whether it finds a fact in a long document."""
