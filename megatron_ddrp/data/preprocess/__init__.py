"""Preprocessing: from text files of several formats to an indexed dataset."""
