"""What a text may look like: schemas, regular expressions, grammars and choices, and the tokens that they leave."""
