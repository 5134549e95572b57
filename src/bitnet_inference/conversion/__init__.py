"""A checkpoint and its tokenizer become a file of another format, a tensor at a time."""
