"""What a model is, as data: its architecture, and where each slice of a Hugging Face tensor lives in each engine."""
