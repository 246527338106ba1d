"""What makes the documentation's site: notebooks with their outputs, pages from docs/, and mkdocs over both."""
