"""State that outlives a row: saved rows, the prefix cache, prompt caches, files, vision features, and one budget for all."""
