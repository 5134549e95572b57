"""Words: tokenizer, chat templates, incremental detokenising."""
