"""Between training checkpoints and Hugging Face folders."""
