"""Downstream evaluation of pre-trained encoders."""
