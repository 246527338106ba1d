"""What ended rows leave for later ones: saved rows, prefixes, prompt caches, files, vision features, and their budget."""
