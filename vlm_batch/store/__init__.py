"""State that outlives a row: saved rows, prefixes, prompt caches, files, vision features, and their budget."""
