"""Any encoder as one type: checkpoints, exports and Hugging Face folders, from texts to arrays."""
