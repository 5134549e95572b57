"""The story grammar: it writes an unlimited, seeded corpus of short stories and of conversations about them."""
