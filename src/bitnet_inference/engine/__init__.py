"""Runs requests on a Model: knows token ids and numbers, no text and no tensors of any library but NumPy."""
