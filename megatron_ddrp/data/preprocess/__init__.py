"""From text in any of its files to an indexed dataset."""
